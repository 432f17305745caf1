"""Records survive their encoding exactly, and nothing else passes for one."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.errors import InvalidRequest, LogCorrupt
from barchan.packing import PackedLayer, PackOrder, ScrubRules
from barchan.spec import EnvironmentRef, Exec, ExecId, ExecResult, SandboxSpec
from barchan.trajectory import record as r

COUNT = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
BYTES = st.binary(max_size=200)
EXEC = st.builds(
    Exec,
    argv=st.lists(BYTES, min_size=1, max_size=4).map(tuple),
    env=st.dictionaries(BYTES, BYTES, max_size=3),
    timeout=st.none() | st.floats(0.1, 1e6),
)
SCRUB = st.builds(ScrubRules, also=st.lists(TEXT, max_size=3).map(tuple))
PACKED = st.builds(
    PackedLayer,
    name=TEXT,
    version=COUNT,
    reference=TEXT,
    digest=TEXT,
    layer=TEXT,
    layers=COUNT,
    sandbox=TEXT,
    size=COUNT,
)
BODIES: dict[int, st.SearchStrategy[r.Body]] = {
    r.Kind.CREATE: st.builds(r.Created, st.just(SandboxSpec(environment=EnvironmentRef(base="debian")))),
    r.Kind.EXEC_BEGIN: st.builds(r.ExecBegun, BYTES, EXEC),
    r.Kind.OUTPUT: st.builds(r.Output, st.integers(1, 2), COUNT, BYTES),
    r.Kind.INPUT: st.builds(r.Input, COUNT, BYTES),
    r.Kind.INPUT_END: st.builds(r.InputEnd, COUNT),
    r.Kind.SIGNAL: st.builds(r.Signal, COUNT, st.booleans()),
    r.Kind.RESIZE: st.builds(r.Resize, COUNT, COUNT),
    r.Kind.EXEC_END: st.builds(
        r.ExecEnded, st.builds(ExecResult, id=TEXT.map(ExecId), outcome=st.just("exited"), stdout_bytes=COUNT)
    ),
    r.Kind.FILE: st.builds(r.FileBegun, TEXT, BYTES, TEXT),
    r.Kind.STOP: st.builds(r.Stopped, TEXT),
    r.Kind.EVENT: st.builds(r.Event, TEXT, BYTES),
    r.Kind.PACK: st.builds(r.PackBegun, BYTES, st.builds(PackOrder, name=TEXT, whole=st.booleans(), scrub=SCRUB)),
    r.Kind.PACK_END: st.builds(r.PackEnded, st.none() | PACKED, TEXT),
    r.Kind.FILE_END: st.builds(r.FileEnded, COUNT, BYTES, TEXT),
}
POSITION = st.builds(r.Position, COUNT, COUNT)
RECORDS = st.sampled_from(sorted(BODIES)).flatmap(
    lambda kind: st.builds(
        r.Record, TEXT, st.integers(1, 2**62), st.just(kind), TEXT, COUNT, BODIES[kind], st.none() | POSITION
    )
)
PLACES = st.builds(r.Place, COUNT, st.integers(0, 2**32 - 1))


def entry_of(record: r.Record, place: r.Place, synced: int = 0) -> bytes:
    buffer = bytearray()
    buffer += b"".join(r.encode(record, place, synced))
    return bytes(buffer)


def read(entry: bytes, place: r.Place) -> r.Record | None:
    head, payload = entry[: r.ENTRY.size], entry[r.ENTRY.size :]
    whole = r.entry_length(head, place) == len(payload) and r.entry_sound(head, payload, place)
    return r.decode(payload) if whole else None


def test_every_kind_that_has_a_body_is_generated() -> None:
    assert set(BODIES) == set(r.BODIES)


@given(RECORDS, PLACES)
def test_round_trip(record: r.Record, place: r.Place) -> None:
    assert read(entry_of(record, place), place) == record


@given(RECORDS, PLACES, st.data())
def test_every_flipped_bit_is_seen(record: r.Record, place: r.Place, data: st.DataObject) -> None:
    entry = bytearray(entry_of(record, place, synced=7))
    bit = data.draw(st.integers(0, len(entry) * 8 - 1))
    entry[bit // 8] ^= 1 << bit % 8
    assert read(bytes(entry), place) is None


@given(RECORDS, PLACES, PLACES)
def test_an_entry_counts_only_in_its_place(record: r.Record, place: r.Place, other: r.Place) -> None:
    found = read(entry_of(record, place), other)
    assert (found is not None) == (place == other)


@given(BYTES)
def test_any_bytes_are_a_record_or_refused_by_name(payload: bytes) -> None:
    try:
        assert isinstance(r.decode(payload), r.Record)
    except LogCorrupt:
        pass


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x91" * 100_000, b"\x97\xa1s\x01\x02\xa0\x00\xc0\xc0", b"\x97\xa1\xff\x01\x0a\xa0\x00\xc0\x90"],
)
def test_hostile_payloads_are_refused_by_name(payload: bytes) -> None:
    with pytest.raises(LogCorrupt):
        r.decode(payload)


@given(RECORDS, st.data())
def test_fuzzed_payloads_are_refused_by_name(record: r.Record, data: st.DataObject) -> None:
    payload = bytearray(entry_of(record, r.Place(1, 1))[r.ENTRY.size :])
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    test_any_bytes_are_a_record_or_refused_by_name.hypothesis.inner_test(bytes(payload))  # type: ignore[attr-defined]


def test_a_kind_of_a_later_version_is_kept_as_it_is() -> None:
    raw = b"\x92\x01\xa3abc"
    record = r.Record("s", 1, 4711, "k", 5, r.Unread(raw))
    assert read(entry_of(record, r.Place(1, 2)), r.Place(1, 2)) == record


def test_a_body_with_more_fields_than_known_is_read() -> None:
    record = r.Record("s", 1, r.Kind.STOP, "", 5, r.Unread(b"\x93\xa3why\xc2\x2a"))
    found = read(entry_of(record, r.Place(1, 2)), r.Place(1, 2))
    assert found is not None and found.body == r.Stopped("why")


@pytest.mark.parametrize("size", [r.MAX_PAYLOAD + 1, 3 * r.MAX_PAYLOAD])
def test_too_large_is_refused(size: int) -> None:
    with pytest.raises(InvalidRequest):
        r.encode(r.Record("s", 1, r.Kind.OUTPUT, "k", 0, r.Output(1, 0, bytes(size))), r.Place(1, 1), 0)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        r.encode(r.Record("s", 1, r.Kind.STOP, "", 0, r.Stopped("\ud800")), r.Place(1, 1), 0)


@pytest.mark.parametrize("size", [0, 1, 255, 65_535, 65_536, 65_537, 300_000])
def test_much_data_is_stored_as_little_is(size: int) -> None:
    """Whether it is copied behind the rest or stays where it is: what is read is the same, and so is its check."""
    data, place = os.urandom(size), r.Place(7, 11)
    for body in (r.Output(1, 5, data), r.Input(5, memoryview(data))):  # type: ignore[arg-type]
        record = r.Record("s", 1, r.Kind.OUTPUT if isinstance(body, r.Output) else r.Kind.INPUT, "k", 0, body)
        found = read(b"".join(r.encode(record, place, 0)), place)
        assert found is not None and bytes(found.body.data) == data and found.body.offset == 5  # type: ignore[union-attr]


@given(st.integers(0, 2**32 - 1), COUNT)
def test_segment_head_round_trip(number: int, salt: int) -> None:
    head = r.SegmentHead(number, salt)
    assert r.decode_head(head.encode()) == head


@given(st.integers(0, r.HEAD_SIZE * 8 - 1))
def test_a_damaged_segment_head_is_refused(bit: int) -> None:
    data = bytearray(r.SegmentHead(3, 99).encode())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(LogCorrupt):
        r.decode_head(bytes(data))


def test_another_format_version_is_refused() -> None:
    with pytest.raises(LogCorrupt, match="version 2"):
        r.decode_head(r.SegmentHead(1, 1, version=2).encode())


@given(st.binary(max_size=300), st.lists(st.integers(1, 90), max_size=3, unique=True))
def test_sync_marks_are_found_among_any_bytes(noise: bytes, marks: list[int]) -> None:
    place, data = r.Place(77, 100), bytearray(noise)
    for mark in marks:
        here = r.Place(place.salt, place.offset + len(data))
        data += b"".join(r.encode(r.Record("s", 1, r.Kind.STOP, "", 0, r.Stopped("x")), here, mark))
        data += noise
    assert r.newest_sync_mark(bytes(data), place) == max(marks, default=0)


def test_a_forged_entry_in_an_output_is_no_sync_mark() -> None:
    """Made with the right format and place, for salts that are not the segment's."""
    forged = bytearray()
    for salt in range(2000):
        place = r.Place(salt, 100 + len(forged))
        forged += b"".join(r.encode(r.Record("s", 1, r.Kind.STOP, "", 0, r.Stopped("x")), place, 90))
    assert r.newest_sync_mark(bytes(forged), r.Place(1999, 100)) == 90
    assert r.newest_sync_mark(bytes(forged), r.Place(0x1234567890ABCDEF, 100)) == 0
