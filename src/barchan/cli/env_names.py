"""`barchan env` tag, alias, lock, ls and rm: the names of this host's layer store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import to_builtins

from barchan.cli.connect import Where, open_client
from barchan.cli.session import Session, data_option, json_option
from barchan.cli.stores import existing_store, open_store
from barchan.cli.text import plain, span
from barchan.errors import BarchanError, EnvironmentNotFound, InvalidRequest
from barchan.names import BUILD_STEP
from barchan.sizes import size

if TYPE_CHECKING:
    from barchan.layers.catalog import NameEntry
    from barchan.layers.store import LayerStore


@click.command("tag")
@click.argument("name", metavar="NAME[@VERSION]")
@click.argument("tag")
@data_option
@json_option
@click.pass_obj
def tag_command(session: Session, name: str, tag: str, data: Path) -> None:
    """Let NAME:TAG mean a version of NAME, the newest unless it is said, until it is moved or removed with `env rm`."""
    from barchan.layers.pointers import set_tag

    entry = set_tag(open_store(data), name, tag)
    if session.json:
        session.emit({"tag": f"{entry.name}:{tag}", "reference": entry.reference, "digest": entry.digest})
    else:
        click.echo(f"{entry.name}:{tag}  {entry.reference}")


@click.command("alias")
@click.argument("name")
@click.argument("target")
@data_option
@json_option
@click.pass_obj
def alias_command(session: Session, name: str, target: str, data: Path) -> None:
    """Let NAME stand for TARGET wherever an environment is named, until it is set anew or removed with `env rm`.

    TARGET is NAME, NAME@VERSION, NAME:TAG, a digest, an image (docker://debian:12) or another alias.
    """
    from barchan.layers.pointers import set_alias

    set_alias(open_store(data), name, target)
    session.emit({"alias": name, "target": target}) if session.json else click.echo(f"{name}  {plain(target)}")


@click.command("lock")
@click.argument("environment", metavar="ENV")
@click.option("--workspace", metavar="LAYER", help="Layer on top of the environment.")
@click.option("-T", "--toolkit", "toolkits", metavar="LAYER", multiple=True, help="Layer on top of all; repeatable.")
@data_option
@json_option
@click.pass_obj
def lock_command(
    session: Session, environment: str, workspace: str | None, toolkits: tuple[str, ...], data: Path
) -> None:
    """Print a lock file: what ENV, workspace and toolkits are now, by version and by digest of every layer.

    `barchan run ./env.lock` and `barchan create ./env.lock` make sandboxes of exactly that, here or on another host that has it.
    """
    from barchan.environments import EnvironmentRef, check_environment
    from barchan.layers.locking import lock

    wanted = EnvironmentRef(base=environment, workspace=workspace, toolkits=toolkits)
    check_environment(wanted)
    locked = lock(open_store(data), wanted)
    session.emit(locked) if session.json else click.echo(str(locked), nl=False)


@click.command("ls")
@click.option("--all", "every", is_flag=True, help="Also what builds keep of their steps.")
@data_option
@json_option
@click.pass_obj
def ls_command(session: Session, every: bool, data: Path) -> None:
    """List the layers by name and version, with the tags and aliases that mean them."""
    import time

    from barchan.cli.tables import show

    store = existing_store(data)
    from barchan.layers.pointers import names_of

    entries = [e for e in store.catalog.entries() if every or not BUILD_STEP.fullmatch(e.name)] if store else []
    tags = names_of(store.catalog) if store else {}
    if session.json:
        session.emit([{**to_builtins(entry), "tags": tags.get(entry.reference, ())} for entry in entries])
        return
    now = time.time()
    named = {e.reference for e in entries if e.name != e.reference}
    rows = [
        (
            e.name if e.manifest else e.reference,
            " ".join(tags.get(e.reference, ())),
            size(e.size),
            span(now - e.created),
            e.digest[:19],
            e.source,
        )
        for e in entries
        if e.name != e.reference or e.reference not in named
    ]
    shown = {name for names in tags.values() for name in names}
    aliases = store.catalog.aliases() if store else {}
    rows += [(alias, "", "", "", "", f"for {aliases[alias]}") for alias in sorted(aliases.keys() - shown)]
    show(("name", "tags", ">size", ">age", "digest", "source"), rows, ("tags", "source"))


@click.command("rm")
@click.argument("references", metavar="NAME[@VERSION]...", nargs=-1, required=True)
@click.option("--all", "every", is_flag=True, help="Every version of each NAME.")
@data_option
@json_option
@click.pass_obj
def rm_command(session: Session, references: tuple[str, ...], every: bool, data: Path) -> int:
    """Remove layers, or a tag NAME:TAG, or an alias. NAME alone must have one version only, or be meant with --all.

    Sandboxes made of them go on, and how many there are is said. The room on the disk comes back some ten minutes later, or with
    `barchan layer gc --grace 0`; that of running sandboxes when they have ended.
    """
    store = existing_store(data)
    removed = [_remove(session, store, reference, every, data) for reference in references]
    return 0 if all(removed) else 1


def _remove(session: Session, store: LayerStore | None, reference: str, every: bool, data: Path) -> bool:
    """One of several: the others are removed even if this one cannot be."""
    try:
        if store is None:
            raise EnvironmentNotFound(f"no environment {reference!r}", hint="`barchan env ls` lists what is here")
        if not every:
            check_one_meant(store, reference)
        removed = store.remove(reference)
    except BarchanError as error:
        session.report(error)
        return False
    users = _users(removed, data)
    session.emit({"removed": reference, "in_use": users}) if session.json else click.echo(plain(reference))
    if users and not session.json:
        session.note(
            f"barchan: {plain(reference)}: {users} running made of it; its image stays on the disk until they end"
        )
    return True


def _users(removed: tuple[NameEntry, ...], data: Path) -> int:
    """How many sandboxes of the server on this host, if there is one, were made of these."""
    import asyncio

    from barchan.config import Layout

    return asyncio.run(_count(removed, data)) if Layout(data).api_socket.exists() else 0


async def _count(removed: tuple[NameEntry, ...], data: Path) -> int:
    try:
        async with open_client(Where(data=data), reconnect=0) as client:
            found = [await client.list(environment=name) for name in {entry.reference for entry in removed}]
    except BarchanError:
        return 0
    return len({info.id for some in found for info in some})


def check_one_meant(store: LayerStore, reference: str) -> None:
    """Elsewhere NAME is the newest version; a removal of all of them must be asked for."""
    versions = [entry.version for entry in store.catalog.entries() if entry.name == reference]
    if len(versions) > 1:
        raise InvalidRequest(
            f"{reference} has {len(versions)} versions",
            field="name",
            hint=f"`barchan env rm {reference}@{max(versions)}` removes the newest, --all all of them",
        )
