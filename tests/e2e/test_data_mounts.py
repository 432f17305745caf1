"""Directories of the node in a sandbox: readable by name, and nothing else."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from barchan import Client, CreateFailed, DataMount, InvalidRequest, Sandbox
from tests.e2e.conftest import BUSYBOX, SMALL
from tests.server import Server

SECRET = "not for tenants\n"


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[Path]:
    """What an administrator might share, with everything in it that could lead astray."""
    root = server.shared
    (root / "deep/er").mkdir(parents=True)
    (root / "deep/er/file").write_text("deep\n")
    (root / "hello").write_text("hello from the host\n")
    (root / "owned").write_text("by somebody\n")
    os.chown(root / "owned", 1000, 1000)
    (root / "private").write_text(SECRET)
    (root / "private").chmod(0o600)
    (root / "out").symlink_to(server.data / "token")
    (root / "passwd").symlink_to("/etc/passwd")
    (root / "up").symlink_to("../../../../../../etc/shadow")
    (root / "busybox").write_bytes(BUSYBOX.read_bytes())
    (root / "busybox").chmod(0o4755)
    (root / "everyone").write_text("anybody may write on the host\n")
    (root / "everyone").chmod(0o666)
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mkfifo(root / "fifo", 0o666)
    (root / "fifo").chmod(0o666)
    root.chmod(0o777)  # on the host anybody may write here
    yield root


@pytest.fixture(scope="module")
def listener(shared: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(shared / "socket"))
        (shared / "socket").chmod(0o777)
        sock.listen()
        sock.setblocking(False)
        yield sock


@pytest.fixture
async def box(client: Client, debian_env: str, shared: Path) -> AsyncIterator[Sandbox]:
    mounts = [DataMount(source="shared", target="/mnt/new/data")]
    async with await client.create(debian_env, limits=SMALL, mounts=mounts, setuid=True) as sandbox:
        yield sandbox


def snapshot(root: Path) -> dict[str, tuple[int, ...]]:
    found = {}
    for path in [root, *root.rglob("*")]:
        facts = path.lstat()
        found[str(path)] = (facts.st_ino, facts.st_mode, facts.st_uid, facts.st_gid, facts.st_size, facts.st_mtime_ns)
    return found


async def test_it_is_read(box: Sandbox) -> None:
    assert (await box.run("cat /mnt/new/data/hello /mnt/new/data/deep/er/file")).text == "hello from the host\ndeep\n"
    assert await box.files.read("/mnt/new/data/hello") == b"hello from the host\n", "files work as commands do"
    assert (await box.files.stat("/mnt/new/data/hello")).uid == 65534, "nobody's inside"
    assert (await box.run("/mnt/new/data/busybox echo it runs")).text == "it runs\n"
    assert (await box.run("cat /mnt/new/data/hello", user="nobody")).exit_code == 0


@pytest.mark.parametrize(
    "attack",
    [
        "echo x > new",
        "echo x >> hello",
        "echo x > everyone",
        "mkdir new",
        "rm hello",
        "rm -rf deep",
        "mv hello other",
        "ln hello other",
        "ln -s x other",
        "chmod 777 hello",
        "chown root hello",
        "touch hello",
        "truncate -s 0 everyone",
        "mknod d c 1 3",
        "mkfifo f",
        "mount -o remount,rw /mnt/new/data",
        "mount -o remount,bind,rw /mnt/new/data",
        "umount /mnt/new/data",
        "umount -l /mnt/new/data",
        "mount --bind /tmp /mnt/new/data",
        "cat private",
        "echo x > null",
        "cat out",
        'setfattr -n user.a -v b hello || python3 -c \'import os; os.setxattr("hello", "user.a", b"b")\'',
        'python3 -c \'import mmap; f = open("everyone", "r+b"); mmap.mmap(f.fileno(), 0)[0] = 1\'',
        'python3 -c \'import mmap; f = open("everyone", "rb"); mmap.mmap(f.fileno(), 0, prot=3, flags=1)[0] = 1\'',
        'python3 -c \'import os; os.open("/proc/self/fd/%d" % os.open("everyone", 0), os.O_RDWR)\'',
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"socket\")'",
        "python3 -c 'import os; os.open(\"fifo\", os.O_WRONLY | os.O_NONBLOCK)'",
    ],
)
async def test_nothing_but_reading(box: Sandbox, shared: Path, listener: socket.socket, attack: str) -> None:
    before = snapshot(shared)
    fifo = os.open(shared / "fifo", os.O_RDONLY | os.O_NONBLOCK)  # somebody on the host waits for what comes
    try:
        done = await box.run(["/bin/bash", "-c", attack], cwd="/mnt/new/data", timeout=20)
        assert done.exit_code not in (0, 127) and done.outcome == "exited", (done.text, done.stderr)
        assert SECRET not in done.text
    finally:
        os.close(fifo)
    assert snapshot(shared) == before
    with pytest.raises(BlockingIOError):
        listener.accept()


async def test_links_lead_to_places_inside(box: Sandbox) -> None:
    await box.files.write("/etc/shadow", b"of the sandbox")
    inside = await box.files.read("/etc/passwd")
    assert (await box.run("cat /mnt/new/data/passwd /mnt/new/data/up")).stdout == inside + b"of the sandbox"


async def test_set_user_id_means_nothing(box: Sandbox) -> None:
    done = await box.run("/mnt/new/data/busybox id -u", user="1000")
    assert done.text == "1000\n", "although this sandbox may run such programs"


async def test_locks_do_not_reach_the_host(box: Sandbox, shared: Path) -> None:
    import fcntl

    holding = await box.start("exec 9< /mnt/new/data/hello; flock -x 9; echo locked; sleep 60")
    assert await anext(aiter(holding.stdout)) == b"locked\n"
    with (shared / "hello").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    await holding.cancel()


async def test_no_path_of_the_host_is_shown(box: Sandbox, server: Server) -> None:
    shown = (await box.run("cat /proc/mounts /proc/self/mountinfo")).text
    line = next(line for line in shown.splitlines() if "/mnt/new/data" in line)
    assert " ro," in line and "nosuid" in line and "nodev" in line
    assert server.data.name not in shown and "/var/tmp" not in shown


async def test_noexec(client: Client, tiny_env: str, shared: Path) -> None:
    mounts = [DataMount(source="shared", target="/data", noexec=True)]
    async with await client.create(tiny_env, limits=SMALL, mounts=mounts) as sandbox:
        assert (await sandbox.run(["/data/busybox", "echo", "x"])).outcome == "not_executable"


async def test_an_existing_directory_is_hidden_and_several_can_be_had(
    client: Client, tiny_env: str, shared: Path
) -> None:
    mounts = [DataMount(source="shared", target=target) for target in ("/home/user", "/data/a", "/data/b")]
    async with await client.create(tiny_env, limits=SMALL, mounts=mounts) as sandbox:
        assert (await sandbox.run("cat /home/user/hello /data/a/hello /data/b/hello")).text.count("host") == 3
        assert (await sandbox.run("ls /data")).text == "a\nb\n"
        assert (await sandbox.run("stat -c %u:%a /data")).text == "0:755\n", "made as root's own"


async def test_an_unknown_name_is_refused_without_a_path(client: Client, tiny_env: str, server: Server) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await client.create(tiny_env, mounts=[DataMount(source="secrets", target="/data")])
    assert refused.value.field == "mounts.source" and "shared" in refused.value.hint
    assert str(server.shared.parent) not in str(refused.value)
    assert (await client.nodes())[0].data_mounts == ("shared",)


@pytest.mark.parametrize(
    "target", ["/", "data", "/proc", "/proc/x", "/sys/fs", "/dev/shm", "/a/../b", "/a//b", "/a/", "/./a", "", "/a\0b"]
)
async def test_where_nothing_can_be_mounted(client: Client, tiny_env: str, target: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await client.create(tiny_env, mounts=[DataMount(source="shared", target=target)])
    assert refused.value.field.startswith("mounts")


async def test_targets_keep_apart(client: Client, tiny_env: str) -> None:
    for targets in (("/a", "/a"), ("/a/b", "/a"), ("/a", "/a/b/c")):
        with pytest.raises(InvalidRequest, match="another target"):
            await client.create(tiny_env, mounts=[DataMount(source="shared", target=target) for target in targets])


async def test_links_of_the_image_lead_nowhere(client: Client, server: Server, shared: Path, tmp_path: Path) -> None:
    """A target behind a link of the image: within the image it is followed, into /proc, /dev or out of it never."""
    root = tmp_path / "crooked"
    for name in ("bin", "proc", "sys", "dev", "real"):
        (root / name).mkdir(parents=True)
    (root / "bin/sh").write_bytes(BUSYBOX.read_bytes())
    (root / "bin/sh").chmod(0o755)
    (root / "fine").symlink_to("/real")
    (root / "up").symlink_to("../../../real")
    (root / "to-proc").symlink_to("/proc")
    (root / "to-dev").symlink_to("dev/shm")
    (root / "magic").symlink_to("/proc/self/cwd")
    (root / "file").write_text("x")
    (root / "dangling").symlink_to("/nowhere/at/all")
    server.run("env", "import", "crooked", str(root))
    for target in ("/fine/data", "/up/data"):
        async with await client.create(
            "crooked", limits=SMALL, mounts=[DataMount(source="shared", target=target)]
        ) as sandbox:
            assert (await sandbox.files.read("/real/data/hello", user="0:0")).startswith(b"hello")
    for target in ("/to-proc/self", "/to-proc", "/to-dev/x", "/magic/x", "/file/x", "/file", "/dangling/x"):
        with pytest.raises(CreateFailed) as failed:
            await client.create("crooked", mounts=[DataMount(source="shared", target=target)])
        assert failed.value.phase == "data-mount" and failed.value.hint
    server.run("env", "rm", "crooked")
