"""The SDK through a real API on real sockets, with a scripted node behind it."""

from __future__ import annotations

import errno
import io
import os
import re
import socket
import stat
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barchan.environments import PullProgress
from barchan.errors import (
    AdmissionRefused,
    ApiUnavailable,
    BarchanError,
    CommandFailed,
    Conflict,
    EnvironmentNotFound,
    ExecNotFound,
    FileAlreadyExists,
    FileDenied,
    FileFailure,
    FileIsDirectory,
    FileMissing,
    FileNotDirectory,
    ImageNotFound,
    InvalidRequest,
    NodeNotFound,
    NodeUnavailable,
    ProtocolError,
    RequestTimeout,
    SandboxNotFound,
    SandboxUnavailable,
    Unauthenticated,
    tree,
)
from barchan.images import ImageConfig
from barchan.packing import ScrubRules
from barchan.sdk import Client, Sandbox
from barchan.sdk._address import find_address
from barchan.spec import EnvironmentRef, Limits, NetworkRules
from barchan.wire import messages as m
from barchan.wire.guest import Cursor, Entry, blob, encode_entry
from tests.contract import faults
from tests.contract.api_site import TOKEN, Site, site
from tests.contract.fake_node import FakeNode
from tests.rig import (
    Cancelled,
    Event,
    beside,
    cut,
    deny_sockets,
    fail,
    finished,
    hanging_up,
    pause,
    settle,
    together,
    within,
)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as it:
        yield it


@pytest.fixture
async def node(place: Site) -> AsyncIterator[FakeNode]:
    async with place.node() as it:
        yield it


@pytest.fixture
async def client(place: Site) -> AsyncIterator[Client]:
    async with place.client() as it:
        yield it


@pytest.fixture
async def sandbox(node: FakeNode, client: Client) -> Sandbox:
    return await client.create("debian-12")


# where the API is


def test_where_the_api_is() -> None:
    environ = {"BARCHAN_URL": "https://far:1", "BARCHAN_TOKEN": "t"}
    assert str(find_address(None, None, None, {})) == "unix:/var/lib/barchan/run/api.sock"
    assert find_address(None, None, None, environ)[:3] == ("https://far:1", "", "t")
    assert str(find_address(None, None, "/d", environ)) == "unix:/d/run/api.sock"
    assert str(find_address("unix:/s", None, None, environ)) == "unix:/s"
    assert find_address("http://h:1/", "own", None, environ)[:3] == ("http://h:1", "", "own")


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://h/path", "unix:relative", "http://"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        find_address(url, None, None, {})
    assert caught.value.field == "url"


async def test_no_api_fails_at_once(tmp_path: Path) -> None:
    async with Client(data=tmp_path) as client:
        with pytest.raises(ApiUnavailable, match="no API") as caught:
            await client.list()
    assert caught.value.hint == f"barchan up --data {tmp_path}"
    assert "no such file" in caught.value.message


async def failure(client: Client) -> BarchanError:
    async with client:
        with pytest.raises(BarchanError) as caught:
            await client.list()
    assert not re.search(r"ssl[: ]|<|default|\[|errno", str(caught.value).lower()), "nothing of the HTTP library's own"
    return caught.value


def test_how_to_start_a_server_is_said_only_for_this_host() -> None:
    assert find_address(None, None, None, {}).start == "barchan up"
    assert find_address(None, None, "/a b", {}).start == "barchan up --data '/a b'"
    assert find_address("unix:/d/run/api.sock", None, None, {}).start == "barchan up --data /d"
    assert find_address(None, None, None, {"BARCHAN_DATA": "/d e"}).start == "barchan up --data '/d e'"
    assert find_address(None, None, "/a", {"BARCHAN_DATA": "/d"}).start == "barchan up --data /a"
    assert find_address(None, None, None, {"BARCHAN_DATA": "/d", "BARCHAN_URL": "unix:/s"}).unix == "/s"
    for url in ("unix:/s", "unix:/tmp/api.sock", "http://h:1", "https://h"):
        assert find_address(url, None, None, {}).start == ""


async def test_nobody_listens_elsewhere() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    for scheme in ("http", "https"):
        error = await failure(Client(f"{scheme}://127.0.0.1:{port}"))
        assert type(error) is ApiUnavailable and "connection refused" in error.message
        assert "barchan up" not in error.hint
    for host in ("nowhere.invalid", "nirgendwö.invalid", "a" * 64 + ".invalid"):
        error = await failure(Client(f"http://{host}:1"))
        assert type(error) is ApiUnavailable and "host name" in error.message


async def test_a_socket_without_permission(place: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    deny_sockets(monkeypatch)
    error = await failure(place.client())
    assert type(error) is Unauthenticated and "root" in error.message
    assert "barchan up" not in error.hint


async def test_plain_http_spoken_to_by_tls(place: Site) -> None:
    error = await failure(Client(place.url.replace("http:", "https:"), TOKEN))
    assert (type(error), getattr(error, "field", "")) == (InvalidRequest, "url")
    assert "http://" in error.hint


async def test_a_server_that_hangs_up() -> None:
    async with hanging_up() as port:
        error = await failure(Client(f"http://127.0.0.1:{port}"))
    assert type(error) is ApiUnavailable and f"https://127.0.0.1:{port}" in error.hint


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"ca": "/nope.pem"}, "ca"),
        ({"ca": "/"}, "ca"),
        ({"ca": "/dev/null"}, "ca"),
        ({"ca": 5}, "ca"),
        ({"ca": "a\0b"}, "ca"),
        ({"url": 5}, "url"),
        ({"url": "http://h:99999"}, "url"),
        ({"url": "http://[::1"}, "url"),
        ({"url": "http://:80"}, "url"),
        ({"url": "http://user:word@h"}, "url"),
        ({"url": "unix:/" + "x" * 200}, "url"),
        ({"data": 5}, "data"),
        ({"token": b"t"}, "token"),
        ({"token": "a\nb"}, "token"),
        ({"token": "ü"}, "token"),
        ({"timeout": "5"}, "timeout"),
        ({"reconnect": None}, "reconnect"),
    ],
)
def test_a_wrong_option_of_the_client_is_named(options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Client(**{"url": "https://h", **options})
    assert caught.value.field == field
    assert caught.value.hint or field == "url"


def test_a_token_may_come_with_its_line_end() -> None:
    assert find_address("http://h", f"{TOKEN}\n", None, {}).token == TOKEN


async def test_over_tcp(place: Site, node: FakeNode) -> None:
    async with Client(place.url, TOKEN) as client:
        assert (await (await client.create("debian-12")).run("echo hi")).text == "hi\n"
    for token, said in (("", "none was given"), ("wrong-token-012345", "refused the token")):
        async with Client(place.url, token) as client:
            with pytest.raises(Unauthenticated, match=said):
                await client.list()


# sandboxes


async def test_create_sends_what_was_asked(client: Client, node: FakeNode) -> None:
    await client.create(
        base="debian-12",
        workspace="w@1",
        toolkits=["t"],
        limits=Limits(memory=1 << 28),
        labels={"a": "b"},
        env={"X": "1"},
        user="bob",
        workdir="/w",
        lifetime=60,
    )
    spec = next(call for call in node.calls if isinstance(call, m.CreateSandbox)).spec
    assert spec.environment == EnvironmentRef(base="debian-12", workspace="w@1", toolkits=("t",))
    assert (spec.limits.memory, spec.labels, spec.env, spec.user) == (1 << 28, {"a": "b"}, {"X": "1"}, "bob")


async def test_a_sandbox_is_stopped_at_the_end_of_its_block(client: Client, node: FakeNode) -> None:
    async with await client.create("debian-12") as sandbox:
        assert (await sandbox.refresh()).state == "ready"
    assert node.sandboxes[sandbox.id].state == "stopped"
    assert (await sandbox.stop()).state == "stopped"


async def test_what_ends_the_block_is_what_is_raised(place: Site, client: Client, node: FakeNode) -> None:
    with pytest.raises(ZeroDivisionError):
        async with await client.create("debian-12") as sandbox:
            node.sandboxes.pop(sandbox.id)
            raise ZeroDivisionError


async def test_finding_sandboxes(client: Client, node: FakeNode) -> None:
    one = await client.create("debian-12", labels={"job": "1"})
    await client.create("debian-12", labels={"job": "2"})
    assert [info.id for info in await client.list({"job": "1"})] == [one.id]
    assert len(await client.list()) == 2
    assert (await client.get(one.id)).info == one.info
    with pytest.raises(SandboxNotFound):
        await client.get("n1-aaaaaaaaaaaa")
    with pytest.raises(InvalidRequest):
        await client.get("nonsense")


async def test_renewing(sandbox: Sandbox) -> None:
    assert (await sandbox.renew(lifetime=5)).expires == pytest.approx(sandbox.info.created + 5)
    with pytest.raises(InvalidRequest) as caught:
        await sandbox.renew(lifetime=-5)
    assert caught.value.field == "lifetime"


async def test_environments_and_nodes(client: Client, node: FakeNode) -> None:
    assert [env.name for env in await client.environments()] == ["debian-12"]
    assert [info.name for info in await client.nodes()] == ["n1"]


async def test_how_far_an_image_is(client: Client, node: FakeNode) -> None:
    node.images = ("docker://debian:12",)
    node.progress = tuple(
        PullProgress(image="docker://debian:12", phase="pull", layer=1, layers=1, done=done, total=9) for done in (3, 9)
    )
    heard: list[PullProgress] = []
    assert (await client.pull("debian:12", progress=heard.append)).name == "docker://debian:12"
    assert tuple(heard) == node.progress
    await client.create(image="debian:12", progress=heard.append)
    assert tuple(heard) == 2 * node.progress
    assert (await client.pull("debian:12")).version == 1, "nobody needs to listen"


async def test_whoever_listens_badly_still_gets_the_answer(client: Client, node: FakeNode) -> None:
    node.images = ("docker://debian:12",)
    node.progress = (PullProgress(image="docker://debian:12", phase="resolve"),)
    assert (await client.pull("debian:12", progress=lambda progress: 1 / 0)).version == 1  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidRequest, match="progress: int is no function"):
        await client.pull("debian:12", progress=7)  # type: ignore[arg-type]


async def test_what_cannot_be_pulled(client: Client, node: FakeNode) -> None:
    with pytest.raises(ImageNotFound):
        await client.pull("debian:12")
    for image in ("Not/An:Image", "", 7, "debian@3"):
        with pytest.raises(InvalidRequest) as caught:
            await client.pull(image)  # type: ignore[arg-type]
        assert caught.value.field == "image"
    with pytest.raises(NodeNotFound):
        await client.pull("debian:12", node="nowhere")


async def test_every_node_pulls_and_the_first_answers(place: Site, client: Client, node: FakeNode) -> None:
    async with place.node("a-first") as other:
        for one in (node, other):
            one.images = ("docker://debian:12",)
        assert (await client.pull("debian:12", again=False)).reference == "a-first"
        assert (await client.pull("debian:12", node="n1")).reference == "n1"
        assert [call for call in other.calls if isinstance(call, m.PullImage)] == [
            m.PullImage(image="docker://debian:12", again=False)
        ]


async def test_a_lock_is_written_read_and_used(client: Client, node: FakeNode, tmp_path: Path) -> None:
    lock = await client.lock("debian-12", toolkits=["tools@1"])
    assert [image.name for image in lock.images] == ["debian-12", "tools@1"]
    (tmp_path / "env.lock").write_text(str(lock))
    for given in (lock, str(tmp_path / "env.lock"), tmp_path / "env.lock"):
        assert (await client.create(lock=given)).info.environment == lock.environment
    with pytest.raises(EnvironmentNotFound):
        await client.lock("nothing")
    for wrong in ({"base": "debian-12"}, {"toolkits": ["a"]}, {"image": "debian:12"}):
        with pytest.raises(InvalidRequest, match="give it alone"):
            await client.create(lock=lock, **wrong)  # type: ignore[arg-type]
    for path in (tmp_path / "none", tmp_path, 7):
        with pytest.raises(InvalidRequest) as caught:
            await client.create(lock=path)  # type: ignore[arg-type]
        assert caught.value.field == "lock"


async def test_a_key_makes_one_sandbox(client: Client, node: FakeNode) -> None:
    both = await together(*(lambda: client.create("debian-12", key="k") for _ in range(4)))
    assert len({sandbox.id for sandbox in both}) == 1
    with pytest.raises(Conflict):
        await client.create("debian-12", key="k", user="bob")


@pytest.mark.parametrize("code", sorted({cls.code for cls in tree()} - {"api_unavailable", "node_unavailable"}))
async def test_every_error_arrives_as_its_class(client: Client, node: FakeNode, code: str) -> None:
    cls = next(c for c in tree() if c.code == code)
    with pytest.raises(BarchanError) as caught:
        await client.create("debian-12", labels={"fail": code})
    assert type(caught.value) is cls
    assert f"scripted {code}" in caught.value.message


async def test_a_refusal_is_not_retried_behind_the_callers_back(client: Client, node: FakeNode) -> None:
    node.refuse = "full"
    with pytest.raises(AdmissionRefused, match="full") as caught:
        await client.create("debian-12")
    assert caught.value.retry
    assert sum(isinstance(call, m.CreateSandbox) for call in node.calls) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"limits": Limits(memory="1g")}, "limits.memory: expected int, got str (see SandboxSpec)"),  # type: ignore[arg-type]
        ({"labels": ["a"]}, "labels: expected dict, got list (see SandboxSpec)"),
        (
            {"backend": "docker"},
            "backend: invalid enum value 'docker' (one of 'container', 'function', 'microvm', 'vm')",
        ),
        ({"user": None, "hostname": 5}, "hostname: expected str, got int (see SandboxSpec)"),
    ],
)
async def test_wrong_types_are_said_in_plain_words(tmp_path: Path, options: Any, text: str) -> None:
    async with Client(data=tmp_path) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.create("debian-12", **options)
        said = str(caught.value)
        head, _, choices = said.partition("(one of ")
        assert said == text or f"{head}(one of {', '.join(sorted(choices.rstrip(')').split(', ')))})" == text
        with pytest.raises(
            InvalidRequest, match="one of its items: invalid enum value 'dead' .one of 'creating', 'ready'"
        ):
            await client.list(states=["dead"])  # type: ignore[list-item]


async def test_what_is_printed_of_them(client: Client, sandbox: Sandbox) -> None:
    process = await sandbox.start("sleep", id="p")
    assert repr(process) == f"<Process p in {sandbox.id} running>"
    await process.cancel()
    await process.wait()
    assert repr(process) == f"<Process p in {sandbox.id} ended>"
    assert repr(client).startswith("<Client unix:/") and "closed" not in repr(client)
    await client.close()
    assert repr(client).endswith(" closed>")


async def test_wrong_values_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with Client(data=tmp_path) as client:
        for options, field in (
            ({"limits": Limits(memory=-1)}, "limits.memory"),
            ({"workdir": "x"}, "workdir"),
            ({"env": {"": "x"}}, "env"),
            ({"limits": {"memory": 1}}, "limits.memory"),
            ({"limits": {"ram": 1}}, "limits.ram"),
            ({"limits": Limits(memory="1g")}, "limits.memory"),  # type: ignore[arg-type]
            ({"limits": NetworkRules()}, "limits.mode"),
            ({"limits": 5}, "limits"),
            ({"network": "closed"}, "network.mode"),
            ({"network": 5}, "network"),
            ({"labels": ["a"]}, "labels"),
            ({"labels": {"a": 1}}, "labels"),
            ({"env": [("a", "b")]}, "env"),
            ({"lifetime": "60"}, "lifetime"),
            ({"user": 0}, "user"),
            ({"timeout": "5"}, "timeout"),
            ({"toolkits": [5]}, "toolkits"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await client.create("debian-12", **options)  # type: ignore[arg-type]
            assert caught.value.field == field
        for name in ("../x", "a..b", "UPPER", ""):
            with pytest.raises(InvalidRequest):
                await client.create(name)
        for environment in (5, b"x", "\ud800"):
            with pytest.raises(InvalidRequest):
                await client.create(environment)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await client.create("debian-12", user="\ud800")
        with pytest.raises(InvalidRequest):
            await client.create_from("debian-12")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await client.list(["a"])  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await client.get("\ud800")
        with pytest.raises(InvalidRequest):
            await client.create()


async def test_limits_may_be_plain(client: Client, node: FakeNode) -> None:
    sandbox = await client.create("debian-12", limits={"memory": 1 << 28})  # type: ignore[arg-type]
    assert sandbox.info.limits == Limits(memory=1 << 28)


async def test_a_create_that_takes_too_long(client: Client, node: FakeNode) -> None:
    node.create_gate = Event()
    with pytest.raises(RequestTimeout) as caught:
        await client.create("debian-12", timeout=0.05)
    assert caught.value.retry


# commands


async def test_a_string_is_for_the_shell_and_a_list_is_not(sandbox: Sandbox) -> None:
    assert (await sandbox.run("echo 'a  b'")).text == "'a b'\n"  # the scripted shell only splits
    odd = [b"args", b"\xff\x01 '\"$x", "ü", ""]
    cursor = Cursor((await sandbox.run(odd)).stdout)
    assert cursor.blobs() == (b"args", b"\xff\x01 '\"$x", "ü".encode(), b"")


async def test_a_failing_command_is_a_result(sandbox: Sandbox) -> None:
    result = await sandbox.run("exit 3")
    assert (result.ok, result.outcome, result.exit_code, result.stderr_text) == (False, "exited", 3, "failing\n")
    missing = await sandbox.run(["missing"])
    assert (missing.outcome, missing.exit_code) == ("not_found", 127)
    with pytest.raises(CommandFailed, match="exit code 3") as caught:
        await sandbox.run("exit 3", check=True)
    assert caught.value.result.exit_code == 3
    assert (await sandbox.run("echo x", check=True)).ok


@pytest.mark.parametrize(
    ("command", "options", "field"),
    [
        ("a\0b", {}, "argv"),
        ([], {}, "argv"),
        ("x", {"timeout": 0}, "timeout"),
        ("x", {"env": {"a=b": "c"}}, "env"),
        ("x", {"secrets": {"a": "\0"}}, "secrets"),
        ("x", {"id": "a/b"}, "id"),
        (5, {}, "argv"),
        ([5], {}, "argv"),
        ({"a": 1}, {}, "argv"),
        ("\ud800", {}, "argv"),
        ("x", {"env": ["a"]}, "env"),
        ("x", {"env": {"a": 1}}, "env"),
        ("x", {"secrets": {"a": 1}}, "secrets"),
        ("x", {"timeout": "5"}, "timeout"),
        ("x", {"cwd": 5}, "cwd"),
        ("x", {"user": 0}, "user"),
        ("x", {"output_limit": "1m"}, "output_limit"),
        ("x", {"stdin": 5}, "stdin"),
        ("x", {"stdin": ["a"]}, "stdin"),
    ],
)
async def test_a_wrong_command_is_refused(sandbox: Sandbox, command: Any, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await sandbox.run(command, **options)
    assert caught.value.field == field


async def test_input_arrives_whole(sandbox: Sandbox) -> None:
    assert (await sandbox.run(["cat"])).stdout == b""
    assert (await sandbox.run(["cat"], stdin="ü")).text == "ü"
    data = os.urandom(5_000_000)
    assert (await sandbox.run(["cat"], stdin=data)).stdout == data

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 99_999):
            yield data[at : at + 99_999]

    assert (await sandbox.run(["cat"], stdin=pieces())).stdout == data


async def test_input_that_fails_ends_the_command(sandbox: Sandbox, node: FakeNode) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"half"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await sandbox.run(["cat"], stdin=pieces(), id="c")
    command = node.commands[sandbox.id]["c"]
    assert command.result is not None and command.result.outcome == "cancelled"


async def test_input_that_nobody_reads_does_not_hold_the_result(sandbox: Sandbox) -> None:
    result = await sandbox.run("echo done", stdin=bytes(5_000_000))
    assert result.text == "done\n"


async def test_text_is_decoded_at_the_end(sandbox: Sandbox) -> None:
    data = b"x" * (128 * 1024 - 1) + "ü€".encode() + b"\xff"
    result = await sandbox.run(["cat"], stdin=data)
    assert result.text.endswith("xü€�")
    assert result.stdout == data


async def test_both_outputs_and_many_at_once(sandbox: Sandbox) -> None:
    results = await together(*(partial(sandbox.run, f"bytes {1000 + i} {1 + i % 2}") for i in range(50)))
    for i, result in enumerate(results):
        assert (len(result.stdout), len(result.stderr)) == ((1000 + i, 0) if i % 2 == 0 else (0, 1000 + i))


async def test_the_same_id_never_runs_twice(sandbox: Sandbox, node: FakeNode) -> None:
    first = await sandbox.run("echo once", id="mine")
    assert await sandbox.run("echo once", id="mine") == first
    with pytest.raises(Conflict):
        await sandbox.run("echo other", id="mine")
    assert [info.id for info in await sandbox.execs()] == ["mine"]


async def test_run_and_start_mean_the_same_command(sandbox: Sandbox) -> None:
    await sandbox.run("echo once", id="mine")
    process = await sandbox.start("echo once", id="mine")
    assert await process.stdout.read_all() == b"once\n"


async def test_input_whose_source_fails_as_the_sandbox_does_ends_the_command(sandbox: Sandbox, node: FakeNode) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"half"
        yield await sandbox.files.read("/missing")

    with pytest.raises(FileMissing):
        async with within(5):
            await sandbox.run(["cat"], stdin=pieces(), id="c")
    result = node.commands[sandbox.id]["c"].result
    assert result is not None and result.outcome == "cancelled"


async def test_cancelling_a_run_cancels_the_command(sandbox: Sandbox, node: FakeNode) -> None:
    async with within(5):
        running = beside(sandbox.run, "sleep", id="s")
        await node.wait_for(m.StartExec)
        running.cancel()
        with pytest.raises(Cancelled):
            await running
        await node.wait_for(m.CancelExec)
    assert (await finished(node, sandbox.id, "s")).outcome == "cancelled"


async def test_cancelling_just_before_the_client_closes_still_arrives(place: Site, node: FakeNode) -> None:
    async with place.client() as client:
        sandbox = await client.create("debian-12")
        running = beside(sandbox.run, "sleep", id="s")
        await node.wait_for(m.StartExec)
        running.cancel()
        with pytest.raises(Cancelled):
            await running
    async with within(5):
        await node.wait_for(m.CancelExec)


async def test_cancelling_just_after_the_connection_was_lost_still_arrives(place: Site, node: FakeNode) -> None:
    async with place.client() as client:
        sandbox = await client.create("debian-12")
        running = beside(sandbox.run, "sleep", id="s")
        await node.wait_for(m.StartExec)
        cut(client)
        running.cancel()
        with pytest.raises(Cancelled):
            await running
    async with within(5):
        assert (await finished(node, sandbox.id, "s")).outcome == "cancelled"


async def test_a_cancel_that_was_lost_on_its_way_is_sent_again(place: Site, node: FakeNode) -> None:
    fail(node, "exec_cancel", faults.loses_the_link, times=1)
    async with place.client() as client:
        sandbox = await client.create("debian-12")
        running = beside(sandbox.run, "sleep", id="s")
        await node.wait_for(m.StartExec)
        running.cancel()
        with pytest.raises(Cancelled):
            await running
    async with within(5):
        assert (await finished(node, sandbox.id, "s")).outcome == "cancelled"


# process handles


async def test_a_process(sandbox: Sandbox, node: FakeNode) -> None:
    process = await sandbox.start("hold gate")
    assert process.pid == 7
    assert await process.stdout.read() == b"before\n"
    node.release("gate")
    assert await process.stdout.read_all() == b"after\n"
    result = await process.wait()
    assert (result.id, result.exit_code) == (process.id, 0)
    assert await process.wait() == result


async def test_talking_to_a_process(sandbox: Sandbox) -> None:
    process = await sandbox.start(["cat"], stdin=True)
    for word in (b"one", b"two"):
        await process.stdin.write(word)
        assert await process.stdout.read() == word
    process.stdin.close()
    assert (await process.wait()).exit_code == 0
    await process.stdin.write(b"into the void")


async def test_signals(sandbox: Sandbox, node: FakeNode) -> None:
    for act, code in (("signal", 143), ("kill", 137)):
        process = await sandbox.start("sleep")
        await (process.signal(15) if act == "signal" else process.kill())
        assert (await process.wait()).exit_code == code
    process = await sandbox.start("sleep")
    await process.cancel()
    await process.cancel()
    assert (await process.wait()).outcome == "cancelled"
    with pytest.raises(InvalidRequest):
        await process.signal(0)


async def test_a_program_that_cannot_start_is_a_result(sandbox: Sandbox) -> None:
    process = await sandbox.start(["missing"])
    assert (await process.wait()).outcome == "not_found"
    assert process.pid == 0


async def test_waiting_does_not_need_a_reader(sandbox: Sandbox) -> None:
    process = await sandbox.start("bytes 5000000")
    result = await process.wait()
    assert result.stdout_bytes == 5_000_000
    kept = await process.stdout.read_all()
    assert 0 < len(kept) <= 1 << 20
    assert len(kept) + process.stdout.unread == 5_000_000


async def test_small_output_can_be_read_after_waiting(sandbox: Sandbox) -> None:
    process = await sandbox.start("echo still here")
    await process.wait()
    assert await process.stdout.read_all() == b"still here\n"
    assert process.stdout.unread == 0


async def test_reading_while_waiting_loses_nothing(sandbox: Sandbox) -> None:
    process = await sandbox.start("bytes 20000000")
    data, result = await together(process.stdout.read_all, process.wait)
    assert len(data) == result.stdout_bytes == 20_000_000


async def test_a_dropped_handle_leaves_the_command_running(place: Site, node: FakeNode) -> None:
    async with place.client() as client:
        sandbox = await client.create("debian-12")
        process = await sandbox.start("hold gate")
    node.release("gate")
    async with place.client() as client:
        again = await (await client.get(sandbox.id)).attach(process.id)
        assert await again.stdout.read_all() == b"before\nafter\n"
        assert (await again.wait()).exit_code == 0


async def test_attaching_from_an_offset(sandbox: Sandbox) -> None:
    await sandbox.run("echo 0123456789", id="e")
    process = await sandbox.attach("e", stdout_offset=4)
    assert await process.stdout.read_all() == b"456789\n"
    with pytest.raises(ExecNotFound):
        await sandbox.attach("nope")


async def test_attaching_does_not_need_to_be_told_of_a_start(sandbox: Sandbox, node: FakeNode) -> None:
    """Output beyond the window keeps the call open until somebody reads, which nobody can before `attach` returns."""
    node.tells_start = False
    await sandbox.run("bytes 3000000", id="big")
    async with within(10):
        for process, offset in (
            (await sandbox.attach("big"), 0),
            (await sandbox.attach("big", stdout_offset=1_500_000), 1_500_000),
            (await sandbox.start("bytes 3000000", id="big"), 0),
        ):
            assert await process.stdout.read_all() == pattern(3_000_000)[offset:]
            assert (await process.wait()).stdout_bytes == 3_000_000


async def test_a_command_that_its_node_cannot_start_is_an_error(sandbox: Sandbox, node: FakeNode) -> None:
    fail(node, "exec_start", faults.is_full)
    with pytest.raises(SandboxUnavailable, match="no process"):
        await sandbox.start("echo x")


async def test_processes(sandbox: Sandbox) -> None:
    assert [process.argv for process in await sandbox.processes()] == [(b"sleep", b"1")]


# losing the connection


def pattern(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


@pytest.mark.parametrize("who", ["node", "client"])
async def test_output_has_no_gap_after_a_loss(client: Client, sandbox: Sandbox, node: FakeNode, who: str) -> None:
    size = 20_000_000
    process = await sandbox.start(f"bytes {size}")
    got = bytearray()
    async for chunk in process.stdout:
        before = len(got) // 5_000_000
        got += chunk
        if len(got) // 5_000_000 != before:
            await lose(who, client, node)
    assert bytes(got) == pattern(size)
    assert (await process.wait()).stdout_bytes == size
    assert sum(isinstance(call, m.StartExec) for call in node.calls) >= 4


async def lose(who: str, client: Client, node: FakeNode) -> None:
    if who == "node":
        node.drop()
        await node.dial()
    else:
        cut(client)


async def test_a_run_survives_the_api(tmp_path: Path) -> None:
    place = Site(tmp_path)
    await place.start()
    async with place.node() as node, place.client() as client:
        sandbox = await client.create("debian-12")
        running = beside(sandbox.run, "hold gate")
        await node.wait_for(m.StartExec)
        node.drop()
        await place.stop()
        node.release("gate")
        await place.start()
        await node.dial()
        assert (await running).text == "before\nafter\n"
        assert len(node.commands[sandbox.id]) == 1
    await place.stop()


async def test_input_has_no_gap_after_a_loss(sandbox: Sandbox, node: FakeNode) -> None:
    data = os.urandom(6_000_000)

    async def pieces() -> AsyncIterator[bytes]:
        for i, at in enumerate(range(0, len(data), 500_000)):
            if i in (3, 7):
                node.drop()
                await node.dial()
            yield data[at : at + 500_000]

    assert (await sandbox.run(["cat"], stdin=pieces())).stdout == data


async def test_a_create_is_sent_again_with_its_key(client: Client, node: FakeNode) -> None:
    node.create_gate = Event()
    creating = beside(client.create, "debian-12")
    await node.wait_for(m.CreateSandbox)
    node.drop()
    await node.dial()
    node.create_gate.set()
    sandbox = await creating
    keys = {call.key for call in node.calls if isinstance(call, m.CreateSandbox)}
    assert len(keys) == 1
    assert sandbox.id in node.sandboxes


async def test_reads_are_tried_again_and_writes_are_not(sandbox: Sandbox, node: FakeNode) -> None:
    node.files[b"/a"] = b"x"
    fail(node, "file_stat", faults.loses_the_link, times=1)
    assert (await sandbox.files.stat("/a")).size == 1
    fail(node, "file_remove", faults.loses_the_link)
    with pytest.raises(NodeUnavailable) as caught:
        await sandbox.files.remove("/a")
    assert caught.value.retry
    assert sum(isinstance(call, m.RemoveFile) for call in node.calls) == 1


async def test_reconnecting_has_an_end(tmp_path: Path) -> None:
    place = Site(tmp_path)
    await place.start()
    async with place.node() as node, place.client(reconnect=0.2) as client:
        sandbox = await client.create("debian-12")
        process = await sandbox.start("sleep")
        node.drop()
        await place.stop()
        with pytest.raises(ApiUnavailable):
            await process.wait()
        assert await process.stdout.read() == b"sleeping\n"
        with pytest.raises(ApiUnavailable):
            await process.stdout.read()
        with pytest.raises(ApiUnavailable):
            await sandbox.refresh()


async def test_a_closed_client_says_so(place: Site, node: FakeNode) -> None:
    client = place.client()
    await client.list()
    await client.close()
    await client.close()
    with pytest.raises(ApiUnavailable, match="closed"):
        await client.list()


# flow control


def memory() -> int:
    """Bytes resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_slow_reader_keeps_memory_flat(
    sandbox: Sandbox, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """200 MB with a reader that pauses: node, API and client are this very process."""
    size = 200_000_000
    process = await sandbox.start(f"bytes {size}")
    start, most, got, begun = memory(), 0, 0, time.perf_counter()
    async for chunk in process.stdout:
        got += len(chunk)
        if got % 20_000_000 < len(chunk):
            for _ in range(50):
                await pause()
        most = max(most, memory() - start)
    taken = time.perf_counter() - begun
    with capsys.disabled():
        print(f"\n200 MB through node, API and SDK in one process: {size / taken / 1e6:.0f} MB/s, +{most >> 20} MiB")
    assert got == size
    assert most < 40 << 20


async def test_nothing_is_sent_beyond_the_window(sandbox: Sandbox, node: FakeNode) -> None:
    process = await sandbox.start("bytes 100000000")
    await process.stdout.read()
    await settle()
    assert process.stdout.offset <= 2 << 20
    await sandbox.run("echo others are not held up")
    await process.cancel()


# files


async def test_reading_and_writing(sandbox: Sandbox, node: FakeNode) -> None:
    files, data = sandbox.files, os.urandom(3_000_000)

    async def pieces() -> AsyncIterator[bytes]:
        yield data[:1_000_001]
        yield b""
        yield data[1_000_001:]

    for content in (data, bytearray(data), memoryview(data), io.BytesIO(data), pieces()):
        await files.write("/d/a", content, mode=0o600)
        assert await files.read("/d/a") == data
    assert await files.read("/d/a", offset=10, length=5) == data[10:15]
    assert b"".join([chunk async for chunk in files.read_stream("/d/a")]) == data
    await files.write("/t", "ü")
    await files.write("/t", "x", append=True)
    assert await files.read_text("/t") == "üx"
    await files.write(b"/\xff", b"")
    assert await files.read(b"/\xff") == b""
    assert node.modes[b"/d/a"] == 0o600


async def test_looking_at_and_changing_files(sandbox: Sandbox) -> None:
    files = sandbox.files
    await files.write("/d/a", b"12")
    assert (await files.stat("/d/a")).size == 2
    assert [(entry.path, entry.kind) for entry in await files.list("/d")] == [(b"a", "file")]
    await files.rename("/d/a", "/d/b")
    assert (await files.exists("/d/a"), await files.exists("/d/b")) == (False, True)
    await files.mkdir("/e")
    await files.remove("/d/b")
    await files.remove("/d/b", missing_ok=True)
    for act, *args in ((files.read,), (files.remove,), (files.stat,), (files.download, "/nowhere")):
        with pytest.raises(FileMissing):
            await act("/d/b", *args)
    with pytest.raises(FileMissing):
        await anext(aiter(files.read_stream("/d/b")))


async def test_an_endless_listing_is_refused(client: Client, sandbox: Sandbox, node: FakeNode) -> None:
    fail(node, "file_list", faults.never_ends)
    with pytest.raises(ProtocolError, match="more than"):
        await sandbox.files.list("/")
    assert (await sandbox.refresh()).state == "ready"


async def test_a_source_that_fails_writes_nothing(sandbox: Sandbox, node: FakeNode) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"half"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await sandbox.files.write("/a", pieces())
    assert b"/a" not in node.files


async def test_a_source_that_fails_as_the_sandbox_does_writes_nothing(sandbox: Sandbox, node: FakeNode) -> None:
    with pytest.raises(FileMissing):
        async with within(5):
            await sandbox.files.write("/a", sandbox.files.read_stream("/missing"))
    assert b"/a" not in node.files


@pytest.mark.parametrize("size", [0, 1_000_000])
async def test_what_failed_is_not_taken_for_whole(sandbox: Sandbox, node: FakeNode, tmp_path: Path, size: int) -> None:
    files, data = sandbox.files, bytes(3_000_000)
    node.files[b"/a/b"] = node.files[b"/a"] = data
    node.trees[b"/a"] = ROOT + item(b"x", content=data[:900_000])
    node.faults[b"/a"] = (size, "file_denied")

    async def streamed() -> None:
        async for _ in files.read_stream("/a"):
            pass

    for failing in (
        lambda: files.read("/a"),
        streamed,
        lambda: files.list("/a"),
        lambda: files.download("/a", tmp_path / "t"),
    ):
        with pytest.raises(FileDenied):
            await failing()


async def test_an_answer_before_the_end_is_not_taken_for_whole(
    sandbox: Sandbox, node: FakeNode, tmp_path: Path
) -> None:
    for name in ("read", "list", "write", "get_tree", "put_tree"):
        fail(node, f"file_{name}", faults.answers_early)
    files, source = sandbox.files, tmp_path / "source"
    source.write_bytes(bytes(3_000_000))
    for failing in (
        lambda: files.read("/a"),
        lambda: anext(aiter(files.read_stream("/a"))),
        lambda: files.list("/a"),
        lambda: files.write("/a", bytes(3_000_000)),
        lambda: files.upload(source, "/a"),
        lambda: files.download("/a", tmp_path / "t"),
    ):
        with pytest.raises(ProtocolError):
            async with within(5):
                await failing()  # type: ignore[no-untyped-call]


async def test_content_of_a_wrong_kind(sandbox: Sandbox, tmp_path: Path) -> None:
    for data in (5, tmp_path, None, ["x"], io.StringIO("text")):
        with pytest.raises(InvalidRequest) as caught:
            await sandbox.files.write("/a", data)  # type: ignore[arg-type]
        assert caught.value.field == "data" and caught.value.hint
    for options in ({"mode": object()}, {"mode": 1 << 70}):
        with pytest.raises(InvalidRequest):
            await sandbox.files.write("/a", b"", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        await sandbox.files.read(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/a\0b", ""])
async def test_a_path_that_cannot_be(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await sandbox.files.read(path)
    assert caught.value.field == "path"


# trees


def make_tree(root: Path) -> None:
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "empty").write_bytes(b"")
    (root / "sub" / "big").write_bytes(os.urandom(1_000_000))
    (root / "sub" / "deep" / "run").write_text("#!/bin/sh\n")
    (root / "sub" / "deep" / "run").chmod(0o750)
    (root / "link").symlink_to("sub/big")
    (root / "dangling").symlink_to("/nowhere")
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.open(root, os.O_RDONLY)
        sock.bind(f"/proc/self/fd/{here}/sock")
        os.close(here)
    for path in (root / "sub" / "big", root / "sub"):
        os.utime(path, ns=(10**18, 10**18))
    (root / "sub").chmod(0o500)


async def test_a_tree_there_and_back(sandbox: Sandbox, node: FakeNode, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    make_tree(source)
    seen: list[tuple[int, int | None]] = []
    up = await sandbox.files.upload(source, "/t", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][1] == 1_000_010 <= seen[-1][0], "names and lengths count, too"
    down = await sandbox.files.download("/t", target, progress=lambda done, total: seen.append((done, total)))
    assert (up.files, up.bytes, sorted(up.skipped)) == (3, 1_000_010, [b"fifo", b"sock"])
    assert (down.files, down.bytes, down.skipped) == (3, 1_000_010, {b"dangling": "link_out"})
    assert snapshot(target) == {k: v for k, v in snapshot(source).items() if k not in ("fifo", "sock", "dangling")}
    assert seen[-1] == (1_000_010, None), "how large a tree is nobody knows before"


def snapshot(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in root.rglob("*"):
        info = path.lstat()
        kind = stat.S_IFMT(info.st_mode)
        content = path.read_bytes() if kind == stat.S_IFREG else os.readlink(path) if kind == stat.S_IFLNK else None
        mtime = info.st_mtime_ns if kind != stat.S_IFIFO else 0
        found[str(path.relative_to(root))] = (kind, info.st_mode, mtime, content)
    return found


async def test_a_file_there_and_back(sandbox: Sandbox, node: FakeNode, tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(os.urandom(700_000))
    source.chmod(0o751)
    report = await sandbox.files.upload(source, "/x/y/b")
    assert (report.files, report.bytes) == (1, 700_000)
    ((entry, content),) = node.received
    assert (entry.path, entry.mode, content) == (b"b", 0o751, source.read_bytes())
    node.trees[b"/x/y/b"] = encode_entry(entry._replace(path=b"")) + blob(content) + blob(b"")
    await sandbox.files.download("/x/y/b", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == source.read_bytes()
    assert (tmp_path / "c").stat().st_mode == source.stat().st_mode


async def test_what_is_not_there_cannot_be_uploaded(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match=f"local file {tmp_path}/nothing") as caught:
        await sandbox.files.upload(tmp_path / "nothing", "/x")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    for local in (5, "a\0b", "\ud800"):
        with pytest.raises(InvalidRequest) as wrong:
            await sandbox.files.upload(local, "/x")  # type: ignore[arg-type]
        assert wrong.value.field == "local"


def unreadable(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Root may read anything, so that the kernel's answer to others is given for it."""
    real = Path.open

    def refusing(self: Path, *args: Any, **options: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "open", refusing)


async def test_a_local_file_that_cannot_be_read(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tree"
    source.mkdir()
    (source / "a").write_bytes(bytes(1_000_000))
    (source / "b").write_bytes(b"secret")
    unreadable(monkeypatch, source / "b")
    for local in (source, source / "b"):
        with pytest.raises(FileDenied, match=f"local file {source}/b: permission denied"):
            async with within(5):
                await sandbox.files.upload(local, "/x")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileFailure, match="not a regular file"):
        await sandbox.files.upload(tmp_path / "fifo", "/x")


async def test_what_is_in_the_way_of_a_download(sandbox: Sandbox, node: FakeNode, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dir").mkdir()
    (tmp_path / "t" / "f").mkdir(parents=True)
    node.trees[b"/t"] = ROOT + item(b"f")
    node.trees[b"/d"] = ROOT + item(b"f", "d") + item(b"f/g")
    node.trees[b"/f"] = item(b"")
    for remote, local, error in (
        ("/t", tmp_path / "t", FileIsDirectory),
        ("/f", tmp_path / "dir", FileIsDirectory),
        ("/t", tmp_path / "file", FileAlreadyExists),
        ("/t", tmp_path / "file" / "below", FileNotDirectory),
    ):
        with pytest.raises(error, match="local file .*: "):
            await sandbox.files.download(remote, local)
    (tmp_path / "u").mkdir()
    (tmp_path / "u" / "f").write_text("mine")
    with pytest.raises(FileFailure, match="no directory"):
        await sandbox.files.download("/d", tmp_path / "u")
    assert (tmp_path / "file").read_text() == (tmp_path / "u" / "f").read_text() == "mine"


async def test_a_full_local_disk(
    sandbox: Sandbox, node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    node.trees[b"/t"] = ROOT + item(b"f")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "f").write_text("mine")
    monkeypatch.setattr("barchan.sdk._arriving.os.write", full)
    with pytest.raises(FileFailure, match=f"local file {tmp_path}/t: no space left") as caught:
        await sandbox.files.download("/t", tmp_path / "t")
    monkeypatch.undo()
    assert os.listdir(tmp_path / "t") == ["f"] and (tmp_path / "t" / "f").read_text() == "mine"
    assert "not in the sandbox" in caught.value.hint


@pytest.mark.parametrize("what", ["/file", "/tree"])
async def test_a_download_that_ends_early_leaves_the_old_file(
    sandbox: Sandbox, node: FakeNode, tmp_path: Path, what: str
) -> None:
    node.trees[b"/file"], node.trees[b"/tree"] = item(b"")[:-3], ROOT + item(b"f")[:-3]
    old = tmp_path / "to" / "f"
    old.parent.mkdir()
    old.write_text("mine")
    with pytest.raises(ProtocolError):
        await sandbox.files.download(what, old if what == "/file" else old.parent)
    assert old.read_text() == "mine" and os.listdir(old.parent) == [old.name]


def item(path: bytes, kind: str = "f", content: bytes = b"evil", target: bytes = b"", mode: int = 0o644) -> bytes:
    head = encode_entry(Entry(path, kind, mode, 0, 0, 1, len(content), 0, target))
    return head + (blob(content) if content else b"") + blob(b"") if kind == "f" else head


ROOT = item(b"", "d", mode=0o755)


@pytest.mark.parametrize(
    ("items", "error"),
    [
        ([item(b"../escaped")], ProtocolError),
        ([item(b"a/../../escaped")], ProtocolError),
        ([item(b"/tmp/escaped")], ProtocolError),
        ([item(b"./escaped")], ProtocolError),
        ([item(b"a//b")], ProtocolError),
        ([item(b"..", "d")], ProtocolError),
        ([item(b"..", "l", target=b"/")], ProtocolError),
        ([item(b"a\0b")], ProtocolError),
        ([item(b"a", "l", target=b"b\0c")], ProtocolError),
        ([item(b"out", "l", target=b"OUTSIDE"), item(b"out/escaped")], FileFailure),
        ([item(b"out", "l", target=b".."), item(b"out/deep", "d")], FileFailure),
        ([item(b"a", "d"), item(b"a/b", "l", target=b"OUTSIDE"), item(b"a/b/escaped")], FileFailure),
        ([item(b"never-made/file")], FileFailure),
        ([b"\xff\xff\xff\xff"], ProtocolError),
        ([item(b"x")[:-3]], ProtocolError),
        ([encode_entry(Entry(b"x", "f", 0, 0, 0, 1, 0, 0, b"")) + b"\xff\xff\xff\x7f"], ProtocolError),
    ],
)
async def test_a_hostile_tree_writes_nothing_outside(
    sandbox: Sandbox, node: FakeNode, tmp_path: Path, items: list[bytes], error: type[BarchanError]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    data = ROOT + b"".join(items)
    for _ in range(data.count(b"OUTSIDE")):
        # The link's target has its length in front of it.
        at = data.index(b"OUTSIDE")
        data = data[: at - 4] + blob(os.fsencode(outside)) + data[at + 7 :]
    node.trees[b"/t"] = data
    with pytest.raises(error):
        await sandbox.files.download("/t", tmp_path / "inside" / "target")
    assert sorted(path.name for path in outside.iterdir()) == ["precious"]
    assert not [path for path in tmp_path.rglob("*escaped*")]
    assert not Path("/tmp/escaped").exists()


async def test_a_link_that_leads_out_is_skipped_and_reported(sandbox: Sandbox, node: FakeNode, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link = item(b"out", "l", target=os.fsencode(outside))
    node.trees[b"/t"] = ROOT + link + item(b"out", "d", mode=0o755) + item(b"out/f") + item(b"in", "l", target=b"out/f")
    report = await sandbox.files.download("/t", tmp_path / "target")
    assert report.skipped == {b"out": "link_out"}
    assert (tmp_path / "target" / "out" / "f").read_text() == "evil", "a directory of the tree by now"
    assert os.readlink(tmp_path / "target" / "in") == "out/f"
    assert not list(outside.iterdir())


async def test_a_transfer_is_bounded(sandbox: Sandbox, node: FakeNode, tmp_path: Path) -> None:
    """Sparse files, hard links and empty names cost a sandbox nothing."""
    node.trees[b"/t"] = ROOT + b"".join(item(b"%d" % number, content=b"x" * 1000) for number in range(20))
    for bounds, field in (({"max_bytes": 5000}, "max_bytes"), ({"max_entries": 5}, "max_entries")):
        with pytest.raises(FileFailure) as refused:
            await sandbox.files.download("/t", tmp_path / field, **bounds)
        assert refused.value.field == field
    node.files[b"/big"] = b"x" * 5000
    with pytest.raises(ProtocolError):
        await sandbox.files.read("/big", max_bytes=4999)
    assert len(await sandbox.files.read("/big", max_bytes=5000)) == 5000


async def test_links_in_the_target_are_replaced_not_followed(sandbox: Sandbox, node: FakeNode, tmp_path: Path) -> None:
    target, precious = tmp_path / "target", tmp_path / "precious"
    target.mkdir()
    precious.write_text("mine")
    (target / "f").symlink_to(precious)
    os.link(precious, target / "g")
    node.trees[b"/t"] = ROOT + item(b"f") + item(b"g", mode=0o6755)
    await sandbox.files.download("/t", target)
    assert precious.read_text() == "mine"
    assert (target / "f").read_text() == (target / "g").read_text() == "evil"
    assert stat.S_IMODE((target / "g").stat().st_mode) == 0o755, "set-id bits are not taken over"


async def test_of_many_that_are_skipped_the_first_are_named(sandbox: Sandbox, node: FakeNode, tmp_path: Path) -> None:
    long = b"/".join([b"d" * 250] * 4)
    node.trees[b"/t"] = ROOT + b"".join(item(b"%s/%d" % (long, number), "p") for number in range(2000))
    report = await sandbox.files.download("/t", tmp_path / "target")
    assert set(report.skipped.values()) == set(report.skipped_more) == {"special"}
    assert sum(map(len, report.skipped)) <= 1 << 20
    assert len(report.skipped) + report.skipped_more["special"] == 2000


async def test_devices_are_skipped_and_reported(sandbox: Sandbox, node: FakeNode, tmp_path: Path) -> None:
    node.trees[b"/t"] = ROOT + item(b"p", "p") + item(b"c", "c") + item(b"b", "b") + item(b"s", "s") + item(b"f")
    node.trees[b"/t"] += item(b"mine", "x")
    report = await sandbox.files.download("/t", tmp_path / "t")
    assert (report.files, report.skipped.pop(b"mine")) == (1, "unreadable")
    assert report.skipped == dict.fromkeys((b"p", b"c", b"b", b"s"), "special")
    assert os.listdir(tmp_path / "t") == ["f"]


async def test_results_are_plain_values(sandbox: Sandbox) -> None:
    result = await sandbox.run("echo x")
    assert msgspec.json.decode(msgspec.json.encode(result))["exit_code"] == 0


# packing


async def test_what_is_packed_is_asked_for_once(client: Client, node: FakeNode) -> None:
    sandbox = await client.create("debian-12")
    fail(node, "sandbox_pack_diff", faults.loses_the_link, times=1)
    rules = ScrubRules(also=("srv/*",), keep=("caches",))
    packed = await sandbox.pack_diff("made", whole=True, scrub=rules, config=ImageConfig(user="ann"))
    assert (packed.reference, packed.layers, packed.sandbox) == ("made@1", 2, sandbox.id)
    sent = [call for call in node.calls if isinstance(call, m.PackDiff)]
    assert len(sent) == 2 and sent[0] == sent[1], "again with the same key"
    assert (sent[0].order.scrub, sent[0].order.config) == (rules, ImageConfig(user="ann"))
    assert await sandbox.pack_diff("made", key="k") == await sandbox.pack_diff("made", key="k")
    with pytest.raises(Conflict):
        await sandbox.pack_diff("other", key="k")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"name": "Made"}, "name"),
        ({"name": 5}, "name"),
        ({"scrub": ScrubRules(also=("/etc",))}, "scrub.also"),
        ({"scrub": ScrubRules(keep=("logz",))}, "scrub.keep"),  # type: ignore[arg-type]
        ({"scrub": ("x",)}, "scrub"),
        ({"config": ImageConfig()}, "config"),
        ({"whole": True, "config": ImageConfig(workdir="srv")}, "config.workdir"),
        ({"key": "a b"}, "key"),
    ],
)
async def test_wrong_packings_are_named(client: Client, node: FakeNode, options: dict[str, Any], field: str) -> None:
    sandbox = await client.create("debian-12")
    with pytest.raises(InvalidRequest) as refused:
        await sandbox.pack_diff(**{"name": "made", **options})
    assert refused.value.field == field
    assert not [call for call in node.calls if isinstance(call, m.PackDiff)]
