"""Streams as they come (plain, gzip, zstd, bzip2, xz), unpacked into a file while they are hashed and counted.

zstd is left to the program of that name: Python 3.11 has no such module, the program is in every distribution, and what
it reads is hostile: better another process than another C library in this one. It refuses windows above 128 MiB by itself.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import shutil
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from barchan.errors import FeatureMissing, InvalidRequest, NodeStorageFull
from barchan.spec import GIB, MIB

MOST_UNPACKED = 64 * GIB
"""Bytes of one layer or archive. What pretends to be small and is not ends here, or at the end of the disk."""
_SPARE = 64 * MIB
_COPY = 1 << 20
_ZSTD = b"\x28\xb5\x2f\xfd"
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)


class _Damaged(Exception):
    """Not a stream of its kind; the text says why."""


@contextmanager
def _zstd(source: IO[bytes]) -> Iterator[IO[bytes]]:
    try:
        process = subprocess.Popen(
            ("zstd", "-dcq"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except FileNotFoundError as error:
        raise FeatureMissing("zstd is not installed", hint="install zstd", phase="pull") from error
    assert process.stdin and process.stdout and process.stderr
    feeder = threading.Thread(target=_feed, args=(source, process.stdin), daemon=True)
    feeder.start()
    try:
        yield process.stdout
        said = process.stderr.read(2000).decode(errors="replace").strip()
        if process.wait():
            raise _Damaged(said)
    finally:
        process.kill()
        process.wait()
        feeder.join()
        process.stdout.close()
        process.stderr.close()


def _feed(source: IO[bytes], pipe: IO[bytes]) -> None:
    with suppress(BrokenPipeError), pipe:
        shutil.copyfileobj(source, pipe, _COPY)


def _opener(source: IO[bytes]) -> Callable[[IO[bytes]], IO[bytes]] | None:
    """By its first bytes; None is zstd."""
    head = source.read(6)
    source.seek(0)
    if head[:4] == _ZSTD or (head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):
        return None
    if head.startswith(b"\x1f\x8b"):
        return lambda file: io.BufferedReader(gzip.GzipFile(fileobj=file))
    if head.startswith(b"BZh"):
        return bz2.BZ2File
    return lzma.LZMAFile if head == b"\xfd7zXZ\0" else lambda file: file


def compressed(source: IO[bytes]) -> bool:
    """Whether it is one of the formats known here. The position is at the start afterwards."""
    head = source.read(6)
    source.seek(0)
    return head.startswith((_ZSTD, b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0"))


@contextmanager
def _reader(source: IO[bytes]) -> Iterator[IO[bytes]]:
    opener = _opener(source)
    if opener is None:
        with _zstd(source) as file:
            yield file
    else:
        yield opener(source)


def unpack(source: IO[bytes], into: Path, shown: str, algorithm: str = "sha256", *, phase: str = "pull") -> str:
    """Unpack the seekable `source` into the new file `into`; the digest of what was written, in hex.

    Raises `InvalidRequest` naming `shown` when it is damaged or grows beyond `MOST_UNPACKED`, `NodeStorageFull`,
    `FeatureMissing` without zstd.
    """
    room = shutil.disk_usage(into.parent).free - _SPARE
    digest, written = hashlib.new(algorithm), 0
    with into.open("xb") as out:
        for piece in _pieces(source, shown, phase):
            written += len(piece)
            if written > MOST_UNPACKED:
                raise InvalidRequest(f"{shown} unpacks to more than {MOST_UNPACKED} bytes", field="source", phase=phase)
            if written > room:
                raise NodeStorageFull(f"no room to unpack {shown}", hint="free disk space", phase=phase)
            digest.update(piece)
            out.write(piece)
    return digest.hexdigest()


def _pieces(source: IO[bytes], shown: str, phase: str) -> Iterator[bytes]:
    try:
        with _reader(source) as file:
            while piece := file.read(_COPY):
                yield piece
    except (*_DAMAGED, _Damaged) as error:
        raise InvalidRequest(f"{shown} does not unpack: {error}", field="source", phase=phase) from error
