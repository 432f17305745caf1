"""`barchan env`: works on the layer store of this host, as root, without a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from barchan.cli.build import build_command
from barchan.cli.connect import Where, open_client, served, where_options
from barchan.cli.env_names import alias_command, lock_command, ls_command, rm_command, tag_command
from barchan.cli.profile import profile_command
from barchan.cli.progress import busy
from barchan.cli.session import DIRECTORY, FILE, Session, data_option, json_option
from barchan.cli.stores import open_store
from barchan.cli.text import plain
from barchan.config import RegistryAccess, default_data
from barchan.errors import InvalidRequest
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


for command in (build_command, tag_command, alias_command, lock_command, ls_command, rm_command, profile_command):
    env.add_command(command)


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
