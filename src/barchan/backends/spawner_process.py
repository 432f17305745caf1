"""The spawner as a process: its binaries, its arguments, its end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from barchan.errors import CreateFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Directories in which the spawner makes and removes places, and the ranges of ids it gives them."""

    ids: Path
    unified: Path
    v1: tuple[Path, ...]
    trees: Path
    instance: str
    uid_first: int
    uid_size: int
    slots: int

    def open(self, undo: contextlib.ExitStack) -> dict[str, list[int]]:
        """Arguments of the spawner that are descriptors, closed with `undo`."""
        named = {"ids": [self.ids], "unified": [self.unified], "v1": [*self.v1]}
        named["trees"] = [self.trees]
        return {name: [_directory(path, undo) for path in paths] for name, paths in named.items()}

    def numbers(self) -> dict[str, int]:
        return {"uid-first": self.uid_first, "uid-size": self.uid_size, "slots": self.slots}


def install_guest(source: Path, directory: Path) -> Path:
    """Copies the guest binary to a file of real root, mode 0111, named by its digest; returns its path.

    The mode matters: a binary that the sandbox cannot read ties the memory of PID 1 to the host's user namespace, so
    that no capability of the sandbox reaches it. The directory must be root's own. Raises OSError.
    """
    content = source.read_bytes()
    target = directory / f"guest-{hashlib.sha256(content).hexdigest()[:16]}"
    if _is_sealed(target):
        return target
    directory.mkdir(parents=True, exist_ok=True)
    fresh = directory / f".{target.name}.{os.getpid()}"
    fresh.write_bytes(content)
    os.chown(fresh, 0, 0)
    fresh.chmod(0o111)
    fresh.rename(target)
    return target


def _is_sealed(path: Path) -> bool:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return False
    return facts.st_uid == 0 and stat.S_IMODE(facts.st_mode) == 0o111


def launch(
    binary: Path, guest: Path, guest_uid: int, places: Places | None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = _run(binary, guest, guest_uid, theirs.fileno(), places)
        except OSError as error:
            ours.close()
            hint = "build the native part: make -C native"
            raise CreateFailed(f"cannot start the spawner: {error}", phase="spawner", hint=hint) from error
    ours.setblocking(False)
    return process, ours


def _run(binary: Path, guest: Path, guest_uid: int, link: int, places: Places | None) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as undo:
        guest_fd = os.open(guest, os.O_PATH | os.O_CLOEXEC)
        undo.callback(os.close, guest_fd)
        fds, numbers, command = {"socket": [link], "guest": [guest_fd]}, {"guest-uid": guest_uid}, [str(binary)]
        if places is not None:
            fds |= places.open(undo)
            numbers |= places.numbers()
            command += ["--instance", places.instance]
        given = [(name, fd) for name, some in fds.items() for fd in some]
        for name, value in (*given, *numbers.items()):
            command += [f"--{name}", str(value)]
        kept = [fd for _, fd in given]
        return subprocess.Popen(command, pass_fds=kept, stdin=subprocess.DEVNULL, cwd="/")


def _directory(path: Path, undo: contextlib.ExitStack) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    undo.callback(os.close, fd)
    return fd


def reap(process: subprocess.Popen[bytes]) -> None:
    """The link is closed: it ends by itself."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
