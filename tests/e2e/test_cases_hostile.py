"""A sandbox that reads everything, and one that looks for the platform. Attacks on the kernel: tests/host/test_attack_kernel.py."""

from __future__ import annotations

import time
from pathlib import Path

from barchan import Client, Sandbox
from tests.server import Server

READ_ALL = """
import os, stat, sys
read = refused = 0
for place in ("/proc", "/sys", "/dev"):
    for root, directories, files in os.walk(place):
        for name in files:
            path = os.path.join(root, name)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            except OSError:
                refused += 1
                continue
            try:
                os.read(fd, 65536)
                read += 1
            except OSError:
                refused += 1
            os.close(fd)
print(read, refused)
"""


async def test_searching_everything_harms_nobody(client: Client, debian: Sandbox, sandbox: Sandbox) -> None:
    """CASES 18: `grep -r x /` by root runs until its time limit (a process's pagemap alone has 256 GiB); all others go on."""
    grep = await debian.start("exec grep -r -s barchan-is-not-here /", timeout=5, grace=0)
    began = time.monotonic()
    assert (await sandbox.run("echo neighbour")).stdout == b"neighbour\n"
    assert time.monotonic() - began < 2
    assert (await grep.wait()).outcome in ("timed_out", "exited")
    assert await debian.processes() == ()
    assert (await debian.run("echo alive")).stdout == b"alive\n"
    assert (await client.nodes())[0].sandboxes >= 2


async def test_every_file_of_proc_and_sys_may_be_read(debian: Sandbox) -> None:
    """CASES 18: as root inside; some thousand answer, the rest is refused, nothing blocks."""
    done = await debian.run(["python3", "-c", READ_ALL], timeout=60)
    read, refused = map(int, done.text.split())
    assert read > 500 and refused > 0, done.stderr
    assert (await debian.run("echo alive")).stdout == b"alive\n"


TRAP = '#!/trap/sh\n: >> /sprung\nexec /trap/sh "$@"\n'


async def test_programs_put_in_place_of_the_images_wait_in_vain(
    server: Server, sandbox: Sandbox, tmp_path: Path
) -> None:
    """CASES 19: shells, loader and tools replaced: files, trees, lists, stats and a stop run none of them."""
    await sandbox.run("mkdir /trap /lib64 /lib; cp /bin/busybox /trap/sh")
    for name in (
        "bin/sh",
        "bin/bash",
        "bin/tar",
        "bin/cat",
        "bin/ps",
        "bin/busybox",
        "lib64/ld-linux-x86-64.so.2",
        "lib/ld.so",
    ):
        await sandbox.files.write(f"/{name}", TRAP, mode=0o755)
    assert (await sandbox.run("true")).exit_code == 0 and await sandbox.files.exists("/sprung"), (
        "the control: it springs"
    )
    await sandbox.files.remove("/sprung")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("x")
    await sandbox.files.upload(tmp_path / "tree", "/up/tree")
    await sandbox.files.download("/up", tmp_path / "down")
    await sandbox.files.mkdir("/made/deep")
    await sandbox.files.rename("/made/deep", "/made/moved")
    await sandbox.files.remove("/made", recursive=True)
    await sandbox.files.list("/", depth=2)
    await sandbox.files.stat("/bin/sh")
    await sandbox.processes()
    await sandbox.stats()
    await sandbox.renew()
    assert (await sandbox.run(["/trap/sh", "-c", "echo $0"])).exit_code == 0
    assert not await sandbox.files.exists("/sprung")


async def test_nothing_tells_of_the_platform(server: Server, debian: Sandbox) -> None:
    """CASES 19: sockets, descriptors of process 1, environment, mounts, logs: nothing to find and nothing to write to."""
    seen = await debian.run(
        "env; cat /proc/mounts /proc/*/mountinfo /proc/*/environ /proc/*/cmdline /proc/*/cgroup /proc/net/unix /proc/keys; "
        "ls -la / /tmp /run /var/log /var/tmp /dev /dev/shm /proc/*/fd /proc/*/cwd; find / -xdev -type s",
        timeout=60,
    )
    for word in (server.data.name, "barchan", "/sys/fs/cgroup/", ".sock", "spawner"):
        assert word not in seen.text, word
    for attempt in (
        "ls /proc/1/fd/ | grep .",
        "cat /proc/1/environ | grep .",
        "echo x > /proc/1/mem",
        "head -c1 /proc/1/mem",
        "echo forged > /proc/1/fd/1",
        "readlink /proc/1/exe",
    ):
        done = await debian.run(attempt)
        assert done.exit_code != 0 and not done.stdout, attempt
