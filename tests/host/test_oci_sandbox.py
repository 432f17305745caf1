"""A sandbox of an imported image sees what its layers say, whiteouts and opaque directories included."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from barchan import Client, Limits, Sandbox
from tests.images import Layout, file, folder, hardlink, symlink, tar
from tests.server import once, shared_server

BUSYBOX = Path("/bin/busybox")
MIB = 1 << 20


def layers() -> list[bytes]:
    base = [
        *(folder(name) for name in ("bin", "etc", "tmp", "proc", "sys", "dev", "root", "data", "hidden")),
        file("bin/busybox", BUSYBOX.read_bytes(), mode=0o755),
        *(symlink(f"bin/{name}", "busybox") for name in ("sh", "ls", "cat", "stat", "touch")),
        file("etc/passwd", b"root:x:0:0::/root:/bin/sh\n"),
        file("data/gone", b"gone"),
        file("data/kept", b"kept"),
        file("hidden/old", b"old"),
        symlink("link", "data"),
    ]
    second = [file("data/.wh.gone"), file("link/new", b"new"), hardlink("same", "data/kept")]
    third = [folder("hidden", 0o711), file("hidden/.wh..wh..opq"), file("hidden/fresh", b"fresh", uid=1000)]
    return [tar(base), tar(second), tar(third)]


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    if not BUSYBOX.exists():
        pytest.skip("busybox-static is not installed")
    server = shared_server()
    layout = Layout(tmp_path / "image")
    layout.add("test", layers())
    name = once(server, "oci-test", "import", "oci-test", str(layout.root))
    limits = Limits(memory=128 * MIB, pids=64, disk=64 * MIB)
    async with Client(data=server.data) as client, await client.create(name, limits=limits) as made:
        yield made


async def shell(sandbox: Sandbox, script: str) -> str:
    return (await sandbox.run(["/bin/sh", "-c", script], check=True)).stdout.decode()


async def test_sandbox_shows_the_merged_tree(sandbox: Sandbox) -> None:
    """CASES 12: layers of images."""
    assert await shell(sandbox, "ls data hidden") == "data:\nkept\nnew\n\nhidden:\nfresh\n"
    assert await shell(sandbox, "cat data/new same hidden/fresh") == "newkeptfresh"
    assert await shell(sandbox, "stat -c '%a %u' hidden hidden/fresh") == "711 0\n644 1000\n"
    assert await shell(sandbox, "touch hidden/mine data/gone && ls data hidden") == (
        "data:\ngone\nkept\nnew\n\nhidden:\nfresh\nmine\n"
    )
