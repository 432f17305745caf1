"""Machines for the tests of this folder: booted once per kernel and test process, one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.debian import Unavailable
from tests.host import spawn_site
from tests.vm import image
from tests.vm.kernel import Kernel, fetch
from tests.vm.machine import MIB, Disk, Machine, boot

SUITES = {"reduced": "bookworm", "full": "trixie-backports"}
"""6.1 has only what a reduced host needs; the other has everything that barchan can use, and pure cgroup v2 like it."""
MEMORY = 1024 * MIB
PYTHON = "cd /opt/tree && PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=src:.:site python3"


@pytest.fixture(scope="session")
def disks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Disk, ...]:
    """Debian and this working tree, read-only."""
    if os.geteuid():
        pytest.skip("making a Debian root needs root")
    spawn_site.build_programs()
    directory = tmp_path_factory.mktemp("images")
    try:
        return Disk("base", image.base(directory)), Disk("tree", image.tree(directory))
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=SUITES)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return fetched(request.param)


def fetched(kind: str) -> Kernel:
    try:
        return fetch(SUITES[kind])
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def machine(kernel: Kernel, disks: tuple[Disk, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Debian, with this tree at /opt/tree and an empty ext4 at /var/tmp."""
    directory = tmp_path_factory.mktemp("machine")
    work = image.disk(directory)
    try:
        with boot(kernel, directory, (*disks, Disk("work", work, writable=True)), MEMORY) as machine:
            yield machine
    except Unavailable as error:
        pytest.skip(str(error))
    finally:
        work.unlink()


@pytest.fixture(scope="session")
def server(machine: Machine) -> Machine:
    """A machine on which `barchan up` runs, with data below /var/tmp/data."""
    up = f"{PYTHON} -m barchan.cli.main up -d --data /var/tmp/data --name machine --scratch-bytes 512m"
    machine.check(up, timeout=300)
    return machine


@pytest.fixture
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    """A throw-away machine with nothing but a kernel and busybox."""
    try:
        with boot(fetched("reduced"), tmp_path) as machine:
            yield machine
    except Unavailable as error:
        pytest.skip(str(error))
