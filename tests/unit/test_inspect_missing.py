"""The adapter for Inspect where there is no Inspect."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    monkeypatch.delitem(sys.modules, "barchan.integrations.inspect", raising=False)
    with pytest.raises(ImportError, match="pip install inspect-ai"):
        importlib.import_module("barchan.integrations.inspect")
