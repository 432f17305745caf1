"""Two links joined in memory: calls, errors, streams, abandonment, loss."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from barchan.errors import (
    BarchanError,
    ErrorBody,
    FileMissing,
    InvalidRequest,
    PlatformError,
    ProtocolError,
    SandboxStopped,
)
from barchan.wire.frames import Frame, FrameType, decode_data, encode, encode_data
from barchan.wire.link import Answered, Incoming, Link
from barchan.wire.messages import pack, unpack, unpack_call

Handler = Callable[[Incoming], Awaitable[bytes]]


def joined(handler: Handler) -> tuple[Link, Link]:
    """A caller and the link that serves it."""
    loop = asyncio.get_running_loop()
    caller = Link(lambda *parts: loop.call_soon(served.feed, b"".join(parts)) and None, dialled=True)
    served = Link(lambda *parts: loop.call_soon(caller.feed, b"".join(parts)) and None, handler, dialled=False)
    return caller, served


async def test_a_call_is_answered() -> None:
    async def handler(call: Incoming) -> bytes:
        return call.payload.upper()

    caller, _ = joined(handler)
    answers = await asyncio.gather(*(caller.call(text).answer for text in (b"one", b"two", b"three")))
    assert answers == [b"ONE", b"TWO", b"THREE"]


async def test_an_error_arrives_as_its_class_with_all_its_fields() -> None:
    async def handler(call: Incoming) -> bytes:
        raise FileMissing("gone", hint="look elsewhere", phase="open", field="path")

    caller, _ = joined(handler)
    with pytest.raises(FileMissing) as caught:
        await caller.call(b"").answer
    assert caught.value.body() == FileMissing("gone", hint="look elsewhere", phase="open", field="path").body()


async def test_an_unexpected_exception_is_an_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(call: Incoming) -> bytes:
        raise ZeroDivisionError("oops")

    caller, _ = joined(handler)
    with pytest.raises(PlatformError, match="ZeroDivisionError") as caught:
        await caller.call(b"").answer
    assert caught.value.code == "internal_error"


async def test_a_relayed_error_keeps_a_code_unknown_here() -> None:
    payload = pack(ErrorBody(code="from_the_future", message="new", party="node"))

    async def handler(call: Incoming) -> bytes:
        raise Answered(payload)

    caller, _ = joined(handler)
    call = caller.call(b"")
    with pytest.raises(PlatformError):
        await call.answer
    assert call.refusal == payload


async def test_frames_before_the_handler_runs_are_kept_for_it() -> None:
    seen: list[Frame] = []

    async def handler(call: Incoming) -> bytes:
        call.on_frame = seen.append
        return b""

    caller, served = joined(handler)
    served.feed(encode(FrameType.CALL, 1, b"") + encode(FrameType.CREDIT, 1, b"x" * 8) + encode(FrameType.EOF, 1))
    await asyncio.sleep(0)
    assert [frame.type for frame in seen] == [FrameType.CREDIT, FrameType.EOF]
    assert caller.lost is None


async def test_a_flood_before_the_handler_runs_ends_that_call_alone() -> None:
    """On a node's link the frames come from many clients."""

    async def handler(call: Incoming) -> bytes:
        return b"fine"

    caller, served = joined(handler)
    flooding, other = caller.call(b""), caller.call(b"")
    served.feed(encode(FrameType.CALL, 1, b"") + encode(FrameType.DATA, 1, b"x" * 8) * 100)
    with pytest.raises(ProtocolError, match="credit"):
        await flooding.answer
    assert await other.answer == b"fine"


@pytest.mark.parametrize("error", [ProtocolError("odd"), InvalidRequest("too early")])
async def test_a_frame_that_a_handler_refuses_ends_that_call_alone(error: BarchanError) -> None:
    def refuse(frame: Frame) -> None:
        raise error

    async def handler(call: Incoming) -> bytes:
        call.on_frame = refuse
        if call.payload == b"patient":
            await asyncio.Event().wait()
        return b"fine"

    caller, _ = joined(handler)
    patient = caller.call(b"patient")
    patient.credit(1, 5)
    with pytest.raises(type(error), match=error.message):
        await patient.answer
    assert await caller.call(b"").answer == b"fine"


async def test_a_malformed_error_fails_the_call_that_it_ends() -> None:
    async def handler(call: Incoming) -> bytes:
        return b""

    caller, _ = joined(handler)
    call = caller.call(b"")
    with pytest.raises(ProtocolError) as caught:
        caller.feed(encode(FrameType.ERROR, call.id, b"\xc1"))
    caller.close(caught.value)
    with pytest.raises(ProtocolError, match="malformed"):
        await call.answer


NESTED = b"\x91" * 5000 + b"\xc0"


def test_deep_nesting_is_an_error_like_any_other() -> None:
    with pytest.raises(InvalidRequest):
        unpack_call(b"\x92\xa9node.list" + NESTED)
    with pytest.raises(ProtocolError):
        unpack(b"\x82\xa4code\xa1x\xa3odd" + NESTED, ErrorBody)


async def test_data_flows_both_ways_within_a_call() -> None:
    async def handler(call: Incoming) -> bytes:
        done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        call.on_frame = lambda frame: done.set_result(decode_data(frame.payload)[1])
        call.send_data(1, 0, b"down")
        return await done

    received: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
    caller, _ = joined(handler)
    call = caller.call(b"", received.set_result)
    assert decode_data((await received).payload) == (0, b"down")
    call.send_data(0, 0, b"up")
    assert await call.answer == b"up"


async def test_what_fits_no_frame_is_refused_on_either_side() -> None:
    async def handler(call: Incoming) -> bytes:
        return bytes(3 << 20)

    caller, _ = joined(handler)
    with pytest.raises(InvalidRequest):
        caller.call(bytes(3 << 20))
    with pytest.raises(PlatformError, match="3145728 bytes"):
        await caller.call(b"").answer
    assert caller.lost is None


async def test_abandon_cancels_the_handler() -> None:
    running, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(call: Incoming) -> bytes:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    caller, _ = joined(handler)
    call = caller.call(b"")
    await running.wait()
    call.abandon()
    await cancelled.wait()
    assert call.answer.cancelled()


@pytest.mark.parametrize("gives_up", [True, False])
async def test_a_caller_that_gives_up_and_hangs_up_has_given_up(gives_up: bool) -> None:
    """Both in one piece: the handler is told when the connection is gone already."""
    lost: list[bool] = []
    running = asyncio.Event()

    async def handler(call: Incoming) -> bytes:
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            lost.append(call.link_lost)
        return b""

    caller, served = joined(handler)
    call = caller.call(b"")
    await running.wait()
    if gives_up:
        call.abandon()
    asyncio.get_running_loop().call_soon(served.close)  # after what was sent before
    async with asyncio.timeout(10):
        while not lost:
            await asyncio.sleep(0)
    assert lost == [not gives_up]


async def test_loss_fails_what_is_under_way_and_what_follows() -> None:
    cancelled = asyncio.Event()

    async def handler(call: Incoming) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    caller, served = joined(handler)
    call = caller.call(b"")
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    caller.close(SandboxStopped("lost"))
    served.close()
    with pytest.raises(SandboxStopped):
        await call.answer
    with pytest.raises(SandboxStopped):
        await caller.call(b"").answer
    await cancelled.wait()


@pytest.mark.parametrize(
    "frame",
    [
        encode(FrameType.CALL, 2),  # our own parity
        encode(FrameType.HELLO, 1),
        encode(0x7F, 1),
    ],
)
async def test_what_does_not_belong_on_a_link_is_refused(frame: bytes) -> None:
    async def handler(call: Incoming) -> bytes:
        return b""

    _, served = joined(handler)
    with pytest.raises(ProtocolError):
        served.feed(frame)


async def test_a_caller_takes_no_calls() -> None:
    with pytest.raises(ProtocolError):
        Link(lambda *parts: None, dialled=True).feed(encode(FrameType.CALL, 2))


async def test_what_comes_after_the_end_is_dropped_wherever_it_was_cut() -> None:
    """Whoever takes a frame hangs up: the frames behind it, of which the last is not whole, are nobody's."""
    caller = Link(lambda *parts: None, dialled=True)
    call = caller.call(b"", lambda frame: caller.close(SandboxStopped("enough")))
    taken, cut = encode_data(call.id, 1, 0, b"taken"), encode_data(call.id, 1, 5, b"\xff" * 5000)
    caller.feed(taken + taken + cut[:100])
    caller.feed(cut[100:])
    with pytest.raises(SandboxStopped):
        await call.answer
