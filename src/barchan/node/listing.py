"""Which sandboxes a list shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from barchan.image_refs import is_image, parse_image
from barchan.node.rows import ENDED, SandboxRow
from barchan.spec import EnvironmentRef
from barchan.wire.messages import ListSandboxes


def page(rows: Iterable[SandboxRow], request: ListSandboxes, node: str) -> list[SandboxRow]:
    """The first `limit` after `after` to which everything in the request applies, in the order of ids."""
    if request.node not in (None, node):
        return []
    found = [row for row in rows if row.id > request.after and matches(row, request)]
    found.sort(key=lambda row: row.id)
    return found[: request.limit]


def wants_ended(request: ListSandboxes) -> bool:
    return request.ended or any(state in ENDED for state in request.states)


def matches(row: SandboxRow, request: ListSandboxes) -> bool:
    """All but the node and the page."""
    if row.ended and not wants_ended(request):
        return False
    return (
        row.id.startswith(request.prefix)
        and (not request.states or row.state in request.states)
        and request.labels.items() <= row.spec.labels.items()
        and request.backend in (None, row.spec.backend)
        and (request.environment is None or made_of(row.spec.environment, request.environment))
        and (request.created_after is None or row.created > request.created_after)
        and (request.created_before is None or row.created < request.created_before)
    )


def made_of(environment: EnvironmentRef, wanted: str) -> bool:
    """Whether one of the layers is `wanted` or a version of it, or was asked for by that name."""
    names = (*environment.names(), *environment.asked)
    if is_image(wanted):
        wanted = _whole(wanted)
        return any(_whole(name) == wanted for name in names if is_image(name))
    return any(name == wanted or name.partition("@")[0] == wanted for name in names)


@lru_cache
def _whole(image: str) -> str:
    """`docker://debian` is `docker://docker.io/library/debian:latest`."""
    return str(parse_image(image).unambiguous)
