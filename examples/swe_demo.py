"""Sixteen agents, one bug: who fixed it, who did not, and who only made the tests end with 0?

Run by `./dev demo`, as root. Everything here goes through the public SDK and the `barchan` command.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from barchan import BarchanError, Client, EnvironmentRef, Limits, Sandbox
from examples.swe.agents import SIXTEEN, Variant
from examples.swe.task import (
    AGENT,
    BASE,
    EXPECTED,
    PACKAGE,
    REPO,
    REPORT,
    RUN_HIDDEN_TESTS,
    VERIFIER,
    fetch,
    fingerprint,
    layers,
)

MIB = 1 << 20
CACHE = Path(os.environ.get("BARCHAN_CACHE", "/var/cache/barchan"))
DATA = CACHE / "demo"
STAMP = CACHE / "demo.stamp"
PATHS = {"PATH": "/opt/swe-tools/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": "src"}


def create(client: Client, environment: EnvironmentRef, role: str) -> Awaitable[Sandbox]:
    return client.create(
        environment,
        limits=Limits(memory=256 * MIB, cpus=1, pids=64, disk=64 * MIB),
        workdir=REPO,
        env=PATHS,
        labels={"demo": role},
        lifetime=600,
    )


READY = (
    "ready: asked for all at once, of a server that has just started and has made none ahead. "
    "It is several times less for those that come later, and for one alone."
)


@dataclass
class Row:
    """One line of the table, filled in as its agent goes on."""

    variant: Variant
    sandbox: str = ""
    ready_ms: float | None = None
    steps: int = 0
    passed: int | None = None
    reward: int | None = None
    failure: str = ""


async def rollout(client: Client, row: Row) -> None:
    """One agent's life, then the verdict on the files that it left."""
    started = time.perf_counter()
    async with await create(client, AGENT, "agent") as sandbox:
        row.ready_ms = (time.perf_counter() - started) * 1e3
        row.sandbox = sandbox.id
        await work(sandbox, row)
        with tempfile.TemporaryDirectory(prefix="barchan-demo-") as left:
            await sandbox.files.download(PACKAGE, Path(left) / "package")
            passed = await verify(client, Path(left) / "package")
    row.passed = len(passed)
    row.reward = int(passed == EXPECTED)


async def work(sandbox: Sandbox, row: Row) -> None:
    """The agent: a fixed list of commands. A command that fails is for the agent to deal with, so go on."""
    for command in row.variant.steps():
        await sandbox.run(list(command), timeout=60)
        row.steps += 1


async def verify(client: Client, package: Path) -> frozenset[str]:
    """Ids of the hidden tests that pass over the agent's package.

    In a sandbox that the agent never saw; nothing but the package goes over: no test, no sitecustomize, no process.
    """
    async with await create(client, VERIFIER, "verifier") as sandbox:
        await sandbox.files.remove(PACKAGE, recursive=True)
        await sandbox.files.upload(package, PACKAGE)
        await sandbox.run(list(RUN_HIDDEN_TESTS), timeout=60)
        written = await sandbox.files.exists(REPORT)
        return frozenset((await sandbox.files.read_text(REPORT)).split()) if written else frozenset()


async def guarded(client: Client, row: Row) -> None:
    """A platform error spoils one row, not the run."""
    try:
        await rollout(client, row)
    except BarchanError as error:
        row.failure = f"{error.code}: {error}"


def common_failure(rows: list[Row]) -> str:
    """What went wrong with every one of them; empty if not all failed, or not alike."""
    failures = {row.failure for row in rows}
    return failures.pop() if len(failures) == 1 else ""


def table(rows: list[Row]) -> Table:
    common = common_failure(rows)
    shown = Table(title="cachetools: an entry outlives its time-to-live", caption=READY)
    shown.add_column("sandbox", no_wrap=True)
    shown.add_column("variant", no_wrap=True, min_width=22)
    for title in ("ready ms", "steps", "tests", "reward"):
        shown.add_column(title, justify="right")
    for row in rows:
        tests = "" if row.passed is None else f"{row.passed}/{len(EXPECTED)}"
        ready = "" if row.ready_ms is None else f"{row.ready_ms:.0f}"
        reward = ("failed" if common else row.failure) or ("" if row.reward is None else str(row.reward))
        shown.add_row(row.sandbox and f"…{row.sandbox[-8:]}", row.variant.name, ready, str(row.steps), tests, reward)
    return shown


@contextmanager
def shown(console: Console, rows: list[Row]) -> Iterator[None]:
    """The table as it fills up on a terminal; elsewhere once, when it is full."""
    if console.is_terminal:
        with Live(console=console, get_renderable=lambda: table(rows), refresh_per_second=8, transient=False):
            yield
    else:
        yield
        console.print(table(rows))
    if common := common_failure(rows):
        console.print(f"all of them: {common}", markup=False, highlight=False, soft_wrap=True)
    console.file.flush()


async def solve(console: Console) -> list[Row]:
    rows = [Row(variant) for variant in SIXTEEN]
    async with Client(data=DATA) as client:
        with shown(console, rows):
            await asyncio.gather(*(guarded(client, row) for row in rows))
    return rows


def barchan(*argv: str, quiet: bool = False) -> str:
    """Returns what it wrote on standard error when it failed and `quiet`."""
    command = [sys.executable, "-m", "barchan.cli.main", *argv, "--data", str(DATA)]
    pipe = subprocess.PIPE if quiet else None
    done = subprocess.run(command, check=not quiet, stdout=subprocess.DEVNULL, stderr=pipe, text=True)
    return done.stderr if quiet and done.returncode else ""


def prepare() -> None:
    """Make the layers, unless they are there and the task has not changed since."""
    DATA.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (DATA / "layers").exists() and STAMP.exists() and STAMP.read_text() == fingerprint():
        return
    barchan("env", "bootstrap", BASE)
    for name, tree in layers(fetch(CACHE / "sdist"), CACHE / "trees").items():
        barchan("env", "import", name, str(tree))
    STAMP.write_text(fingerprint())


def start() -> None:
    """The demo's data directory is its own to delete, when another version of barchan made it."""
    failure = barchan("up", "-d", "--scratch-bytes", "2g", quiet=True)
    if "[wrong_version]" in failure:
        print("the demo's data directory was made by another version of barchan: it is made anew", file=sys.stderr)
        barchan("down", "--delete")
        prepare()
        failure = barchan("up", "-d", "--scratch-bytes", "2g", quiet=True)
    if failure:
        sys.exit(failure.rstrip())


def is_running() -> bool:
    """Whether somebody serves the demo's data directory."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(DATA / "run/api.sock")) == 0


@contextmanager
def server() -> Iterator[None]:
    """The demo's own server; one that is there already is used and left running."""
    running = is_running()
    if not running:
        start()
    try:
        yield
    finally:
        if not running:
            barchan("down")


def main() -> int:
    console = Console()
    started = time.perf_counter()
    prepare()
    with server():
        ready = time.perf_counter()
        rows = asyncio.run(solve(console))
        done = time.perf_counter()
    right = [row for row in rows if row.reward == row.variant.reward]
    console.print(
        f"{len(rows)} agents, {sum(row.reward or 0 for row in rows)} rewarded, {len(right)} verdicts as expected; "
        f"{done - ready:.1f} s, with preparation {time.perf_counter() - started:.1f} s"
    )
    return 0 if len(right) == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
