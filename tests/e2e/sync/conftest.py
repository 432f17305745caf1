"""The fixtures of the directory above, for the synchronous client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from barchan.sync import Client, Sandbox
from tests.e2e.conftest import SMALL
from tests.server import Server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(data=server.data) as client:
        yield client


@pytest.fixture
def sandbox(client: Client, tiny_env: str) -> Iterator[Sandbox]:
    with client.create(tiny_env, limits=SMALL) as sandbox:
        yield sandbox


@pytest.fixture
def debian(client: Client, debian_env: str) -> Iterator[Sandbox]:
    with client.create(debian_env, limits=SMALL) as sandbox:
        yield sandbox
