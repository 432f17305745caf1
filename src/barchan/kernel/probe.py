"""What can this host do? Found out by doing it, in under a second, leaving nothing behind."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from barchan.config import MAX_SANDBOXES, Layout
from barchan.errors import BarchanError, FeatureMissing
from barchan.kernel import btrfs, cgroups, directories, loops, processes, sharing, syscalls
from barchan.kernel.scratch import SMALLEST, Quota, make_filesystem
from barchan.spec import Limits

Kernel = Literal["full", "reduced", "too_old"]
OLDEST = (6, 1)
PROGRAMS = {"mkfs.erofs": "erofs-utils", "mkfs.btrfs": "btrfs-progs"}
_SECCOMP_GET_ACTION_AVAIL = 2
_ACTION_ERRNO = 0x00050000
_SECCOMP = {"x86_64": 317, "aarch64": 277}


class Check(msgspec.Struct, frozen=True):
    """One ability. `needed` ones stop barchan when they are missing; the others only take something away."""

    name: str
    ok: bool
    needed: bool
    meaning: str
    remedy: str = ""
    detail: str = ""
    """What the attempt said when it failed."""


class HostReport(msgspec.Struct, frozen=True):
    """The outcome of `examine`."""

    kernel: Kernel
    """full: layers from files and by descriptor, simple quotas. reduced: by loop device and path, ordinary quotas."""
    release: str
    quota: Quota
    cgroups: cgroups.CgroupLayout
    checks: tuple[Check, ...]

    def missing(self) -> tuple[Check, ...]:
        """Needed abilities that this host lacks."""
        return tuple(check for check in self.checks if check.needed and not check.ok)

    def notes(self) -> tuple[str, ...]:
        """One line per optional thing that this host lacks."""
        return tuple(f"{c.name}: {c.meaning}" for c in self.checks if not c.needed and not c.ok)

    def require(self) -> None:
        """`FeatureMissing` that names everything needed and its remedy."""
        if missing := self.missing():
            what = "; ".join(f"{c.name} ({c.detail})" if c.detail else c.name for c in missing)
            raise FeatureMissing(
                f"this host lacks: {what}", hint="; ".join(c.remedy for c in missing if c.remedy), phase="probe"
            )


class _Plan(msgspec.Struct, frozen=True):
    name: str
    needed: bool
    meaning: str
    remedy: str
    attempt: Callable[[], str | None]
    """Raises, or says what is wrong, when the host cannot."""


def examine(layout: Layout) -> HostReport:
    """Try everything on the file system of the data directory (made if it does not exist)."""
    directories.make(layout.data, 0o700)
    release = platform.release()
    groups = cgroups.detect()
    with _workplace(layout.data) as work:
        image = work / "probe.erofs"
        made = _run(_Plan("mkfs.erofs", True, "layers are made with it", "install erofs-utils", lambda: _image(image)))
        full = tuple(_run(plan) for plan in _full_plans(work, image))
        checks = (_run(_version_plan(release)), made, *full, *(_run(plan) for plan in _plans(work, image, groups)))
    return HostReport(classify(release, full), release, _quota(checks), groups, checks)


def classify(release: str, full: tuple[Check, ...]) -> Kernel:
    """Pure: full when everything a full kernel is for works."""
    if version_of(release) < OLDEST:
        return "too_old"
    return "full" if all(check.ok for check in full) else "reduced"


def version_of(release: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _quota(checks: tuple[Check, ...]) -> Quota:
    return "simple" if any(c.name == "simple quotas" and c.ok for c in checks) else "ordinary"


def _run(plan: _Plan) -> Check:
    try:
        detail = plan.attempt()
    except (OSError, BarchanError, subprocess.SubprocessError) as error:
        detail = str(error)
    return Check(
        plan.name, detail is None, plan.needed, plan.meaning, "" if detail is None else plan.remedy, detail or ""
    )


def _version_plan(release: str) -> _Plan:
    def attempt() -> str | None:
        return None if version_of(release) >= OLDEST else f"running {release}"

    return _Plan(
        "kernel 6.1", True, "older ones lack idmapped layers and more", "boot a kernel of 6.1 or later", attempt
    )


def _full_plans(work: Path, image: Path) -> tuple[_Plan, ...]:
    reduced = "without it layers take the slower way over loop devices and paths"
    newer = "a kernel of 6.13 or later, data directory on ext4, xfs or btrfs"
    return (
        _Plan("EROFS from a file", False, reduced, newer, lambda: _from_file(image)),
        _Plan("overlay layers by descriptor", False, reduced, newer, lambda: _overlay_by_fd(work)),
        _Plan(
            "simple quotas",
            False,
            "without them disk limits cost more",
            "a kernel of 6.7 or later",
            lambda: _simple_quota(work),
        ),
    )


def _image_plans(image: Path) -> tuple[_Plan, ...]:
    return (
        _Plan(
            "EROFS over a loop device",
            False,
            "the way of older kernels",
            "load loop and erofs",
            lambda: _by_loop(image),
        ),
        _Plan(
            "EROFS page cache for all layers",
            False,
            "without it equal files of two layers are in memory twice",
            "a kernel with CONFIG_EROFS_FS_PAGE_CACHE_SHARE, and erofs-utils 1.9 or later",
            lambda: None if sharing.options() else "this kernel knows no inode_share",
        ),
    )


def _plans(work: Path, image: Path, groups: cgroups.CgroupLayout) -> tuple[_Plan, ...]:
    ns, cg = "enable user namespaces (sysctl user.max_user_namespaces)", groups.describe()
    return (
        *_image_plans(image),
        _Plan(
            "user namespaces", True, "root inside a sandbox is nobody outside", ns, lambda: _in_userns(lambda fd: None)
        ),
        _Plan(
            "idmapped mounts",
            True,
            "layers are shared by sandboxes",
            "data directory on ext4, xfs or btrfs",
            lambda: _in_userns(lambda fd: _idmap(work, fd)),
        ),
        _Plan(
            "btrfs", True, "writable trees with a hard limit", "load the kernel module btrfs", lambda: _try_btrfs(work)
        ),
        _Plan("programs", True, "layers and the scratch volume are made with them", _packages(), _has_programs),
        _Plan("cgroup controllers", True, "limits of memory, cpu and processes", cg, lambda: _has_groups(groups)),
        _Plan(
            "cgroup v2 memory",
            False,
            cg or "memory.high and memory.reclaim",
            "boot with cgroup v2 alone",
            lambda: "a v1 hierarchy holds it" if "memory" in groups.v1 else None,
        ),
        _Plan(
            "cgroup.kill",
            False,
            "without it processes are ended one by one",
            "a kernel of 5.14 or later",
            lambda: _has_kill(groups),
        ),
        _Plan("seccomp", True, "the filter of system calls", "a kernel with CONFIG_SECCOMP_FILTER", _has_seccomp),
        _Plan(
            "open files",
            False,
            "sandboxes together could use up fs.file-max, the host's bound of open files",
            "`barchan up` raises it; where it may not: sysctl fs.file-max=9223372036854775807",
            _has_files,
        ),
        _Plan(
            "mmdebstrap",
            False,
            "`barchan env bootstrap` makes Debian base layers with it",
            "install mmdebstrap",
            lambda: None if shutil.which("mmdebstrap") else "not found",
        ),
    )


@contextmanager
def _workplace(data: Path) -> Iterator[Path]:
    """A directory whose mounts are undone whatever happened."""
    work = Path(tempfile.mkdtemp(prefix=".probe-", dir=data))
    try:
        yield work
    finally:
        shutil.rmtree(work)


def _image(image: Path) -> str | None:
    tree = image.parent / "tree"
    tree.mkdir(0o700)
    (tree / "file").write_text("probe")
    image.with_suffix(".data").touch()
    split = ("--chunksize=65536", f"--blobdev={image.with_suffix('.data')}")
    command = ("mkfs.erofs", "-T0", *split, str(image), str(tree))
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=30)
    except FileNotFoundError:
        return "mkfs.erofs is not installed"
    return None if done.returncode == 0 else done.stderr.decode(errors="replace").strip()


def _from_file(image: Path) -> str | None:
    return _mount_image(image, str(image), str(image.with_suffix(".data")))


def _mount_image(image: Path, source: str, data: str) -> str | None:
    """Mounted detached: it is gone when its descriptor is."""
    if not image.exists():
        return "no image to try with"
    options = (("source", source), ("device", data), ("ro", None))
    fd = syscalls.new_mount("erofs", options, syscalls.ATTR_RDONLY)
    try:
        text = Path(f"/proc/self/fd/{fd}/file").read_text()
    finally:
        os.close(fd)
    return None if text == "probe" else "mounted, but a file reads wrong"


def _by_loop(image: Path) -> str | None:
    files = (image, image.with_suffix(".data"))
    with ExitStack() as attached:
        devices = [attached.enter_context(loops.attached(file, read_only=True)) for file in files]
        return _mount_image(image, *devices)


def _overlay_by_fd(work: Path) -> str | None:
    other = work / "other"
    other.mkdir(0o700)
    with ExitStack() as opened:
        layers = [syscalls.open_tree(path, clone=True) for path in (work / "tree", other)]
        for fd in layers:
            opened.callback(os.close, fd)
        os.close(syscalls.new_mount("overlay", [("lowerdir+", fd) for fd in layers]))
    return None


@contextmanager
def _volume(work: Path) -> Iterator[int]:
    """Root of a small btrfs, mounted detached over a sparse file."""
    image = work / "probe.btrfs"
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(SMALLEST)
        make_filesystem(image)
    with ExitStack() as opened:
        device = opened.enter_context(loops.attached(image, direct_io=True))
        mount = syscalls.new_mount("btrfs", (("source", device), ("nodiscard", None)))
        opened.callback(os.close, mount)
        root = os.open(f"/proc/self/fd/{mount}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, root)
        yield root


def _try_btrfs(work: Path) -> str | None:
    _load_btrfs()
    with _volume(work) as root:
        btrfs.create_subvolume(root, "probe")
    return None


def _simple_quota(work: Path) -> str | None:
    with _volume(work) as root:
        btrfs.enable_quota(root, simple=True)
        mode = btrfs.quota_mode(root)
    return None if mode == "simple" else f"quota mode {mode!r}"


def _in_userns(use: Callable[[int], None]) -> str | None:
    """Start a child in a new user namespace and hand its descriptor over while the child waits."""
    child = subprocess.Popen(
        ("unshare", "--user", "sh", "-c", "echo; read x"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with child:
        assert child.stdout and child.stderr and child.stdin
        if child.stdout.read(1) != b"\n":
            return child.stderr.read().decode(errors="replace").strip() or "unshare failed"
        fd = os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for ids in ("uid_map", "gid_map"):
                Path(f"/proc/{child.pid}/{ids}").write_text("0 65536 65536")
            use(fd)
        finally:
            os.close(fd)
            child.stdin.close()
    return None


def _idmap(work: Path, userns: int) -> None:
    fd = syscalls.open_tree(work, clone=True)
    try:
        syscalls.set_mount_attributes(fd, add=syscalls.ATTR_IDMAP, userns_fd=userns)
    finally:
        os.close(fd)


def _load_btrfs() -> None:
    """A kernel does not load a file system's module when fsopen(2) asks for it in every version."""
    if "btrfs" not in Path("/proc/filesystems").read_text().split():
        with suppress(FileNotFoundError):
            subprocess.run(("modprobe", "btrfs"), capture_output=True, check=False, timeout=10)


def _absent() -> tuple[str, ...]:
    return tuple(program for program in PROGRAMS if shutil.which(program) is None)


def _packages() -> str:
    return "install " + ", ".join(sorted(PROGRAMS[program] for program in _absent() or PROGRAMS))


def _has_programs() -> str | None:
    absent = _absent()
    return "not found: " + ", ".join(absent) if absent else None


def _has_groups(groups: cgroups.CgroupLayout) -> str | None:
    return groups.describe() if groups.unified is None or groups.missing() else None


def _has_files() -> str | None:
    """Whether as many sandboxes as a node takes by default could open all that their limits let them."""
    limits, bound = Limits(), int(processes.FILE_MAX.read_text())
    wanted = MAX_SANDBOXES * limits.pids * limits.files
    return None if bound >= wanted else f"fs.file-max is {bound}, {MAX_SANDBOXES} sandboxes could open {wanted}"


def _has_kill(groups: cgroups.CgroupLayout) -> str | None:
    """The root has no such file, every other group has."""
    if groups.unified is None:
        return "no cgroup2"
    probe = groups.unified / f"barchan-probe-{os.getpid()}"
    probe.mkdir(0o700)
    try:
        return None if (probe / "cgroup.kill").exists() else "absent"
    finally:
        probe.rmdir()


def _has_seccomp() -> str | None:
    number = _SECCOMP.get(platform.machine())
    if number is None:
        return f"unknown machine {platform.machine()}"
    action = ctypes.c_uint32(_ACTION_ERRNO)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number), ctypes.c_long(_SECCOMP_GET_ACTION_AVAIL), ctypes.c_long(0), ctypes.byref(action)
    )
    return str(syscalls.oserror("seccomp")) if failed else None
