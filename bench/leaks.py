"""What a server holds of its host, and what is left of it: read from the kernel, not from the server.

All functions return what they found that should not be there, one line each.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from barchan.kernel import btrfs

CLEANED = 30.0
AHEAD = "pool-"
"""How the names begin of what is made ahead."""
PIDFD, TREE = "anon_inode:[pidfd]", "/"
RANGES = Path("/run/barchan/ids")
_ID = re.compile(r"kill-[0-9a-z]{20}")


def of_sandboxes(data: Path, instance: str, node: int) -> list[str]:
    """With the server up and every sandbox gone; what it made ahead may be there. `node`: pid of its agent."""
    return [
        *(f"{kind} {name}" for kind, name in places(data, instance) if not name.startswith(AHEAD)),
        *(f"quota group 0/{number}" for number in quota_groups(data / "scratch")),
        *(f"the agent holds {name}" for name in descriptors(node) if _ID.search(name)),
        *surplus(node, ahead(data, instance)),
        *(f"the agent holds a dead process ({fd})" for fd in dead_pidfds(node)),
    ]


def places(data: Path, instance: str) -> Iterator[tuple[str, str]]:
    """What each sandbox and each one made ahead has of its own, with its name."""
    yield from (("cgroup", Path(path).name) for path in groups(instance, below=True))
    yield from (("subvolume", path.name) for path in (data / "scratch").glob("[!.]*"))
    yield from (("id range", os.readlink(path).partition("/")[2]) for path in ranges(instance))


def ahead(data: Path, instance: str) -> int:
    """How many are there that were made ahead."""
    return len({name for _, name in places(data, instance) if name.startswith(AHEAD)})


def of_server(data: Path, instance: str) -> list[str]:
    """With the server taken down."""
    return [
        *(f"cgroup {path}" for path in groups(instance, below=False)),
        *processes(data, instance),
        *mounts(data),
        *loops(data),
        *(f"socket {path}" for path in (data / "run").rglob("*") if path.is_socket()),
        *(f"id range {path.name}" for path in ranges(instance)),
    ]


def groups(instance: str, *, below: bool) -> Iterator[str]:
    """Of every hierarchy, v1 and v2."""
    parents = [Path(at, name) for at, names, _ in os.walk("/sys/fs/cgroup") for name in names if instance in name]
    for parent in parents:
        left = [path for path in parent.iterdir() if path.is_dir()] if below else [parent]
        yield from map(str, left)


def processes(data: Path, instance: str) -> Iterator[str]:
    """Whose command line, working directory, root, open file or cgroup is the server's."""
    names = (str(data).encode(), f"barchan-{instance}".encode())
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            said = (entry / "cmdline").read_bytes() + (entry / "cgroup").read_bytes()
            links = [os.readlink(entry / name).encode() for name in ("cwd", "root")]
        except OSError:
            continue
        if any(name in text for name in names for text in (said, *links)):
            yield f"process {entry.name}: {said[:200]!r}"


def mounts(data: Path) -> Iterator[str]:
    """In the mount namespace of any process: paths of the server, and mounts of its devices under whatever path."""
    seen: set[str] = set()
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            namespace = os.readlink(table.parent / "ns/mnt")
            lines = table.read_text().splitlines() if namespace not in seen else []
        except OSError:
            continue
        seen.add(namespace)
        yield from (
            f"mount in {namespace} (pid {table.parent.name}, {command(table.parent)}): {line}"
            for line in lines
            if f"{data}/" in line
        )


def command(process: Path) -> str:
    """What somebody else's mount namespace belongs to: it was cloned while the server ran, and holds its mounts, too."""
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:80]
    except OSError:
        return "gone"


def loops(data: Path) -> Iterator[str]:
    """A loop device that is still there is pinned by a mount, also by one that no process's table shows."""
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if str(data) in backing.read_text():
                yield f"loop device {backing.parts[3]}"
        except OSError:
            continue


def ranges(instance: str) -> Iterator[Path]:
    for entry in RANGES.iterdir():
        if entry.is_symlink() and os.readlink(entry).startswith(f"{instance}/"):
            yield entry


def quota_groups(scratch: Path) -> set[int]:
    """Of subvolumes that are gone, after the cleaner ran. It removes the group a commit after the subvolume."""
    fd = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    end = time.monotonic() + CLEANED
    try:
        while (left := set(btrfs.qgroup_ids(fd)) - set(subvolumes(scratch))) and time.monotonic() < end:
            btrfs.wait_cleaned(fd, CLEANED)
            time.sleep(0.1)
        return left
    finally:
        os.close(fd)


def subvolumes(scratch: Path) -> Iterator[int]:
    for path in scratch.iterdir():
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            yield btrfs.subvolume_id(fd)
        finally:
            os.close(fd)


def used(scratch: Path) -> int:
    """Bytes of data and metadata, after the cleaner ran."""
    fd = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        btrfs.wait_cleaned(fd, CLEANED)
        return _spaces(fd, "bytes_used")
    finally:
        os.close(fd)


def allocated(scratch: Path) -> int:
    """Bytes that btrfs set aside in block groups, in use or not."""
    fd = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return _spaces(fd, "total_bytes")
    finally:
        os.close(fd)


def _spaces(fd: int, value: str) -> int:
    folder = Path("/sys/fs/btrfs") / btrfs.uuid(fd) / "allocation"
    return sum(int((folder / kind / value).read_text()) for kind in ("data", "metadata", "system"))


def descriptors(pid: int) -> Counter[str]:
    """What a process has open, numbers left out."""
    names: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names[re.sub(r"^(socket|pipe|net|mnt):\[\d+\]$", r"\1", os.readlink(link))] += 1
        except OSError:
            continue
    return names


def own_descriptors(node: int) -> int:
    """How many an agent has open that belong to no sandbox, dead or alive, and to nothing that was made ahead: no group, no
    pidfd, no tree of a child that is parked with the link to it."""
    held = {name: n for name, n in descriptors(node).items() if AHEAD not in name and name != PIDFD}
    return sum(held.values()) - 2 * held.get(TREE, 0)


def surplus(node: int, ahead: int) -> Iterator[str]:
    """Descriptors beyond one for each that was made ahead and one for the agent's own."""
    held = descriptors(node)
    yield from (
        f"the agent holds {held[kind]} of {kind} for {ahead}" for kind in (PIDFD, TREE) if held[kind] > ahead + 2
    )


def dead_pidfds(pid: int) -> Iterator[str]:
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        try:
            if re.search(r"^Pid:\s+-1$", info.read_text(), re.MULTILINE):
                yield info.name
        except OSError:
            continue
