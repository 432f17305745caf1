"""`barchan layer ls`, `cat` and `diff`: what is in layers, without a sandbox. Names and contents are strangers' bytes."""

from __future__ import annotations

import codecs
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from barchan.cli.session import Session, data_option, json_option
from barchan.cli.stores import open_store
from barchan.cli.text import plain, plain_lines, span
from barchan.errors import FileFailure, FileIsDirectory, FileMissing, InvalidRequest
from barchan.sizes import size

if TYPE_CHECKING:
    from barchan.layers.store import Layer, LayerStore
    from barchan.layers.view import Entry, View

PIECE = 1 << 20
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
    stat.S_IFSOCK: "socket",
}
_YEAR_9999 = 253_402_300_799


@click.command("ls")
@click.argument("reference", metavar="[REF]", required=False)
@click.argument("path", metavar="[PATH]", required=False, type=click.UNPROCESSED, default="/")
@click.option("-R", "--recursive", is_flag=True, help="All that is below PATH.")
@click.option("--layer", "number", type=click.IntRange(1), metavar="N", help="Of the Nth layer alone, 1 is the lowest.")
@click.option("--all", "every", is_flag=True, help="Of each layer alone, the highest first.")
@data_option
@json_option
@click.pass_obj
def ls_command(
    session: Session, reference: str | None, path: str, recursive: bool, number: int | None, every: bool, data: Path
) -> None:
    """List the layers of this host, or what REF holds at PATH.

    Without REF: each layer with its size, the names that reach it, and whether it is mounted.

    REF is an environment, and shown as a sandbox would see it; or the digest of one layer. Of a layer alone, removals are shown as
    `w---------`, and a directory that hides what lies below it is marked `(opaque)`. Owners are numbers, times in UTC.
    """
    store = open_store(data)
    if reference is None:
        return _inventory(session, store, data)
    if number is not None and every:
        raise InvalidRequest("layer: --layer and --all exclude each other", field="layer")
    image = store.resolve(reference)
    found = 0
    for layers, alone in _chosen(image, number, every):
        if every and not session.json:
            click.echo(f"{layers[0].digest}:")
        found += _list(session, store, (layers, alone), os.fsencode(path), recursive, missing=every)
    if not found and every:
        raise FileMissing(f"{plain(path)}: no layer of {reference} has it")


def _chosen(image: Layer, number: int | None, every: bool) -> Iterator[tuple[tuple[Layer, ...], bool]]:
    """Layers, top first, that are looked at together; whether one is looked at alone."""
    from barchan.layers.view import stack_of

    stack = stack_of(image)
    if every:
        yield from (((layer,), True) for layer in stack)
    elif number is None:
        yield stack, image.reference == image.digest
    elif number > len(stack):
        raise InvalidRequest(f"layer: there are {len(stack)} layers, not {number}", field="layer")
    else:
        yield (stack[-number],), True


def _list(
    session: Session,
    store: LayerStore,
    what: tuple[tuple[Layer, ...], bool],
    path: bytes,
    recursive: bool,
    missing: bool,
) -> int:
    """How many entries. With `missing`, a layer that lacks the path is passed over."""
    from barchan.layers.view import View, opened

    layers, alone = what
    with opened(store, layers) as below:
        view = View(below, whiteouts=alone)
        try:
            top = view.find(path)
        except FileFailure:
            if missing:
                return 0
            raise
        count = 0
        for entry in _listed(view, top, path, recursive):
            count += 1
            _show(session, view, entry, layers[entry.layer].digest, alone)
        return count


def _listed(view: View, top: Entry, path: bytes, recursive: bool) -> Iterator[Entry]:
    if top.folder is None:
        yield view.find(path, follow=False)
    elif recursive:
        yield from view.walk(top.folder)
    else:
        yield from view.entries(top.folder)


def _show(session: Session, view: View, entry: Entry, digest: str, alone: bool) -> None:
    state = entry.state
    target = view.target(entry) if stat.S_ISLNK(state.st_mode) else b""
    opaque = alone and entry.folder is not None and entry.folder.opaque
    if session.json:
        return session.emit(entry_document(entry, digest, target, opaque))
    mode = "w---------" if entry.whiteout else stat.filemode(state.st_mode)
    owner = f"{state.st_uid}:{state.st_gid}"
    amount = "" if entry.whiteout else str(state.st_size)
    link = f" -> {plain(target)}" if target else ""
    mark = " (opaque)" if opaque else ""
    click.echo(f"{mode} {owner:>11} {amount:>11} {moment(state.st_mtime_ns)} {path_text(entry.path)}{link}{mark}")


def entry_document(entry: Entry, digest: str, target: bytes, opaque: bool) -> dict[str, Any]:
    """The names of `FileStat`."""
    state = entry.state
    return {
        **path_document(entry.path),
        "kind": "whiteout" if entry.whiteout else _KINDS[stat.S_IFMT(state.st_mode)],
        "size": state.st_size,
        "mode": stat.S_IMODE(state.st_mode),
        "uid": state.st_uid,
        "gid": state.st_gid,
        "mtime_ns": state.st_mtime_ns,
        "target": target.decode("utf-8", "replace"),
        "layer": digest,
        **({"opaque": True} if opaque else {}),
    }


def path_document(path: tuple[bytes, ...]) -> dict[str, str]:
    """`path_hex` tells the bytes of a path that is not UTF-8."""
    raw = b"/" + b"/".join(path)
    text = raw.decode("utf-8", "replace")
    return {"path": text} if text.encode() == raw else {"path": text, "path_hex": raw.hex()}


def path_text(path: tuple[bytes, ...]) -> str:
    return plain(b"/" + b"/".join(path))


def moment(ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(min(max(ns // 10**9, 0), _YEAR_9999)))


def _inventory(session: Session, store: LayerStore, data: Path) -> None:
    from barchan.cli.tables import show
    from barchan.config import Layout
    from barchan.layers.inventory import inventory
    from barchan.layers.mount import LayerMounts

    found = inventory(store, LayerMounts(Layout(Path(os.path.abspath(data))).mounts, store).mounted())
    if session.json:
        return session.emit(found)
    now = time.time()
    rows = [
        (
            one.digest,
            size(one.size),
            "mounted" if one.mounted else "",
            "" if one.unused_since is None else span(max(now - one.unused_since, 0)),
            ", ".join(one.names),
        )
        for one in found
    ]
    show(("digest", ">size", "state", ">unused", "names"), rows)


@click.command("cat")
@click.argument("reference", metavar="REF")
@click.argument("path", metavar="PATH", type=click.UNPROCESSED)
@data_option
@json_option
@click.pass_obj
def cat_command(session: Session, reference: str, path: str, data: Path) -> None:
    """Write one file of REF to standard output, byte by byte.

    Links are resolved inside REF. On a terminal control characters are shown as escapes. --json is for errors only.
    """
    from barchan.layers.view import View, opened, stack_of

    store = open_store(data)
    with opened(store, stack_of(store.resolve(reference))) as below:
        view = View(below)
        entry = view.find(os.fsencode(path))
        if entry.folder is not None:
            raise FileIsDirectory(f"{plain(path)} is a directory", hint="`barchan layer ls` lists it")
        if not stat.S_ISREG(entry.state.st_mode):
            raise FileFailure(f"{plain(path)} is a {_KINDS[stat.S_IFMT(entry.state.st_mode)]}, not a file")
        with view.content(entry) as fd:
            _show_text(fd) if sys.stdout.isatty() else _copy(fd)


def _copy(fd: int) -> None:
    sys.stdout.flush()
    while piece := os.read(fd, PIECE):
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def _show_text(fd: int) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    while piece := os.read(fd, PIECE):
        _write_plain(decoder.decode(piece))
    _write_plain(decoder.decode(b"", final=True))
    sys.stdout.flush()


def _write_plain(text: str) -> None:
    sys.stdout.write("\t".join(plain_lines(part) for part in text.split("\t")))


@click.command("diff")
@click.argument("old", metavar="A")
@click.argument("new", metavar="B")
@click.option("--times", is_flag=True, help="Also what differs in its time of modification alone.")
@data_option
@json_option
@click.pass_obj
def diff_command(session: Session, old: str, new: str, times: bool, data: Path) -> None:
    """Say what is different in B, by path: A added, D deleted, M modified, T of another type.

    A and B are environments, compared as sandboxes would see them; of two digests of layers, what the layers bring and remove.
    """
    from barchan.layers.compare import Side, compare
    from barchan.layers.view import View, opened, stack_of

    store = open_store(data)
    images = store.resolve(old, "A"), store.resolve(new, "B")
    alone = all(image.reference == image.digest for image in images)
    one, two = (stack_of(image) for image in images)
    with opened(store, one) as before, opened(store, two) as after:
        sides = [
            Side(View(below, whiteouts=alone), [layer.digest for layer in stack])
            for below, stack in ((before, one), (after, two))
        ]
        for change in compare(*sides, times=times):
            if session.json:
                session.emit({**path_document(change.path), "status": change.status, "changed": change.what})
            else:
                click.echo(f"{change.status} {path_text(change.path)}")
