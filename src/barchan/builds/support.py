"""What of a Dockerfile is supported: one row for each instruction. Pure; docs/reference/dockerfile.md is made from it."""

from __future__ import annotations

import msgspec


class Support(msgspec.Struct, frozen=True, kw_only=True):
    """What may be written. `refused` is the hint of the error, for what may not at all."""

    means: str
    """For people, one line."""
    valued: tuple[str, ...] = ()
    """Options that have a value."""
    bare: tuple[str, ...] = ()
    """Options that may stand alone."""
    repeated: tuple[str, ...] = ()
    """Those of them that may be given more than once."""
    unsupported: dict[str, str] = {}
    """Options that Docker has and barchan has not, with a hint."""
    refused: str = ""
    least: int = 1
    """Arguments."""
    most: int = 0
    """0: any number."""
    exec_only: bool = False
    layer: bool = False
    """It makes a layer; the others change what the image says."""

    @property
    def flags(self) -> frozenset[str]:
        return frozenset((*self.valued, *self.bare))


_COPYING = ("chown", "chmod", "exclude")
_HEALTH = ("interval", "timeout", "start-period", "start-interval", "retries")
_REMOTE = "fetch it in a RUN with an open network"

INSTRUCTIONS: dict[str, Support] = {
    "FROM": Support(
        means="An environment by name, an image of a registry, an earlier stage, or `scratch`. `--platform` must be linux/amd64.",
        valued=("platform",),
        most=3,
    ),
    "ARG": Support(
        means="As in Docker, before the first FROM too; with `--build-arg`, defaults and the proxy variables."
    ),
    "ENV": Support(means="As in Docker."),
    "RUN": Support(
        means="Shell and exec form, heredocs. `--network` is `default` or `none`.",
        valued=("network",),
        unsupported={
            "mount": "copy what it needs, or keep the cache in the layer",
            "security": "a sandbox has no privileges to give",
            "device": "a sandbox has no devices",
        },
        layer=True,
    ),
    "COPY": Support(
        means="From the context, a stage or another image; wildcards, heredocs, `.dockerignore`. Owners are root unless `--chown` says otherwise; `--chmod` is octal.",
        valued=(*_COPYING, "from"),
        bare=("link",),
        repeated=("exclude",),
        unsupported={"parents": "copy each directory to its place"},
        least=2,
        layer=True,
    ),
    "ADD": Support(
        means="As COPY from the context, and unpacks tar archives (plain, gzip, bzip2, xz). Nothing is fetched.",
        valued=_COPYING,
        bare=("link", "unpack"),
        repeated=("exclude",),
        unsupported={"checksum": _REMOTE, "keep-git-dir": _REMOTE},
        least=2,
        layer=True,
    ),
    "WORKDIR": Support(means="As in Docker: made if it is missing, for the user of that moment.", most=1, layer=True),
    "USER": Support(means="Name or id, with `:group`; looked up in the sandbox.", most=1),
    "SHELL": Support(means="As in Docker.", exec_only=True),
    "CMD": Support(means="Kept in what the environment says of itself.", least=0),
    "ENTRYPOINT": Support(means="Kept in what the environment says of itself.", least=0),
    "LABEL": Support(means="Kept in what the environment says of itself."),
    "EXPOSE": Support(means="Ignored, with a note."),
    "VOLUME": Support(means="Ignored, with a note: the directory is one as any other."),
    "STOPSIGNAL": Support(means="Ignored, with a note.", most=1),
    "HEALTHCHECK": Support(means="Ignored, with a note.", valued=_HEALTH),
    "MAINTAINER": Support(means="Ignored, with a note: use a LABEL."),
    "ONBUILD": Support(means="Refused.", refused="write the instructions where they are to be carried out", least=0),
}

IGNORED = frozenset(("EXPOSE", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "MAINTAINER"))
