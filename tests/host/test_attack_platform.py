"""CASES 19: searching a sandbox for the platform finds nothing, and what a program puts in place of the image's own is never
run by the platform. Ways into the first process: test_spawner_isolation.py; links that lead out: test_spawner_escape.py."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from barchan.wire.guest import ALL, KEEP, Entry, ExecFlag, GuestOutcome, OpKind, blob, encode_entry
from tests.host import spawn_site
from tests.host.guest_client import exec_parts
from tests.host.spawn_site import GUEST_UID, Box, Inside, Site

USERS = [b"", b"1000:1000"]
UNUSUAL = 6
"""Letters of a host name that is no everyday word."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with spawn_site.open_site(tmp_path_factory.mktemp("spawner")) as made:
        yield made


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of the spawner, as a token might be."""
    text = secrets.token_hex(12)
    monkeypatch.setenv("BARCHAN_TEST_MARK", text)
    return text


# ---- nothing to find ----


def words(site: Site, box: Box, mark: str) -> set[str]:
    """What would tell of the host: names in paths, ids, a token, the server's own name."""
    named = {
        mark,
        "barchan",
        "layer.erofs",
        str(site.base),
        str(site.groups.name),
        f"{site.base.name}/",
        str(GUEST_UID),
        str(box.uid_base),
    }
    return named | {name for name in (socket.gethostname(),) if len(name) >= UNUSUAL}


def search(within: Inside, user: bytes, looked_for: set[str], *places: str) -> list[str]:
    done = within.program("/bin/attack_search", *(word.encode().hex() for word in looked_for), "--", *places, user=user)
    assert done.code == 0, done
    *hits, summary = within.out.decode(errors="replace").splitlines()
    assert int(summary.split()[1]) > (300 if places == ("/",) else 0), summary
    return hits


@pytest.mark.parametrize("user", USERS, ids=["root", "user"])
async def test_reading_everything_finds_nothing_of_the_host(site: Site, mark: str, user: bytes) -> None:
    """Every file below /, each name and each link: `grep -r` as it would be done in earnest. The host lives."""

    def attempt(within: Inside, looked_for: set[str]) -> None:
        hits = search(within, user, looked_for, "/")
        # The kernel shows the map itself in the parent's ids, and offers no way to hide it.
        assert [hit for hit in hits if not hit.endswith(("/uid_map", "/gid_map"))] == []
        assert within.sh("echo alive") == "alive\n"

    async with site.spawner(site.guest("guest")) as spawner, site.box(spawner) as box:
        await asyncio.to_thread(with_guest, box, lambda within: attempt(within, words(site, box, mark)))


async def test_control_the_search_finds_what_is_there(site: Site) -> None:
    """In a file, in a file's name, in a link's target, in an environment."""
    word = secrets.token_hex(8)

    def attempt(within: Inside) -> None:
        within.sh(f"mkdir /tmp/deep; echo {word} > /tmp/deep/file; touch /tmp/{word}; busybox ln -s /{word} /tmp/link")
        found = {hit.split()[-1] for hit in search(within, b"", {word}, "/tmp")}
        assert found == {"/tmp/deep/file", f"/tmp/{word}", "/tmp/link"}
        parts = exec_parts("/bin/attack_search", word.encode().hex(), "--", "/proc", env=[f"X={word}".encode()])
        assert within.call(OpKind.EXEC, parts).code == 0
        assert b"/environ" in within.out

    async with site.spawner(site.guest("guest")) as spawner, site.box(spawner) as box:
        await asyncio.to_thread(with_guest, box, attempt)


LOOK = """
echo parent $PPID; cd /proc/self/fd; echo descriptors *; echo sockets $(($(grep -c . /proc/net/unix) - 1))
echo first $(busybox tr '\\0' ' ' < /proc/1/cmdline); echo environment $(busybox env | busybox cut -d= -f1 | busybox sort)
"""
OWN = {"HOME", "LOGNAME", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "USER"}
"""What the user's account and the shell itself add."""


@pytest.mark.parametrize("user", USERS, ids=["root", "user"])
@pytest.mark.parametrize("flags", [0, ExecFlag.STDIN, ExecFlag.TTY], ids=["plain", "stdin", "tty"])
async def test_a_program_starts_with_nothing_of_the_platform(site: Site, user: bytes, flags: int) -> None:
    """Three descriptors, the environment that was asked for, a first process without arguments, nobody's sockets."""

    def attempt(within: Inside) -> None:
        parts = exec_parts("/bin/sh", "-c", LOOK, flags=flags, env=[b"PATH=/bin", b"ASKED=for"])
        done = within.call(OpKind.EXEC, parts, user=user, data=b"" if flags == ExecFlag.STDIN else None)
        assert done.code == 0, (done, within.out)
        seen = {
            name: rest.split() for name, _, rest in (line.partition(" ") for line in within.out.decode().splitlines())
        }
        environment = set(seen.pop("environment"))
        assert {"PATH", "ASKED"} <= environment <= {"PATH", "ASKED"} | OWN
        # The listing is made by the shell itself, over a descriptor of its own.
        assert seen.pop("descriptors") in (["0", "1", "2"], ["0", "1", "2", "3"])
        assert seen == {"parent": ["1"], "sockets": ["0"], "first": ["init"]}

    async with site.spawner(site.guest("guest")) as spawner, site.box(spawner) as box:
        await asyncio.to_thread(with_guest, box, attempt)


# ---- nothing to trap ----

PROGRAMS = """
bin/sh bin/bash bin/dash bin/ash bin/env bin/cat bin/ls bin/cp bin/mv bin/rm bin/mkdir bin/chmod bin/chown bin/tar bin/ps bin/id
bin/stat bin/find bin/true bin/kill bin/head bin/mount bin/umount bin/ip bin/hostname bin/sleep bin/login bin/su usr/bin/env
usr/bin/tar usr/bin/id usr/bin/getent usr/bin/python3 usr/bin/ld.so usr/sbin/nologin sbin/init sbin/modprobe sbin/ldconfig
sbin/shutdown lib64/ld-linux-x86-64.so.2 lib/ld-musl-x86_64.so.1 lib/ld-linux.so.2 lib/x86_64-linux-gnu/libc.so.6
lib/x86_64-linux-gnu/libnss_files.so.2 lib/x86_64-linux-gnu/libgcc_s.so.1 usr/lib/x86_64-linux-gnu/gconv/gconv-modules
"""
STARTUP = "etc/profile etc/bash.bashrc etc/rc.local root/.profile root/.bashrc home/u/.profile home/u/.bashrc"
SPRUNG = b"/sprung"


def set_traps(within: Inside) -> None:
    lines = ["busybox mkdir -p /trap; busybox cp /bin/busybox /bin/attack_trap /trap; cd /; t=/trap/busybox"]
    lines += [
        f"$t mkdir -p /{Path(name).parent}; $t rm -f /{name}; $t cp /trap/attack_trap /{name}"
        for name in PROGRAMS.split()
    ]
    lines += [f"$t mkdir -p /{Path(name).parent}; echo '/trap/attack_trap' > /{name}" for name in STARTUP.split()]
    lines += [
        "echo /trap/attack_trap > /etc/ld.so.preload; echo 'passwd: files trap' > /etc/nsswitch.conf",
        "printf 'root:x:0:0::/root:/bin/sh\\nu:x:1000:1000::/home/u:/bin/bash\\nbroken\\n:::::::::\\n' > /etc/passwd",
        "echo 'u:x:1000:' > /etc/group; $t chmod 1777 /tmp",
    ]
    within.sh("\n".join(lines))


def sprung(within: Inside) -> bool:
    return within.call(OpKind.STAT, blob(SPRUNG), b"\0").outcome != GuestOutcome.FAILED


def operations(user: bytes) -> Iterator[tuple[OpKind, tuple[bytes, ...], bytes | None]]:
    """Every operation of the guest, in an order in which each succeeds."""
    at, file, tree = (blob(f"/tmp/{name}-{user.hex()}".encode()) for name in ("dir", "file", "tree"))
    plain = struct.pack("<IIII", 0, KEEP, KEEP, KEEP)
    entry = encode_entry(Entry(b"made", "d", 0o755, 0, 0, 0, 0, 0, b""))
    yield OpKind.EXEC, (exec_parts("/trap/busybox", "true"),), None
    yield OpKind.EXEC, (exec_parts("/trap/busybox", "true", flags=ExecFlag.TTY),), None
    yield OpKind.EXEC, (exec_parts("/trap/busybox", "cat", flags=ExecFlag.STDIN),), b"input"
    yield OpKind.MKDIR, (at, struct.pack("<II", 1, 0o755)), None
    yield OpKind.WRITE, (file, plain), b"bytes"
    yield OpKind.READ, (file, struct.pack("<QQ", 0, ALL)), None
    yield OpKind.STAT, (file, b"\1"), None
    yield OpKind.LIST, (at, struct.pack("<I", 1)), None
    yield OpKind.GET_TREE, (at,), None
    yield OpKind.PUT_TREE, (tree, struct.pack("<III", 1, KEEP, KEEP)), entry
    yield OpKind.PROCESSES, (), None
    yield OpKind.RENAME, (tree, blob(b"/tmp/renamed-" + user.hex().encode())), None
    yield OpKind.REMOVE, (file, struct.pack("<I", 0)), None
    yield OpKind.REMOVE, (at, struct.pack("<I", 1)), None


async def test_no_operation_runs_a_program_of_the_image(site: Site) -> None:
    def attempt(within: Inside) -> None:
        set_traps(within)
        assert within.program("/bin/sh", "-c", "true").code == 0 and sprung(within), "control: the trap springs"
        assert within.call(OpKind.REMOVE, blob(SPRUNG), struct.pack("<I", 0)).outcome == GuestOutcome.EXITED
        done = set()
        for user in (b"", b"u", b"1000:1000", b"12345"):
            for kind, parts, data in operations(user):
                answer = within.call(kind, *parts, user=user, data=data)
                assert (answer.outcome, answer.code) == (GuestOutcome.EXITED, 0), (user, kind, answer)
                done.add(kind)
        assert done == set(OpKind) - {OpKind.RUN}, "RUN is for a shell, which the caller chose"
        late = within.call(OpKind.EXEC, exec_parts("/trap/busybox", "sleep", "600", timeout_ms=50))
        assert late.outcome == GuestOutcome.TIMED_OUT
        assert not sprung(within)

    async with site.spawner(site.guest("guest")) as spawner:
        async with site.box(spawner) as box:
            await asyncio.to_thread(with_guest, box, attempt)
            upper = box.tree / "u"
            assert (upper / "trap").is_dir()
        assert not (upper / "sprung").exists(), "also not at its end"


def with_guest(box: Box, attempt: Callable[[Inside], None]) -> None:
    within = Inside(box)
    try:
        attempt(within)
    finally:
        within.link.close()
