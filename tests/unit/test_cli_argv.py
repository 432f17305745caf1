"""Where our options end and the program's arguments begin."""

from __future__ import annotations

import click
import pytest

from barchan.cli.argv import ProgramCommand, split

VALUED = {"-e", "--env", "-w"}


@pytest.mark.parametrize(
    ("args", "ours", "rest"),
    [
        ([], [], []),
        (["x", "-i"], [], ["x", "-i"]),
        (["-i", "x"], ["-i"], ["x"]),
        (["-e", "A=1", "x"], ["-e", "A=1"], ["x"]),
        (["-eA=1", "x"], ["-eA=1"], ["x"]),
        (["-ie", "A=1", "x"], ["-ie", "A=1"], ["x"]),
        (["--env", "--", "x"], ["--env", "--"], ["x"]),
        (["--env=A", "x"], ["--env=A"], ["x"]),
        (["--", "-x", "--"], [], ["-x", "--"]),
        (["-i", "--", "--"], ["-i"], ["--"]),
        (["-"], [], ["-"]),
        (["-e"], ["-e"], []),
    ],
)
def test_split(args: list[str], ours: list[str], rest: list[str]) -> None:
    assert split(args, VALUED) == (ours, rest)


@click.command(cls=ProgramCommand)
@click.option("-i", "--interactive", is_flag=True)
@click.option("-e", "--env", multiple=True)
@click.argument("target")
@click.argument("argv", nargs=-1, required=True)
def command(interactive: bool, env: tuple[str, ...], target: str, argv: tuple[str, ...]) -> object:
    return interactive, env, target, argv


@pytest.mark.parametrize(
    "args",
    [
        ["-i", "-e", "A=1", "t", "--", "ls", "-l", "--"],
        ["t", "-i", "-e", "A=1", "--", "ls", "-l", "--"],
        ["-i", "t", "-eA=1", "ls", "-l", "--"],
        ["-e", "A=1", "-i", "t", "ls", "-l", "--"],
    ],
)
def test_options_on_either_side_of_the_target(args: list[str]) -> None:
    assert command.main(args, standalone_mode=False) == (True, ("A=1",), "t", ("ls", "-l", "--"))


def test_the_programs_options_are_never_ours() -> None:
    assert command.main(["t", "sh", "-i", "-e", "x"], standalone_mode=False) == (
        False,
        (),
        "t",
        ("sh", "-i", "-e", "x"),
    )
    assert command.main(["t", "--", "-i"], standalone_mode=False) == (False, (), "t", ("-i",))


@pytest.mark.parametrize("args", [[], ["t"], ["t", "--"], ["--bad", "t", "x"], ["t", "--bad", "x"]])
def test_refused(args: list[str]) -> None:
    with pytest.raises(click.UsageError):
        command.main(args, standalone_mode=False)
