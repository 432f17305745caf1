"""`barchan layer ls` and `cat`: what layers hold is what sandboxes see, and nothing of the host."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest

from barchan.layers.gc import collect
from tests.host.layer_site import Site, opened
from tests.images import EPOCH, file, folder, hardlink, symlink
from tests.terminals import LocalTerminal

HOSTILE = "bad\x1b[2J\u202ename\n"
BASE = [
    folder("./", 0o751),
    folder("etc"),
    file("etc/passwd", b"root of the image\n"),
    file("etc/gone", b"old"),
    folder("opt", 0o750, uid=3, gid=4),
    file("opt/old", b"old"),
    folder("usr"),
    folder("usr/lib", mtime=EPOCH - 60),
    file("usr/lib/data", bytes(range(256)) * 5000, mode=0o4755),
    symlink("lib", "usr/lib"),
    symlink("up", "../../../../etc/passwd"),
    symlink("absolute", "/etc/passwd"),
    symlink("round", "round"),
    symlink("usr/lib/deep", "/etc"),
    symlink("usr/lib/above", "../../../../../../etc/passwd"),
    symlink("host", "/proc/self/environ"),
    hardlink("linked", "etc/passwd"),
    file("fifo", type=tarfile.FIFOTYPE, mode=0o622),
    file(HOSTILE, b"text \x1b[31mred\x07\tok\n\xff\n"),
    file("\udcff\udcfe", b"bytes"),
]
TOP = [
    file("etc/.wh.gone"),
    folder("opt"),
    file("opt/.wh..wh..opq"),
    file("opt/new", b"new"),
    file("usr/lib/more", b"more"),
]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with opened() as found:
        found.image("it", [BASE, TOP])
        yield found


def listed(site: Site, *argv: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in site.run("ls", *argv, "--json").stdout.splitlines()]


def raw(entry: dict[str, Any]) -> bytes:
    return bytes.fromhex(entry["path_hex"]) if "path_hex" in entry else entry["path"].encode()


def test_it_shows_what_a_sandbox_would_see(site: Site) -> None:
    found = {raw(entry): entry for entry in listed(site, "it", "-R")}
    with site.overlay("it") as root:
        there = {b"/" + os.fsencode(path.relative_to(root)): path.lstat() for path in root.rglob("*")}
        assert found.keys() == there.keys()
        for path, state in there.items():
            entry = found[path]
            got = (entry["mode"], entry["uid"], entry["gid"], entry["mtime_ns"])
            assert got == (stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid, state.st_mtime_ns), path
            if not stat.S_ISDIR(state.st_mode):
                assert entry["size"] == state.st_size
    assert found[b"/lib"]["target"] == "usr/lib" and found[b"/fifo"]["kind"] == "fifo"
    assert list(found) == sorted(found, key=lambda path: path.split(b"/"))


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/usr/lib", ["/usr/lib/above", "/usr/lib/data", "/usr/lib/deep", "/usr/lib/more"]),
        ("lib", ["/usr/lib/above", "/usr/lib/data", "/usr/lib/deep", "/usr/lib/more"]),
        ("/lib/../lib/./more", ["/usr/lib/more"]),
        ("/../../usr", ["/usr/lib"]),
        ("/opt", ["/opt/new"]),
        ("absolute", ["/absolute"]),
        ("host", None),
    ],
)
def test_paths_are_resolved_inside_the_image(site: Site, path: str, names: list[str] | None) -> None:
    if names is None:
        assert json.loads(site.run("ls", "it", path, "--json", code=1).stderr)["code"] == "file_missing"
    else:
        assert [entry["path"] for entry in listed(site, "it", path)] == names


def test_a_layer_alone_shows_what_it_takes_away(site: Site) -> None:
    top, bottom = site.store.resolve("it").digest, site.store.resolve("it").below[0].digest
    for argv in (("it", "--layer", "2"), (top,)):
        lines = site.run("ls", *argv, "-R").stdout.decode().splitlines()
        assert [(line.split()[0], line.split(" /")[-1]) for line in lines] == [
            ("drwxr-xr-x", "etc"),
            ("w---------", "etc/gone"),
            ("drwxr-xr-x", "opt (opaque)"),
            ("-rw-r--r--", "opt/new"),
            ("drwxr-xr-x", "usr"),
            ("drwxr-xr-x", "usr/lib"),
            ("-rw-r--r--", "usr/lib/more"),
        ]
    each = listed(site, "it", "/opt", "--all")
    assert [(entry["path"], entry["layer"]) for entry in each] == [("/opt/new", top), ("/opt/old", bottom)]
    assert b"there are 2 layers" in site.run("ls", "it", "--layer", "3", code=1).stderr
    assert site.run("ls", "it", "/nowhere", "--all", code=1).stderr


def test_names_cannot_move_the_cursor_or_forge_a_line(site: Site) -> None:
    for argv in (("it",), ("it", "--json")):
        out = site.run("ls", *argv).stdout
        assert b"\x1b" not in out and "\u202e".encode() not in out and b"\xff" not in out
    assert b"bad\\x1b[2J\\u202ename\\n" in site.run("ls", "it").stdout


@pytest.mark.parametrize(
    "path", ["etc/passwd", "/linked", "up", "absolute", "lib/deep/passwd", "lib/above", "lib/../../etc/passwd"]
)
def test_cat_follows_links_inside_the_image(site: Site, path: str) -> None:
    assert site.run("cat", "it", path).stdout == b"root of the image\n"


def test_cat_is_exact(site: Site) -> None:
    assert site.run("cat", "it", "usr/lib/data").stdout == bytes(range(256)) * 5000
    assert site.run("cat", "it", b"\xff\xfe").stdout == b"bytes"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("etc", "file_is_directory"),
        ("fifo", "file_failure"),
        ("round", "file_failure"),
        ("host", "file_missing"),
        ("etc/gone", "file_missing"),
        ("etc/passwd/x", "file_not_directory"),
        ("n" * 300, "file_failure"),
    ],
)
def test_cat_refuses_by_name(site: Site, path: str, code: str) -> None:
    assert f"[{code}]".encode() in site.run("cat", "it", path, code=1).stderr


def test_on_a_terminal_text_stays_text(site: Site) -> None:
    with LocalTerminal(site.command("cat", "it", HOSTILE)) as terminal:
        terminal.until(b"text \\x1b[31mred\\x07\tok\r\n\\xff\r\n")


def test_a_reader_that_goes_away_is_no_error(site: Site) -> None:
    with subprocess.Popen(
        site.command("cat", "it", "usr/lib/data"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as it:
        assert it.stdout and it.stderr
        it.stdout.read(1)
        it.stdout.close()
        assert it.stderr.read() == b""
        assert it.wait(20) == 141


def test_a_damaged_layer_is_not_mounted(site: Site) -> None:
    site.image("damaged", [[file("x", b"damaged content")]])
    image = site.store.resolve("damaged").path / "data"
    data = bytearray(image.read_bytes())
    data[data.index(b"damaged")] ^= 1
    image.chmod(0o600)
    image.write_bytes(data)
    for command in (("ls", "damaged"), ("cat", "damaged", "x")):
        assert b"[layer_corrupt]" in site.run(*command, code=1).stderr


def test_layers_are_listed_with_their_users(site: Site) -> None:
    site.image("other", [BASE])
    site.image("lost", [[file("lost", b"lost")]])
    lost = site.store.resolve("lost").digest
    site.store.remove("lost")
    collect(site.store, now=EPOCH)
    found = {entry["digest"]: entry for entry in json.loads(site.run("ls", "--json").stdout)}
    image = site.store.resolve("it")
    assert found[image.digest]["names"] == ["it@1"] and found[image.digest]["unused_since"] is None
    assert found[image.below[0].digest]["names"] == ["it@1", "other@1"]
    assert found[lost]["names"] == [] and found[lost]["unused_since"] == EPOCH
    assert found[lost]["size"] == site.store.size(lost)
    assert lost.encode() in site.run("ls").stdout
