"""Does anything get lost or left behind when parts are killed? python -m bench.kill [--rounds N] [--seed N] [--round K] [--json]

A round makes, uses and stops 100 sandboxes from several client processes while kill -9 meets clients, API, node agent,
spawner, first processes of sandboxes and the test driver that started the server. This process outlives them all: it keeps
the ledger of what was acknowledged, and afterwards checks the survivors, the log, the registry and the host. A failed round
prints how to run it again: what is done and who dies when follow from seed and round alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import msgspec

from barchan import Client
from bench import audit, leaks
from bench.figures import Figure, show
from bench.killer import ROOT, Round, schedule, service, up
from bench.ledger import read
from bench.load import SMALL, tag
from bench.rig import DISK, MIB, barchan, machine, make_tiny

BOXES, CLIENTS = 100, 4
ROUND_SECONDS = 300.0
DOWN_SECONDS = 120.0
FD_SLACK, SPACE_SLACK = 8, 4 * MIB


@dataclass(frozen=True)
class Site:
    """A data directory with the environment `tiny`, and what its server held when it had nothing to do."""

    data: Path
    scratch: str
    descriptors: int
    used: int

    @property
    def instance(self) -> str:
        return (self.data / "instance").read_text().strip()


@dataclass
class Verdict:
    """Of one round."""

    round: Round
    wrong: list[str]
    killed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    acknowledged: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def text(self) -> str:
        counts = [
            " ".join(f"{k} {n}" for k, n in sorted(c.items())) for c in (self.killed, self.acknowledged, self.failed)
        ]
        head = f"seed {self.round.seed} round {self.round.round}: {'FAILED' if self.wrong else 'ok'} in {self.seconds:.1f} s"
        lines = [f"{head}; killed: {counts[0]}; acknowledged: {counts[1]}; failed: {counts[2] or 'nothing'}"]
        if self.wrong:
            events = schedule(self.round.seed, self.round.round)
            lines += [f"  {kill.at:.3f} kill {kill.victim} after {kill.delay * 1e3:.1f} ms" for kill in events]
            lines += [f"  WRONG: {line}" for line in self.wrong[:40]]
            lines += [f"  {len(self.wrong)} in all; ledger: {self.round.ledger}"]
            lines += [f"  again: ./dev bench kill --seed {self.round.seed} --round {self.round.round}"]
        return "\n".join(lines)


@contextmanager
def site(data: Path, scratch: str = "1g") -> Iterator[Site]:
    """Make a data directory and look at its idle server; remove everything at the end."""
    try:
        with TemporaryDirectory() as directory:
            barchan(data, "env", "import", "tiny", str(make_tiny(Path(directory, "rootfs"))))
        yield asyncio.run(_idle(data, scratch))
    finally:
        if (data / "run").is_dir():
            down(data)
        shutil.rmtree(data, ignore_errors=True)


async def _idle(data: Path, scratch: str) -> Site:
    up(data, scratch)
    async with Client(data=data) as client:
        for _ in range(3):
            async with await client.create("tiny", limits=SMALL) as sandbox:
                await sandbox.run(["/bin/true"])
        node = service(data, "node")
        assert node is not None
        await audit.at_rest(client, data)
    held, used = leaks.own_descriptors(node.pid), leaks.used(data / "scratch")
    down(data)
    return Site(data, scratch, held, used)


def down(data: Path) -> None:
    command = [sys.executable, "-m", "barchan.cli.main", "down", "--data", str(data)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=DOWN_SECONDS)


def play(place: Site, seed: int, number: int, boxes: int = BOXES, clients: int = CLIENTS) -> Verdict:
    """One round from the start of its server to the last check."""
    began, since = time.monotonic(), time.time()
    ledger = place.data / f"run/ledger-{tag(seed, number)}"
    ledger.unlink(missing_ok=True)
    round = Round(
        data=str(place.data),
        ledger=str(ledger),
        seed=seed,
        round=number,
        boxes=boxes,
        clients=clients,
        scratch=place.scratch,
    )
    wrong = list(_run(round))
    told = audit.told(read(ledger))
    wrong += told.wrong + audit.failures(told)
    wrong += list(_afterwards(place, told, tag(seed, number), since))
    failed = Counter(entry.code for box in told.boxes.values() for entry in box.failed)
    done = Counter[str](entry.what for entry in read(ledger) if entry.what in ("created", "ran", "wrote", "stopped"))
    return Verdict(round, wrong, told.killed, failed, done, time.monotonic() - began)


def _run(round: Round) -> Iterator[str]:
    """The driver and its clients, until the last one has ended. Clients of a killed driver go on."""
    driver = subprocess.Popen([sys.executable, "-m", "bench.killer", msgspec.json.encode(round).decode()], cwd=ROOT)
    end = time.monotonic() + ROUND_SECONDS
    if not _ended(driver.pid, end):
        yield f"the driver was not done after {ROUND_SECONDS:g} s"
    if (code := driver.wait()) not in (0, -signal.SIGKILL):
        yield f"the driver ended with {code}"
    for pid in {entry.pid for entry in read(Path(round.ledger)) if entry.what == "client"}:
        if not _ended(pid, end):
            yield f"client {pid} was not done after {ROUND_SECONDS:g} s"


def _ended(pid: int, deadline: float) -> bool:
    """Wait for a process, whoever's child it is; kill it when it takes too long."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        watch = select.poll()
        watch.register(fd, select.POLLIN)
        if watch.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return True
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        watch.poll(10_000)
        return False
    finally:
        os.close(fd)


def _afterwards(place: Site, told: audit.Told, tag: str, since: float) -> Iterator[str]:
    _up_again(place)
    yield from asyncio.run(audit.survivors(place.data, told, tag))
    node = service(place.data, "node")
    if node is None:
        yield "there is no node agent"
        return
    yield from leaks.of_sandboxes(place.data, place.instance, node.pid)
    held = leaks.own_descriptors(node.pid)
    if held > place.descriptors + FD_SLACK:
        kinds = leaks.descriptors(node.pid).most_common(8)
        yield f"the agent holds {held} descriptors, {place.descriptors} when it was idle: {kinds}"
    used = leaks.used(place.data / "scratch")
    if used > place.used + SPACE_SLACK:
        yield f"{(used - place.used) / MIB:.1f} MiB of the scratch volume did not come back"
    try:
        down(place.data)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        yield f"`barchan down` failed: {(error.stderr or b'').decode()[-1000:]}"
    yield from leaks.of_server(place.data, place.instance)
    yield from audit.registry(place.data / "node.db")
    yield from audit.trajectory(place.data / "log", told, since)


def _up_again(place: Site) -> None:
    """A driver that was killed early may not have started it. One that runs already refuses."""
    try:
        up(place.data, place.scratch)
    except subprocess.CalledProcessError as error:
        if b"is served by another" not in error.stderr:
            raise


def rounds(place: Site, seed: int, numbers: range, boxes: int, clients: int) -> Iterator[Verdict]:
    for number in numbers:
        verdict = play(place, seed, number, boxes, clients)
        print(verdict.text(), file=sys.stderr, flush=True)
        yield verdict
        if verdict.wrong:
            _keep(place, verdict)
        else:
            Path(verdict.round.ledger).unlink()


def _keep(place: Site, verdict: Verdict) -> None:
    """The end of the server's log, for whoever looks for the reason."""
    log = place.data / "run/up.log"
    if log.exists():
        Path(gettempdir(), f"{Path(verdict.round.ledger).name}.log").write_text(
            log.read_text(errors="replace")[-200_000:]
        )
    shutil.copy(verdict.round.ledger, gettempdir())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--round", type=int, help="only this one")
    parser.add_argument("--boxes", type=int, default=BOXES, help=f"sandboxes of a round [{BOXES}]")
    parser.add_argument("--clients", type=int, default=CLIENTS, help=f"client processes [{CLIENTS}]")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for programs")
    given = parser.parse_args()
    numbers = range(given.rounds) if given.round is None else range(given.round, given.round + 1)
    with site(DISK / f"barchan-bench-{os.getpid()}") as place:
        verdicts = list(rounds(place, given.seed, numbers, given.boxes, given.clients))
    show("kill", figures(verdicts, given.seed), [machine()], given.json)
    sys.exit(any(verdict.wrong for verdict in verdicts))


def figures(verdicts: list[Verdict], seed: int) -> list[Figure]:
    killed, failed, done = Counter[str](), Counter[str](), Counter[str]()
    for verdict in verdicts:
        killed += verdict.killed
        failed += verdict.failed
        done += verdict.acknowledged
    bad = sum(bool(verdict.wrong) for verdict in verdicts)
    return [
        Figure("kill_rounds_failed", float(bad), "rounds", 0, note=f"of {len(verdicts)}, seed {seed}"),
        *(Figure(f"kill_of_{name}", float(n), "kills") for name, n in sorted(killed.items())),
        *(Figure(f"kill_{name}", float(n), "acknowledged") for name, n in sorted(done.items())),
        *(Figure(f"kill_failed_{name}", float(n), "typed failures") for name, n in sorted(failed.items())),
    ]


if __name__ == "__main__":
    main()
