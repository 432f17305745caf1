"""Control groups: which hierarchies this host has, and one group per sandbox in each that is needed.

Three layouts are told apart by facts, never by the distribution:

    v2       cgroup2 at /sys/fs/cgroup holds memory, cpu and pids
    hybrid   v1 hierarchies hold some of them, cgroup2 is mounted beside them (for kill, freeze, pressure)
    v1       no cgroup2 is mounted

Only groups below the parent of this installation are made, changed or removed; the host's hierarchies are never
unmounted, and every path is absolute.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from barchan.errors import FeatureMissing
from barchan.kernel import directories, groups, mounts
from barchan.kernel.groups import Group
from barchan.spec import Limits

CONTROLLERS = ("memory", "cpu", "pids")
_DELEGATED = ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads")


class CgroupLayout(msgspec.Struct, frozen=True):
    """Where the controllers are on this host."""

    unified: Path | None
    """Mount point of cgroup2."""
    unified_controllers: frozenset[str]
    v1: dict[str, Path]
    """Mount point of each needed controller that a v1 hierarchy holds."""

    @property
    def kind(self) -> Literal["v2", "hybrid", "v1"]:
        if self.unified is None:
            return "v1"
        return "hybrid" if self.v1 else "v2"

    def missing(self) -> tuple[str, ...]:
        """Controllers that no hierarchy offers."""
        return tuple(c for c in CONTROLLERS if c not in self.unified_controllers and c not in self.v1)

    def describe(self) -> str:
        """One message about what this host lacks and how to get it; empty when it lacks nothing."""
        if self.unified is None:
            return "no cgroup2 is mounted: mount it with `mount -t cgroup2 none DIR`, or boot with cgroup v2"
        if missing := self.missing():
            return f"no cgroup controller for {', '.join(missing)}: enable it (kernel option cgroup_enable=, or delegation)"
        if "memory" in self.v1:
            held = ", ".join(f"{name} at {path}" for name, path in sorted(self.v1.items()))
            return (
                f"cgroup v1 holds {held}: limits work, memory.high, memory.reclaim and swap control per sandbox do not;"
                " boot with systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all for them"
            )
        return ""


def layout_of(mounted: Iterable[mounts.MountPoint], unified_controllers: Iterable[str]) -> CgroupLayout:
    """Pure: the layout that a mount table and cgroup2's list of controllers describe."""
    table = tuple(mounted)
    unified = next((Path(m.path) for m in table if m.fstype == "cgroup2"), None)
    v1 = {c: Path(m.path) for c in CONTROLLERS for m in table if m.fstype == "cgroup" and c in m.options}
    return CgroupLayout(unified, frozenset(unified_controllers), v1)


def detect() -> CgroupLayout:
    table = mounts.current()
    unified = layout_of(table, ()).unified
    offered = (unified / "cgroup.controllers").read_text().split() if unified else ()
    return layout_of(table, offered)


class GroupTree:
    """The groups of one installation: `<hierarchy>/<name>/<sandbox id>` in every hierarchy in use.

    The owner given to `make` gets the cgroup2 group of that sandbox, so that the guest's first process can sort its
    commands into sub-groups; limits stay root's. Nobody else can look into a group or start at it from a path: all
    are 0700. Every method may be called again after it was interrupted. Controllers in `without` are not used.
    """

    def __init__(self, layout: CgroupLayout, name: str, without: frozenset[str] = frozenset()) -> None:
        if layout.unified is None or layout.missing():
            raise FeatureMissing("cgroups: " + layout.describe(), hint="see `barchan doctor`", phase="cgroup")
        self._layout = layout
        self.unified = layout.unified / name
        self._controllers = tuple(c for c in CONTROLLERS if c not in without)
        self.v1 = {controller: path / name for controller, path in layout.v1.items() if controller not in without}
        self.texts = functools.lru_cache(maxsize=64)(self._texts)
        """`texts(limits)`: limits for the spawner (native/spawn.h); v1 hierarchies are numbered as in `parents_v1`."""
        self._on_v2 = tuple(c for c in self._controllers if c not in layout.v1)

    @property
    def parents_v1(self) -> tuple[Path, ...]:
        """Of v1 groups, one for each hierarchy."""
        return tuple(dict.fromkeys(self.v1.values()))

    def prepare(self) -> None:
        """Make the parents and hand the controllers down to them. All groups are closed to others, also old ones."""
        for parent in self._parents():
            directories.private(parent)
            for group in _below(parent):
                with contextlib.suppress(FileNotFoundError):
                    group.chmod(0o700)
        if self._on_v2:
            root = self.unified.parent
            _enable(root, self._on_v2, spare=root / f"{self.unified.name}.rest")
            _enable(self.unified, self._on_v2, spare=None)

    def make(self, sandbox: str, limits: Limits, owner: int) -> Group:
        """The groups of a sandbox with its limits set; the caller closes the result."""
        for parent in self._parents():
            directories.private(f"{parent}/{sandbox}")
        try:
            self.limit(sandbox, limits)
            for name in _DELEGATED:
                os.chown(f"{self.unified}/{sandbox}/{name}", owner, owner)
            return self._opened(sandbox)
        except OSError:
            self.destroy(sandbox)
            raise

    def limit(self, sandbox: str, limits: Limits) -> None:
        """Set or change its limits."""
        for controller in self._controllers:
            v1 = self.v1.get(controller)
            groups.set_limit(controller, f"{v1 or self.unified}/{sandbox}", limits, v1=v1 is not None)

    def _texts(self, limits: Limits) -> tuple[str, ...]:
        numbers = {parent: str(number) for number, parent in enumerate(self.parents_v1)}
        return tuple(
            f"{'?' * write.optional}{numbers[v1] if v1 else 'v2'}/{write.file}={write.value}"
            for controller in self._controllers
            for v1 in (self.v1.get(controller),)
            for write in groups.limit_writes(controller, limits, v1=v1 is not None)
        )

    def named(self, sandbox: str) -> Group:
        """The groups of a sandbox, whether or not there are any."""
        return Group.unopened(sandbox, self.unified / sandbox, {c: path / sandbox for c, path in self.v1.items()})

    def open(self, sandbox: str) -> Group | None:
        """The groups of a sandbox made earlier, perhaps by a process that is gone; None unless all are there."""
        if not all((parent / sandbox).is_dir() for parent in self._parents()):
            return None
        return self._opened(sandbox)

    def list(self) -> frozenset[str]:
        """Ids that have a group in any hierarchy."""
        return frozenset(group.name for parent in self._parents() if parent.is_dir() for group in _below(parent))

    def destroy(self, sandbox: str, timeout: float = 5.0) -> None:
        """Kill what is in it, wait for the end, remove it. `TimeoutError` after `timeout` seconds."""
        for parent in self._parents():
            groups.end(parent / sandbox, timeout)

    def close(self) -> None:
        """Remove the parents. `OSError` EBUSY when sandboxes still have groups in them."""
        for parent in self._parents():
            try:
                parent.rmdir()
            except FileNotFoundError:
                continue

    def _opened(self, sandbox: str) -> Group:
        return Group.open(sandbox, self.unified / sandbox, {c: path / sandbox for c, path in self.v1.items()})

    def _parents(self) -> tuple[Path, ...]:
        """cgroup2 first: killing there ends what is in the v1 groups as well."""
        return (self.unified, *self.parents_v1)


def _below(parent: Path) -> list[Path]:
    return [Path(entry) for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)]


def _enable(group: Path, controllers: Iterable[str], spare: Path | None) -> None:
    """Offer controllers to the children of a group, one at a time so that an error names one."""
    control = group / "cgroup.subtree_control"
    have = control.read_text().split()
    for controller in controllers:
        if controller in have:
            continue
        try:
            control.write_text(f"+{controller}")
        except OSError as error:
            if error.errno != errno.EBUSY or spare is None:
                raise FeatureMissing(
                    f"cgroup controller {controller} cannot be enabled at {group}: {error.strerror}",
                    hint="delegate it (systemd: Delegate=yes)",
                    phase="cgroup",
                ) from error
            _make_room(group, spare)
            control.write_text(f"+{controller}")


def _make_room(group: Path, spare: Path) -> None:
    """Below the real root (in a container) a group with processes of its own cannot offer controllers: move them
    one level down, as every container-in-container set-up has to."""
    directories.private(spare)
    for pid in (group / "cgroup.procs").read_text().split():
        try:
            (spare / "cgroup.procs").write_text(pid)
        except ProcessLookupError:
            continue
