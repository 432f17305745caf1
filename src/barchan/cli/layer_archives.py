"""`barchan layer export` and `collapse`: an environment in another form."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import click

from barchan.cli.env import layer_document
from barchan.cli.progress import busy
from barchan.cli.session import Session, data_option, json_option
from barchan.cli.stores import open_store
from barchan.cli.text import plain
from barchan.cli.values import SIZE
from barchan.errors import InvalidRequest
from barchan.sizes import size


@click.command("export")
@click.argument("reference", metavar="REF")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["oci", "docker", "tar"]),
    default="oci",
    show_default=True,
    help="An OCI archive, what `docker save` writes, or the bare tree.",
)
@click.option("--flat", is_flag=True, help="One layer, without what was replaced or removed; tar is always so.")
@click.option(
    "--compress",
    type=click.Choice(["none", "gzip", "zstd"]),
    help="Of layers, or of the bare tree.  [default: gzip for oci, else none]",
)
@click.option("--tag", metavar="NAME:TAG", default="", help="How it is called in FILE.  [default: as REF is called]")
@click.option("--platform", metavar="OS/ARCH", default="linux/amd64", show_default=True, help="To be noted in FILE.")
@data_option
@json_option
@click.pass_obj
def export_command(
    session: Session,
    reference: str,
    file: Path,
    form: str,
    flat: bool,
    compress: str | None,
    tag: str,
    platform: str,
    data: Path,
) -> None:
    """Write the environment REF to FILE, for podman, docker, skopeo and others; '-' is standard output.

    The same environment with the same options is the same FILE, byte for byte. FILE appears when it is whole.
    """
    import msgspec

    from barchan.layers.blobs import Output
    from barchan.layers.export import Wanted, export, file_at
    from barchan.layers.oci_schema import parse_platform

    if str(file) == "-":
        if session.json:
            raise InvalidRequest("json: standard output is the file", field="json")
        if sys.stdout.isatty():
            raise InvalidRequest("an archive is not for a terminal", field="file", hint="redirect it or name a FILE")
    given = {"format": form, "flat": flat, "compression": compress, "tag": tag}
    wanted = msgspec.convert({**given, "platform": parse_platform(platform)}, Wanted)
    target = nullcontext(Output(sys.stdout.buffer, "stdout")) if str(file) == "-" else file_at(file)
    with target as out, busy(f"exporting {plain(reference)}"):
        done = export(open_store(data), reference, out, wanted)
    if done.left_out:
        session.note(f"barchan: {done.left_out} extended attributes left out that a tar cannot hold")
    if session.json:
        session.emit(done)
    elif str(file) != "-":
        click.echo(f"{plain(str(file))}  {done.digest}  {size(done.size)}")


@click.command("collapse")
@click.argument("reference", metavar="REF")
@click.argument("new", metavar="[NEW]", required=False, default="")
@click.option("--below", type=SIZE, default="16m", show_default=True, help="Layers smaller than this are small.")
@data_option
@json_option
@click.pass_obj
def collapse_command(session: Session, reference: str, new: str, below: int, data: Path) -> None:
    """Merge consecutive small layers of the environment REF into one layer each.

    The result is the next version of REF, or NEW. Sandboxes of it see the same and start faster; layers that other environments share
    stay for those. With nothing to merge there is no new version.
    """
    from barchan.layers.collapse import collapse

    with busy(f"collapsing {plain(reference)}"):
        done = collapse(open_store(data), reference, new, below=below, progress=session.note)
    if session.json:
        return session.emit({**layer_document(done.entry), "before": done.before, "after": done.after})
    entry = done.entry
    click.echo(f"{entry.reference}  {entry.digest}  {size(entry.size)}  {done.before} -> {done.after} layers")
