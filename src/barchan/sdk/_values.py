"""Arguments of the caller's into request values. Pure; whatever was given, the worst that comes out is `InvalidRequest`."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from barchan.environments import PullProgress, Told
from barchan.errors import InvalidRequest
from barchan.wire.fields import field_of
from barchan.wire.frames import Frame, FrameType
from barchan.wire.messages import Request, pack_call, unpack

logger = logging.getLogger(__name__)
T = TypeVar("T")
Text = str | bytes
Variables = Mapping[str, Text] | Mapping[bytes, Text]
Command = str | Sequence[Text]
_SHELL = (b"/bin/sh", b"-c")


def value_of(kind: type[T], **fields: Any) -> T:
    """A request value, its fields' types checked as the API will check them."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # told apart below; every command comes this way
        return msgspec.msgpack.decode(msgspec.msgpack.encode(kind(**fields)), type=kind)
    return _converted(kind, fields)


def _converted(kind: type[T], fields: dict[str, Any]) -> T:
    try:
        value = msgspec.convert({name: _plain(value) for name, value in fields.items()}, kind)
        msgspec.msgpack.encode(value)
    except msgspec.ValidationError as error:
        field = field_of(error).partition("[")[0]
        text, choices = in_words(str(error)), choices_of(kind, field)
        hint = f"one of {', '.join(map(repr, choices))}" if choices else f"see {kind.__name__}"
        raise InvalidRequest(f"{field}: {text}", field=field, hint=hint) from error
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"{kind.__name__}: {error}", hint="text must be UTF-8, numbers at most 64 bits") from error
    return value


_WORDS = {"array": "list", "object": "dict", "null": "None"}
_MISMATCH = re.compile(r"Expected `(.+)`, got `(.+)`")


def in_words(text: str) -> str:
    """What msgspec says of a wrong type, in Python's words: `expected a str or None, got int`."""
    text, _, place = text.partition(" - at ")
    inside = "one of its items: " if "[" in place else ""
    if (found := _MISMATCH.fullmatch(text)) is None:
        return inside + text[:1].lower() + text[1:]
    expected, got = ([_WORDS.get(name, name) for name in side.split(" | ")] for side in found.groups())
    return f"{inside}expected {' or '.join(expected)}, got {' or '.join(got)}"


def choices_of(kind: Any, path: str) -> tuple[str, ...]:
    """The texts that a field may be, if there are only some; `path` leads to it through structs."""
    for name in path.split("."):
        structs = [one for one in _parts(kind) if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        hints = get_type_hints(structs[0]) if structs else {}
        if name not in hints:
            return ()
        kind = hints[name]
    return tuple(text for one in _parts(kind) if get_origin(one) is Literal for text in get_args(one))


def _parts(hint: Any) -> list[Any]:
    """The annotation, and what it is made of."""
    if get_origin(hint) is Literal:
        return [hint]
    return [hint, *(part for inner in get_args(hint) for part in _parts(inner))]


def _plain(value: Any) -> Any:
    """A struct inside is taken apart: its constructor checked nothing."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(item) for name, item in msgspec.structs.asdict(value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def packed(request: Request) -> bytes:
    """The CALL payload."""
    try:
        return pack_call(request)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{request.op}: {error}", hint="an argument has a wrong type or cannot be sent") from error


def checked_piece(piece: bytes, field: str) -> bytes:
    """Of a source that the caller gave."""
    if not isinstance(piece, (bytes, bytearray, memoryview)):
        raise InvalidRequest(f"{field}: it yields {type(piece).__name__}", field=field, hint="yield bytes")
    return piece


def hearing(told: Told | None) -> Callable[[Frame], None]:
    """Of a call with `PullProgress` as events. What `told` raises is logged: it must not cost the connection."""
    if told is not None and not callable(told):
        raise InvalidRequest(f"progress: {type(told).__name__} is no function", field="progress")

    def heard(frame: Frame) -> None:
        if frame.type == FrameType.EVENT and told is not None:
            progress = unpack(frame.payload, PullProgress)
            try:
                told(progress)
            except Exception:
                logger.exception("progress=%r failed", told)

    return heard


def to_bytes(value: Text | os.PathLike[str] | os.PathLike[bytes], field: str = "path") -> bytes:
    """UTF-8, whatever the local encoding; bytes that came as surrogate escapes go back to what they were."""
    try:
        plain = os.fspath(value)
        return plain.encode("utf-8", "surrogateescape") if isinstance(plain, str) else plain
    except TypeError as error:
        raise InvalidRequest(f"{field}: {type(value).__name__} is no text", field=field, hint="str or bytes") from error
    except UnicodeError as error:
        raise InvalidRequest(f"{field}: cannot be UTF-8", field=field, hint="it has a lone surrogate") from error


def to_argv(command: Command) -> tuple[bytes, ...]:
    """A string is for the sandbox's shell; a sequence is taken as it is."""
    if isinstance(command, str):
        return (*_SHELL, to_bytes(command, "argv"))
    if isinstance(command, (bytes, Mapping)) or not hasattr(command, "__iter__"):
        raise InvalidRequest(
            "argv: neither text nor a list", field="argv", hint="give a str for the shell, or a list of arguments"
        )
    return tuple(to_bytes(item, "argv") for item in command)


def to_env(values: Variables | None, field: str = "env") -> dict[bytes, bytes]:
    if not isinstance(values or {}, Mapping):
        raise InvalidRequest(f"{field}: {type(values).__name__} is no mapping", field=field, hint="give a dict")
    return {to_bytes(key, field): to_bytes(value, field) for key, value in (values or {}).items()}
