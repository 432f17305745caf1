"""Layers from directory trees: the same tree gives the same bytes, with the same version of mkfs.erofs.

The tree is surveyed first, so that what a layer must not hold is refused by name before anything is written. Times of
files are kept (a fixed time would invalidate compiled Python modules, and 1970 breaks zip tools); the image's own time
is that of its newest file, and its UUID is fixed.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from barchan.errors import CreateFailed, FeatureMissing, InvalidRequest, NodeStorageFull
from barchan.kernel import directories, sharing
from barchan.kernel.processes import cpu_ticks
from barchan.layers import content
from barchan.layers.content import DATA, IMAGE, Format
from barchan.spec import KIB, MIB

_UUID = "00000000-0000-0000-0000-000000000000"
CHUNK = 64 * KIB
"""Of a split layer's data. With 4 KiB reading costs a fifth more computing and the image is a quarter larger, for one percent less
data."""
CLUSTER = 64 * KIB
"""Of a packed layer: what is read and unpacked at once, at most."""
_BLOCK = 4 * KIB
_FEATURES = Path("/sys/fs/erofs/features")
_IDS = 65535
_LONG = 255
_NODE_BYTES = 512
"""Generous estimate of an inode with its directory entry, for the check of free space."""
_SPARE = 64 * MIB
_REASONS = {
    stat.S_IFBLK: "is a block device",
    stat.S_IFCHR: "is a character device",
    stat.S_IFSOCK: "is a socket",
}


class Survey(msgspec.Struct, frozen=True):
    """What a tree holds. `size`: bytes, in whole blocks. `newest`: the latest modification time in whole seconds. `long`: a name
    of 255 bytes."""

    entries: int
    size: int
    newest: int
    long: str = ""


def build(
    source: Path, layer: Path, *, epoch: int | None = None, exact: bool = False, format: Format = "split"
) -> Survey:
    """Make the new directory `layer` of what is in the directory `source`: see `content`.

    `epoch`: Unix seconds; later file times become this one, so that a tree unpacked anew gives the same layer.
    `exact`: the image's time is a second later, for mkfs.erofs cuts times within the image's own second to whole seconds.
    Raises `InvalidRequest` naming a file that no layer may hold, `NodeStorageFull`, `FeatureMissing`, `CreateFailed`.
    """
    seen = survey(source)
    _check_room(layer.parent, seen)
    if seen.long and not _takes_long_names():
        raise FeatureMissing(
            f"{seen.long} is a name of {_LONG} bytes, which this mkfs.erofs cuts short",
            hint="install a newer erofs-utils or rename it",
            phase="convert",
        )
    if format == "packed":
        check_packed()
    newest = seen.newest + exact
    convert(source, layer, newest if epoch is None else min(newest, epoch), format=format)
    return seen


def check_packed() -> None:
    """`FeatureMissing` when this host makes or mounts no packed layers. A kernel that has not loaded EROFS says nothing."""
    hint = "leave it split, which is the default"
    if "lz4" not in _help():
        raise FeatureMissing("this mkfs.erofs knows no lz4", hint=hint, phase="convert")
    if _FEATURES.is_dir() and not (_FEATURES / "big_pcluster").exists():
        raise FeatureMissing("this kernel knows no compressed EROFS images", hint=hint, phase="convert")


def convert(source: Path, layer: Path, newest: int, *, format: Format = "split", stall: float = 30.0) -> None:
    """Run mkfs.erofs. One that neither writes nor computes for `stall` seconds is ended: 1.8 hangs on a full disk.

    Nothing stays when it fails.
    """
    directories.make(layer, 0o700)
    try:
        _mkfs(source, layer, newest, format, stall)
        content.finish(layer, format)
    except BaseException as error:
        shutil.rmtree(layer)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _failed(source, "No space left on device") from error
        raise


def _mkfs(source: Path, layer: Path, newest: int, format: Format, stall: float) -> None:
    # Kernels before 6.4 do not mount images with digests, so they are written only where this one makes use of them.
    wanted = ("--quiet", *(["--xattr-inode-digest"] if sharing.options() else []))
    known = (option for option in wanted if option in _help())
    command = ("mkfs.erofs", *known, "-U", _UUID, *_options(layer, format), str(layer / IMAGE), str(source))
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "SOURCE_DATE_EPOCH": str(newest)}
    with tempfile.TemporaryFile() as messages:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=messages, env=environment) as process:
            stalled = not _ends(process, layer, stall)
        messages.seek(0)
        said = messages.read().decode(errors="replace").strip()[-2000:]
    if stalled and shutil.disk_usage(layer).free < MIB:
        said += " (stopped: No space left on device)"
    if stalled or process.returncode:
        raise _failed(source, said or "it made no progress any more")


def _options(layer: Path, format: Format) -> tuple[str, ...]:
    if format == "packed":
        return ("-zlz4", f"-C{CLUSTER}")
    (layer / DATA).touch(0o600)  # 1.8 opens it and makes none
    return (f"--chunksize={CHUNK}", f"--blobdev={layer / DATA}")


def _ends(process: subprocess.Popen[bytes], layer: Path, stall: float) -> bool:
    """Whether it ended by itself. Otherwise it is killed."""
    seen, since = (0, 0), time.monotonic()
    while True:
        try:
            process.wait(timeout=min(1.0, stall / 4))
            return True
        except subprocess.TimeoutExpired:
            now = (sum(file.stat().st_blocks for file in layer.iterdir()), cpu_ticks(process.pid))
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > stall:
            process.kill()
            return False


def _failed(source: Path, said: str) -> CreateFailed | NodeStorageFull:
    if "No space left" in said or "Error 28" in said:
        return NodeStorageFull(f"no room to convert {source}: {said}", hint="free disk space", phase="convert")
    return CreateFailed(f"mkfs.erofs failed on {source}: {said}", phase="convert")


@functools.cache
def _help() -> str:
    """Versions differ in their options (1.5 in Debian 12, 1.8 in Debian 13)."""
    try:
        done = subprocess.run(("mkfs.erofs", "--help"), capture_output=True, check=False)
    except FileNotFoundError as error:
        raise FeatureMissing("mkfs.erofs is not installed", hint="install erofs-utils", phase="convert") from error
    return (done.stdout + done.stderr).decode(errors="replace")


@functools.cache
def _takes_long_names() -> bool:
    """Version 1.5 does not: it would take another file for one whose name it cut."""
    with tempfile.TemporaryDirectory() as work:
        tree = Path(work) / "tree"
        tree.mkdir()
        (tree / ("n" * _LONG)).touch()
        try:
            convert(tree, Path(work) / "layer", 0)
        except CreateFailed:
            return False
    return True


def _check_room(where: Path, seen: Survey) -> None:
    need = seen.size + seen.entries * _NODE_BYTES + _SPARE
    free = shutil.disk_usage(where).free
    if need > free:
        raise NodeStorageFull(
            f"the layer needs about {need // MIB} MiB, {free // MIB} MiB are free at {where}",
            hint="free disk space or import less",
            phase="convert",
        )


def survey(source: Path) -> Survey:
    """Walk a tree without following links; `InvalidRequest` names the first file that no layer may hold."""
    root = os.fsencode(source)
    top = os.lstat(root)
    if not stat.S_ISDIR(top.st_mode):
        raise InvalidRequest(f"{source} is not a directory", field="source")
    entries, size, newest, long = 1, 0, int(top.st_mtime), ""
    for path, found in _walk(root):
        if reason := _refused(found, top.st_dev):
            raise InvalidRequest(f"{_shown(path, root)} {reason}", field="source", phase="convert")
        entries += 1
        size += -(-found.st_size // _BLOCK) * _BLOCK if stat.S_ISREG(found.st_mode) else 0
        newest = max(newest, int(found.st_mtime))
        if len(os.path.basename(path)) == _LONG:
            long = _shown(path, root)
    return Survey(entries, size, newest, long)


def _walk(root: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    todo = [root]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                found = entry.stat(follow_symlinks=False)
                yield entry.path, found
                if stat.S_ISDIR(found.st_mode):
                    todo.append(entry.path)


def _refused(found: os.stat_result, device: int) -> str | None:
    kind = stat.S_IFMT(found.st_mode)
    whiteout = kind == stat.S_IFCHR and found.st_rdev == 0
    if kind in _REASONS and not whiteout:
        return _REASONS[kind] + ", which no layer may hold"
    if found.st_dev != device:
        return "is on another file system (a mount in the tree?)"
    if found.st_uid >= _IDS or found.st_gid >= _IDS:
        return f"belongs to {found.st_uid}:{found.st_gid}; a layer holds ids below {_IDS}"
    return None


def _shown(path: bytes, root: bytes) -> str:
    """Relative and escaped: names come from strangers."""
    return repr(os.path.relpath(path, root))[1:]
