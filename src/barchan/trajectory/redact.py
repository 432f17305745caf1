"""Secrets never reach a record: their place is taken by a digest under a key that only this installation has.

The digest tells whether two values of the same name are equal, which is what a repeated request is compared by, and
nothing else to who does not have the key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from barchan.errors import InternalError
from barchan.packing import PackOrder
from barchan.spec import Exec, SandboxSpec

KEY_BYTES = 32


class Redactor(NamedTuple):
    key: bytes

    @classmethod
    def load(cls, data: Path) -> Redactor:
        """With the key in `data`/record.key, made (0600, durable) when there is none."""
        path = data / "record.key"
        if not path.exists():
            data.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_key(path)
        key = path.read_bytes()
        if len(key) != KEY_BYTES:
            raise InternalError(f"{path} is damaged: {len(key)} bytes instead of {KEY_BYTES}")
        return cls(key)

    def exec(self, request: Exec) -> Exec:
        return msgspec.structs.replace(
            request, secrets={name: self._mark(name, value).encode() for name, value in request.secrets.items()}
        )

    def spec(self, spec: SandboxSpec) -> SandboxSpec:
        return msgspec.structs.replace(
            spec, secrets={name: self._mark(name.encode(), value.encode()) for name, value in spec.secrets.items()}
        )

    def digest(self, redacted: Exec | SandboxSpec | PackOrder) -> bytes:
        """Equal for equal requests, secrets included; 32 bytes. The value's secrets are digests already.

        Keyed BLAKE2b: every command is digested, and OpenSSL's HMAC takes longer to set up than all else here.
        """
        return hashlib.blake2b(_canonical(redacted), key=self.key, digest_size=32).digest()

    def _mark(self, name: bytes, value: bytes) -> str:
        message = len(name).to_bytes(4, "little") + name + value
        return "hmac-sha256:" + hmac.digest(self.key, message, "sha256").hex()


def _canonical(value: msgspec.Struct) -> bytes:
    """The same for equal values, also after an upgrade that adds fields: what has its default is left out."""
    given = []
    for name, default in _defaults(type(value)):
        content = getattr(value, name)
        if content != default and content != {}:
            given.append((name, _plain(content)))
    return msgspec.msgpack.encode(given)


@cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    """Asking msgspec costs a third of a millisecond."""
    return tuple((field.name, field.default) for field in msgspec.structs.fields(kind))


def _plain(content: object) -> object:
    if isinstance(content, msgspec.Struct):
        return _canonical(content)
    return sorted(content.items()) if isinstance(content, dict) else content


def _make_key(path: Path) -> None:
    """A crash leaves no key or a whole one; of two processes at once, one key wins."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, secrets.token_bytes(KEY_BYTES))
        os.fsync(fd)
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        os.close(fd)
        fresh.unlink()
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
