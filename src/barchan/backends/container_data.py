"""Data mounts of containers: the administrator's directories, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from barchan.backends.container_steps import Draft
from barchan.errors import CreateFailed, InvalidRequest
from barchan.kernel import directories, views
from barchan.spec import SandboxSpec


class DataMounts:
    """A view of its own of each directory for each sandbox."""

    name = "data"

    def __init__(self, sources: Mapping[str, Path], nothing: Path) -> None:
        """`nothing` becomes an empty directory."""
        self._sources = sources
        self._nothing = nothing
        if sources:
            directories.private(nothing)

    def do(self, draft: Draft) -> None:
        assert draft.order is not None
        for mount in draft.order.spec.mounts:
            try:
                fd = views.view(self._sources[mount.source], self._nothing, noexec=mount.noexec)
            except OSError as error:  # the path is the administrator's business alone
                raise CreateFailed(
                    f"the directory of data mount {mount.source!r} cannot be used: {error.strerror}", phase=self.name
                ) from None
            draft.data.append((fd, mount.target))

    def undo(self, id: str) -> None:
        """Mounts go with their sandbox."""


def check_sources(spec: SandboxSpec, sources: Mapping[str, Path]) -> None:
    """Raises `InvalidRequest`, which names what there is: names, never paths."""
    missing = sorted({mount.source for mount in spec.mounts} - sources.keys())
    if missing:
        raise InvalidRequest(
            f"mounts: no data mount {missing[0]!r} on this node",
            field="mounts.source",
            hint=f"it has: {', '.join(sorted(sources))}" if sources else "its administrator gave it none",
        )
