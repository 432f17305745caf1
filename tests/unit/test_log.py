"""The log gives back what was put in, cuts what a crash left unfinished, and refuses what was damaged."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barchan.errors import InternalError, InvalidRequest, LogCorrupt, NodeStorageFull, RecordGone
from barchan.trajectory.log import Log
from barchan.trajectory.record import HEAD_SIZE, Kind, Output, Position, Record, Stopped
from tests.disks import small_disk

BIG = 1 << 30


def stopped(seq: int, sandbox: str = "s", text: str = "") -> Record:
    return Record(sandbox, seq, Kind.STOP, "", 0, Stopped(text or f"{sandbox}{seq}"))


def output(seq: int, size: int) -> Record:
    return Record("s", seq, Kind.OUTPUT, "e", 0, Output(1, 0, os.urandom(size)))


def contents(directory: Path, segment_bytes: int = BIG) -> list[Record]:
    found: list[Record] = []
    with Log.open(directory, segment_bytes, visit=lambda _, record: found.append(record)) as log:
        assert [record for _, record in log.scan()] == found
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_read_by_position_and_scan_from_it(place: Path) -> None:
    records = [stopped(i) for i in range(1, 40)]
    with Log.open(place, 500) as log:
        positions = [log.append([record])[0] for record in records]
        assert len(log.segments()) == 3
        assert [log.read(position) for position in positions] == records
        assert list(log.scan(positions[20])) == list(zip(positions, records, strict=True))[20:]
    assert contents(place, 500) == records


def test_a_group_is_one_segment_and_positions_are_right_inside_it(place: Path) -> None:
    records = [stopped(i) for i in range(1, 30)]
    with Log.open(place, 200) as log:
        positions = log.append(records)
        assert {position.segment for position in positions} == {1}
        assert [log.read(position) for position in positions] == records
        assert log.append([stopped(30)])[0].segment == 2


def test_files_are_for_root_alone(place: Path) -> None:
    with Log.open(place, BIG):
        assert place.stat().st_mode & 0o777 == 0o700
        assert (place / "0000000001.seg").stat().st_mode & 0o777 == 0o600


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=3), min_size=1, max_size=5), st.integers(0, 5))
def test_cut_at_every_byte_gives_back_what_was_synced_and_a_prefix(groups: list[list[int]], synced: int) -> None:
    """What a power cut can leave: everything up to the last sync, and any part of what was written after it."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "log"
        written: list[Record] = []
        safe, safe_size = 0, HEAD_SIZE
        with Log.open(place, BIG) as log:
            for number, group in enumerate(groups):
                records = [stopped(len(written) + i + 1, text="x" * size) for i, size in enumerate(group)]
                log.append(records)
                written += records
                if number < synced:
                    log.sync()
                    safe, safe_size = len(written), log.total
        file = place / "0000000001.seg"
        whole = file.read_bytes()
        for size in range(safe_size, len(whole) + 1):
            file.write_bytes(whole[:size])
            found = contents(place)
            assert found == written[: len(found)] and len(found) >= safe
            file.write_bytes(whole[:size] + bytes(len(whole) - size))
            assert contents(place) == found


def test_after_a_cut_the_log_goes_on(place: Path) -> None:
    with Log.open(place, BIG) as log:
        log.append([stopped(1), stopped(2)])
    file = place / "0000000001.seg"
    os.truncate(file, file.stat().st_size - 1)
    with Log.open(place, BIG) as log:
        log.append([stopped(2, text="again")])
        log.sync()
    assert contents(place) == [stopped(1), stopped(2, text="again")]


@pytest.fixture(scope="module")
def synced_groups(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A segment of ten synced records, and where the last begins."""
    place = tmp_path_factory.mktemp("groups")
    with Log.open(place, BIG) as log:
        for seq in range(1, 11):
            (last,) = log.append([stopped(seq)])
            log.sync()
    return (place / "0000000001.seg").read_bytes(), last.offset


def test_every_flipped_bit_below_the_last_sync_is_corruption(synced_groups: tuple[bytes, int], tmp_path: Path) -> None:
    whole, last = synced_groups
    for at in range(last):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        (tmp_path / "0000000001.seg").write_bytes(data)
        with pytest.raises(LogCorrupt, match="0000000001.seg"):
            Log.open(tmp_path, BIG)


def test_a_flipped_bit_in_the_last_group_is_never_accepted(synced_groups: tuple[bytes, int], tmp_path: Path) -> None:
    whole, last = synced_groups
    for at in range(last, len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        (tmp_path / "0000000001.seg").write_bytes(data)
        assert contents(tmp_path) == [stopped(seq) for seq in range(1, 10)]


def test_a_hole_in_what_was_not_synced_is_cut(place: Path) -> None:
    """After a power cut later blocks may be on disk and earlier ones not."""
    with Log.open(place, BIG) as log:
        log.append([stopped(1)])
        log.sync()
        (hole,) = log.append([stopped(2)])
        log.append([stopped(3)])
    file = place / "0000000001.seg"
    data = bytearray(file.read_bytes())
    data[hole.offset : hole.offset + 20] = bytes(20)
    file.write_bytes(data)
    assert contents(place) == [stopped(1)]


def test_damage_in_a_sealed_segment_is_corruption_even_at_its_end(place: Path) -> None:
    with Log.open(place, 100) as log:
        for seq in range(1, 6):
            log.append([stopped(seq)])
        assert len(log.segments()) == 2
    file = place / "0000000001.seg"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(LogCorrupt, match="0000000001.seg"):
        Log.open(place, 100)


def test_a_segment_under_a_false_name_is_corruption(place: Path) -> None:
    with Log.open(place, BIG):
        pass
    (place / "0000000001.seg").rename(place / "0000000002.seg")
    with pytest.raises(LogCorrupt, match="number 1"):
        Log.open(place, BIG)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_after_a_head_are_read_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        with Log.open(place, BIG):
            pass
        with (place / "0000000001.seg").open("ab") as file:
            file.write(data)
        assert contents(place) == []


def test_old_segments_are_passed_over_at_start_and_can_still_be_read(place: Path) -> None:
    records = [stopped(i) for i in range(1, 40)]
    with Log.open(place, 500) as log:
        positions = [log.append([record])[0] for record in records]
        old = log.path(1)
    os.utime(old, (1000, 1000))
    seen: list[Record] = []
    with Log.open(place, 500, visit=lambda _, record: seen.append(record), since=2000) as log:
        assert seen and seen == records[-len(seen) :] and len(seen) < len(records)
        assert log.read(positions[0]) == records[0]
        assert [record for _, record in log.scan()] == records
        assert log.retain(0, {"s"}) == [1], "nobody who lives is in it"


def test_an_unfinished_new_segment_is_removed(place: Path) -> None:
    with Log.open(place, BIG) as log:
        log.append([stopped(1)])
    (place / "0000000002.new").write_bytes(b"half")
    assert contents(place) == [stopped(1)]
    assert sorted(path.name for path in place.iterdir()) == ["0000000001.seg"]


def test_a_position_that_is_none_is_refused(place: Path) -> None:
    with Log.open(place, BIG) as log:
        (at,) = log.append([stopped(1)])
        for position in (Position(1, at.offset + 1), Position(1, 10**6)):
            with pytest.raises(LogCorrupt):
                log.read(position)
        with pytest.raises(RecordGone):
            log.read(Position(9, at.offset))


def test_a_record_that_cannot_be_stored_leaves_nothing_of_its_group(place: Path) -> None:
    with Log.open(place, BIG) as log:
        with pytest.raises(InvalidRequest):
            log.append([stopped(1), output(2, 3 << 20)])
        log.append([stopped(1, text="kept")])
    assert contents(place) == [stopped(1, text="kept")]


# --- retention


def test_the_oldest_sealed_segments_go_first_and_only_as_many_as_needed(place: Path) -> None:
    with Log.open(place, 100) as log:
        for seq in range(1, 30):
            log.append([stopped(seq, "dead", "x" * 60)])
        before = [segment.number for segment in log.segments()]
        size = log.segments()[0].size
        removed = log.retain(log.total - 2 * size, live=())
        assert removed == before[:2]
        assert [segment.number for segment in log.segments()] == before[2:]
        assert not log.path(1).exists()
        log.retain(0, live=())
        assert [segment.number for segment in log.segments()] == before[-1:]


def test_a_segment_with_a_live_sandbox_stays(place: Path) -> None:
    with Log.open(place, 100) as log:
        for seq in range(1, 30):
            log.append([stopped(seq, "live" if seq == 5 else "dead", "x" * 60)])
        log.retain(0, live={"live"})
        kept = [record for _, record in log.scan_of("live")]
        assert len(log.segments()) == 2 and [record.seq for record in kept] == [5]
    assert len(contents(place, 100)) >= 2


# --- errors of the disk


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    with small_disk(tmp_path / "small", "1m") as place:
        yield place


def test_a_full_disk_is_named_and_leaves_nothing_half(small: Path) -> None:
    with Log.open(small / "log", BIG) as log:
        good = [stopped(1)]
        log.append(good)
        full = 0
        for seq in range(2, 40):
            size = log.total
            try:
                log.append([record := output(seq, 100_000)])
                good.append(record)
            except NodeStorageFull:
                full += 1
                assert log.total == size == log.path(1).stat().st_size
        assert full > 20 and len(good) > 5
        log.sync()
        log.append([small_one := stopped(99)])
        good.append(small_one)
    assert contents(small / "log") == good


def test_a_full_disk_at_rotation_is_named_and_passes(small: Path) -> None:
    ballast = small / "ballast"
    with Log.open(small / "log", 1000) as log:
        log.append([output(1, 2000)])
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        with pytest.raises(NodeStorageFull):
            log.append([stopped(2)])
        ballast.unlink()
        assert log.append([stopped(2)])[0].segment == 2
    assert [record.seq for record in contents(small / "log", 1000)] == [1, 2]


def test_after_a_failed_sync_nothing_is_accepted_any_more(place: Path) -> None:
    calls: list[int] = []

    def fails_the_second_time(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")

    with Log.open(place, BIG, fdatasync=fails_the_second_time) as log:
        log.append([stopped(1)])
        log.sync()
        log.append([stopped(2)])
        for _ in range(2):
            with pytest.raises(InternalError, match="restart"):
                log.sync()
        with pytest.raises(InternalError, match="restart"):
            log.append([stopped(3)])
