"""What is said on stderr of an image on its way."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re

import pytest

from barchan.cli import pulling
from barchan.cli.session import Session
from barchan.environments import PullProgress

RESOLVE = PullProgress(image="docker://hub/a:1", phase="resolve")
MIB = 1 << 20


def at(layer: int, done: int, phase: str = "pull") -> PullProgress:
    return PullProgress(image="docker://hub/a:1", phase=phase, layer=layer, layers=2, done=done * MIB, total=8 * MIB)  # type: ignore[arg-type]


def test_what_is_done_at_once_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    with pulling.pull_bars(Session()) as told:
        told(RESOLVE)
        told(at(1, 4))
    assert capsys.readouterr() == ("", "")


def test_a_line_for_each_step(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "AFTER", 0.0)
    with pulling.pull_bars(Session()) as told:
        for progress in (RESOLVE, at(1, 0), at(1, 2), at(1, 4, "convert"), at(2, 4), at(2, 8)):
            told(progress)
    assert capsys.readouterr().err.splitlines() == [
        "barchan: docker://hub/a:1: resolve",
        "barchan: docker://hub/a:1: pull of layer 1 of 2, 0 B of 8.0 MiB",
        "barchan: docker://hub/a:1: convert of layer 1 of 2, 4.0 MiB of 8.0 MiB",
        "barchan: docker://hub/a:1: pull of layer 2 of 2, 4.0 MiB of 8.0 MiB",
    ]


def test_documents_for_programs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "AFTER", 0.0)
    with pulling.pull_bars(Session(json=True)) as told:
        told(at(1, 2))
    out, err = capsys.readouterr()
    assert not out and json.loads(err)["progress"]["done"] == 2 * MIB


def test_bars_on_a_terminal_that_are_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "AFTER", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    master, slave = pty.openpty()
    with open(slave, "w") as screen, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", screen)
        with pulling.pull_bars(Session()) as told:
            told(at(1, 2))
            told(at(2, 4))
    seen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", everything(master))
    assert "hub/a:1  pull 1/2" in seen and "hub/a:1  pull 2/2" in seen and "4.0/8.0 MiB" in seen


def everything(master: int) -> str:
    """What a terminal showed whose other end is closed."""
    seen = b""
    with os.fdopen(master, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        while piece := terminal.read(65536):
            seen += piece
    return seen.decode()
