"""Links in a sandbox that name what the guest holds, its cgroup directory on the host's mounts above all: CVE-2024-21626's kind.

The cgroup directories are open to everybody here, so that only the guest's own care stands between a link and the host.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator

import pytest

from barchan.backends.spawner import NO_FLAGS, SpawnFlag
from barchan.wire.guest import ALL, KEEP, Entry, GuestOutcome, OpKind, blob, encode_entry
from tests.host import spawn_site
from tests.host.spawn_site import Inside, Site, inside

DESCRIPTORS = range(3, 31)
LEADING_OUT = [
    *(f"/proc/{process}/fd/{fd}" for process in ("self", "thread-self", "1") for fd in DESCRIPTORS),
    *(f"/proc/{process}/{name}" for process in ("self", "thread-self", "1") for name in ("cwd", "root")),
    *(f"/dev/fd/{fd}" for fd in DESCRIPTORS),
    "/proc/1/task/1/fd/4",
    "/proc/self/exe",
]
ANSWERS = {errno.ELOOP, errno.ENOENT, errno.EACCES, errno.ENOTDIR}
USERS = [b"", b"1000:1000"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with spawn_site.open_site(tmp_path_factory.mktemp("spawner")) as made:
        yield made


BOTH_WAYS = pytest.mark.parametrize("flags", [NO_FLAGS, SpawnFlag.SETUID], ids=["clone3", "moved"])


@BOTH_WAYS
@pytest.mark.parametrize("user", USERS)
async def test_no_working_directory_leads_out(site: Site, flags: SpawnFlag, user: bytes) -> None:
    def attempt(within: Inside) -> None:
        for target in LEADING_OUT:
            within.sh(f"busybox ln -sfn {target} /link")
            for cwd in (target, "/link", "/link/..", "/link/../.."):
                done = within.program("/bin/true", cwd=cwd, user=user)
                assert (done.outcome, done.detail) == (GuestOutcome.FAILED, b"cwd"), (target, cwd, done)
                assert done.code in ANSWERS, (target, cwd, done)

    await inside(site, attempt, flags)


@BOTH_WAYS
@pytest.mark.parametrize("user", USERS)
async def test_no_program_path_leads_out(site: Site, flags: SpawnFlag, user: bytes) -> None:
    """ENOENT is the proof: a directory of the guest's would be found, and refused or searched."""

    def attempt(within: Inside) -> None:
        for fd in DESCRIPTORS[1:]:
            within.sh(f"busybox ln -sfn /proc/self/fd/{fd} /link")
            for program in (f"/proc/self/fd/{fd}", "/link", "/link/cgroup.procs", "/link/../../../bin/true"):
                done = within.program(program, user=user)
                assert (done.code, done.detail) == (errno.ENOENT, b"exec"), (fd, program, done)
        for program in ("/proc/self/fd/3", "/proc/1/fd/4/cgroup.procs", "/proc/1/cwd/bin/true", "/proc/1/exe"):
            done = within.program(program, user=user)
            assert (done.outcome, done.code, done.detail) == (GuestOutcome.FAILED, errno.EACCES, b"exec"), program

    await inside(site, attempt, flags)


async def test_no_script_is_read_by_what_the_guest_holds(site: Site) -> None:
    def attempt(within: Inside) -> None:
        for fd in DESCRIPTORS[1:]:
            within.sh(f"echo '#!/proc/self/fd/{fd}' > /script; chmod 755 /script")
            done = within.program("/script")
            assert (done.code, done.detail) == (errno.ENOENT, b"exec"), (fd, done)

    await inside(site, attempt)


def file_operations(path: str) -> Iterator[tuple[OpKind, tuple[bytes, ...], bytes | None]]:
    at, below = blob(path.encode()), blob(f"{path}/cgroup.procs".encode())
    made = blob(f"{path}/made".encode())
    plain, append = (struct.pack("<IIII", flags, KEEP, KEEP, KEEP) for flags in (0, 2))
    entry = encode_entry(Entry(b"made", "d", 0o755, 0, 0, 0, 0, 0, b""))
    yield OpKind.STAT, (below, b"\1"), None
    yield OpKind.LIST, (at, struct.pack("<I", 1)), None
    yield OpKind.READ, (below, struct.pack("<QQ", 0, ALL)), None
    yield OpKind.WRITE, (made, plain), b"x"
    yield OpKind.WRITE, (below, append), b"0"
    yield OpKind.MKDIR, (made, struct.pack("<II", 0, 0o755)), None
    yield OpKind.MKDIR, (blob(f"{path}/made/x".encode()), struct.pack("<II", 1, 0o755)), None
    yield OpKind.RENAME, (below, blob(b"/stolen")), None
    yield OpKind.RENAME, (blob(b"/tmp"), made), None
    yield OpKind.REMOVE, (blob(f"{path}/x0".encode()), struct.pack("<I", 1)), None
    yield OpKind.GET_TREE, (at,), None
    yield OpKind.PUT_TREE, (at, struct.pack("<III", 0, KEEP, KEEP)), entry
    yield OpKind.PUT_TREE, (made, struct.pack("<III", 1, KEEP, KEEP)), entry


@pytest.mark.parametrize("user", USERS)
async def test_no_file_operation_leads_out(site: Site, user: bytes) -> None:
    def attempt(within: Inside) -> None:
        for target in LEADING_OUT:
            within.sh(f"busybox ln -sfn {target} /link")
            for path in (target, "/link"):
                for kind, parts, data in file_operations(path):
                    done = within.call(kind, *parts, user=user, data=data)
                    assert done.outcome == GuestOutcome.FAILED, (target, path, kind)
                    assert done.code in ANSWERS, (target, path, kind, done)
        assert "stolen" not in within.sh("ls /")

    await inside(site, attempt)
