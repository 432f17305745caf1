"""Fixtures that reach a sandbox the whole way: SDK → API → node agent → guest."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from barchan import Client, Limits, Sandbox
from tests.server import Server, once, shared_server

BUSYBOX = Path("/bin/busybox")
MIB = 1 << 20
SMALL = Limits(memory=128 * MIB, pids=128, disk=64 * MIB)


@pytest.fixture(scope="session")
def server() -> Server:
    return shared_server()


@pytest.fixture(scope="session")
def data_dir(server: Server) -> Path:
    return server.data


@pytest.fixture(scope="session")
def debian_env(server: Server) -> str:
    """Debian and Python. The first run on a machine downloads it into a cache outside the clone."""
    return once(server, "debian-12", "bootstrap", "debian-12", timeout=600)


@pytest.fixture(scope="session")
def tiny_env(server: Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A static busybox and two users, made in well under a second: for tests that need no Debian."""
    return once(server, "tiny", "import", "tiny", str(make_tiny(tmp_path_factory.mktemp("tiny"))))


def make_tiny(root: Path) -> Path:
    assert BUSYBOX.exists(), "busybox-static is missing: ./dev test installs it"
    for name in ("bin", "etc", "tmp", "home/user", "root", "proc", "sys", "dev", "usr/bin"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    for applet in APPLETS.split():
        (root / "bin" / applet).symlink_to("busybox")
    (root / "usr/bin/env").symlink_to("../../bin/busybox")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    return root


APPLETS = """
sh ash cat ls echo true false sleep head tail grep sed awk find dd yes env id pwd mkdir rm rmdir cp mv ln chmod chown
ps kill touch test wc sort uniq tr cut seq setsid timeout sha256sum stat tee printf mount umount hostname nc
""".strip()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with Client(data=server.data) as client:
        yield client


@pytest.fixture
async def sandbox(client: Client, tiny_env: str) -> AsyncIterator[Sandbox]:
    """A fresh container of the tiny base."""
    async with await client.create(tiny_env, limits=SMALL) as sandbox:
        yield sandbox


@pytest.fixture
async def debian(client: Client, debian_env: str) -> AsyncIterator[Sandbox]:
    """A fresh container with Python in it."""
    async with await client.create(debian_env, limits=SMALL) as sandbox:
        yield sandbox
