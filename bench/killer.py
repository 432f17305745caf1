"""The test driver of the kill matrix: starts the server and its clients, and kills by a schedule; it may be killed, too.

Runs as `python -m bench.killer JSON` (`Round`) below `bench.kill`, which looks at what is left. When something dies is drawn
from the seed as a share of the round's work, not as a time: a slow machine is killed at the same points as a fast one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

import msgspec

from barchan.cli.processes import ProcessRef, is_alive, reference, send
from bench.ledger import Entry, Ledger
from bench.load import Share, entries, tag

Victim = Literal["api", "node", "spawner", "guest", "client", "driver"]
OFTEN: dict[Victim, tuple[int, int]] = {
    "api": (0, 2), "node": (1, 3), "spawner": (1, 2), "guest": (1, 5), "client": (0, 2), "driver": (0, 1),
}  # fmt: skip
"""Least and most kills of a round."""
POLL = 0.002
ROOT = Path(__file__).parents[1]
CGROUPS = Path("/sys/fs/cgroup")


class Round(msgspec.Struct, frozen=True, kw_only=True):
    data: str
    ledger: str
    seed: int
    round: int
    boxes: int
    clients: int
    scratch: str = "1g"

    def shares(self) -> tuple[Share, ...]:
        each = [self.boxes // self.clients + (i < self.boxes % self.clients) for i in range(self.clients)]
        return tuple(
            Share(data=self.data, ledger=self.ledger, seed=self.seed, round=self.round, client=i, boxes=n)
            for i, n in enumerate(each)
        )


class Kill(NamedTuple):
    at: float
    """Share of the round's entries in the ledger."""
    victim: Victim
    delay: float
    """Seconds after that."""


def schedule(seed: int, round: int) -> tuple[Kill, ...]:
    """Drawn from the seed alone. The driver dies in every other round or so, and nothing is killed after it."""
    random = Random(f"kills {tag(seed, round)}")
    kills = [
        Kill(random.random(), victim, random.random() * 0.01)
        for victim, (least, most) in OFTEN.items()
        for _ in range(random.randint(least, most))
    ]
    kills.sort()
    deaths = [i for i, kill in enumerate(kills) if kill.victim == "driver"]
    return tuple(kills[: deaths[0] + 1] if deaths else kills)


def up(data: Path, scratch: str) -> None:
    """Start the server in the background. A server that is there already is fine."""
    command = [sys.executable, "-m", "barchan.cli.main", "up", "-d", "--data", str(data), "--name", "kill"]
    subprocess.run(
        [*command, "--scratch-bytes", scratch], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True
    )


class Driver:
    def __init__(self, round: Round) -> None:
        self._round = round
        self._data = Path(round.data)
        self._ledger = Ledger(Path(round.ledger))
        self._random = Random(f"victims {tag(round.seed, round.round)}")
        self._clients: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        up(self._data, self._round.scratch)
        shares = self._round.shares()
        for share in shares:
            command = [sys.executable, "-m", "bench.load", msgspec.json.encode(share).decode()]
            self._clients.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=ROOT))
        total = sum(entries(share) for share in shares)
        for kill in schedule(self._round.seed, self._round.round):
            self._wait_for(int(kill.at * total))
            time.sleep(kill.delay)
            self._kill(kill.victim)
        for client in self._clients:
            client.wait()

    def _wait_for(self, count: int) -> None:
        """Until the ledger has so many entries, or nobody is left to write them."""
        with open(self._ledger.path, "rb") as file:
            seen = 0
            while seen < count and any(client.poll() is None for client in self._clients):
                seen += file.read().count(b"\n")
                time.sleep(POLL)

    def _kill(self, victim: Victim) -> None:
        found = self._find(victim)
        if found is None:
            return
        sandbox, process = found
        self._ledger.add(Entry(what="killing", verb=victim, sandbox=sandbox, pid=process.pid))
        send(process, signal.SIGKILL)

    def _find(self, victim: Victim) -> tuple[str, ProcessRef] | None:
        if victim == "driver":
            return "", reference(os.getpid())
        if victim == "client":
            alive = [client for client in self._clients if client.poll() is None]
            return ("", reference(self._random.choice(alive).pid)) if alive else None
        if victim == "guest":
            guests = sorted(first_processes(self._data))
            return self._random.choice(guests) if guests else None
        process = service(self._data, victim)
        return ("", process) if process else None


def service(data: Path, name: str) -> ProcessRef | None:
    """`api`, `node` or `spawner` of the server, if it is there at the moment."""
    try:
        services = json.loads((data / "run/up.json").read_text())["services"]
        process = ProcessRef(**services["node" if name == "spawner" else name])
        if name == "spawner":
            process = next(child for child in children(process.pid) if b"spawner" in command_line(child.pid))
    except (FileNotFoundError, KeyError, StopIteration):
        return None
    return process if is_alive(process) else None


def children(pid: int) -> list[ProcessRef]:
    try:
        return [reference(int(child)) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def first_processes(data: Path) -> Iterator[tuple[str, ProcessRef]]:
    """Of every sandbox, also half-made ones: its cgroup's name and its process 1."""
    parent = unified() / f"barchan-{(data / 'instance').read_text().strip()}"
    for place, _, _ in os.walk(parent):  # groups come and go meanwhile: a walk passes over what is gone
        try:
            pids = [int(pid) for pid in Path(place, "cgroup.procs").read_text().split()]
        except OSError:
            continue
        for process in (reference(pid) for pid in pids if is_first(pid)):
            if process.started:
                yield Path(place).relative_to(parent).parts[0], process


def unified() -> Path:
    """Where cgroup2 is mounted."""
    return CGROUPS / "unified" if (CGROUPS / "unified").is_dir() else CGROUPS


def is_first(pid: int) -> bool:
    """Whether it is process 1 of a pid namespace below ours."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.partition("\nNSpid:")[2].splitlines()[0].split()[-1] == "1"


if __name__ == "__main__":
    Driver(msgspec.json.decode(sys.argv[1], type=Round)).run()
