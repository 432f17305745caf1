"""Run in a test machine: one sandbox from create to stop, through SDK, API, node and guest. Prints what it saw as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from barchan import Client, Limits, Sandbox
from tests.vm.inside.site import DATA, make_environment

MIB = 1 << 20
LIMITS = Limits(memory=48 * MIB, pids=16, disk=24 * MIB, cpus=0.5)


async def until_listed(box: Sandbox, name: bytes) -> list[bytes]:
    """Command lines once `name` is among them: a child in the background may not have become its program yet."""
    async with asyncio.timeout(30):
        while True:
            names = [b" ".join(process.argv) for process in await box.processes()]
            if any(name in line for line in names):
                return names
            await asyncio.sleep(0.05)


async def journey() -> dict[str, object]:
    async with Client(data=DATA) as client, await client.create("tiny", limits=LIMITS) as box:
        return {"exec": await commands(box), "files": await files(box), "limits": await limits(box)}


async def commands(box: Sandbox) -> dict[str, object]:
    """As root and as a user, with input, in time and over it, in the background."""
    plain = await box.run("echo out; echo err >&2; exit 3")
    fed = await box.run(["cat"], stdin=b"x" * 100_000, user="user")
    late = await box.run("trap '' TERM; (setsid sleep 600 &); sleep 600", timeout=1, grace=0.2)
    back = await box.run("sleep 600 & echo started")
    names = await until_listed(box, b"sleep 600")
    return {
        "plain": [plain.exit_code, plain.stdout.decode(), plain.stderr.decode()],
        "fed": len(fed.stdout),
        "late": late.outcome,
        "back": back.stdout.decode(),
        "sleepers": sum(b"sleep 600" in name for name in names),
        "group": (await box.run("cat /proc/self/cgroup")).stdout.startswith(b"0::/x"),
        "root": (await box.run("stat -c '%u %g' / /dev /dev/shm /home")).stdout.decode(),
    }


async def files(box: Sandbox) -> dict[str, object]:
    await box.files.write("/tmp/a/b", b"bytes" * 50_000)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        (Path(place) / "up" / "deep").mkdir(parents=True)
        (Path(place) / "up" / "deep" / "file").write_text("tree")
        await box.files.upload(Path(place) / "up", "/tmp/up")
        await box.files.download("/tmp/up", Path(place) / "down")
        down = (Path(place) / "down" / "deep" / "file").read_text()
    await box.run("mv /home /moved; rm -r /moved")
    return {
        "read": len(await box.files.read("/tmp/a/b")),
        "listed": sorted(entry.path.decode() for entry in await box.files.list("/tmp")),
        "down": down,
        "lower": await box.files.exists("/home"),
    }


async def limits(box: Sandbox) -> dict[str, object]:
    """Each limit on its own, and what was hit by its name."""
    memory = await box.run("dd if=/dev/zero of=/dev/null bs=96M count=1")
    disk = await box.run("dd if=/dev/zero of=/big bs=1M count=32")
    await box.run("rm -f /big")
    pids = await box.run("for i in $(seq 24); do sleep 5 & done; wait", timeout=4, grace=0)
    alive = await box.run("echo alive")
    return {"memory": memory.limit, "disk": disk.limit, "pids": pids.limit, "alive": alive.stdout.decode()}


if __name__ == "__main__":
    make_environment()
    json.dump(asyncio.run(journey()), sys.stdout)
