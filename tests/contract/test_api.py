"""The HTTP API over real sockets, with a scripted node behind it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from barchan.api.files import MOST_LISTED
from barchan.api.listen import Opened, bind_unix
from barchan.api.openapi import document
from barchan.api.routes import ROUTES
from barchan.config import ApiConfig, Layout
from barchan.errors import Conflict, InvalidRequest, tree
from barchan.spec import SandboxInfo
from barchan.wire import messages as m
from barchan.wire.frames import FrameReader, FrameType, encode
from tests.contract.api_site import TOKEN, Http, Site, http, site
from tests.contract.fake_node import FakeNode

SPEC = {"environment": {"base": "debian-12"}}


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as it:
        yield it


@pytest.fixture
async def node(place: Site) -> AsyncIterator[FakeNode]:
    async with place.node() as it:
        yield it


@pytest.fixture
async def ask(place: Site) -> AsyncIterator[Http]:
    async with http(place.url) as it:
        yield it


@pytest.fixture
async def sandbox(node: FakeNode, ask: Http) -> str:
    status, info = await ask("POST", "/v1/sandboxes", SPEC)
    assert status == 201
    return str(info["id"])


# who may ask


async def test_the_socket_needs_no_token(place: Site, node: FakeNode) -> None:
    async with http("http://barchan", token=None, unix=place.layout.api_socket) as ask:
        assert (await ask("GET", "/v1/sandboxes")) == (200, [])


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong-token-0123"}, {"Authorization": TOKEN}])
async def test_tcp_needs_the_token(place: Site, node: FakeNode, headers: dict[str, str]) -> None:
    async with http(place.url, token=None) as ask:
        for method, path in (("GET", "/v1/sandboxes"), ("GET", "/v1/connect"), ("GET", "/v1/openapi.json")):
            status, body = await ask(method, path, headers=headers)
            assert (status, body["code"], body["party"]) == (401, "unauthenticated", "caller")
            assert TOKEN not in str(body)


async def test_tcp_with_the_token(ask: Http, node: FakeNode) -> None:
    assert (await ask("GET", "/v1/sandboxes")) == (200, [])


async def test_health_needs_no_token(place: Site) -> None:
    async with http(place.url, token=None) as ask:
        status, body = await ask("GET", "/v1/health")
    assert (status, body["status"]) == (200, "ok")


async def test_sockets_are_private(place: Site) -> None:
    for path in (place.layout.api_socket, place.layout.node_socket):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("uid", [1234])
async def test_another_user_at_the_socket_needs_the_token(place: Site, node: FakeNode, uid: int) -> None:
    """The socket's mode keeps others out; should one come through a shared descriptor, the kernel tells who."""
    if os.geteuid() != 0:
        pytest.skip("needs root: takes another user's identity")
    # The peer's credentials are those at connect time.
    client = await asyncio.to_thread(_connect_as, uid, place)
    client.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=client)
    writer.write(b"GET /v1/sandboxes HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert b" 401 " in answer.split(b"\r\n")[0]


def _connect_as(uid: int, place: Site) -> socket.socket:
    """Connect from a child with that identity and pass the connection back."""
    for path in (place.data, place.layout.run, place.layout.api_socket):
        path.chmod(0o777)
    for parent in place.data.parents[:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(uid, uid, uid)
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(place.layout.api_socket))
            socket.send_fds(theirs, [b"x"], [sock.fileno()])
        finally:
            os._exit(0)
    theirs.close()
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    os.waitpid(child, 0)
    ours.close()
    assert fds, "the child could not connect"
    return socket.socket(fileno=fds[0])


# opening


def config(data: Path, **options: Any) -> ApiConfig:
    (data / "token").write_text(TOKEN)
    return ApiConfig(layout=Layout(data), **options)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_plaintext_beyond_loopback_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidRequest, match="plaintext") as caught:
        Opened(config(tmp_path, listen=(host, 0)))
    assert caught.value.field == "listen"
    assert "--tls-cert" in caught.value.hint


def test_plaintext_beyond_loopback_can_be_forced(tmp_path: Path) -> None:
    with Opened(config(tmp_path, listen=("0.0.0.0", 0), insecure=True)) as opened:
        assert opened.url.startswith("http://0.0.0.0:")


def test_tcp_without_a_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Opened(ApiConfig(layout=Layout(tmp_path), listen=("127.0.0.1", 0)))
    assert caught.value.field == "token"


def test_half_a_tls_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Opened(config(tmp_path, listen=("127.0.0.1", 0), tls_cert=tmp_path / "cert"))
    assert caught.value.field == "tls_cert"


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    bind_unix(path).close()
    with bind_unix(path) as live:
        live.listen()
        with pytest.raises(Conflict):
            bind_unix(path)
    path.unlink()
    path.write_text("precious")
    with pytest.raises(Conflict):
        bind_unix(path)
    assert path.read_text() == "precious"


# errors


@pytest.mark.parametrize("code", sorted(cls.code for cls in tree()))
async def test_every_error_of_a_node_arrives_with_its_status(ask: Http, node: FakeNode, code: str) -> None:
    cls = next(c for c in tree() if c.code == code)
    status, body = await ask("POST", "/v1/sandboxes", {**SPEC, "labels": {"fail": code}})
    assert status == cls.status
    assert body["code"] == code
    assert body.get("retry", False) == cls.retry
    assert body.get("party", "platform") == cls.party
    if code != "admission_refused":  # that one becomes a refusal by all nodes
        assert (body["phase"], body["field"], body["hint"]) == ("mount", "a.field", "a hint")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({**SPEC, "memroy": 1}, "memroy"),
        ({**SPEC, "limits": {"memory": -1}}, "limits.memory"),
        ({**SPEC, "limits": {"memory": "1g"}}, "limits.memory"),
        ({**SPEC, "limits": {"cpus": 1e9}}, "limits.cpus"),
        ({**SPEC, "limits": {"pids": (1 << 22) + 1}}, "limits.pids"),
        ({**SPEC, "limits": {"files": 1 << 32}}, "limits.files"),
        ({**SPEC, "limits": {"ram": 1}}, "limits.ram"),
        ({**SPEC, "workdir": "/a\0b"}, "workdir"),
        ({**SPEC, "env": {"A": "x\0y"}}, "env"),
        ({**SPEC, "user": "a\0b"}, "user"),
        ({**SPEC, "lifetime": -1}, "lifetime"),
        ({"environment": {"base": "../etc"}}, "environment.base"),
        ({"environment": {"base": "a..b"}}, "environment.base"),
        ({**SPEC, "backend": "quantum"}, "backend"),
        ({**SPEC, "hostname": "-"}, "hostname"),
    ],
)
async def test_a_wrong_field_is_named(ask: Http, node: FakeNode, body: Any, field: str) -> None:
    status, answer = await ask("POST", "/v1/sandboxes", body)
    assert (status, answer["code"], answer["field"]) == (400, "invalid_request", field)
    assert not node.sandboxes


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"argv": ["a\0b"]}, "argv"),
        ({"argv": []}, "argv"),
        ({}, "argv"),
        ({"argv": ["x"], "cmd": "x"}, "argv"),
        ({"cmd": "x", "timeout": -1}, "timeout"),
        ({"cmd": "x", "timeout": 4_294_968}, "timeout"),
        ({"cmd": "x", "grace": -1}, "grace"),
        ({"cmd": "x", "cwd": "/\0"}, "cwd"),
        ({"cmd": "x", "env": {"A=B": "c"}}, "env"),
        ({"cmd": "x", "output_limit": 1 << 40}, "output_limit"),
        ({"cmd": "x", "id": "../x"}, "id"),
        ({"cmd": "x", "stdin": "a", "stdin_base64": "YQ=="}, "stdin"),
        ({"cmd": "x", "shell": True}, "shell"),
    ],
)
async def test_a_wrong_field_of_a_command_is_named(
    ask: Http, node: FakeNode, sandbox: str, body: Any, field: str
) -> None:
    status, answer = await ask("POST", f"/v1/sandboxes/{sandbox}/exec", body)
    assert (status, answer["code"], answer["field"]) == (400, "invalid_request", field)
    assert not node.commands[sandbox]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v2/sandboxes", 404),
        ("PATCH", "/v1/sandboxes", 405),
        ("GET", "/v1/connect", 400),
        ("GET", "/v1/sandboxes/not-an-id", 400),
        ("GET", "/v1/sandboxes/n1-aaaaaaaaaaaa", 404),
        ("GET", "/v1/sandboxes/elsewhere-aaaaaaaaaaaa", 404),
        ("GET", "/v1/sandboxes?colour=red", 400),
        ("GET", "/v1/sandboxes?label=red", 400),
        ("GET", "/v1/sandboxes?state=asleep", 400),
        ("GET", "/v1/sandboxes?ended=perhaps", 400),
        ("GET", "/v1/sandboxes?backend=magic", 400),
        ("GET", "/v1/sandboxes?environment=Not%20A%20Name", 400),
        ("GET", "/v1/sandboxes?created_after=yesterday", 400),
        ("GET", "/v1/sandboxes?created_before=nan", 400),
        ("GET", "/v1/sandboxes?node=elsewhere", 404),
        ("GET", "/v1/sandboxes?prefix=a&prefix=b", 400),
        ("POST", "/v1/sandboxes?number=2", 400),
        ("GET", "/v1/sandboxes/n1-aaaaaaaaaaaa/stats", 404),
    ],
)
async def test_wrong_requests_get_typed_answers(ask: Http, node: FakeNode, method: str, path: str, status: int) -> None:
    got, body = await ask(method, path)
    assert got == status
    assert body["party"] == "caller"


async def test_what_is_not_json_is_refused(ask: Http, node: FakeNode) -> None:
    for data in (b"{", b"\xff", b'{"environment": {"base": "\\ud800"}}'):
        status, body = await ask("POST", "/v1/sandboxes", data)
        assert (status, body["code"]) == (400, "invalid_request")
    status, body = await ask("POST", "/v1/sandboxes", b"a=b", headers={"Content-Type": "text/plain"})
    assert (status, body["field"]) == (400, "Content-Type")


EVERY_ROUTE = [pytest.param(route.method, route.path, id=f"{route.method} {route.path}") for route in ROUTES]


def _filled(path: str) -> str:
    return path.replace("{sandbox}", "n1-aaaaaaaaaaaa").replace("{exec}", "e1")


@pytest.mark.parametrize(("method", "path"), EVERY_ROUTE)
@pytest.mark.parametrize("query", ["colour=red", "=", "%ff=1"])
async def test_unknown_parameters_are_refused_everywhere(
    ask: Http, node: FakeNode, method: str, path: str, query: str
) -> None:
    before = len(node.calls)
    status, body = await ask(method, f"{_filled(path)}?{query}")
    assert (status, body["code"]) == (400, "invalid_request")
    assert "unknown query parameter" in body["message"]
    assert len(node.calls) == before


@pytest.mark.parametrize(("method", "path"), EVERY_ROUTE)
async def test_another_method_says_which_there_are(ask: Http, node: FakeNode, method: str, path: str) -> None:
    async with ask.raw("PATCH", _filled(path)) as reply:
        assert reply.status == 405
        assert method in reply.headers["Allow"]
        assert (await reply.json())["code"] == "invalid_request"


async def test_a_refusal_without_a_token_says_how(place: Site, node: FakeNode) -> None:
    async with http(place.url, token=None) as ask, ask.raw("GET", "/v1/sandboxes") as reply:
        assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        *((f"limit={text}", "limit") for text in ("+5", "1_0", "%205", "5.0", "1e1", "", "null", "9" * 5000, "%D9%A5")),
        *((f"created_after={text}", "created_after") for text in ("inf", "1_0", "1e999", "0x1", "%201", "", "null")),
        ("ended=1", "ended"),
        ("ended=True", "ended"),
        ("prefix=%ff", "prefix"),
        ("prefix=%ed%a0%80", "prefix"),
        ("limit=1&limit=1", "limit"),
    ],
)
async def test_parameters_have_one_spelling(ask: Http, node: FakeNode, query: str, field: str) -> None:
    status, body = await ask("GET", f"/v1/sandboxes?{query}")
    assert (status, body["field"]) == (400, field)


async def test_no_count_is_not_a_null_count(ask: Http, node: FakeNode) -> None:
    for text in ("null", "", "+1"):
        status, body = await ask("POST", f"/v1/sandboxes?count={text}", SPEC)
        assert (status, body["field"]) == (400, "count")
    assert not node.sandboxes


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"environment": {"base": "a"}, "environment": {"base": "debian-12"}}', "environment"),
        ('{"environment": {"base": "a", "base": "debian-12"}}', "base"),
        ('{"environment": {"base": "debian-12"}, "env": {"A": "1", "\\u0041": "2"}}', "A"),
    ],
)
async def test_a_field_given_twice_is_refused(ask: Http, node: FakeNode, text: str, field: str) -> None:
    status, body = await ask("POST", "/v1/sandboxes", text.encode())
    assert (status, body["field"]) == (400, field)
    assert "twice" in body["message"]


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 400, "9" * 5000, "1.5", "12.0", "true", "null", "NaN"])
async def test_no_number_is_too_much(ask: Http, node: FakeNode, number: str) -> None:
    for field in ("memory", "pids"):
        text = f'{{"environment": {{"base": "debian-12"}}, "limits": {{"{field}": {number}}}}}'
        status, body = await ask("POST", "/v1/sandboxes", text.encode())
        assert (status, body["code"]) == (400, "invalid_request")


async def test_a_missing_field_is_named(ask: Http, node: FakeNode) -> None:
    for body, field in (({}, "environment"), ({"environment": {}}, "environment.base")):
        status, answer = await ask("POST", "/v1/sandboxes", body)
        assert (status, answer["field"]) == (400, field)


@pytest.mark.parametrize("keys", [("",), ("k", "k"), ("a b",), ("\xff",)])
@pytest.mark.parametrize("query", ["", "?count=2"])
async def test_a_key_that_cannot_be_kept_is_refused(
    ask: Http, node: FakeNode, keys: tuple[str, ...], query: str
) -> None:
    """Who sends an empty one counts on it as well."""
    headers = [("Content-Type", "application/json"), *(("Idempotency-Key", key) for key in keys)]
    data = msgspec.json.encode(SPEC)
    async with ask.raw("POST", f"/v1/sandboxes{query}", data=data, headers=headers) as reply:
        assert (reply.status, (await reply.json())["field"]) == (400, "key")
    assert not node.sandboxes


@pytest.mark.parametrize(
    "path", ["/v1/sandboxes", "/v1/sandboxes/{sandbox}/exec", "/v1/sandboxes/{sandbox}/files?path=/a"]
)
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_cannot_be_decoded_is_the_callers_fault(
    ask: Http, node: FakeNode, sandbox: str, path: str, encoding: str
) -> None:
    headers = {"Content-Encoding": encoding, "Connection": "close"}
    method = "PUT" if "files" in path else "POST"
    status, body = await ask(method, path.replace("{sandbox}", sandbox), b"neither of them", headers=headers)
    assert (status, body["code"], body["field"]) == (400, "invalid_request", "body")
    assert b"/a" not in node.files


@pytest.mark.parametrize("path", ["/v1/health", "/v1/sandboxes", "/elsewhere"])
async def test_unknown_expectations_get_json(place: Site, path: str) -> None:
    """The HTTP library refuses them before the application has the request."""
    reader, writer = await asyncio.open_unix_connection(str(place.layout.api_socket))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nExpect: magic\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b" 417 " in head.split(b"\r\n")[0] and b"application/json" in head
    assert msgspec.json.decode(body)["code"] == "invalid_request"


async def test_a_large_body_is_refused(ask: Http, node: FakeNode) -> None:
    status, body = await ask("POST", "/v1/sandboxes", b" " * (9 << 20))
    assert (status, body["code"]) == (413, "invalid_request")


async def test_garbage_instead_of_http_gets_json(place: Site, caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = await asyncio.open_unix_connection(str(place.layout.api_socket))
    writer.write(b"GET / HTTP/9.x\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b" 400 " in head.split(b"\r\n")[0]
    assert b'"code":"invalid_request"' in body


async def test_an_unexpected_exception_shows_no_inside(
    ask: Http, node: FakeNode, sandbox: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The scripted node has no such program, which is a fault of its own that it did not foresee."""
    node.sandboxes[sandbox] = None  # type: ignore[assignment]
    status, body = await ask("GET", f"/v1/sandboxes/{sandbox}")
    assert (status, body["code"]) == (500, "protocol_error")
    assert "Traceback" not in str(body)


# sandboxes


async def test_filters_reach_the_nodes(ask: Http, node: FakeNode) -> None:
    query = "label=a=1&label=b=2&state=ready&state=stopped&ended=true&environment=debian-12@3&backend=container"
    status, _ = await ask(
        "GET", f"/v1/sandboxes?{query}&node=n1&prefix=n1-0&created_after=1.5&created_before=2&limit=7"
    )
    assert status == 200
    assert node.calls[-1] == m.ListSandboxes(
        labels={"a": "1", "b": "2"},
        states=("ready", "stopped"),
        ended=True,
        environment="debian-12@3",
        backend="container",
        node="n1",
        prefix="n1-0",
        created_after=1.5,
        created_before=2.0,
        limit=7,
    )


async def test_stats(ask: Http, node: FakeNode) -> None:
    _, info = await ask("POST", "/v1/sandboxes", SPEC)
    status, found = await ask("GET", f"/v1/sandboxes/{info['id']}/stats")
    assert status == 200 and found["id"] == info["id"] and found["memory"] == 4096 and found["memory_peak"] is None


async def test_the_life_of_a_sandbox(ask: Http, node: FakeNode) -> None:
    status, info = await ask("POST", "/v1/sandboxes", {**SPEC, "labels": {"job": "7"}})
    assert status == 201
    path = f"/v1/sandboxes/{info['id']}"
    assert (await ask("GET", path)) == (200, info)
    assert (await ask("GET", "/v1/sandboxes?label=job=7")) == (200, [info])
    assert (await ask("GET", "/v1/sandboxes?label=job=8")) == (200, [])
    status, renewed = await ask("POST", f"{path}/renew", {"lifetime": 10})
    assert renewed["expires"] == pytest.approx(info["created"] + 10)
    for _ in range(2):
        status, stopped = await ask("DELETE", path)
        assert (status, stopped["state"]) == (200, "stopped")


async def test_a_key_answers_with_the_same_sandbox(ask: Http, place: Site, node: FakeNode) -> None:
    headers = {"Idempotency-Key": "k1"}
    async with place.node("n2"):
        answers = [await ask("POST", "/v1/sandboxes", SPEC, headers=headers) for _ in range(8)]
    assert {info["id"] for _, info in answers} == {answers[0][1]["id"]}
    status, body = await ask("POST", "/v1/sandboxes", {**SPEC, "user": "bob"}, headers=headers)
    assert (status, body["code"]) == (409, "conflict")


async def test_a_key_is_known_after_the_api_started_again(tmp_path: Path) -> None:
    place, headers = Site(tmp_path), {"Idempotency-Key": "k1"}
    await place.start()
    async with place.node("n1") as one, place.node("n2") as two:
        async with http(place.url) as ask:
            _, first = await ask("POST", "/v1/sandboxes", SPEC, headers=headers)
        one.drop()
        two.drop()
        await place.stop()
        await place.start()
        await one.dial()
        await two.dial()
        async with http(place.url) as ask:
            _, second = await ask("POST", "/v1/sandboxes", SPEC, headers=headers)
    await place.stop()
    assert first == second


async def test_a_refusing_node_is_passed_over(ask: Http, place: Site, node: FakeNode) -> None:
    node.refuse = "no memory"
    async with place.node("n2") as other:
        for _ in range(8):
            status, _ = await ask("POST", "/v1/sandboxes", SPEC)
            assert status == 201
        assert len(other.sandboxes) == 8
        other.refuse = "full"
        status, body = await ask("POST", "/v1/sandboxes", SPEC)
    assert (status, body["code"], body["retry"]) == (429, "admission_refused", True)
    assert "n1: no memory" in body["message"] and "n2: full" in body["message"]


async def test_without_a_node(ask: Http) -> None:
    status, body = await ask("POST", "/v1/sandboxes", SPEC)
    assert (status, body["code"], body["retry"]) == (503, "node_unavailable", True)


async def test_a_node_that_is_away_is_waited_for(ask: Http, node: FakeNode, sandbox: str) -> None:
    node.drop()
    status, body = await ask("GET", f"/v1/sandboxes/{sandbox}")
    assert (status, body["code"], body["retry"]) == (503, "node_unavailable", True)
    waiting = asyncio.create_task(ask("GET", f"/v1/sandboxes/{sandbox}"))
    await asyncio.sleep(0)
    await node.dial()
    assert (await waiting)[0] == 200


async def test_a_node_lost_during_a_call(ask: Http, node: FakeNode) -> None:
    node.create_gate = asyncio.Event()
    creating = asyncio.create_task(ask("POST", "/v1/sandboxes", SPEC))
    await node.wait_for(m.CreateSandbox)
    node.drop()
    status, body = await creating
    assert (status, body["code"], body["retry"]) == (503, "node_unavailable", True)


async def test_a_node_that_dials_again_replaces_itself(ask: Http, node: FakeNode, sandbox: str) -> None:
    old = node._protocol
    await node.dial()
    assert old is not None and old.link is not node._protocol.link  # type: ignore[union-attr]
    assert (await ask("GET", f"/v1/sandboxes/{sandbox}"))[0] == 200
    _, nodes = await ask("GET", "/v1/nodes")
    assert [n["name"] for n in nodes] == ["n1"]


async def test_environments_of_all_nodes_once(ask: Http, place: Site, node: FakeNode) -> None:
    async with place.node("n2"):
        _, found = await ask("GET", "/v1/environments")
    assert [(e["name"], e["version"]) for e in found] == [("debian-12", 3)]


async def test_an_image_is_pulled(ask: Http, node: FakeNode) -> None:
    node.images = ("docker://debian:12",)
    status, found = await ask("POST", "/v1/environments/pull", {"image": "docker://debian:12"})
    assert (status, found["name"]) == (200, "docker://debian:12")
    status, error = await ask("POST", "/v1/environments/pull", {"image": "docker://debian:13", "again": False})
    assert (status, error["code"]) == (404, "image_not_found")
    status, error = await ask("POST", "/v1/environments/pull", {"image": "debian-12"})
    assert (status, error["field"]) == (400, "image")


async def test_a_lock_comes_from_a_node_that_has_its_names(ask: Http, place: Site, node: FakeNode) -> None:
    async with place.node("a-first") as other:
        other.lacks = ("debian-12",)
        status, lock = await ask("POST", "/v1/environments/lock", {"base": "debian-12", "toolkits": ["t"]})
        assert status == 200 and [lock["base"]["name"], lock["toolkits"][0]["name"]] == ["debian-12", "t"]
        status, error = await ask("POST", "/v1/environments/lock", {"base": "nothing"})
        assert (status, error["code"]) == (404, "environment_not_found")
        status, error = await ask("POST", "/v1/environments/lock", {"base": "A"})
        assert (status, error["field"]) == (400, "environment.base")


# commands and files


async def test_a_command(ask: Http, node: FakeNode, sandbox: str) -> None:
    status, result = await ask("POST", f"/v1/sandboxes/{sandbox}/exec", {"argv": ["echo", "hi"]})
    assert status == 200
    assert (result["outcome"], result["exit_code"], result["stdout"]) == ("exited", 0, "hi\n")
    _, result = await ask("POST", f"/v1/sandboxes/{sandbox}/exec", {"cmd": "exit 3"})
    assert (result["exit_code"], result["stderr"]) == (3, "failing\n")
    _, history = await ask("GET", f"/v1/sandboxes/{sandbox}/exec")
    assert [record["argv"] for record in history] == [["echo", "hi"], ["/bin/sh", "-c", "exit 3"]]


async def test_exact_bytes_of_a_command(ask: Http, node: FakeNode, sandbox: str) -> None:
    data = bytes(range(256)) * 3000
    body = {"argv": ["cat"], "stdin_base64": base64.b64encode(data).decode()}
    _, result = await ask("POST", f"/v1/sandboxes/{sandbox}/exec", body)
    assert base64.b64decode(result["stdout_base64"]) == data
    assert "�" in result["stdout"]


async def test_the_same_id_is_the_same_command(ask: Http, node: FakeNode, sandbox: str) -> None:
    body = {"argv": ["echo", "hi"], "id": "mine"}
    first = await ask("POST", f"/v1/sandboxes/{sandbox}/exec", body)
    assert await ask("POST", f"/v1/sandboxes/{sandbox}/exec", body) == first
    status, _ = await ask("POST", f"/v1/sandboxes/{sandbox}/exec", {"argv": ["echo", "no"], "id": "mine"})
    assert status == 409
    assert len(node.commands[sandbox]) == 1


async def test_a_signal(ask: Http, node: FakeNode, sandbox: str) -> None:
    path = f"/v1/sandboxes/{sandbox}/exec"
    running = asyncio.create_task(ask("POST", path, {"cmd": "sleep", "id": "s1"}))
    await node.wait_for(m.StartExec)
    assert (await ask("POST", f"{path}/s1/signal", {"signal": 15}))[0] == 200
    _, result = await running
    assert (result["outcome"], result["exit_code"]) == ("signaled", 143)
    status, body = await ask("POST", f"{path}/s1/signal", {"signal": 65})
    assert (status, body["field"]) == (400, "signal")
    status, body = await ask("POST", f"{path}/nope/signal", {"signal": 9})
    assert (status, body["code"]) == (404, "exec_not_found")


async def test_files(ask: Http, node: FakeNode, sandbox: str) -> None:
    path, data = f"/v1/sandboxes/{sandbox}/files", os.urandom(3_000_000)
    status, _ = await ask("PUT", f"{path}?path=/d/a&mode=755", data, headers={"Content-Type": "text/x"})
    assert status == 200
    assert node.modes[b"/d/a"] == 0o755
    async with ask.raw("GET", f"{path}?path=/d/a") as reply:
        assert (reply.status, reply.content_type) == (200, "application/octet-stream")
        assert await reply.read() == data
    _, found = await ask("GET", f"{path}/list?path=/d")
    assert [(entry["path"], entry["kind"], entry["size"]) for entry in found] == [("a", "file", len(data))]


@pytest.mark.parametrize(
    ("query", "status", "field"),
    [("", 400, "path"), ("?path=/missing", 404, ""), ("?path=%00", 400, "path"), ("?path=/x&way=up", 400, "way")],
)
async def test_files_that_cannot_be_read(
    ask: Http, node: FakeNode, sandbox: str, query: str, status: int, field: str
) -> None:
    got, body = await ask("GET", f"/v1/sandboxes/{sandbox}/files{query}")
    assert (got, body.get("field", "")) == (status, field)


FAULTS = [("file_missing", 404), ("file_denied", 403), ("file_is_directory", 400), ("sandbox_disk_full", 507)]


async def test_names_that_are_not_text(ask: Http, node: FakeNode, sandbox: str) -> None:
    """A path is any bytes; a percent sign that was sent as one stays one."""
    path = f"/v1/sandboxes/{sandbox}/files"
    for query, name in (("%2Fx%ff", b"/x\xff"), ("/x%25ff", b"/x%ff"), ("/a+b%2Bc", b"/a b+c")):
        async with ask.raw("PUT", f"{path}?path={query}", data=name) as reply:
            assert reply.status == 200
        assert node.files[name] == name
        async with ask.raw("GET", f"{path}?path={query}") as reply:
            assert await reply.read() == name
    _, found = await ask("GET", f"/v1/sandboxes/{sandbox}/files/list?path=/")
    assert {base64.b64decode(entry["path_base64"]) for entry in found} == {b"x\xff", b"x%ff", b"a b+c"}


@pytest.mark.parametrize("place_", ["files", "files/list"])
@pytest.mark.parametrize("user", ["a%00", "%ff"])
async def test_users_that_cannot_be(ask: Http, node: FakeNode, sandbox: str, place_: str, user: str) -> None:
    status, body = await ask("GET", f"/v1/sandboxes/{sandbox}/{place_}?path=/a&user={user}")
    assert (status, body["field"]) == (400, "user")


async def test_a_directory_too_large_for_one_answer(ask: Http, node: FakeNode, sandbox: str) -> None:
    name = b"n" * 200
    node.files |= {b"/big/%d-%s" % (i, name): b"" for i in range(MOST_LISTED // len(name))}
    status, body = await ask("GET", f"/v1/sandboxes/{sandbox}/files/list?path=/big")
    assert (status, body["code"], body["field"]) == (400, "invalid_request", "path")
    assert "SDK" in body["hint"]


@pytest.mark.parametrize(("code", "status"), FAULTS)
@pytest.mark.parametrize("place_", ["files", "files/list"])
async def test_a_failure_is_no_empty_file(
    ask: Http, node: FakeNode, sandbox: str, place_: str, code: str, status: int
) -> None:
    """A guest ends the stream of a file that it could not open, and then says so."""
    node.files[b"/a"] = b"x"
    node.faults[b"/a"] = (0, code)
    got, body = await ask("GET", f"/v1/sandboxes/{sandbox}/{place_}?path=/a")
    assert (got, body["code"]) == (status, code)


async def test_a_failure_midway_is_no_whole_file(ask: Http, node: FakeNode, sandbox: str) -> None:
    node.files[b"/a"], node.faults[b"/a"] = bytes(3_000_000), (1_000_000, "file_failure")
    async with ask.raw("GET", f"/v1/sandboxes/{sandbox}/files?path=/a") as reply:
        assert reply.status == 200
        with pytest.raises((aiohttp.ClientPayloadError, ConnectionError)):
            await reply.read()


async def test_an_answer_before_the_end_is_no_whole_file(
    ask: Http, node: FakeNode, sandbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def short(call: Any, request: Any) -> None:
        return None

    for name in ("_file_read", "_file_list", "_file_write"):
        monkeypatch.setattr(node, name, short)
    path = f"/v1/sandboxes/{sandbox}/files"
    for method, query in (("GET", "?path=/a"), ("GET", "/list?path=/a")):
        status, body = await ask(method, path + query)
        assert (status, body["code"]) == (500, "protocol_error")
    status, body = await ask("PUT", f"{path}?path=/a", bytes(3_000_000))
    assert (status, body["code"]) == (500, "protocol_error")


async def test_an_empty_file_is_one(ask: Http, node: FakeNode, sandbox: str) -> None:
    node.files[b"/empty"] = b""
    async with ask.raw("GET", f"/v1/sandboxes/{sandbox}/files?path=/empty") as reply:
        assert (reply.status, await reply.read()) == (200, b"")


async def test_http_that_cannot_show_a_cut_reads_no_files(place: Site, node: FakeNode, sandbox: str) -> None:
    node.files[b"/a"] = b"x"
    reader, writer = await asyncio.open_unix_connection(str(place.layout.api_socket))
    writer.write(f"GET /v1/sandboxes/{sandbox}/files?path=/a HTTP/1.0\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    assert b" 400 " in answer.split(b"\r\n")[0] and b"HTTP/1.1" in answer


async def test_half_a_body_is_not_written(
    place: Site, node: FakeNode, sandbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up, real = asyncio.Event(), node._take_bytes

    async def watched(call: Any) -> bytes:
        try:
            return await real(call)
        finally:
            given_up.set()

    monkeypatch.setattr(node, "_take_bytes", watched)
    _, writer = await asyncio.open_unix_connection(str(place.layout.api_socket))
    head = f"PUT /v1/sandboxes/{sandbox}/files?path=/a HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    writer.write(head.encode() + b"half")
    await node.wait_for(m.WriteFile)
    writer.close()
    async with asyncio.timeout(5):
        await given_up.wait()
    assert b"/a" not in node.files


@pytest.mark.parametrize("mode", ["999", "rwx", ""])
async def test_a_mode_that_is_not_octal(ask: Http, node: FakeNode, sandbox: str, mode: str) -> None:
    status, body = await ask("PUT", f"/v1/sandboxes/{sandbox}/files?path=/a&mode={mode}", b"x")
    assert (status, body["field"]) == (400, "mode")
    assert "octal" in body["message"]


async def test_hanging_up_cancels_the_command(ask: Http, node: FakeNode, sandbox: str) -> None:
    running = asyncio.create_task(ask("POST", f"/v1/sandboxes/{sandbox}/exec", {"cmd": "sleep", "id": "s1"}))
    await node.wait_for(m.StartExec)
    running.cancel()
    async with asyncio.timeout(5):
        await node.wait_for(m.CancelExec)
        await node.commands[sandbox]["s1"].done.wait()
    result = node.commands[sandbox]["s1"].result
    assert result is not None and result.outcome == "cancelled"


async def test_hanging_up_before_the_command_is_known_cancels_it_too(ask: Http, node: FakeNode, sandbox: str) -> None:
    node.start_gate = asyncio.Event()
    running = asyncio.create_task(ask("POST", f"/v1/sandboxes/{sandbox}/exec", {"cmd": "sleep", "id": "s1"}))
    await node.wait_for(m.StartExec)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert (await ask("GET", "/v1/health"))[0] == 200  # by now the API has seen the other connection end
    node.start_gate.set()
    async with asyncio.timeout(5):
        await node.wait_for(m.CancelExec)
        await node.commands[sandbox]["s1"].done.wait()
    result = node.commands[sandbox]["s1"].result
    assert result is not None and result.outcome == "cancelled"


async def test_stopping_the_api_cancels_no_command(tmp_path: Path) -> None:
    place = Site(tmp_path)
    await place.start()
    async with place.node() as node, http(place.url) as ask:
        _, info = await ask("POST", "/v1/sandboxes", SPEC)
        running = asyncio.create_task(ask("POST", f"/v1/sandboxes/{info['id']}/exec", {"cmd": "sleep", "id": "s1"}))
        await node.wait_for(m.StartExec)
        await place.stop()
        with pytest.raises(aiohttp.ClientError):
            await running
        assert not [call for call in node.calls if isinstance(call, m.CancelExec)]
        assert node.commands[info["id"]]["s1"].result is None


async def test_cancelling_a_command(ask: Http, node: FakeNode, sandbox: str) -> None:
    path = f"/v1/sandboxes/{sandbox}/exec"
    running = asyncio.create_task(ask("POST", path, {"cmd": "sleep", "id": "s1"}))
    await node.wait_for(m.StartExec)
    for _ in range(2):
        assert await ask("POST", f"{path}/s1/cancel") == (200, {"ok": True})
    assert (await running)[1]["outcome"] == "cancelled"
    status, body = await ask("POST", f"{path}/nope/cancel")
    assert (status, body["code"]) == (404, "exec_not_found")


async def test_what_can_never_fit_is_not_worth_a_retry(ask: Http, node: FakeNode) -> None:
    for resource in ("memory", "disk"):
        status, body = await ask("POST", "/v1/sandboxes", {**SPEC, "limits": {resource: 1 << 50}})
        assert (status, body["code"], body["field"]) == (400, "invalid_request", f"limits.{resource}")
        assert "retry" not in body and f"at most 1.0 TiB of {resource}" in body["hint"]


# the WebSocket


async def test_web_pages_are_refused(place: Site, node: FakeNode) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(place.layout.api_socket))) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect("http://barchan/v1/connect", origin="http://evil.example")
    assert caught.value.status == 400


class Raw:
    """A client that sends what it likes."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self._reader = FrameReader()
        self._frames: list[Any] = []

    async def frame(self) -> Any:
        while not self._frames:
            message = await self.socket.receive()
            assert message.type == aiohttp.WSMsgType.BINARY, message
            self._frames.extend(self._reader.feed(message.data))
        return self._frames.pop(0)

    async def call(self, id_: int, payload: bytes) -> Any:
        await self.socket.send_bytes(encode(FrameType.CALL, id_, payload))
        return await self.frame()


@pytest.fixture
async def raw(place: Site, node: FakeNode) -> AsyncIterator[Raw]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(place.layout.api_socket))) as session,
        session.ws_connect("http://barchan/v1/connect") as socket,
    ):
        yield Raw(socket)


async def test_a_client_cannot_play_a_node(raw: Raw, node: FakeNode) -> None:
    hello = m.Hello(info=node.info())
    frame = await raw.call(1, m.pack_call(hello))
    assert frame.type == FrameType.ERROR
    assert b"not for clients" in frame.payload


@pytest.mark.parametrize(
    ("payload", "word"),
    [
        (b"\xc1", b"msgpack"),
        (m.pack(("no.such", {})), b"unknown operation"),
        (m.pack(("sandbox.get", {"sandbox": "n1-aaaaaaaaaaaa", "x": 1})), b"unknown field"),
        (m.pack(("exec.attach", {"sandbox": "n1-aaaaaaaaaaaa", "id": "x", "stdout_offset": -1})), b"stdout_offset"),
        (m.pack(("file.list", {"sandbox": "n1-aaaaaaaaaaaa", "path": b"/", "depth": 0})), b"depth"),
        (m.pack(("file.rename", {"sandbox": "n1-aaaaaaaaaaaa", "path": b"/a", "target": b"\0"})), b"target"),
    ],
)
async def test_wrong_calls_are_refused_before_any_node(raw: Raw, node: FakeNode, payload: bytes, word: bytes) -> None:
    frame = await raw.call(1, payload)
    assert frame.type == FrameType.ERROR
    assert word in frame.payload
    assert not [call for call in node.calls if not isinstance(call, m.Hello)]


async def test_an_error_code_from_the_future_is_passed_on(
    raw: Raw, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.sandboxes["n1-aaaaaaaaaaaa"] = None  # type: ignore[assignment]
    payload = m.pack({"code": "from_the_future", "message": "new", "party": "node", "extra": 1})

    async def answer(call: Any, request: Any) -> SandboxInfo:
        from barchan.wire.link import Answered

        raise Answered(payload)

    monkeypatch.setattr(node, "_sandbox_get", answer)
    frame = await raw.call(1, m.pack_call(m.GetSandbox(sandbox="n1-aaaaaaaaaaaa")))
    assert (frame.type, frame.payload) == (FrameType.ERROR, payload)


@pytest.mark.parametrize("data", [b"\xff" * 64, encode(FrameType.HELLO, 1), encode(FrameType.CALL, 2)])
async def test_a_broken_frame_ends_the_connection_alone(raw: Raw, ask: Http, data: bytes) -> None:
    await raw.socket.send_bytes(data)
    message = await raw.socket.receive()
    assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
    assert (await ask("GET", "/v1/health"))[0] == 200


async def test_text_ends_the_connection(raw: Raw) -> None:
    await raw.socket.send_str("hello")
    assert (await raw.socket.receive()).type == aiohttp.WSMsgType.CLOSE


async def test_too_large_a_message_ends_the_connection(raw: Raw) -> None:
    with contextlib.suppress(ConnectionError):
        await raw.socket.send_bytes(bytes(5 << 20))
    assert (await raw.socket.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)


# the node socket


async def test_a_node_may_only_say_hello(node: FakeNode) -> None:
    assert node._protocol is not None
    call = node._protocol.link.call(m.pack_call(m.ListEnvironments()))
    with pytest.raises(InvalidRequest, match="hello"):
        await call.answer


async def test_a_node_with_a_bad_name_is_refused(place: Site) -> None:
    with pytest.raises(InvalidRequest):
        await place.node("../n1").dial()


async def test_a_hello_again_updates_the_view(ask: Http, node: FakeNode) -> None:
    node.capacity = 3
    await node.hello()
    _, nodes = await ask("GET", "/v1/nodes")
    assert nodes[0]["capacity"] == 3


async def test_creates_are_spread_before_any_hello(place: Site, ask: Http, node: FakeNode) -> None:
    async with place.node("n2") as other:
        for _ in range(20):
            await ask("POST", "/v1/sandboxes", SPEC)
        assert abs(len(node.sandboxes) - len(other.sandboxes)) <= 1


# the document


async def test_the_document_is_served(ask: Http) -> None:
    assert await ask("GET", "/v1/openapi.json") == (200, msgspec.json.decode(msgspec.json.encode(document(ROUTES))))
