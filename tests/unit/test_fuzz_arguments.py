"""What `./dev fuzz` says about arguments that mean nothing."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import main


@pytest.mark.parametrize(
    ("words", "why"),
    [([], "TARGET is missing"), (["nosuch"], "no target 'nosuch'"), (["link", "x"], "'x' is no number of seconds")],
)
def test_the_reason_comes_before_the_usage(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert why in capsys.readouterr().err.splitlines()[0]
