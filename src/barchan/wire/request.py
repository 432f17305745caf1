"""What all calls are made of."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all arguments. `op` is the name on the wire, `answer` the type of the reply."""

    op: ClassVar[str] = ""
    answer: ClassVar[Any] = None
