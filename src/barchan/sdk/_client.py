"""The client: one connection to one API."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from barchan.errors import InvalidRequest
from barchan.sdk._address import find_address
from barchan.sdk._connection import Connection
from barchan.sdk._sandbox import Sandbox
from barchan.sdk._values import value_of
from barchan.spec import (
    BackendName,
    EnvironmentRef,
    Limits,
    NetworkRules,
    NodeInfo,
    SandboxInfo,
    SandboxSpec,
    check_spec,
)
from barchan.wire.ids import new_id
from barchan.wire.messages import (
    CreateSandbox,
    EnvironmentInfo,
    GetSandbox,
    ListEnvironments,
    ListNodes,
    ListSandboxes,
    Request,
    unpack,
)


class Client:
    """Access to one barchan API: `async with Client() as client`.

    Where: `url` (`https://host:port`, `http://host:port`, `unix:/path`), or the socket below the data directory `data`, or
    $BARCHAN_URL, or the socket of the default data directory. `token`, or $BARCHAN_TOKEN, is needed for all but the socket.
    `ca` is a file of certificates to trust beside the system's. The environment is read here, once.

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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up. Sandboxes and commands go on. Idempotent."""
        await self._connection.close()

    async def create(
        self,
        environment: str | EnvironmentRef | None = None,
        *,
        base: str | None = None,
        workspace: str | None = None,
        toolkits: Sequence[str] = (),
        backend: BackendName = "container",
        limits: Limits | None = None,
        network: NetworkRules | None = None,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        user: str = "root",
        workdir: str = "/",
        hostname: str = "sandbox",
        idle_timeout: float = 3600.0,
        lifetime: float = 86400.0,
        setuid: bool = False,
        ptrace: bool = False,
        key: str | None = None,
        timeout: float = 60.0,
    ) -> Sandbox:
        """Create a sandbox and return it when it is ready.

        `environment` is a base layer's name (`debian-12`, `debian-12@3`, a digest) or an `EnvironmentRef`; `workspace` and
        `toolkits` are stacked on it. Meaning and units of the rest: `SandboxSpec`. `key` makes it idempotent: the same key and
        values answer with the same sandbox, other values with `Conflict`. A lost connection is retried with the same key.

        Raises `InvalidRequest` (`field` names what is wrong, or is more than any node has), `EnvironmentNotFound`,
        `AdmissionRefused` (no room now),
        `NotSupported`, `CreateFailed` (`phase` says where), `LayerCorrupt`, `NodeStorageFull`, `NodeUnavailable`,
        `ApiUnavailable`, and `RequestTimeout` after `timeout` seconds.
        """
        spec = value_of(
            SandboxSpec,
            environment=_reference(environment, base, workspace, toolkits),
            backend=backend,
            limits=limits or Limits(),
            network=network or NetworkRules(),
            labels=labels or {},
            env=env or {},
            secrets=secrets or {},
            user=user,
            workdir=workdir,
            hostname=hostname,
            idle_timeout=idle_timeout,
            lifetime=lifetime,
            setuid=setuid,
            ptrace=ptrace,
        )
        return await self.create_from(spec, key=key, timeout=timeout)

    async def create_from(self, spec: SandboxSpec, *, key: str | None = None, timeout: float = 60.0) -> Sandbox:
        """As `create`, from one request value."""
        if not isinstance(spec, SandboxSpec):
            raise InvalidRequest(f"spec: {type(spec).__name__} is no SandboxSpec", field="spec", hint="see `create`")
        spec = value_of(SandboxSpec, **msgspec.structs.asdict(spec))
        request = CreateSandbox(spec=check_spec(spec), key=key or new_id())
        answer = await self._connection.request(request, retry=True, timeout=timeout)
        return self._sandbox(unpack(answer, SandboxInfo))

    async def get(self, id: str) -> Sandbox:
        """An existing sandbox, from any client. Raises `SandboxNotFound`."""
        return self._sandbox(unpack(await self._ask(GetSandbox(sandbox=id)), SandboxInfo))

    async def list(self, labels: Mapping[str, str] | None = None) -> tuple[SandboxInfo, ...]:
        """Sandboxes that have all these labels."""
        found: list[SandboxInfo] = []
        while True:
            request = value_of(ListSandboxes, labels=labels or {}, after=found[-1].id if found else "")
            page = unpack(await self._ask(request), tuple[SandboxInfo, ...])
            found += page
            if len(page) < request.limit:
                return tuple(found)

    async def environments(self) -> tuple[EnvironmentInfo, ...]:
        """Layers that can be named in `create`. `size` is bytes."""
        return unpack(await self._ask(ListEnvironments()), tuple[EnvironmentInfo, ...])

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes connected to the API, as they described themselves last."""
        return unpack(await self._ask(ListNodes()), tuple[NodeInfo, ...])

    def _sandbox(self, info: SandboxInfo) -> Sandbox:
        return Sandbox(self._connection, info, self._timeout)

    async def _ask(self, request: Request) -> bytes:
        return await self._connection.request(request, retry=True, timeout=self._timeout)


def _reference(
    environment: str | EnvironmentRef | None, base: str | None, workspace: str | None, toolkits: Sequence[str]
) -> EnvironmentRef:
    if isinstance(environment, EnvironmentRef):
        if base is not None or workspace is not None or toolkits:
            raise InvalidRequest("environment: already says which layers", field="environment")
        return environment
    if (environment is None) == (base is None):
        raise InvalidRequest("environment: give it, or base", field="environment")
    if isinstance(toolkits, str):
        raise InvalidRequest("toolkits: give a list of names", field="toolkits")
    return value_of(EnvironmentRef, base=environment or base or "", workspace=workspace, toolkits=toolkits)


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
