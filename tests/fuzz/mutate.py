"""Changes to whole frames, for the targets whose input is a stream of them after two bytes of their own."""

from __future__ import annotations

import random

import atheris

from barchan.wire.frames import HEAD

START = 2
Parts = list[tuple[bytes, bytes]]


def split(data: bytes) -> tuple[Parts, bytes]:
    """Type, stream and id of each whole frame with its payload; what follows them."""
    parts, at = [], 0
    while at + HEAD.size <= len(data):
        end = at + HEAD.size + int.from_bytes(data[at : at + 4], "little")
        if end > len(data):
            break
        parts.append((data[at + 4 : at + HEAD.size], data[at + HEAD.size : end]))
        at = end
    return parts, data[at:]


def join(parts: Parts, rest: bytes) -> bytes:
    return b"".join(len(payload).to_bytes(4, "little") + head + payload for head, payload in parts) + rest


def nudge(payload: bytes, dice: random.Random) -> bytes:
    """A neighbour of its first number: offsets matter by one."""
    number = int.from_bytes(payload[:8], "little") + dice.choice((-1, 1))
    return (number % (1 << 64)).to_bytes(8, "little") + payload[8:]


def change(parts: Parts, most: int, dice: random.Random) -> None:
    at, other = dice.randrange(len(parts)), dice.randrange(len(parts))
    head, payload = parts[at]
    match dice.randrange(7):
        case 0:
            parts.insert(other, parts[at])
        case 1:
            del parts[at]
        case 2:
            parts[at] = parts[other][0], payload
        case 3:
            parts[at] = head, payload[:-1]
        case 4:
            parts[at] = head, payload + payload[-1:]
        case 5:
            parts[at] = head, nudge(payload, dice)
        case _:
            parts[at] = head, atheris.Mutate(payload, max(1, min(most, len(payload) + 64)))


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """What libFuzzer calls for a new input."""
    dice = random.Random(seed)
    parts, rest = split(data[START:])
    if not parts or dice.random() < 0.3:
        return bytes(atheris.Mutate(data, most))
    change(parts, most, dice)
    return (data[:START] + join(parts, rest))[:most]
