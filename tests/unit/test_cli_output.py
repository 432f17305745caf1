"""Standard output that cannot be written is an error with a name; one that nobody reads is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = b"error: stdout: No space left on device [file_failure]\n"


def barchan(script: str, *argv: str) -> subprocess.CompletedProcess[bytes]:
    """The command, with the shell's redirections in `script`."""
    return subprocess.run(
        ["sh", "-c", f'"$@" {script}', "sh", sys.executable, "-m", "barchan.cli.main", *argv],
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("argv", [("version",), ("--help",), ("ls", "--help")])
def test_no_space_for_output(argv: tuple[str, ...]) -> None:
    done = barchan(">/dev/full", *argv)
    assert (done.returncode, done.stderr) == (1, FULL)


def test_no_space_for_a_document() -> None:
    done = barchan(">/dev/full", "version", "--json")
    assert done.returncode == 1
    assert json.loads(done.stderr)["message"] == "stdout: No space left on device"


def test_no_space_for_the_help_of_commands_that_exit_like_their_program() -> None:
    done = barchan(">/dev/full", "exec", "--help")
    assert (done.returncode, done.stderr) == (125, FULL)


def test_no_space_for_the_error_either() -> None:
    assert barchan(">/dev/full 2>/dev/full", "version").returncode == 1
    assert barchan("2>/dev/full", "nope").returncode == 2


def test_a_closed_output_is_nobodys_to_take(tmp_path: Path) -> None:
    assert barchan(">&-", "version", "--json").returncode == 0
    done = barchan(">&-", "ls", "--json", "--data", str(tmp_path))
    assert done.returncode == 1
    assert json.loads(done.stderr)["code"] == "api_unavailable"


def test_a_daemon_whose_log_cannot_be_written_still_ends(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from barchan.cli import daemon, output\n"
        "output.claim()\n"
        "def serve(tell):\n"
        "    os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "    print('lost')\n"
        "    return 0\n"
        f"told = daemon.in_background(Path({str(tmp_path / 'log')!r}), serve)\n"
        "os.write(1, b'parent ' + told)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"parent "), "the daemon did not go on as the parent"


def test_root_is_asked_for(tmp_path_factory: pytest.TempPathFactory) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: becomes another user")
    data = tmp_path_factory.mktemp("data")
    data.chmod(0o700)
    for command in (["ls"], ["up"], ["down"], ["env", "ls"], ["run", "debian-12", "true"]):
        argv = [sys.executable, "-c", AS_NOBODY, *command[:2], "--data", str(data), *command[2:]]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == (125 if command[0] == "run" else 1), done.stderr
        assert "root" in done.stderr and done.stderr.endswith("[feature_missing]\n"), (command, done.stderr)


AS_NOBODY = """
import os, sys, barchan
[getattr(barchan, name) for name in barchan.__all__]  # loaded when first used, which another user may not be able to
import barchan.cli.main as main, barchan.cli.up, barchan.cli.down, barchan.cli.sandboxes, barchan.cli.env, barchan.cli.run
import barchan.cli.datadir, barchan.sdk, asyncio, barchan.cli.tables, barchan.cli.interrupts, barchan.cli.drive
import barchan.cli.descriptors, encodings.idna, barchan.node.rows
os.setgid(65534)
os.setuid(65534)
sys.exit(main.invoke(sys.argv[1:]))
"""
