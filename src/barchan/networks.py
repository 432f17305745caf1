"""What a sandbox may reach, and what a node says about that."""

from __future__ import annotations

from typing import Literal

import msgspec

from barchan.errors import InvalidRequest
from barchan.mounts import DataMount

NetworkMode = Literal["deny", "open"]


class NetworkRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the sandbox may reach."""

    mode: NetworkMode = "deny"
    """`deny`: its own loopback alone. `open`: the Internet by IPv4 as well, and names; not other sandboxes, not the node, not private
    networks unless the node's administrator grants them."""


class NetworkInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether sandboxes of a node can have an open network."""

    open: bool = False
    missing: str = ""
    """What the node lacks for it."""
    obstacles: str = ""
    """Packet filters of others on the node that may drop what sandboxes send."""


def check_network(rules: NetworkRules, mounts: tuple[DataMount, ...]) -> None:
    """Refuse what the types let through."""
    if rules.mode == "deny":
        return
    for mount in mounts:
        if mount.target == "/etc" or f"{mount.target}/".startswith("/etc/resolv.conf/"):
            raise InvalidRequest(
                f"mounts: {mount.target} cannot be a target in a sandbox with an open network",
                field="mounts.target",
                hint="/etc/resolv.conf says whom it asks for names",
            )
