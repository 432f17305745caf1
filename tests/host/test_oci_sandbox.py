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
        *(symlink(f"bin/{name}", "busybox") for name in ("sh", "ls", "cat", "stat", "touch", "id")),
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


PROCESS = {"Env": ["PATH=/bin", "GREETING=hello", "LANG=C"], "User": "1000:1000", "WorkingDir": "data"}


async def test_programs_start_as_the_image_says(tmp_path: Path) -> None:
    server = shared_server()
    layout = Layout(tmp_path / "image")
    layout.add("test", layers(), config={"config": PROCESS})
    name = once(server, "oci-says", "import", "oci-says", str(layout.root))
    limits = Limits(memory=128 * MIB, pids=64, disk=64 * MIB)
    async with Client(data=server.data) as client:
        async with await client.create(name, limits=limits) as made:
            assert made.info.environment.base == f"{name}@1"
            assert await shell(made, "pwd; echo $GREETING $LANG $PATH; id -u; id -g") == (
                "/data\nhello C /bin\n1000\n1000\n"
            )
            done = await made.run(["/bin/sh", "-c", "pwd; id -u"], cwd="/", user="root", check=True)
            assert done.stdout == b"/\n0\n", "what a command says counts"
        async with await client.create(
            name, limits=limits, user="root", workdir="/etc", env={"GREETING": "bye"}
        ) as made:
            assert await shell(made, "pwd; echo $GREETING $LANG; id -u") == "/etc\nbye C\n0\n"


async def test_a_key_stands_for_what_was_asked_and_not_for_what_it_meant(tmp_path: Path) -> None:
    """A later version of the environment makes no conflict of a repeated request."""
    server = shared_server()
    asked, limits = "oci-versions", Limits(memory=128 * MIB, pids=64, disk=64 * MIB)
    async with Client(data=server.data) as client:
        for version, word in enumerate(("one", "two"), 1):
            layout = Layout(tmp_path / word)
            layout.add("test", layers(), config={"config": {"Env": [f"WORD={word}"]}})
            server.run("env", "import", asked, str(layout.root))
            if version == 1:
                first = await client.create(asked, limits=limits, key="oci-versions-first")
        again = await client.create(asked, limits=limits, key="oci-versions-first")
        assert (again.id, again.info.environment.base) == (first.id, f"{asked}@1")
        assert await shell(again, "echo $WORD") == "one\n"
        async with await client.create(asked, limits=limits) as newer:
            assert newer.info.environment.base == f"{asked}@2" and await shell(newer, "echo $WORD") == "two\n"
        await first.stop()
