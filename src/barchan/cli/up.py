"""`barchan up` and `barchan down`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from barchan.cli.session import Session, data_option, json_option, to_json
from barchan.cli.text import plain
from barchan.cli.values import ADDRESS, SIZE, is_loopback
from barchan.config import ApiConfig, Layout, NodeConfig
from barchan.errors import (
    BarchanError,
    ErrorBody,
    FeatureMissing,
    InvalidRequest,
    NodeUnavailable,
    RequestTimeout,
    from_body,
)

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("-d", "--detach", is_flag=True, help="Return when it serves; log to DATA/run/up.log.")
@data_option
@click.option("--name", help="Name of this node, part of every sandbox id.  [default: the host's]")
@click.option("--listen", type=ADDRESS, metavar="HOST:PORT", help="Serve the API on TCP too.")
@click.option("--tls-cert", type=_FILE, help="Certificate chain for --listen, PEM.")
@click.option("--tls-key", type=_FILE, help="Its private key, PEM.")
@click.option("--insecure", is_flag=True, help="Allow --listen without TLS beyond loopback.")
@click.option("--scratch-bytes", type=SIZE, default=0, help="Size of the scratch volume, e.g. 20g.")
@click.option("--max-sandboxes", type=click.IntRange(1, 60000), default=1000, show_default=True)
@click.option("--kernel", type=click.Choice(["auto", "reduced"]), default="auto", hidden=True)
@json_option
@click.pass_obj
def up(session: Session, /, detach: bool, data: Path, **options: Any) -> None:
    """Start the server on this host: the API and the node agent.

    In the foreground, ctrl-C stops the sandboxes too; SIGTERM leaves them running for the next `up`.
    """
    from barchan.cli.datadir import locked, prepare

    _need_root("barchan up")
    layout = Layout(Path(os.path.abspath(data)))
    check_listen(options["listen"], options["tls_cert"], options["tls_key"], options["insecure"])
    prepare(layout)
    with locked(layout):
        if detach:
            _in_background(session, layout, options)
        else:
            _serve(session, layout, options, None)


def check_listen(listen: tuple[str, int] | None, cert: Path | None, key: Path | None, insecure: bool) -> None:
    """Refuse what would send tokens in the clear."""
    if (cert is None) != (key is None):
        raise InvalidRequest("tls: --tls-cert and --tls-key belong together", field="tls_cert")
    if listen is None:
        if cert is not None:
            raise InvalidRequest("tls: only with --listen", field="tls_cert")
        return
    if cert is None and not insecure and not is_loopback(listen[0]):
        raise InvalidRequest(
            f"listen: {listen[0]} is reachable from other hosts, and without TLS the token could be read",
            field="listen",
            hint="give --tls-cert and --tls-key, or --insecure",
        )


def _need_root(what: str) -> None:
    if os.geteuid() != 0:
        raise FeatureMissing(f"{what} needs root", hint="run it as root")


def _serve(session: Session, layout: Layout, options: dict[str, Any], tell: int | None) -> None:
    """Serve until a signal, with the lock held. Whoever waits at fd `tell` is told when all is ready."""
    import asyncio

    from barchan.cli.daemon import put_aside
    from barchan.cli.datadir import UpRecord, log_path, node_name, read_record
    from barchan.cli.supervise import Supervisor, end_leftovers

    before = read_record(layout)
    report = reporter(session)
    for name in end_leftovers(before):
        report("ended", {"service": name, "how": "left by a killed supervisor"})
    name = node_name(options["name"], before)
    supervisor = Supervisor(
        UpRecord(api=_api_config(layout, options), node=_node_config(layout, name, options)), report
    )

    def announce() -> None:
        details = ready_details(layout, supervisor.url)
        report("ready", details)
        if tell is not None:
            os.write(tell, to_json({"ready": details}))
            os.close(tell)

    rotate = (lambda: put_aside(log_path(layout))) if tell is not None else None
    asyncio.run(supervisor.run(announce, also=rotate))


def _api_config(layout: Layout, options: dict[str, Any]) -> ApiConfig:
    cert, key = (path and Path(os.path.abspath(path)) for path in (options["tls_cert"], options["tls_key"]))
    return ApiConfig(layout=layout, listen=options["listen"], insecure=options["insecure"], tls_cert=cert, tls_key=key)


def _node_config(layout: Layout, name: str, options: dict[str, Any]) -> NodeConfig:
    fields = {key: options[key] for key in ("kernel", "max_sandboxes", "scratch_bytes")}
    return NodeConfig(layout=layout, name=name, **fields)


def ready_details(layout: Layout, url: str) -> dict[str, str]:
    details = {"api": f"unix:{layout.api_socket}", "token": str(layout.token)}
    return details | ({"listen": url} if url else {})


def reporter(session: Session) -> Any:
    """Events as they happen: JSON lines on stdout, or text, of which only `ready` goes to stdout."""

    def report(event: str, details: dict[str, Any]) -> None:
        if session.json:
            session.emit({"event": event, **details})
            return
        line = f"{event}  " + "  ".join(f"{key} {plain(str(value))}" for key, value in details.items())
        print(line, file=sys.stdout if event == "ready" else sys.stderr, flush=True)

    return report


def _in_background(session: Session, layout: Layout, options: dict[str, Any]) -> None:
    from barchan.cli.daemon import in_background, last_lines
    from barchan.cli.datadir import log_path

    log = log_path(layout)
    told = _decode(in_background(log, lambda tell: _serve_detached(layout, options, tell)))
    if "ready" in told:
        reporter(session)("ready", {**told["ready"], "log": str(log)})
        return
    if not session.json:
        for line in last_lines(log):
            print(f"  {plain(line)}", file=sys.stderr)
    raise _told_error(told, log)


def _serve_detached(layout: Layout, options: dict[str, Any], tell: int) -> int:
    session = Session()
    try:
        _serve(session, layout, options, tell)
    except BarchanError as error:
        session.report(error)
        try:
            os.write(tell, to_json(error.body()))
        except OSError:  # closed: it had been ready
            pass
        return 1
    return 0


def _decode(told: bytes) -> dict[str, Any]:
    import msgspec

    return msgspec.json.decode(told, type=dict[str, Any]) if told else {}


def _told_error(told: dict[str, Any], log: Path) -> BarchanError:
    import msgspec

    from barchan.cli.services import WHY_HINT

    if not told:
        return NodeUnavailable("the server ended before it was ready", phase="start", hint=f"see {log}")
    error = from_body(msgspec.convert(told, ErrorBody))
    if error.hint == WHY_HINT:
        error.hint = f"see {log}"
    return error


@click.command()
@data_option
@click.option("--keep-sandboxes", is_flag=True, help="Leave them running for the next `up`.")
@click.option("--timeout", type=click.FloatRange(1), default=120.0, show_default=True, help="Seconds for each step.")
@json_option
@click.pass_obj
def down(session: Session, data: Path, keep_sandboxes: bool, timeout: float) -> None:
    """Stop the server, its sandboxes, and remove all they hold on this host: mounts, loop devices, cgroups."""
    import asyncio

    from barchan.cli.datadir import locked, read_record
    from barchan.cli.processes import end
    from barchan.cli.supervise import take_down

    _need_root("barchan down")
    layout = Layout(Path(os.path.abspath(data)))
    if not layout.run.is_dir():
        raise InvalidRequest(f"data: nothing was ever started in {layout.data}", field="data")
    record = read_record(layout)
    if record and record.supervisor and not end(record.supervisor, signal.SIGTERM, timeout):
        raise RequestTimeout(f"`barchan up` did not end within {timeout:g} s", hint=f"pid {record.supervisor.pid}")
    with locked(layout, wait=timeout):
        asyncio.run(take_down(layout, keep_sandboxes=keep_sandboxes, timeout=timeout, report=reporter(session)))
