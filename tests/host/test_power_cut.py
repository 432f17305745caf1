"""A power cut keeps what was acknowledged as durable.

The log lies on an ext4 in a loop image. The writer is killed, and the image is copied while it is still mounted: the copy holds only what the
inner file system had handed to its device. The copy is mounted, its journal replayed, and the log opened.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from barchan.trajectory.index import ExecState, Index
from barchan.trajectory.log import Log

ROOT = Path(__file__).parents[2]
SEGMENT = 300_000
NAMES = [f"s{number}" for number in range(8)]

WRITER = """
import asyncio, functools, os, sys
from pathlib import Path
from barchan.node import recorder as module
from tests.unit.test_recorder import RUN, SPEC, open_at, result_of

if sys.argv[2] == "unsynced":
    module.Log.open = functools.partial(module.Log.open, fdatasync=lambda fd: None)

async def work(recorder, sandbox):
    await recorder.create(sandbox, SPEC)
    for number in range(1_000_000):
        id = f"e{number}"
        begun = await recorder.begin_exec(sandbox, id, RUN)
        total = 0
        for _ in range(number % 4):
            total = await recorder.output(sandbox, id, 1, total, os.urandom(number * 37 % 5000))
        await recorder.end_exec(sandbox, id, result_of(id))
        os.write(1, f"{sandbox} {id} {begun.seq} {total}\\n".encode())

async def main():
    recorder = await open_at(Path(sys.argv[1]), segment_bytes=int(sys.argv[3]))
    os.write(1, b"ready\\n")
    await asyncio.gather(*(work(recorder, f"s{n}") for n in range(8)))

asyncio.run(main())
"""


@contextmanager
def mounted(image: Path, place: Path) -> Iterator[Path]:
    """The image at `place`, or a skip that says why it cannot be."""
    place.mkdir()
    done = subprocess.run(["mount", "-o", "loop", image, place], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount an ext4 image: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def make_image(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", path], check=True)
    return path


def write_until_killed(data: Path, mode: str, lines: int, segment_bytes: int) -> list[list[str]]:
    """What the writer had acknowledged when it was killed: sandbox, command, seq, bytes of output."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    argv = [sys.executable, "-c", WRITER, str(data), mode, str(segment_bytes)]
    writer = subprocess.Popen(argv, stdout=subprocess.PIPE, env=env)
    assert writer.stdout is not None
    with writer, writer.stdout as pipe:
        assert pipe.readline() == b"ready\n"
        seen = [pipe.readline() for _ in range(lines)]
        writer.kill()
        seen += pipe.readlines()
    return [line.decode().split() for line in seen if line.endswith(b"\n")]


def after_power_cut(tmp_path: Path, mode: str, segment_bytes: int) -> tuple[list[list[str]], Index]:
    image, copy = make_image(tmp_path / "image"), tmp_path / "copy"
    with mounted(image, tmp_path / "before") as place:
        os.sync()
        acknowledged = write_until_killed(place / "data", mode, 2000, segment_bytes)
        subprocess.run(["cp", "--sparse=always", image, copy], check=True)
    index = Index(NAMES)
    with mounted(copy, tmp_path / "after") as place:
        Log.open(place / "data" / "log", segment_bytes, visit=index.apply).close()
    return acknowledged, index


def is_kept(state: ExecState | None, seq: str, total: str) -> bool:
    return state is not None and state.ended and (state.seq, state.stdout) == (int(seq), int(total))


def lost(acknowledged: list[list[str]], index: Index) -> int:
    return sum(not is_kept(index.execs[name].get(id), seq, total) for name, id, seq, total in acknowledged)


def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    acknowledged, index = after_power_cut(tmp_path, "synced", SEGMENT)
    assert len(acknowledged) >= 2000
    assert lost(acknowledged, index) == 0


def test_without_the_sync_much_is_lost(tmp_path: Path) -> None:
    """The control: shows that the test above can fail. One large segment, since starting one syncs the directory."""
    acknowledged, index = after_power_cut(tmp_path, "unsynced", 1 << 30)
    assert lost(acknowledged, index) > len(acknowledged) // 2
