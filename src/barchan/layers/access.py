"""What of a layer was read: the parts of its files that the page cache of its mount holds.

All sandboxes of a host read a layer through its one mount, so this is what all of them together have read since it was
mounted, with what the kernel read ahead, without what memory did not keep. Nothing has to be traced for it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from barchan.kernel import residency, syscalls
from barchan.kernel.residency import Range
from barchan.layers.lower import Parts, open_directory
from barchan.layers.mount import LayerMounts
from barchan.layers.store import Layer


class FileAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Of one file, of several names the first. Bytes."""

    path: bytes
    size: int
    ranges: tuple[Range, ...]

    @property
    def read(self) -> int:
        return sum(length for _, length in self.ranges)


class LayerAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Of one layer. `size` is of its files' contents, bytes; `read` are the files of which anything was."""

    digest: str
    mounted: bool
    files: int = 0
    size: int = 0
    read: tuple[FileAccess, ...] = ()

    @property
    def bytes_read(self) -> int:
        return sum(file.read for file in self.read)


def profile(mounts: LayerMounts, layers: Iterable[Layer]) -> tuple[LayerAccess, ...]:
    """In the order of `layers`. Of a layer that is not mounted nothing was read."""
    return tuple(_of_layer(mounts, layer) for layer in layers)


def forget(mounts: LayerMounts, layers: Iterable[Layer]) -> None:
    """Begin anew: let go of what was read. Sandboxes read again what they need."""
    for layer in layers:
        with _mounted(mounts, layer) as root:
            for _, _, fd in _files(root) if root is not None else ():
                residency.forget(fd)


def _of_layer(mounts: LayerMounts, layer: Layer) -> LayerAccess:
    with _mounted(mounts, layer) as root:
        if root is None:
            return LayerAccess(digest=layer.digest, mounted=False)
        files = size = 0
        read: list[FileAccess] = []
        for path, length, fd in _files(root):
            files, size = files + 1, size + length
            if length and (ranges := residency.resident(fd, length)):
                read.append(FileAccess(path=b"/".join(path), size=length, ranges=ranges))
    return LayerAccess(
        digest=layer.digest,
        mounted=True,
        files=files,
        size=size,
        read=tuple(sorted(read, key=lambda file: file.path)),
    )


@contextmanager
def _mounted(mounts: LayerMounts, layer: Layer) -> Iterator[int | None]:
    fd = mounts.clone(layer)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def _files(root: int) -> Iterator[tuple[Parts, int, int]]:
    """Path, size and descriptor, open until the next one, of every regular file, each once."""
    todo: list[Parts] = [()]
    seen: set[int] = set()
    top = syscalls.open_beneath(b".", os.O_DIRECTORY, dir_fd=root)
    try:
        while todo:
            path = todo.pop()
            directory = open_directory(top, path)
            try:
                for name in map(os.fsencode, os.listdir(directory)):
                    state = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    if stat.S_ISDIR(state.st_mode):
                        todo.append((*path, name))
                    elif stat.S_ISREG(state.st_mode) and _first(state, seen):
                        yield from _opened((*path, name), state.st_size, directory)
            finally:
                os.close(directory)
    finally:
        os.close(top)


def _first(state: os.stat_result, seen: set[int]) -> bool:
    if state.st_nlink == 1:
        return True
    known = state.st_ino in seen
    seen.add(state.st_ino)
    return not known


def _opened(path: Parts, size: int, directory: int) -> Iterator[tuple[Parts, int, int]]:
    fd = os.open(path[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        yield path, size, fd
    finally:
        os.close(fd)
