"""`barchan env profile`: how much of an environment is read by those who use it, on this host, as root."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from barchan.cli.session import Session, data_option, json_option
from barchan.cli.stores import open_store
from barchan.cli.tables import show
from barchan.cli.text import plain
from barchan.sizes import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from barchan.layers.access import LayerAccess


@click.command("profile")
@click.argument("environment")
@click.option(
    "--files", type=click.IntRange(0), metavar="N", default=0, help="Show the N files of which most was read."
)
@click.option("--save", is_flag=True, help="Read the same ahead on every host when a layer is first used there.")
@click.option("--discard", is_flag=True, help="Read nothing ahead any more.")
@click.option(
    "--reset", is_flag=True, help="Afterwards begin anew: what was read is forgotten, and read again when needed."
)
@data_option
@json_option
@click.pass_obj
def profile_command(
    session: Session, environment: str, files: int, save: bool, discard: bool, reset: bool, data: Path
) -> None:
    """Say which files of ENVIRONMENT its sandboxes read, and how many bytes.

    Of all sandboxes of this host, since a layer was first used here, with what the kernel read ahead, as far as memory kept it.
    """
    from barchan.config import Layout
    from barchan.layers import access, prefetch
    from barchan.layers.mount import LayerMounts

    store = open_store(data)
    layer = store.resolve(environment)
    layers = (*layer.below, layer)
    mounts = LayerMounts(Layout(data).mounts, store)
    seen = access.profile(mounts, layers)
    for one in seen:
        if save and one.mounted:
            prefetch.save(store, one)
        if discard:
            prefetch.remove(store, one.digest)
    if reset:
        access.forget(mounts, layers)
    session.emit(_document(seen, files)) if session.json else _print(session, seen, files)


def _document(seen: Sequence[LayerAccess], files: int) -> dict[str, Any]:
    return {
        "bytes": sum(one.size for one in seen),
        "read": sum(one.bytes_read for one in seen),
        "layers": [
            {
                "digest": one.digest,
                "mounted": one.mounted,
                "files": one.files,
                "files_read": len(one.read),
                "bytes": one.size,
                "read": one.bytes_read,
            }
            for one in seen
        ],
        "most_read": [{"path": path, "bytes": length, "read": read} for path, length, read in _most(seen, files)],
    }


def _most(seen: Sequence[LayerAccess], number: int) -> list[tuple[str, int, int]]:
    every = ((file.path.decode(errors="backslashreplace"), file.size, file.read) for one in seen for file in one.read)
    return sorted(every, key=lambda file: (-file[2], file[0]))[:number]


def _print(session: Session, seen: Sequence[LayerAccess], files: int) -> None:
    rows = [
        (one.digest[:19], size(one.size), str(one.files), size(one.bytes_read), str(len(one.read)), _share([one]))
        if one.mounted
        else (one.digest[:19], "", "", "", "", "not mounted")
        for one in seen
    ]
    show(("layer", ">size", ">files", ">read", ">files read", ">share"), rows)
    if files:
        click.echo()
        show(
            ("file", ">size", ">read"),
            [("/" + plain(path), size(all_), size(read)) for path, all_, read in _most(seen, files)],
        )
    read, whole = sum(one.bytes_read for one in seen), sum(one.size for one in seen)
    session.note(f"{size(read)} of {size(whole)} read: {_share(seen)}")


def _share(seen: Sequence[LayerAccess]) -> str:
    whole = sum(one.size for one in seen)
    return f"{100 * sum(one.bytes_read for one in seen) / whole:.1f} %" if whole else "-"
