"""A process in the background that tells the one that started it how the start went."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from barchan.cli.output import settle

LOG_MOST = 16 << 20
"""Bytes of a log before it is put aside; one old log is kept."""


def in_background(log: Path, serve: Callable[[int], int]) -> bytes:
    """Run `serve(fd)` in a daemon and return all it wrote to `fd` until it closed it (or ended).

    The daemon has its own session, `/` as directory, nothing as input and `log` as output; what `serve` returns is its
    exit code. It keeps every lock that this process holds.
    """
    told, tell = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if (child := os.fork()) == 0:
        os.close(told)
        _become_daemon(log, lambda: serve(tell))
    os.close(tell)
    os.waitpid(child, 0)
    with open(told, "rb") as reader:
        return reader.read(1 << 20)


def _become_daemon(log: Path, run: Callable[[], int]) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        _settle(log)
        code = run()
    except BaseException:  # noqa: BLE001  the last frame here: nothing above may run a second time
        sys.excepthook(*sys.exc_info())
    finally:
        settle()
        os._exit(code)


def _settle(log: Path) -> None:
    if value := os.environ.get("PYTHONPATH"):
        # Relative parts would mean something else in `/` to the processes started from here.
        os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in value.split(os.pathsep))
    nothing = os.open("/dev/null", os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    os.chdir("/")
    os.umask(0o077)


def put_aside(log: Path) -> None:
    """Bound a log that processes have open for appending: copy it and start again from nothing."""
    try:
        if log.stat().st_size < LOG_MOST:
            return
        log.with_suffix(".log.1").write_bytes(log.read_bytes())
        os.truncate(log, 0)
    except FileNotFoundError:
        return


def end_of(log: Path) -> int:
    """Where what comes next will begin."""
    return log.stat().st_size if log.exists() else 0


def last_lines(log: Path, since: int = 0, most: int = 20) -> list[str]:
    """The end of a log, of what was written from `since` on."""
    with open(log, "rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - (1 << 16)))
        return file.read().decode("utf-8", "replace").splitlines()[-most:]
