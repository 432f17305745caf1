"""A few requests made from the OpenAPI document for each operation, against a whole server: what real nodes and guests answer.

The many are in tests/contract/test_schemathesis.py, with a scripted node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from barchan import Client
from barchan.api.openapi import document
from barchan.api.routes import ROUTES
from tests.contract.schemathesis_run import narrowed, run
from tests.e2e.conftest import SMALL
from tests.server import Server

SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 501]

# Which files, users and commands there are no schema says.
[checks.positive_data_acceptance]
enabled = false

# Deleting is repeatable and answers with how the sandbox ended.
[checks.use_after_free]
enabled = false
"""
LEFT_OUT = ("--exclude-operation-id", "sandboxes_create", "--exclude-operation-id", "platform_pull")
"""Each case of the one is a container that lives for as long as the case says, and of the other a registry that is not there."""


@contextlib.asynccontextmanager
async def over_tcp(socket: Path) -> AsyncIterator[str]:
    """The unix socket at a port of loopback. Its URL."""

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await asyncio.open_unix_connection(str(socket))
        await asyncio.gather(pour(reader, ahead), pour(behind, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_whole_server_keeps_to_the_document(
    server: Server, client: Client, tiny_env: str, tmp_path: Path
) -> None:
    # The socket trusts root, who runs this: no token is asked for.
    whole = {**msgspec.json.decode(msgspec.json.encode(document(ROUTES))), "security": []}
    async with (
        await client.create(tiny_env, limits=SMALL) as one,
        await client.create(tiny_env, limits=SMALL) as other,
        over_tcp(server.data / "run/api.sock") as url,
    ):
        await one.run(["echo", "hi"], id="e1")
        few = {
            "sandbox": [one.id, "test-aaaaaaaaaaaa"],
            "delete sandbox": [other.id],
            "exec": ["e1", "e9"],
            "ExecBody.id": ["e1", "e2", None],
            "Renewal.lifetime": [3600, None],
            "Renewal.idle_timeout": [3600, None],
        }
        phases = ("--phases", "coverage,fuzzing", "--max-examples", "5")
        done = await run(tmp_path, narrowed(whole, few), url, SETTINGS, *LEFT_OUT, *phases)
        print(f"{done.operations} operations, {done.cases} cases")
        assert done.code == 0, done.output
        assert done.operations == len(ROUTES) - 2
        assert (await one.run(["echo", "still here"])).text == "still here\n"
