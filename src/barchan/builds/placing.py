"""COPY and ADD inside a sandbox: where files go and to whom they belong is found out there, by the guest's file operations."""

from __future__ import annotations

import os
import posixpath
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from barchan.builds.context import MOST_LINKS, Source
from barchan.builds.patterns import compiled, is_wild
from barchan.builds.steps import Copy, MakeDirectory
from barchan.builds.trees import (
    ROOT,
    Excluding,
    Looks,
    Owner,
    archive_items,
    directory_items,
    inline_item,
    is_archive,
    local_items,
    owner_of,
)
from barchan.errors import FileMissing, FileNotDirectory, InvalidRequest, UserNotFound
from barchan.sdk._files import batches, receive_items, send_items
from barchan.sdk._tree import TreeReader
from barchan.wire.guest import blob

if TYPE_CHECKING:
    from barchan.sdk import Files, Sandbox
    from barchan.spec import FileStat

_AS = "root"
_MOST_ACCOUNTS = 16 << 20
_LIVE = ("dev", "proc", "sys")


class Destination(NamedTuple):
    """A directory that is there, and the name that one file gets in it."""

    directory: bytes
    name: str


async def place_local(sandbox: Sandbox, step: Copy, sources: tuple[Source, ...], root: Path) -> None:
    """From the context, and files that the Dockerfile holds. Errors as of `Files`, and `FileFailure` about a local file."""
    looks = Looks(await _owner(sandbox.files, step.owner), step.mode)
    for source in sources:
        local = source.items[0].local if source.items and not source.directory else ""
        if step.unpack and local and is_archive(local):
            directory = await _directory(sandbox.files, step.target, looks)
            own = Looks(looks.owner if step.owner else None, step.mode)
            await _send(sandbox.files, directory, archive_items(local, own), root)
        elif source.directory:
            directory = await _directory(sandbox.files, step.target, looks)
            await _send(sandbox.files, directory, local_items(source, "", looks), root)
        else:
            found = await _file(sandbox.files, step.target, source.name, looks)
            await _send(sandbox.files, found.directory, local_items(source, found.name, looks), root)
    for document in step.inline:
        found = await _file(sandbox.files, step.target, document.name, looks)
        await _send(sandbox.files, found.directory, inline_item(found.name, document.content, looks), root)


async def place_made(sandbox: Sandbox, step: Copy, origin: Sandbox) -> list[str]:
    """From another sandbox, through here. Returns sources that matched nothing. Owners come along unless the step says whose."""
    owner = await _owner(sandbox.files, step.owner) if step.owner else None
    made, looks = Looks(owner or ROOT, step.mode), Looks(owner, step.mode)
    nothing = []
    for source in step.sources:
        found = await _find(origin.files, source)
        nothing += [] if found else [source]
        for path in found:
            whole = await _followed(origin.files, path)
            if whole == "/":
                await _place_root(sandbox, step, origin, made, looks)
            elif (await origin.files.stat(whole, follow=False, user=_AS)).kind == "directory":
                directory = await _directory(sandbox.files, step.target, made)
                await _relay(origin, whole, sandbox, directory, "", looks, step)
            else:
                goal = await _file(sandbox.files, step.target, posixpath.basename(path), made)
                await _relay(origin, whole, sandbox, goal.directory, goal.name, looks, step)
    return nothing


async def _place_root(sandbox: Sandbox, step: Copy, origin: Sandbox, made: Looks, looks: Looks) -> None:
    """Of a sandbox that runs, without what the kernel shows in it."""
    directory = await _directory(sandbox.files, step.target, made)
    for name in sorted(os.fsdecode(entry.path) for entry in await origin.files.list("/", user=_AS)):
        if name not in _LIVE:
            await _relay(origin, f"/{name}", sandbox, directory, name, looks, step)


async def _relay(
    origin: Sandbox, path: str, sandbox: Sandbox, directory: bytes, name: str, looks: Looks, step: Copy
) -> None:
    """A file or a tree, below `directory`: under `name`, or of a tree what it holds."""
    chunks = receive_items(origin.files, os.fsencode(path), user=_AS)
    await send_items(sandbox.files, directory, _relayed(chunks, os.fsencode(name), looks, step.exclude), user=_AS)


async def make_directory(sandbox: Sandbox, step: MakeDirectory) -> None:
    """With all above it that is missing."""
    owner = await _owner(sandbox.files, step.user)
    await _directory(sandbox.files, step.path + "/", Looks(owner))


# --- where to


async def _file(files: Files, target: str, name: str, looks: Looks) -> Destination:
    """A file goes into a directory under its name, else it gets the name of the target."""
    if target.endswith("/") or await _is_directory(files, target):
        return Destination(await _directory(files, target, looks), name)
    above, leaf = posixpath.split(target)
    return Destination(await _directory(files, above, looks), leaf)


async def _is_directory(files: Files, path: str) -> bool:
    return (found := await _stat(files, path)) is not None and found.kind == "directory"


async def _directory(files: Files, target: str, looks: Looks) -> bytes:
    """It, made with all above it that is missing: these get the owner and the mode of what is copied."""
    parts, missing = [part for part in target.split("/") if part], list[bytes]()
    while parts and (found := await _stat(files, "/" + "/".join(parts))) is None:
        missing.insert(0, os.fsencode(parts.pop()))
    there = "/" + "/".join(parts)
    if parts and found is not None and found.kind != "directory":
        raise FileNotDirectory(f"{there} is no directory, so that nothing can be put below it")
    if missing:
        await _send(files, os.fsencode(there), directory_items(missing, looks), Path("/"))
    return os.fsencode(posixpath.join(there, *map(os.fsdecode, missing)))


async def _stat(files: Files, path: str, *, follow: bool = True) -> FileStat | None:
    try:
        return await files.stat(os.fsencode(path), follow=follow, user=_AS)
    except (FileMissing, FileNotDirectory):
        return None


async def _send(files: Files, directory: bytes, items: Iterator[bytes], root: Path) -> None:
    await send_items(files, directory, batches(root, items), user=_AS)


# --- to whom


async def _owner(files: Files, text: str) -> Owner:
    """`user`, `user:group`, by name or id. A user's name brings its group, an id alone is both. Raises `UserNotFound`."""
    user, colon, group = text.partition(":")
    owner = ROOT
    if user.isdecimal():
        owner = Owner(int(user), int(user))
    elif user and user != "root":
        owner = Owner(*await _account(files, "/etc/passwd", user, 2))
    if not colon or not group:
        return owner
    if group.isdecimal() or group == "root":
        return Owner(owner.uid, int(group) if group.isdecimal() else 0)
    return Owner(owner.uid, (await _account(files, "/etc/group", group, 1))[0])


async def _account(files: Files, path: str, name: str, count: int) -> list[int]:
    """Numbers from the third field on."""
    try:
        text = await files.read(path, user=_AS, max_bytes=_MOST_ACCOUNTS)
    except FileMissing:
        text = b""
    for line in text.decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        numbers = fields[2 : 2 + count]
        if fields[0] == name and len(numbers) == count and all(number.isdecimal() for number in numbers):
            return [int(number) for number in numbers]
    raise UserNotFound(f"{path} of the environment has no {name!r}", field="chown", hint="add it in a RUN before")


# --- from another sandbox


async def _find(files: Files, source: str) -> tuple[str, ...]:
    """Absolute paths; without wildcards the one, whether it is there or not."""
    parts = [part for part in source.split("/") if part not in ("", ".")]
    found = ["/"]
    for part in parts:
        if not is_wild(part):
            found = [posixpath.join(path, part) for path in found]
            continue
        try:
            wanted = compiled(part)
        except ValueError as error:
            raise InvalidRequest(f"{source!r}: {error}", field="source") from error
        found = [path for above in found async for path in _matching(files, above, wanted.fullmatch)]
    return tuple(found)


async def _matching(files: Files, directory: str, matches: object) -> AsyncIterator[str]:
    try:
        whole = await _followed(files, directory)
        entries = await files.list(os.fsencode(whole), user=_AS)
    except (FileMissing, FileNotDirectory):
        return
    for name in sorted(os.fsdecode(entry.path) for entry in entries):
        if matches(name):  # type: ignore[operator]
            yield posixpath.join(directory, name)


async def _followed(files: Files, path: str) -> str:
    """What a path that may be a link leads to, inside that sandbox."""
    for _ in range(MOST_LINKS):
        found = await files.stat(os.fsencode(path), follow=False, user=_AS)
        if found.kind != "symlink":
            return path
        path = posixpath.join(posixpath.dirname(path), os.fsdecode(found.target))
    raise InvalidRequest(f"{path!r} has too many links", field="source")


async def _relayed(
    chunks: AsyncIterator[bytes], name: bytes, looks: Looks, exclude: tuple[str, ...]
) -> AsyncIterator[bytes]:
    """The same items as they are to be: under another name, with other owners, without what is left out."""
    reader, excluding, dropping = TreeReader(), Excluding(exclude), False
    async for chunk in chunks:
        for item in reader.feed(chunk):
            if isinstance(item, bytes):
                if not dropping:
                    yield blob(item)
                continue
            path = b"/".join(filter(None, (name, item.path)))
            dropping = not path or item.kind not in "dfl" or excluding.drops(os.fsdecode(path), item.kind == "d")
            if not dropping:
                yield looks.of(path, item.kind, item.mode, item.mtime_ns, item.target, owner=owner_of(item))
    reader.end()
