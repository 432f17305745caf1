# Generated from src/barchan/sdk/_files.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""Files of a sandbox."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from barchan.errors import FileMissing, InvalidRequest, ProtocolError
from barchan.sdk._local import local_files, local_path, local_size
from barchan.sdk._sync import _compat
from barchan.sdk._sync._connection import Connection
from barchan.sdk._sync._link import Call
from barchan.sdk._sync._streams import MAX_LISTING, ByteSender, CallStreams
from barchan.sdk._tree import PIECE, TransferReport, TreeWriter, pack_file, pack_tree
from barchan.sdk._values import checked_piece, packed, to_bytes
from barchan.spec import GIB, FileStat
from barchan.wire.guest import Cursor, read_entry, stat_of
from barchan.wire.messages import (
    GetTree,
    ListFiles,
    MakeDirectory,
    PutTree,
    ReadFile,
    RemoveFile,
    RenameFile,
    Request,
    StatFile,
    WriteFile,
    unpack,
)

T = TypeVar("T")
PathText = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Progress = Callable[[int, int | None], None]
"""Called with the bytes transferred so far, and with all of them where that is known."""
_BATCH = 256 << 10


MAX_READ = GIB
MAX_DOWNLOAD, MAX_ENTRIES = 16 * GIB, 1_000_000


@runtime_checkable
class Readable(Protocol):
    """A binary file object."""

    def read(self, size: int = ..., /) -> bytes: ...


Content = bytes | bytearray | memoryview | str | Iterable[bytes] | Readable


@_compat.exclusive
class Files:
    """`sandbox.files`. Paths are `str` (UTF-8) or bytes; relative ones start at `/`. `user` None is the sandbox's user.

    Operations run in the sandbox by system calls under that user's identity; no program of the image takes part. They raise
    `FileMissing`, `FileDenied`, `FileAlreadyExists`, `FileIsDirectory`, `FileNotDirectory` or another `FileFailure`,
    `SandboxDiskFull`, `SandboxUnavailable`, `SandboxStopped`. Reads are tried again after a lost connection; other operations
    then raise `ApiUnavailable` or `NodeUnavailable` (`retry` is true), and may or may not have happened.
    """

    def __init__(self, connection: Connection, sandbox: str, timeout: float | None) -> None:
        self._connection = connection
        self._sandbox = sandbox
        self._timeout = timeout

    def read(
        self,
        path: PathText,
        *,
        offset: int = 0,
        length: int | None = None,
        user: str | None = None,
        max_bytes: int = MAX_READ,
    ) -> bytes:
        """The file's bytes, in memory. For big files take `read_stream` or `download`.

        More than `max_bytes` is a `ProtocolError`: a sparse file of a sandbox costs it nothing and is as long as it likes.
        """
        request = ReadFile(sandbox=self._sandbox, path=to_bytes(path), offset=offset, length=length, user=user)
        return self._connection.fetch(request, most=max_bytes)

    def read_text(self, path: PathText, *, user: str | None = None) -> str:
        """As UTF-8; what is not becomes U+FFFD."""
        return self.read(path, user=user).decode("utf-8", "replace")

    def read_stream(
        self, path: PathText, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> Iterator[bytes]:
        """Chunks of at most 128 KiB; at most 1 MiB is read ahead. Not taken up again after a lost connection."""
        request = ReadFile(sandbox=self._sandbox, path=to_bytes(path), offset=offset, length=length, user=user)
        yield from self._stream(request)

    def write(
        self,
        path: PathText,
        data: Content,
        *,
        mode: int | None = None,
        parents: bool = True,
        append: bool = False,
        exclusive: bool = False,
        user: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Write a file from bytes, text, a binary file object or an iterable, of any length in flat memory.

        It appears whole or not at all, except with `append`. `mode` None keeps that of an existing file, else 0o644.
        `exclusive` refuses an existing file (`FileAlreadyExists`).
        """
        _check_content(data)
        request = WriteFile(
            sandbox=self._sandbox,
            path=to_bytes(path),
            mode=mode,
            parents=parents,
            append=append,
            exclusive=exclusive,
            user=user,
        )
        self._send(request, _pieces(data), progress, _length(data))

    def stat(self, path: PathText, *, follow: bool = True, user: str | None = None) -> FileStat:
        request = StatFile(sandbox=self._sandbox, path=to_bytes(path), follow=follow, user=user)
        return unpack(self._ask(request, retry=True), FileStat)

    def exists(self, path: PathText, *, user: str | None = None) -> bool:
        """Also for a link that points nowhere."""
        try:
            self.stat(path, follow=False, user=user)
        except FileMissing:
            return False
        return True

    def list(self, path: PathText, *, depth: int = 1, user: str | None = None) -> tuple[FileStat, ...]:
        """Entries with paths relative to `path`. Depth 1 is the directory's own. At most 64 MiB of them."""
        request = ListFiles(sandbox=self._sandbox, path=to_bytes(path), depth=depth, user=user)
        cursor, found = Cursor(self._connection.fetch(request, most=MAX_LISTING)), []
        while cursor.left:
            entry = read_entry(cursor)
            found.append(stat_of(entry, entry.path))
        return tuple(found)

    def mkdir(self, path: PathText, *, mode: int = 0o755, parents: bool = True, user: str | None = None) -> None:
        """With `parents`, an existing directory is fine."""
        self._ask(MakeDirectory(sandbox=self._sandbox, path=to_bytes(path), mode=mode, parents=parents, user=user))

    def remove(
        self, path: PathText, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> None:
        """Links are removed, never followed."""
        self._ask(
            RemoveFile(
                sandbox=self._sandbox, path=to_bytes(path), recursive=recursive, missing_ok=missing_ok, user=user
            )
        )

    def rename(self, path: PathText, target: PathText, *, user: str | None = None) -> None:
        """Replaces an existing file. Within one file system, as rename(2)."""
        self._ask(RenameFile(sandbox=self._sandbox, path=to_bytes(path), target=to_bytes(target), user=user))

    def upload(
        self,
        local: str | os.PathLike[str],
        remote: PathText,
        *,
        user: str | None = None,
        progress: Progress | None = None,
    ) -> TransferReport:
        """Send a file or a tree; `remote` becomes it. Parents are made; modes, times and links are kept, owners are `user`'s.

        FIFOs, sockets and devices are skipped and reported. A `FileFailure` may also be about a local file; its message says so.
        A file appears when it is whole; those that did before an error stay.
        """
        path, report = local_path(local), cast(list[TransferReport], [])
        target = to_bytes(remote, "remote")
        if _locally(path, path.is_dir):
            items = pack_tree(path, report)
        else:
            target, name = os.path.split(target.rstrip(b"/"))
            items = pack_file(path, name, report)
        request = PutTree(sandbox=self._sandbox, path=target or b"/", user=user)
        total = _locally(path, local_size, path) if progress is not None else None
        self._send(request, batches(path, items), progress, total)
        return report[0]

    def download(
        self,
        remote: PathText,
        local: str | os.PathLike[str],
        *,
        user: str | None = None,
        progress: Progress | None = None,
        max_bytes: int = MAX_DOWNLOAD,
        max_entries: int = MAX_ENTRIES,
    ) -> TransferReport:
        """Fetch a file or a tree; `local` becomes it. Modes (without set-id bits), times and links are kept.

        Nothing outside `local` is written, whatever the sandbox sends: a path with `..` or an absolute one is a
        `ProtocolError`, one that lies behind a link a `FileFailure`. FIFOs, sockets, devices and links that lead out of the
        tree are skipped and reported. More than `max_bytes` or `max_entries` is a `FileFailure`: hard links and sparse
        files cost a sandbox nothing.
        A `FileFailure` may also be about a local file; its message says so. A file appears when
        it is whole; those that did before an error stay.
        """
        progress = None if progress is None else _compat.free(progress)
        request, path = GetTree(sandbox=self._sandbox, path=to_bytes(remote, "remote"), user=user), local_path(local)
        total = None
        if progress is not None and (found := self.stat(request.path, follow=False, user=user)).kind == "file":
            total = found.size
        with TreeWriter(path, max_bytes, max_entries) as writer:
            for chunk in self._stream(request):
                written = _locally(path, writer.feed, chunk)
                if progress is not None:
                    progress(written, total)
            return _locally(path, writer.finish)

    def _ask(self, request: Request, *, retry: bool = False) -> bytes:
        return self._connection.request(request, retry=retry, timeout=self._timeout)

    def _stream(self, request: Request) -> Iterator[bytes]:
        call, streams, first = self._connection.attempts(lambda link: _opened(link, request))
        try:
            while first:
                yield first
                first = streams.stdout.read()
        finally:
            call.abandon()

    def _send(
        self,
        request: Request,
        pieces: Iterator[bytes],
        progress: Progress | None = None,
        total: int | None = None,
    ) -> None:
        payload = packed(request)
        link = self._connection.link()
        streams = CallStreams(outputs=())
        call = link.call(payload, streams.on_frame)
        streams.follow(call)
        streams.stdin.resume(0)
        try:
            _write_all(streams.stdin, pieces, progress, total)
            call.answer.wait()
            if streams.stdin.cut:
                raise ProtocolError("the node answered before it had everything")
        finally:
            call.abandon()


def send_items(files: Files, remote: bytes, pieces: Iterator[bytes], *, user: str) -> None:
    """Tree items as they are, owners among them, below `remote`, which is made if it is missing. For builds."""
    files._send(PutTree(sandbox=files._sandbox, path=remote, user=user), pieces)


def receive_items(files: Files, remote: bytes, *, user: str) -> Iterator[bytes]:
    """As they come: bytes for a `TreeReader`. For builds."""
    yield from files._stream(GetTree(sandbox=files._sandbox, path=remote, user=user))


def _opened(link: Any, request: Request) -> tuple[Call, CallStreams, bytes]:
    """A reading call and its first bytes: up to here it may be tried again."""
    streams = CallStreams(confirmed=True)
    call = link.call(packed(request), streams.on_frame)
    streams.follow(call)
    try:
        return call, streams, streams.stdout.read()
    except BaseException:
        call.abandon()
        raise


def _locally(root: Path, work: Callable[..., T], *args: Any) -> T:
    """In a thread, with its trouble in our tree."""
    with local_files(root):
        return _compat.in_thread(work, *args)


def _write_all(sender: ByteSender, pieces: Iterator[bytes], progress: Progress | None, total: int | None) -> None:
    progress = None if progress is None else _compat.free(progress)
    for piece in pieces:
        sender.write(piece)
        if progress is not None:
            progress(sender.offset, total)
    sender.eof()


def _pieces(data: Content) -> Iterator[bytes]:
    if isinstance(data, str):
        yield data.encode()
    elif isinstance(data, (bytes, bytearray, memoryview)):
        yield cast(bytes, data)
    elif isinstance(data, Readable):
        while chunk := _compat.in_thread(data.read, _BATCH):
            if not isinstance(chunk, bytes):
                raise InvalidRequest("data: the file is open as text", field="data", hint="open it with mode 'rb'")
            yield chunk
    else:
        for piece in _compat.source(data):
            yield checked_piece(piece, "data")


def _length(data: Content) -> int | None:
    return memoryview(data).nbytes if isinstance(data, (bytes, bytearray, memoryview)) else None


def _check_content(data: Content) -> None:
    if not isinstance(data, (str, bytes, bytearray, memoryview, Iterable, Readable)):
        raise InvalidRequest(
            f"data: {type(data).__name__} is no content",
            field="data",
            hint="bytes, str, a binary file or an iterable; for a local path take `upload`",
        )


def batches(root: Path, items: Iterator[bytes]) -> Iterator[bytes]:
    """Take from a generator that reads files, in a thread and not one small item at a time."""

    def batch() -> bytes:
        parts, size = [], 0
        for item in items:
            parts.append(item)
            size += len(item)
            if size >= _BATCH - PIECE:
                break
        return b"".join(parts)

    while data := _locally(root, batch):
        yield data
