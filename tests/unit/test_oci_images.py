"""Which image is meant, and that every part of it is what its digest says before it is used."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from barchan.errors import BarchanError, FeatureMissing, InvalidRequest, NodeStorageFull
from barchan.images import ImageConfig
from barchan.layers import compression, oci_blobs
from barchan.layers.oci_blobs import Archive, Directory, blob_name
from barchan.layers.oci_schema import parse_platform
from barchan.layers.oci_select import Image, layout_image
from barchan.layers.sources import TYPES, Wanted, import_environment
from barchan.layers.store import LayerStore
from tests.images import CONFIG, INDEX, MANIFEST, Layout, docker_archive, file, folder, packed, tar

AMD64 = parse_platform("linux/amd64")
LAYER = tar([folder("d"), file("d/f", b"content")])
OTHER = tar([file("other", b"o")])


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "image")


def chosen(layout: Layout, tag: str = "", platform: str = "linux/amd64") -> Image:
    return layout_image(Directory(layout.root), tag, parse_platform(platform))


def diff_ids(*layers: bytes) -> list[str]:
    return [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]


def test_only_image_needs_no_name(layout: Layout) -> None:
    process = {"Env": ["PATH=/bin", "A=b=c", "EMPTY="], "WorkingDir": "/w", "User": "1:2", "Entrypoint": ["/x"]}
    layout.add("", [LAYER, OTHER], config={"config": process, "unknown": {"field": 1}})
    image = chosen(layout)
    assert [part.diff_id for part in image.layers] == diff_ids(LAYER, OTHER)
    env = {"PATH": "/bin", "A": "b=c", "EMPTY": ""}
    assert image.config == ImageConfig(env=env, workdir="/w", user="1:2", entrypoint=("/x",))


@pytest.mark.parametrize(
    "process", [{"Env": ["A=\0"]}, {"User": "a\0"}, {"WorkingDir": "/\0"}, {"Cmd": ["a\0"]}, {"Entrypoint": ["\0"]}]
)
def test_a_configuration_that_no_program_can_get_is_refused(layout: Layout, process: dict[str, object]) -> None:
    layout.add("", [LAYER], config={"config": process})
    with pytest.raises(InvalidRequest) as refused:
        chosen(layout)
    assert refused.value.phase == "resolve" and "configuration" in refused.value.message


def test_a_relative_directory_begins_at_the_top(layout: Layout) -> None:
    layout.add("", [LAYER], config={"config": {"WorkingDir": "srv/app"}})
    assert chosen(layout).config.workdir == "/srv/app"


def test_image_is_chosen_by_tag_or_digest(layout: Layout) -> None:
    layout.add("one", [LAYER])
    other = layout.add("two", [OTHER])
    assert chosen(layout, "one").layers[0].diff_id == diff_ids(LAYER)[0]
    assert chosen(layout, "two") == chosen(layout, other["digest"])
    with pytest.raises(InvalidRequest, match="2 images") as caught:
        chosen(layout)
    assert "one, two" in caught.value.hint
    with pytest.raises(InvalidRequest, match="no image 'three'"):
        chosen(layout, "three")


def index_of(layout: Layout, *entries: dict[str, Any]) -> None:
    layout.entries.append(layout.json({"schemaVersion": 2, "manifests": list(entries)}, INDEX))
    layout.index()


def platform(name: str) -> dict[str, Any]:
    return {"platform": dict(zip(("os", "architecture", "variant"), name.split("/"), strict=False))}


def test_platform_is_chosen_from_nested_indexes(layout: Layout) -> None:
    arm = {"os": "linux", "architecture": "arm64"}
    attestation = {"annotations": {"vnd.docker.reference.type": "attestation-manifest"}, **platform("unknown/unknown")}
    index_of(
        layout,
        layout.manifest([LAYER], **platform("linux/amd64")),
        layout.manifest([OTHER], config=arm, **platform("linux/arm64/v8")),
        layout.manifest([OTHER], **attestation),
    )
    assert chosen(layout).layers[0].diff_id == diff_ids(LAYER)[0]
    assert chosen(layout, platform="linux/arm64").layers[0].diff_id == diff_ids(OTHER)[0]
    assert chosen(layout, platform="linux/arm64/v8") == chosen(layout, platform="linux/arm64")
    with pytest.raises(InvalidRequest, match="no image for linux/s390x") as caught:
        chosen(layout, platform="linux/s390x")
    assert "linux/amd64, linux/arm64/v8" in caught.value.hint


def test_image_for_another_machine_is_refused(layout: Layout) -> None:
    layout.add("", [LAYER], config={"architecture": "arm64"})
    with pytest.raises(InvalidRequest, match="for linux/arm64, not for linux/amd64"):
        chosen(layout)
    assert chosen(layout, platform="linux/arm64").layers


@pytest.mark.parametrize("text", ["", "linux", "linux/amd64/v1/x", "linux/", "Linux/amd64", "../x"])
def test_what_is_no_platform_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_platform(text)
    assert caught.value.field == "platform"


def test_indexes_do_not_nest_without_end(layout: Layout) -> None:
    entry = layout.manifest([LAYER])
    for _ in range(20):
        entry = layout.json({"schemaVersion": 2, "manifests": [entry]}, INDEX)
    layout.entries.append(entry)
    layout.index()
    with pytest.raises(InvalidRequest, match="nested"):
        chosen(layout)


WRONG: dict[str, Callable[[Layout], Any]] = {
    "no JSON": lambda layout: (layout.root / "index.json").write_text("{"),
    "deep JSON": lambda layout: (layout.root / "index.json").write_text("[" * 100_000),
    "not UTF-8": lambda layout: (layout.root / "index.json").write_bytes(b'{"manifests": ["\xff"]}'),
    "no list": lambda layout: (layout.root / "index.json").write_text('{"manifests": {}}'),
    "other version": lambda layout: (layout.root / "oci-layout").write_text('{"imageLayoutVersion": "2.0"}'),
    "no version": lambda layout: (layout.root / "oci-layout").write_text("{}"),
    "too large": lambda layout: (layout.root / "index.json").write_bytes(b" " * (oci_blobs.MOST_DOCUMENT + 1)),
    "missing": lambda layout: (layout.root / "index.json").unlink(),
    "a FIFO": lambda layout: [(layout.root / "index.json").unlink(), os.mkfifo(layout.root / "index.json")],
    "empty": lambda layout: (layout.root / "index.json").write_text('{"manifests": []}'),
}
ENTRY = {"mediaType": MANIFEST, "digest": "sha256:" + "0" * 64, "size": 10}
for _field, _value in {
    "digest": ["sha256:../../../etc/passwd", "md5:00", "sha256:" + "A" * 64, "../x", 5, None],
    "size": [-1, 1.5, "1", 1 << 70, None],
    "mediaType": [5, "text/plain", ""],
}.items():
    for _bad in _value:
        WRONG[f"{_field} {str(_bad)[:30]}"] = lambda layout, bad={**ENTRY, _field: _bad}: (
            layout.root / "index.json"
        ).write_text(json.dumps({"manifests": [bad]}))


@pytest.mark.parametrize("case", WRONG)
def test_document_that_is_wrong_is_refused(layout: Layout, case: str) -> None:
    layout.add("", [LAYER])
    WRONG[case](layout)
    with pytest.raises(InvalidRequest) as caught:
        chosen(layout)
    assert caught.value.phase in ("resolve", "pull")
    assert caught.value.field == "source"


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer diff ids": ({"rootfs": {"type": "layers", "diff_ids": []}}, "1 layers and 0 diff ids"),
    "no diff ids": ({"rootfs": {}}, "diff_ids"),
    "wrong diff id": ({"rootfs": {"diff_ids": ["sha256:/etc/passwd"]}}, "diff_ids"),
    "environment": ({"config": {"Env": "PATH=/"}}, "Env"),
    "windows": ({"os": "windows"}, "windows"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config_that_is_wrong_is_refused(layout: Layout, case: str) -> None:
    config, said = CONFIGS[case]
    layout.add("", [LAYER], config=config)
    with pytest.raises(InvalidRequest) as caught:
        chosen(layout)
    assert said in str(caught.value)
    assert caught.value.phase == "resolve"


def test_layer_of_an_unknown_kind_is_refused(layout: Layout) -> None:
    blob = layout.blob(LAYER, "application/vnd.oci.image.layer.v1.tar+encrypted")
    config = layout.json({"architecture": "amd64", "rootfs": {"diff_ids": diff_ids(LAYER)}}, CONFIG)
    layout.entries.append(layout.json({"config": config, "layers": [blob]}, MANIFEST))
    layout.index()
    with pytest.raises(InvalidRequest, match="encrypted"):
        chosen(layout)


def blobs(layout: Layout) -> dict[str, str]:
    """Digest of each kind of blob of an image with one layer."""
    manifest = layout.entries[0]["digest"]
    document = json.loads((layout.root / blob_name(manifest)).read_bytes())
    return {"manifest": manifest, "config": document["config"]["digest"], "layer": document["layers"][0]["digest"]}


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "missing", "a directory", "a FIFO"])
@pytest.mark.parametrize("blob", ["manifest", "config", "layer"])
def test_damaged_blob_is_named_and_nothing_is_made(layout: Layout, tmp_path: Path, blob: str, damage: str) -> None:
    layout.add("", [LAYER])
    digest = blobs(layout)[blob]
    path = layout.root / blob_name(digest)
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    data = data[:-1] if damage == "shorter" else data + b" " if damage == "longer" else data
    if damage == "a directory":
        path.mkdir()
    elif damage == "a FIFO":
        os.mkfifo(path)
    elif damage != "missing":
        path.write_bytes(data)
    store = LayerStore(tmp_path / "layers")
    with pytest.raises(InvalidRequest) as caught:
        import_environment(store, "x", layout.root)
    assert digest.removeprefix("sha256:") in caught.value.message
    assert caught.value.phase == "pull"
    nothing_left(store)


def nothing_left(store: LayerStore) -> None:
    assert store.catalog.entries() == ()
    left = [path for path in store.root.rglob("*") if path.is_file() and path.name != "lock"]
    assert not left
    assert not list((store.root / "tmp").iterdir())


def test_layer_that_is_not_what_the_image_means_is_refused(layout: Layout, tmp_path: Path) -> None:
    """The blob is what its digest says, but unpacks to other content than the config names."""
    layout.add("", [LAYER], config={"rootfs": {"diff_ids": diff_ids(OTHER)}})
    store = LayerStore(tmp_path / "layers")
    with pytest.raises(InvalidRequest, match=blobs(layout)["layer"]) as caught:
        import_environment(store, "x", layout.root)
    assert caught.value.phase == "pull"
    nothing_left(store)


@pytest.mark.parametrize("way", ["", "gzip", "zstd"])
def test_layers_unpack_whatever_their_compression(tmp_path: Path, way: str) -> None:
    path = tmp_path / "blob"
    path.write_bytes(packed(LAYER * 50, way)[0])
    with path.open("rb") as source:
        found = compression.unpack(source, tmp_path / "out", "it")
    assert (tmp_path / "out").read_bytes() == LAYER * 50
    assert found == hashlib.sha256(LAYER * 50).hexdigest()


@pytest.mark.parametrize("way", ["gzip", "zstd"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "followed"])
def test_damaged_compression_is_refused(tmp_path: Path, way: str, damage: str) -> None:
    content = os.urandom(100_000)
    data = bytearray(packed(content, way)[0])
    if damage == "flipped":
        data[len(data) // 2] ^= 0x55
    path = tmp_path / "blob"
    path.write_bytes(data[:-20] if damage == "cut" else data + b"more" * (damage == "followed"))
    with pytest.raises(InvalidRequest, match="blob it") as caught, path.open("rb") as source:
        compression.unpack(source, tmp_path / "out", "blob it")
    assert caught.value.phase == "pull"


@pytest.mark.parametrize("way", ["gzip", "zstd"])
def test_bomb_is_stopped_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(compression, "MOST_UNPACKED", 10 << 20)
    path = tmp_path / "bomb"
    path.write_bytes(packed(bytes(200 << 20), way)[0])
    with pytest.raises(InvalidRequest, match="unpacks to more than") as caught, path.open("rb") as source:
        compression.unpack(source, tmp_path / "out", "bomb")
    assert caught.value.phase == "pull"
    assert (tmp_path / "out").stat().st_size <= 10 << 20


def test_disk_that_would_be_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_SPARE", 1 << 60)
    (tmp_path / "blob").write_bytes(LAYER)
    with pytest.raises(NodeStorageFull), (tmp_path / "blob").open("rb") as source:
        compression.unpack(source, tmp_path / "out", "it")


def test_absent_zstd_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blob").write_bytes(packed(LAYER, "zstd")[0])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FeatureMissing, match="zstd is not installed"), (tmp_path / "blob").open("rb") as source:
        compression.unpack(source, tmp_path / "out", "it")


def test_archive_gives_the_same_image_as_the_directory(layout: Layout, tmp_path: Path) -> None:
    layout.add("one", [LAYER, OTHER])
    archive = Archive(layout.archive(tmp_path / "image.tar"), "image.tar")
    assert layout_image(archive, "", AMD64) == chosen(layout)
    name = blob_name(blobs(layout)["layer"])
    with archive.open(name) as one, Directory(layout.root).open(name) as two:
        assert one.read() == two.read()
        one.seek(5)
        two.seek(5)
        assert one.read(10) == two.read(10)


def test_archive_reads_nothing_of_the_host(tmp_path: Path) -> None:
    """Links in an archive lead to its other members only."""
    link, hard = file("index.json", type=tarfile.SYMTYPE, linkname="/etc/hostname"), file("a", type=tarfile.LNKTYPE)
    hard[0].linkname = "../../etc/hostname"
    (tmp_path / "a.tar").write_bytes(tar([link, hard, file("l", type=tarfile.SYMTYPE, linkname="l")]))
    archive = Archive(tmp_path / "a.tar", "a.tar")
    for name in ("index.json", "a", "l", "/etc/hostname"):
        with pytest.raises(InvalidRequest, match="lacks"):
            archive.open(name)


@pytest.mark.parametrize("kind", TYPES)
def test_source_that_is_not_of_the_type_asked_for_is_refused(tmp_path: Path, kind: Any) -> None:
    store = LayerStore(tmp_path / "layers")
    (tmp_path / "tree").mkdir()
    (tmp_path / "x.tar").write_bytes(b"not one" * 100)
    source = tmp_path / ("x.tar" if kind in ("directory", "oci") else "tree")
    for path in (source, tmp_path / "x.tar" if kind != "directory" else source):
        with pytest.raises(BarchanError) as caught:
            import_environment(store, "x", path, Wanted(kind))
        assert caught.value.field in ("type", "source")
    nothing_left(store)


def test_docker_config_must_hash_to_its_name(tmp_path: Path) -> None:
    path = docker_archive(tmp_path / "d.tar", [LAYER])
    path.write_bytes(path.read_bytes().replace(b'"amd64"', b'"AMD64"'))
    store = LayerStore(tmp_path / "layers")
    with pytest.raises(InvalidRequest, match="is damaged"):
        import_environment(store, "x", path, Wanted("docker-archive"))
    nothing_left(store)


def test_gzip_with_several_members_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(gzip.compress(b"a" * 10) + gzip.compress(b"b" * 10))
    with (tmp_path / "blob").open("rb") as source:
        compression.unpack(source, tmp_path / "out", "it")
    assert (tmp_path / "out").read_bytes() == b"a" * 10 + b"b" * 10
