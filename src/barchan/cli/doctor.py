"""`barchan doctor`: works without a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from barchan.cli.session import Session, data_option, json_option
from barchan.cli.text import plain

if TYPE_CHECKING:
    from barchan.kernel.probe import Check, HostReport


@click.command()
@data_option
@json_option
@click.pass_obj
def doctor(session: Session, data: Path) -> int:
    """What this host can do and what to fix, found by trying. Exit code 0 when containers can run, else 1."""
    report = _with_network(_examine(Path(os.path.abspath(data))), Path(os.path.abspath(data)))
    if session.json:
        session.emit(as_document(report))
    else:
        _print(report)
    return 1 if report.missing() or report.kernel == "too_old" else 0


def _examine(data: Path) -> HostReport:
    """On the file system where the directory is or would be; nothing stays behind."""
    from barchan.config import Layout
    from barchan.errors import FeatureMissing, InvalidRequest
    from barchan.kernel.probe import examine

    place = next(path for path in (data, *data.parents) if path.is_dir())
    try:
        return examine(Layout(place))
    except PermissionError as error:
        raise FeatureMissing(f"barchan doctor needs root to try things in {place}", hint="run it as root") from error
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise InvalidRequest(
            f"data: nothing can be written in {place}: {why}", field="data", hint="give a directory on a disk"
        ) from error


def _with_network(report: HostReport, data: Path) -> HostReport:
    """As the server of the directory was last started, if it was."""
    import msgspec

    from barchan.cli.datadir import read_record
    from barchan.config import Layout, NetworkAccess
    from barchan.net.trial import checks

    record = read_record(Layout(data))
    access = record.node.network if record is not None else NetworkAccess()
    return msgspec.structs.replace(report, checks=(*report.checks, *checks(access)))


def as_document(report: HostReport) -> dict[str, object]:
    return {
        "containers": not report.missing() and report.kernel != "too_old",
        "kernel": report.kernel,
        "quota": report.quota,
        "cgroups": report.cgroups.kind,
        "checks": [_check(check) for check in report.checks],
        "notes": list(report.notes()),
    }


def _check(check: Check) -> dict[str, object]:
    return {field: getattr(check, field) for field in ("name", "ok", "needed", "meaning", "remedy", "detail")}


def _print(report: HostReport) -> None:
    from barchan.cli.tables import show

    show(("check", "result", "meaning"), [(c.name, verdict(c), c.meaning) for c in report.checks])
    click.echo()
    for check in report.checks:
        if not check.ok:
            click.echo(plain(f"{check.name}: {check.detail or check.meaning}"))
            click.echo(plain(f"  remedy: {check.remedy}"))
    click.echo(f"kernel path: {report.kernel}, quotas: {report.quota}, cgroups: {report.cgroups.kind}")
    click.echo("containers: " + ("no, see the remedies above" if report.missing() else "yes"))


def verdict(check: Check) -> str:
    if check.ok:
        return "ok"
    return "MISSING" if check.needed else "absent"
