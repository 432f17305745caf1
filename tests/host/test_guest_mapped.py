"""The guest as in a container: in a user namespace, under a user that the namespace does not know, with ambient capabilities."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.wire.guest import KEEP, Done, ExecFlag, GuestOutcome, OpKind, blob
from tests.host.guest_client import Guest, Link, built_guest, exec_parts, running_guest

RESERVED, BASE, COUNT = 61_234, 1_000_000, 70_000
CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31)
"""CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE SYS_CHROOT AUDIT_WRITE SETFCAP."""

ENTER = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments):
        sys.exit(f"{{name}}{{arguments}}: {{os.strerror(ctypes.get_errno())}}")
os.setgroups([]); os.setresgid({RESERVED}, {RESERVED}, {RESERVED}); os.setresuid({RESERVED}, {RESERVED}, {RESERVED})
call("unshare", 0x10000000)
os.write(1, b"x"); os.read(0, 1)
wanted = {CAPABILITIES!r}
for number in range(41):
    if number not in wanted:
        call("prctl", 24, number, 0, 0, 0)
mask = sum(1 << number for number in wanted)
call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0))
for number in wanted:
    call("prctl", 47, 2, number, 0, 0)
null = os.open("/dev/null", os.O_RDWR)
os.dup2(null, 0); os.dup2(null, 1)
os.execve(sys.argv[1], ["init"], {{}})
"""


REFUSE = """
import struct
code = b"".join(struct.pack("<HBBI", *line) for line in
                ((0x20, 0, 0, 0), (0x15, 0, 1, %d), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)))
buffer = ctypes.create_string_buffer(code)
program = struct.pack("<HxxxxxxQ", 4, ctypes.addressof(buffer))
call("prctl", 22, 2, program, 0, 0)
"""


NO_NEW_PRIVS = 'call("prctl", 38, 1, 0, 0, 0)\n'


class MappedGuest(Guest):
    before_exec = ""
    no_new_privs = True

    def _launch(self, binary: Path, actions: list[tuple[int, int, int]]) -> int:
        assert self.group
        for path in (self.group, self.group / "cgroup.procs"):
            os.chown(path, RESERVED, RESERVED)
        go_read, go_write = os.pipe()
        ready_read, ready_write = os.pipe()
        actions = [*actions, (os.POSIX_SPAWN_DUP2, go_read, 0), (os.POSIX_SPAWN_DUP2, ready_write, 1)]
        steps = NO_NEW_PRIVS * self.no_new_privs + self.before_exec
        script = ENTER.replace("null = ", steps + "null = ", 1)
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", script, str(binary)], {}, file_actions=actions)
        os.close(go_read)
        os.close(ready_write)
        assert os.read(ready_read, 1) == b"x"
        for kind in ("uid", "gid"):
            Path(f"/proc/{pid}/{kind}_map").write_text(f"0 {BASE} {COUNT}")
        os.write(go_write, b"x")
        os.close(go_write)
        os.close(ready_read)
        return pid


class Clone3RefusedGuest(MappedGuest):
    before_exec = REFUSE % 435


class CloseRangeRefusedGuest(MappedGuest):
    before_exec = REFUSE % 436


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that every user can reach. Not below pytest's own: each new session closes that to others again."""
    with tempfile.TemporaryDirectory(prefix="mapped-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextlib.contextmanager
def installed_guest() -> Iterator[Path]:
    """Executable and no more: that ties the guest's memory to the initial user namespace."""
    with open_directory() as directory:
        binary = directory / "guest"
        shutil.copy(built_guest(directory / "build"), binary)
        binary.chmod(0o111)
        yield binary


@pytest.fixture(scope="session")
def guest_binary() -> Iterator[Path]:
    with installed_guest() as binary:
        yield binary


@pytest.fixture
def guest(guest_binary: Path) -> Iterator[Guest]:
    with running_guest(guest_binary, kind=MappedGuest) as running:
        yield running


@pytest.fixture
def link(guest: Guest) -> Iterator[Link]:
    with guest.dial() as dialled:
        yield dialled


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that belongs to root inside."""
    with open_directory() as directory:
        os.chown(directory, BASE, BASE)
        yield directory


def call(guest: Guest, link: Link, kind: OpKind, *parts: bytes, user: bytes = b"", data: bytes | None = None) -> Done:
    op = guest.next_op()
    link.start(op, kind, *parts, user=user)
    if data is not None:
        link.feed(op, data)
    return link.wait(op)


def run(guest: Guest, link: Link, script: str, user: bytes = b"", flags: int = 0) -> bytes:
    done = call(guest, link, OpKind.EXEC, exec_parts("sh", "-c", script, flags=flags), user=user)
    assert (done.outcome, done.code) == (GuestOutcome.EXITED, 0), (done, link.results[guest.last].stderr)
    return link.results[guest.last].stdout


def writing(path: Path, uid: int = KEEP) -> bytes:
    return blob(os.fsencode(path)) + b"\0" * 4 + KEEP.to_bytes(4, "little") + uid.to_bytes(4, "little") * 2


def test_root_inside_has_the_bounding_set_and_no_more(guest: Guest, link: Link) -> None:
    mask = sum(1 << number for number in CAPABILITIES)
    lines = dict(line.split(b":\t") for line in run(guest, link, "grep ^Cap /proc/self/status").splitlines())
    assert {name: int(value, 16) for name, value in lines.items()} == {
        b"CapInh": 0, b"CapPrm": mask, b"CapEff": mask, b"CapBnd": mask, b"CapAmb": 0
    }  # fmt: skip


def test_users_inside_hold_nothing(guest: Guest, link: Link) -> None:
    out = run(guest, link, "id -u; id -g; grep -E 'Cap(Inh|Prm|Eff|Amb)' /proc/self/status", user=b"1000:1000").split()
    assert out[:2] == [b"1000", b"1000"] and set(out[3::2]) == {b"0" * 16}


@pytest.mark.parametrize("user", [b"", b"1000:1000"])
def test_standard_streams_can_be_opened_again(guest: Guest, link: Link, user: bytes) -> None:
    assert run(guest, link, "echo out >/dev/stdout; echo err >/dev/stderr", user=user) == b"out\n"


def test_a_user_outside_the_map_is_refused(guest: Guest, link: Link) -> None:
    done = call(guest, link, OpKind.EXEC, exec_parts("true"), user=b"80000:80000")
    assert (done.outcome, done.code, done.detail) == (GuestOutcome.FAILED, errno.EINVAL, b"user")
    done = call(guest, link, OpKind.STAT, blob(b"/"), b"\0", user=b"80000:80000")
    assert (done.outcome, done.code, done.detail) == (GuestOutcome.FAILED, errno.EINVAL, b"user")


def test_files_belong_to_the_caller_and_groups_still_work_afterwards(guest: Guest, link: Link, place: Path) -> None:
    assert call(guest, link, OpKind.WRITE, writing(place / "root"), data=b"x").code == 0
    assert call(guest, link, OpKind.WRITE, writing(place / "given", 1000), data=b"x").code == 0
    assert call(guest, link, OpKind.WRITE, writing(place / "no"), user=b"1000:1000", data=b"x").code == errno.EACCES
    assert [(place / name).stat().st_uid for name in ("root", "given")] == [BASE, BASE + 1000]
    assert call(guest, link, OpKind.READ, blob(os.fsencode(place / "given")) + bytes(8) + b"\xff" * 8).code == 0
    for _ in range(8):  # more than the pool keeps: each makes a group, as the guest's own user
        run(guest, link, "sleep 300 >/dev/null 2>&1 &")
    assert len(guest.pids()) == 8


def test_a_timeout_ends_every_users_processes(guest: Guest, link: Link) -> None:
    parts = exec_parts("sh", "-c", "trap '' TERM; setsid sleep 300 & sleep 300", timeout_ms=300, grace_ms=100)
    for user in (b"", b"1000:1000"):
        assert call(guest, link, OpKind.EXEC, parts, user=user).outcome == GuestOutcome.TIMED_OUT
    assert [pid for pids in guest.pids().values() for pid in pids] == []


def test_input_reaches_a_users_program(guest: Guest, link: Link) -> None:
    parts = exec_parts("cat", flags=ExecFlag.STDIN)
    assert call(guest, link, OpKind.EXEC, parts, user=b"1000:1000", data=b"hello").code == 0
    assert link.results[guest.last].stdout == b"hello"


def test_programs_are_told_that_clone3_does_not_exist(guest: Guest, link: Link) -> None:
    script = "import ctypes, errno; c = ctypes.CDLL(None, use_errno=True); print(c.syscall(435, 0, 0), ctypes.get_errno() == errno.ENOSYS)"
    done = call(guest, link, OpKind.EXEC, exec_parts("/usr/bin/python3", "-c", script))
    assert (done.code, link.results[guest.last].stdout) == (0, b"-1 True\n")


def test_root_inside_cannot_look_into_the_guest(guest: Guest, link: Link) -> None:
    script = f"for f in mem environ maps auxv; do cat /proc/{guest.pid}/$f >/dev/null 2>&1 && echo $f; done; ls /proc/{guest.pid}/fd 2>/dev/null; true"
    assert run(guest, link, script) == b""


def test_where_clone3_is_refused_programs_move_into_their_groups(guest_binary: Path) -> None:
    with running_guest(guest_binary, kind=Clone3RefusedGuest) as guest, guest.dial() as link:
        run(guest, link, "sleep 300 >/dev/null 2>&1 &", user=b"1000:1000")
        (pids,) = guest.pids().values()
        assert len(pids) == 1
        parts = exec_parts("sh", "-c", "setsid sleep 300 & setsid sleep 300", timeout_ms=300)
        assert call(guest, link, OpKind.EXEC, parts).outcome == GuestOutcome.TIMED_OUT
        assert [pid for found in guest.pids().values() for pid in found] == pids


def test_where_close_range_is_refused_programs_still_get_nothing_of_the_guest(guest_binary: Path) -> None:
    with running_guest(guest_binary, kind=CloseRangeRefusedGuest) as guest, guest.dial() as link:
        assert run(guest, link, "echo fine") == b"fine\n"
        for fd in range(4, 20):
            done = call(guest, link, OpKind.EXEC, exec_parts(f"/proc/self/fd/{fd}"))
            assert (done.code, done.detail) == (errno.ENOENT, b"exec"), fd
