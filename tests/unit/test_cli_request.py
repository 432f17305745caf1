"""Options to request values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from barchan.cli.request import (
    OUTPUT_LIMIT,
    check_shell_use,
    check_terminal_use,
    exec_options,
    exec_request,
    program_options,
    sandbox_options,
    sandbox_spec,
)
from barchan.errors import InvalidRequest
from barchan.locks import EnvironmentLock, LockedImage
from barchan.spec import GIB, MIB, EnvironmentRef, Exec, Limits, SandboxSpec, Terminal


@click.command()
@sandbox_options
@program_options
@click.argument("environment")
def make(environment: str, **options: Any) -> SandboxSpec:
    return sandbox_spec(environment, options)


@click.command()
@exec_options
@click.argument("argv", nargs=-1)
def start(argv: tuple[str, ...], **options: Any) -> Exec:
    return exec_request(argv, options)


def spec(*args: str) -> SandboxSpec:
    made = make.main(list(args), standalone_mode=False)
    assert isinstance(made, SandboxSpec)
    return made


def request(*args: str) -> Exec:
    made = start.main(list(args), standalone_mode=False)
    assert isinstance(made, Exec)
    return made


def test_defaults_are_the_specs() -> None:
    assert spec("debian-12") == SandboxSpec(environment=EnvironmentRef(base="debian-12"))


def test_everything() -> None:
    made = spec(
        *("debian-12@3", "--workspace", "w", "-T", "a", "--toolkit", "b@2", "--memory", "1g", "--cpus", "0.5"),
        *("--pids", "64", "--disk", "100m", "--label", "k=v", "-e", "A=1", "--secret", "B=2", "-u", "user", "-w", "/x"),
        *("--idle-timeout", "5m", "--lifetime", "2h", "--hostname", "h", "--setuid", "--ptrace"),
    )
    assert made == SandboxSpec(
        environment=EnvironmentRef(base="debian-12@3", workspace="w", toolkits=("a", "b@2")),
        limits=Limits(memory=GIB, cpus=0.5, pids=64, disk=100 * MIB),
        labels={"k": "v"},
        env={"A": "1"},
        secrets={"B": "2"},
        user="user",
        workdir="/x",
        hostname="h",
        idle_timeout=300,
        lifetime=7200,
        setuid=True,
        ptrace=True,
    )


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["../x"], "lock"),
        (["x", "--memory", "1"], "limits.memory"),
        (["x", "--pids", "-5"], "limits.pids"),
        (["x", "--cpus", "nan"], "limits.cpus"),
        (["x", "--label", "nope"], "labels"),
        (["x", "-e", "=1"], "env"),
        (["x", "-e", "A=\udcff"], "env"),
        (["x", "--secret", "S=\udcff"], "secrets"),
        (["x", "-w", "relative"], "workdir"),
        (["x", "--hostname", "-"], "hostname"),
    ],
)
def test_sandbox_refused(args: list[str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spec(*args)
    assert caught.value.field == field


def test_a_command_is_bytes() -> None:
    made = request(
        "-e", "A=\udcff", "--secret", "S=1", "-u", "0:0", "-w", "/\udcfe", "-i", "--timeout", "1m", "x", "\udcfd"
    )
    assert made == Exec(
        argv=(b"x", b"\xfd"),
        cwd=b"/\xfe",
        env={b"A": b"\xff"},
        secrets={b"S": b"1"},
        user="0:0",
        timeout=60,
        stdin=True,
        output_limit=OUTPUT_LIMIT,
    )


def test_command_defaults() -> None:
    assert request("x") == Exec(argv=(b"x",), output_limit=OUTPUT_LIMIT)
    assert request("--output-limit", "1k", "x").output_limit == 1024


@pytest.mark.parametrize(("args", "field"), [(["a\0"], "argv"), (["-w", "a\0", "x"], "cwd")])
def test_command_refused(args: list[str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(*args)
    assert caught.value.field == field


def test_a_terminal() -> None:
    assert request("-t", "cat").tty == Terminal()
    made = request("-it")
    assert (made.argv, made.stdin, made.tty) == ((), True, Terminal()), "no command stands for a shell"
    assert (request("-i").argv, request("-i").stdin, request("-i").tty) == ((), True, None)
    for useless in ((), ("-t",)):
        with pytest.raises(InvalidRequest, match="ARGV"):
            check_shell_use(request(*useless))


def test_what_a_terminal_needs() -> None:
    check_terminal_use(request("cat"), json=True)
    check_terminal_use(request("-t", "cat"), json=False)
    with pytest.raises(InvalidRequest, match="--json"):
        check_terminal_use(request("-t", "cat"), json=True)


def test_a_path_is_a_lock_file(tmp_path: Path) -> None:
    digest = "sha256:" + "0" * 64
    lock = EnvironmentLock(base=LockedImage(name="a", reference="a@1", digest=digest, layers=(digest,)))
    (tmp_path / "env.lock").write_text(str(lock))
    assert spec(str(tmp_path / "env.lock")).environment == lock.environment
