"""Run in a test machine: every attack in sandboxes of each kind, and without one. Prints verdicts as JSON.

The control runs as the machine's own root, on ext4 and on XFS: nothing forbids anything there.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from barchan import Client
from tests.host.attacks import verdicts
from tests.host.spawn_site import NATIVE
from tests.vm.inside.site import DATA, make_environment

ASKED = Path("/var/tmp/modprobe.log")
"""Modules that the kernel asked for, one a line."""
PROGRAM = NATIVE / "build" / "attack_kernel"
KINDS = ("plain", "setuid", "ptrace")


def control(place: Path) -> dict[str, int]:
    done = subprocess.run([PROGRAM, "-a", place], capture_output=True, text=True, check=True)
    return verdicts(done.stdout)


@contextmanager
def xfs() -> Iterator[Path]:
    """A throw-away XFS on a loop device."""
    image, place = Path("/var/tmp/xfs"), Path("/mnt")
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run(["mkfs.xfs", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop,prjquota", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)
        image.unlink()


async def sandboxed(client: Client, kind: str) -> dict[str, dict[str, int]]:
    async with await client.create("tiny", setuid=kind == "setuid", ptrace=kind == "ptrace") as box:
        found = {}
        for user in ("root", "user"):
            done = await box.run(["/bin/attack_kernel", "-a"], user=user, timeout=60, check=True)
            found[f"{kind} {user}"] = verdicts(done.stdout.decode())
        assert (await box.run("echo alive")).stdout == b"alive\n"
        return found


async def in_sandboxes() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    async with Client(data=DATA) as client:
        for kind in KINDS:
            found |= await sandboxed(client, kind)
    return found


def controls() -> dict[str, dict[str, int]]:
    for kind, at in (("tracefs", "/sys/kernel/tracing"), ("securityfs", "/sys/kernel/security")):
        subprocess.run(["mount", "-t", kind, "none", at], check=True)
    place = Path("/var/tmp/control")
    place.mkdir(exist_ok=True)
    with xfs() as mounted:
        return {"control": control(place), "xfs": control(mounted)}


def note_modules() -> None:
    """Instead of modprobe the kernel starts a program that only writes down what for."""
    helper = Path("/var/tmp/modprobe")
    helper.write_text(f"#!/bin/sh\nfor last; do :; done; echo $last >> {ASKED}\n")
    helper.chmod(0o755)
    Path("/proc/sys/kernel/modprobe").write_text(str(helper))


def asked() -> dict[str, int]:
    """Since the last call, by name."""
    names = ASKED.read_text().split() if ASKED.exists() else []
    ASKED.unlink(missing_ok=True)
    return dict(Counter(names))


def main() -> dict[str, dict[str, int]]:
    subprocess.run(["/vm/load"], check=True)  # what is absent refuses for the wrong reason
    make_environment()
    note_modules()
    found = asyncio.run(in_sandboxes())
    found["modules for sandboxes"] = asked()
    found |= controls()
    found["modules for control"] = asked()
    return found


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
