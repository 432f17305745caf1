"""`barchan env`: works on the layer store of this host, as root, without a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from barchan.cli.build import build_command
from barchan.cli.connect import Where, open_client, served, where_options
from barchan.cli.profile import profile_command
from barchan.cli.progress import busy
from barchan.cli.session import DIRECTORY, FILE, Session, data_option, json_option, need_root
from barchan.cli.text import plain, span
from barchan.config import RegistryAccess, default_data
from barchan.errors import BarchanError, EnvironmentNotFound, InvalidRequest
from barchan.names import BUILD_STEP
from barchan.sizes import size

if TYPE_CHECKING:
    from barchan.layers.catalog import NameEntry
    from barchan.layers.content import Format
    from barchan.layers.sources import SourceType
    from barchan.layers.store import Layer, LayerStore
    from barchan.wire.messages import EnvironmentInfo


@click.group()
def env() -> None:
    """The layers that sandboxes are made of."""


env.add_command(profile_command)
env.add_command(build_command)


def open_store(data: Path) -> LayerStore:
    """Made if it is not there."""
    from barchan.cli.datadir import prepare
    from barchan.config import Layout
    from barchan.layers.store import LayerStore

    need_root("barchan env")
    layout = Layout(Path(os.path.abspath(data)))
    prepare(layout)
    return LayerStore(layout.layers)


def _existing_store(data: Path) -> LayerStore | None:
    from barchan.config import Layout

    need_root("barchan env")
    return open_store(data) if Layout(Path(os.path.abspath(data))).layers.is_dir() else None


def layer_document(layer: Layer | NameEntry | EnvironmentInfo) -> dict[str, Any]:
    return {"name": layer.name, "version": layer.version, "digest": layer.digest, "size": layer.size}


def _announce(session: Session, layer: Layer | NameEntry, known: dict[str, int]) -> None:
    """`known`: the newest versions before."""
    unchanged = known.get(layer.name) == layer.version
    if session.json:
        session.emit({**layer_document(layer), "unchanged": unchanged})
    else:
        line = f"{layer.reference}  {layer.digest}  {size(layer.size)}"
        click.echo(f"{line}  unchanged" if unchanged else line)


def newest(store: LayerStore) -> dict[str, int]:
    """Version by name."""
    return {entry.name: entry.version for entry in store.catalog.entries()}


_FORMAT = click.option(
    "--format",
    "layer_format",
    type=click.Choice(["split", "packed"]),
    default="split",
    show_default=True,
    help="Packed layers are compressed: half the size, slower to read, and not in parts over a network.",
)
TYPES: tuple[SourceType, ...] = ("directory", "tar", "oci", "oci-archive", "docker-archive")
"""As in `barchan.layers.sources`, which is imported only when it is needed."""


def parse_source(text: str) -> tuple[Path, SourceType | None, str]:
    """Path, type and tag of `PATH` or `TYPE:PATH[:TAG]`. What exists under the whole text is a path, whatever it looks like."""
    kind, colon, rest = text.partition(":")
    if os.path.exists(text) or not colon or kind not in TYPES:
        path, found, tag = text, None, ""
    else:
        place, _, last = rest.rpartition(":")
        path, tag = (place, last) if place and not os.path.exists(rest) else (rest, "")
        found = kind
    if not os.path.exists(path):
        raise InvalidRequest(f"source: {path}: no such file or directory", field="source")
    return Path(path), found, tag


@env.command("import")
@click.argument("name")
@click.argument("source")
@click.option("--type", "kind", type=click.Choice(TYPES), help="What SOURCE is, if it is not to be found out.")
@click.option("--image", metavar="TAG", default="", help="Which image of SOURCE: a tag, name or digest.")
@click.option("--platform", metavar="OS/ARCH", default="linux/amd64", show_default=True, help="Of the image.")
@_FORMAT
@data_option
@json_option
@click.pass_obj
def import_command(
    session: Session,
    name: str,
    source: str,
    kind: SourceType | None,
    image: str,
    platform: str,
    layer_format: Format,
    data: Path,
) -> None:
    """Make the environment NAME from SOURCE.

    SOURCE is a directory tree, a tar archive of one, an OCI image layout (a directory or an archive of it), or what
    `docker save` writes; archives may be compressed. As skopeo writes it, it may say type and tag: oci:DIRECTORY:TAG,
    oci-archive:FILE, docker-archive:FILE.
    """
    from barchan.layers.sources import Wanted, import_environment

    path, said, tag = parse_source(source)
    store = open_store(data)
    wanted, known = Wanted(kind or said, image or tag, platform, layer_format), newest(store)
    with busy(f"importing {plain(name)}"):
        layer = import_environment(store, name, path, wanted, progress=_progress)
    _announce(session, layer, known)


@env.command("pull")
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True)
@click.option("--node", metavar="NAME", help="Only on this node of the server.")
@click.option("--platform", metavar="OS/ARCH", help="Of the image.  [default: linux/amd64]")
@click.option("--registry-auth", type=FILE, help="Login file, as `skopeo login` writes it.")
@click.option("--registries-conf", type=FILE, help="Mirrors and registries without TLS: containers-registries.conf(5).")
@click.option(
    "--format",
    "layer_format",
    type=click.Choice(["split", "packed"]),
    help="Packed layers are compressed: half the size, slower to read, and not in parts over a network.  [default: split]",
)
@where_options
@json_option
@click.pass_obj
def pull_command(
    session: Session,
    /,
    images: tuple[str, ...],
    node: str | None,
    platform: str | None,
    registry_auth: Path | None,
    registries_conf: Path | None,
    layer_format: Format | None,
    where: Where,
) -> None:
    """Fetch images from registries, for sandboxes to come: docker://debian:12.

    What a tag means is asked anew. A server, where there is one, fetches to all its nodes, with its own logins and mirrors; with
    --platform, --registry-auth, --registries-conf or --format, or where there is none, the image comes straight to the store of this host.
    """
    import asyncio

    access = RegistryAccess(auth_file=registry_auth, registries_conf=registries_conf)
    here = platform is not None or layer_format is not None or access != RegistryAccess()
    if served(where) and not here:
        asyncio.run(_pull_by_server(session, where, images, node))
        return
    if node is not None or where.api is not None:
        said = "platform, registry-auth, registries-conf, format: of this host's store, not of a server's"
        raise InvalidRequest(said if here else "node: no server is running", field="platform" if here else "node")
    _pull_here(session, images, platform or "linux/amd64", access, layer_format or "split", where)


async def _pull_by_server(session: Session, where: Where, images: tuple[str, ...], node: str | None) -> None:
    from barchan.cli.pulling import pull_bars

    async with open_client(where) as client:
        for image in images:
            before = {e.reference for e in await client.environments()}
            with pull_bars(session) as told:
                found = await client.pull(image, node=node, progress=told)
            _say_pulled(session, found, found.reference in before)


def _pull_here(
    session: Session, images: tuple[str, ...], platform: str, access: RegistryAccess, format: Format, where: Where
) -> None:
    from barchan.cli.pulling import pull_bars
    from barchan.layers.catalog import described
    from barchan.layers.pull import pull

    store = open_store(where.data or default_data(os.environ))
    for image in images:
        before = {entry.reference for entry in store.catalog.entries()}
        with pull_bars(session) as told:
            found = pull(store, image, platform=platform, access=access, again=True, format=format, told=told)
        _say_pulled(session, described(found), found.reference in before)


def _say_pulled(session: Session, found: EnvironmentInfo, unchanged: bool) -> None:
    if session.json:
        session.emit({**layer_document(found), "reference": found.reference, "unchanged": unchanged})
    else:
        line = f"{found.reference}  {found.digest}  {size(found.size)}"
        click.echo(f"{line}  unchanged" if unchanged else line)


@env.command("bootstrap")
@click.argument("release", type=click.Choice(["debian-12", "debian-13"]))
@click.option(
    "--cache",
    type=DIRECTORY,
    help="Keep the image here, for other data directories.  [default: /var/cache/barchan/bootstrap]",
)
@_FORMAT
@data_option
@json_option
@click.pass_obj
def bootstrap_command(session: Session, release: str, cache: Path | None, layer_format: Format, data: Path) -> None:
    """Make a Debian and Python base layer with mmdebstrap."""
    from barchan.layers.bootstrap import CACHE, bootstrap

    store = open_store(data)
    known = newest(store)
    with busy(f"making {release}"):
        layer = bootstrap(store, release, progress=_progress, cache=cache or CACHE, format=layer_format)
    _announce(session, layer, known)


def _progress(line: str) -> None:
    Session().note(plain(line.rstrip("\n")))


@env.command("tag")
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


@env.command("alias")
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


@env.command("lock")
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


@env.command("ls")
@click.option("--all", "every", is_flag=True, help="Also what builds keep of their steps.")
@data_option
@json_option
@click.pass_obj
def ls_command(session: Session, every: bool, data: Path) -> None:
    """List the layers by name and version, with the tags and aliases that mean them."""
    import time

    from barchan.cli.tables import show

    store = _existing_store(data)
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


@env.command("rm")
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
    store = _existing_store(data)
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
