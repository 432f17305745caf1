"""`barchan layer`: the content behind environments, on this host, as root; and `pack`, which asks a server."""

from __future__ import annotations

from pathlib import Path

import click

from barchan.cli import layer_archives, layer_files
from barchan.cli.pack import pack_command
from barchan.cli.session import FILE, Session, data_option, json_option
from barchan.cli.stores import open_store
from barchan.cli.tables import show
from barchan.cli.text import plain
from barchan.cli.values import SIZE
from barchan.errors import Conflict
from barchan.sizes import size


@click.group()
def layer() -> None:
    """What environments are made of, what is in it, and what of it nobody needs."""


for command in (
    layer_files.ls_command,
    layer_files.cat_command,
    layer_files.diff_command,
    layer_archives.export_command,
    layer_archives.collapse_command,
):
    layer.add_command(command)


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
    from barchan.layers import holds
    from barchan.layers.gc import collect

    store = open_store(data)
    found = collect(store, grace=grace, dry_run=dry_run, held=holds.of_all(store))
    if session.json:
        session.emit({"removed": found.removed, "waiting": found.waiting, "bytes": found.freed, "dry_run": dry_run})
        return
    for one in found.removed:
        click.echo(f"{one.digest}  {size(one.size)}")
    session.note(
        f"{'would remove' if dry_run else 'removed'} {len(found.removed)}, {size(found.freed)}; {len(found.waiting)} not yet"
    )


@layer.command("scrub")
@click.option("--rate", type=SIZE, help="Bytes a second to read at most.  [default: no limit]")
@click.option("--no-fetch", is_flag=True, help="Do not fetch damaged images from their registries again.")
@click.option("--registry-auth", type=FILE, help="Login file, as `skopeo login` writes it.")
@click.option("--registries-conf", type=FILE, help="Mirrors and registries without TLS: containers-registries.conf(5).")
@data_option
@json_option
@click.pass_obj
def scrub_command(
    session: Session,
    rate: int | None,
    no_fetch: bool,
    registry_auth: Path | None,
    registries_conf: Path | None,
    data: Path,
) -> int:
    """Read every layer whole, and compare it with its digest.

    A damaged one is not used for new sandboxes until it is whole again. Exit status 1 when one stays damaged. A server does the
    same by and by.
    """
    import os

    from barchan.config import Layout, RegistryAccess
    from barchan.layers.mount import LayerMounts
    from barchan.layers.pull import pull
    from barchan.layers.scrubber import scrub

    store = open_store(data)
    access = RegistryAccess(auth_file=registry_auth, registries_conf=registries_conf)
    found = scrub(store, rate=rate or 0, mend=None if no_fetch else lambda ref: pull(store, ref, access=access))
    if found is None:
        raise Conflict("somebody else reads the layers of this store at the moment", hint="try again later")
    mounts = LayerMounts(Layout(Path(os.path.abspath(data))).mounts, store)
    mounts.close(mounts.mounted() & {one.digest for one in found.damaged})
    if session.json:
        session.emit(found)
    for one in () if session.json else found.damaged:
        click.echo(f"{one.digest}  {', '.join(map(plain, one.names)) or 'no environment'}")
        session.note(plain(f"{one.why}; {'fetched again' if one.mended else one.remedy}"))
    session.note(f"{found.layers} layers, {size(found.size)} read; {len(found.damaged)} damaged")
    return 1 if any(not one.mended for one in found.damaged) else 0


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
