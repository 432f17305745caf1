"""Tags and aliases: names that an administrator moves, over versions that never change.

A tag means a version of its own name: `debian-12:stable`. An alias stands for any reference, an image or another alias too:
`fast` for `debian-12:stable`. What they mean is read whenever a sandbox is made of them; a sandbox that was made keeps its layers.
"""

from __future__ import annotations

import fcntl
import time
from typing import TYPE_CHECKING

from barchan.errors import EnvironmentNotFound, InvalidRequest
from barchan.image_refs import is_image
from barchan.layers import refs
from barchan.layers.catalog import Alias, Catalog, NameEntry, Tag, flock
from barchan.names import check_name

if TYPE_CHECKING:
    from barchan.layers.store import LayerStore


def set_tag(store: LayerStore, reference: str, tag: str) -> NameEntry:
    """Let `tag` mean the version that `reference` is now: of its own name. Returns that version.

    Raises `EnvironmentNotFound`, `InvalidRequest`.
    """
    if is_image(reference):
        hint = "`barchan env alias NAME IMAGE` gives an image a name of your own"
        raise InvalidRequest("name: the tags of an image are its registry's", hint=hint, field="name")
    wanted = refs.parse(f"{refs.parse(reference, 'name').name}:{tag}", "tag")
    store.catalog.find(refs.parse(reference, "name"), "name")
    with flock(store.root / "lock", fcntl.LOCK_SH), store.catalog.locked(wanted.name):
        entry = store.catalog.find(refs.parse(reference, "name"), "name")
        store.catalog.point(wanted, Tag(entry.version, time.time()))
    return entry


def set_alias(store: LayerStore, name: str, target: str) -> None:
    """Let `name` stand for `target`, which must be here unless it is an image of a registry.

    Raises `EnvironmentNotFound`; `InvalidRequest` when `name` has versions, or `target` would lead back to it.
    """
    check_name(name, "name")
    meant = refs.parse(target, "target")
    _check_here(store, meant)
    # Alone in the whole store: two that are set at once may not lead to each other.
    with flock(store.root / "lock", fcntl.LOCK_EX), store.catalog.locked(name):
        if store.catalog.versions(name):
            hint = "choose another name, or tag one of its versions"
            raise InvalidRequest(f"name: {name} is an environment", hint=hint, field="name")
        trail = store.catalog.follow(meant, "target")
        if any(one.name == name for one in trail):
            shown = " → ".join(map(str, (name, *trail)))
            raise InvalidRequest(f"target: it would stand for itself: {shown}", field="target")
        _check_here(store, meant)
        store.catalog.point(refs.Ref(name=name), Alias(str(meant), time.time()))


def _check_here(store: LayerStore, meant: refs.Ref) -> None:
    if not is_image(store.catalog.follow(meant, "target")[-1].name):
        store.resolve(str(meant), "target")


def drop(store: LayerStore, reference: str) -> bool:
    """Remove the tag or the alias that `reference` is; False when it is neither.

    `InvalidRequest` when an alias stands for it.
    """
    wanted = refs.parse(reference, "name")
    if not wanted.name or is_image(wanted.name):
        return False
    with flock(store.root / "lock", fcntl.LOCK_EX), store.catalog.locked(wanted.name):
        if wanted.tag and wanted.tag not in store.catalog.tags(wanted.name):
            raise EnvironmentNotFound(f"no tag {wanted}", hint="`barchan env ls` lists them", field="name")
        if not wanted.tag and (wanted.version or store.catalog.alias(wanted.name) is None):
            return False
        _refuse([alias for alias, target in store.catalog.aliases().items() if target == str(wanted)], str(wanted))
        store.catalog.point(wanted, None)
    return True


def check_unused(catalog: Catalog, wanted: refs.Ref, entry: NameEntry) -> None:
    """Before `entry`, or all of its name when `wanted` says no version, is removed. `InvalidRequest` names what means it."""
    if is_image(wanted.name):
        return  # it is fetched again when it is wanted
    left = set(catalog.versions(wanted.name)) - {entry.version} if wanted.version else set()
    tags = catalog.tags(wanted.name)
    holders = [f"{wanted.name}:{tag}" for tag, version in tags.items() if wanted.version and version == entry.version]
    for alias, target in catalog.aliases().items():
        meant = refs.parse(target)
        version = str(tags.get(meant.tag, "")) if meant.tag else meant.version
        if meant.name == wanted.name and (version == str(entry.version) or not left):
            holders.append(alias)
    _refuse(holders, str(wanted))


def _refuse(holders: list[str], what: str) -> None:
    if holders:
        hint = f"`barchan env rm {holders[0]}` first, or let it mean another"
        raise InvalidRequest(f"{what} is what {', '.join(sorted(holders))} means", hint=hint, field="name")


def names_of(catalog: Catalog) -> dict[str, tuple[str, ...]]:
    """Tags and aliases by what they mean now: the reference of a version, or a digest. What means nothing is left out."""
    found: dict[str, list[str]] = {}
    tagged = {
        f"{name}:{tag}": f"{name}@{version}"
        for name in {entry.name for entry in catalog.entries() if not is_image(entry.name)}
        for tag, version in catalog.tags(name).items()
    }
    for alias in catalog.aliases():
        try:
            meant = catalog.follow(refs.parse(alias))[-1]
            found.setdefault(meant.digest or catalog.find(meant).reference, []).append(alias)
        except (EnvironmentNotFound, InvalidRequest):
            continue
    for tag, reference in tagged.items():
        found.setdefault(reference, []).append(tag)
    return {reference: tuple(sorted(names)) for reference, names in found.items()}
