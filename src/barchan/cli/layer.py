"""`barchan layer`: the content behind environments, on this host, as root; and `pack`, which asks a server."""

from __future__ import annotations

from pathlib import Path

import click

from barchan.cli.env import open_store
from barchan.cli.pack import pack_command
from barchan.cli.session import Session, data_option, json_option
from barchan.cli.tables import show
from barchan.sizes import size


@click.group()
def layer() -> None:
    """What environments are made of, and what of it nobody needs."""


layer.add_command(pack_command)


@layer.command("gc")
@click.option(
    "--grace", type=click.FloatRange(0), default=600.0, show_default=True, help="Seconds that it must have been unused."
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@data_option
@json_option
@click.pass_obj
def gc_command(session: Session, grace: float, dry_run: bool, data: Path) -> None:
    """Remove layers that no environment reaches.

    A server does it by itself. Sandboxes go on; the disk space of a layer comes back when the last one made of it has ended.
    """
    from barchan.layers.gc import collect

    found = collect(open_store(data), grace=grace, dry_run=dry_run)
    if session.json:
        session.emit({"removed": found.removed, "waiting": found.waiting, "bytes": found.freed, "dry_run": dry_run})
        return
    for one in found.removed:
        click.echo(f"{one.digest}  {size(one.size)}")
    session.note(
        f"{'would remove' if dry_run else 'removed'} {len(found.removed)}, {size(found.freed)}; {len(found.waiting)} not yet"
    )


@layer.command("du")
@data_option
@json_option
@click.pass_obj
def du_command(session: Session, data: Path) -> None:
    """Say what takes how much room: by name what it reaches, what no other name shares, and what no name reaches."""
    from barchan.layers.usage import usage

    found = usage(open_store(data))
    if session.json:
        session.emit(found)
        return
    rows = [(one.name, size(one.total), size(one.own), str(one.layers)) for one in found.names]
    show(("name", ">all", ">own", ">layers"), rows)
    session.note(f"{size(found.stored)} stored, {size(found.unused)} of it unused")
