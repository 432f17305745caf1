"""The command as a process: help, errors, exit codes, and what it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from barchan import spec
from barchan.cli.main import COMMANDS, barchan, invoke
from barchan.cli.session import addressed, describe, usage_error
from barchan.cli.up import check_listen
from barchan.errors import BarchanError, EnvironmentNotFound, ErrorBody, InvalidRequest, from_body

HEAVY = ("rich", "aiohttp", "uvloop", "asyncio", "barchan.sdk", "barchan.layers", "barchan.kernel")


def run(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "barchan.cli.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_help_lists_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name: str) -> None:
    command = barchan.get_command(click.Context(barchan), name)
    assert command is not None and command.name == name
    commands = command.commands.values() if isinstance(command, click.Group) else [command]
    for each in commands:
        assert each.help, "says what it does"
        assert any("--json" in p.opts for p in each.params), f"{each.name} has no --json"


@pytest.mark.parametrize("argv", [("--help",), ("exec", "--help"), ("run", "--help"), ("version",)])
def test_starts_without_what_it_does_not_need(argv: tuple[str, ...]) -> None:
    script = (
        f"import sys\nfrom barchan.cli.main import invoke\ncode = invoke({list(argv)!r})\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[] 0"


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["nope"], 2, "nope"),
        (["ls", "--nope"], 2, "--nope"),
        (["up", "--scratch-bytes", "lots"], 2, "is not a size"),
        (["kill", "n-12345678", "e", "-s", "NOPE"], 2, "is not a signal"),
        (["wait", "n-12345678"], 125, "Missing argument 'EXEC'"),
        (["run"], 125, "Missing argument 'ENV'"),
        (["run", "debian-12"], 125, "Missing argument 'ARGV...'"),
        (["run", "--memory", "x", "debian-12", "true"], 125, "is not a size"),
        (["exec", "--nope", "n-12345678", "true"], 125, "--nope"),
    ],
)
def test_usage_errors(argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and text in err and err.endswith(" [invalid_request]\n")
    assert err.count("\n") == 1


def test_usage_errors_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["exec", "--json", "--nope", "n-12345678", "--", "x"]) == 125
    body = json.loads(capsys.readouterr().err)
    assert (body["code"], body["party"]) == ("invalid_request", "caller")


def test_the_programs_json_flag_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    invoke(["exec", "--nope", "n-12345678", "--", "x", "--json"])
    assert capsys.readouterr().err.startswith("error: ")


def test_no_server(tmp_path: Path) -> None:
    argv = ("debian-12", "--data", str(tmp_path), "--", "true")
    done = run("run", *argv)
    assert (done.returncode, done.stdout) == (125, "")
    assert "barchan up" in done.stderr and done.stderr.endswith("[api_unavailable]\n")
    done = run("run", "--json", *argv)
    assert json.loads(done.stderr)["code"] == "api_unavailable"
    done = run("ls", "--data", str(tmp_path))
    assert done.returncode == 1
    assert f"barchan up --data {tmp_path}" in done.stderr


def test_hints_are_for_the_data_directory_that_was_given(tmp_path: Path) -> None:
    assert addressed("`barchan env rm x@2` or `barchan up`", Path("/a b")) == (
        "`barchan env rm x@2 --data '/a b'` or `barchan up --data '/a b'`"
    )
    assert addressed("`barchan exec -e` takes any bytes", Path("/a")) == "`barchan exec -e` takes any bytes"
    assert addressed("`barchan up --data /b`", Path("/a")) == "`barchan up --data /b`"
    assert addressed("`barchan up`", None) == "`barchan up`"
    assert f"`barchan env ls --data {tmp_path}`" in run("env", "rm", "none", "--data", str(tmp_path)).stderr


def test_nothing_is_made_by_looking(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    table = run("env", "ls", "--data", data)
    assert (table.returncode, table.stdout.split()) == (0, ["name", "size", "age", "digest", "source"])
    assert run("env", "ls", "--json", "--data", data).stdout == "[]\n"
    assert "[environment_not_found]" in run("env", "rm", "none", "--data", data).stderr
    assert run("doctor", "--json", "--data", data).stdout.startswith('{"containers":')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["1k", "0", "127m"])
def test_a_scratch_volume_that_cannot_be_is_refused_here(size: str, tmp_path: Path) -> None:
    done = run("up", "--scratch-bytes", size, "--data", str(tmp_path / "data"))
    assert done.returncode == 1
    assert "too small, at least 128 MiB" in done.stderr
    assert not list(tmp_path.iterdir())


def test_tls_files_that_do_not_work_are_named(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("no certificate")
    (tmp_path / "k.pem").write_text("no key")
    argv = ("--listen", "127.0.0.1:0", "--tls-cert", "c.pem", "--tls-key", "k.pem", "--data", str(tmp_path / "data"))
    source = {**os.environ, "PYTHONPATH": str(Path(spec.__file__).parents[1])}
    done = run("up", "-d", *argv, cwd=tmp_path, env=source)
    assert done.returncode == 1
    assert f"{tmp_path}/c.pem" in done.stderr and f"{tmp_path}/k.pem" in done.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("sides", [("a", "b"), ("n-12345678:/a", "n-12345678:/b"), ("-", "-")])
def test_a_copy_has_one_side_in_a_sandbox(sides: tuple[str, str]) -> None:
    assert "exactly one of SRC and DST" in run("cp", *sides).stderr


def test_the_document_and_the_file_do_not_share_an_output() -> None:
    assert "standard output is the file" in run("cp", "--json", "n-12345678:/a", "-").stderr


@pytest.mark.parametrize("argv", [("exec", "not an id", "--", "x"), ("stop", "x-1"), ("ps", "../x"), ("logs", "a")])
def test_a_wrong_id_is_refused_before_anything_is_asked(argv: tuple[str, ...], tmp_path: Path) -> None:
    done = run(argv[0], "--data", str(tmp_path), *argv[1:])
    assert done.returncode == (125 if argv[0] == "exec" else 1)
    assert "is not a sandbox id" in done.stderr


def test_version_as_json() -> None:
    assert json.loads(run("version", "--json").stdout)["barchan"]


def test_output_that_nobody_reads() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "barchan.cli.main", "version", "--json"],
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_errors_are_text_that_cannot_act_on_the_terminal() -> None:
    error = EnvironmentNotFound("no environment '\x1b[2J'", hint="did you mean\nx?")
    assert describe(error) == "error: no environment '\\x1b[2J' (did you mean\\nx?) [environment_not_found]"


def test_usage_error_names_the_option() -> None:
    error = usage_error(click.BadParameter("bad", param=click.Option(["--memory"])))
    assert error.field == "memory"
    body: ErrorBody = error.body()
    assert type(from_body(body)) is InvalidRequest


def test_listen_rules() -> None:
    cert, key = Path("/c"), Path("/k")
    check_listen(None, None, None, False)
    check_listen(("127.0.0.1", 1), None, None, False)
    check_listen(("0.0.0.0", 1), cert, key, False)
    check_listen(("0.0.0.0", 1), None, None, True)
    for listen, one, other in [
        (("0.0.0.0", 1), None, None),
        (("host.example", 1), None, None),
        (("0.0.0.0", 1), cert, None),
        (("0.0.0.0", 1), None, key),
        (None, cert, key),
    ]:
        with pytest.raises(BarchanError) as caught:
            check_listen(listen, one, other, False)
        assert caught.value.field in ("listen", "tls_cert")
