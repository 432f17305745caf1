"""What a sandbox may do beyond the default only when its spec asks for it, and what it may never do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from barchan import Client, Sandbox, errors
from tests.server import Server, once

WHO = r"""
#include <stdio.h>
#include <unistd.h>
int main(void) { return printf("%d %d\n", getuid(), geteuid()) < 0; }
"""
TRACE = r"""
#include <errno.h>
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
    int child = fork();
    if (child == 0) { pause(); return 0; }
    long attached = ptrace(PTRACE_ATTACH, child, 0, 0);
    printf("%d\n", attached ? errno : 0);
    return 0;
}
"""


@pytest.fixture(scope="module")
def powers_env(server: Server, tiny_env: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A layer with a set-user-id program and one that attaches to its child."""
    root = tmp_path_factory.mktemp("powers")
    (root / "opt").mkdir()
    for name, code in (("who", WHO), ("trace", TRACE)):
        source = root / f"{name}.c"
        source.write_text(code)
        subprocess.run(["musl-gcc", "-static", "-O1", "-o", str(root / "opt" / name), str(source)], check=True)
        source.unlink()
    (root / "opt" / "who").chmod(0o4755)
    return once(server, "powers", "import", "powers", str(root))


async def test_set_user_id_programs_work_only_when_asked_for(client: Client, tiny_env: str, powers_env: str) -> None:
    async with await client.create(tiny_env, toolkits=[powers_env]) as box:
        assert (await box.run(["/opt/who"], user="user")).stdout == b"1000 1000\n"
        assert b"NoNewPrivs:\t1" in (await box.run("cat /proc/self/status")).stdout
    async with await client.create(tiny_env, toolkits=[powers_env], setuid=True) as box:
        assert (await box.run(["/opt/who"], user="user")).stdout == b"1000 0\n"
        assert b"NoNewPrivs:\t0" in (await box.run("cat /proc/self/status")).stdout


async def test_debuggers_work_only_when_asked_for(client: Client, tiny_env: str, powers_env: str) -> None:
    async with await client.create(tiny_env, toolkits=[powers_env]) as box:
        assert (await box.run(["/opt/trace"])).stdout == b"1\n", "EPERM"
    async with await client.create(tiny_env, toolkits=[powers_env], ptrace=True) as box:
        assert (await box.run(["/opt/trace"])).stdout == b"0\n"


@pytest.mark.parametrize(
    "attempt",
    [
        "mount -t tmpfs none /mnt",
        "mount -t proc none /tmp",
        "umount /proc/kcore",
        "echo b > /proc/sysrq-trigger",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo -1000 > /proc/1/oom_score_adj",
        "cat /proc/1/environ",
        "cat /proc/1/mem",
        "ls /proc/1/fd/3",
        "ls /proc/1/root/",
        "dd if=/dev/mem of=/dev/null count=1",
        "mknod /tmp/sda b 8 0",
        "hostname other",
        "echo 0 > /sys/power/state",
    ],
)
async def test_root_inside_is_refused(sandbox: Sandbox, attempt: str) -> None:
    """CASES 18: reaching for the host."""
    done = await sandbox.run(attempt)
    assert done.exit_code != 0, done.stdout
    assert (await sandbox.run("echo alive")).stdout == b"alive\n"


async def test_nothing_of_the_platform_is_inside(sandbox: Sandbox, data_dir: Path) -> None:
    """CASES 19: No socket, file, environment variable, mount or process tells of the host's side."""
    seen = (await sandbox.run("env; cat /proc/mounts /proc/self/cgroup /proc/net/unix; ps; ls -la / /tmp /run")).text
    for word in (str(data_dir), "barchan", "/sys/fs/cgroup/", "python"):
        assert word not in seen


async def test_a_replaced_shell_is_not_used_by_the_platform(sandbox: Sandbox) -> None:
    """CASES 19: looking for the platform."""
    await sandbox.run(
        "mkdir /trap; cp /bin/busybox /trap/real; rm /bin/*; printf '#!/trap/real sh\ntouch /sprung\n' > /bin/sh"
    )
    await sandbox.files.write("/tmp/a/b", b"x")
    assert await sandbox.files.read("/tmp/a/b") == b"x"
    assert {entry.path for entry in await sandbox.files.list("/tmp")} == {b"a"}
    await sandbox.processes()
    assert not await sandbox.files.exists("/sprung")


@pytest.mark.parametrize("backend", ["vm", "microvm", "function"])
async def test_backends_that_are_not_there_are_refused(client: Client, tiny_env: str, backend: str) -> None:
    with pytest.raises(errors.NotSupported) as refused:
        await client.create(tiny_env, backend=backend)
    assert refused.value.field == "backend"
