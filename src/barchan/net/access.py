"""What an operator may say about open networks, and the name servers that follow from it."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

from barchan.config import NetworkAccess
from barchan.errors import InvalidRequest
from barchan.net.addresses import Addressing
from barchan.net.resolver import MOST, host_nameservers

_PREFIX = "network_prefix"
_NEVER = tuple(map(IPv4Network, ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3")))
"""This host, its neighbours' own numbers (cloud metadata is there), and what no host has."""
_LARGEST_GRANT = 8
"""Length of its prefix: more would be the Internet, or all private networks at once."""


def check_access(access: NetworkAccess, sandboxes: int) -> NetworkAccess:
    """Returns the same. `sandboxes`: as many as must have room. Raises `InvalidRequest`."""
    prefix = access.prefix
    if any(prefix.overlaps(never) for never in _NEVER):
        raise InvalidRequest(f"{_PREFIX}: {prefix} are no addresses for sandboxes", field=_PREFIX)
    if (room := Addressing("", prefix).slots) < sandboxes:
        hint = f"/{31 - (sandboxes - 1).bit_length()} or larger, or fewer sandboxes (--max-sandboxes, --pool-most)"
        raise InvalidRequest(
            f"{_PREFIX}: {prefix} has room for {room} sandboxes of {sandboxes}", field=_PREFIX, hint=hint
        )
    if len(access.nameservers) > MOST:
        raise InvalidRequest(f"nameservers: at most {MOST}", field="nameservers")
    for server in access.nameservers:
        if server in prefix or any(server in never for never in _NEVER):
            raise InvalidRequest(f"nameservers: no sandbox can reach {server}", field="nameservers")
    for network in access.granted:
        _check_grant(network, prefix)
    return access


def _check_grant(network: IPv4Network, prefix: IPv4Network) -> None:
    if network.prefixlen < _LARGEST_GRANT or any(network.overlaps(never) for never in (*_NEVER, prefix)):
        raise InvalidRequest(
            f"network_grants: {network} cannot be granted",
            field="network_grants",
            hint=f"a network of /{_LARGEST_GRANT} or less; never this host's loopback, link-local addresses or those of sandboxes",
        )


def nameservers(access: NetworkAccess) -> tuple[IPv4Address, ...]:
    """Raises `FeatureMissing`."""
    return access.nameservers or host_nameservers()
