"""`barchan layer pack`: asks a server, not the store."""

from __future__ import annotations

import asyncio
from typing import get_args

import click

from barchan.cli.connect import Where, open_client, where_options
from barchan.cli.session import Session, json_option
from barchan.packing import PackedLayer, RuleName, ScrubRules
from barchan.sizes import size
from barchan.spec import node_of


@click.command("pack")
@click.argument("sandbox", metavar="ID")
@click.argument("name")
@click.option("--whole", is_flag=True, help="NAME is all that ID is made of with the changes on top, to be restored.")
@click.option(
    "--keep",
    metavar="RULE",
    type=click.Choice(get_args(RuleName)),
    multiple=True,
    help=f"Switch a rule of the scrub policy off: {', '.join(get_args(RuleName))}; repeatable.",
)
@click.option(
    "--also", metavar="PATTERN", multiple=True, help="Leave out these paths too, as `srv/cache/*`; repeatable."
)
@where_options
@json_option
@click.pass_obj
def pack_command(
    session: Session,
    sandbox: str,
    name: str,
    whole: bool,
    keep: tuple[RuleName, ...],
    also: tuple[str, ...],
    where: Where,
) -> None:
    """Make what sandbox ID has changed the next version of NAME. Its programs go on.

    NAME is then a layer for --workspace and --toolkit, or with --whole an environment.
    """
    node_of(sandbox)
    packed = asyncio.run(_pack(where, sandbox, name, whole, ScrubRules(also=also, keep=keep)))
    if session.json:
        session.emit(packed)
        return
    click.echo(f"{packed.reference}  {packed.digest}  {size(packed.size)}")
    session.note(summary(packed))


async def _pack(where: Where, id_: str, name: str, whole: bool, scrub: ScrubRules) -> PackedLayer:
    async with open_client(where) as client:
        return await (await client.get(id_)).pack_diff(name, whole=whole, scrub=scrub)


def summary(packed: PackedLayer) -> str:
    """What is in it and what is not, in one line."""
    left_out = ", ".join(f"{rule} {count}" for rule, count in packed.left_out.items())
    return f"{packed.entries} entries, {size(packed.content)}" + (f"; left out: {left_out}" if left_out else "")
