"""`barchan down`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from barchan.cli.session import Session, data_option, json_option, need_root
from barchan.cli.text import Bytes
from barchan.config import Layout
from barchan.errors import InvalidRequest, RequestTimeout

if TYPE_CHECKING:
    from barchan.cli.supervise import Reporter


@click.command()
@data_option
@click.option("--keep-sandboxes", is_flag=True, help="Leave them running for the next `up`.")
@click.option(
    "--delete", "deleting", is_flag=True, help="Delete DATA too: layers, log, scratch volume, token. It does not ask."
)
@click.option("--timeout", type=click.FloatRange(1), default=120.0, show_default=True, help="Seconds for each step.")
@json_option
@click.pass_obj
def down(session: Session, data: Path, keep_sandboxes: bool, deleting: bool, timeout: float) -> None:
    """Stop the server, its sandboxes, and remove all they hold on this host: mounts, loop devices, cgroups.

    Layers, log and scratch volume stay, and how large they are is said. With --delete only the cache of
    `barchan env bootstrap`, which is not in DATA, stays.
    """
    from barchan.cli.datadir import locked
    from barchan.cli.up import reporter

    need_root("barchan down")
    layout = Layout(Path(os.path.abspath(data)))
    _check(layout, keep_sandboxes, deleting)
    _end_supervisor(layout, timeout)
    with locked(layout, wait=timeout):
        _take_down(layout, keep_sandboxes, deleting, timeout, reporter(session))


def _check(layout: Layout, keep_sandboxes: bool, deleting: bool) -> None:
    """Before anything is stopped."""
    from barchan.cli.datadir import check_ours

    if keep_sandboxes and deleting:
        raise InvalidRequest("delete: not with --keep-sandboxes", field="delete")
    if not layout.run.is_dir():
        raise InvalidRequest(f"data: nothing was ever started in {layout.data}", field="data")
    if deleting:
        check_ours(layout)


def _end_supervisor(layout: Layout, timeout: float) -> None:
    from barchan.cli.datadir import read_record
    from barchan.cli.processes import end

    record = read_record(layout)
    if record and record.supervisor and not end(record.supervisor, signal.SIGTERM, timeout):
        raise RequestTimeout(f"`barchan up` did not end within {timeout:g} s", hint=f"pid {record.supervisor.pid}")


def _take_down(layout: Layout, keep_sandboxes: bool, deleting: bool, timeout: float, report: Reporter) -> None:
    import asyncio

    from barchan.cli.datadir import delete, occupied
    from barchan.cli.supervise import take_down
    from barchan.layers.bootstrap import CACHE

    asyncio.run(take_down(layout, keep_sandboxes=keep_sandboxes, timeout=timeout, report=report))
    if deleting:
        delete(layout)
        report("deleted", {"data": str(layout.data)})
        if cached := occupied(CACHE):
            report("kept", {"cache": str(CACHE), "images": Bytes(cached), "note": "for the next `env bootstrap`"})
    elif not keep_sandboxes:
        parts = {"layers": layout.layers, "log": layout.log, "scratch": layout.scratch_image}
        sizes = {name: Bytes(occupied(path)) for name, path in parts.items()}
        report("kept", {"data": str(layout.data), **sizes})
