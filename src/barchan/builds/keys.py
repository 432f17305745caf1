"""What the cache knows a step by: all that its result depends on, and nothing else. Pure.

A step's key says what came before it, what it does and, of what it copies, names, modes and contents. Times, owners and paths of
the machine that builds are not in it, so that the same key comes out wherever the same is built.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from barchan.builds.steps import Copy, MakeDirectory, Run, Step
from barchan.names import BUILD_STEP

_FORMAT = "barchan build 1"
"""Another one when the same step comes to mean something else."""


def step_name(key: str) -> str:
    """Under which the layers of a step are kept."""
    name = f"build-{key[:40]}"
    assert BUILD_STEP.fullmatch(name)
    return name


def first_key(digest: str) -> str:
    """Of what a stage begins with; "" for nothing."""
    return _hash("base", digest)


def step_key(before: str, step: Step, *, network: str = "", copied: Any = None) -> str:
    """`network`: what a RUN gets. `copied`: what a COPY copies, as values that msgpack knows."""
    return _hash(before, _document(step, network), copied)


def _document(step: Step, network: str) -> Any:
    match step:
        case Run():
            return ("run", step.argv, step.script, sorted(step.env.items()), step.user, step.workdir, network)
        case Copy():
            return ("copy", step.target, step.inline, step.owner, step.mode, step.unpack)
        case MakeDirectory():
            return ("directory", step.path, step.user)


def _hash(*values: Any) -> str:
    # Names of files may hold bytes that are no UTF-8.
    document = msgspec.json.encode((_FORMAT, *_printable(values)), order="deterministic")
    return hashlib.sha256(document).hexdigest()


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else ["utf-8", value.encode("utf-8", "surrogateescape").hex()]
    if isinstance(value, (list, tuple)):
        return [_printable(one) for one in value]
    if isinstance(value, msgspec.Struct):
        return _printable(msgspec.structs.astuple(value))
    return value
