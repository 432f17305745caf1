"""From a caller's request to the guest's: pure."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from barchan.errors import InvalidRequest
from barchan.spec import Exec
from barchan.wire import guest
from barchan.wire import messages as m
from barchan.wire.guest import ALL, KEEP, ExecFlag, OpKind, blob

_CREATE_PARENTS, _APPEND, _EXCLUSIVE = 1, 2, 4


def encode_exec(exec_: Exec, *, cwd: bytes, env: dict[bytes, bytes], files: int) -> bytes:
    """`cwd`, `env` and `files` (open ones, at most) hold what the sandbox adds."""
    flags = ExecFlag.STDIN * exec_.stdin | ExecFlag.MERGE * exec_.merge_stderr
    flags |= ExecFlag.KEEP_BACKGROUND * exec_.keep_background
    flags |= ExecFlag.TTY * (exec_.tty is not None) | ExecFlag.SHELL * exec_.opens_shell
    return guest.exec_parts(
        flags=flags,
        timeout_ms=_milliseconds(exec_.timeout),
        grace_ms=round(exec_.grace * 1000),
        output_limit=exec_.output_limit,
        nofile=files,
        cwd=cwd,
        argv=exec_.argv,
        env=[key + b"=" + value for key, value in env.items()],
        rows=exec_.tty.rows if exec_.tty is not None else 0,
        columns=exec_.tty.columns if exec_.tty is not None else 0,
    )


def encode_run(exec_: Exec, shell: int) -> bytes:
    """A command line for the session that the guest's operation `shell` opened."""
    return guest.run_parts(
        shell=shell,
        timeout_ms=_milliseconds(exec_.timeout),
        grace_ms=round(exec_.grace * 1000),
        output_limit=exec_.output_limit,
        command=exec_.argv[0],
    )


def _milliseconds(timeout: float | None) -> int:
    """0 for none."""
    return max(1, round(timeout * 1000)) if timeout is not None else 0


def _id(value: int | None) -> int:
    return KEEP if value is None else value


def _stat(r: m.StatFile) -> bytes:
    return blob(r.path) + struct.pack("<B", r.follow)


def _list(r: m.ListFiles) -> bytes:
    return blob(r.path) + struct.pack("<I", r.depth)


def _read(r: m.ReadFile) -> bytes:
    return blob(r.path) + struct.pack("<QQ", r.offset, ALL if r.length is None else r.length)


def _write(r: m.WriteFile) -> bytes:
    flags = _CREATE_PARENTS * r.parents + _APPEND * r.append + _EXCLUSIVE * r.exclusive
    return blob(r.path) + struct.pack("<IIII", flags, _id(r.mode), _id(r.uid), _id(r.gid))


def _mkdir(r: m.MakeDirectory) -> bytes:
    return blob(r.path) + struct.pack("<II", int(r.parents), r.mode)


def _remove(r: m.RemoveFile) -> bytes:
    return blob(r.path) + struct.pack("<I", r.recursive + 2 * r.missing_ok)


def _rename(r: m.RenameFile) -> bytes:
    return blob(r.path) + blob(r.target)


def _get_tree(r: m.GetTree) -> bytes:
    return blob(r.path)


def _put_tree(r: m.PutTree) -> bytes:
    return blob(r.path) + struct.pack("<III", int(r.parents), _id(r.uid), _id(r.gid))


_FILES: dict[type[m.OfFile], tuple[OpKind, Callable[[Any], bytes]]] = {
    m.StatFile: (OpKind.STAT, _stat),
    m.ListFiles: (OpKind.LIST, _list),
    m.ReadFile: (OpKind.READ, _read),
    m.WriteFile: (OpKind.WRITE, _write),
    m.MakeDirectory: (OpKind.MKDIR, _mkdir),
    m.RemoveFile: (OpKind.REMOVE, _remove),
    m.RenameFile: (OpKind.RENAME, _rename),
    m.GetTree: (OpKind.GET_TREE, _get_tree),
    m.PutTree: (OpKind.PUT_TREE, _put_tree),
}


def encode_file(request: m.OfFile) -> tuple[OpKind, bytes]:
    """The guest's kind and request body. Raises `InvalidRequest` naming the field."""
    for field in ("path", "target"):
        value = getattr(request, field, b"x")
        if not value or b"\0" in value:
            raise InvalidRequest(f"{field}: empty or contains a NUL byte", field=field)
        if len(value) >= 4096:
            raise InvalidRequest(f"{field}: longer than 4095 bytes", field=field)
    for field in ("mode", "uid", "gid", "depth"):
        number = getattr(request, field, None)
        if number is not None and not 0 <= number < KEEP:
            raise InvalidRequest(f"{field}: out of range", field=field)
    for field in ("offset", "length"):
        number = getattr(request, field, None)
        if number is not None and not 0 <= number <= ALL:
            raise InvalidRequest(f"{field}: out of range", field=field)
    kind, encode = _FILES[type(request)]
    return kind, encode(request)
