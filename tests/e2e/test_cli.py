"""The command line against a real server: what people know from `docker run`."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from barchan import spec
from tests.e2e.conftest import make_tiny
from tests.server import Server, remove
from tests.terminals import LocalTerminal

MIB = 1 << 20
SMALL = ("--memory", "128m", "--disk", "64m", "--pids", "64")
EVERY_BYTE = bytes(range(256))


class Cli:
    """The command, on the run's server."""

    def __init__(self, server: Server, env: str) -> None:
        self._server = server
        self.env = env

    def argv(self, command: str, *argv: str | bytes | Path) -> list[str | bytes | Path]:
        return [sys.executable, "-m", "barchan.cli.main", command, "--data", str(self._server.data), *argv]

    def __call__(
        self, command: str, *argv: str | bytes | Path, stdin: bytes | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        feed: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        return subprocess.run(self.argv(command, *argv), capture_output=True, timeout=60, check=False, **feed)

    def run(self, *argv: str | bytes, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        return self("run", self.env, *SMALL, *argv, stdin=stdin)

    def ids(self) -> list[str]:
        return self("ls", "-q").stdout.decode().split()

    @contextmanager
    def started(self, *argv: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
        """`run --json`, and its sandbox's id."""
        command = self.argv("run", "--json", self.env, *SMALL, *argv)
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                created = json.loads(process.stdout.readline())
                yield process, created["sandbox"]
            finally:
                process.kill()


def said(process: subprocess.Popen[bytes], text: bytes) -> None:
    """Wait until the command has written `text`."""
    assert process.stdout is not None
    got = b""
    for line in process.stdout:
        if (event := json.loads(line))["event"] == "output":
            got += base64.b64decode(event["base64"])
        if text in got:
            return
    pytest.fail(f"ended after {got!r}")


@pytest.fixture(scope="session")
def cli(server: Server, tiny_env: str) -> Cli:
    return Cli(server, tiny_env)


@pytest.fixture
def sandbox(cli: Cli) -> Iterator[str]:
    made = cli("create", cli.env, *SMALL)
    assert made.returncode == 0, made.stderr
    id_ = made.stdout.decode().strip()
    yield id_
    assert cli("stop", id_).returncode == 0


# --- exit codes


@pytest.mark.parametrize("code", [0, 1, 42, 125, 255])
def test_the_programs_own_exit_code(cli: Cli, code: int) -> None:
    done = cli.run("--", "sh", "-c", f"exit {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


@pytest.mark.parametrize(
    ("options", "argv", "code", "told"),
    [
        (["--timeout", "0.5"], ["sleep", "60"], 124, b"timed out after 0.5 s"),
        ([], ["/etc/passwd"], 126, b"/etc/passwd: cannot be executed"),
        ([], ["no-such-program"], 127, b"no-such-program: not found"),
        ([], ["sh", "-c", "kill -9 $$"], 137, b""),
        ([], ["sh", "-c", "kill -TERM $$"], 143, b""),
        (["--memory", "32m"], ["sh", "-c", "x=a; while :; do x=$x$x; done"], 137, b"oom: "),
        ([], ["dd", "if=/dev/zero", "of=/f", "bs=1M", "count=100"], 1, b"disk_full: "),
        (["--pids", "12"], ["sh", "-c", "for i in $(seq 40); do sleep 9 & done; wait"], 2, b"pids: "),
        (["-u", "nobody-here"], ["true"], 125, b"[user_not_found]"),
    ],
)
def test_other_endings(cli: Cli, options: list[str], argv: list[str], code: int, told: bytes) -> None:
    done = cli.run(*options, "--", *argv)
    assert done.returncode == code, done.stderr
    assert told in done.stderr


def test_a_wrong_environment(cli: Cli) -> None:
    done = cli("run", "tinny", "--", "true")
    assert done.returncode == 125
    assert done.stderr.startswith(b"error: ") and b"[environment_not_found]" in done.stderr


LOADED = """
import sys
from barchan.cli.main import invoke
code = invoke(sys.argv[1:])
tops = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(*sorted(name for name in tops if not name.startswith("_")))
sys.exit(code)
"""


def test_a_command_loads_no_http_library_and_no_tables(cli: Cli) -> None:
    """Each would cost more time than all else that this process does."""
    argv = cli.argv("run", cli.env, *SMALL, "--", "true")[3:]
    done = subprocess.run([sys.executable, "-c", LOADED, *argv], capture_output=True, timeout=60, check=False)
    loaded = set(done.stdout.decode().split())
    assert (done.returncode, done.stderr) == (0, b"")
    assert (
        {"barchan", "click", "msgspec"}
        <= loaded
        <= {"barchan", "click", "msgspec", "typing_extensions", "sitecustomize"}
    )


# --- bytes


def test_exact_bytes_on_both_outputs(cli: Cli) -> None:
    octal = "".join(f"\\{byte:03o}" for byte in EVERY_BYTE)
    done = cli.run("--", "sh", "-c", f"printf '{octal}'; printf 'err\\377\\r\\n' >&2")
    assert done.stdout == EVERY_BYTE
    assert done.stderr == b"err\xff\r\n"


def test_arguments_and_environment_are_bytes(cli: Cli) -> None:
    odd = b"\xff\xfe '\"$x\n"
    done = cli.run("-e", b"A=" + odd, "-w", "/tmp", "--", "sh", "-c", 'printf %s "$A$1"; pwd', "sh", odd)
    assert done.stdout == odd + odd + b"/tmp\n"


def test_input_only_on_request(cli: Cli) -> None:
    assert cli.run("--", "cat", stdin=b"hello").stdout == b""
    assert cli.run("-i", "--", "cat", stdin=b"hello").stdout == b"hello"


def test_a_shell_reads_its_commands_from_a_pipe(cli: Cli, sandbox: str) -> None:
    for command, target in (("run", (cli.env, *SMALL)), ("exec", (sandbox,))):
        done = cli(command, "-i", *target, stdin=b"x=1\necho $x $0; exit 3\n")
        assert (done.returncode, done.stdout, done.stderr) == (3, b"1 /bin/sh\n", b"")


def test_much_input_and_output(cli: Cli) -> None:
    data = os.urandom(MIB) * 50
    done = cli.run("-i", "--", "cat", stdin=data)
    assert done.returncode == 0
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()


def test_input_that_the_program_does_not_read(cli: Cli) -> None:
    assert cli.run("-i", "--", "head", "-c", "3", stdin=b"x" * 8 * MIB).stdout == b"xxx"


def test_output_is_cut_where_asked(cli: Cli) -> None:
    done = cli.run("--output-limit", "1k", "--", "head", "-c", "5000", "/dev/zero")
    assert (done.returncode, done.stdout) == (0, bytes(1024))
    assert b"3976 bytes are missing" in done.stderr


def test_a_reader_that_has_seen_enough(cli: Cli) -> None:
    mark = ("--label", "seen=enough")
    with subprocess.Popen(
        cli.argv("run", *mark, cli.env, *SMALL, "--", "yes"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as p:
        assert p.stdout is not None and p.stderr is not None
        assert p.stdout.read(4) == b"y\ny\n"
        p.stdout.close()
        assert (p.wait(timeout=30), p.stderr.read()) == (141, b"")
    assert cli("ls", "-q", *mark).stdout == b""


@pytest.mark.parametrize("json_", [(), ("--json",)])
def test_an_output_that_is_full(cli: Cli, sandbox: str, json_: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        command = cli.argv("exec", *json_, sandbox, "--", "yes")
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 125
    assert b"stdout: No space left on device" in done.stderr and b"Traceback" not in done.stderr
    assert b"yes" not in cli("ps", sandbox).stdout, "the command was cancelled"


@pytest.mark.parametrize("exact", [True, False])
def test_a_log_for_which_there_is_no_room(cli: Cli, sandbox: str, exact: bool) -> None:
    id_ = cli("exec", "-d", sandbox, "--", "echo", "text").stdout.decode().strip()
    assert cli("wait", sandbox, id_).returncode == 0
    with open("/dev/full", "wb") as full:
        command = cli.argv("logs", sandbox, *(("--exec", id_) if exact else ()))
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"error: stdout: No space left on device [file_failure]\n")


def test_figures_go_into_a_pipe_as_they_come(cli: Cli, sandbox: str) -> None:
    command = cli.argv("stats", "--watch", "--every", "0.1", sandbox)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(4)]
        watching.terminate()
    assert [line.split()[0].decode() for line in lines] == ["id", sandbox, "id", sandbox]


def test_a_narrow_terminal_shows_each_sandbox_on_one_line(cli: Cli, sandbox: str) -> None:
    argv = [str(word) for word in cli.argv("stats", sandbox)]
    with LocalTerminal(argv, columns=80) as terminal:
        head = terminal.until(b"\r\n")
        row = terminal.until(b"\r\n").removeprefix(head)
    assert row.split()[0] == sandbox.encode() and len(row.rstrip()) <= 80
    assert b"memory" in head and b"cpu %" in head


def test_nodes(cli: Cli, sandbox: str) -> None:
    head, row = cli("nodes").stdout.decode().splitlines()
    assert head.split("  ")[0] == "node" and row.split()[0] == sandbox.rpartition("-")[0]
    (node,) = json.loads(cli("nodes", "--json").stdout)
    assert node["memory_promised"] >= 128 * MIB and node["cpus_total"] == len(os.sched_getaffinity(0))
    assert node["pool"]["hits"] + node["pool"]["parked_hits"] + node["pool"]["misses"] > 0
    done = cli("run", cli.env, "--cpus", str(1 + node["cpus_total"]), "--", "true")
    assert done.returncode == 125 and b"at most %d cpus" % node["cpus_total"] in done.stderr


def test_a_sandbox_that_has_ended(cli: Cli) -> None:
    """As the tutorial does it: run, stop, look."""
    id = cli("create", cli.env, *SMALL).stdout.decode().strip()
    first = cli("exec", "-d", id, "--", "sh", "-c", "echo out; echo err >&2; exit 3").stdout.decode().strip()
    assert cli("wait", id, first).returncode == 3
    second = cli("exec", "-d", id, "--", "sleep", "600").stdout.decode().strip()
    assert cli("stop", id).returncode == 0
    logs = cli("logs", id)
    assert logs.returncode == 0, logs.stderr
    assert f"{first} | out\n".encode() in logs.stdout and f"{first} ! err\n".encode() in logs.stdout
    assert f"{second} $ sleep 600  [unknown]".encode() in logs.stdout
    exact = cli("logs", id, "--exec", first)
    assert (exact.returncode, exact.stdout, exact.stderr) == (0, b"out\n", b"err\n")
    assert cli("logs", id, "--exec", second).returncode == 0
    assert cli("wait", id, first).returncode == 3
    assert b"[sandbox_stopped]" in cli("wait", id, second).stderr
    assert b"[exec_not_found]" in cli("logs", id, "--exec", "never").stderr
    json_ = [json.loads(line) for line in cli("logs", "--json", id).stdout.splitlines()]
    assert [line["exec"] for line in json_ if line["event"] == "command"] == [first, second]


NEW = b"new" * (16 << 20)


def test_an_upload_that_does_not_fit_leaves_the_old_file(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    assert cli("cp", "-", f"{sandbox}:/d/file", stdin=b"old").returncode == 0
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 30)
    done = cli("cp", tmp_path / "file", f"{sandbox}:/d/file")
    assert done.returncode == 1 and b"[sandbox_disk_full]" in done.stderr, done.stderr
    assert cli("exec", sandbox, "--", "sh", "-c", "ls -A /d; cat /d/file").stdout == b"file\nold"


def test_an_interrupted_upload_leaves_one_file_or_the_other(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    assert cli("cp", "-", f"{sandbox}:/d/file", stdin=b"old").returncode == 0
    (tmp_path / "file").write_bytes(NEW)
    watch = cli.argv("exec", sandbox, "--", "sh", "-c", "echo up; until ls -A /d | grep -q barchan; do :; done")
    with subprocess.Popen(watch, stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None and watching.stdout.readline() == b"up\n"
        with subprocess.Popen(cli.argv("cp", tmp_path / "file", f"{sandbox}:/d/file")) as copying:
            assert watching.wait(60) == 0
            copying.send_signal(signal.SIGINT)
            assert copying.wait(60) in (0, -signal.SIGINT)
    script = "until [ $(ls -A /d | wc -l) = 1 ]; do :; done; cat /d/file"
    assert cli("exec", "--timeout", "20", sandbox, "--", "sh", "-c", script).stdout in (b"old", NEW)


def test_an_interrupted_download_leaves_one_file_or_the_other(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(NEW)
    assert cli("cp", tmp_path / "source", f"{sandbox}:/file").returncode == 0
    (tmp_path / "to").mkdir()
    target = tmp_path / "to" / "file"
    target.write_bytes(b"old")
    with subprocess.Popen(cli.argv("cp", f"{sandbox}:/file", target)) as copying:
        while len(os.listdir(target.parent)) == 1 and target.read_bytes() == b"old":
            pass
        copying.send_signal(signal.SIGINT)
        assert copying.wait(60) in (0, -signal.SIGINT)
    assert target.read_bytes() in (b"old", NEW) and os.listdir(target.parent) == ["file"]


# --- signals


def test_sigterm_ends_the_command_and_its_sandbox(cli: Cli) -> None:
    with cli.started("--", "sh", "-c", "echo up; exec sleep 600") as (process, sandbox):
        said(process, b"up\n")
        assert sandbox in cli.ids()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
    assert sandbox not in cli.ids()


def test_ctrl_c_is_the_commands_to_handle(cli: Cli) -> None:
    script = "trap 'echo int; exit 9' INT; echo up; while :; do sleep 0.05; done"
    with cli.started("--", "sh", "-c", script) as (process, sandbox):
        said(process, b"up\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 9
    assert sandbox not in cli.ids()


def test_a_second_ctrl_c_cancels(cli: Cli) -> None:
    script = "trap 'echo int' INT; echo up; while :; do sleep 0.05; done"
    with cli.started("--", "sh", "-c", script) as (process, sandbox):
        said(process, b"up\n")
        process.send_signal(signal.SIGINT)
        said(process, b"int\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert sandbox not in cli.ids()


# --- sandboxes


def test_exec_in_a_sandbox_that_stays(cli: Cli, sandbox: str) -> None:
    assert cli("exec", sandbox, "--", "sh", "-c", "echo kept > /file").returncode == 0
    done = cli("exec", "-u", "user", "-e", "A=1", sandbox, "sh", "-c", "id -un; cat /file; echo $A; exit 3")
    assert (done.returncode, done.stdout) == (3, b"user\nkept\n1\n")
    assert cli("exec", "-i", sandbox, "--", "wc", "-c", stdin=b"12345").stdout.strip() == b"5"


def test_run_keeps_the_sandbox_on_request(cli: Cli) -> None:
    done = cli.run("--keep", "-e", "A=later", "--", "true")
    sandbox = done.stderr.decode().split()[-1]
    assert cli("exec", sandbox, "--", "sh", "-c", "echo $A").stdout == b"later\n"
    assert cli("stop", sandbox).stdout.decode().strip() == sandbox
    assert cli("stop", sandbox).returncode == 0, "stopping twice is fine"
    done = cli("exec", sandbox, "--", "true")
    assert done.returncode == 125 and b"[sandbox_stopped]" in done.stderr


def test_list_by_label(cli: Cli) -> None:
    label = f"test={os.getpid()}[red]"
    made = json.loads(cli("create", "--json", cli.env, *SMALL, "--label", label).stdout)
    try:
        assert cli("ls", "-q", "--label", label).stdout.decode().split() == [made["id"]]
        (listed,) = json.loads(cli("ls", "--json", "--label", label).stdout)
        assert (listed["id"], listed["state"]) == (made["id"], "ready")
        table = cli("ls", "--label", label).stdout.decode()
        assert made["id"] in table and label in table, "markup is text"
    finally:
        cli("stop", made["id"])


def test_a_detached_command_its_processes_and_its_log(cli: Cli, sandbox: str) -> None:
    script = "printf 'one\\033[2J\\n'; echo two >&2; exec sleep 600"
    id_ = cli("exec", "-d", sandbox, "--", "sh", "-c", script).stdout.decode().strip()
    table = cli("ps", sandbox).stdout.decode()
    assert "sleep 600" in table
    processes = json.loads(cli("ps", "--json", sandbox).stdout)
    assert ["sleep", "600"] in [process["argv"] for process in processes]
    exact = cli("logs", sandbox, "--exec", id_)
    assert (exact.stdout, exact.stderr) == (b"one\x1b[2J\n", b"two\n")
    shown = cli("logs", sandbox).stdout.decode()
    assert f"{id_} | one\\x1b[2J\n" in shown and f"{id_} ! two\n" in shown
    assert "\x1b" not in shown


def test_the_log_of_a_command_that_never_pauses(cli: Cli, sandbox: str) -> None:
    """What is there is shown, and no more is waited for."""
    script = "while echo again; do sleep 0.1; done"
    id_ = cli("exec", "-d", sandbox, "--", "sh", "-c", script).stdout.decode().strip()
    for command in (("--exec", id_), (), ("--json",)):
        assert cli("logs", sandbox, *command).returncode == 0
    cli("kill", sandbox, id_)
    assert b"again\n" in cli("logs", sandbox, "--exec", id_, "--follow").stdout


def test_a_detached_command_that_cannot_start(cli: Cli, sandbox: str) -> None:
    for argv, code, told in [
        (["nosuchprog"], 127, b"barchan: nosuchprog: not found in the sandbox\n"),
        (["/etc/passwd"], 126, b"barchan: /etc/passwd: cannot be executed\n"),
    ]:
        done = cli("exec", "-d", sandbox, "--", *argv)
        assert (done.returncode, done.stdout, done.stderr) == (code, b"", told)
    assert cli("exec", "-d", "-u", "nobody-here", sandbox, "--", "true").returncode == 125


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -TERM $$", 143), ("echo out", 0)])
def test_wait_for_a_detached_command(cli: Cli, sandbox: str, script: str, code: int) -> None:
    id_ = cli("exec", "-d", sandbox, "--", "sh", "-c", script).stdout.decode().strip()
    for _ in range(2):
        done = cli("wait", sandbox, id_)
        assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_wait_says_why(cli: Cli, sandbox: str) -> None:
    cli("exec", sandbox, "--", "nosuchprog")
    (line,) = [json.loads(line) for line in cli("logs", "--json", sandbox).stdout.splitlines()]
    done = cli("wait", sandbox, line["exec"])
    assert (done.returncode, done.stderr) == (127, b"barchan: nosuchprog: not found in the sandbox\n")
    done = cli("wait", sandbox, "nosuchexec")
    assert done.returncode == 125 and b"[exec_not_found]" in done.stderr


def test_kill_a_detached_command(cli: Cli, sandbox: str) -> None:
    def started(script: str) -> str:
        return cli("exec", "-d", sandbox, "--", "sh", "-c", script).stdout.decode().strip()

    id_ = started("exec sleep 600")
    assert cli("kill", sandbox, id_).stdout.decode().strip() == id_
    assert cli("wait", sandbox, id_).returncode == 137
    id_ = started("exec sleep 601")
    assert cli("kill", "-s", "term", sandbox, id_).returncode == 0
    assert cli("wait", sandbox, id_).returncode == 143
    assert b"[exec_not_found]" in cli("kill", sandbox, "nosuchexec").stderr


def test_kill_all_of_a_command(cli: Cli, sandbox: str) -> None:
    id_ = cli("exec", "-d", sandbox, "--", "sh", "-c", "setsid sleep 602 & exec sleep 603").stdout.decode().strip()
    assert cli("kill", "--all", sandbox, id_).returncode == 0
    assert cli("wait", sandbox, id_).returncode == 137
    assert b"sleep 60" not in cli("ps", sandbox).stdout


def test_stop_goes_on_past_what_is_wrong(cli: Cli) -> None:
    ids = [cli("create", cli.env, *SMALL).stdout.decode().strip() for _ in range(2)]
    done = cli("stop", *ids, "bogus")
    assert done.returncode == 1
    assert sorted(done.stdout.decode().split()) == sorted(ids)
    assert b"'bogus' is not a sandbox id" in done.stderr
    assert not set(ids) & set(cli.ids())


def test_json_results(cli: Cli) -> None:
    done = cli.run("--json", "--", "sh", "-c", "echo out; echo err >&2; exit 5")
    assert (done.returncode, done.stderr) == (5, b"")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    streams = {event["stream"]: base64.b64decode(event["base64"]) for event in events if event["event"] == "output"}
    assert streams == {"stdout": b"out\n", "stderr": b"err\n"}
    assert events[0]["event"] == "created"
    assert (events[-1]["event"], events[-1]["exit_code"], events[-1]["result"]["outcome"]) == ("result", 5, "exited")


def test_unknown_sandbox(cli: Cli) -> None:
    for command in (("exec", "test-00000000000000000000", "--", "true"), ("ps", "test-00000000000000000000")):
        done = cli(*command)
        assert done.returncode == (125 if command[0] == "exec" else 1)
        assert b"[sandbox_not_found]" in done.stderr


# --- files


def test_copy_a_file_either_way(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    data = os.urandom(3 * MIB)
    (tmp_path / "file").write_bytes(data)
    (tmp_path / "file").chmod(0o750)
    assert cli("cp", tmp_path / "file", f"{sandbox}:/new/name").returncode == 0
    assert cli("cp", tmp_path / "file", f"{sandbox}:/tmp").returncode == 0, "a directory gets it inside"
    assert cli("cp", f"{sandbox}:/new/name", tmp_path / "back").returncode == 0
    (tmp_path / "dir").mkdir()
    assert cli("cp", f"{sandbox}:/tmp/file", tmp_path / "dir").returncode == 0
    for copy in (tmp_path / "back", tmp_path / "dir/file"):
        assert copy.read_bytes() == data
        assert copy.stat().st_mode & 0o777 == 0o750


def test_copy_a_tree_either_way(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/file").write_text("x")
    (tree / "link").symlink_to("sub/file")
    os.mkfifo(tree / "fifo")
    sent = cli("cp", "--json", tree, f"{sandbox}:/")
    assert json.loads(sent.stdout) == {"files": 1, "bytes": 1, "skipped": [{"path": "fifo", "reason": "special"}]}
    assert cli("cp", f"{sandbox}:/tree", tmp_path / "back").returncode == 0
    assert (tmp_path / "back/link").readlink() == Path("sub/file")
    assert (tmp_path / "back/sub/file").read_text() == "x"
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == ["link", "sub"]


def test_what_a_copy_leaves_out_is_counted_and_what_it_may_not_read_fails_it(
    cli: Cli, sandbox: str, tmp_path: Path
) -> None:
    script = "mkdir /t; cd /t; for i in $(seq 160); do ln -s /etc/passwd l$i; done; mkfifo pipe; echo x > file"
    assert cli("exec", sandbox, "--", "sh", "-c", script).returncode == 0
    done = cli("cp", f"{sandbox}:/t", tmp_path)
    assert done.stderr.splitlines() == [
        b"barchan: 160 links that lead out of the tree skipped (-v names all)",
        b"barchan: 1 FIFO, socket or device skipped (-v names all)",
    ]
    assert done.returncode == 0 and [path.name for path in (tmp_path / "t").iterdir()] == ["file"]
    assert len(cli("cp", "-v", f"{sandbox}:/t", tmp_path / "v").stderr.splitlines()) == 161
    assert cli("exec", sandbox, "--", "sh", "-c", "chmod 600 /t/file; rm /t/l*").returncode == 0
    done = cli("cp", "-u", "user", f"{sandbox}:/t", tmp_path / "user")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, b"barchan: skipped file: may not be read")
    told = json.loads(cli("cp", "--json", "-u", "user", f"{sandbox}:/t", tmp_path / "json").stdout)
    assert {one["path"]: one["reason"] for one in told["skipped"]} == {"pipe": "special", "file": "unreadable"}


def test_copy_over_standard_streams(cli: Cli, sandbox: str) -> None:
    data = os.urandom(3 * MIB)
    sent = cli("cp", "--json", "-", f"{sandbox}:/tmp/file", stdin=data)
    assert json.loads(sent.stdout) == {"files": 1, "bytes": len(data), "skipped": []}
    got = cli("cp", f"{sandbox}:/tmp/file", "-")
    assert (got.returncode, got.stdout, got.stderr) == (0, data, b"")
    with open("/dev/full", "wb") as full:
        command = cli.argv("cp", f"{sandbox}:/tmp/file", "-")
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"error: stdout: No space left on device [file_failure]\n")
    for source, target in ((f"{sandbox}:/tmp", "-"), ("-", f"{sandbox}:/tmp"), ("-", f"{sandbox}:/tmp/new/")):
        done = cli("cp", source, target, stdin=b"x")
        assert done.returncode == 1 and b"[file_is_directory]" in done.stderr


def test_input_that_fails_leaves_no_file(cli: Cli, sandbox: str) -> None:
    nothing = os.open("/dev/null", os.O_WRONLY)
    try:
        command = cli.argv("cp", "-", f"{sandbox}:/tmp/none")
        done = subprocess.run(command, stdin=nothing, capture_output=True, timeout=60, check=False)
    finally:
        os.close(nothing)
    assert (done.returncode, done.stderr) == (1, b"error: stdin: Bad file descriptor [file_failure]\n")
    assert b"[file_missing]" in cli("cp", f"{sandbox}:/tmp/none", "-").stderr


def test_no_directory_is_made_on_this_host(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target, code in (("no/x", b"[file_missing]"), ("no/", b"[file_missing]"), ("file/x", b"[file_not_directory]")):
        done = cli("cp", f"{sandbox}:/etc/passwd", f"{tmp_path}/{target}")
        assert done.returncode == 1 and code in done.stderr, target
    assert os.listdir(tmp_path) == ["file"]


def test_copy_refused(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    for source, target, code in [
        (f"{sandbox}:/none", str(tmp_path / "x"), b"[file_missing]"),
        (str(tmp_path / "none"), f"{sandbox}:/x", b"[file_missing]"),
        (f"{sandbox}:/a", f"{sandbox}:/b", b"[invalid_request]"),
        (str(tmp_path), str(tmp_path / "y"), b"[invalid_request]"),
        (f"{sandbox}:/etc/..", str(tmp_path), b"[invalid_request]"),
    ]:
        done = cli("cp", source, target)
        assert done.returncode == 1
        assert done.stderr.rstrip().endswith(code), done.stderr
    assert not list(tmp_path.iterdir())


def test_a_long_copy_shows_a_bar_on_a_terminal(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    assert cli("exec", sandbox, "--", "sh", "-c", "head -c 30000000 /dev/zero > /big").returncode == 0
    script = "import barchan.cli.progress as p, barchan.cli.main as m, sys; p.AFTER = 0; m.main(sys.argv[1:])"
    command = [sys.executable, "-c", script, *cli.argv("cp", f"{sandbox}:/big", tmp_path / "big")[3:]]
    shown, terminal = pty.openpty()
    seen = bytearray()
    reader = threading.Thread(target=drain, args=(shown, seen))
    reader.start()
    try:
        done = subprocess.run(command, stderr=terminal, timeout=60, check=False)
    finally:
        os.close(terminal)
        reader.join(timeout=10)
        os.close(shown)
    assert done.returncode == 0
    assert b"28.6" in seen and b"MiB" in seen


def drain(fd: int, into: bytearray) -> None:
    try:
        while data := os.read(fd, 4096):
            into += data
    except OSError:  # the terminal is gone
        return


# --- the server


def test_a_second_up_is_refused(cli: Cli, server: Server) -> None:
    for extra in ((), ("-d",)):
        done = cli("up", *extra)
        assert done.returncode == 1
        assert b"is served by another `barchan up` (pid " in done.stderr and b"[conflict]" in done.stderr
    assert cli("ls").returncode == 0, "the first one still serves"


def test_doctor_agrees_with_what_runs(cli: Cli) -> None:
    done = cli("doctor", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["containers"] is True


def test_layers_are_listed_without_the_server(cli: Cli, server: Server) -> None:
    assert cli.env in [layer["name"] for layer in server.run("env", "ls")]
    table = subprocess.run(server.command("env", "ls"), capture_output=True, text=True, timeout=60, check=True)
    assert f"{cli.env}@1 " in table.stdout


def test_a_name_with_several_versions_is_not_removed_by_mistake(cli: Cli, server: Server, tmp_path: Path) -> None:
    def versions() -> list[int]:
        listed = json.loads(subprocess.check_output(server.command("env", "ls", "--json")))
        return [layer["version"] for layer in listed if layer["name"] == "many"]

    def remove(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            server.command("env", "rm", *argv), capture_output=True, text=True, timeout=60, check=False
        )

    for number in range(3):
        (tmp_path / "file").write_text(str(number))
        server.run("env", "import", "many", str(tmp_path))
    done = remove("many")
    assert done.returncode == 1 and versions() == [1, 2, 3]
    assert f"`barchan env rm many@3 --data {server.data}`" in done.stderr and "--all" in done.stderr
    done = remove("none", "many@3")
    assert (done.returncode, done.stdout, versions()) == (1, "many@3\n", [1, 2])
    assert remove("--all", "many").returncode == 0 and versions() == []
    server.run("env", "import", "many", str(tmp_path))
    assert remove("many").returncode == 0 and versions() == []


def test_layers_in_use_are_removed_in_name_only(cli: Cli, server: Server, tmp_path: Path) -> None:
    tree = make_tiny(tmp_path / "tree")
    first = subprocess.run(
        server.command("env", "import", "used", str(tree)), capture_output=True, text=True, check=True
    )
    assert first.stdout.startswith("used@1 ") and "unchanged" not in first.stdout
    again = subprocess.run(
        server.command("env", "import", "used", str(tree)), capture_output=True, text=True, check=True
    )
    assert again.stdout == f"{first.stdout.rstrip()}  unchanged\n"
    assert server.run("env", "import", "used", str(tree))["unchanged"] is True
    ids = [cli("create", "used", *SMALL).stdout.decode().strip() for _ in range(2)]
    removed = subprocess.run(server.command("env", "rm", "used@1"), capture_output=True, check=False)
    assert (removed.returncode, removed.stdout) == (0, b"used@1\n")
    assert removed.stderr == b"barchan: used@1: 2 running made of it; its image stays on the disk until they end\n"
    for id in ids:
        assert cli("exec", id, "--", "echo", "still here").stdout == b"still here\n"
    cli("stop", *ids)
    (tree / "more").write_text("x")
    assert server.run("env", "import", "used", str(tree))["unchanged"] is False
    assert server.run("env", "rm", "used") == {"removed": "used", "in_use": 0}


@pytest.fixture
def own_data(server: Server) -> Iterator[Path]:
    """For a server of the test's own."""
    data = Path(f"{server.data}-cli")
    yield data
    remove(data)


def test_the_life_of_a_data_directory(own_data: Path, tmp_path: Path) -> None:
    source = {**os.environ, "PYTHONPATH": str(Path(spec.__file__).parents[1])}
    certificate = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2")
    subprocess.run(
        ["openssl", *certificate, "-keyout", "k.pem", "-out", "c.pem"], cwd=tmp_path, capture_output=True, check=True
    )

    def barchan(*argv: str) -> subprocess.CompletedProcess[str]:
        command = Server(own_data).command(*argv)
        return subprocess.run(
            command, cwd=tmp_path, env=source, capture_output=True, text=True, timeout=120, check=False
        )

    tls = ("--listen", "127.0.0.1:0", "--tls-cert", "c.pem", "--tls-key", "k.pem")
    done = barchan("up", "-d", "--name", "own", "--scratch-bytes", "256m", *tls)
    assert done.returncode == 0, done.stderr
    assert "listen https://127.0.0.1:" in done.stdout, "relative names of files are relative to the caller"
    assert f"scratch  allocated 256.0 MiB  at {own_data}/scratch.img\n" in done.stderr
    done = barchan("down")
    assert f"kept  data {own_data}  layers " in done.stderr and "  scratch 256.0 MiB\n" in done.stderr

    taken = ("--listen", "192.0.2.1:1", "--insecure")  # an address that no host of ours has
    for _ in range(2):
        done = barchan("up", "-d", *taken)
        assert done.returncode == 1
        assert done.stderr.count("192.0.2.1") <= 2, "the log of this start only"
    assert "error:" in done.stderr.splitlines()[-1]

    most = ("--max-sandboxes", "7", "--memory-overcommit", "0.5", "--disk-overcommit", "3", "--pool-most", "0")
    done = barchan("up", "-d", "--scratch-bytes", "512m", "--log-bytes", "1g", *most)
    assert done.returncode == 0, done.stderr
    (node,) = json.loads(barchan("nodes", "--json").stdout)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert (node["capacity"], node["pool"]["ready"], node["disk_total"]) == (7, 0, 3 * 256 * MIB)
    assert node["memory_total"] == pytest.approx(total * 0.9 * 0.5, rel=0.01)
    assert "scratch  kept 256.0 MiB  " in done.stderr and "existing volume keeps its size" in done.stderr
    (own_data / "thesis.tex").touch()
    done = barchan("down", "--delete")
    assert "thesis.tex" in done.stderr and barchan("ls").returncode == 0, "refused before anything was stopped"
    (own_data / "thesis.tex").unlink()
    done = barchan("down", "--delete")
    assert done.returncode == 0, done.stderr
    assert not own_data.exists()
    assert str(own_data) not in Path("/proc/self/mountinfo").read_text()
