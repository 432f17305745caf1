"""A layer's tar on its way into an archive: hashed, compressed, in a file of its own until its size is known."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal, Protocol

import msgspec

from barchan.errors import CreateFailed, FeatureMissing, FileFailure, NodeStorageFull
from barchan.layers.tar_writer import PHASE, Sink

Compression = Literal["none", "gzip", "zstd"]
_GZIP_LEVEL, _GZIP = 6, 31
"""zlib writes the header without name and time."""
_ZSTD = ("zstd", "-q", "-c", "-3", "-T0")
"""The same bytes on any number of cores."""


class Blob(msgspec.Struct, frozen=True):
    """`digest` and `size` are of the file, `diff_id` of what is compressed in it."""

    path: Path
    digest: str
    size: int
    diff_id: str


class Output:
    """A file whose errors say which one it is: `NodeStorageFull`, `FileFailure`. `BrokenPipeError` passes."""

    def __init__(self, file: IO[bytes], shown: str) -> None:
        self._file, self._shown = file, shown
        self.size = 0

    def write(self, data: bytes, /) -> None:
        with typed(self._shown):
            self._file.write(data)
        self.size += len(data)

    def flush(self) -> None:
        with typed(self._shown):
            self._file.flush()


@contextmanager
def typed(shown: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise no_room(shown) from error
        raise FileFailure(f"{shown}: {error.strerror}", phase=PHASE) from error


def no_room(shown: str) -> NodeStorageFull:
    return NodeStorageFull(f"no room for {shown}", hint="free disk space", phase=PHASE)


class _Compressor(Protocol):
    def write(self, data: bytes, /) -> object: ...

    def finish(self) -> None: ...


class _Plain:
    def __init__(self, out: Output) -> None:
        self.write = out.write

    def finish(self) -> None: ...


class _Gzip:
    def __init__(self, out: Output) -> None:
        self._out, self._state = out, zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP)

    def write(self, data: bytes, /) -> None:
        self._out.write(self._state.compress(data))

    def finish(self) -> None:
        self._out.write(self._state.flush())


class _Zstd:
    """The program: Python 3.11 has no such module."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def write(self, data: bytes, /) -> None:
        assert self._process.stdin
        self._process.stdin.write(data)

    def finish(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()


class _Hashed:
    def __init__(self, out: _Compressor) -> None:
        self._out, self.digest = out, hashlib.sha256()

    def write(self, data: bytes, /) -> None:
        self.digest.update(data)
        self._out.write(data)


@contextmanager
def _compressor(way: Compression, file: IO[bytes], shown: str) -> Iterator[_Compressor]:
    if way == "zstd":
        with _zstd(file, shown) as process:
            yield process
    else:
        out = Output(file, shown)
        yield _Plain(out) if way == "none" else _Gzip(out)
        out.flush()


@contextmanager
def _zstd(file: IO[bytes], shown: str) -> Iterator[_Zstd]:
    with tempfile.TemporaryFile() as messages:
        try:
            process = subprocess.Popen(_ZSTD, stdin=subprocess.PIPE, stdout=file, stderr=messages)
        except FileNotFoundError as error:
            raise FeatureMissing("zstd is not installed", hint="install zstd", phase=PHASE) from error
        try:
            with suppress(BrokenPipeError):  # it ended early, and says why
                yield _Zstd(process)
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
            messages.seek(0)
            said = messages.read(2000).decode(errors="replace").strip()
        if process.returncode:
            raise no_room(shown) if "No space left" in said else CreateFailed(f"zstd failed: {said}", phase=PHASE)


def make(path: Path, way: Compression, shown: str, fill: Callable[[Sink], None]) -> Blob:
    """A new file with what `fill` writes."""
    with typed(shown), path.open("xb") as file, _compressor(way, file, shown) as compressor:
        hashed = _Hashed(compressor)
        fill(hashed)
        compressor.finish()
    with path.open("rb") as whole:
        digest = hashlib.file_digest(whole, "sha256").hexdigest()
    return Blob(path, f"sha256:{digest}", path.stat().st_size, f"sha256:{hashed.digest.hexdigest()}")
