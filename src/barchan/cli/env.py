"""`barchan env`: works on the layer store of this host, as root, without a server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from barchan.cli.session import Session, data_option, json_option
from barchan.cli.text import plain, size, span

if TYPE_CHECKING:
    from barchan.layers.store import Layer, LayerStore


@click.group()
def env() -> None:
    """The layers that sandboxes are made of."""


def _store(data: Path) -> LayerStore:
    from barchan.cli.datadir import prepare
    from barchan.config import Layout
    from barchan.errors import FeatureMissing
    from barchan.layers.store import LayerStore

    if os.geteuid() != 0:
        raise FeatureMissing("barchan env needs root", hint="run it as root")
    layout = Layout(Path(os.path.abspath(data)))
    prepare(layout)
    return LayerStore(layout.layers)


def layer_document(layer: Layer) -> dict[str, Any]:
    return {"name": layer.name, "version": layer.version, "digest": layer.digest, "size": layer.size}


def _announce(session: Session, layer: Layer) -> None:
    if session.json:
        session.emit(layer_document(layer))
    else:
        click.echo(f"{layer.name}@{layer.version}  {layer.digest}  {size(layer.size)}")


@env.command("import")
@click.argument("name")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@data_option
@json_option
@click.pass_obj
def import_command(session: Session, name: str, source: Path, data: Path) -> None:
    """Make a layer NAME from a directory or a tar archive."""
    from barchan.layers.sources import import_layer

    store = _store(data)
    _announce(session, import_layer(store, name, source))


@env.command("bootstrap")
@click.argument("release", type=click.Choice(["debian-12", "debian-13"]))
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), help="Keep downloaded packages here.")
@data_option
@json_option
@click.pass_obj
def bootstrap_command(session: Session, release: str, cache: Path | None, data: Path) -> None:
    """Make a Debian and Python base layer with mmdebstrap."""
    from barchan.layers.bootstrap import CACHE, bootstrap

    store = _store(data)
    _announce(session, bootstrap(store, release, progress=_progress, cache=cache or CACHE))


def _progress(line: str) -> None:
    print(plain(line.rstrip("\n")), file=sys.stderr, flush=True)


@env.command("ls")
@data_option
@json_option
@click.pass_obj
def ls_command(session: Session, data: Path) -> None:
    """List the layers by name and version."""
    import time

    from barchan.cli.tables import show

    entries = _store(data).list()
    if session.json:
        session.emit(entries)
        return
    now = time.time()
    rows = [(f"{e.name}@{e.version}", size(e.size), span(now - e.created), e.digest[:19], e.source) for e in entries]
    show(("name", ">size", ">age", "digest", "source"), rows)


@env.command("rm")
@click.argument("references", nargs=-1, required=True)
@data_option
@json_option
@click.pass_obj
def rm_command(session: Session, references: tuple[str, ...], data: Path) -> None:
    """Remove layers: NAME, NAME@VERSION or a digest."""
    store = _store(data)
    for reference in references:
        store.remove(reference)
        session.emit({"removed": reference}) if session.json else click.echo(plain(reference))
