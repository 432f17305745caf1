# Generated from src/barchan/wire/many.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""The caller's end of a `CreateMany` call: takes what comes, and says so, since only what was taken is the caller's."""

from __future__ import annotations

from collections import deque

from barchan.errors import ProtocolError
from barchan.sdk._sync._futures import Future, new_future
from barchan.sdk._sync._link import Call
from barchan.wire.frames import Frame, FrameType
from barchan.wire.messages import Created, Taken, pack, unpack


class Arrivals:
    """Give `on_frame` to the call, then `follow` it."""

    def __init__(self) -> None:
        self._came: deque[Created] = deque()
        self._taken = 0
        self._call: Call | None = None
        self._wake: Future[None] | None = None

    def follow(self, call: Call) -> None:
        self._call = call
        call.answer.add_done_callback(lambda answer: self._notify())

    @property
    def error(self) -> BaseException | None:
        """What the call failed with, if it did: what was taken last the other side may not know of."""
        answer = self._opened.answer
        return answer.exception() if answer.done() and not answer.cancelled() else None

    @property
    def complete(self) -> bool:
        """Whether the other side knows that everything was taken."""
        return self._opened.answer.done() and not self._opened.answer.cancelled() and self.error is None

    def on_frame(self, frame: Frame) -> None:
        if frame.type != FrameType.EVENT:
            return
        try:
            self._came.append(unpack(frame.payload, Created))
        except ProtocolError as error:
            self._opened.drop(error)
        self._notify()

    def next(self) -> Created | None:
        """The next one, which is taken with that; None after the last. Raises what the call ended with.

        What came before a call failed is not given any more: it may be gone by now.
        """
        while not self._came and not self._opened.answer.done():
            self._wake = new_future()
            self._wake.wait()
        if (error := self.error) is not None:
            raise error
        return self._take() if self._came else None

    def abandon(self) -> None:
        """Whatever was not taken goes."""
        self._opened.abandon()

    def _take(self) -> Created:
        self._taken += 1
        self._opened.send_frame(FrameType.EVENT, pack(Taken(count=self._taken)))
        return self._came.popleft()

    @property
    def _opened(self) -> Call:
        assert self._call is not None, "not followed yet"
        return self._call

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
