# Generated from tests/e2e/test_cases_images.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""Images made to go wrong, imported and looked at from a sandbox. Against another unpacker: tests/host/test_oci_umoci.py."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.sync import Client, Limits, Sandbox
from tests.e2e.conftest import BUSYBOX
from tests.images import Layout, Member, file, folder, hardlink, symlink, tar
from tests.server import Server, once

MIB = 1 << 20
BASE = [
    *(folder(name) for name in ("bin", "etc", "proc", "sys", "dev", "tmp")),
    file("bin/sh", BUSYBOX.read_bytes(), mode=0o755),
    file("etc/passwd", b"root:x:0:0::/root:/bin/sh\n"),
    folder("d", 0o750, uid=3, gid=4),
    file("d/gone", b"gone"),
    file("d/kept", b"kept"),
    folder("opaque"),
    file("opaque/old", b"old"),
    folder("again"),
    file("again/old", b"old"),
    folder("usr/lib", 0o700),
    symlink("lib", "usr/lib"),
    symlink("absolute", "/usr"),
    symlink("up", "../../../../usr"),
    file("one", b"linked", mode=0o4755, uid=7, xattrs={"user.note": b"kept"}),
    hardlink("two", "one"),
]
SECOND = [
    file("d/.wh.gone"),
    folder("opaque", 0o711),
    file("opaque/.wh..wh..opq"),
    file("opaque/new", b"new"),
    file(".wh.again"),
    file("lib/through", b"relative"),
    file("absolute/through", b"absolute"),
    file("up/through2", b"up"),
    file("odd\n\udcff name", b"odd"),
    file("fifo", type=tarfile.FIFOTYPE, mode=0o622),
    file("sg", b"x", mode=0o2755, gid=9),
]
THIRD = [folder("again", 0o701), file("again/fresh", b"fresh"), hardlink("three", "two")]
SEEN = {
    b"d": ("directory", 0o750, 3, 4),
    b"d/kept": ("file", 0o644, 0, 0),
    b"opaque": ("directory", 0o711, 0, 0),
    b"opaque/new": ("file", 0o644, 0, 0),
    b"again": ("directory", 0o701, 0, 0),
    b"again/fresh": ("file", 0o644, 0, 0),
    b"usr/lib/through": ("file", 0o644, 0, 0),
    b"usr/through": ("file", 0o644, 0, 0),
    b"usr/through2": ("file", 0o644, 0, 0),
    b"lib": ("symlink", 0o777, 0, 0),
    b"one": ("file", 0o4755, 7, 0),
    b"two": ("file", 0o4755, 7, 0),
    b"three": ("file", 0o4755, 7, 0),
    b"odd\n\xff name": ("file", 0o644, 0, 0),
    b"fifo": ("fifo", 0o622, 0, 0),
    b"sg": ("file", 0o2755, 0, 9),
}
GONE = {b"d/gone", b"opaque/old", b"again/old", b"d/.wh.gone", b".wh.again", b"opaque/.wh..wh..opq"}


@pytest.fixture
def imaged(client: Client, server: Server, tmp_path: Path) -> Iterator[Sandbox]:
    """A sandbox of an image of three layers."""
    layout = Layout(tmp_path / "image")
    layout.add("test", [tar(BASE), tar(SECOND), tar(THIRD)])
    name = once(server, "odd-image", "import", "odd-image", str(layout.root))
    with client.create(name, limits=Limits(memory=64 * MIB, disk=32 * MIB)) as box:
        yield box


def test_a_sandbox_sees_what_the_layers_say(imaged: Sandbox) -> None:
    """CASES 12: whiteouts, opaque directories, re-adds, hard links, linked parents, absolute links, set-id, odd names."""
    seen = {entry.path: entry for entry in imaged.files.list("/", depth=3)}
    assert {path: (e.kind, e.mode, e.uid, e.gid) for path, e in seen.items() if path in SEEN} == SEEN
    assert not GONE & set(seen)
    assert [seen[name].nlink for name in (b"one", b"two", b"three")] == [3, 3, 3]
    for path, content in ((b"/absolute/lib/through", b"relative"), (b"/up/through2", b"up"), (b"/three", b"linked")):
        assert imaged.files.read(path) == content
    imaged.files.write("/d/gone", b"mine")
    imaged.files.remove("/opaque", recursive=True)
    imaged.files.mkdir("/opaque")
    assert [entry.path for entry in imaged.files.list("/opaque")] == [], "what is hidden stays so"
    assert imaged.files.read("/d/gone") == b"mine"


MALICIOUS: dict[str, list[Member]] = {
    "dots": [file("../../../../../../../etc/barchan-was-here", b"x")],
    "through an absolute link": [symlink("out", "/etc"), file("out/../../../etc/barchan-was-here", b"x")],
    "hard link out": [hardlink("shadow", "../../../etc/shadow")],
    "device": [file("disk", type=tarfile.BLKTYPE, devmajor=8, devminor=0)],
    "forged whiteout": [file("w", type=tarfile.CHRTYPE, devmajor=0, devminor=0)],
    "redirect": [folder("x", xattrs={"trusted.overlay.redirect": b"/etc"})],
}


@pytest.mark.parametrize("case", MALICIOUS)
def test_a_malicious_layer_is_refused(server: Server, tmp_path: Path, case: str) -> None:
    """CASES 12: by a typed error that names the phase; nothing outside is touched and no environment appears."""
    layout = Layout(tmp_path / "image")
    layout.add("test", [tar(BASE), tar([file("fine", b"x"), *MALICIOUS[case]])])
    argv = server.command("env", "import", "malicious", str(layout.root), "--json")
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    error = json.loads(done.stderr.splitlines()[-1])
    error = error.get("error", error)
    assert done.returncode != 0 and (error["code"], error["phase"]) == ("invalid_request", "convert"), done.stderr
    assert not Path("/etc/barchan-was-here").exists()
    assert "malicious" not in {layer["name"] for layer in server.run("env", "ls")}
