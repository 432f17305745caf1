from __future__ import annotations

import os
import time
from pathlib import Path

from barchan.layers import holds
from barchan.layers.gc import collect
from barchan.layers.store import LayerStore
from tests.unit.test_layers_cache import add


def test_what_another_node_holds_stays_until_it_lets_go_or_is_gone(tmp_path: Path) -> None:
    here = LayerStore(tmp_path / "layers", shared=True, work=tmp_path / "here")
    there = LayerStore(tmp_path / "layers", shared=True, work=tmp_path / "there")
    one, two = add(here, "one"), add(here, "two")
    holds.renew(there, "there", {one.digest, two.digest})
    for name in ("one", "two"):
        here.remove(name)
    collect(here, grace=0, held=holds.of_all(here))
    assert here.digests() == {one.digest, two.digest}
    holds.renew(there, "there", {two.digest})
    collect(here, grace=0, held=holds.of_all(here))
    assert here.digests() == {two.digest}
    gone = time.time() - holds.SECONDS - 1
    os.utime(here.root / "held/there", (gone, gone))
    collect(here, grace=0, held=holds.of_all(here))
    assert not here.digests() and not list((here.root / "held").iterdir())
