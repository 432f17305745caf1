"""`barchan env` on names: tags, aliases and lock files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from barchan.cli.env import parse_source
from barchan.config import Layout
from barchan.errors import InvalidRequest
from barchan.layers.store import LayerStore
from barchan.locks import read_lock
from tests.unit.test_layers_store import add

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: as the store does")


def test_a_source_may_say_type_and_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("image", "oci:image", "a:b"):
        Path(name).touch()
    assert parse_source("image") == (Path("image"), None, "")
    assert parse_source("docker-archive:image") == (Path("image"), "docker-archive", "")
    assert parse_source("oci-archive:image:12") == (Path("image"), "oci-archive", "12")
    assert parse_source("oci:image") == (Path("oci:image"), None, ""), "there is a file of this name"
    assert parse_source("tar:a:b") == (Path("a:b"), "tar", "")
    for missing in ("none", "oci:none", "oci:none:12", "tar:", "other:image"):
        with pytest.raises(InvalidRequest, match="no such file") as caught:
            parse_source(missing)
        assert caught.value.field == "source"


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    (tmp_path / "data").mkdir(0o700)
    return LayerStore(Layout(tmp_path / "data").layers)


def run(store: LayerStore, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "barchan.cli.main", "env", *argv, "--data", str(store.root.parent)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_tags_and_aliases_are_set_listed_and_removed(store: LayerStore) -> None:
    add(store, "base", b"one")
    assert run(store, "tag", "base@1", "stable").stdout == "base:stable  base@1\n"
    assert json.loads(run(store, "alias", "fast", "base:stable", "--json").stdout)["alias"] == "fast"
    run(store, "alias", "python", "docker://python:3")
    table = run(store, "ls").stdout
    assert "base@1  base:stable fast" in table and "for docker://docker.io/library/python:3" in table
    [entry] = json.loads(run(store, "ls", "--json").stdout)
    assert entry["name"] == "base" and entry["tags"] == ["base:stable", "fast"]
    refused = run(store, "rm", "base@1")
    assert refused.returncode == 1 and "base:stable" in refused.stderr
    assert run(store, "rm", "fast", "python", "base:stable", "base").returncode == 0
    assert run(store, "ls", "--json").stdout == "[]\n"


def test_a_lock_file(store: LayerStore, tmp_path: Path) -> None:
    add(store, "base", b"one")
    tool = add(store, "tool", b"two")
    done = run(store, "lock", "base", "-T", "tool")
    lock = read_lock(done.stdout)
    assert (lock.base.reference, lock.toolkits[0].digest) == ("base@1", tool.digest)
    assert done.stdout == str(lock)
    refused = run(store, "lock", "base", "--workspace", "none")
    assert refused.returncode == 1 and not refused.stdout and "environment_not_found" in refused.stderr
