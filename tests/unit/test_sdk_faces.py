"""The two clients, used in the other one's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from barchan import Client
from barchan.sync import Client as Blocking


def test_the_asynchronous_one_without_async(tmp_path: Path) -> None:
    client: Any = Client(data=tmp_path)
    with pytest.raises(TypeError, match="needs `async with`; `from barchan.sync import Client`"), client:
        pytest.fail("entered")


async def test_the_blocking_one_with_async(tmp_path: Path) -> None:
    client: Any = Blocking(data=tmp_path)
    with pytest.raises(TypeError, match="needs `with`"):
        async with client:
            pytest.fail("entered")
