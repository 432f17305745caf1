"""Sandboxes of images that a registry has: fetched when they are first wanted, once, and named when they cannot be."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from barchan import Client, Limits, errors
from barchan.builds.build import BuildOrder, build
from barchan.builds.context import LocalContext
from barchan.builds.dockerfile import parse
from tests import registry
from tests.e2e.conftest import BUSYBOX
from tests.e2e.test_build import Told
from tests.images import Layout, file, folder, symlink, tar
from tests.registry import Registry
from tests.server import Server, own_server

MIB = 1 << 20
LIMITS = Limits(memory=64 * MIB, disk=32 * MIB)
PROCESS = {"Env": ["PATH=/bin", "WORD=hello"], "User": "1000", "WorkingDir": "/srv"}


def pushed(hub: Registry, path: Path, tag: str, content: bytes = b"", process: dict[str, object] = PROCESS) -> str:
    """An image with a shell. Returns its reference without scheme."""
    base = [
        *(folder(name) for name in ("bin", "etc", "proc", "sys", "dev", "tmp", "srv")),
        file("bin/busybox", BUSYBOX.read_bytes(), mode=0o755),
        *(symlink(f"bin/{name}", "busybox") for name in ("sh", "cat", "id")),
    ]
    layout = Layout(path)
    layout.add(tag, [tar(base), tar([file("tag", content or tag.encode())])], config={"config": process})
    return hub.push(layout, tag, f"test:{tag}").removeprefix("docker://")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry.running(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture(scope="module")
def server(hub: Registry) -> Iterator[Server]:
    with own_server("images", "--registries-conf", str(hub.directory / "registries.conf")) as made:
        yield made


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with Client(data=server.data) as client:
        yield client


async def test_a_sandbox_of_an_image(client: Client, hub: Registry, tmp_path: Path) -> None:
    image = pushed(hub, tmp_path / "image", "plain")
    async with await client.create(image=image, limits=LIMITS) as box:
        done = await box.run("id -u; pwd; echo $WORD; cat /tag", check=True)
        assert done.stdout == b"1000\n/srv\nhello\nplain"
        assert box.info.environment.base.startswith(f"docker://{image.partition(':plain')[0]}@sha256:")
        pinned = box.info.environment.base
    async with await client.create(pinned, limits=LIMITS) as box:
        assert (await box.run("cat /tag", check=True)).stdout == b"plain"
    assert pinned in {entry.name for entry in await client.environments()}


async def test_many_that_want_a_new_image_at_once_fetch_it_once(client: Client, hub: Registry, tmp_path: Path) -> None:
    """CASES 11."""
    image = pushed(hub, tmp_path / "image", "burst")
    before = (hub.directory / "log").read_text().count("GET /v2/test/blobs/")
    boxes = await asyncio.gather(*(client.create(image=image, limits=LIMITS) for _ in range(20)))
    fetched = (hub.directory / "log").read_text().count("GET /v2/test/blobs/") - before
    outputs = await asyncio.gather(*(box.run("cat /tag") for box in boxes))
    await asyncio.gather(*(box.stop() for box in boxes))
    assert {done.stdout for done in outputs} == {b"burst"}
    assert fetched <= 3, "its configuration and its layers, once each"


async def test_a_client_that_gives_up_does_not_spoil_it_for_others(
    client: Client, hub: Registry, tmp_path: Path
) -> None:
    image = pushed(hub, tmp_path / "image", "left")
    waiting = [asyncio.ensure_future(client.create(image=image, limits=LIMITS)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    box = await waiting[1]
    assert (await box.run("cat /tag")).stdout == b"left"
    await box.stop()
    await asyncio.gather(waiting[0], return_exceptions=True)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("test:nothing", errors.ImageNotFound),
        ("nobody/knows:1", errors.ImageNotFound),
        ("", errors.RegistryUnavailable),
    ],
)
async def test_what_cannot_be_fetched_is_named(
    client: Client, hub: Registry, name: str, kind: type[errors.BarchanError]
) -> None:
    """CASES 11."""
    image = hub.ref(name) if name else "127.0.0.1:1/a:b"
    with pytest.raises(kind) as failed:
        await client.create(image=image, limits=LIMITS)
    assert failed.value.phase == "resolve"
    with pytest.raises(errors.InvalidRequest):
        await client.create(image="Not/An:Image", limits=LIMITS)


async def test_a_lock_of_an_image_fetches_it_by_digest(
    client: Client, server: Server, hub: Registry, tmp_path: Path
) -> None:
    image = pushed(hub, tmp_path / "image", "locked")
    await client.pull(image)
    lock = await client.lock(image=image)
    server.run("env", "rm", f"docker://{image}")
    server.run("layer", "gc", "--grace", "0")
    pushed(hub, tmp_path / "other", "locked", content=b"moved")
    async with await client.create(lock=lock, limits=LIMITS) as box:
        assert (await box.run("cat /tag", check=True)).stdout == b"locked"
        assert box.info.environment.base == lock.base.reference


async def test_a_sandbox_is_found_by_the_tag_it_was_asked_for(client: Client, hub: Registry, tmp_path: Path) -> None:
    image = pushed(hub, tmp_path / "image", "listed")
    async with await client.create(image=image, limits=LIMITS) as box:
        for name in (f"docker://{image}", box.info.environment.base):
            assert [info.id for info in await client.list(environment=name)] == [box.id]
        assert not await client.list(environment=f"docker://{image}x")


def test_an_image_without_a_command_runs_its_own(server: Server, hub: Registry, tmp_path: Path) -> None:
    process = {**PROCESS, "Entrypoint": ["/bin/busybox", "echo"], "Cmd": ["from", "the image"]}
    image = f"docker://{pushed(hub, tmp_path / 'image', 'starts', process=process)}"
    barchan = (sys.executable, "-m", "barchan.cli.main", "run", "--memory", "64m", "--data", str(server.data))

    def run(*argv: str, code: int = 0) -> tuple[bytes, bytes]:
        done = subprocess.run([*barchan, *argv], input=b"echo typed", capture_output=True, check=False, timeout=60)
        assert done.returncode == code, done.stderr
        return done.stdout, done.stderr

    assert run(image)[0] == run("-i", image)[0] == b"from the image\n"
    assert run(image, "cat", "/tag")[0] == b"starts", "as it stands, whatever the entrypoint"
    silent = f"docker://{pushed(hub, tmp_path / 'silent', 'silent')}"
    assert run("-i", silent)[0] == b"typed\n", "a shell"
    out, error = run(silent, code=125)
    assert not out and b"has no command of its own" in error and b"-it runs a shell" in error


def test_the_command_line(server: Server, hub: Registry, tmp_path: Path) -> None:
    image = pushed(hub, tmp_path / "image", "cli")
    options = ("--memory", "64m", "--data", str(server.data))
    command = [sys.executable, "-m", "barchan.cli.main", "run", *options, f"docker://{image}", "cat", "/tag"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert done.stdout == b"cli"
    conf = str(hub.directory / "registries.conf")
    pulled = server.run("env", "pull", f"docker://{image}", "--registries-conf", conf)
    assert pulled["unchanged"] and pulled["name"] == f"docker://{image}"
    assert server.run("env", "pull", f"docker://{image}")["unchanged"], "by the server, with its own settings"
    other = pushed(hub, tmp_path / "other", "by-server")
    assert server.run("env", "pull", f"docker://{other}")["unchanged"] is False
    kept = server.run("create", f"docker://{image}", "--memory", "64m")
    assert server.run("env", "rm", f"docker://{image}") == {"removed": f"docker://{image}", "in_use": 1}
    server.run("stop", kept["id"])
    assert all("cli" not in entry["name"] for entry in server.run("env", "ls"))


async def test_a_build_of_an_image_that_is_not_here(client: Client, hub: Registry, tmp_path: Path) -> None:
    """Fetched for FROM and for COPY --from; what it says of itself is there for the steps and for what is built."""
    image, other = pushed(hub, tmp_path / "image", "base"), pushed(hub, tmp_path / "other", "other")
    (tmp_path / "context").mkdir()
    text = f'FROM {image}\nENV WORD="$WORD you"\nCOPY --from=docker://{other} --chown=1000 /tag got\nRUN echo $WORD $(id -u) $(cat got) > said\n'
    order = BuildOrder(
        dockerfile=parse(text.encode()),
        context=LocalContext(tmp_path / "context"),
        name="built",
        network="deny",
        limits=LIMITS,
    )
    told = Told()
    with pytest.raises(errors.CommandFailed, match="Dockerfile:4"):
        await build(client, order, told)  # /srv is root's
    assert [line for line in told.lines if "fetching" in line] == [
        f"note fetching docker://{image}",
        f"note fetching docker://{other}",
    ]
    order = msgspec.structs.replace(order, dockerfile=parse(text.replace("RUN", "USER 0\nRUN").encode()))
    await build(client, order, told)
    async with await client.create("built", limits=LIMITS) as box:
        assert (await box.run("cat said; pwd; echo $WORD", check=True)).text == "hello you 0 other\n/srv\nhello you\n"
