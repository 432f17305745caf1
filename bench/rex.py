"""SWE-ReX's own server and remote runtime on loopback, without any isolation: the peer of a shell session.

`peer()` makes an environment of its own for the package, starts its server, and starts this file there, which reads a
verb a line and answers with milliseconds, so that a bench can take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = "1.4.0"
OUTPUT = 80 * 256_000
"""Bytes of output in one `output` round."""
CACHE = Path(os.environ.get("BARCHAN_BENCH_CACHE", "/var/cache/barchan/bench"))


class Peer:
    """The bench's side."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, verb: str) -> float:
        """Milliseconds of one `execute`, `session` (a command in an open session) or `output`."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(verb + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"SWE-ReX ended during {verb}; see above")
        return float(json.loads(answer))


def environment() -> Path:
    """The directory of a virtual environment with the package, made once."""
    place = CACHE / f"swe-rex-{VERSION}"
    if not (place / "bin/swerex-remote").exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        install = [
            str(place / "bin/pip"),
            "install",
            "-q",
            "--disable-pip-version-check",
            f"swe-rex=={VERSION}",
            "aiohttp",
        ]
        subprocess.run(install, check=True, stdout=sys.stderr)
    return place


@contextlib.contextmanager
def peer(work: Path) -> Iterator[Peer]:
    programs = environment() / "bin"
    token, port = secrets.token_hex(8), _free_port()
    log = (work / "swerex.log").open("w")
    server = [str(programs / "swerex-remote"), "--host", "127.0.0.1", "--port", str(port), "--auth-token", token]
    client = [str(programs / "python"), __file__, str(port), token]
    with log, subprocess.Popen(server, stdout=log, stderr=log) as serving:
        try:
            with subprocess.Popen(client, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                yield Peer(process)
                assert process.stdin
                process.stdin.close()
        finally:
            serving.terminate()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def serve(port: int, token: str) -> None:
    """Runs in the peer's environment, where barchan is not installed."""
    answers, sys.stdout = sys.stdout, sys.stderr  # the runtime prints a greeting
    from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest  # type: ignore[import-not-found]
    from swerex.runtime.remote import RemoteRuntime  # type: ignore[import-not-found]

    runtime = RemoteRuntime(host="http://127.0.0.1", port=port, auth_token=token)
    await runtime.wait_until_alive(timeout=60)
    await runtime.create_session(CreateBashSessionRequest())
    pour = Command(command=["dd", "if=/dev/zero", "bs=250k", f"count={OUTPUT // 256_000}"], timeout=300)
    verbs: dict[str, Any] = {
        "execute": lambda: runtime.execute(Command(command=["true"])),
        "session": lambda: runtime.run_in_session(BashAction(command="true")),
        "output": lambda: runtime.execute(pour),
    }
    loop = asyncio.get_running_loop()
    while verb := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        started = time.perf_counter()
        await verbs[verb]()
        print(json.dumps((time.perf_counter() - started) * 1e3), file=answers, flush=True)
    await runtime.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
