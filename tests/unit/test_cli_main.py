"""The command as a process: help, errors, exit codes, and what it imports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest

from barchan import spec
from barchan.cli.main import COMMANDS, barchan, invoke
from barchan.cli.session import OPTIONS, addressed, describe, usage_error
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
        (["exec", "n-12345678"], 125, "Missing argument 'ARGV...'"),
        (["exec", "-t", "n-12345678"], 125, "Missing argument 'ARGV...'"),
        (["exec", "-id", "n-12345678"], 125, "--detach: neither"),
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


@pytest.mark.parametrize("argv", [("ls",), ("nodes",), ("run", "debian-12", "true")])
def test_the_environment_names_the_data_directory(argv: tuple[str, ...], tmp_path: Path) -> None:
    env = {**os.environ, "BARCHAN_DATA": str(tmp_path / "a")}
    assert f"barchan up --data {tmp_path}/a" in run(*argv, env=env).stderr
    told = run(argv[0], "--data", str(tmp_path / "b"), *argv[1:], env=env).stderr
    assert f"barchan up --data {tmp_path}/b" in told, "an option counts more"
    assert "/here/api.sock" in run(*argv, env={**env, "BARCHAN_URL": "unix:/here/api.sock"}).stderr


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
    assert (table.returncode, table.stdout.split()) == (0, ["name", "tags", "size", "age", "digest", "source"])
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


@pytest.mark.parametrize(
    ("field", "text", "shown"),
    [
        ("limits.memory", "limits.memory: 1 B is out of range", "--memory: 1 B is out of range"),
        ("mounts.source", "mounts: no node has x", "--mount: no node has x"),
        ("env", "env: 'A B' is no name", "--env: 'A B' is no name"),
        ("id", "id: something", "id: something"),
        ("user", "no such user", "no such user"),
    ],
)
def test_the_option_is_named_and_not_the_field(field: str, text: str, shown: str) -> None:
    assert describe(InvalidRequest(text, field=field)) == f"error: {shown} [invalid_request]"


def test_every_named_option_exists() -> None:
    context = click.Context(barchan)
    commands = [barchan.get_command(context, name) for name in COMMANDS]
    known = {opt for command in commands if command for param in command.params for opt in param.opts}
    assert set(OPTIONS.values()) <= known


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["rm", "x"], "'stop'"),
        (["images"], "'env ls'"),
        (["statz"], "'stats'"),
        (["run", "-v", "/a:/b", "debian-12", "true"], "--mount NAME:/TARGET"),
        (["run", "--rm", "debian-12", "true"], "--keep"),
        (["exec", "--", "ls", "-la"], "'ls' is not a sandbox id"),
        (["run", "-e", "A B=1", "debian-12", "true"], "'A B' is no name of a variable"),
        (["run", "--mount", "d:/x:rw", "debian-12", "true"], "always read-only"),
    ],
)
def test_what_people_try_first_is_told_better(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(argv) in (2, 125)
    assert text in capsys.readouterr().err


def test_version_as_an_option() -> None:
    assert run("--version").stdout == run("version").stdout


@pytest.mark.parametrize("command", ["doctor", "up"])
def test_a_data_directory_that_cannot_be(command: str) -> None:
    done = run(command, "--data", "/proc/x")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: --data: ") and done.stderr.endswith("[invalid_request]\n")


def test_doctor_says_each_thing_that_is_missing_once() -> None:
    told = run("doctor").stdout
    missing = [check for check in json.loads(run("doctor", "--json").stdout)["checks"] if not check["ok"]]
    for check in missing:
        lines = [line for line in told.splitlines() if line.startswith((f"{check['name']}: ", "note: "))]
        assert len(lines) == 1, lines


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    source = {**os.environ, "PYTHONPATH": str(Path(spec.__file__).parents[1])}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for how in ((), ("-d",)):
            done = run("up", *how, "--data", str(tmp_path / "new"), "--listen", address, env=source)
            assert (done.returncode, done.stderr.count(address)) == (1, 1), done.stderr
            assert "ss -ltnp" in done.stderr and done.stderr.endswith("[conflict]\n")
            assert not list(tmp_path.iterdir()), "a new directory is as it was"


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


def test_an_interrupt_that_python_wraps_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 3.11 does with one that comes while a class body is run, so while a module is imported."""

    def interrupted(name: str) -> None:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr("barchan.cli.main.importlib.import_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        invoke(["version"])
