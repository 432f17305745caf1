"""Framing: what goes in comes out, however the bytes are cut, and nothing hostile gets through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.errors import ProtocolError
from barchan.wire.frames import (
    MAX_PAYLOAD,
    Frame,
    FrameReader,
    FrameType,
    coalesce,
    decode_data,
    decode_eof,
    decode_u64,
    encode,
    encode_data,
    encode_eof,
)

FRAMES = st.lists(
    st.builds(
        Frame,
        st.sampled_from(list(FrameType)),
        st.integers(0, 255),
        st.integers(0, (1 << 64) - 1),
        st.binary(max_size=300),
    ),
    max_size=8,
)
DATA = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 2), st.binary(max_size=20)), max_size=30)


def wire(frames: list[Frame]) -> bytes:
    return b"".join(encode(frame.type, frame.id, frame.payload, frame.stream) for frame in frames)


@given(FRAMES, st.lists(st.integers(1, 40), max_size=50))
def test_frames_survive_any_cut(frames: list[Frame], cuts: list[int]) -> None:
    data, reader, seen = wire(frames), FrameReader(), []
    for cut in cuts:
        seen += reader.feed(data[:cut])
        data = data[cut:]
    seen += reader.feed(data)
    assert seen == frames and reader.pending == 0


@given(st.binary(max_size=400))
def test_noise_never_does_worse_than_a_protocol_error(data: bytes) -> None:
    reader = FrameReader(max_payload=64)
    try:
        for frame in reader.feed(data):
            assert len(frame.payload) <= 64
    except ProtocolError:
        pass
    assert reader.pending <= len(data)


def test_a_length_is_refused_before_it_is_allocated() -> None:
    head = encode(FrameType.DATA, 1, b"")
    with pytest.raises(ProtocolError):
        list(FrameReader().feed((MAX_PAYLOAD + 1).to_bytes(4, "little") + head[4:]))
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(head[:6] + b"\1\0" + head[8:]))


@given(DATA)
def test_coalescing_keeps_every_stream(pieces: list[tuple[int, int, bytes]]) -> None:
    """The bytes of each (operation, stream) and the order of everything else stay."""
    offsets: dict[tuple[int, int], int] = {}
    frames: list[Frame] = []
    for id_, stream, data in pieces:
        at = offsets.get((id_, stream), 0)
        frames += FrameReader().feed(encode_data(id_, stream, at, data))
        offsets[id_, stream] = at + len(data)
        if len(data) % 7 == 0:
            frames += FrameReader().feed(encode_eof(id_, stream, at + len(data)))
    joined = list(coalesce(frames, most=40))
    assert content(joined) == content(frames)
    assert [f for f in joined if f.type == FrameType.EOF] == [f for f in frames if f.type == FrameType.EOF]
    assert len(joined) <= len(frames)
    assert all(len(f.payload) <= 48 for f in joined)


def content(frames: list[Frame]) -> dict[tuple[int, int], bytes]:
    """Raises when an offset does not continue its stream, or data comes after an end it belongs before."""
    got: dict[tuple[int, int], bytes] = {}
    for frame in frames:
        have = got.setdefault((frame.id, frame.stream), b"")
        if frame.type == FrameType.DATA:
            offset, data = decode_data(frame.payload)
            assert offset == len(have)
            got[frame.id, frame.stream] = have + data
        else:
            assert decode_eof(frame.payload)[0] == len(have)
    return got


def test_a_gap_is_not_joined() -> None:
    frames = [Frame(FrameType.DATA, 1, 5, encode_data(5, 1, at, b"ab")[16:]) for at in (0, 2, 5)]
    assert [decode_data(frame.payload) for frame in coalesce(frames)] == [(0, b"abab"), (5, b"ab")]


def test_short_payloads_are_named() -> None:
    for decode in (decode_data, decode_u64, decode_eof):
        with pytest.raises(ProtocolError):
            decode(b"1234567")
    with pytest.raises(ProtocolError):
        decode_eof((1).to_bytes(8, "little") + (2).to_bytes(8, "little"))
