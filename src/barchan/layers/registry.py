"""Images of registries, by skopeo's image proxy: one process for an image, its blobs by request.

skopeo knows credentials, mirrors, proxies and the older formats, and is asked for those blobs alone that are needed. It runs with few
rights (`skopeo`). What it
sends is compared with its digests here (`oci_blobs.verified`). Its protocol: one SEQPACKET socket, requests and answers
as JSON, content through pipes.
"""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from barchan.config import RegistryAccess
from barchan.errors import (
    BarchanError,
    FeatureMissing,
    ImageDenied,
    ImageNotFound,
    NodeStorageFull,
    RegistryUnavailable,
)
from barchan.image_refs import ImageRef
from barchan.layers.oci_blobs import MOST_DOCUMENT
from barchan.layers.oci_schema import Config, Manifest, Platform, decode, wrong
from barchan.layers.oci_select import Image, image_of
from barchan.layers.skopeo import Given, confined, environment, given_to_skopeo

_ANSWER_BYTES = 64 << 10
_PIECE = 1 << 20
_MISSING = ("manifest unknown", "name unknown", "not found", "no image found in image index", "StatusCode: 404")
_DENIED = ("unauthorized", "denied", "authentication required", "invalid username/password", "403 (Forbidden)")


class _Answer(msgspec.Struct):
    success: bool
    value: Any = None
    pipeid: int = 0
    error: str = ""


class _Piped(NamedTuple):
    """An answer. Its content comes through `pipe`, if that is not -1, and ends with the answer to `FinishPipe`."""

    value: Any
    pipe: int
    id: int


@contextmanager
def open_image(
    ref: ImageRef,
    platform: Platform,
    work: Path,
    access: RegistryAccess,
    moved: Callable[[int], None] = lambda size: None,
) -> Iterator[RegistryImage]:
    """An image at its registry. `work`: where its blobs lie while they are open. `moved` is told how many bytes of them came.

    Raises `ImageNotFound`, `ImageDenied`, `RegistryUnavailable`, `FeatureMissing` without skopeo.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, tempfile.TemporaryFile() as said:
        with theirs, given_to_skopeo(access) as given:
            process = _start(_command(platform, given, theirs.fileno()), [theirs.fileno(), *given.fds], said)
        try:
            yield RegistryImage(ours, said, ref, work, access.stall, moved)
        finally:
            ours.close()
            process.kill()
            process.wait()


def _command(platform: Platform, given: Given, fd: int) -> list[str]:
    variant = ["--override-variant", platform.variant] if platform.variant else []
    conf = ["--registries-conf", given.registries_conf] if given.registries_conf else []
    auth = ["--authfile", given.auth_file] if given.auth_file else []
    chosen = ["--override-os", platform.os, "--override-arch", platform.architecture, *variant, *conf]
    return ["skopeo", *chosen, "experimental-image-proxy", "--sockfd", str(fd), *auth]


def _start(command: list[str], fds: list[int], said: IO[bytes]) -> subprocess.Popen[bytes]:
    if not shutil.which(command[0]):
        hint = "install skopeo, which fetches images from registries"
        raise FeatureMissing("skopeo is not installed", hint=hint, phase="resolve")
    return subprocess.Popen(
        [*confined(), *command],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said,
        env=environment(os.environ),
    )


class RegistryImage:
    """Layers and configuration of one image; as `oci_blobs.Parts` its blobs. Blocking."""

    def __init__(
        self,
        link: socket.socket,
        said: IO[bytes],
        ref: ImageRef,
        work: Path,
        stall: float,
        moved: Callable[[int], None],
    ) -> None:
        """`said`: where skopeo writes why it cannot go on."""
        self._link, self._said, self._ref, self._work, self._stall = link, said, ref, work, stall
        self._sizes: dict[str, int] = {}
        self._moved = moved
        link.settimeout(stall)
        self._ask("resolve", "Initialize")
        self._image = int(self._ask("resolve", "OpenImage", str(ref.unambiguous)).value)
        self.digest = ""
        """Of its manifest, or of the index that it was chosen from; known once it was described."""

    def describe(self, platform: Platform) -> Image:
        """Raises `InvalidRequest` if it is not an image for the platform."""
        found = self._ask("resolve", "GetManifest", self._image)
        manifest = decode(self._document(found), Manifest, f"manifest {found.value}")
        config = decode(self._document(self._ask("resolve", "GetFullConfig", self._image)), Config, "configuration")
        self.digest = str(found.value)
        self._sizes = {layer.digest: layer.size for layer in manifest.layers}
        return image_of(manifest, config, platform)

    def has(self, name: str) -> bool:
        return name.startswith("blobs/")

    def open(self, name: str) -> IO[bytes]:
        """A blob, in a file that nobody else sees."""
        digest = name.removeprefix("blobs/").replace("/", ":", 1)
        found = self._ask("pull", "GetBlob", self._image, digest, self._sizes.get(digest, -1))
        with ExitStack() as undo:
            file = undo.enter_context(tempfile.TemporaryFile(dir=self._work))
            try:
                for piece in self._content(found, "pull"):
                    file.write(piece)
                    self._moved(len(piece))
                file.seek(0)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                said = f"no room for {digest} of {self._ref}"
                raise NodeStorageFull(said, hint="free disk space", phase="pull") from error
            undo.pop_all()
        return file

    def _document(self, found: _Piped) -> bytes:
        data = b""
        for piece in self._content(found, "resolve"):
            data += piece
            if len(data) > MOST_DOCUMENT:
                raise wrong(f"a document of {self._ref} is larger than {MOST_DOCUMENT} bytes")
        return data

    # --- the proxy

    def _ask(self, phase: str, method: str, *args: object) -> _Piped:
        self._send(phase, method, *args)
        return self._answer(phase)

    def _send(self, phase: str, method: str, *args: object) -> None:
        try:
            self._link.send(json.dumps({"method": method, "args": args}).encode())
        except OSError as error:
            raise self._gone(phase) from error

    def _answer(self, phase: str) -> _Piped:
        try:
            data, fds, _, _ = socket.recv_fds(self._link, _ANSWER_BYTES, 1)
        except TimeoutError as error:
            raise self._stalled(phase) from error
        except OSError as error:
            raise self._gone(phase) from error
        pipe = fds[0] if fds else -1
        answer = msgspec.json.decode(data, type=_Answer) if data else _Answer(False)
        if not answer.success:
            raise _refused(self._ref, answer.error, phase) if data else self._gone(phase)
        return _Piped(answer.value, pipe, answer.pipeid)

    def _content(self, found: _Piped, phase: str) -> Iterator[bytes]:
        """To its end, and then whether that was the end. The proxy closes a pipe only when it was asked to finish it."""
        try:
            self._send(phase, "FinishPipe", found.id)
            while True:
                if not select.select([found.pipe], [], [], self._stall)[0]:
                    raise self._stalled(phase)
                if not (piece := os.read(found.pipe, _PIECE)):
                    break
                yield piece
        finally:
            os.close(found.pipe)
        self._answer(phase)

    def _stalled(self, phase: str) -> BarchanError:
        return RegistryUnavailable(
            f"{self._ref.registry} sent nothing for {self._stall:g} s", hint="try again", phase=phase
        )

    def _gone(self, phase: str) -> BarchanError:
        self._said.seek(0)
        why = self._said.read(_ANSWER_BYTES).decode(errors="replace").strip()
        return RegistryUnavailable(f"skopeo ended while it read {self._ref}: {why}", hint="try again", phase=phase)


def _refused(ref: ImageRef, said: str, phase: str) -> BarchanError:
    """What skopeo says, as one of ours."""
    reason = said.rpartition(f"{ref.registry}: ")[2].strip() or said
    if any(word in said for word in _DENIED):
        hint = f"log in: `skopeo login {ref.registry}`; some registries say this of an image that is not there"
        return ImageDenied(f"{ref}: {reason}", hint=hint, field="environment", phase=phase)
    if any(word in said for word in _MISSING):
        return ImageNotFound(f"{ref}: {reason}", field="environment", phase=phase)
    return RegistryUnavailable(f"{ref}: {reason}", hint="try again", phase=phase)
