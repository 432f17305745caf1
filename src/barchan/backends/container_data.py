"""Data mounts of containers: the administrator's directories, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from barchan.errors import CreateFailed, InvalidRequest
from barchan.kernel import directories, views
from barchan.spec import SandboxSpec


class DataMounts:
    """A view of its own of each directory for each sandbox."""

    def __init__(self, sources: Mapping[str, Path], nothing: Path) -> None:
        """`nothing` becomes an empty directory."""
        self._sources = sources
        self._nothing = nothing
        if sources:
            directories.private(nothing)

    def open(self, spec: SandboxSpec) -> list[tuple[int, str]]:
        """Detached mounts and their targets; the caller closes them. `CreateFailed` leaves none open."""
        opened: list[tuple[int, str]] = []
        for mount in spec.mounts:
            try:
                fd = views.view(self._sources[mount.source], self._nothing, noexec=mount.noexec)
            except OSError as error:  # the path is the administrator's business alone
                for fd, _ in opened:
                    os.close(fd)
                raise CreateFailed(
                    f"the directory of data mount {mount.source!r} cannot be used: {error.strerror}", phase="data"
                ) from None
            opened.append((fd, mount.target))
        return opened


def check_sources(spec: SandboxSpec, sources: Mapping[str, Path]) -> None:
    """Raises `InvalidRequest`, which names what there is: names, never paths."""
    missing = sorted({mount.source for mount in spec.mounts} - sources.keys())
    if missing:
        raise InvalidRequest(
            f"mounts: no data mount {missing[0]!r} on this node",
            field="mounts.source",
            hint=f"it has: {', '.join(sorted(sources))}" if sources else "its administrator gave it none",
        )
