"""`barchan layer export`: what it writes is read by others, comes back the same, and is the same every time."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from barchan.errors import InvalidRequest, NodeStorageFull
from barchan.kernel import syscalls
from barchan.layers.blobs import make
from barchan.layers.export import Wanted, export, file_at
from barchan.layers.sources import import_environment
from tests import trees
from tests.host.layer_site import Site, opened
from tests.host.layer_strategies import histories
from tests.host.test_oci_umoci import BASE, CASES
from tests.images import EPOCH, Member, file, folder
from tests.terminals import LocalTerminal

CONFIG = {
    "Env": ["PATH=/bin", "A=b=c"],
    "User": "nobody",
    "WorkingDir": "/srv",
    "Entrypoint": ["/bin/sh", "-c"],
    "Cmd": ["a b"],
    "Labels": {"org.example": "1"},
}
TOP = [
    folder("d", 0o700, xattrs={"user.note": b"new"}),
    file("d/.wh.one"),
    folder("usr"),
    file("usr/.wh..wh..opq"),
    file("usr/new", b"n"),
]
WAYS = [
    Wanted(),
    Wanted(flat=True),
    Wanted(compression="none"),
    Wanted(compression="zstd"),
    Wanted("docker"),
    Wanted("docker", compression="gzip", flat=True),
    Wanted("tar"),
    Wanted("tar", compression="zstd"),
]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with opened() as found:
        found.image("it", [BASE, TOP], config={"config": CONFIG})
        yield found


def written(site: Site, ref: str, wanted: Wanted = WAYS[0]) -> Path:
    path = site.root / site.fresh("exported")
    with file_at(path) as out:
        export(site.store, ref, out, wanted)
    return path


def returned(site: Site, ref: str, wanted: Wanted) -> str:
    """Its name after an import of its export."""
    path, name = written(site, ref, wanted), site.fresh("returned")
    import_environment(site.store, name, path)
    path.unlink()
    return name


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {info.name: info for info in archive.getmembers()}


@pytest.mark.parametrize("wanted", WAYS, ids=lambda wanted: f"{wanted.format}-{wanted.compression}-{wanted.flat}")
def test_it_comes_back_the_same(site: Site, wanted: Wanted) -> None:
    """Owners, modes, times, attributes, capabilities, hard links."""
    name = returned(site, "it", wanted)
    assert not trees.differences(site.seen(name), site.seen("it"))
    if wanted.format != "tar":
        assert site.store.resolve(name).config == site.store.resolve("it").config
    if wanted.format != "tar" and not wanted.flat:
        assert site.store.catalog.entry(name, 1).digest == site.store.catalog.entry("it", 1).digest


@pytest.mark.parametrize("case", CASES)
def test_each_case_comes_back_the_same(site: Site, case: str) -> None:
    name = site.fresh("case")
    site.image(name, [BASE, *CASES[case]])
    assert not trees.differences(site.seen(returned(site, name, WAYS[2])), site.seen(name))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(histories())
def test_random_images_come_back_the_same(site: Site, history: list[list[Member]]) -> None:
    name = site.fresh("random")
    site.accepted(name, history)
    for wanted in (Wanted(compression="none"), Wanted("tar")):
        assert not trees.differences(site.seen(returned(site, name, wanted)), site.seen(name))


def test_times_are_exact(site: Site) -> None:
    tree = site.root / "times"
    tree.mkdir()
    for at, moment in enumerate((1, 987_654_321, EPOCH * 10**9 + 123_456_789, EPOCH * 10**9 + 999_999_999)):
        (tree / str(at)).touch()
        os.utime(tree / str(at), ns=(0, moment))
    os.utime(tree, ns=(0, EPOCH * 10**9 + 5))
    import_environment(site.store, "times", tree)
    assert site.seen("times")[b"3"][3] == EPOCH * 10**9 + 999_999_999
    for wanted in (WAYS[0], Wanted("tar")):
        assert not trees.differences(site.seen(returned(site, "times", wanted)), site.seen("times"))


def test_names_that_are_long_or_odd(site: Site) -> None:
    long = [file("/".join(["n" * 254] * 15 + [b"\xff\n\\".decode("utf-8", "surrogateescape")]), b"l")]
    site.image("long", [BASE, long])
    for wanted in (WAYS[0], WAYS[4], Wanted("tar")):
        assert not trees.differences(site.seen(returned(site, "long", wanted)), site.seen("long"))


@pytest.mark.parametrize("wanted", WAYS, ids=lambda wanted: f"{wanted.format}-{wanted.compression}-{wanted.flat}")
def test_it_is_the_same_every_time(site: Site, wanted: Wanted) -> None:
    digests = {hashlib.sha256(written(site, "it", wanted).read_bytes()).hexdigest() for _ in range(2)}
    assert len(digests) == 1


def test_removals_are_written_as_oci_has_them(site: Site) -> None:
    archive = tarfile.open(written(site, "it", WAYS[4]))  # noqa: SIM115
    with archive:
        layers = json.load(archive.extractfile("manifest.json") or io.BytesIO())[0]["Layers"]
        tar = archive.extractfile(layers[1])
        assert tar
        assert list(members(tar.read())) == [".", "d", "d/.wh.one", "usr", "usr/.wh..wh..opq", "usr/new"]
    flat = members(written(site, "it", Wanted("tar")).read_bytes())
    assert not [name for name in flat if ".wh." in name] and "usr/new" in flat


def inspected(reference: str, *more: str) -> Any:
    if not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed")
    done = subprocess.run(["skopeo", "inspect", *more, reference], capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)


@pytest.mark.parametrize("wanted", WAYS[:6], ids=lambda wanted: f"{wanted.format}-{wanted.compression}-{wanted.flat}")
def test_skopeo_reads_it(site: Site, wanted: Wanted) -> None:
    path = site.root / site.fresh("skopeo")
    argv = ["--format", wanted.format, *(["--flat"] if wanted.flat else [])]
    argv += ["--compress", wanted.compression] if wanted.compression else []
    told = json.loads(site.run("export", "it", str(path), *argv, "--json").stdout)
    transport = "docker-archive" if wanted.format == "docker" else "oci-archive"
    found = inspected(f"{transport}:{path}")
    assert (found["Os"], found["Architecture"]) == ("linux", "amd64")
    assert found["Labels"] == CONFIG["Labels"] and len(found["Layers"]) == (1 if wanted.flat else 2)
    if wanted.format == "oci":
        assert found["Digest"] == told["digest"]
    config = inspected(f"{transport}:{path}", "--config")
    assert {**config["config"], "Env": sorted(config["config"]["Env"])} == {**CONFIG, "Env": sorted(CONFIG["Env"])}
    assert config["rootfs"]["diff_ids"] == told["layers"] and len(config["history"]) == len(told["layers"])
    assert told["size"] == path.stat().st_size and path.stat().st_mode & 0o777 == 0o600


def podman(site: Site, *argv: str) -> str:
    if not shutil.which("podman"):
        pytest.skip("podman is not installed")
    where = ["--root", str(site.root / "podman"), "--runroot", str(site.root / "podman-run"), "--storage-driver", "vfs"]
    done = subprocess.run(["podman", *where, *argv], capture_output=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@pytest.mark.parametrize("form", ["oci", "docker"])
def test_podman_loads_it_and_shows_the_same(site: Site, form: str) -> None:
    path = site.root / site.fresh("podman")
    site.run("export", "it", str(path), "--format", form, "--tag", f"localhost/loaded-{form}:7")
    assert f"localhost/loaded-{form}:7" in podman(site, "load", "-i", str(path))
    mounted = podman(site, "image", "mount", f"localhost/loaded-{form}:7")
    try:
        theirs = trees.describe(Path(mounted), 1 << 40)
        ours = {**site.seen("it"), b".": theirs[b"."]}  # the root gets the time of the unpacking
        assert not trees.differences(ours, theirs)
    finally:
        podman(site, "image", "unmount", "--all", "--force")


def test_umoci_unpacks_the_same(site: Site) -> None:
    if not shutil.which("umoci"):
        pytest.skip("umoci is not installed")
    layout = site.root / "layout"
    with tarfile.open(written(site, "it")) as archive:
        archive.extractall(layout)
    index = json.loads((layout / "index.json").read_text())
    assert index["manifests"][0]["annotations"].pop("org.opencontainers.image.ref.name") == "localhost/it:1"
    index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"] = "it"  # umoci takes no other names
    (layout / "index.json").write_text(json.dumps(index))
    command = ["umoci", "raw", "unpack", "--image", f"{layout}:it", str(site.root / "unpacked")]
    subprocess.run(command, capture_output=True, check=True)
    assert not trees.differences(trees.describe(site.root / "unpacked", 1 << 40), site.seen("it"))


def test_standard_output(site: Site) -> None:
    out = site.run("export", "it", "-").stdout
    assert out == written(site, "it").read_bytes()
    assert json.loads(site.run("export", "it", "-", "--json", code=1).stderr)["field"] == "json"
    with LocalTerminal(site.command("export", "it", "-")) as terminal:
        terminal.until(b"an archive is not for a terminal")


def test_a_reader_that_goes_away_is_no_error(site: Site) -> None:
    site.image("big", [[file("big", os.urandom(1 << 20))]])
    command = site.command("export", "big", "-")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.read(1)
        process.stdout.close()
        assert b"error" not in process.stderr.read()
        assert process.wait(30) == 141


def test_a_file_that_is_there_is_replaced_when_the_new_one_is_whole(site: Site) -> None:
    target = site.root / "replaced"
    target.write_text("before")
    with file_at(target) as out:
        export(site.store, "it", out)
        assert target.read_text() == "before"
    assert tarfile.is_tarfile(target)


def test_a_name_that_would_mean_a_removal_is_refused(site: Site) -> None:
    tree = site.root / "named"
    tree.mkdir()
    (tree / ".wh.x").touch()
    import_environment(site.store, "named", tree)
    target = site.root / "kept"
    target.write_text("what was there")
    with pytest.raises(InvalidRequest, match="means a removal"), file_at(target) as out:
        export(site.store, "named", out)
    assert target.read_text() == "what was there"
    assert not [path for path in site.root.iterdir() if path.name.startswith(".kept")]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("it", "{}/data"), "file_is_directory"),
        (("it", "{}/nowhere/file"), "file_failure"),
        (("it", "/dev/null"), "invalid_request"),
        (("it", "{}/f", "--tag", "UPPER"), "invalid_request"),
        (("it", "{}/f", "--format", "docker", "--compress", "zstd"), "invalid_request"),
        (("absent", "{}/f"), "environment_not_found"),
    ],
)
def test_refusals(site: Site, argv: Sequence[str], code: str) -> None:
    done = site.run("export", *(word.format(site.root) for word in argv), code=1)
    assert f"[{code}]".encode() in done.stderr
    assert not (site.root / "f").exists()


@pytest.fixture
def full() -> Iterator[Path]:
    """A disk with little room."""
    fd = syscalls.new_mount("tmpfs", [("size", "256k")])
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def test_a_full_disk_has_a_name(site: Site, full: Path) -> None:
    site.image("large", [[file("large", os.urandom(1 << 20))]])
    with pytest.raises(NodeStorageFull, match="no room for"), file_at(full / "out") as out:
        export(site.store, "large", out)
    assert os.listdir(full) == []


@pytest.mark.parametrize("way", ["none", "gzip", "zstd"])
def test_a_full_disk_of_the_store_has_a_name(full: Path, way: Any) -> None:
    with pytest.raises(NodeStorageFull, match="no room for layer 1"):
        make(full / "blob", way, "layer 1", lambda out: [out.write(os.urandom(1 << 16)) for _ in range(64)] and None)


def test_attributes_that_tar_cannot_hold_are_counted(site: Site) -> None:
    tree = site.root / "attributes"
    tree.mkdir()
    (tree / "f").touch()
    os.setxattr(tree / "f", "user.empty", b"")
    os.setxattr(tree / "f", "user.a=b", b"1")
    os.setxattr(tree / "f", "user.kept", b"1")
    import_environment(site.store, "attributes", tree)
    done = site.run("export", "attributes", str(site.root / "attributes.tar"))
    assert b"2 extended attributes left out" in done.stderr
