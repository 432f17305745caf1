"""Ids that callers choose: commands and idempotency keys."""

from __future__ import annotations

import base64
import os
import time

from barchan.spec import ExecId


def new_id() -> str:
    """26 characters of 0-9 a-v: 48 bits of milliseconds, then 80 random bits. Sorts by time of making."""
    raw = int(time.time() * 1000).to_bytes(6, "big") + os.urandom(10)
    return base64.b32hexencode(raw).decode("ascii")[:26].lower()


def new_exec_id() -> ExecId:
    return ExecId(new_id())
