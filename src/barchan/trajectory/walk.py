"""Find the records of one operation from its newest one, without reading anybody else's."""

from __future__ import annotations

from collections.abc import Iterator

from barchan.trajectory.log import Log
from barchan.trajectory.record import Input, Output, Position, Record


def back(log: Log, newest: Position | None) -> Iterator[tuple[Position, Record]]:
    """From `newest` to the first record of its operation."""
    while newest is not None:
        record = log.read(newest)
        yield newest, record
        newest = record.previous


def output_places(log: Log, newest: Position, stream: int, offset: int) -> list[Position]:
    """Where a stream of a command (0: its input) is recorded from `offset` on, in order. The first may begin before it."""
    places: list[Position] = []
    for position, record in back(log, newest):
        body = record.body
        if not isinstance(body, Output | Input) or _stream_of(body) != stream:
            continue
        if body.offset + len(body.data) <= offset:
            break
        places.append(position)
    return places[::-1]


def output_pieces(log: Log, places: list[Position], offset: int) -> list[bytes]:
    """Contents of these records, without what lies before `offset`."""
    pieces = []
    for place in places:
        body = log.read(place).body
        assert isinstance(body, Output | Input)
        pieces.append(body.data[max(0, offset - body.offset) :])
    return pieces


def _stream_of(body: Output | Input) -> int:
    return body.stream if isinstance(body, Output) else 0
