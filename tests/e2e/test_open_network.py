"""Sandboxes with an open network, the whole way: SDK → API → node → guest → an Internet that is a network namespace.

The server runs in a namespace of its own, too, so that the network of the host that runs the tests is not touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from barchan import Client, DataMount, FeatureMissing, InvalidRequest, Sandbox
from barchan.net.addresses import DEFAULT_PREFIX
from tests.e2e.conftest import SMALL, make_tiny
from tests.e2e.test_restart import process_of, wait_gone
from tests.host.net_site import HOST, INNER, METADATA, NAMESERVER, PRIVATE, ROUTER, SERVER, World, open_world
from tests.internet import names, pages
from tests.rig import pause, within
from tests.server import PLACE, Server, remove, shared_server

FETCHER = r"""
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
int main(int count, char **given) {
    struct addrinfo wanted = {.ai_socktype = SOCK_STREAM}, *found;
    char text[4096];
    int failed = count < 4 ? 1 : getaddrinfo(given[1], given[2], &wanted, &found);
    if (failed)
        return printf("%s\n", gai_strerror(failed)), 2;
    int to = -1;
    do
        to = socket(found->ai_family, SOCK_STREAM, 0), failed = connect(to, found->ai_addr, found->ai_addrlen);
    while (failed && (found = found->ai_next));
    if (failed)
        return perror("connect"), 3;
    write(to, given[3], strlen(given[3]));
    for (long size; (size = read(to, text, sizeof text)) > 0;)
        write(1, text, size);
    return 0;
}
"""
"""Looks up a name, connects, sends a text, shows what comes. Busybox's own clients crash on names when they are linked statically."""
NAME = "www.example.com"
PAGE = b"a page of the Internet\n"
API = 7070
PORT = 8000
MANY = 200


@contextlib.contextmanager
def served(world: World, name: str, *options: str) -> Iterator[Server]:
    """A server whose host is `world.host`."""
    shared_server()
    server = Server(Path(f"{os.environ[PLACE]}-{name}"))
    try:
        with world.host.inside():
            server.run("up", "-d", "--name", name, "--scratch-bytes", "512m", *options)
        yield server
    finally:
        with world.host.inside():
            remove(server.data)


def imported(server: Server, base: Path) -> None:
    source, root = base / "fetch.c", make_tiny(base / "root")
    source.write_text(FETCHER)
    subprocess.run(["musl-gcc", "-static", "-O1", "-o", str(root / "bin/fetch"), str(source)], check=True)
    server.run("env", "import", "tiny", str(root))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world() as made:
        yield made


@pytest.fixture(scope="module")
def internet(world: World) -> Iterator[list[str]]:
    """Yields what names were asked for."""
    known = {NAME: SERVER, "metadata.example.com": METADATA, "private.example.com": PRIVATE}
    with names(world.outside, NAMESERVER, known) as asked, pages(world.outside, SERVER, 80, {"/": PAGE}):
        yield asked


@pytest.fixture(scope="module")
def own(world: World, internet: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--nameserver", NAMESERVER, "--listen", f"0.0.0.0:{API}", "--insecure")
    with served(world, "network", *options) as server:
        imported(server, tmp_path_factory.mktemp("tiny"))
        yield server


@pytest.fixture
async def client(own: Server) -> AsyncIterator[Client]:
    async with Client(data=own.data) as client:
        yield client


@pytest.fixture
async def sandbox(client: Client) -> AsyncIterator[Sandbox]:
    async with await client.create("tiny", limits=SMALL, network="open") as sandbox:
        yield sandbox


def devices(world: World) -> list[str]:
    """Of sandboxes, on the host."""
    return [line.split(":")[1].split("@")[0].strip() for line in world.host.run("ip -o link show type veth").splitlines()
            if " barc" in line]  # fmt: skip


FETCH = f"fetch {NAME} 80 $'GET / HTTP/1.0\\r\\n\\r\\n'"


async def test_a_page_is_fetched_by_name(sandbox: Sandbox, internet: list[str]) -> None:
    for user in ("root", "user"):
        done = await sandbox.run(FETCH, user=user)
        assert done.stdout.endswith(PAGE), (user, done)
    assert NAME in internet


async def test_by_default_there_is_no_network(client: Client, internet: list[str]) -> None:
    internet.clear()
    async with await client.create("tiny", limits=SMALL) as sandbox:
        assert (await sandbox.run(FETCH)).exit_code
        assert (await sandbox.run(f"nc -w 2 {SERVER} 80 < /dev/null")).exit_code
        assert (await sandbox.run("busybox ifconfig -a")).text.count("Link encap") == 1, "lo"
        assert not await sandbox.files.exists("/etc/resolv.conf") and not await sandbox.files.exists("/etc/hosts")
    assert not internet


async def test_names_of_its_own(client: Client) -> None:
    async with await client.create("tiny", limits=SMALL, network="open", hostname="boxed") as sandbox:
        assert (await sandbox.run("cat /etc/resolv.conf")).text == f"nameserver {NAMESERVER}\n"
        server = await sandbox.start("while true; do busybox nc -l -p 99 -e echo hello; done")
        async with within(10):
            while (done := await sandbox.run("fetch localhost 99 ''")).exit_code:
                await pause()
        assert done.text == "hello\n"
        assert (await sandbox.run("fetch boxed 98 ''")).exit_code == 3, (
            "its own name is known: connecting is what fails"
        )
        await server.cancel()


@pytest.fixture
def listeners(world: World) -> Iterator[None]:
    """Where nothing of a sandbox may come: there is somebody."""
    places = [
        (world.host, "0.0.0.0"),
        (world.inner, INNER),
        *((world.outside, at) for at in (METADATA, PRIVATE, ROUTER)),
    ]
    with contextlib.ExitStack() as open_:
        for where, address in places:
            open_.enter_context(where.listen(address, PORT))
        yield


@pytest.mark.parametrize(
    ("address", "port"),
    [
        (HOST, PORT),
        (HOST, API),
        ("127.0.0.1", API),
        ("gateway", PORT),
        ("gateway", API),
        (METADATA, PORT),
        (PRIVATE, PORT),
        (ROUTER, PORT),
        (INNER, PORT),
        (NAMESERVER, PORT),
        ("neighbour", PORT),
    ],
)
async def test_what_is_not_reached(
    client: Client, sandbox: Sandbox, listeners: None, address: str, port: int, world: World
) -> None:
    async with await client.create("tiny", limits=SMALL, network="open") as neighbour:
        serving = await neighbour.start(f"while true; do busybox nc -l -p {PORT} -e echo reached; done")
        async with within(10):
            while "reached" not in (await neighbour.run(f"nc -w 2 127.0.0.1 {PORT} < /dev/null")).text:
                await pause()
        known = {"gateway": await route(sandbox), "neighbour": await own_address(neighbour)}
        done = await sandbox.run(f"nc -w 2 {known.get(address, address)} {port} < /dev/null 2>&1")
        assert done.exit_code and "reached" not in done.text
        assert "refused" in done.text if address == "127.0.0.1" else "No route to host" in done.text
        await serving.cancel()


async def own_address(sandbox: Sandbox) -> str:
    shown = (await sandbox.run("busybox ifconfig eth0")).text
    return shown.partition("inet addr:")[2].split()[0]


async def route(sandbox: Sandbox) -> str:
    shown = (await sandbox.run("busybox route -n")).text
    return next(line.split()[1] for line in shown.splitlines() if line.startswith("0.0.0.0"))


async def test_there_is_no_ipv6(sandbox: Sandbox) -> None:
    assert "inet6" not in (await sandbox.run("busybox ifconfig eth0")).text
    assert (await sandbox.run("nc -w 2 2001:db8::1 80 < /dev/null")).exit_code


async def test_a_connection_outlives_the_agent(own: Server, world: World, client: Client, sandbox: Sandbox) -> None:
    listener = world.outside.listen(SERVER, PORT)
    talking = await sandbox.start(f"busybox nc {SERVER} {PORT}", stdin=True)
    peer, _ = await asyncio.to_thread(listener.accept)
    with peer:
        peer.sendall(b"before\n")
        assert await anext(aiter(talking.stdout)) == b"before\n"
        kill_agent(own)
        await sandbox.run("true")  # the next agent answers
        peer.sendall(b"after\n")
        assert await anext(aiter(talking.stdout)) == b"after\n"
        await talking.stdin.write(b"and back\n")
        assert await asyncio.to_thread(peer.recv, 64) == b"and back\n"
    assert (await sandbox.run(FETCH)).stdout.endswith(PAGE)
    async with await client.create("tiny", limits=SMALL, network="open") as new:
        assert (await new.run(FETCH)).stdout.endswith(PAGE)
    listener.close()


def kill_agent(server: Server) -> None:
    pid = process_of(server, "node")
    fd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    wait_gone(fd)


async def until(holds: Callable[[], object]) -> None:
    async with within(30):
        while not holds():
            await pause()


async def test_a_stop_removes_the_device(world: World, client: Client) -> None:
    async with await client.create("tiny", limits=SMALL, network="open") as sandbox:
        slot = (int(IPv4Address(await own_address(sandbox))) - int(DEFAULT_PREFIX.network_address)) // 2
        name = next(name for name in devices(world) if name[len("barc") + 6 :] == f"{slot:x}")
    await until(lambda: name not in devices(world))


async def test_the_command_line_asks_for_it_too(own: Server) -> None:
    for mode, there in (("open", True), ("deny", False)):
        command = [*own.command("run"), "--network", mode, "tiny", "--", "sh", "-c", FETCH]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
        assert done.stdout.endswith(PAGE) == there, done


async def test_two_hundred_leave_nothing(own: Server, world: World, client: Client) -> None:
    async def one(number: int) -> None:
        async with room, await client.create("tiny", limits=SMALL, network="open", hostname=f"h{number}") as sandbox:
            assert await own_address(sandbox)

    table = world.host.run("nft list ruleset")
    room = asyncio.Semaphore(8)
    await asyncio.gather(*(one(number) for number in range(MANY)))
    with world.host.inside():
        own.run("down", timeout=180)
    assert not devices(world)
    assert "barchan" in table and "barchan" not in world.host.run("nft list ruleset")
    assert not world.forwarding()
    assert str(own.data) not in Path("/proc/self/mountinfo").read_text()
    options = ("--nameserver", NAMESERVER, "--listen", f"0.0.0.0:{API}", "--insecure")
    with world.host.inside():
        own.run("up", "-d", "--name", "network", *options)
    async with Client(data=own.data) as again, await again.create("tiny", limits=SMALL, network="open") as sandbox:
        assert (await sandbox.run(FETCH)).stdout.endswith(PAGE)


async def test_nothing_of_the_host_changes_until_it_is_asked_for(tmp_path: Path) -> None:
    with open_world() as world, served(world, "lazy", "--nameserver", NAMESERVER) as server:
        imported(server, tmp_path)
        async with Client(data=server.data) as client:
            info = (await client.nodes())[0].network
            assert info.open and not info.missing
            await (await client.create("tiny", limits=SMALL)).stop()
            assert not world.forwarding() and not world.host.run("nft list ruleset")
            await (await client.create("tiny", limits=SMALL, network="open")).stop()
            assert world.forwarding()


async def test_a_node_that_cannot_says_why(tmp_path: Path) -> None:
    few = ("--max-sandboxes", "50", "--pool-most", "0")
    with open_world() as world, served(world, "overlap", "--network-prefix", "203.0.113.0/24", *few) as server:
        imported(server, tmp_path)
        async with Client(data=server.data) as client:
            with pytest.raises(FeatureMissing, match=r"203\.0\.113\.0/24.*up0") as refused:
                await client.create("tiny", network="open")
            assert (refused.value.field, refused.value.phase) == ("network.mode", "network") and refused.value.hint
            node = (await client.nodes())[0]
            assert not node.network.open and "up0" in node.network.missing
            assert any("up0" in note for note in node.notes)
            await (await client.create("tiny", limits=SMALL)).stop()
        command = server.command("create", "--network", "open", "tiny")
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
        assert done.returncode and b"[feature_missing]" in done.stderr


async def test_a_filter_of_somebody_else_is_told(tmp_path: Path) -> None:
    with open_world() as world:
        world.host.run(
            "nft -f -",
            "table ip filter {\n chain FORWARD {\n type filter hook forward priority 0; policy drop;\n }\n}\n",
        )
        with served(world, "docker", "--nameserver", NAMESERVER) as server:
            async with Client(data=server.data) as client:
                assert "ip filter FORWARD" in (await client.nodes())[0].network.obstacles
            with world.host.inside():
                report = server.run("doctor")
            check = next(check for check in report["checks"] if check["name"] == "packet filters")
            assert not check["ok"] and "ip filter FORWARD" in check["detail"] and "DOCKER-USER" in check["remedy"]


@pytest.mark.parametrize("target", ["/etc", "/etc/resolv.conf", "/etc/resolv.conf/x"])
async def test_its_name_servers_cannot_be_covered(client: Client, target: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await client.create("tiny", network="open", mounts=[DataMount(source="shared", target=target)])
    assert refused.value.field == "mounts.target"


async def test_an_unknown_mode_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await client.create("tiny", network="bridge")  # type: ignore[arg-type]
    assert refused.value.field == "network.mode" and "'open'" in refused.value.hint
