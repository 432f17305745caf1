"""From a reference of an image to layers in the store: fetched and converted once, whoever else waits for it."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec

from barchan.config import RegistryAccess
from barchan.errors import EnvironmentNotFound
from barchan.image_refs import ImageRef, is_image, parse_image
from barchan.layers import oci, refs
from barchan.layers.catalog import NameEntry, flock
from barchan.layers.oci_schema import Platform, parse_platform
from barchan.layers.registry import open_image
from barchan.layers.store import LayerStore
from barchan.spec import EnvironmentRef

KIND = "registry"


def known(store: LayerStore, ref: str) -> NameEntry | None:
    """What the store has of an image, without asking its registry."""
    try:
        return store.catalog.find(refs.parse(ref))
    except EnvironmentNotFound:
        return None


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
    progress: Callable[[str], None] = lambda line: None,
) -> NameEntry:
    """The image under the name that it was asked by, and under its digest. Blocking; one at a time for each reference.

    `again`: ask the registry what a tag means now, also if an image of it is here. Raises `ImageNotFound`, `ImageDenied`,
    `RegistryUnavailable`, and what `oci.import_image` does.
    """
    image, wanted = parse_image(ref).unambiguous, parse_platform(platform)
    with _alone(store, image):
        if (entry := known(store, ref)) is not None and not (again and image.tag):
            return entry
        store.sweep()
        return _fetch(store, image, wanted, access, progress)


def _fetch(
    store: LayerStore, ref: ImageRef, platform: Platform, access: RegistryAccess, progress: Callable[[str], None]
) -> NameEntry:
    progress(f"asking {ref.registry} for {ref}")
    with store.temporary() as work, open_image(ref, platform, work, access) as found:
        image = found.describe(platform)
        pinned = str(ref.pinned(found.digest))
        entry = known(store, pinned) or oci.import_image(
            store, found, image, pinned, source=str(ref), kind=KIND, progress=progress, manifest=found.digest
        )
    if pinned == str(ref):
        return entry
    with store.catalog.locked(str(ref)):
        return store.catalog.add(msgspec.structs.replace(entry, name=str(ref)))


def _alone(store: LayerStore, ref: ImageRef) -> AbstractContextManager[None]:
    """Others who want the same image wait, and then find it."""
    return flock(store.pulling / hashlib.sha256(str(ref).encode()).hexdigest(), fcntl.LOCK_EX)
