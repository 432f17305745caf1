"""How long each target runs: FUZZ_SECONDS, else 60 where CI is set, else 5."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def seconds() -> int:
    return int(os.environ.get("FUZZ_SECONDS") or (60 if os.environ.get("CI") else 5))
