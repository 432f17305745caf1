"""A registry of images on loopback, as Debian packages it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from barchan.config import RegistryAccess
from barchan.image_refs import SCHEME
from tests.images import Layout

CONFIG = """
version: 0.1
log: {{level: error, accesslog: {{disabled: false}}}}
storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}
http: {{addr: '127.0.0.1:{port}'}}
"""
INSECURE = '[[registry]]\nlocation = "127.0.0.1:{port}"\ninsecure = true\n'
START_SECONDS = 10


@dataclass(frozen=True)
class Registry:
    """It speaks HTTP without TLS: `access` says so to clients."""

    port: int
    directory: Path

    @property
    def access(self) -> RegistryAccess:
        return RegistryAccess(registries_conf=self.directory / "registries.conf", stall=20)

    def ref(self, name: str) -> str:
        return f"{SCHEME}127.0.0.1:{self.port}/{name}"

    def push(self, layout: Layout, tag: str, name: str, *options: str) -> str:
        """An image of a layout, under `name`, which has a tag. Returns its reference."""
        source, target = f"oci:{layout.root}:{tag}", self.ref(name)
        command = ("skopeo", "copy", "--quiet", "--dest-tls-verify=false", *options, source, target)
        subprocess.run(command, check=True, timeout=60)
        return target

    def blob(self, digest: str) -> Path:
        hex_ = digest.removeprefix("sha256:")
        return self.directory / "store/docker/registry/v2/blobs/sha256" / hex_[:2] / hex_ / "data"

    def fetched(self, digest: str) -> int:
        """How often a blob was asked for."""
        return (self.directory / "log").read_text().count(f"GET /v2/test/blobs/{digest}")


@contextmanager
def running(directory: Path) -> Iterator[Registry]:
    if not shutil.which("docker-registry") or not shutil.which("skopeo"):
        pytest.skip("docker-registry or skopeo is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (directory / "config.yml").write_text(CONFIG.format(root=directory / "store", port=port))
    (directory / "registries.conf").write_text(INSECURE.format(port=port))
    command = ["docker-registry", "serve", str(directory / "config.yml")]
    with (
        (directory / "log").open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            _wait(port, process)
            yield Registry(port, directory)
        finally:
            process.kill()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until it listens."""
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert process.poll() is None and time.monotonic() < end, "the registry does not start"
        time.sleep(0.02)
