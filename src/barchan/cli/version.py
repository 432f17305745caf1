"""`barchan version`."""

from __future__ import annotations

import platform

import click

from barchan._version import __version__
from barchan.cli.session import Session, json_option


@click.command()
@json_option
@click.pass_obj
def version(session: Session) -> None:
    """Print the version."""
    if session.json:
        session.emit({"barchan": __version__, "python": platform.python_version(), "kernel": platform.release()})
    else:
        click.echo(f"barchan {__version__}")
