"""`barchan env profile`: how little of an environment its sandboxes read."""

from __future__ import annotations

from barchan import Client
from tests.e2e.conftest import SMALL
from tests.server import Server

LICENCE = "/usr/share/common-licenses/GPL-3"


async def test_what_a_sandbox_reads_is_told(server: Server, client: Client, debian_env: str) -> None:
    async with await client.create(debian_env, limits=SMALL) as sandbox:
        server.run("env", "profile", debian_env, "--reset")
        before = server.run("env", "profile", debian_env)["read"]
        assert (await sandbox.run(["sha256sum", LICENCE])).exit_code == 0
        found = server.run("env", "profile", debian_env, "--files", "100000")
    files = {file["path"]: file for file in found["most_read"]}
    licence = files[LICENCE.removeprefix("/")]
    assert 0 < licence["read"] <= licence["bytes"]
    assert before < found["read"] < found["bytes"] / 2
    (layer,) = found["layers"]
    assert layer["mounted"]
    assert layer["files_read"] < layer["files"]


def test_a_list_is_kept_and_discarded(server: Server, tiny_env: str) -> None:
    server.run("env", "profile", tiny_env, "--save")
    server.run("env", "profile", tiny_env, "--discard")
