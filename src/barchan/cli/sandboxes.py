"""`barchan create`, `ls`, `ps` and `stop`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

import click

from barchan.cli.connect import CREATE_SECONDS, Where, open_client, where_options
from barchan.cli.request import program_options, sandbox_options, sandbox_spec
from barchan.cli.session import Session, json_option
from barchan.cli.text import command_line, plain, span
from barchan.cli.values import SECONDS, parse_pairs
from barchan.environments import EnvironmentRef, PullProgress
from barchan.errors import BarchanError
from barchan.image_refs import is_image
from barchan.sizes import size
from barchan.spec import BackendName, ProcessInfo, SandboxInfo, SandboxSpec, SandboxState, node_of
from barchan.wire.messages import MOST_AT_ONCE

if TYPE_CHECKING:
    from barchan.sdk import Client


@click.command()
@click.argument("environment", metavar="ENV")
@click.option(
    "-n", "--count", type=click.IntRange(1, MOST_AT_ONCE), help="Make so many by one request, at most 10,000."
)
@sandbox_options
@program_options
@where_options
@json_option
@click.pass_obj
def create(session: Session, /, environment: str, count: int | None, where: Where, **options: Any) -> int:
    """Make a sandbox of environment ENV and print its id.

    It runs until it is stopped, or until its time is over. With -n, each id is printed as soon as its sandbox is ready, and
    the exit code is 1 if one could not be made; those whose ids were not printed when it is interrupted are removed.
    """
    import asyncio

    spec = sandbox_spec(environment, options)
    if count is not None:
        return asyncio.run(_create_many(session, where, count, spec))
    _print_id(session, asyncio.run(_create(session, where, spec)))
    return 0


async def _create(session: Session, where: Where, spec: SandboxSpec) -> SandboxInfo:
    from barchan.cli.pulling import pull_bars

    async with open_client(where) as client:
        with pull_bars(session) as told:
            return (await client.create_from(spec, timeout=CREATE_SECONDS, progress=told)).info


async def _create_many(session: Session, where: Where, count: int, spec: SandboxSpec) -> int:
    from barchan.cli.progress import count_bar

    async with open_client(where) as client, client.create_many_from(count, spec) as batch:
        with count_bar(count) as tell:
            done = 0
            async for sandbox in batch:
                _print_id(session, sandbox.info)
                done += 1
                tell(done, len(batch.failures))
            tell(done, len(batch.failures))
    errors = [failure.error for failure in batch.failures]
    for error in errors if session.json else folded(errors, count):
        session.report(error)
    return 1 if errors else 0


def folded(errors: Sequence[BarchanError], count: int) -> Iterator[BarchanError]:
    """One for each kind, that says how many of `count` met it. Of several texts, which differ in figures, the first one's."""
    kinds: dict[tuple[str, str], list[BarchanError]] = {}
    for error in errors:
        kinds.setdefault((error.code, error.field), []).append(error)
    for first, *others in kinds.values():
        text = f"{1 + len(others)} of {count}: {first.message}"
        yield type(first)(text, hint=first.hint, phase=first.phase, field=first.field)


def _print_id(session: Session, info: SandboxInfo) -> None:
    session.emit(info) if session.json else click.echo(plain(info.id))


@click.command()
@click.option(
    "-a", "--all", "ended", is_flag=True, help="Also those that stopped or failed lately: a day, 10,000 of each node."
)
@click.option("--label", "labels", metavar="K=V", multiple=True, help="Only those with this label; repeatable.")
@click.option(
    "--state", "states", type=click.Choice(get_args(SandboxState)), multiple=True, help="In this state; repeatable."
)
@click.option(
    "--env",
    "environment",
    metavar="LAYER",
    help="Made of this layer: NAME, NAME@VERSION, a digest, an image, or as it was asked for.",
)
@click.option("--backend", type=click.Choice(get_args(BackendName)), help="Of this kind.")
@click.option("--node", metavar="NAME", help="On this node.")
@click.option("--prefix", metavar="TEXT", default="", help="Whose id begins so.")
@click.option(
    "--newer-than", type=SECONDS, metavar="S", help="Made in the last S seconds; 5m and 2h are understood, too."
)
@click.option("--older-than", type=SECONDS, metavar="S", help="Made longer ago.")
@click.option("-q", "--quiet", is_flag=True, help="Ids only.")
@where_options
@json_option
@click.pass_obj
def ls(
    session: Session,
    /,
    labels: tuple[str, ...],
    newer_than: float | None,
    older_than: float | None,
    quiet: bool,
    where: Where,
    **filters: Any,
) -> None:
    """List sandboxes: those that live, unless asked for others. What is given must all apply."""
    import asyncio
    import time

    from barchan.cli.tables import show

    now = time.time()
    filters["created_after"] = None if newer_than is None else now - newer_than
    filters["created_before"] = None if older_than is None else now - older_than
    found = asyncio.run(_list(where, parse_pairs(labels, "labels"), filters))
    if session.json:
        session.emit(found)
    elif quiet:
        for info in found:
            click.echo(plain(info.id))
    else:
        show(HEAD, [row(info, now) for info in found], SPARE)


async def _list(where: Where, labels: dict[str, str], filters: dict[str, Any]) -> tuple[SandboxInfo, ...]:
    async with open_client(where) as client:
        return await client.list(labels, **filters)


HEAD = ("id", "state", "node", "environment", ">age", ">ends in", "labels")
SPARE = ("node", ">ends in", "labels", ">age")


def row(info: SandboxInfo, now: float) -> tuple[str, ...]:
    """For the table of `ls`."""
    why = info.reason or (info.pulling and f"{info.pulling.phase} {share(info.pulling)}".rstrip())
    state = f"{info.state} ({why})" if why else info.state
    ends = span(max(info.expires - now, 0)) if info.state in ("creating", "ready") else ""
    labels = " ".join(f"{key}={value}" for key, value in sorted(info.labels.items()))
    environment = " + ".join(shown_names(info.environment))
    return (info.id, state, node_of(info.id), environment, span(max(now - info.created, 0)), ends, labels)


def shown_names(environment: EnvironmentRef) -> Sequence[str]:
    """An image as it was asked for, since nobody knows a digest; the rest with its version."""
    names = environment.names()
    pairs = zip(names, environment.asked or names, strict=False)
    return [asked if is_image(name) else name for name, asked in pairs]


def share(progress: PullProgress) -> str:
    """How much of an image is here, in per cent; "" before its size is known."""
    return f"{100 * progress.done // progress.total} %" if progress.total else ""


@click.command()
@click.argument("sandbox", metavar="ID")
@where_options
@json_option
@click.pass_obj
def ps(session: Session, sandbox: str, where: Where) -> None:
    """List the processes of sandbox ID, with their ids as seen inside."""
    import asyncio

    from barchan.cli.tables import show

    node_of(sandbox)
    found = asyncio.run(_processes(where, sandbox))
    if session.json:
        session.emit([process_document(process) for process in found])
    else:
        rows = [(str(p.pid), str(p.ppid), str(p.uid), p.state, size(p.rss), command_line(p.argv)) for p in found]
        show((">pid", ">ppid", ">uid", "state", ">memory", "command"), rows)


async def _processes(where: Where, sandbox: str) -> tuple[ProcessInfo, ...]:
    async with open_client(where) as client:
        return await (await client.get(sandbox)).processes()


def process_document(process: ProcessInfo) -> dict[str, object]:
    """For JSON: arguments as text, what is not UTF-8 in them as U+FFFD."""
    argv = [part.decode("utf-8", "replace") for part in process.argv]
    fields = ("pid", "ppid", "uid", "state", "rss", "exec_id")
    return {**{field: getattr(process, field) for field in fields}, "argv": argv}


@click.command()
@click.argument("sandboxes", metavar="ID...", nargs=-1, required=True)
@where_options
@json_option
@click.pass_obj
def stop(session: Session, sandboxes: tuple[str, ...], where: Where) -> int:
    """Stop sandboxes with everything inside. Stopping a stopped one is fine."""
    import asyncio

    return asyncio.run(_stop_all(session, where, sandboxes))


async def _stop_all(session: Session, where: Where, sandboxes: tuple[str, ...]) -> int:
    """All of them, even if one cannot be stopped; then the exit code is 1."""
    import asyncio

    async with open_client(where) as client:
        results = await asyncio.gather(*(_stop(session, client, sandbox) for sandbox in sandboxes))
    return 0 if all(results) else 1


async def _stop(session: Session, client: Client, sandbox: str) -> bool:
    try:
        node_of(sandbox)
        info = await (await client.get(sandbox)).stop()
    except BarchanError as error:
        session.report(error)
        return False
    session.emit(info) if session.json else click.echo(plain(info.id))
    return True
