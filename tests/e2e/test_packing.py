"""Changes of a live sandbox become a layer, and the layer a sandbox: the same files, at once, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from barchan import Client, EnvironmentRef, ImageConfig, Limits, PackedLayer, Sandbox, ScrubRules, errors
from barchan.kernel import processes
from barchan.layers.store import LayerStore
from tests.e2e.conftest import make_tiny
from tests.server import Server, own_server

MIB = 1 << 20
LIMITS = Limits(memory=128 * MIB, pids=128, disk=96 * MIB)
SECRET = "hunter2-of-the-sandbox"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its node agent is going to be killed."""
    with own_server("packing", "--scratch-bytes", "1g") as server:
        server.run("env", "import", "tiny", str(make_tiny(tmp_path_factory.mktemp("tiny"))))
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with Client(data=server.data) as client:
        yield client
    await until(lambda: not left(server))


@pytest.fixture
async def sandbox(client: Client) -> AsyncIterator[Sandbox]:
    async with await client.create("tiny", limits=LIMITS, secrets={"TOKEN": SECRET}, setuid=True) as sandbox:
        yield sandbox


def left(server: Server) -> list[Path]:
    """Of packings that are over."""
    return [*(server.data / "scratch").glob(".frozen-*"), *(server.data / "layers/tmp").iterdir()]


async def seen(sandbox: Sandbox) -> list[bytes]:
    """Every file: kind, owner, mode, time, target and content."""
    script = r"""
        find / \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /run \) -prune -o -print | sort |
        while read -r path; do
            stat -c '%n %N %A %u:%g %Y' "$path"
            [ -f "$path" ] && [ ! -L "$path" ] && stat -c 'links %h' "$path" && sha256sum "$path"
        done
    """
    done = await sandbox.run(["/bin/sh", "-c", script], user="root", timeout=120)
    lines = done.stdout.splitlines()
    # Its parents' times are of mounts that every sandbox makes for itself.
    return [line for line in lines if not line.startswith((b"/ ", b"/etc "))]


CHANGES = """
    mkdir -p /srv/deep/er && echo root > /srv/root && echo user > /srv/user && chown 1000:1000 /srv/user
    echo gone > /srv/was && rm /srv/was && rm /bin/tee && mv /home/user /home/ann && chown 1000 /home/ann
    cp /bin/busybox /srv/suid && chown 0:1000 /srv/suid && chmod 4750 /srv/suid && ln /srv/root /srv/linked
    ln -s ../srv/root /srv/deep/er/link && mkdir -m 1777 /srv/sticky && chown 1000:1000 /srv/sticky
    chmod 700 /etc/passwd && chmod 755 /etc/passwd && mkdir -p /root/.ssh /var/log && echo key > /root/.ssh/id_rsa
    echo host > /root/.ssh/known_hosts && echo line > /var/log/app.log && echo ls > /root/.bash_history && echo x > /tmp/x
"""
SAME_TIMES = "\ntouch -d '2024-05-06 07:08:09' /root /root/.ssh /var/log"
"""What is left out of a layer is removed later from where it was, which is a change of its directory."""


async def test_a_sandbox_is_restored_with_its_owners_and_without_its_secrets(
    client: Client, sandbox: Sandbox, server: Server
) -> None:
    await sandbox.run(CHANGES + SAME_TIMES, check=True)
    packed = await sandbox.pack_diff("restored", whole=True)
    assert (packed.reference, packed.layers, packed.sandbox) == ("restored@1", 2, sandbox.id)
    assert packed.left_out == {"credentials": 1, "histories": 1, "logs": 1, "temporary": 1}
    assert packed.renamed == 1 and packed.completed >= 1
    await sandbox.run("rm /root/.ssh/id_rsa /var/log/app.log /root/.bash_history" + SAME_TIMES, check=True)
    async with await client.create("restored", limits=LIMITS, setuid=True) as again:
        assert again.info.environment.base == "restored@1"
        assert await seen(again) == await seen(sandbox)
        done = await again.run("stat -c %u:%g:%a /srv/suid; stat -c %u /srv/user", user="1000:1000")
        assert done.stdout == b"0:1000:4750\n1000\n"
    assert not [
        path for path in (server.data / "layers").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    (entry,) = LayerStore(server.data / "layers").catalog.entries()[:1]
    assert (entry.kind, entry.source) == ("pack_diff", sandbox.id) and entry.provenance is not None
    assert entry.provenance.environment == ("tiny@1",)


async def test_changes_are_a_workspace_a_toolkit_and_a_digest(client: Client, sandbox: Sandbox) -> None:
    await sandbox.run("mkdir /srv && echo changed > /srv/file && rm /bin/tee", check=True)
    packed = await sandbox.pack_diff("changes")
    assert (packed.layers, packed.digest) == (1, packed.layer)
    for environment in (
        EnvironmentRef(base="tiny", workspace="changes"),
        EnvironmentRef(base="tiny", toolkits=("changes@1",)),
        EnvironmentRef(base="tiny", toolkits=(packed.digest,)),
    ):
        async with await client.create(environment, limits=LIMITS) as box:
            assert (await box.run("cat /srv/file; ls /bin/tee")).stdout == b"changed\n"
    again = await sandbox.pack_diff("changes")
    assert again == packed, "the same content is no new version"
    await sandbox.run("echo more > /srv/file", check=True)
    assert (await sandbox.pack_diff("changes")).version == 2
    async with await client.create("tiny", workspace="changes", limits=LIMITS) as box:
        assert (await box.run("cat /srv/file")).stdout == b"more\n", "the new version is known at once"


async def test_what_was_not_synced_is_packed(client: Client, sandbox: Sandbox) -> None:
    await sandbox.run("head -c 20000000 /dev/urandom > /blob; sha256sum < /blob > /sum", check=True)
    await sandbox.pack_diff("unsynced", whole=True)
    async with await client.create("unsynced", limits=LIMITS) as again:
        assert (await again.run('[ "$(sha256sum < /blob)" = "$(cat /sum)" ]')).ok


async def test_rules_and_the_config_of_an_image(client: Client, sandbox: Sandbox) -> None:
    await sandbox.run("mkdir -p /srv /var/log; echo a > /srv/a; echo b > /srv/b; echo l > /var/log/l", check=True)
    config = ImageConfig(env={"WORD": "hello"}, user="user", workdir="/srv", labels={"of": "test"})
    rules = ScrubRules(also=("srv/b*",), keep=("logs",))
    packed = await sandbox.pack_diff("configured", whole=True, scrub=rules, config=config)
    assert packed.left_out == {"extra": 1}
    async with await client.create("configured", limits=LIMITS) as box:
        done = await box.run("pwd; id -un; echo $WORD; ls; cat /var/log/l")
        assert done.stdout == b"/srv\nuser\nhello\na\nl\n"
        await box.run("echo c > /srv/c", user="root", check=True)
        await box.pack_diff("inherited", whole=True)
    async with await client.create("inherited", limits=LIMITS) as box:
        assert (await box.run("pwd; id -un; echo $WORD; ls")).stdout == b"/srv\nuser\nhello\na\nc\n"


@pytest.mark.slow
async def test_a_chain_of_twenty_stays_exact(client: Client) -> None:
    base, before = "tiny", []
    for number in range(20):
        async with await client.create(base, limits=LIMITS) as box:
            if number:
                assert await seen(box) == before, number
            step = f"""
                mkdir -p /srv/{number} && echo {number} > /srv/{number}/file && echo {number} > /srv/last
                ln /srv/{number}/file /srv/link-{number}; chown {number} /srv/{number}; rm -rf /srv/{number - 3}
                [ -d /srv/{number - 2} ] && mv /srv/{number - 2} /srv/moved-{number} && chmod 7{number % 8}1 /srv/moved-{number}/file
                rm -rf /srv/moved-{number - 4} && mkdir -p /srv/moved-{number - 4}
                echo {number} >> /etc/passwd-{number % 5}; chmod 6{number % 8}4 /bin/busybox; chmod 755 /bin/busybox
            """
            await box.run(step)
            before = await seen(box)
            packed = await box.pack_diff(base := f"chain-{number}", whole=True)
            assert packed.layers == number + 2
    async with await client.create(base, limits=LIMITS) as box:
        assert await seen(box) == before


async def test_a_full_disk_can_be_packed(client: Client, sandbox: Sandbox) -> None:
    await sandbox.run("cat /dev/zero > /zeros; rm /zeros; echo kept > /kept; head -c 30000000 /dev/urandom > /random")
    assert not (await sandbox.run("cat /dev/urandom > /full")).ok
    size = (await sandbox.run("stat -c %s /full; sha256sum < /random")).stdout
    await sandbox.pack_diff("full", whole=True)
    async with await client.create("full", limits=LIMITS) as again:
        assert (await again.run("stat -c %s /full; sha256sum < /random; cat /kept")).stdout == size + b"kept\n"
    assert not (await sandbox.run("echo more > /more && cat /dev/zero > /more")).ok, "its limit holds as before"


async def test_others_go_on_while_many_are_packed(client: Client) -> None:
    boxes = [await client.create("tiny", limits=LIMITS) for _ in range(4)]
    for box in boxes:
        await box.run("head -c 10000000 /dev/urandom > /blob", check=True)
    made = await asyncio.gather(*(box.pack_diff(f"many-{n}") for n, box in enumerate(boxes * 2)))
    assert [one.sandbox for one in made] == [box.id for box in boxes * 2]
    assert len({one.digest for one in made}) == 4
    await asyncio.gather(*(box.stop() for box in boxes))


def node_of(server: Server) -> int:
    return int(json.loads((server.data / "run/up.json").read_text())["services"]["node"]["pid"])


async def until(true: Any) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


def packing_in(server: Server) -> list[int]:
    """Processes of its node that pack."""
    node = node_of(server)
    children = Path(f"/proc/{node}/task/{node}/children").read_text().split()
    return [int(pid) for pid in children if b"pack_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_what_a_killed_agent_had_frozen_goes_though_nobody_asks_again(
    client: Client, sandbox: Sandbox, server: Server
) -> None:
    await sandbox.run("head -c 60000000 /dev/urandom > /blob", check=True)
    async with Client(data=server.data) as other:
        call = asyncio.ensure_future((await other.get(sandbox.id)).pack_diff("nobodys"))
        await until(lambda: list((server.data / "layers/tmp").glob("*/layer/image")))
        os.kill(killed := node_of(server), signal.SIGKILL)
        call.cancel()
    assert (await sandbox.run("true")).ok and node_of(server) != killed
    assert not list((server.data / "scratch").glob(".frozen-*"))
    assert not LayerStore(server.data / "layers").catalog.versions("nobodys")


@pytest.mark.parametrize("at", ["frozen", "made"])
async def test_a_killed_agent_leaves_nothing_and_the_call_is_answered(
    client: Client, sandbox: Sandbox, server: Server, at: str
) -> None:
    """The layer is made after all, once, by the agent that follows."""
    await sandbox.run("head -c 60000000 /dev/urandom > /blob; sha256sum < /blob > /sum", check=True)
    sleeper = await sandbox.start("sleep 600")
    call = asyncio.ensure_future(sandbox.pack_diff(f"killed-{at}", whole=True))
    where = {"frozen": (server.data / "scratch", ".frozen-*"), "made": (server.data / "layers/tmp", "*/layer/image")}[
        at
    ]
    await until(lambda: list(where[0].glob(where[1])))
    workers = packing_in(server)
    os.kill(node_of(server), signal.SIGKILL)
    await until(lambda: not [pid for pid in workers if processes.start_time(pid)])
    packed = await call
    assert packed.version == 1
    await until(lambda: not left(server))
    assert LayerStore(server.data / "layers").catalog.versions(f"killed-{at}") == (1,)
    assert (await sandbox.run('[ "$(sha256sum < /blob)" = "$(cat /sum)" ]')).ok
    assert sleeper.id in {process.exec_id for process in await sandbox.processes()}
    await sleeper.cancel()
    await sleeper.wait()


async def test_a_key_answers_with_the_same_layer(client: Client, sandbox: Sandbox, server: Server) -> None:
    await sandbox.run("echo one > /file", check=True)
    packed = await sandbox.pack_diff("keyed", key="k1")
    await sandbox.run("echo two > /file", check=True)
    os.kill(node_of(server), signal.SIGKILL)
    assert await sandbox.pack_diff("keyed", key="k1") == packed
    with pytest.raises(errors.Conflict):
        await sandbox.pack_diff("keyed", key="k1", whole=True)
    assert (await sandbox.pack_diff("keyed", key="k2")).version == 2
    await sandbox.stop()
    assert await sandbox.pack_diff("keyed", key="k1") == packed
    with pytest.raises(errors.SandboxStopped):
        await sandbox.pack_diff("keyed", key="k3")


async def test_stopped_while_it_is_packed(client: Client, server: Server) -> None:
    """A whole layer or a typed error, never half of it."""
    whole = 0
    for number in range(6):
        box = await client.create("tiny", limits=LIMITS)
        await box.run("mkdir /srv; for i in $(seq 2000); do echo $i > /srv/$i; done", check=True)
        call = asyncio.ensure_future(box.pack_diff(f"stopped-{number}", whole=True))
        await asyncio.sleep(0.01 * number)
        await box.stop()
        try:
            made: PackedLayer | None = await call
        except errors.SandboxStopped:
            made = None
        if made is not None:
            whole += 1
            async with await client.create(made.reference, limits=LIMITS) as again:
                assert (await again.run("ls /srv | wc -l")).text.strip() == "2000"
        else:
            assert not LayerStore(server.data / "layers").catalog.versions(f"stopped-{number}")
    print(f"{whole} of 6 were made")


async def test_given_up_leaves_nothing(client: Client, sandbox: Sandbox, server: Server) -> None:
    await sandbox.run("head -c 60000000 /dev/urandom > /blob", check=True)
    with pytest.raises(errors.RequestTimeout):
        await sandbox.pack_diff("given-up", timeout=0.05)
    await until(lambda: not left(server))
    assert not LayerStore(server.data / "layers").catalog.versions("given-up")


async def test_what_it_was_made_of_may_be_gone(client: Client, server: Server, tmp_path: Path) -> None:
    server.run("env", "import", "brief", str(make_tiny(tmp_path / "one")))
    async with await client.create("brief", limits=LIMITS) as box:
        await box.run("echo x > /etc/x", check=True)
        server.run("env", "rm", "brief")
        (tmp_path / "one/other").write_text("other")
        server.run("env", "import", "brief", str(tmp_path / "one"))
        with pytest.raises(errors.EnvironmentNotFound):
            await box.pack_diff("orphan", whole=True)
        packed = await box.pack_diff("orphan", whole=True, config=ImageConfig())
        async with await client.create("orphan", limits=LIMITS) as again:
            assert (await again.run("cat /etc/x; ls /other")).stdout == b"x\n"
        assert packed.layers == 2
