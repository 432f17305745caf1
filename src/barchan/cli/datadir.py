"""The data directory as `up` and `down` see it: made, locked, and with a record of who serves it."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from barchan.cli.processes import ProcessRef
from barchan.config import ApiConfig, Layout, NodeConfig, decode_config, encode_config
from barchan.errors import Conflict, InvalidRequest, NodeStorageFull
from barchan.kernel import mounts
from barchan.names import check_name

SOCKET_PATH_MOST = 107
"""Bytes in sockaddr_un."""


class UpRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who serves a data directory, with what settings. `DATA/run/up.json`."""

    api: ApiConfig
    node: NodeConfig
    supervisor: ProcessRef | None = None
    services: dict[str, ProcessRef] = {}


def log_path(layout: Layout) -> Path:
    return layout.run / "up.log"


def read_record(layout: Layout) -> UpRecord | None:
    """None when nothing was ever started here, or by a version whose record means nothing to this one."""
    try:
        return decode_config(_record_path(layout).read_bytes(), UpRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def write_record(layout: Layout, record: UpRecord) -> None:
    _write(_record_path(layout), encode_config(record))


def _record_path(layout: Layout) -> Path:
    return layout.run / "up.json"


def prepare(layout: Layout) -> None:
    """Make the directory, its token and its instance name. Refuses a directory that holds something else."""
    if len(os.fsencode(layout.node_socket)) > SOCKET_PATH_MOST:
        raise InvalidRequest("data: the path is too long for a socket below it", field="data", hint="use a shorter one")
    try:
        layout.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        _own(layout)
        layout.run.mkdir(exist_ok=True, mode=0o700)
        for path, value in ((layout.instance, secrets.token_hex(6)), (layout.token, secrets.token_urlsafe(32))):
            if not path.exists():
                _write(path, value.encode())
    except (FileExistsError, NotADirectoryError) as error:
        raise InvalidRequest(f"data: {error.filename} is not a directory", field="data") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NodeStorageFull(f"cannot write {layout.data}: {error.strerror}") from error
        why = (error.strerror or str(error)).lower()
        raise InvalidRequest(
            f"data: {layout.data} cannot be made: {why}", field="data", hint="give a directory on a disk"
        ) from error


def share(layout: Layout, layers: Path) -> None:
    """Let the layer store be at `layers`, which other nodes use too. Call after `prepare`; idempotent."""
    if not layers.is_dir():
        raise InvalidRequest(f"layers: {layers} is not a directory", field="layers")
    try:
        layout.layers.symlink_to(layers)
    except FileExistsError as error:
        if os.path.realpath(layout.layers) == os.path.realpath(layers):
            return
        raise InvalidRequest(
            f"layers: {layout.data} has its layers at {os.path.realpath(layout.layers)}",
            field="layers",
            hint="give a new data directory, or move what is there and remove it",
        ) from error


def _own(layout: Layout) -> None:
    if not layout.instance.exists() and any(layout.data.iterdir()):
        known = {layout.layers.name, layout.run.name}
        if strange := {p.name for p in layout.data.iterdir()} - known:
            raise InvalidRequest(
                f"data: {layout.data} holds other things ({min(strange)!r})",
                field="data",
                hint="give an empty or a new directory",
            )
    if stat.S_IMODE(layout.data.stat().st_mode) != 0o700:
        layout.data.chmod(0o700)


def unmake(layout: Layout, existed: bool) -> None:
    """Undo `prepare` of a new directory in which nothing was served. Call with the lock held."""
    shutil.rmtree(layout.run, ignore_errors=True)
    for path in (layout.instance, layout.token, *((layout.layers,) if layout.layers.is_symlink() else ())):
        path.unlink(missing_ok=True)
    if not existed:
        with suppress(OSError):  # somebody put something there
            layout.data.rmdir()


def check_ours(layout: Layout) -> None:
    """Before everything below the directory is deleted. Raises `InvalidRequest` if anything there is not ours."""
    if not layout.instance.is_file():
        raise InvalidRequest(f"data: {layout.data} is no data directory of barchan", field="data")
    strange = {entry.name for entry in layout.data.iterdir()} - _names(layout)
    if strange:
        raise InvalidRequest(f"data: {layout.data} holds other things ({min(strange)!r})", field="data")


def _names(layout: Layout) -> set[str]:
    files = (layout.token, layout.instance, layout.registry, layout.scratch_image)
    directories = (layout.log, layout.layers, layout.cache, layout.mounts, layout.scratch, layout.run)
    part = layout.scratch_image.with_suffix(".part").name
    others = {"record.key", part, f"{layout.registry.name}-wal", f"{layout.registry.name}-shm"}
    return {path.name for path in (*files, *directories)} | others


def delete(layout: Layout) -> None:
    """Remove the directory and all in it. Call with the lock held and nothing running. Can be tried again."""
    check_ours(layout)
    below = os.path.realpath(layout.data) + "/"
    if mounted := [mount.path for mount in mounts.current() if mount.path.startswith(below)]:
        raise Conflict(f"{mounted[0]} is still mounted", hint="nothing was deleted")
    try:
        for path in sorted(layout.data.iterdir(), key=lambda path: path == layout.instance):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        layout.data.rmdir()
    except OSError as error:
        raise Conflict(f"cannot delete {error.filename}: {error.strerror}", hint="the rest may be gone") from error


def occupied(path: Path) -> int:
    """Bytes on disk of a file, or of all files below a directory; 0 if there is nothing."""
    files = [path] if not path.is_dir() else [Path(top, name) for top, _, names in os.walk(path) for name in names]
    return sum(file.lstat().st_blocks * 512 for file in files if file.exists())


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, readable by the owner alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, data)
        os.fsync(fd)
        os.replace(temporary, path)
    finally:
        os.close(fd)
        with suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def locked(layout: Layout, *, wait: float = 0.0) -> Iterator[None]:
    """Be the only supervisor of this directory. The lock lives until the last process that inherited it ends."""
    fd = os.open(layout.run / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(fd, layout, time.monotonic() + wait)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, layout: Layout, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise _taken(layout) from error
        time.sleep(0.02)


def _taken(layout: Layout) -> Conflict:
    record = read_record(layout)
    who = f" (pid {record.supervisor.pid})" if record and record.supervisor else ""
    return Conflict(
        f"{layout.data} is served by another `barchan up`{who}",
        hint="stop that one with `barchan down`, or give this one another --data",
    )


def node_name(given: str | None, record: UpRecord | None) -> str:
    """The given name, else the one used before, else the host's."""
    if given is not None:
        return check_name(given, "name")
    if record is not None:
        return record.node.name
    host = "".join(c if c in "abcdefghijklmnopqrstuvwxyz0123456789-" else "-" for c in socket.gethostname().lower())
    return host[:32].strip("-") or "node"
