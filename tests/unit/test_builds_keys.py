"""By what a step is known again: all that its result depends on, and nothing else."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barchan.builds.context import LocalContext
from barchan.builds.dockerfile import Place
from barchan.builds.keys import first_key, step_key, step_name
from barchan.builds.steps import Copy, Inline, MakeDirectory, Run
from barchan.builds.trees import Looks, Owner, archive_items, directory_items, inline_item, is_archive, local_items
from barchan.errors import FileFailure
from barchan.names import BUILD_STEP, SCRATCH
from barchan.sdk._tree import TreeReader

HERE = Place("Dockerfile", 3)
RUN = Run(place=HERE, text="RUN a", argv=("/bin/sh", "-c", "a"), env={"A": "1", "B": "2"}, user="ann", workdir="/w")
COPY = Copy(place=HERE, text="COPY a b", sources=("a",), target="/b", owner="ann", mode=0o644)
MADE = MakeDirectory(place=HERE, text="WORKDIR /w", path="/w", user="ann")


def key(step: Any, before: str = "k", network: str = "deny", copied: Any = None, **changes: Any) -> str:
    return step_key(before, msgspec.structs.replace(step, **changes), network=network, copied=copied)


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (RUN, {"argv": ("/bin/sh", "-c", "b")}),
        (RUN, {"argv": ("/bin/sh -c", "a")}),
        (RUN, {"env": {"A": "1"}}),
        (RUN, {"env": {"A": "12", "B": ""}}),
        (RUN, {"user": ""}),
        (RUN, {"workdir": "/"}),
        (RUN, {"script": Inline("/x", "a")}),
        (RUN, {"before": "j"}),
        (RUN, {"network": "open"}),
        (COPY, {"target": "/b/"}),
        (COPY, {"owner": ""}),
        (COPY, {"mode": None}),
        (COPY, {"unpack": True}),
        (COPY, {"inline": (Inline("x", "a"),)}),
        (COPY, {"copied": [("a", [("", "f", 0o644, "digest")])]}),
        (COPY, {"before": "j"}),
        (MADE, {"path": "/x"}),
        (MADE, {"user": ""}),
        (MADE, {"before": "j"}),
    ],
)
def test_what_makes_a_difference(step: Any, changes: dict[str, Any]) -> None:
    before, network = changes.pop("before", "k"), changes.pop("network", "deny")
    copied = changes.pop("copied", None)
    assert step_key(before, msgspec.structs.replace(step, **changes), network=network, copied=copied) != key(step)


@pytest.mark.parametrize(
    "changes",
    [
        {"place": Place("other/Dockerfile", 9)},
        {"text": "RUN  a"},
        {"hidden": {"HTTP_PROXY": "x"}},
        {"env": {"B": "2", "A": "1"}},
    ],
)
def test_what_makes_none(changes: dict[str, Any]) -> None:
    assert key(RUN, **changes) == key(RUN)


def test_keys_are_what_they_were() -> None:
    """Another version of barchan must not take up what this one has not made: whoever changes a key changes `_FORMAT`."""
    assert first_key("sha256:x")[:12] == "39021a20d655"
    assert key(RUN)[:12] == "036f6be5a8de"
    assert key(COPY, copied=[("a", [("\udc80", "f", 0o644, "x")])])[:12] == "526c8a907f13"


def test_names_of_steps_are_names_that_no_one_else_has() -> None:
    assert BUILD_STEP.fullmatch(step_name(key(RUN))) and BUILD_STEP.fullmatch(SCRATCH)
    assert step_name(key(RUN)) != step_name(key(MADE)) != SCRATCH


# --- what is sent


def items(pieces: Iterable[bytes]) -> Iterator[tuple[Any, ...]]:
    """Path, kind, mode, owner and content of each."""
    reader, head, content = TreeReader(), None, b""
    for item in (one for piece in pieces for one in reader.feed(piece)):
        if isinstance(item, bytes):
            content += item
            if item:
                continue
        else:
            head, content = item, b""
            if item.kind == "f":
                continue
        assert head is not None
        owner = (head.uid, head.gid)
        yield head.path, head.kind, head.mode, owner, content if head.kind == "f" else head.target
    reader.end()


def test_what_is_sent_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "d/in").mkdir(parents=True, mode=0o750)
    (tmp_path / "d/in").chmod(0o750)
    (tmp_path / "d/in/big").write_bytes(b"x" * 300_000)
    (tmp_path / "d/in/big").chmod(0o640)
    (tmp_path / "d/link").symlink_to("in/big")
    (source,) = LocalContext(tmp_path).find("d")
    sent = list(items(local_items(source, "", Looks(Owner(1, 2)))))
    assert sent == [
        (b"in", "d", 0o750, (1, 2), b""),
        (b"in/big", "f", 0o640, (1, 2), b"x" * 300_000),
        (b"link", "l", 0o777, (1, 2), b"in/big"),
    ]
    forced = list(items(local_items(source, "", Looks(mode=0o711))))
    assert [(mode, owner) for _, _, mode, owner, _ in forced] == [(0o711, (0, 0)), (0o711, (0, 0)), (0o777, (0, 0))]


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one")
    (source,) = LocalContext(tmp_path).find("file")
    (tmp_path / "file").write_text("two")
    with pytest.raises(FileFailure, match="changed while it was copied"):
        list(local_items(source, "file", Looks()))
    (tmp_path / "file").unlink()
    (tmp_path / "file").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="Too many levels"):
        list(local_items(source, "file", Looks()))


def test_other_items() -> None:
    assert list(items(inline_item("x", "é", Looks(Owner(3, 3))))) == [(b"x", "f", 0o644, (3, 3), "é".encode())]
    assert [path for path, *_ in items(directory_items([b"a", b"b"], Looks()))] == [b"a", b"a/b"]


def archive(path: Path, *members: tuple[str, bytes, dict[str, Any]], mode: str = "w") -> str:
    with tarfile.open(path, mode) as made:
        for name, content, fields in members:
            info = tarfile.TarInfo(name)
            info.size, info.uid, info.gid = len(content), 7, 8
            for field, value in fields.items():
                setattr(info, field, value)
            made.addfile(info, io.BytesIO(content))
    return str(path)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_what_is_sent_of_an_archive(tmp_path: Path, mode: str) -> None:
    link, hard = {"type": tarfile.SYMTYPE, "linkname": "../x"}, {"type": tarfile.LNKTYPE, "linkname": "./a/b"}
    local = archive(
        tmp_path / "x.tar",
        ("./a/b", b"content", {"mode": 0o4755}),
        ("/l", b"", link),
        ("h", b"", hard),
        ("./", b"", {"type": tarfile.DIRTYPE}),
        mode=mode,
    )
    assert is_archive(local)
    assert list(items(archive_items(local, Looks(None)))) == [
        (b"a", "d", 0o755, (0, 0), b""),
        (b"a/b", "f", 0o4755, (7, 8), b"content"),
        (b"l", "l", 0o777, (7, 8), b"../x"),
        (b"h", "f", 0o644, (7, 8), b"content"),
    ]
    assert {owner for *_, owner, _ in items(archive_items(local, Looks(Owner(1, 1))))} == {(1, 1)}


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("../x", {}, "leads out"),
        ("a/../../x", {}, "leads out"),
        ("x", {"type": tarfile.CHRTYPE}, "device"),
        ("x", {"type": tarfile.FIFOTYPE}, "device or FIFO"),
        ("x", {"type": tarfile.LNKTYPE, "linkname": "none"}, "cannot be unpacked"),
    ],
)
def test_archives_that_are_refused(tmp_path: Path, name: str, fields: dict[str, Any], why: str) -> None:
    local = archive(tmp_path / "x.tar", (name, b"", fields))
    with pytest.raises(FileFailure, match=why):
        list(archive_items(local, Looks()))


def test_an_archive_that_is_cut_is_refused(tmp_path: Path) -> None:
    local = archive(tmp_path / "x.tar", ("x", os.urandom(100_000), {}))
    os.truncate(local, 50_000)
    with pytest.raises(FileFailure, match="cannot be unpacked"):
        list(archive_items(local, Looks()))


@pytest.mark.parametrize("content", [b"", b"text", b"\x1f\x8b broken"])
def test_what_is_no_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar.gz").write_bytes(content)
    assert not is_archive(str(tmp_path / "x.tar.gz"))
