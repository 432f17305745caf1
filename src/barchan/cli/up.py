"""`barchan up`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from barchan.cli.session import DIRECTORY, Session, data_option, json_option, need_root, to_json
from barchan.cli.text import Bytes, plain
from barchan.cli.values import ADDRESS, IPV4, IPV4_NETWORK, SIZE, is_loopback, parse_pairs
from barchan.config import ApiConfig, Layout, NetworkAccess, NodeConfig, RegistryAccess
from barchan.errors import (
    BarchanError,
    CallerError,
    ErrorBody,
    FileFailure,
    InvalidRequest,
    NodeUnavailable,
    from_body,
)
from barchan.names import check_name

if TYPE_CHECKING:
    from barchan.cli.supervise import Reporter


def _absolute(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Relative to where we were called: the server's directory is `/`."""
    return value and Path(os.path.abspath(value))


FACTOR = click.FloatRange(0.1, 10_000)
_DEFAULT = {field.name: field.default for field in msgspec.structs.fields(NodeConfig)}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("-d", "--detach", is_flag=True, help="Return when it serves; log to DATA/run/up.log.")
@data_option
@click.option("--name", help="Name of this node, part of every sandbox id.  [default: the host's]")
@click.option("--listen", type=ADDRESS, metavar="HOST:PORT", help="Serve the API on TCP too.")
@click.option("--tls-cert", type=_FILE, callback=_absolute, help="Certificate chain for --listen, PEM.")
@click.option("--tls-key", type=_FILE, callback=_absolute, help="Its private key, PEM.")
@click.option("--insecure", is_flag=True, help="Allow --listen without TLS beyond loopback.")
@click.option(
    "--scratch-bytes",
    type=SIZE,
    help="Size of the scratch volume when it is made, e.g. 20g; at least 128m. An existing one keeps its size.",
)
@click.option(
    "--max-sandboxes", type=click.IntRange(1, 60000), default=1000, show_default=True, help="On this node at once."
)
@click.option(
    "--memory-overcommit",
    type=FACTOR,
    default=_DEFAULT["memory_overcommit"],
    show_default=True,
    help="Promise sandboxes so many times 90 % of the host's memory. What they use together is not bounded by it.",
)
@click.option(
    "--disk-overcommit",
    type=FACTOR,
    default=_DEFAULT["disk_overcommit"],
    show_default=True,
    help="Promise sandboxes so many times the size of the scratch volume.",
)
@click.option(
    "--pool-most",
    type=click.IntRange(0, 10000),
    default=_DEFAULT["pool_most"],
    show_default=True,
    help="Make at most so many containers ahead of requests; 0 makes none.",
)
@click.option(
    "--log-bytes",
    type=SIZE,
    help="Size of the record at which its oldest parts without a live sandbox are removed.  [default: 8g]",
)
@click.option(
    "--data-mount",
    "data_mounts",
    metavar="NAME=/PATH",
    multiple=True,
    help="Let sandboxes mount this directory read-only, by this name; repeatable. What any user of this host may read "
    "there, every sandbox may.",
)
@click.option(
    "--registry-auth",
    type=_FILE,
    callback=_absolute,
    help="Logins for registries, as `skopeo login` writes them.  [default: root's own]",
)
@click.option(
    "--registries-conf",
    type=_FILE,
    callback=_absolute,
    help="Mirrors, and registries without TLS: containers-registries.conf(5).  [default: the host's own]",
)
@click.option(
    "--layers",
    type=DIRECTORY,
    callback=_absolute,
    help="Keep layers in this directory, which nodes on other hosts may use too.  [default: DATA/layers]",
)
@click.option(
    "--layer-format",
    type=click.Choice(["split", "packed"]),
    default=_DEFAULT["layer_format"],
    show_default=True,
    help="Of layers that are fetched from registries. Packed ones are compressed, and not read in parts over a network.",
)
@click.option(
    "--nameserver",
    "nameservers",
    type=IPV4,
    metavar="ADDRESS",
    multiple=True,
    help="Whom sandboxes with an open network ask for names; repeatable.  [default: those that this host asks]",
)
@click.option(
    "--network-grant",
    "network_grants",
    type=IPV4_NETWORK,
    metavar="NETWORK",
    multiple=True,
    help="A private network that they may reach, e.g. 10.1.2.0/24; repeatable.",
)
@click.option(
    "--network-prefix",
    type=IPV4_NETWORK,
    metavar="NETWORK",
    default=_DEFAULT["network"].prefix,
    show_default=True,
    help="Their addresses: nothing that this host reaches may be in it. Not to be changed while sandboxes live.",
)
@click.option("--kernel", type=click.Choice(["auto", "reduced"]), default="auto", hidden=True)
@json_option
@click.pass_obj
def up(session: Session, /, detach: bool, data: Path, **options: Any) -> None:
    """Start the server on this host: the API and the node agent.

    In the foreground, ctrl-C stops the sandboxes too; SIGTERM leaves them running for the next `up`. The first start allocates
    the scratch volume, DATA/scratch.img, and says how large it is: without --scratch-bytes 30 % of what is free there, at
    most 40 GiB.
    """
    from barchan.cli.datadir import locked, prepare, share, unmake
    from barchan.node.rows import check_version

    need_root("barchan up")
    layout = Layout(Path(os.path.abspath(data)))
    check_listen(options["listen"], options["tls_cert"], options["tls_key"], options["insecure"])
    if options["tls_cert"] is not None:
        check_tls(options["tls_cert"], options["tls_key"])
    check_scratch(options["scratch_bytes"])
    check_log(options["log_bytes"])
    network_access(options)
    options["data_mounts"] = parse_data_mounts(options["data_mounts"], layout)
    new, existed = not layout.instance.exists(), layout.data.exists()
    prepare(layout)
    with locked(layout):
        try:
            if options["layers"] is not None:
                share(layout, options["layers"])
            check_version(layout.registry)
            if detach:
                _in_background(session, layout, options)
            else:
                _serve(session, layout, options, None)
        except CallerError:
            if new:
                unmake(layout, existed)
            raise


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


def check_tls(cert: Path, key: Path) -> None:
    """Here the answer can name the files; the server would only say that something in one of them is wrong."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except OSError as error:
        hint = "PEM, and the key without a passphrase"
        raise InvalidRequest(f"tls: cannot use {cert} with {key}: {error}", field="tls_cert", hint=hint) from error


def check_scratch(size: int | None) -> None:
    from barchan.kernel.scratch import SMALLEST

    if size is not None and size < SMALLEST:
        raise InvalidRequest(f"scratch_bytes: too small, at least {SMALLEST >> 20} MiB", field="scratch_bytes")


def check_log(size: int | None) -> None:
    least = 2 * _DEFAULT["segment_bytes"]
    if size is not None and size < least:
        raise InvalidRequest(f"log_bytes: too small, at least {Bytes(least)}", field="log_bytes")


def parse_data_mounts(items: tuple[str, ...], layout: Layout) -> dict[str, Path]:
    """Directories by name. The server's own may not be among them, nor one that holds it: its secrets are there."""
    found: dict[str, Path] = {}
    data = layout.data.resolve()
    for name, text in parse_pairs(items, "data_mount").items():
        path = Path(text)
        check_name(name, "data_mount")
        if not path.is_absolute() or not path.is_dir():
            raise InvalidRequest(f"data_mount: {text} is no directory", field="data_mount", hint="NAME=/absolute/path")
        path = path.resolve()
        if path.is_relative_to(data) or data.is_relative_to(path):
            raise InvalidRequest(
                f"data_mount: {text} and the data directory {data} lie in each other", field="data_mount"
            )
        found[name] = path
    return found


def _serve(session: Session, layout: Layout, options: dict[str, Any], tell: int | None) -> None:
    """Serve until a signal, with the lock held. Whoever waits at fd `tell` is told when all is ready."""
    import asyncio

    from barchan.cli.daemon import put_aside
    from barchan.cli.datadir import UpRecord, log_path, node_name, read_record
    from barchan.cli.supervise import Supervisor, end_leftovers

    before = read_record(layout)
    report = _lasting(reporter(session))
    volume = volume_size(layout)
    for name in end_leftovers(before):
        report("ended", {"service": name, "how": "left by a killed supervisor"})
    name = node_name(options["name"], before)
    supervisor = Supervisor(
        UpRecord(api=_api_config(layout, options), node=_node_config(layout, name, options)), report
    )

    def announce() -> None:
        details = ready_details(layout, supervisor.url)
        report("ready", details)
        _report_scratch(report, layout, volume, options["scratch_bytes"])
        if tell is not None:
            os.write(tell, to_json({"ready": details}))
            os.close(tell)

    rotate = (lambda: put_aside(log_path(layout))) if tell is not None else None
    asyncio.run(supervisor.run(announce, also=rotate))


def _api_config(layout: Layout, options: dict[str, Any]) -> ApiConfig:
    return ApiConfig(layout=layout, **{key: options[key] for key in ("listen", "insecure", "tls_cert", "tls_key")})


def _node_config(layout: Layout, name: str, options: dict[str, Any]) -> NodeConfig:
    fields = {key: options[key] for key in NODE_OPTIONS if options[key] is not None}
    registry = RegistryAccess(auth_file=options["registry_auth"], registries_conf=options["registries_conf"])
    scratch = options["scratch_bytes"] or 0
    return NodeConfig(
        layout=layout, name=name, scratch_bytes=scratch, registry=registry, network=network_access(options), **fields
    )


def network_access(options: dict[str, Any]) -> NetworkAccess:
    """Raises `InvalidRequest`."""
    from barchan.net.access import check_access

    given = NetworkAccess(
        prefix=options["network_prefix"],
        nameservers=tuple(options["nameservers"]),
        granted=tuple(options["network_grants"]),
    )
    return check_access(given, options["max_sandboxes"] + options["pool_most"])


NODE_OPTIONS = (
    *("kernel", "max_sandboxes", "data_mounts"),
    *("memory_overcommit", "disk_overcommit", "pool_most", "log_bytes", "layer_format"),
)
"""Named as the fields of `NodeConfig`."""


def volume_size(layout: Layout) -> int | None:
    """Bytes of the scratch volume, if there is one."""
    try:
        return layout.scratch_image.stat().st_size
    except FileNotFoundError:
        return None


def _report_scratch(report: Reporter, layout: Layout, before: int | None, asked: int | None) -> None:
    """Disk space that was taken, or an option that had no effect."""
    now, at = volume_size(layout), str(layout.scratch_image)
    if before is None and now is not None:
        report("scratch", {"allocated": Bytes(now), "at": at})
    elif before is not None and asked not in (None, before):
        report("scratch", {"kept": Bytes(before), "at": at, "note": "an existing volume keeps its size"})


def ready_details(layout: Layout, url: str) -> dict[str, str]:
    details = {"api": f"unix:{layout.api_socket}", "token": str(layout.token)}
    return details | ({"listen": url} if url else {})


def reporter(session: Session) -> Reporter:
    """Events as they happen: JSON lines on stdout, or text, of which only `ready` goes to stdout."""

    def report(event: str, details: dict[str, Any]) -> None:
        if session.json:
            session.emit({"event": event, **details})
            return
        line = f"{event}  " + "  ".join(f"{key} {plain(str(value))}" for key, value in details.items())
        print(line, file=sys.stdout if event == "ready" else sys.stderr, flush=True)

    return report


def _lasting(report: Reporter) -> Reporter:
    """A server does not end because its messages cannot be written."""

    def lasting(event: str, details: dict[str, Any]) -> None:
        with suppress(OSError, FileFailure):
            report(event, details)

    return lasting


def _in_background(session: Session, layout: Layout, options: dict[str, Any]) -> None:
    from barchan.cli.daemon import end_of, in_background, last_lines, put_aside
    from barchan.cli.datadir import log_path

    log, volume = log_path(layout), volume_size(layout)
    put_aside(log)
    began = end_of(log)
    told = _decode(in_background(log, lambda tell: _serve_detached(layout, options, tell)))
    if "ready" in told:
        report = reporter(session)
        report("ready", {**told["ready"], "log": str(log)})
        _report_scratch(report, layout, volume, options["scratch_bytes"])
        return
    if not session.json:
        for line in last_lines(log, began):
            if not line.startswith("error: "):  # that is what is raised
                session.note(f"  {plain(line)}")
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
