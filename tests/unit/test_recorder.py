"""What the recorder acknowledged is in the log, in order, once; whatever happens to the process or the disk."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from barchan.config import Layout, NodeConfig
from barchan.errors import (
    AdmissionRefused,
    Conflict,
    ExecNotFound,
    InternalError,
    InvalidRequest,
    LogCorrupt,
    NodeStorageFull,
    ProtocolError,
    SandboxLogFull,
    SandboxNotFound,
)
from barchan.node import recorder as recorder_module
from barchan.node.recorder import Recorder
from barchan.packing import PackedLayer, PackOrder
from barchan.spec import EnvironmentRef, Exec, ExecId, ExecResult, SandboxId, SandboxSpec, Terminal
from barchan.trajectory.index import Index
from barchan.trajectory.log import Log
from barchan.trajectory.record import Event, Kind, Output, PackBegun, PackEnded, Position, Record
from tests.disks import small_disk

SPEC = SandboxSpec(environment=EnvironmentRef(base="debian"), secrets={"TOKEN": "hunter2-spec"})
RUN = Exec(argv=(b"ls",), secrets={b"TOKEN": b"hunter2-exec"})
ROOT = Path(__file__).parents[2]


def config_of(data: Path, **changes: int) -> NodeConfig:
    return NodeConfig(layout=Layout(data), name="n1", **changes)  # type: ignore[arg-type]


ORDER = PackOrder(name="made")
PACKED = PackedLayer(
    name="made", version=1, reference="made@1", digest="d", layer="d", layers=1, sandbox=SandboxId("s"), size=1
)


async def open_at(data: Path, *live: str, **changes: int) -> Recorder:
    return await Recorder.open(Layout(data), config_of(data, **changes), live=live)


def result_of(id: str, **fields: int) -> ExecResult:
    return ExecResult(id=ExecId(id), outcome="exited", exit_code=fields.get("exit_code", 0))


@pytest.fixture
async def recorder(tmp_path: Path) -> AsyncIterator[Recorder]:
    async with await open_at(tmp_path) as recorder:
        await recorder.create("s", SPEC)
        yield recorder


async def read(recorder: Recorder, id: str, stream: int = 1, offset: int = 0) -> bytes:
    return b"".join([piece async for piece in recorder.read_output("s", id, stream, offset)])


async def history(recorder: Recorder, sandbox: str = "s") -> list[Record]:
    return [record async for record in recorder.history(sandbox)]


# --- one command


async def test_a_command_from_begin_to_end(recorder: Recorder) -> None:
    begun = await recorder.begin_exec("s", "e", RUN)
    assert begun == (2, True)
    assert [state.id for state in recorder.running("s")] == ["e"]
    await recorder.input("s", "e", 0, b"in")
    await recorder.input_end("s", "e", 2)
    assert await recorder.output("s", "e", 1, 0, b"hello ") == 6
    assert await recorder.output("s", "e", 2, 0, b"oops") == 4
    assert await recorder.output("s", "e", 1, 6, memoryview(b"world")) == 11
    await recorder.signal("s", "e", 15)
    await recorder.resize("s", "e", Terminal(rows=40, columns=120))
    state = recorder.exec_state("s", "e")
    assert state is not None and not state.ended and state.stdin_ended
    assert (state.stdin, state.stdout, state.stderr) == (2, 11, 4)
    assert await recorder.result("s", "e") is None
    assert await recorder.end_exec("s", "e", result_of("e")) == result_of("e")
    assert recorder.running("s") == [] and await recorder.result("s", "e") == result_of("e")
    assert (await read(recorder, "e"), await read(recorder, "e", 2)) == (b"hello world", b"oops")
    assert [await read(recorder, "e", 1, at) for at in (3, 6, 8, 11, 99)] == [b"lo world", b"world", b"rld", b"", b""]
    (info,) = await recorder.execs("s")
    assert (info.id, info.argv, info.result) == ("e", (b"ls",), result_of("e"))
    records = await history(recorder)
    assert [record.seq for record in records] == list(range(1, 11))
    assert [record.kind for record in records] == [1, 2, 4, 5, 3, 3, 3, 6, 17, 7]


async def test_commands_are_sent_in_their_order(recorder: Recorder) -> None:
    """One that is recorded at once does not overtake one that the thread has written but the loop not yet settled."""
    sent: list[str] = []
    journal = recorder._journal
    held = asyncio.ensure_future(recorder.event("s", "keeps the thread busy", durable=True))
    first = asyncio.ensure_future(recorder.begin_exec("s", "a", RUN, send=lambda seq: sent.append(f"a{seq}")))
    await asyncio.sleep(0)
    while journal._taken != journal._queued:  # the loop is held up meanwhile, as by any long step
        pass
    await recorder.begin_exec("s", "b", RUN, send=lambda seq: sent.append(f"b{seq}"))
    await asyncio.gather(held, first)
    assert sent == ["a3", "b4"]


async def test_settled_is_after_everything_before(recorder: Recorder) -> None:
    sent: list[int] = []
    begun = asyncio.ensure_future(recorder.begin_exec("s", "a", RUN, send=sent.append))
    await asyncio.sleep(0)
    await recorder.settled("s")
    assert sent == [2] and recorder.exec_state("s", "a") is not None
    await begun


async def test_a_repeated_id_is_known_and_another_request_is_a_conflict(recorder: Recorder) -> None:
    first = await recorder.begin_exec("s", "e", RUN)
    sent: list[int] = []
    assert await recorder.begin_exec("s", "e", RUN, send=sent.append) == (first.seq, False)
    assert sent == []
    for other in (
        msgspec.structs.replace(RUN, argv=(b"rm",)),
        msgspec.structs.replace(RUN, secrets={b"TOKEN": b"other"}),
        msgspec.structs.replace(RUN, env={b"A": b"1"}),
    ):
        with pytest.raises(Conflict):
            await recorder.begin_exec("s", "e", other)
    assert recorder.last_seq("s") == 2


async def test_the_same_id_at_the_same_time_is_begun_once(recorder: Recorder) -> None:
    begun = await asyncio.gather(*(recorder.begin_exec("s", "e", RUN) for _ in range(20)))
    assert sorted(b.fresh for b in begun) == [False] * 19 + [True]
    assert {b.seq for b in begun} == {2}


async def test_a_result_is_recorded_once(recorder: Recorder) -> None:
    await recorder.begin_exec("s", "e", RUN)
    ends = (recorder.end_exec("s", "e", result_of("e", exit_code=code)) for code in range(5))
    assert {end.exit_code for end in await asyncio.gather(*ends)} == {0}
    assert recorder.last_seq("s") == 3


async def test_output_is_taken_once_and_without_gaps(recorder: Recorder) -> None:
    await recorder.begin_exec("s", "e", RUN)
    await recorder.output("s", "e", 1, 0, b"0123456789")
    assert await recorder.output("s", "e", 1, 3, b"3456789abc") == 13
    assert await recorder.output("s", "e", 1, 0, b"0123") == 13
    with pytest.raises(ProtocolError):
        await recorder.output("s", "e", 1, 14, b"x")
    with pytest.raises(ExecNotFound):
        await recorder.output("s", "unknown", 1, 0, b"x")
    await recorder.end_exec("s", "e", result_of("e"))
    assert await recorder.output("s", "e", 1, 13, b"late") == 13
    assert await read(recorder, "e") == b"0123456789abc"


async def test_what_is_not_recorded_here_is_refused_by_name(recorder: Recorder) -> None:
    for call in (
        recorder.begin_exec("x", "e", RUN), recorder.stop("x", "why"), recorder.event("x", "e"),
        recorder.begin_file("x", "", "stat", b"/"), recorder.end_file("x", 1),
    ):  # fmt: skip
        with pytest.raises(SandboxNotFound):
            await call
    with pytest.raises(ExecNotFound):
        recorder.read_output("s", "x", 1)
    with pytest.raises(Conflict):
        await recorder.create("s", SPEC)
    with pytest.raises(InvalidRequest):
        await recorder.begin_exec("s", "", RUN)
    assert recorder.last_seq("s") == 1


async def test_one_refused_job_does_not_harm_its_group(recorder: Recorder) -> None:
    await recorder.begin_exec("s", "e", RUN)
    done = await asyncio.gather(
        recorder.event("s", "a"), recorder.event("s", "\ud800"), recorder.output("s", "e", 1, 0, bytes(3 << 20)),
        recorder.event("s", "b"), return_exceptions=True,
    )  # fmt: skip
    assert [type(value) for value in done] == [int, InvalidRequest, InvalidRequest, int]
    assert [record.seq for record in await history(recorder)] == [1, 2, 3, 4]


async def test_too_many_commands_are_refused(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_EXECS", 3)
    done = await asyncio.gather(*(recorder.begin_exec("s", f"e{i}", RUN) for i in range(5)), return_exceptions=True)
    assert sum(isinstance(value, AdmissionRefused) for value in done) == 2


# --- order


async def test_send_is_called_in_rising_order_before_the_caller_goes_on(recorder: Recorder) -> None:
    sent: list[int] = []
    returned: list[int] = []

    async def begin(number: int) -> None:
        if number % 3:
            returned.append((await recorder.begin_exec("s", f"e{number}", RUN, send=sent.append)).seq)
        else:
            returned.append(await recorder.begin_file("s", "", "stat", b"/", send=sent.append))
        assert returned[-1] in sent

    await asyncio.gather(*(begin(number) for number in range(300)))
    assert sent == returned == list(range(2, 302))


async def test_a_failing_send_fails_its_caller_alone(recorder: Recorder) -> None:
    def fail(_: int) -> None:
        raise ConnectionResetError("gone")

    done = await asyncio.gather(
        recorder.begin_exec("s", "a", RUN, send=fail), recorder.begin_exec("s", "b", RUN), return_exceptions=True
    )
    assert isinstance(done[0], ConnectionResetError) and done[1] == (3, True)


async def test_many_writers_leave_no_gap_and_the_index_is_what_a_reopen_finds(tmp_path: Path) -> None:
    async with await open_at(tmp_path, segment_bytes=20_000) as recorder:

        async def work(sandbox: str) -> None:
            await recorder.create(sandbox, SPEC)
            for number in range(10):
                id = f"e{number}"
                await recorder.begin_exec(sandbox, id, RUN)
                for at in range(3):
                    await recorder.output(sandbox, id, 1, at * 100, bytes([at]) * 100)
                seq = await recorder.begin_file(sandbox, "f", "write", b"/a")
                if number % 2:
                    await recorder.end_exec(sandbox, id, result_of(id))
                    await recorder.end_file(sandbox, seq, size=3)

        names = [f"s{number}" for number in range(20)]
        await asyncio.gather(*(work(name) for name in names))
        index = recorder._index
    seen: dict[str, list[int]] = {}
    rebuilt = Index(names)
    with Log.open(tmp_path / "log", 20_000, visit=rebuilt.apply) as log:
        assert len(log.segments()) > 5
        for _, record in log.scan():
            seen.setdefault(record.sandbox, []).append(record.seq)
    assert all(seen[name] == list(range(1, len(seen[name]) + 1)) for name in names)
    assert (rebuilt.sandboxes, rebuilt.execs, rebuilt.files) == (index.sandboxes, index.execs, index.files)
    assert rebuilt.count == index.count == 200


async def test_operations_are_chained(recorder: Recorder) -> None:
    await asyncio.gather(*(recorder.begin_exec("s", id, RUN) for id in "ab"))
    for at in range(5):
        await recorder.output("s", "a", 1, at, b"x")
        await recorder.output("s", "b", 2, at, b"y")
        await recorder.event("s", "tick")
    chains: dict[str, list[int]] = {}
    for key in ("a", "b"):
        state = recorder.exec_state("s", key)
        assert state is not None
        at_ = state.newest
        while at_:
            record = recorder._log.read(at_)
            chains.setdefault(key, []).append(record.seq)
            at_ = record.previous  # type: ignore[assignment]
    by_key = {key: [r.seq for r in await history(recorder) if r.key == key] for key in ("a", "b")}
    assert {key: chain[::-1] for key, chain in chains.items()} == by_key
    events = [record for record in await history(recorder) if isinstance(record.body, Event)]
    assert all(record.previous is not None for record in events)


# --- restarts


async def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    async with await open_at(tmp_path, segment_bytes=1000) as first:
        await first.create("s", SPEC)
        await first.create("gone", SPEC)
        await first.begin_exec("s", "e", RUN)
        await first.output("s", "e", 1, 0, b"abc")
        await first.begin_exec("s", "done", RUN)
        await first.end_exec("s", "done", result_of("done"))
    async with await open_at(tmp_path, "s", "never-recorded", segment_bytes=1000) as second:
        assert [state.id for state in second.running("s")] == ["e"]
        assert await second.begin_exec("s", "e", RUN) == (2, False)
        assert await second.output("s", "e", 1, 3, b"def") == 6
        assert await read(second, "e") == b"abcdef"
        assert await second.result("s", "done") == result_of("done")
        assert await second.create("never-recorded", SPEC) == 1
        with pytest.raises(SandboxNotFound):
            await second.event("gone", "x")
        assert len(await history(second, "gone")) == 1


async def test_a_missing_segment_of_a_live_sandbox_is_corruption(tmp_path: Path) -> None:
    async with await open_at(tmp_path, segment_bytes=200) as recorder:
        await recorder.create("s", SPEC)
        for _ in range(20):
            await recorder.event("s", "x" * 50)
    (tmp_path / "log" / "0000000003.seg").unlink()
    with pytest.raises(LogCorrupt, match="follows"):
        await open_at(tmp_path, "s")
    async with await open_at(tmp_path) as recorder:
        assert recorder.last_seq("s") == 0


async def test_forgotten_sandboxes_make_room(tmp_path: Path) -> None:
    async with await open_at(tmp_path, segment_bytes=2000, log_bytes=10_000) as recorder:
        for name in ("old", "live"):
            await recorder.create(name, SPEC)
            for _ in range(20):
                await recorder.event(name, "x" * 150)
        await recorder.stop("old", "done")
        recorder.forget("old")
        for _ in range(100):
            await recorder.event("live", "x" * 150)
        assert recorder.exec_state("old", "e") is None
        assert len(await history(recorder, "live")) == 121
        assert len(await history(recorder, "old")) < 22


async def test_what_one_sandbox_has_on_record_is_bounded(tmp_path: Path) -> None:
    limits = {"segment_bytes": 5_000, "sandbox_log": 20_000}
    async with await open_at(tmp_path, **limits) as recorder:
        for name in ("s", "t"):
            await recorder.create(name, SPEC)
        await recorder.begin_exec("s", "e", RUN)
        for at in range(0, 20_000, 1000):
            await recorder.output("s", "e", 1, at, b"x" * 1000)
        with pytest.raises(SandboxLogFull, match=r"19\.5 KiB"):
            await recorder.begin_exec("s", "f", RUN)
        assert (await recorder.begin_exec("s", "e", RUN)).fresh is False, "it is known, and can be taken up"
        assert await recorder.output("s", "e", 1, 20_000, b"more") == 20_004, "what runs is recorded to its end"
        await recorder.end_exec("s", "e", result_of("e"))
        await recorder.end_file("s", await recorder.begin_file("s", "", "read", b"/x"))
        assert (await recorder.begin_exec("t", "e", RUN)).fresh
    async with await open_at(tmp_path, "s", "t", **limits) as recorder:
        with pytest.raises(SandboxLogFull):
            await recorder.begin_exec("s", "f", RUN)
        assert len(await read(recorder, "e")) == 20_004
        assert (await recorder.begin_exec("t", "f", RUN)).fresh


async def test_small_pieces_of_output_count_for_what_they_take(tmp_path: Path) -> None:
    async with await open_at(tmp_path, sandbox_log=20_000) as recorder:
        await recorder.create("s", SPEC)
        await recorder.begin_exec("s", "e", RUN)
        for at in range(200):
            await recorder.output("s", "e", 1, at, b"x")
        with pytest.raises(SandboxLogFull):
            await recorder.begin_exec("s", "f", RUN)


async def test_a_log_of_live_sandboxes_is_bounded(tmp_path: Path) -> None:
    limits = {"segment_bytes": 2_000, "log_bytes": 10_000, "log_most": 20_000}
    async with await open_at(tmp_path, **limits) as recorder:
        for name in ("s", "t"):
            await recorder.create(name, SPEC)
        await recorder.begin_exec("s", "e", RUN)
        for at in range(0, 30_000, 1000):
            await recorder.output("s", "e", 1, at, b"x" * 1000)
        for _ in range(2):
            with pytest.raises(NodeStorageFull, match="as long as it may get"):
                await recorder.begin_exec("t", "e", RUN)
            with pytest.raises(NodeStorageFull):
                await recorder.create("u", SPEC)
        await recorder.output("s", "e", 1, 30_000, b"more")
        await recorder.end_exec("s", "e", result_of("e"))
        assert len(await read(recorder, "e")) == 30_004
    async with await open_at(tmp_path, "s", "t", **limits) as recorder:
        with pytest.raises(NodeStorageFull):
            await recorder.begin_exec("t", "e", RUN)
        await recorder.stop("s", "done")
        recorder.forget("s")
        await recorder.settled("t")
        await recorder.settled("t")  # by now the segments are removed
        assert (await recorder.begin_exec("t", "e", RUN)).fresh
        assert sum(path.stat().st_size for path in (tmp_path / "log").iterdir()) < 12_000


async def test_after_close_nothing_is_taken(tmp_path: Path) -> None:
    recorder = await open_at(tmp_path)
    await recorder.create("s", SPEC)
    pending = [asyncio.ensure_future(recorder.event("s", "x")) for _ in range(50)]
    await asyncio.sleep(0)
    await recorder.close()
    await recorder.close()
    assert [await event for event in pending] == list(range(2, 52))
    with pytest.raises(InternalError):
        await recorder.event("s", "x")


# --- secrets


def digest_of(recorder: Recorder, request: Exec) -> bytes:
    return recorder.redactor.digest(recorder.redactor.exec(request))


async def test_no_secret_is_on_disk(tmp_path: Path) -> None:
    async with await open_at(tmp_path) as recorder:
        await recorder.create("s", SPEC)
        await recorder.begin_exec("s", "e", RUN)
        request = await recorder.request("s", "e")
        assert request.secrets[b"TOKEN"].startswith(b"hmac-sha256:")
        assert recorder.redactor.digest(request) == digest_of(recorder, RUN)
    assert (tmp_path / "record.key").stat().st_mode & 0o777 == 0o600
    for path in (tmp_path / "log").iterdir():
        assert b"hunter2" not in path.read_bytes() and b"TOKEN" in path.read_bytes()


async def test_digests_differ_between_installations_and_names(tmp_path: Path) -> None:
    async with await open_at(tmp_path / "a") as a, await open_at(tmp_path / "b") as b:
        assert digest_of(a, RUN) != digest_of(b, RUN)
        marked = a.redactor.exec(msgspec.structs.replace(RUN, secrets={b"A": b"x", b"B": b"x"})).secrets
        assert marked[b"A"] != marked[b"B"]
    async with await open_at(tmp_path / "a") as again:
        assert again.redactor == a.redactor


async def test_the_order_of_an_environment_does_not_matter(recorder: Recorder) -> None:
    one, two = ({b"a": b"1", b"b": b"2"}, {b"b": b"2", b"a": b"1"})
    first, second = (digest_of(recorder, msgspec.structs.replace(RUN, env=env)) for env in (one, two))
    assert first == second


# --- load and errors


async def test_room_waits_while_much_is_pending(recorder: Recorder) -> None:
    await recorder.begin_exec("s", "e", RUN)
    piece = bytes(1 << 20)
    outputs = [recorder.output("s", "e", 1, at << 20, piece) for at in range(80)]
    assert recorder._journal.pending > 64 << 20
    await asyncio.wait_for(recorder.room(), 60)
    assert recorder._journal.pending < 64 << 20
    assert await outputs[-1] == 80 << 20
    assert recorder._journal.pending == 0


async def test_a_cancelled_caller_frees_its_share_and_its_record_stays(recorder: Recorder) -> None:
    task = asyncio.ensure_future(recorder.event("s", "x"))
    await asyncio.sleep(0)
    task.cancel()
    assert await recorder.event("s", "y") == 3
    assert recorder._journal.pending == 0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "2m") as place:
        yield place


async def test_a_full_disk_fails_exactly_those_that_do_not_fit(small: Path) -> None:
    async with await open_at(small) as recorder:
        await recorder.create("s", SPEC)
        await recorder.begin_exec("s", "e", RUN)
        await recorder.output("s", "e", 1, 0, bytes(1 << 20))
        done = await asyncio.gather(
            recorder.event("s", "before"),
            recorder.output("s", "e", 1, 1 << 20, bytes(1 << 20)),
            recorder.output("s", "e", 1, 2 << 20, b"after the gap"),
            recorder.end_exec("s", "e", result_of("e")),
            return_exceptions=True,
        )
        assert done[0] == 4 and done[3] == result_of("e")
        assert [type(error) for error in done[1:3]] == [NodeStorageFull, ProtocolError]
        assert [record.seq for record in await history(recorder)] == [1, 2, 3, 4, 5]
    async with await open_at(small, "s") as recorder:
        assert recorder.last_seq("s") == 5 and len(await read(recorder, "e")) == 1 << 20


async def test_a_full_disk_that_gets_space_again(small: Path) -> None:
    ballast = small / "ballast"
    async with await open_at(small, segment_bytes=64 << 10) as recorder:
        await recorder.create("s", SPEC)
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        errors, acknowledged = 0, 1
        for _ in range(50):
            try:
                acknowledged = await recorder.event("s", "x", bytes(3000), durable=True)
            except NodeStorageFull:
                errors += 1
        assert errors
        ballast.unlink()
        assert await recorder.event("s", "again", durable=True) == acknowledged + 1
    async with await open_at(small, "s") as recorder:
        assert recorder.last_seq("s") == acknowledged + 1


# --- kill -9

WRITER = """
import asyncio, os, sys
from pathlib import Path
from tests.unit.test_recorder import RUN, SPEC, open_at, result_of

async def work(recorder, sandbox):
    await recorder.create(sandbox, SPEC)
    number = 0
    while True:
        number += 1
        id = f"e{number}"
        begun = await recorder.begin_exec(sandbox, id, RUN)
        total = 0
        for _ in range(number % 4):
            total = await recorder.output(sandbox, id, 1, total, os.urandom(number * 37 % 5000))
        await recorder.end_exec(sandbox, id, result_of(id))
        os.write(1, f"{sandbox} {id} {begun.seq} {total}\\n".encode())

async def main():
    recorder = await open_at(Path(sys.argv[1]), segment_bytes=200_000)
    await asyncio.gather(*(work(recorder, f"s{n}") for n in range(8)))

asyncio.run(main())
"""


def lines_until_killed(data: Path, lines: int) -> list[str]:
    """What the writer had printed when it was killed: one line for each thing acknowledged."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(data)], stdout=subprocess.PIPE, env=env)
    assert writer.stdout is not None
    with writer, writer.stdout as pipe:
        seen = [pipe.readline() for _ in range(lines)]
        writer.kill()
        seen += pipe.readlines()
    return [line.decode() for line in seen if line.endswith(b"\n")]


@pytest.mark.parametrize("round_", range(6))
async def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, round_: int) -> None:
    seen = await asyncio.to_thread(lines_until_killed, tmp_path, random.randrange(1, 400))
    acknowledged = [line.split() for line in seen]
    assert len(acknowledged) >= 1
    names = [f"s{number}" for number in range(8)]
    async with await open_at(tmp_path, *names) as recorder:
        for sandbox, id, seq, total in acknowledged:
            state = recorder.exec_state(sandbox, id)
            assert state is not None and state.ended
            assert (state.seq, state.stdout) == (int(seq), int(total))
        for name in names:
            records = await history(recorder, name)
            assert [record.seq for record in records] == list(range(1, len(records) + 1))
            outputs = [record for record in records if record.kind == Kind.OUTPUT]
            assert all(isinstance(record.body, Output) for record in outputs)


async def test_a_stop_is_recorded_once(tmp_path: Path) -> None:
    """An agent that was killed before the registry knew of the stop ends the sandbox again."""
    async with await open_at(tmp_path) as recorder:
        await recorder.create("s", SPEC)
        first = await recorder.stop("s", "done")
        assert await recorder.stop("s", "done again") == first
    async with await open_at(tmp_path, "s") as recorder:
        assert await recorder.stop("s", "once more") == first
        assert [record.kind for record in await history(recorder, "s")] == [Kind.CREATE, Kind.STOP]


async def test_a_packing_is_known_by_its_key(recorder: Recorder, tmp_path: Path) -> None:
    assert await recorder.begin_pack("s", "k", ORDER) == (False, None)
    with pytest.raises(Conflict):
        await recorder.begin_pack("s", "k", PackOrder(name="other"))
    assert await recorder.begin_pack("s", "k", ORDER) == (True, None), "as after an agent was killed"
    await recorder.end_pack("s", "k", PACKED)
    await recorder.end_pack("s", "k", None, "too_late")
    assert await recorder.begin_pack("s", "k", ORDER) == (True, PACKED)
    await recorder.begin_exec("s", "k", RUN)
    await recorder.end_exec("s", "k", result_of("k"))
    await recorder.close()
    async with await open_at(tmp_path, "s") as again:
        assert await again.begin_pack("s", "k", ORDER) == (True, PACKED)
        with pytest.raises(Conflict):
            await again.begin_pack("s", "k", PackOrder(name="made", whole=True))


async def test_a_packing_that_failed_may_be_tried_again(recorder: Recorder, tmp_path: Path) -> None:
    await recorder.begin_pack("s", "k", ORDER)
    await recorder.end_pack("s", "k", None, "node_storage_full")
    assert await recorder.begin_pack("s", "k", PackOrder(name="other")) == (False, None)
    await recorder.stop("s", "stopped")
    await recorder.end_pack("s", "k", PACKED)
    recorder.forget("s")
    await recorder.end_pack("s", "k", PACKED)
    kinds = [record.kind async for record in recorder.history("s")]
    assert kinds == [Kind.CREATE, Kind.PACK, Kind.PACK_END, Kind.PACK, Kind.STOP], "nothing follows the end"
    with pytest.raises(SandboxNotFound):
        await recorder.begin_pack("s", "k2", ORDER)


async def test_packings_are_counted_and_undone_with_their_group(tmp_path: Path) -> None:
    index = Index(["s"])
    place = Position(1, 10)
    begun = Record("s", 1, Kind.PACK, "k", 0, PackBegun(b"d", ORDER))
    index.apply(place, begun)
    assert index.count == 1 and index.packs["s"]["k"].end is None
    index.begin()
    index.apply(Position(1, 20), Record("s", 2, Kind.PACK_END, "k", 0, PackEnded(None, "x"), place))
    assert index.count == 0 and not index.packs["s"]
    index.rollback()
    assert index.count == 1 and index.packs["s"]["k"].first == place
    index.begin()
    index.forget("s")
    assert index.count == 0 and not index.packs
