"""Every operation of the OpenAPI document, against the API as a process: valid and invalid requests made from the schemas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from barchan.api.routes import ROUTES
from barchan.config import Layout
from barchan.spec import ExecInfo, NodeInfo, SandboxInfo
from barchan.wire import messages as m
from barchan.wire.link import Incoming
from tests.contract.api_site import TOKEN, Http, http
from tests.contract.fake_node import Command, FakeNode
from tests.contract.schemathesis_run import narrowed, run
from tests.contract.test_api_process import api

MISSING = "n1-aaaaaaaaaaaa"
PHASES = "examples,coverage,fuzzing"
"""Not `stateful`: it guesses which answer leads to which request, and takes the lines of many sandboxes for one."""
EXAMPLES = "30"

SETTINGS = """
# 501 is how the API refuses what no node here can do (`not_supported`): the document lists it, no server failed.
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 501]

# It answers nothing but a WebSocket handshake, which HTTP requests made from a schema are not.
[[operations]]
include-path = "/v1/connect"
warnings = false
[operations.checks.positive_data_acceptance]
enabled = false
"""


class Bounded(FakeNode):
    """Ends every command at once and answers in pages, as a node does."""

    def info(self) -> NodeInfo:
        return msgspec.structs.replace(super().info(), data_mounts=("data",))

    async def _run(self, command: Command) -> None:
        if command.request.argv[0] in (b"echo", b"env", b"args"):
            await super()._run(command)
        else:
            command.finish("not_found", 127)

    async def _sandbox_list(self, call: Incoming, request: m.ListSandboxes) -> list[SandboxInfo]:
        return (await super()._sandbox_list(call, request))[: request.limit]

    async def _exec_list(self, call: Incoming, request: m.ListExecs) -> list[ExecInfo]:
        return (await super()._exec_list(call, request))[: request.limit]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[str, FakeNode, Http]]:
    tmp_path.chmod(0o700)
    with api(tmp_path, listen=("127.0.0.1", 0)) as ready:
        async with Bounded(Layout(tmp_path).node_socket, capacity=1 << 20) as node, http(ready["url"]) as ask:
            yield ready["url"], node, ask


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_every_operation_keeps_to_the_document(
    served: tuple[str, FakeNode, Http], tmp_path_factory: pytest.TempPathFactory
) -> None:
    url, node, ask = served
    _, made = await ask("POST", "/v1/sandboxes", {"environment": {"base": "debian-12"}})
    await ask("POST", f"/v1/sandboxes/{made['id']}/exec", {"argv": ["echo", "hi"], "id": "e1"})
    node.files[b"/d/a"] = b"content"
    node.images = ("docker://docker.io/library/debian:12",)
    _, document = await ask("GET", "/v1/openapi.json")
    few = {
        "sandbox": [made["id"], MISSING],
        "exec": ["e1", "e9"],
        "ExecBody.id": ["e1", "e2", None],
        "DataMount.source": ["data"],
        "PullBody.image": [*node.images, "docker://docker.io/library/none:1"],
        "PullBody.node": ["n1", None],
    }
    schemas = document["components"]["schemas"]
    # Mounts in one another are refused, which no schema can say.
    schemas["SandboxSpec"]["properties"]["mounts"]["maxItems"] = 1
    for name in ("files", "files/list"):
        parameters = document["paths"]["/v1/sandboxes/{sandbox}/" + name]["get"]["parameters"]
        next(one for one in parameters if one["name"] == "path")["example"] = "/d/a"
    place = tmp_path_factory.mktemp("run")
    options = ("--header", f"Authorization: Bearer {TOKEN}", "--max-examples", EXAMPLES)
    done = await run(place, narrowed(document, few), url, SETTINGS, *options, "--phases", PHASES)
    print(f"{done.operations} operations, {done.cases} cases")
    assert done.code == 0, done.output
    assert done.operations == len(ROUTES)
    assert done.cases > 30 * len(ROUTES)
    assert not done.warnings
    assert {type(call) for call in node.calls} >= {m.CreateSandbox, m.StartExec, m.SignalExec, m.WriteFile, m.ListFiles}
