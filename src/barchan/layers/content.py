"""What a layer is on disk, and by which digest it goes.

    <layer>/
      layer.json    its format, and size and SHA-256 of the files; its own SHA-256 is the digest of the layer
      image         an EROFS image: of a *split* layer all but the content of its files, of a *packed* one everything
      data          of a split layer: that content, in chunks that the image points to
      damaged       says why this layer is not to be used, until other files take its place

Both files are filled up with zeros to a multiple of 2 MiB, so that they may be disks and memory of virtual machines as they are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import msgspec

from barchan.errors import LayerCorrupt
from barchan.layers import refs
from barchan.layers.catalog import REMEDY, sync
from barchan.spec import MIB

Pace = Callable[[int], None]
"""Told how many bytes were just read; may take its time."""
Format = Literal["split", "packed"]
FORMATS: tuple[Format, ...] = get_args(Format)
RECORD, IMAGE, DATA, DAMAGED = "layer.json", "image", "data", "damaged"
_PIECE = 4 * MIB
UNIT = 2 * MIB


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a layer. `used` are the bytes before it was filled up to `size`."""

    digest: str
    size: int
    used: int


class Content(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `layer.json` says."""

    format: Format
    image: Blob
    data: Blob | None = None

    @property
    def used(self) -> int:
        """Bytes that it takes."""
        return self.image.used + (self.data.used if self.data else 0)

    @property
    def files(self) -> dict[str, Blob]:
        return {IMAGE: self.image, **({DATA: self.data} if self.data else {})}

    @property
    def digest(self) -> str:
        """Of the whole layer."""
        return "sha256:" + hashlib.sha256(self.encoded()).hexdigest()

    def encoded(self) -> bytes:
        return msgspec.json.encode(self, order="deterministic")


def unpaced(size: int) -> None:
    """As fast as it goes."""


def finish(directory: Path, format: Format) -> Content:
    """Fill up the files that were made in `directory`, and write down what they are."""
    image = _filled(directory / IMAGE)
    data = _filled(directory / DATA) if format == "split" else None
    content = Content(format=format, image=image, data=data)
    (directory / RECORD).write_bytes(content.encoded())
    return content


def _filled(path: Path) -> Blob:
    used = path.stat().st_size
    size = max(-(-used // UNIT), 1) * UNIT
    os.truncate(path, size)
    return Blob(digest="sha256:" + digest_of(path), size=size, used=used)


def settle(directory: Path) -> None:
    """On disk, and not to be written to any more."""
    for path in directory.iterdir():
        path.chmod(0o400)
        sync(path)
    directory.chmod(0o700)
    sync(directory)


def read(directory: Path, digest: str = "", *, damaged: bool = False) -> Content:
    """`FileNotFoundError` when there is no layer, `LayerCorrupt` when what is there is not the one of that digest.

    `damaged`: also of one that is marked so.
    """
    if not damaged and (directory / DAMAGED).exists():
        raise corrupt(digest or directory.name, "is damaged: " + (directory / DAMAGED).read_text())
    data = (directory / RECORD).read_bytes()
    try:
        content = msgspec.json.decode(data, type=Content)
    except msgspec.DecodeError as error:
        raise corrupt(digest or directory.name, f"says nothing of itself: {error}") from error
    if digest and hashlib.sha256(data).hexdigest() != refs.hex_of(digest):
        raise corrupt(digest, "does not say of itself what it should")
    return content


def whole(directory: Path, content: Content) -> bool:
    """Whether the files are there and as large as they should be."""
    try:
        return all((directory / name).stat().st_size == blob.size for name, blob in content.files.items())
    except FileNotFoundError:
        return False


def verify(directory: Path, digest: str, pace: Pace = unpaced) -> Content:
    """Read all of it and compare, also of one that is marked. `LayerCorrupt` names the digest and the remedy."""
    try:
        content = read(directory, digest, damaged=True)
        for name, blob in content.files.items():
            check(directory / name, blob, digest, pace)
    except OSError as error:
        raise corrupt(digest, f"cannot be read: {error}") from error
    return content


def check(path: Path, blob: Blob, digest: str, pace: Pace = unpaced) -> None:
    """One file of the layer of that digest, read and compared."""
    found = digest_of(path, pace)
    if found != refs.hex_of(blob.digest):
        raise corrupt(digest, f"has changed: its {path.name} hashes to sha256:{found}")


def corrupt(digest: str, why: str, phase: str = "verify") -> LayerCorrupt:
    return LayerCorrupt(f"layer {digest} {why}", hint=REMEDY, phase=phase)


def digest_of(path: Path, pace: Pace = unpaced) -> str:
    """SHA-256 of a file in hex."""
    found, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            found.update(piece[:size])
            pace(size)
    return found.hexdigest()
