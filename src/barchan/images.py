"""What an image says about the programs that are started in it, and what a request for a sandbox means with it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from barchan.spec import EnvironmentRef, SandboxSpec, check_env, check_no_nul, check_user, check_workdir

ROOT, TOP = "root", "/"
"""User and directory of what says neither."""


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an image says about programs started in it; a layer that was made of a directory or an archive says nothing."""

    env: dict[str, str] = {}
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    labels: dict[str, str] = {}


NO_CONFIG = ImageConfig()


def check_config(config: ImageConfig) -> ImageConfig:
    """Raises `InvalidRequest`. Returns the same value."""
    for key, value in config.env.items():
        check_env(key.encode(), value.encode(), "env")
    if config.user:
        check_user(config.user)
    check_workdir(config.workdir or TOP)
    for word in (*config.entrypoint, *config.command):
        check_no_nul(word.encode(), "entrypoint")
    return config


def stacked(configs: Iterable[ImageConfig]) -> ImageConfig:
    """Of images on top of each other, the lowest first: variables and labels are joined, of the rest the highest word counts.

    An image that has an entrypoint or a command brings both, as they belong together.
    """
    whole = NO_CONFIG
    for config in configs:
        if config == NO_CONFIG:
            continue
        starts = config if config.entrypoint or config.command else whole
        whole = ImageConfig(
            env={**whole.env, **config.env},
            user=config.user or whole.user,
            workdir=config.workdir or whole.workdir,
            entrypoint=starts.entrypoint,
            command=starts.command,
            labels={**whole.labels, **config.labels},
        )
    return whole


def renamed(environment: EnvironmentRef, names: Sequence[str]) -> EnvironmentRef:
    """The same parts by other names, in the order of `EnvironmentRef.names`, and what they were called before."""
    base, *above = names
    workspace = above.pop(0) if environment.workspace else None
    return EnvironmentRef(
        base=base, workspace=workspace, toolkits=tuple(above), asked=environment.asked or environment.names()
    )


def settled(spec: SandboxSpec, environment: EnvironmentRef, config: ImageConfig) -> SandboxSpec:
    """With what the environment decides where the request says nothing."""
    return msgspec.structs.replace(
        spec,
        environment=environment,
        env={**config.env, **spec.env} if config.env else spec.env,
        user=config.user or ROOT if spec.user is None else spec.user,
        workdir=config.workdir or TOP if spec.workdir is None else spec.workdir,
    )
