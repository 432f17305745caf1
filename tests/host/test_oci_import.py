"""Images of every form become environments: what is equal is made and kept once, what fails leaves nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from barchan.errors import CreateFailed, InvalidRequest
from barchan.images import ImageConfig
from barchan.layers import changeset, content, lower
from barchan.layers.conversions import Conversions
from barchan.layers.gc import collect
from barchan.layers.sources import Wanted, import_environment
from barchan.layers.stack import compose
from barchan.layers.store import LayerStore, StackFile
from barchan.spec import EnvironmentRef
from tests.disks import real_disk
from tests.images import Layout, docker_archive, file, folder, packed, symlink, tar

BASE = tar([folder("etc"), file("etc/base", b"base"), folder("usr"), symlink("lib", "usr")])
MIDDLE = tar([folder("opt"), file("opt/tool", b"tool"), file("etc/.wh.base")])
TOP = tar([file("top", b"top"), file("lib/through", b"t")])
OTHER = tar([folder("srv"), file("srv/other", b"o")])


@pytest.fixture
def data() -> Iterator[Path]:
    with real_disk() as path:
        yield path


@pytest.fixture
def store(data: Path) -> LayerStore:
    return LayerStore(data / "layers")


def image(data: Path, name: str, *layers: bytes, **more: Any) -> Path:
    layout = Layout(data / name)
    layout.add("", layers, **more)
    return layout.root


def diff_id(layer: bytes) -> str:
    return f"sha256:{hashlib.sha256(layer).hexdigest()}"


def files(store: LayerStore) -> list[str]:
    return sorted(path.name for path in (store.root / "sha256").iterdir())


def held(data: Path) -> tuple[list[str], int]:
    """Mounts below `data` and the number of open descriptors."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(data) in line], len(os.listdir("/proc/self/fd"))


def nothing_left(store: LayerStore) -> None:
    assert store.catalog.entries() == ()
    left = [path for path in store.root.rglob("*") if path.is_file() and path.name != "lock"]
    assert not left
    assert not list((store.root / "tmp").iterdir())


def remove(store: LayerStore, name: str) -> None:
    """With its layers, at once."""
    store.remove(name)
    collect(store, grace=0)


def test_each_layer_is_one_layer_of_the_store(store: LayerStore, data: Path) -> None:
    config = {"config": {"Env": ["PATH=/opt"], "WorkingDir": "/srv", "User": "nobody", "Entrypoint": ["/x"]}}
    entry = import_environment(store, "it", image(data, "image", BASE, MIDDLE, TOP, config=config))
    layer = store.resolve("it")
    assert len(layer.below) == 2
    stack = store.stack(entry.digest)
    assert stack is not None
    assert stack == StackFile(
        layers=(*(below.digest for below in layer.below), layer.digest),
        config=ImageConfig(env={"PATH": "/opt"}, workdir="/srv", user="nobody", entrypoint=("/x",)),
    )
    assert compose(EnvironmentRef(base="it"), store.resolve).layers == (layer, layer.below[1], layer.below[0])
    by_digest = compose(EnvironmentRef(base=entry.digest), store.resolve)
    assert [layer.digest for layer in by_digest.layers] == [*reversed(stack.layers)]
    assert by_digest.environment.base == entry.digest and by_digest.config == stack.config
    assert entry.size == sum(content.read(path).used for path in (store.root / "sha256").iterdir())


@pytest.mark.parametrize("way", ["", "zstd"])
def test_compression_makes_no_difference(store: LayerStore, data: Path, way: str) -> None:
    first = import_environment(store, "it", image(data, "one", BASE, MIDDLE))
    second = import_environment(LayerStore(data / "other"), "it", image(data, "two", BASE, MIDDLE, way=way))
    assert first.digest == second.digest


@pytest.mark.parametrize("form", ["oci-archive", "oci-archive.gz", "oci-archive.zst", "docker-archive"])
def test_form_makes_no_difference_and_is_found_out(store: LayerStore, data: Path, form: str) -> None:
    layers = (BASE, MIDDLE, OTHER, MIDDLE) if form == "docker-archive" else (BASE, MIDDLE, OTHER)
    root = image(data, "image", *layers)
    first = import_environment(store, "it", root)
    path = data / form
    if form == "docker-archive":
        docker_archive(path, layers)
    else:
        mode = "w:gz" if form.endswith("gz") else "w"
        Layout.archive(_of(root), path, mode)
        if form.endswith("zst"):
            path.write_bytes(packed(path.read_bytes(), "zstd")[0])
    other = LayerStore(data / "other")
    assert import_environment(other, "it", path).digest == first.digest
    assert other.catalog.entries()[0].kind == form.partition(".")[0]


def _of(root: Path) -> Layout:
    layout = Layout.__new__(Layout)
    layout.root = root
    return layout


def test_tree_that_only_looks_like_an_image_is_a_tree(store: LayerStore, data: Path) -> None:
    tree = data / "tree"
    tree.mkdir()
    (tree / "manifest.json").write_text('{"name": "an extension of a browser"}')
    (tree / "index.json").write_text("[]")
    with tarfile.open(data / "tree.tar", "w") as out:
        out.add(tree, ".")
    for source in (tree, data / "tree.tar"):
        entry = import_environment(store, "it", source)
        assert store.stack(entry.digest) is None


def test_image_can_be_kept_as_the_tree_it_lies_in(store: LayerStore, data: Path) -> None:
    entry = import_environment(store, "it", image(data, "image", BASE), Wanted("directory"))
    assert store.stack(entry.digest) is None


def test_same_image_again_is_no_new_version_and_reads_no_layer(store: LayerStore, data: Path) -> None:
    root = image(data, "image", BASE, MIDDLE, TOP)
    first = import_environment(store, "it", root)
    for blob in (root / "blobs/sha256").iterdir():
        if blob.read_bytes()[:1] != b"{":
            blob.unlink()
    lines: list[str] = []
    assert import_environment(store, "it", root, progress=lines.append) == first
    assert [line.split(":")[1] for line in lines] == [" known, sha256"] * 3
    assert [entry.version for entry in store.catalog.entries()] == [1]


def test_layer_that_two_images_share_is_converted_once(
    store: LayerStore, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies below it, as long as that makes no difference; `TOP` goes through a link of `BASE`."""
    applied: list[str] = []
    real = changeset.apply
    monkeypatch.setattr(changeset, "apply", lambda *given: [applied.append(given[3]), real(*given)][1])
    import_environment(store, "one", image(data, "one", BASE, OTHER, TOP))
    assert len(applied) == 3
    import_environment(store, "two", image(data, "two", BASE, MIDDLE, OTHER, TOP))
    assert applied[3:] == [f"layer {diff_id(MIDDLE)}"]
    import_environment(store, "three", image(data, "three", OTHER, TOP))
    assert applied[4:] == [f"layer {diff_id(TOP)}"], "there is no link on the way now"
    assert len(list(Conversions(store).of(diff_id(TOP)))) == 2
    assert len(files(store)) == 5


def test_removal_keeps_what_another_image_needs(store: LayerStore, data: Path) -> None:
    import_environment(store, "one", image(data, "one", BASE, OTHER))
    import_environment(store, "two", image(data, "two", BASE, MIDDLE))
    remove(store, "one")
    assert len(files(store)) == 2
    for layer in compose(EnvironmentRef(base="two"), store.resolve).layers:
        store.check(layer)
    assert not list(Conversions(store).of(diff_id(OTHER)))
    remove(store, "two")
    assert not files(store)
    assert not [path for path in store.root.rglob("*.json")]


def test_removed_layer_is_made_again(store: LayerStore, data: Path) -> None:
    root = image(data, "image", BASE, MIDDLE)
    first = import_environment(store, "it", root)
    remove(store, "it")
    assert import_environment(store, "it", root).digest == first.digest


def test_layer_removed_while_an_image_is_imported_is_told(
    store: LayerStore, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_environment(store, "one", image(data, "one", BASE))
    root = image(data, "two", BASE, OTHER)
    real = changeset.apply
    monkeypatch.setattr(changeset, "apply", lambda *given: [remove(store, "one"), real(*given)][1])
    with pytest.raises(CreateFailed, match="removed meanwhile"):
        import_environment(store, "two", root)
    monkeypatch.undo()
    remove(store, "two") if store.catalog.entries() else None
    import_environment(store, "two", root)


def test_images_that_share_layers_can_be_stacked(store: LayerStore, data: Path) -> None:
    import_environment(store, "base", image(data, "one", BASE, OTHER))
    import_environment(store, "more", image(data, "two", BASE, MIDDLE))
    layers = compose(EnvironmentRef(base="base", toolkits=("more",)), store.resolve).layers
    assert len({layer.digest for layer in layers}) == len(layers) == 3


def test_image_with_too_many_layers_is_refused(store: LayerStore, data: Path) -> None:
    with pytest.raises(InvalidRequest, match="101 layers, at most 100"):
        import_environment(store, "it", image(data, "image", *(tar([file(f"f{i}")]) for i in range(101))))
    nothing_left(store)


MALICIOUS = {
    "depth": file("/".join("d" * 2000), b"x"),
    "a device": file("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    "dots": file("../../../../../../etc/barchan-was-here", b"x"),
    "an attribute": folder("d", xattrs={"trusted.overlay.redirect": b"/etc"}),
}


@pytest.mark.parametrize("case", MALICIOUS)
def test_malicious_layer_is_refused_and_nothing_is_left(store: LayerStore, data: Path, case: str) -> None:
    """CASES 12: layers of images."""
    member = MALICIOUS[case]
    before = held(data)
    with pytest.raises(InvalidRequest) as caught:
        import_environment(store, "it", image(data, "image", BASE, MIDDLE, tar([file("ok"), member])))
    assert repr(member[0].name) in caught.value.message
    assert caught.value.phase == "convert"
    nothing_left(store)
    assert held(data) == before
    assert not Path("/etc/barchan-was-here").exists()


def test_looking_below_leaves_no_mount_and_no_descriptor(store: LayerStore, data: Path) -> None:
    before = held(data)
    import_environment(store, "it", image(data, "image", BASE, MIDDLE, TOP))
    with lower.mounted([layer.path for layer in compose(EnvironmentRef(base="it"), store.resolve).layers]) as found:
        assert found.look((b"lib",)).target == b"usr"
        assert found.look((b"etc", b"base")).kind == "absent"
    assert held(data) == before


def barchan(data: Path, *argv: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "barchan.cli.main", "env", *argv, "--data", str(data / "server")]
    return subprocess.run(command, capture_output=True, check=False)


def test_command_imports_with_progress_on_stderr(data: Path) -> None:
    layout = Layout(data / "image")
    layout.add("one", [BASE])
    layout.add("two", [BASE, MIDDLE])
    done = barchan(data, "import", "it", str(layout.root), "--image", "two", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == 1
    assert b"layer 2 of 2: converting" in done.stderr
    assert barchan(data, "import", "it", str(layout.root), "--image", "one").returncode == 0
    listed = barchan(data, "ls", "--json")
    assert [entry["version"] for entry in json.loads(listed.stdout)] == [1, 2]


def test_command_names_phase_and_remedy(data: Path) -> None:
    layout = Layout(data / "image")
    layout.add("one", [BASE])
    layout.add("two", [MIDDLE])
    done = barchan(data, "import", "it", str(layout.root), "--json")
    assert done.returncode != 0
    error = json.loads(done.stderr)
    assert (error["phase"], error["code"]) == ("resolve", "invalid_request")
    assert "--image: one, two" in error["hint"]


def test_killed_import_leaves_nothing_behind(store: LayerStore, data: Path) -> None:
    """It dies while it waits for a blob that never comes; the next one cleans up after it."""
    root = image(data, "image", BASE, TOP)
    program = (
        "import sys; from pathlib import Path; from barchan.layers import changeset, sources; "
        "from barchan.layers.store import LayerStore; real = changeset.apply\n"
        "def stop(*given):\n    real(*given); print('there', flush=True); sys.stdin.read()\n"
        "changeset.apply = stop\n"
        "sources.import_environment(LayerStore(Path(sys.argv[1])), 'it', Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, str(store.root), str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"there\n"
        process.kill()
    assert list((store.root / "tmp").iterdir())
    import_environment(store, "other", image(data, "other", OTHER))
    remove(store, "other")
    nothing_left(store)
