"""`barchan layer pack`, against a scripted node."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from barchan.cli.pack import summary
from barchan.packing import PackedLayer, PackOrder, ScrubRules
from barchan.spec import SandboxId
from barchan.wire import messages as m
from tests.contract.api_site import site

PACKED = PackedLayer(
    name="made",
    version=1,
    reference="made@1",
    digest="d",
    layer="d",
    layers=1,
    sandbox=SandboxId("n1-00000000"),
    size=1,
)


async def run(data: Path, *argv: str) -> tuple[int, str, str]:
    command = (sys.executable, "-m", "barchan.cli.main", "layer", "pack", *argv, "--data", str(data))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, error = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()


async def test_what_is_asked_and_what_is_said(tmp_path: Path) -> None:
    async with site(tmp_path) as place, place.node() as node, place.client() as client:
        id = (await client.create("tiny")).id
        code, out, error = await run(tmp_path, id, "made", "--whole", "--keep", "logs", "--also", "a/*", "--also", "b")
        assert (code, out, error) == (
            0,
            f"made@1  sha256:{'a' * 64}  4.0 KiB\n",
            "0 entries, 0 B; left out: logs 2\n",
        )
        (call,) = [call for call in node.calls if isinstance(call, m.PackDiff)]
        assert call.order == PackOrder(name="made", whole=True, scrub=ScrubRules(also=("a/*", "b"), keep=("logs",)))
        code, out, error = await run(tmp_path, id, "made", "--json")
        assert code == 0 and json.loads(out)["reference"] == "made@1"
        code, out, error = await run(tmp_path, id, "Made")
        assert code == 1 and "name" in error and not out
        code, out, error = await run(tmp_path, id, "made", "--keep", "logz")
        assert code != 0 and "logz" in error


def test_one_line() -> None:
    assert summary(PACKED) == "0 entries, 0 B"
