"""Options that describe a sandbox or a command, and the values they make."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from barchan.cli.values import SECONDS, SIZE, parse_pairs
from barchan.errors import InvalidRequest
from barchan.mounts import DataMount
from barchan.networks import NetworkRules
from barchan.spec import EnvironmentRef, Exec, Limits, SandboxSpec, Terminal, check_exec, check_spec

F = TypeVar("F", bound=Callable[..., Any])
OUTPUT_LIMIT = 1 << 30

_SANDBOX = (
    click.option("--workspace", metavar="LAYER", help="Layer on top of the environment."),
    click.option(
        "-T", "--toolkit", "toolkits", metavar="LAYER", multiple=True, help="Layer on top of all; repeatable."
    ),
    click.option("--memory", type=SIZE, metavar="SIZE", help="Memory, e.g. 512m.  [default: 512m]"),
    click.option("--cpus", type=float, metavar="N", help="CPUs, fractions allowed.  [default: 1]"),
    click.option("--pids", type=int, metavar="N", help="Processes and threads.  [default: 512]"),
    click.option("--disk", type=SIZE, metavar="SIZE", help="Bytes it may write, e.g. 1g.  [default: 2g]"),
    click.option("--label", "labels", metavar="K=V", multiple=True, help="Repeatable."),
    click.option("--hostname", help="Its host name.  [default: sandbox]"),
    click.option(
        "--idle-timeout", type=SECONDS, metavar="S", help="Stop it after S seconds without use.  [default: 1h]"
    ),
    click.option("--lifetime", type=SECONDS, metavar="S", help="Stop it after S seconds in any case.  [default: 24h]"),
    click.option(
        "--mount",
        "mounts",
        metavar="NAME:/TARGET[:noexec]",
        multiple=True,
        help="Mount a directory of the node, always read-only, by the name its administrator gave it; with `:noexec`, no "
        "programs from it; repeatable.",
    ),
    click.option(
        "--network",
        type=click.Choice(["deny", "open"]),
        default="deny",
        help="deny: its loopback alone; open: the Internet too.  [default: deny]",
    ),
    click.option("--setuid", is_flag=True, help="Let set-user-id programs work."),
    click.option("--ptrace", is_flag=True, help="Allow debuggers inside."),
)

_PROGRAM = (
    click.option("-e", "--env", metavar="K=V", multiple=True, help="Environment variable; repeatable."),
    click.option("--secret", "secrets", metavar="K=V", multiple=True, help="Like -e, but never recorded; repeatable."),
    click.option("-u", "--user", metavar="USER", help="User name or id, with :group if wanted."),
    click.option("-w", "--workdir", metavar="DIR", help="Directory to start in."),
)

_EXEC = (
    *_PROGRAM,
    click.option("-i", "--interactive", is_flag=True, help="Send standard input; without a command, to a shell."),
    click.option(
        "-t", "--tty", is_flag=True, help="On a terminal. With -i, every key goes there, and ours must be one."
    ),
    click.option("--timeout", type=SECONDS, metavar="S", help="End it after S seconds, exit code 124."),
    click.option(
        "--output-limit",
        type=SIZE,
        metavar="SIZE",
        default=OUTPUT_LIMIT,
        help="Keep that much of stdout and of stderr.  [default: 1g]",
    ),
)


def _adder(options: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def sandbox_options(command: F) -> F:
    """What `sandbox_spec` takes."""
    return _adder(_SANDBOX)(command)


def program_options(command: F) -> F:
    """What every program in a sandbox gets."""
    return _adder(_PROGRAM)(command)


def exec_options(command: F) -> F:
    """What `exec_request` takes."""
    return _adder(_EXEC)(command)


def sandbox_spec(environment: str, options: dict[str, Any]) -> SandboxSpec:
    """From the options above; absent ones leave the defaults. Raises `InvalidRequest`."""
    chosen = {key: options[key] for key in ("hostname", "idle_timeout", "lifetime", "user", "workdir")}
    spec = SandboxSpec(
        environment=_environment(environment, options["workspace"], tuple(options["toolkits"])),
        limits=Limits(**_given({key: options[key] for key in ("memory", "cpus", "pids", "disk")})),
        labels=parse_pairs(options["labels"], "labels"),
        env=_text_pairs(options["env"], "env"),
        secrets=_text_pairs(options["secrets"], "secrets"),
        network=NetworkRules(mode=options["network"]),
        setuid=options["setuid"],
        ptrace=options["ptrace"],
        mounts=tuple(parse_mount(text) for text in options["mounts"]),
        **_given(chosen),
    )
    return check_spec(spec)


def _environment(text: str, workspace: str | None, toolkits: tuple[str, ...]) -> EnvironmentRef:
    """A name, or the path of a lock file, `./env.lock` or absolute: no name begins like that."""
    from barchan.sdk._options import environment_of

    if text.startswith((".", "/")):
        return environment_of(None, None, None, text, workspace, toolkits)
    return EnvironmentRef(base=text, workspace=workspace, toolkits=toolkits)


def parse_mount(text: str) -> DataMount:
    """`NAME:/target`, or `NAME:/target:OPTIONS` with `noexec` or `ro`, which changes nothing, between commas."""
    source, *rest = text.split(":")
    target, *more = rest or [""]
    options = more[0].split(",") if more else []
    if not target or len(more) > 1:
        raise InvalidRequest(f"mounts: {text!r} is not NAME:/TARGET[:noexec]", field="mounts")
    if strange := [option for option in options if option not in ("ro", "noexec")]:
        raise InvalidRequest(
            f"mounts: {text!r}: no option {strange[0]!r}",
            field="mounts",
            hint="they are always read-only; `noexec` is the only choice",
        )
    return DataMount(source=source, target=target, noexec="noexec" in options)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _text_pairs(items: tuple[str, ...], field: str) -> dict[str, str]:
    pairs = _variables(items, field)
    try:
        "".join(map("".join, pairs.items())).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field}: not UTF-8", field=field, hint="`barchan exec -e` takes any bytes") from error
    return pairs


def exec_request(argv: tuple[str, ...], options: dict[str, Any]) -> Exec:
    """The command as bytes, as the kernel gave them to us; none stands for another program. Raises `InvalidRequest`."""
    request = Exec(
        argv=tuple(map(os.fsencode, argv)),
        cwd=os.fsencode(options["workdir"]) if options["workdir"] is not None else None,
        env=_byte_pairs(options["env"], "env"),
        secrets=_byte_pairs(options["secrets"], "secrets"),
        user=options["user"],
        timeout=options["timeout"],
        stdin=options["interactive"],
        output_limit=options["output_limit"],
        tty=Terminal() if options["tty"] else None,
    )
    return check_exec(request) if argv else request


def check_shell_use(request: Exec, why: str = "Missing argument 'ARGV...'") -> None:
    """Without a command it is a shell, which reads input. Raises `InvalidRequest` if it gets none."""
    if not request.argv and not request.stdin:
        # Not even with a terminal: nobody could type there, and nothing would ever end it.
        raise InvalidRequest(why, field="argv", hint="-it runs a shell on this terminal, -i one on standard input")


def check_terminal_use(request: Exec, *, json: bool) -> None:
    """Raises `InvalidRequest` for what cannot be shown, and when input is to come from a terminal and ours is none."""
    if request.tty is None:
        return
    if json:
        raise InvalidRequest("--json: a terminal shows bytes", field="tty", hint="leave out -t")
    if request.stdin and not os.isatty(0):
        raise InvalidRequest("the input device is not a TTY", field="tty", hint="leave out -t, or give it a terminal")


def _byte_pairs(items: tuple[str, ...], field: str) -> dict[bytes, bytes]:
    return {os.fsencode(key): os.fsencode(value) for key, value in _variables(items, field).items()}


def _variables(items: tuple[str, ...], field: str) -> dict[str, str]:
    """A name with a space is one argument too few or too many, and no shell could use it."""
    pairs = parse_pairs(items, field)
    if strange := [key for key in pairs if any(map(str.isspace, key))]:
        raise InvalidRequest(f"{field}: {strange[0]!r} is no name of a variable", field=field)
    return pairs
