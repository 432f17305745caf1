"""Files of a sandbox."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from barchan.errors import FileMissing, InvalidRequest, ProtocolError
from barchan.sdk import _compat
from barchan.sdk._connection import Connection
from barchan.sdk._local import local_files, local_path, local_size
from barchan.sdk._tree import PIECE, TransferReport, TreeWriter, pack_file, pack_tree
from barchan.sdk._values import checked_piece, packed, to_bytes
from barchan.spec import GIB, FileStat
from barchan.wire.guest import Cursor, read_entry, stat_of
from barchan.wire.link import Call
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
from barchan.wire.streams import MAX_LISTING, ByteSender, CallStreams

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


Content = bytes | bytearray | memoryview | str | AsyncIterable[bytes] | Readable


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

    async def read(
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
        return await self._connection.fetch(request, most=max_bytes)

    async def read_text(self, path: PathText, *, user: str | None = None) -> str:
        """As UTF-8; what is not becomes U+FFFD."""
        return (await self.read(path, user=user)).decode("utf-8", "replace")

    async def read_stream(
        self, path: PathText, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncIterator[bytes]:
        """Chunks of at most 128 KiB; at most 1 MiB is read ahead. Not taken up again after a lost connection."""
        request = ReadFile(sandbox=self._sandbox, path=to_bytes(path), offset=offset, length=length, user=user)
        async for chunk in self._stream(request):
            yield chunk

    async def write(
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
        """Write a file from bytes, text, a binary file object or an async iterable, of any length in flat memory.

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
        await self._send(request, _pieces(data), progress, _length(data))

    async def stat(self, path: PathText, *, follow: bool = True, user: str | None = None) -> FileStat:
        request = StatFile(sandbox=self._sandbox, path=to_bytes(path), follow=follow, user=user)
        return unpack(await self._ask(request, retry=True), FileStat)

    async def exists(self, path: PathText, *, user: str | None = None) -> bool:
        """Also for a link that points nowhere."""
        try:
            await self.stat(path, follow=False, user=user)
        except FileMissing:
            return False
        return True

    async def list(self, path: PathText, *, depth: int = 1, user: str | None = None) -> tuple[FileStat, ...]:
        """Entries with paths relative to `path`. Depth 1 is the directory's own. At most 64 MiB of them."""
        request = ListFiles(sandbox=self._sandbox, path=to_bytes(path), depth=depth, user=user)
        cursor, found = Cursor(await self._connection.fetch(request, most=MAX_LISTING)), []
        while cursor.left:
            entry = read_entry(cursor)
            found.append(stat_of(entry, entry.path))
        return tuple(found)

    async def mkdir(self, path: PathText, *, mode: int = 0o755, parents: bool = True, user: str | None = None) -> None:
        """With `parents`, an existing directory is fine."""
        await self._ask(
            MakeDirectory(sandbox=self._sandbox, path=to_bytes(path), mode=mode, parents=parents, user=user)
        )

    async def remove(
        self, path: PathText, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> None:
        """Links are removed, never followed."""
        await self._ask(
            RemoveFile(
                sandbox=self._sandbox, path=to_bytes(path), recursive=recursive, missing_ok=missing_ok, user=user
            )
        )

    async def rename(self, path: PathText, target: PathText, *, user: str | None = None) -> None:
        """Replaces an existing file. Within one file system, as rename(2)."""
        await self._ask(RenameFile(sandbox=self._sandbox, path=to_bytes(path), target=to_bytes(target), user=user))

    async def upload(
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
        if await _locally(path, path.is_dir):
            items = pack_tree(path, report)
        else:
            target, name = os.path.split(target.rstrip(b"/"))
            items = pack_file(path, name, report)
        request = PutTree(sandbox=self._sandbox, path=target or b"/", user=user)
        total = await _locally(path, local_size, path) if progress is not None else None
        await self._send(request, batches(path, items), progress, total)
        return report[0]

    async def download(
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
        if progress is not None and (found := await self.stat(request.path, follow=False, user=user)).kind == "file":
            total = found.size
        with TreeWriter(path, max_bytes, max_entries) as writer:
            async for chunk in self._stream(request):
                written = await _locally(path, writer.feed, chunk)
                if progress is not None:
                    progress(written, total)
            return await _locally(path, writer.finish)

    async def _ask(self, request: Request, *, retry: bool = False) -> bytes:
        return await self._connection.request(request, retry=retry, timeout=self._timeout)

    async def _stream(self, request: Request) -> AsyncIterator[bytes]:
        call, streams, first = await self._connection.attempts(lambda link: _opened(link, request))
        try:
            while first:
                yield first
                first = await streams.stdout.read()
        finally:
            call.abandon()

    async def _send(
        self,
        request: Request,
        pieces: AsyncIterator[bytes],
        progress: Progress | None = None,
        total: int | None = None,
    ) -> None:
        payload = packed(request)
        link = await self._connection.link()
        streams = CallStreams(outputs=())
        call = link.call(payload, streams.on_frame)
        streams.follow(call)
        streams.stdin.resume(0)
        try:
            await _write_all(streams.stdin, pieces, progress, total)
            await call.answer
            if streams.stdin.cut:
                raise ProtocolError("the node answered before it had everything")
        finally:
            call.abandon()


async def send_items(files: Files, remote: bytes, pieces: AsyncIterator[bytes], *, user: str) -> None:
    """Tree items as they are, owners among them, below `remote`, which is made if it is missing. For builds."""
    await files._send(PutTree(sandbox=files._sandbox, path=remote, user=user), pieces)


async def receive_items(files: Files, remote: bytes, *, user: str) -> AsyncIterator[bytes]:
    """As they come: bytes for a `TreeReader`. For builds."""
    async for chunk in files._stream(GetTree(sandbox=files._sandbox, path=remote, user=user)):
        yield chunk


async def _opened(link: Any, request: Request) -> tuple[Call, CallStreams, bytes]:
    """A reading call and its first bytes: up to here it may be tried again."""
    streams = CallStreams(confirmed=True)
    call = link.call(packed(request), streams.on_frame)
    streams.follow(call)
    try:
        return call, streams, await streams.stdout.read()
    except BaseException:
        call.abandon()
        raise


async def _locally(root: Path, work: Callable[..., T], *args: Any) -> T:
    """In a thread, with its trouble in our tree."""
    with local_files(root):
        return await _compat.in_thread(work, *args)


async def _write_all(
    sender: ByteSender, pieces: AsyncIterator[bytes], progress: Progress | None, total: int | None
) -> None:
    progress = None if progress is None else _compat.free(progress)
    async for piece in pieces:
        await sender.write(piece)
        if progress is not None:
            progress(sender.offset, total)
    sender.eof()


async def _pieces(data: Content) -> AsyncIterator[bytes]:
    if isinstance(data, str):
        yield data.encode()
    elif isinstance(data, (bytes, bytearray, memoryview)):
        yield cast(bytes, data)
    elif isinstance(data, Readable):
        while chunk := await _compat.in_thread(data.read, _BATCH):
            if not isinstance(chunk, bytes):
                raise InvalidRequest("data: the file is open as text", field="data", hint="open it with mode 'rb'")
            yield chunk
    else:
        async for piece in _compat.source(data):
            yield checked_piece(piece, "data")


def _length(data: Content) -> int | None:
    return memoryview(data).nbytes if isinstance(data, (bytes, bytearray, memoryview)) else None


def _check_content(data: Content) -> None:
    if not isinstance(data, (str, bytes, bytearray, memoryview, AsyncIterable, Readable)):
        raise InvalidRequest(
            f"data: {type(data).__name__} is no content",
            field="data",
            hint="bytes, str, a binary file or an async iterable; for a local path take `upload`",
        )


async def batches(root: Path, items: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Take from a generator that reads files, in a thread and not one small item at a time."""

    def batch() -> bytes:
        parts, size = [], 0
        for item in items:
            parts.append(item)
            size += len(item)
            if size >= _BATCH - PIECE:
                break
        return b"".join(parts)

    while data := await _locally(root, batch):
        yield data
