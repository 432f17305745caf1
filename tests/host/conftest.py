"""The real guest as an ordinary process, for the tests that drive it directly; a directory for layers that get mounted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disks import real_disk
from tests.host.guest_client import Guest, Link, built_guest, running_guest


@pytest.fixture(scope="session")
def guest_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_guest(tmp_path_factory.getbasetemp() / "guest-build")


@pytest.fixture
def guest(guest_binary: Path) -> Iterator[Guest]:
    with running_guest(guest_binary) as running:
        yield running


@pytest.fixture
def link(guest: Guest) -> Iterator[Link]:
    with guest.dial() as dialled:
        yield dialled


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory whose file system holds images that are mounted from their file."""
    with real_disk() as path:
        yield path
