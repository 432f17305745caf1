"""The kept corpus: small, complete, and only of targets that there are."""

from __future__ import annotations

import pytest

from tests.fuzz.seeds import SEEDS
from tests.fuzz.targets import FIRST, ROOT, SECOND, TARGETS


def test_every_target_runs_and_has_seeds() -> None:
    assert set(FIRST) | set(SECOND) == set(TARGETS) == set(SEEDS)
    assert not set(FIRST) & set(SECOND)


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_are_few_and_small(name: str) -> None:
    sizes = [path.stat().st_size for path in TARGETS[name].corpus.iterdir()]
    assert sizes and max(sizes) <= 4096


def test_the_whole_corpus_is_small() -> None:
    corpora = [path for folder in ("native/fuzz", "tests/fuzz") for path in (ROOT / folder / "corpus").rglob("*")]
    assert sum(path.stat().st_size for path in corpora if path.is_file()) < 300 << 10
