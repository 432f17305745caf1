# Generated from src/barchan/sdk/_client.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""The client: one connection to one API."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from typing import Self, Unpack

import msgspec

from barchan.environments import Told
from barchan.errors import InvalidRequest
from barchan.locks import EnvironmentLock
from barchan.mounts import DataMount
from barchan.networks import NetworkMode, NetworkRules
from barchan.sdk._address import find_address
from barchan.sdk._options import SandboxOptions, checked, environment_of, image_name, spec_of
from barchan.sdk._sync import _compat
from barchan.sdk._sync._connection import Connection
from barchan.sdk._sync._many import Batch
from barchan.sdk._sync._sandbox import Sandbox
from barchan.sdk._values import hearing, value_of
from barchan.spec import (
    BackendName,
    EnvironmentRef,
    Limits,
    NodeInfo,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
)
from barchan.wire.ids import new_id
from barchan.wire.messages import (
    CreateMany,
    CreateSandbox,
    EnvironmentInfo,
    GetSandbox,
    ListEnvironments,
    ListNodes,
    ListSandboxes,
    LockEnvironment,
    PullImage,
    Request,
    unpack,
)


@_compat.exclusive
class Client:
    """Access to one barchan API: `with Client() as client`.

    Where: `url` (`https://host:port`, `http://host:port`, `unix:/path`), or the socket below the data directory `data`, or
    $BARCHAN_URL, or the socket below $BARCHAN_DATA (by default /var/lib/barchan). `token`, or $BARCHAN_TOKEN, is needed
    for all but the socket. `ca` is a file of certificates to trust beside the system's. The environment is read here, once.

    `timeout`: seconds that a short request may take (`RequestTimeout`). `reconnect`: seconds that a lost connection is dialled
    again before what is under way fails with `ApiUnavailable`. The connection is opened by the first request; when that finds no
    API, it fails at once.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        data: str | os.PathLike[str] | None = None,
        ca: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
        reconnect: float = 60.0,
    ) -> None:
        address = find_address(url, token, data, os.environ)
        for field, seconds in (("timeout", timeout), ("reconnect", reconnect)):
            if not isinstance(seconds, (int, float)):
                raise InvalidRequest(f"{field}: {seconds!r} is no number", field=field, hint="seconds")
        self._connection = Connection(address, reconnect=reconnect, tls=None if ca is None else _trusting(ca))
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<Client {self._connection.address}{' closed' if self._connection.closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up. Sandboxes and commands go on. Idempotent."""
        self._connection.close()

    def create(
        self,
        environment: str | EnvironmentRef | None = None,
        *,
        base: str | None = None,
        image: str | None = None,
        lock: EnvironmentLock | str | os.PathLike[str] | None = None,
        workspace: str | None = None,
        toolkits: Sequence[str] = (),
        backend: BackendName = "container",
        limits: Limits | None = None,
        network: NetworkRules | NetworkMode | None = None,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        hostname: str = "sandbox",
        idle_timeout: float = 3600.0,
        lifetime: float = 86400.0,
        setuid: bool = False,
        ptrace: bool = False,
        mounts: Sequence[DataMount] = (),
        key: str | None = None,
        timeout: float | None = 60.0,
        progress: Told | None = None,
    ) -> Sandbox:
        """Create a sandbox and return it when it is ready.

        `environment` is a base layer's name (`debian-12`, `debian-12@3`, a digest) or an `EnvironmentRef`; `image` instead is one
        of a registry (`debian:12`, `ghcr.io/owner/name@sha256:…`), which the node fetches first if it does not have it: give that
        some more `timeout`; `progress` is told how far it is. `workspace` and `toolkits` are stacked on either. `lock` instead of all of these is what `lock` returned, or the
        path of a lock file: exactly its layers, else `LockMismatch` or `EnvironmentNotFound`. `network` is `"deny"` or
        `"open"`. Meaning and units of the rest: `SandboxSpec`. `key` makes it idempotent: the same key and
        values answer with the same sandbox, other values with `Conflict`. A lost connection is retried with the same key.

        Raises `InvalidRequest` (`field` names what is wrong, or is more than any node has), `EnvironmentNotFound`, `LockMismatch`,
        `ImageNotFound`, `ImageDenied`, `RegistryUnavailable`, `AdmissionRefused` (no room now),
        `NotSupported`, `FeatureMissing` (no node has open networks), `CreateFailed` (`phase` says where), `LayerCorrupt`, `NodeStorageFull`, `NodeUnavailable`,
        `ApiUnavailable`, and `RequestTimeout` after `timeout` seconds.
        """
        spec = spec_of(
            environment_of(environment, base, image, lock, workspace, toolkits),
            backend=backend,
            limits=limits,
            network=network,
            labels=labels,
            env=env,
            secrets=secrets,
            user=user,
            workdir=workdir,
            hostname=hostname,
            idle_timeout=idle_timeout,
            lifetime=lifetime,
            setuid=setuid,
            ptrace=ptrace,
            mounts=mounts,
        )
        return self.create_from(spec, key=key, timeout=timeout, progress=progress)

    def create_from(
        self,
        spec: SandboxSpec,
        *,
        key: str | None = None,
        timeout: float | None = 60.0,
        progress: Told | None = None,
    ) -> Sandbox:
        """As `create`, from one request value."""
        request = CreateSandbox(spec=checked(spec), key=key or new_id())
        answer = self._connection.request(request, retry=True, timeout=timeout, on_frame=hearing(progress))
        return self._sandbox(unpack(answer, SandboxInfo))

    def create_many(
        self,
        count: int,
        environment: str | EnvironmentRef | None = None,
        *,
        key: str | None = None,
        **options: Unpack[SandboxOptions],
    ) -> Batch:
        """Create up to 10,000 sandboxes by one request, each yours as soon as it is ready. See `Batch`.

        `options` are those of `create`. With `key` (at most 56 characters), the same call again gives the same sandboxes.
        Nothing is sent before you iterate. Raises `InvalidRequest`.
        """
        return self.create_many_from(count, spec_of(environment, **options), key=key)

    def create_many_from(self, count: int, spec: SandboxSpec, *, key: str | None = None) -> Batch:
        """As `create_many`, from one request value."""
        request = value_of(CreateMany, spec=checked(spec), count=count, key=key or new_id())
        return Batch(self._connection, request, self._timeout)

    def get(self, id: str) -> Sandbox:
        """An existing sandbox, from any client. Raises `SandboxNotFound`."""
        return self._sandbox(unpack(self._ask(GetSandbox(sandbox=id)), SandboxInfo))

    def list(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        states: Sequence[SandboxState] = (),
        ended: bool = False,
        environment: str | None = None,
        backend: BackendName | None = None,
        node: str | None = None,
        prefix: str = "",
        created_after: float | None = None,
        created_before: float | None = None,
    ) -> tuple[SandboxInfo, ...]:
        """Sandboxes to which everything given applies, in the order of their ids.

        `labels`: it has all of these. `states`: it is in one of them; none given, it lives, or with `ended` it may have stopped
        or failed, as far as its node remembers (a day, 10,000 of them). `environment`: one of its layers has this name
        (`debian-12`, any version; `debian-12@3`), digest or image, or was asked for by it. `prefix`: what its id begins with. Times are Unix seconds.
        """
        request = value_of(
            ListSandboxes,
            labels=labels or {},
            states=states,
            ended=ended,
            environment=environment,
            backend=backend,
            node=node,
            prefix=prefix,
            created_after=created_after,
            created_before=created_before,
        )
        found: list[SandboxInfo] = []
        while True:
            page = unpack(self._ask(request), tuple[SandboxInfo, ...])
            found += page
            if len(page) < request.limit:
                return tuple(found)
            request = msgspec.structs.replace(request, after=page[-1].id)

    def environments(self) -> tuple[EnvironmentInfo, ...]:
        """Layers that can be named in `create`. `size` is bytes."""
        return unpack(self._ask(ListEnvironments()), tuple[EnvironmentInfo, ...])

    def pull(
        self,
        image: str,
        *,
        again: bool = True,
        node: str | None = None,
        timeout: float | None = None,
        progress: Told | None = None,
    ) -> EnvironmentInfo:
        """Fetch an image (`debian:12`) for sandboxes to come, on every node or on `node`; returns what it is on the first of them.

        `again`: ask its registry what a tag means now; otherwise an image of that tag which is there will do. `progress` is called with
        a `PullProgress` some times a second, where this client receives: it must be short, and not use the client. The image comes
        also if this call is cancelled or out of time; another joins it.

        Raises `InvalidRequest`, `ImageNotFound`, `ImageDenied`, `RegistryUnavailable`, `NodeStorageFull`, `NodeNotFound`.
        """
        wanted = value_of(PullImage, image=image_name(image), again=again, node=node)
        answer = self._connection.request(wanted, retry=True, timeout=timeout, on_frame=hearing(progress))
        return unpack(answer, EnvironmentInfo)

    def lock(
        self,
        environment: str | EnvironmentRef | None = None,
        *,
        base: str | None = None,
        image: str | None = None,
        workspace: str | None = None,
        toolkits: Sequence[str] = (),
    ) -> EnvironmentLock:
        """What the names of an environment mean now. `str` of it is the text of a lock file; `create(lock=…)` takes it.

        Images must be here already. Raises `EnvironmentNotFound`, `InvalidRequest`.
        """
        wanted = environment_of(environment, base, image, None, workspace, toolkits)
        return unpack(self._ask(LockEnvironment(environment=wanted)), EnvironmentLock)

    def nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes connected to the API, as they described themselves last."""
        return unpack(self._ask(ListNodes()), tuple[NodeInfo, ...])

    def _sandbox(self, info: SandboxInfo) -> Sandbox:
        return Sandbox(self._connection, info, self._timeout)

    def _ask(self, request: Request) -> bytes:
        return self._connection.request(request, retry=True, timeout=self._timeout)


def _trusting(ca: str | os.PathLike[str]) -> ssl.SSLContext:
    """Raises `InvalidRequest`."""
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cafile=os.fspath(ca))
    except (OSError, TypeError, ValueError) as error:
        why = (
            "holds no certificate" if isinstance(error, ssl.SSLError) else getattr(error, "strerror", None) or "no path"
        )
        raise InvalidRequest(f"ca: {ca!s}: {why.lower()}", field="ca", hint="a file of certificates in PEM") from error
    return context
