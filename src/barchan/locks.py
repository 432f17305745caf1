"""Lock files: which layers an environment was when it was locked. Pure.

JSON, for people to read and to keep under version control: equal environments give equal bytes. Whatever a file says beyond
what is known here is refused, and so is every format but this one.

    {"barchan_lock": 1, "base": {"name": …, "reference": …, "digest": …, "layers": […], "config": {…}}, "toolkits": […]}
"""

from __future__ import annotations

from typing import Literal

import msgspec

from barchan.environments import EnvironmentRef, LockedLayers, check_locked
from barchan.errors import InvalidRequest
from barchan.images import NO_CONFIG, ImageConfig, check_config
from barchan.names import check_ref


class LockedImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the parts of an environment."""

    name: str
    """As it was asked for."""
    reference: str
    """What that meant: a name with its version, an image with its digest, or a digest."""
    digest: str
    layers: tuple[str, ...]
    """Digests, bottom first."""
    config: ImageConfig = NO_CONFIG
    """What it says about programs that are started in it; the digest covers it."""

    @property
    def locked(self) -> LockedLayers:
        return LockedLayers(digest=self.digest, layers=self.layers)


class EnvironmentLock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`str` gives the text of the file, `read_lock` reads it."""

    barchan_lock: Literal[1] = 1
    """The format."""
    base: LockedImage
    workspace: LockedImage | None = None
    toolkits: tuple[LockedImage, ...] = ()

    def __str__(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic")).decode() + "\n"

    @property
    def images(self) -> tuple[LockedImage, ...]:
        """From the bottom of the stack to its top."""
        return (self.base, *((self.workspace,) if self.workspace else ()), *self.toolkits)

    @property
    def environment(self) -> EnvironmentRef:
        """For `create`: these layers and no others."""
        return EnvironmentRef(
            base=self.base.reference,
            workspace=self.workspace.reference if self.workspace else None,
            toolkits=tuple(image.reference for image in self.toolkits),
            locked=tuple(image.locked for image in self.images),
        )


def read_lock(text: str | bytes) -> EnvironmentLock:
    """From the text of a lock file. `InvalidRequest` (`field` is `lock`) says what is wrong with it."""
    try:
        found = msgspec.json.decode(text, type=EnvironmentLock)
        for image in found.images:
            check_ref(image.name, "lock")
            check_ref(image.reference, "lock")
            check_config(image.config)
        check_locked(found.environment)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _wrong(str(error)) from error
    except InvalidRequest as error:
        raise _wrong(error.message) from error
    return found


def _wrong(why: str) -> InvalidRequest:
    return InvalidRequest(f"lock: {why}", hint="`barchan env lock` writes one", field="lock")
