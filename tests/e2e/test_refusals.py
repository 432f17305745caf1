"""What cannot be done is a typed error that names the field or feature and the remedy, and leaves nothing half-made."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from barchan import Client, errors
from tests.e2e.conftest import make_tiny
from tests.rig import pause, within
from tests.server import PLACE, Server, own_server, remove, shared_server


@contextmanager
def tiny_server(name: str, tmp_path: Path, *options: str, data: Path | None = None) -> Iterator[Server]:
    with own_server(name, *options, data=data) as server:
        server.run("env", "import", "tiny", str(make_tiny(tmp_path / "tiny")))
        yield server


def traces(server: Server) -> list[Path]:
    """Everything on the host that belongs to a sandbox of this server; what it made ahead belongs to none."""
    instance = (server.data / "instance").read_text().strip()
    walk = os.walk("/sys/fs/cgroup")  # which passes over what goes meanwhile
    groups = [Path(at, name) for at, names, _ in walk if Path(at).name == f"barchan-{instance}" for name in names]
    found = [*groups, *(server.data / "scratch").glob("[!.]*")]
    return [path for path in found if not path.name.startswith("pool-")]


async def test_a_corrupt_layer_is_named_and_never_mounted(tmp_path: Path) -> None:
    with tiny_server("corrupt", tmp_path) as server:
        (layer,) = (server.data / "layers" / "sha256").iterdir()
        with (layer / "data").open("r+b") as file:
            file.seek((layer / "data").stat().st_size // 2)
            file.write(b"not what was there")
        async with Client(data=server.data) as client:
            with pytest.raises(errors.LayerCorrupt) as failed:
                await client.create("tiny")
        assert layer.name in str(failed.value) and failed.value.hint
        assert f"{server.data}/mnt/{layer.name}" not in Path("/proc/self/mountinfo").read_text()
        assert not traces(server)


async def test_a_wrong_name_suggests_a_near_one(tmp_path: Path) -> None:
    with tiny_server("names", tmp_path) as server:
        async with Client(data=server.data) as client:
            with pytest.raises(errors.EnvironmentNotFound) as failed:
                await client.create("tinny")
            assert "tiny" in failed.value.hint
            for name in ("..", "a/../b", "/etc/passwd", "tiny@", "sha256:00"):
                with pytest.raises(errors.InvalidRequest) as refused:
                    await client.create(name)
                assert refused.value.field.startswith("environment")
        assert not traces(server)


@contextmanager
def small_disk(tmp_path: Path, size: int) -> Iterator[Path]:
    """An ext4 of its own, so that filling it hurts nobody."""
    image, mount = Path(f"{os.environ[PLACE]}-disk.img"), tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["truncate", "-s", str(size), str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)
        image.unlink()


async def test_a_full_disk_of_the_node_refuses_new_work_and_recovers(tmp_path: Path) -> None:
    """The log cannot grow: nothing is acknowledged without its record, and with space again all goes on."""
    shared_server()
    with small_disk(tmp_path, 900 << 20) as disk, tiny_server("full", tmp_path, data=disk / "data") as server:
        async with Client(data=server.data) as client, await client.create("tiny") as box:
            assert (await box.run("echo before")).stdout == b"before\n"
            filler = disk / "filler"
            fill(filler)
            with pytest.raises(errors.NodeStorageFull) as failed:
                for _ in range(200):
                    await box.run("head -c 65536 /dev/zero")
            assert failed.value.retry
            with pytest.raises(errors.NodeStorageFull):
                await client.create("tiny")
            filler.unlink()
            assert (await box.run("echo after; echo kept > /kept")).stdout == b"after\n"
            assert await box.files.read("/kept") == b"kept\n", "the writable tree was not touched by it"
        async with within(10):  # removed after the stop was answered
            while traces(server):
                await pause()


def fill(path: Path) -> None:
    """Until not a byte fits."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue


def test_a_host_without_a_needed_program_is_told_which(tmp_path: Path) -> None:
    """`up` fails with the feature and its remedy, and leaves no mount."""
    shared_server()
    data = Path(f"{os.environ[PLACE]}-lacking")
    empty = tmp_path / "bin"
    empty.mkdir()
    server = Server(data)
    done = subprocess.run(
        server.command("up", "-d", "--scratch-bytes", "256m", "--json"),
        env={"PATH": str(empty), "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    try:
        assert done.returncode == 1
        assert b"feature_missing" in done.stderr and b"btrfs-progs" in done.stderr, done.stderr
        assert str(data) not in Path("/proc/self/mountinfo").read_text()
    finally:
        remove(data)
