"""The `barchan` command. A command's module, and what it needs, is imported when the command is run."""

from __future__ import annotations

import importlib
import signal
import sys
from typing import Any

import click

from barchan._version import __version__
from barchan.cli.exits import OUTPUT_GONE
from barchan.cli.output import claim, settle
from barchan.cli.session import Session, usage_error
from barchan.errors import BarchanError, InternalError

COMMANDS = {
    "up": ("barchan.cli.up", "Start the server on this host."),
    "down": ("barchan.cli.down", "Stop the server and its sandboxes."),
    "doctor": ("barchan.cli.doctor", "What this host can do, and what to fix."),
    "env": ("barchan.cli.env", "The layers that sandboxes are made of."),
    "layer": ("barchan.cli.layer", "What environments are made of, and what of it nobody needs."),
    "run": ("barchan.cli.run", "Run a command in a new sandbox."),
    "create": ("barchan.cli.sandboxes", "Make a sandbox and print its id."),
    "exec": ("barchan.cli.run", "Run a command in a sandbox."),
    "shell": ("barchan.cli.run", "Work in a sandbox: a shell on a terminal."),
    "wait": ("barchan.cli.commands", "Wait for a command to end."),
    "kill": ("barchan.cli.commands", "Send a signal to a command."),
    "cp": ("barchan.cli.cp", "Copy files and trees to or from a sandbox."),
    "ls": ("barchan.cli.sandboxes", "List sandboxes."),
    "ps": ("barchan.cli.sandboxes", "List the processes of a sandbox."),
    "stats": ("barchan.cli.stats", "What sandboxes use."),
    "nodes": ("barchan.cli.nodes", "What each node has, and what of it is promised."),
    "logs": ("barchan.cli.logs", "What the commands of a sandbox wrote."),
    "stop": ("barchan.cli.sandboxes", "Stop sandboxes."),
    "version": ("barchan.cli.version", "Print the version."),
}
"""Name → module and summary, so that `--help` imports none of them."""

ELSEWHERE = {
    "rm": "stop",
    "images": "env ls",
    "image": "env",
    "pull": "env pull",
    "build": "env build",
    "rmi": "env rm",
    "start": "create",
    "info": "doctor",
    "top": "ps",
    "attach": "logs -f",
    "list": "ls",
    "copy": "cp",
    "delete": "stop",
    "sh": "shell",
}
"""What other tools call it."""
LIKE_DOCKER_RUN = frozenset({"run", "exec", "shell", "wait"})
"""Their exit codes below 125 are the program's own."""


class OutputGone(Exception):
    """Nobody reads our output. Not an OSError, which click would take for itself."""


class Commands(click.Group):
    """Looks commands up in the table above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = getattr(module, cmd_name + "_command", None) or getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            known = ELSEWHERE.get(args[0])
            close = difflib.get_close_matches(args[0], COMMANDS, n=1) if known is None else []
            if known or close:
                raise click.UsageError(f"{error.message} Did you mean {known or close[0]!r}?", ctx) from error
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError as error:
            raise OutputGone from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="barchan %(version)s")
def barchan() -> None:
    """Sandboxes for training and evaluating AI agents."""


def main(argv: list[str] | None = None) -> None:
    """Run one command and end the process with its exit code, or of SIGINT when it was interrupted.

    The latter is how Python ends where an interrupt comes too early or too late for us, and what makes a shell end its loop.
    """
    try:
        claim()
        code = invoke(sys.argv[1:] if argv is None else argv)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        settle()
        signal.raise_signal(signal.SIGINT)
        code = 128 + signal.SIGINT  # the first process of a container does not die of it
    settle()
    sys.exit(code)


def invoke(argv: list[str]) -> int:
    """Run one command. Returns its exit code; what went wrong has been shown on stderr. Raises `KeyboardInterrupt`."""
    session = Session()
    failed = 125 if argv and argv[0] in LIKE_DOCKER_RUN else 1
    try:
        result: Any = barchan.main(argv, prog_name="barchan", standalone_mode=False, obj=session)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.UsageError as error:
        # Refused before the options were known: look for the flag itself.
        session.json = session.json or "--json" in argv[: argv.index("--") if "--" in argv else None]
        session.report(usage_error(error))
        return max(failed, 2)
    except BarchanError as error:
        session.report(error)
        return failed
    except click.Abort as error:
        raise KeyboardInterrupt from error
    except OutputGone:
        return OUTPUT_GONE  # quietly, as `head` expects of its left neighbour
    except Exception as error:
        if _interrupted(error):
            raise KeyboardInterrupt from error
        return _unexpected(session, error, failed)


def _interrupted(error: BaseException | None) -> bool:
    """Python 3.11 wraps an interrupt that comes while a class body is run."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _unexpected(session: Session, error: Exception, code: int) -> int:
    import traceback

    if not session.json:
        traceback.print_exc()
    session.report(InternalError(f"{type(error).__name__}: {error}", hint="this is a defect of barchan"))
    return code


if __name__ == "__main__":
    main()
