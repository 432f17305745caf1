"""What a sandbox shall be like: the keyword arguments of `create` and `create_many`, and the value they make."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import msgspec

from barchan.errors import InvalidRequest
from barchan.image_refs import SCHEME, is_image
from barchan.locks import EnvironmentLock, read_lock
from barchan.mounts import DataMount
from barchan.networks import NetworkMode, NetworkRules
from barchan.sdk._values import value_of
from barchan.spec import BackendName, EnvironmentRef, Limits, SandboxSpec, check_spec


class SandboxOptions(TypedDict, total=False):
    """As the arguments of `create` of the same names."""

    base: str | None
    image: str | None
    lock: EnvironmentLock | str | os.PathLike[str] | None
    workspace: str | None
    toolkits: Sequence[str]
    backend: BackendName
    limits: Limits | None
    network: NetworkRules | NetworkMode | None
    labels: Mapping[str, str] | None
    env: Mapping[str, str] | None
    secrets: Mapping[str, str] | None
    user: str | None
    workdir: str | None
    hostname: str
    idle_timeout: float
    lifetime: float
    setuid: bool
    ptrace: bool
    mounts: Sequence[DataMount]


def spec_of(environment: str | EnvironmentRef | None, **options: Unpack[SandboxOptions]) -> SandboxSpec:
    """Raises `InvalidRequest`."""
    base, workspace = options.pop("base", None), options.pop("workspace", None)
    image, lock = options.pop("image", None), options.pop("lock", None)
    reference = environment_of(environment, base, image, lock, workspace, options.pop("toolkits", ()))
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if isinstance(network := given.get("network"), str):
        given["network"] = {"mode": network}
    return check_spec(value_of(SandboxSpec, environment=reference, **given))


def environment_of(
    environment: str | EnvironmentRef | None,
    base: str | None,
    image: str | None,
    lock: EnvironmentLock | str | os.PathLike[str] | None,
    workspace: str | None,
    toolkits: Sequence[str],
) -> EnvironmentRef:
    """From the one of the first four that is given. Raises `InvalidRequest`."""
    if lock is not None:
        if toolkits or not (environment is base is image is workspace is None):
            raise InvalidRequest("lock: it says which layers; give it alone", field="lock")
        return (lock if isinstance(lock, EnvironmentLock) else lock_at(lock)).environment
    if image is not None:
        if base is not None or environment is not None:
            raise InvalidRequest("image: give it, or an environment", field="image")
        base = image_name(image)
    return _reference(environment, base, workspace, toolkits)


def image_name(image: str) -> str:
    """With `docker://` in front, which an image may do without where nothing else can be meant."""
    if not isinstance(image, str):
        raise InvalidRequest(f"image: {type(image).__name__} is no text", field="image", hint="give a str")
    return image if is_image(image) else SCHEME + image


def lock_at(path: str | os.PathLike[str]) -> EnvironmentLock:
    """Of a lock file. Raises `InvalidRequest`."""
    try:
        return read_lock(Path(path).read_bytes())
    except (OSError, TypeError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest(f"lock: {path}: {why.lower()}", field="lock", hint="the path of a lock file") from error


def checked(spec: SandboxSpec) -> SandboxSpec:
    """A value that a caller made. Raises `InvalidRequest`."""
    if not isinstance(spec, SandboxSpec):
        raise InvalidRequest(f"spec: {type(spec).__name__} is no SandboxSpec", field="spec", hint="see `create`")
    return check_spec(value_of(SandboxSpec, **msgspec.structs.asdict(spec)))


def _reference(
    environment: str | EnvironmentRef | None, base: str | None, workspace: str | None, toolkits: Sequence[str]
) -> EnvironmentRef:
    if isinstance(environment, EnvironmentRef):
        if base is not None or workspace is not None or toolkits:
            raise InvalidRequest("environment: already says which layers", field="environment")
        return environment
    if (environment is None) == (base is None):
        raise InvalidRequest("environment: give it, or base, or image", field="environment")
    if isinstance(toolkits, str):
        raise InvalidRequest("toolkits: give a list of names", field="toolkits")
    return value_of(EnvironmentRef, base=environment or base or "", workspace=workspace, toolkits=toolkits)
