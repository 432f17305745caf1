"""`pip install` in a sandbox, by name, from a package index of the test's own Internet."""

from __future__ import annotations

import contextlib
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pip
import pytest

from barchan import Client, Limits
from barchan.spec import MIB
from tests.e2e.test_open_network import served
from tests.host.net_site import NAMESERVER, SERVER, World, open_world
from tests.internet import names, pages
from tests.server import Server

INDEX = "pypi.example.com"
WHEEL = "greeting-1.0-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n"


def wheel() -> bytes:
    """As small as one can be."""
    files = {
        "greeting.py": "print('hello from a package')\n",
        "greeting-1.0.dist-info/METADATA": METADATA,
        "greeting-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "greeting-1.0.dist-info/RECORD"
    files[record] = "".join(f"{name},,\n" for name in (*files, record))
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return whole.getvalue()


def content() -> dict[str, bytes]:
    data = wheel()
    digest = hashlib.sha256(data).hexdigest()
    page = f'<!DOCTYPE html><html><body><a href="/files/{WHEEL}#sha256={digest}">{WHEEL}</a></body></html>'
    return {"/simple/greeting/": page.encode(), f"/files/{WHEEL}": data}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world() as made:
        yield made


@pytest.fixture(scope="module")
def own(world: World) -> Iterator[Server]:
    with contextlib.ExitStack() as open_:
        open_.enter_context(names(world.outside, NAMESERVER, {INDEX: SERVER}))
        open_.enter_context(pages(world.outside, SERVER, 80, content()))
        server = open_.enter_context(served(world, "pip", "--nameserver", NAMESERVER))
        server.run("env", "bootstrap", "debian-12", timeout=600)
        yield server


async def test_a_package_is_installed(own: Server) -> None:
    limits = Limits(memory=512 * MIB, disk=256 * MIB)
    async with Client(data=own.data) as client, await client.create("debian-12", limits=limits, network="open") as box:
        await box.files.upload(Path(pip.__file__).parent, "/opt/tools/pip")
        options = (
            "--no-cache-dir --disable-pip-version-check --break-system-packages --target /opt/packages --retries 0"
        )
        index = f"--index-url http://{INDEX}/simple --trusted-host {INDEX}"
        done = await box.run(
            f"python3 -m pip install {options} {index} greeting", env={"PYTHONPATH": "/opt/tools"}, timeout=120
        )
        assert done.exit_code == 0, (done.text, done.stderr)
        shown = await box.run(["python3", "-c", "import greeting"], env={"PYTHONPATH": "/opt/packages"})
        assert shown.text == "hello from a package\n"
        missing = await box.run(
            f"python3 -m pip install {options} {index} absent", env={"PYTHONPATH": "/opt/tools"}, timeout=120
        )
        assert missing.exit_code, "not everything can be installed"
