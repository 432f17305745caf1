"""Byte streams: credit, offsets, resumption, and what happens to bytes that nobody reads."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barchan.errors import ApiUnavailable, ProtocolError
from barchan.wire.streams import WINDOW, ByteReceiver, ByteSender, Taking


def receiver(**options: object) -> tuple[ByteReceiver, list[int]]:
    granted: list[int] = []
    return ByteReceiver(granted.append, **options), granted  # type: ignore[arg-type]


async def test_credit_is_given_as_bytes_are_read() -> None:
    end, granted = receiver(window=100)
    end.open()
    end.feed(0, b"x" * 60)
    assert granted == [100]
    assert await end.read() == b"x" * 60
    assert granted == [100, 160]


async def test_what_was_seen_is_skipped_and_a_gap_is_refused() -> None:
    end, _ = receiver()
    end.feed(0, b"abc")
    end.feed(1, b"bcde")
    end.feed(0, b"abc")
    with pytest.raises(ProtocolError, match="gap"):
        end.feed(6, b"x")
    end.feed_eof(5, 0)
    assert [chunk async for chunk in end] == [b"abc", b"de"]


async def test_an_end_that_hides_a_loss_is_refused() -> None:
    end, _ = receiver()
    end.feed(0, b"abc")
    with pytest.raises(ProtocolError):
        end.feed_eof(4, 0)
    end.feed_eof(10, 7)
    assert end.dropped == 7


async def test_failure_comes_after_what_arrived() -> None:
    end, _ = receiver()
    end.feed(0, b"abc")
    end.fail(ApiUnavailable("lost"))
    assert await end.read() == b"abc"
    with pytest.raises(ApiUnavailable):
        await end.read()


async def test_a_confirmed_end_needs_both_its_frame_and_the_answer() -> None:
    end, _ = receiver(confirmed=True)
    end.feed(0, b"abc")
    end.feed_eof(3, 0)
    assert await end.read() == b"abc"
    reading = asyncio.create_task(end.read())
    await asyncio.sleep(0)
    assert not reading.done(), "the sender also ends a stream that failed"
    end.finish()
    assert await reading == b""
    cut, _ = receiver(confirmed=True)
    cut.feed(0, b"abc")
    cut.finish()
    assert await cut.read() == b"abc"
    with pytest.raises(ProtocolError, match="after 3 bytes"):
        await cut.read()


async def test_a_failure_after_an_unconfirmed_end_is_seen() -> None:
    for taking in (Taking.BUFFER, Taking.COLLECT):
        end, _ = receiver(confirmed=True, taking=taking)
        end.feed_eof(0, 0)
        end.fail(ApiUnavailable("lost"))
        with pytest.raises(ApiUnavailable):
            await end.read()
        with pytest.raises(ApiUnavailable):
            end.collected()


async def test_a_waiting_reader_is_woken() -> None:
    end, _ = receiver()
    reading = asyncio.create_task(end.read())
    await asyncio.sleep(0)
    end.feed(0, b"late")
    assert await reading == b"late"


async def test_collecting_gives_credit_without_a_reader() -> None:
    end, granted = receiver(window=10, taking=Taking.COLLECT)
    end.open()
    for offset in range(0, 40, 5):
        end.feed(offset, b"12345")
    assert granted[-1] >= 40
    assert end.collected() == b"12345" * 8


async def test_what_is_collected_is_bounded() -> None:
    end, _ = receiver(taking=Taking.COLLECT, most=10)
    end.feed(0, b"0123456789")
    with pytest.raises(ProtocolError, match="more than 10"):
        end.feed(10, b"x")


async def test_an_unread_prefix_is_kept_and_the_rest_counted() -> None:
    end, granted = receiver(window=10)
    end.open()
    end.feed(0, b"1234567890")
    assert granted == [10]
    end.take(Taking.PREFIX)
    assert granted[-1] == 20
    end.feed(10, b"more")
    end.take(Taking.BUFFER)  # too late: no hole in what is read
    end.feed(14, b"even")
    end.feed_eof(18, 0)
    assert [chunk async for chunk in end] == [b"1234567890"]
    assert end.unread == 8


async def test_more_than_the_credit_is_refused() -> None:
    end, granted = receiver(window=10)
    end.open()
    end.feed(0, b"1234567890")
    with pytest.raises(ProtocolError, match="credit"):
        end.feed(10, b"x")
    assert await end.read() == b"1234567890"
    end.feed(10, b"x")
    assert granted == [10, 20]


async def test_after_a_reconnect_credit_counts_from_what_was_read() -> None:
    end, granted = receiver(window=100)
    end.open()
    end.feed(0, b"x" * 40)
    end.open()
    assert granted == [100, 100]


class Wire:
    """Where a sender's frames go."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.total: list[int] = []
        self.sender = ByteSender(lambda at, data: self.frames.append((at, bytes(data))), self.total.append)

    def bytes_from(self, first: int) -> bytes:
        """What the frames from index `first` on say, which must be without a gap."""
        found = b""
        start = self.frames[first][0]
        for at, data in self.frames[first:]:
            assert at == start + len(found)
            found += data
        return found


async def test_nothing_is_sent_without_credit() -> None:
    wire = Wire()
    wire.sender.resume(0)
    writing = asyncio.create_task(wire.sender.write(b"abcdef"))
    await asyncio.sleep(0)
    assert wire.frames == []
    wire.sender.grant(4)
    await asyncio.sleep(0)
    assert not writing.done()
    wire.sender.grant(6)
    await writing
    wire.sender.eof()
    wire.sender.eof()
    assert wire.frames == [(0, b"abcd"), (4, b"ef")]
    assert wire.total == [6]


async def test_end_of_file_waits_for_what_was_written() -> None:
    wire = Wire()
    wire.sender.eof()
    assert wire.total == []
    wire.sender.resume(0)
    assert wire.total == [0]


async def test_input_is_sent_again_from_where_the_other_side_has_it() -> None:
    wire = Wire()
    wire.sender.resume(0)
    wire.sender.grant(100)
    await wire.sender.write(b"0123456789")
    wire.sender.eof()
    wire.sender.suspend()
    before = len(wire.frames)
    wire.sender.grant(100)  # credit may come before the event that resumes
    assert len(wire.frames) == before
    wire.sender.resume(4)
    assert wire.bytes_from(before) == b"456789"
    assert wire.total == [10, 10]


async def test_credit_of_a_lost_connection_is_void() -> None:
    wire = Wire()
    wire.sender.resume(0)
    wire.sender.grant(100)
    await wire.sender.write(b"0123456789")
    wire.sender.suspend()
    before = len(wire.frames)
    wire.sender.resume(2)
    assert len(wire.frames) == before
    wire.sender.grant(5)
    assert wire.bytes_from(before) == b"234"


async def test_input_that_is_already_recorded_is_skipped() -> None:
    wire = Wire()
    wire.sender.resume(4)
    wire.sender.grant(100)
    await wire.sender.write(b"0123")
    await wire.sender.write(b"4567")
    assert wire.frames == [(4, b"4567")]


async def test_input_that_is_no_longer_kept_is_an_error() -> None:
    wire = Wire()
    wire.sender.resume(0)
    wire.sender.grant(1 << 40)
    await wire.sender.write(bytes(5 * WINDOW))
    wire.sender.suspend()
    with pytest.raises(ProtocolError):
        wire.sender.resume(0)


async def test_a_program_that_ended_takes_the_rest_nowhere() -> None:
    wire = Wire()
    wire.sender.resume(0)
    writing = asyncio.create_task(wire.sender.write(b"abc"))
    await asyncio.sleep(0)
    wire.sender.stop()
    await writing
    await wire.sender.write(b"more")
    assert wire.frames == []
    assert wire.sender.cut


async def test_what_was_all_taken_is_not_cut() -> None:
    wire = Wire()
    wire.sender.resume(0)
    wire.sender.grant(3)
    await wire.sender.write(b"abc")
    wire.sender.eof()
    wire.sender.stop()
    assert not wire.sender.cut


async def test_a_failed_sender_raises() -> None:
    wire = Wire()
    writing = asyncio.create_task(wire.sender.write(b"abc"))
    await asyncio.sleep(0)
    wire.sender.fail(ApiUnavailable("lost"))
    with pytest.raises(ApiUnavailable):
        await writing


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=50), max_size=8),
    breaks=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), max_size=6),
)
def test_any_history_of_losses_delivers_every_byte_once(pieces: list[bytes], breaks: list[tuple[int, int]]) -> None:
    """A peer that takes what it can, loses its connection anywhere, and says how far it came."""
    got, ended = bytearray(), []

    def take(at: int, data: bytes) -> None:
        assert at <= len(got)
        got.extend(data[len(got) - at :])

    async def play() -> None:
        sender = ByteSender(take, ended.append)
        sender.resume(0)
        task = asyncio.create_task(_write(sender, pieces))
        for back, credit in breaks:
            sender.grant(len(got) + credit)
            await asyncio.sleep(0)
            sender.suspend()
            del got[max(0, len(got) - back % 3) :]
            sender.resume(len(got))
        sender.grant(1 << 30)
        await task

    asyncio.run(play())
    assert bytes(got) == b"".join(pieces)
    assert ended[-1] == len(got)


async def _write(sender: ByteSender, pieces: list[bytes]) -> None:
    for piece in pieces:
        await sender.write(piece)
    sender.eof()
