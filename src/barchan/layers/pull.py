"""From a reference of an image to layers in the store: fetched and converted once, whoever else waits for it."""

from __future__ import annotations

import fcntl
import hashlib
import time
from contextlib import AbstractContextManager

import msgspec

from barchan.config import RegistryAccess
from barchan.environments import EnvironmentRef, PullProgress, Told, untold
from barchan.errors import EnvironmentNotFound
from barchan.image_refs import ImageRef, is_image, parse_image
from barchan.layers import oci, refs
from barchan.layers.catalog import NameEntry, flock
from barchan.layers.content import Format
from barchan.layers.oci import Step
from barchan.layers.oci_schema import Platform, parse_platform
from barchan.layers.registry import open_image
from barchan.layers.store import LayerStore

KIND = "registry"
EVERY = 0.2
"""Seconds between two words on how many bytes came."""


def known(store: LayerStore, ref: str) -> NameEntry | None:
    """What the store has of an image, without asking its registry. One with a damaged layer it has not."""
    try:
        entry = store.catalog.find(refs.parse(ref))
    except EnvironmentNotFound:
        return None
    return entry if store.intact(entry.digest) else None


def images_missing(store: LayerStore, environment: EnvironmentRef) -> list[str]:
    """Images that an environment names, or an alias in it stands for, and that the store has not."""
    meant = [str(store.catalog.follow(refs.parse(name))[-1]) for name in environment.names()]
    return [name for name in meant if is_image(name) and known(store, name) is None]


def pull(
    store: LayerStore,
    ref: str,
    *,
    platform: str = "linux/amd64",
    access: RegistryAccess = RegistryAccess(),  # noqa: B008
    again: bool = False,
    format: Format = "split",
    told: Told = untold,
) -> NameEntry:
    """The image under the name that it was asked by, and under its digest. Blocking; one at a time for each reference.

    `format` is that of layers which are new here. `again`: ask the registry what a tag means now, also if an image of it is
    here. Raises `ImageNotFound`, `ImageDenied`, `RegistryUnavailable`, and what `oci.import_image` does.
    """
    image, wanted = parse_image(ref).unambiguous, parse_platform(platform)
    told(PullProgress(image=ref, phase="waiting"))
    with _alone(store, image):
        if (entry := known(store, ref)) is not None and not (again and image.tag):
            return entry
        store.sweep()
        return _fetch(store, image, wanted, access, format, _Telling(ref, told))


class _Telling:
    """Puts together what the conversion says, step by step, and the registry, piece by piece."""

    def __init__(self, image: str, told: Told) -> None:
        self._image, self._told = image, told
        self._step = Step("pull", 0, 0, 0, 0, "")
        self._moved, self._due = 0, 0.0
        told(PullProgress(image=image, phase="resolve"))

    def step(self, step: Step) -> None:
        self._step, self._moved = step, 0
        self._tell()

    def moved(self, size: int) -> None:
        self._moved += size
        if time.monotonic() >= self._due:
            self._tell()

    def _tell(self) -> None:
        self._due = time.monotonic() + EVERY
        phase, layer, layers, done, total, _ = self._step
        done = min(done + self._moved, total)
        self._told(PullProgress(image=self._image, phase=phase, layer=layer, layers=layers, done=done, total=total))


def _fetch(
    store: LayerStore,
    ref: ImageRef,
    platform: Platform,
    access: RegistryAccess,
    format: Format,
    telling: _Telling,
) -> NameEntry:
    with store.temporary() as work, open_image(ref, platform, work, access, telling.moved) as found:
        image = found.describe(platform)
        pinned = str(ref.pinned(found.digest))
        entry = known(store, pinned) or oci.import_image(
            store,
            found,
            image,
            pinned,
            source=str(ref),
            kind=KIND,
            progress=telling.step,
            manifest=found.digest,
            format=format,
        )
    if pinned == str(ref):
        return entry
    with store.catalog.locked(str(ref)):
        return store.catalog.add(msgspec.structs.replace(entry, name=str(ref)))


def _alone(store: LayerStore, ref: ImageRef) -> AbstractContextManager[None]:
    """Others who want the same image wait, and then find it."""
    return flock(store.pulling / hashlib.sha256(str(ref).encode()).hexdigest(), fcntl.LOCK_EX)
