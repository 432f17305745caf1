"""What a sandbox of base, workspace and toolkits sees where they differ: the rules of docs/how-to/import-an-environment.md."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from barchan import Client, Limits, Sandbox
from tests.host.test_oci_sandbox import BUSYBOX, MIB, shell
from tests.images import Layout, Member, file, folder, symlink, tar
from tests.server import once, shared_server

LIMITS = Limits(memory=128 * MIB, pids=64, disk=64 * MIB)
TOOLS = ("sh", "ls", "cat", "stat", "id", "readlink")
BASE = [
    *(folder(name) for name in ("bin", "etc", "tmp", "proc", "sys", "dev", "root", "both", "lib", "opt", "home")),
    file("bin/busybox", BUSYBOX.read_bytes() if BUSYBOX.exists() else b"", mode=0o755),
    *(symlink(f"bin/{name}", "busybox") for name in TOOLS),
    file("etc/passwd", b"root:x:0:0::/root:/bin/sh\n"),
    file("word", b"base", mode=0o600, uid=7),
    file("both/base", b"base"),
    file("becomes-directory", b"file"),
    folder("becomes-file"),
    file("becomes-file/inside", b"inside"),
    folder("becomes-link"),
    file("becomes-link/inside", b"inside"),
    *(file(f"{place}/{name}", b"base") for place in ("lib", "opt") for name in ("one", "two")),
    file("home/untouched", b"base"),
]
WORK = [
    file("word", b"work", mode=0o640, uid=8),
    folder("both", 0o711, uid=9),
    file("both/work", b"work"),
    folder("becomes-directory"),
    file("becomes-directory/inside", b"directory"),
    file("becomes-file", b"file"),
    symlink("becomes-link", "both"),
]
BELOW = [folder("lib"), file("lib/one", b"tool"), folder("opt"), file("opt/mine", b"tool")]
ABOVE = [file("lib/.wh.one"), file("lib/.wh.two"), folder("opt"), file("opt/.wh..wh..opq"), file("opt/new", b"new")]
LAST = [file("word", b"last", mode=0o604, uid=10), folder("both"), file("both/last", b"last")]


class Images:
    """Environments of the shared server, made of layers and what they say about programs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, name: str, *layers: Sequence[Member], **process: Any) -> str:
        layout = Layout(self._directory / name)
        layout.add("", [tar(members) for members in layers], config={"config": process})
        return once(shared_server(), name, "import", name, str(layout.root))


@pytest.fixture
def image(tmp_path: Path) -> Images:
    if not BUSYBOX.exists():
        pytest.skip("busybox-static is not installed")
    return Images(tmp_path)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Client(data=shared_server().data) as client:
        yield client


@pytest.fixture
async def sandbox(client: Client, image: Images) -> AsyncIterator[Sandbox]:
    base = image("stack-base", BASE, Env=["PATH=/bin", "A=base", "B=base", "C=base"], User="7", WorkingDir="/etc")
    work = image("stack-work", WORK, Env=["B=work", "C=work"], WorkingDir="/both", Entrypoint=["work"], Cmd=["w"])
    tool, last = image("stack-tool", BELOW, ABOVE, Env=["C=tool"], User="0"), image("stack-last", LAST)
    async with await client.create(base, workspace=work, toolkits=[tool, last], limits=LIMITS) as made:
        yield made


async def test_of_a_file_the_uppermost_counts_whole(sandbox: Sandbox) -> None:
    assert await shell(sandbox, "cat /word; stat -c ' %a %u' /word") == "last 604 10\n"


async def test_of_directories_the_contents_are_joined(sandbox: Sandbox) -> None:
    assert await shell(sandbox, "ls /both; stat -c '%a %u' /both") == "base\nlast\nwork\n755 0\n"
    assert await shell(sandbox, "cat /home/untouched") == "base"


async def test_what_is_of_another_kind_hides_what_was_there(sandbox: Sandbox) -> None:
    assert await shell(sandbox, "ls /becomes-directory; cat /becomes-directory/inside") == "inside\ndirectory"
    assert await shell(sandbox, "cat /becomes-file; ls /becomes-file") == "file/becomes-file\n"
    assert await shell(sandbox, "readlink /becomes-link; ls /becomes-link") == "both\nbase\nlast\nwork\n"


async def test_a_whiteout_hides_the_name_in_all_images_below(sandbox: Sandbox) -> None:
    """But only of a name that its own image has below it: others it could not know."""
    assert await shell(sandbox, "ls /lib; cat /lib/two") == "two\nbase"


async def test_an_opaque_directory_hides_what_all_images_below_have_in_it(sandbox: Sandbox) -> None:
    assert await shell(sandbox, "ls /opt") == "new\n"


async def test_programs_start_as_the_uppermost_says_that_says_it(sandbox: Sandbox) -> None:
    assert await shell(sandbox, "echo $A $B $C; id -u; pwd") == "base work tool\n0\n/both\n"


async def test_another_order_is_another_tree(client: Client, image: Images) -> None:
    base, work = image("stack-base", BASE, Env=["PATH=/bin"]), image("stack-work", WORK)
    last = image("stack-last", LAST)
    async with await client.create(base, toolkits=[last, work], limits=LIMITS) as made:
        assert await shell(made, "cat /word; stat -c ' %a %u' /both") == "work 711 9\n"
