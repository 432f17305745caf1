"""Images of a registry become environments: each blob is fetched and converted once, and what goes wrong has a name."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from barchan.config import RegistryAccess, encode_config
from barchan.environments import PullProgress
from barchan.errors import EnvironmentNotFound, ImageDenied, ImageNotFound, InvalidRequest, RegistryUnavailable
from barchan.image_refs import parse_image
from barchan.layers.gc import collect
from barchan.layers.pull import pull
from barchan.layers.pull_worker import PullRequest
from barchan.layers.scrubber import scrub
from barchan.layers.stack import compose
from barchan.layers.store import LayerStore
from barchan.spec import EnvironmentRef
from tests import registry
from tests.images import INDEX, Layout, file, folder, tar
from tests.registry import Registry

BASE = tar([folder("bin"), file("bin/program", b"program" * 1000)])
FIRST, SECOND = tar([file("version", b"1")]), tar([file("version", b"2")])
PROCESS = {"Env": ["A=b"], "User": "5", "Entrypoint": ["/bin/program"], "Cmd": ["x"], "Labels": {"made": "by test"}}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry.running(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "layers")


class Pushed:
    """An image of two layers at the registry; the lower one is of all of them."""

    def __init__(self, hub: Registry, path: Path, tag: str, top: bytes) -> None:
        layout = Layout(path)
        entry = layout.add(tag, [BASE, top], config={"config": PROCESS})
        self.ref = hub.push(layout, tag, f"test:{tag}")
        self.digest = str(entry["digest"])
        manifest = msgspec.json.decode((path / "blobs/sha256" / self.digest.removeprefix("sha256:")).read_bytes())
        self.base, self.top = (layer["digest"] for layer in manifest["layers"])


def test_an_image_is_an_environment_by_tag_and_by_digest(hub: Registry, store: LayerStore, tmp_path: Path) -> None:
    image = Pushed(hub, tmp_path / "image", "one", FIRST)
    entry = pull(store, image.ref, access=hub.access)
    whole = compose(EnvironmentRef(base=image.ref), store.resolve)
    assert len(whole.layers) == 2 and entry.size == sum(layer.size for layer in whole.layers)
    assert (whole.config.env, whole.config.user) == ({"A": "b"}, "5")
    assert (whole.config.entrypoint, whole.config.command) == (("/bin/program",), ("x",))
    assert whole.config.labels == {"made": "by test"}
    pinned = whole.environment.base
    assert pinned == str(parse_image(image.ref).pinned(image.digest)) == entry.reference
    again = compose(EnvironmentRef(base=pinned), store.resolve)
    assert again.layers == whole.layers or [a.digest for a in again.layers] == [b.digest for b in whole.layers]
    assert pull(store, pinned, access=RegistryAccess(registries_conf=tmp_path / "none")).digest == entry.digest


def test_progress_goes_from_nothing_to_all_of_it(
    hub: Registry, store: LayerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barchan.layers.pull.EVERY", 0.0)
    image = Pushed(hub, tmp_path / "one", "told", tar([file("told", os.urandom(3 << 20))]))
    told: list[PullProgress] = []
    pull(store, image.ref, access=hub.access, told=told.append)
    assert [progress.phase for progress in told[:2]] == ["waiting", "resolve"]
    steps = list(dict.fromkeys((progress.phase, progress.layer) for progress in told[2:]))
    assert steps == [("pull", 1), ("convert", 1), ("pull", 2), ("convert", 2)]
    done = [progress.done for progress in told[2:]]
    assert done == sorted(done) and len(set(done)) >= 5 and done[0] == 0 and done[-1] == told[-1].total > 3 << 20
    assert {(progress.image, progress.layers) for progress in told[2:]} == {(image.ref, 2)}
    told.clear()
    pull(store, image.ref, access=hub.access, told=told.append)
    assert [progress.phase for progress in told] == ["waiting"], "it is here"


def test_a_damaged_layer_is_fetched_again_and_alone(hub: Registry, store: LayerStore, tmp_path: Path) -> None:
    image = Pushed(hub, tmp_path / "one", "damaged", tar([file("damaged", os.urandom(100_000))]))
    entry = pull(store, image.ref, access=hub.access)
    digest = store.layers_of(entry.digest)[-1]
    data = store.layer_path(digest) / "data"
    data.chmod(0o600)
    with data.open("r+b") as content:
        content.seek(50_000)
        content.write(b"not what was there")
    before = hub.fetched(image.base), hub.fetched(image.top)
    found = scrub(store, mend=lambda ref: pull(store, ref, access=hub.access))
    assert found is not None and [(one.digest, one.mended) for one in found.damaged] == [(digest, True)]
    assert (hub.fetched(image.base), hub.fetched(image.top)) == (before[0], before[1] + 1)
    store.verify(digest)
    assert pull(store, image.ref, access=hub.access) == entry
    again = scrub(store)
    assert again is not None and not again.damaged


def test_a_layer_that_is_here_is_not_fetched_again(hub: Registry, store: LayerStore, tmp_path: Path) -> None:
    one = Pushed(hub, tmp_path / "one", "first", FIRST)
    before = hub.fetched(one.base)
    pull(store, one.ref, access=hub.access)
    two = Pushed(hub, tmp_path / "two", "second", SECOND)
    assert two.base == one.base
    pull(store, two.ref, access=hub.access)
    pull(store, two.ref, access=hub.access)
    assert (hub.fetched(one.base) - before, hub.fetched(two.top)) == (1, 1)


def test_a_tag_means_what_it_meant_until_it_is_asked_again(hub: Registry, store: LayerStore, tmp_path: Path) -> None:
    old = Pushed(hub, tmp_path / "old", "moving", FIRST)
    first = pull(store, old.ref, access=hub.access)
    new = Pushed(hub, tmp_path / "new", "moving", SECOND)
    assert new.ref == old.ref and new.digest != old.digest
    assert pull(store, old.ref, access=hub.access) == first
    second = pull(store, old.ref, access=hub.access, again=True)
    assert second.version == 2 and second.manifest == new.digest
    assert store.resolve(old.ref).reference == second.reference
    assert store.resolve(first.reference).reference == first.reference, "what it was is still here"


def test_many_processes_fetch_once(hub: Registry, store: LayerStore, tmp_path: Path) -> None:
    image = Pushed(hub, tmp_path / "image", "many", tar([file("many", b"many" * 50_000)]))
    request = encode_config(PullRequest(store=store.root, ref=image.ref, access=hub.access)) + b"\n"
    command = [sys.executable, "-m", "barchan.layers.pull_worker"]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(request)
        worker.stdin.flush()
    for worker in workers:
        with worker:
            assert worker.stdout is not None
            assert b'{"done":{' in worker.stdout.read()
    assert hub.fetched(image.top) == 1


def test_a_worker_ends_with_whoever_started_it(store: LayerStore) -> None:
    """The registry says nothing for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ref = f"docker://127.0.0.1:{silent.getsockname()[1]}/a:b"
        command = [sys.executable, "-m", "barchan.layers.pull_worker"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(encode_config(PullRequest(store=store.root, ref=ref)) + b"\n")
            worker.stdin.flush()
            assert b"waiting" in worker.stdout.readline() and b"resolve" in worker.stdout.readline()
            worker.stdin.close()
            assert worker.wait(10) == 1


@pytest.mark.parametrize("name", ["test:nothing", "nobody:knows", "test@sha256:" + "0" * 64])
def test_what_the_registry_does_not_have(hub: Registry, store: LayerStore, tmp_path: Path, name: str) -> None:
    Pushed(hub, tmp_path / "image", "there", FIRST)
    with pytest.raises(ImageNotFound) as failed:
        pull(store, hub.ref(name), access=hub.access)
    assert failed.value.phase == "resolve"
    assert not store.catalog.entries() and not list((store.root / "tmp").iterdir())


def test_of_an_index_the_platform_that_is_asked_for(hub: Registry, store: LayerStore, tmp_path: Path) -> None:
    """Also when another one of the same index is here already, by the same names."""
    layout = Layout(tmp_path / "image")
    parts = []
    for machine in ("amd64", "arm64"):
        config = {"architecture": machine, "config": {"Labels": {"machine": machine}}}
        part = layout.manifest([BASE, tar([file("machine", machine.encode())])], config=config)
        parts.append({**part, "platform": {"os": "linux", "architecture": machine}})
    entry = layout.json({"schemaVersion": 2, "mediaType": INDEX, "manifests": parts}, INDEX)
    layout.entries.append({**entry, "annotations": {"org.opencontainers.image.ref.name": "both"}})
    layout.index()
    ref = hub.push(layout, "both", "test:both", "--all")

    def machine(platform: str, name: str = ref) -> str:
        pull(store, name, platform=platform, access=hub.access, again=True)
        return compose(EnvironmentRef(base=name), store.resolve).config.labels["machine"]

    assert machine("linux/amd64") == "amd64"
    assert machine("linux/arm64") == "arm64"
    assert machine("linux/amd64") == "amd64"


def test_an_image_for_another_machine(hub: Registry, store: LayerStore, tmp_path: Path) -> None:
    image = Pushed(hub, tmp_path / "image", "other", FIRST)
    with pytest.raises(InvalidRequest) as failed:
        pull(store, image.ref, platform="linux/riscv64", access=hub.access)
    assert failed.value.phase == "resolve" and "riscv64" in failed.value.message


def test_a_damaged_blob_is_named(hub: Registry, store: LayerStore, tmp_path: Path) -> None:
    image = Pushed(hub, tmp_path / "image", "damaged", tar([file("damaged", b"whole" * 999)]))
    blob = hub.blob(image.top)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    with pytest.raises((InvalidRequest, RegistryUnavailable)) as failed:
        pull(store, image.ref, access=hub.access)
    assert failed.value.phase == "pull" and image.top in failed.value.message
    assert not store.catalog.entries() and not list((store.root / "sha256").iterdir())


def test_a_registry_that_is_not_there(store: LayerStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RegistryUnavailable) as failed:
        pull(store, f"docker://127.0.0.1:{port}/a:b")
    assert failed.value.phase == "resolve" and failed.value.retry


def test_a_registry_that_says_nothing_is_given_up(store: LayerStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RegistryUnavailable) as failed:
        pull(store, f"docker://127.0.0.1:{silent.getsockname()[1]}/a:b", access=RegistryAccess(stall=0.5))
    assert "0.5 s" in failed.value.message and failed.value.phase == "resolve"


def test_settings_that_skopeo_does_not_understand_are_told(store: LayerStore, tmp_path: Path) -> None:
    (tmp_path / "registries.conf").write_text("[[registry")
    with pytest.raises(RegistryUnavailable, match="registries.conf"):
        pull(store, "docker://127.0.0.1:1/a:b", access=RegistryAccess(registries_conf=tmp_path / "registries.conf"))


def test_a_registry_that_wants_a_login(store: LayerStore, tmp_path: Path) -> None:
    refusal = b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm=x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        conf = tmp_path / "registries.conf"
        conf.write_text(registry.INSECURE.format(port=port))

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(65536)
                    peer.sendall(refusal)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(ImageDenied) as failed:
                pull(store, f"docker://127.0.0.1:{port}/a:b", access=RegistryAccess(registries_conf=conf))
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert "login" in failed.value.hint


def test_a_removed_image_is_gone_by_all_its_names(hub: Registry, store: LayerStore, tmp_path: Path) -> None:
    image = Pushed(hub, tmp_path / "image", "short-lived", FIRST)
    entry = pull(store, image.ref, access=hub.access)
    store.remove(image.ref)
    for name in (image.ref, entry.reference):
        with pytest.raises(EnvironmentNotFound):
            store.resolve(name)
    collect(store, grace=0)
    assert not list((store.root / "sha256").iterdir())
