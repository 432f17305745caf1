"""Which name servers a sandbox with an open network asks, and the file that tells it.

Those of the host. A host's own caching resolver listens on a loopback address, which a sandbox cannot reach (its loopback
is another): then the servers behind it, from the files in which resolvers write them down. Without any there is no open
network: a server of somebody else's choice would learn every name that is looked up.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path

from barchan.errors import FeatureMissing

SOURCES = (
    Path("/etc/resolv.conf"),
    Path("/run/systemd/resolve/resolv.conf"),
    Path("/run/NetworkManager/no-stub-resolv.conf"),
)
MOST = 3
"""As many as the C library asks."""


def nameservers(text: str) -> tuple[IPv4Address, ...]:
    """Those of a resolv.conf that a sandbox can reach: no loopback, link-local or unspecified address, and no IPv6."""
    found = (_server(line) for line in text.splitlines())
    return tuple(dict.fromkeys(one for one in found if one is not None))[:MOST]


def _server(line: str) -> IPv4Address | None:
    words = line.split()
    if len(words) < 2 or words[0] != "nameserver":
        return None
    try:
        address = IPv4Address(words[1])
    except AddressValueError:
        return None
    return None if address.is_loopback or address.is_unspecified or address.is_link_local else address


def host_nameservers(sources: Iterable[Path] = SOURCES) -> tuple[IPv4Address, ...]:
    """Of the first file that names any. Raises `FeatureMissing`."""
    for path in sources:
        try:
            found = nameservers(path.read_text(errors="replace"))
        except OSError:
            continue
        if found:
            return found
    raise FeatureMissing(
        "this host names no name server that a sandbox can reach",
        phase="network",
        hint="name one in the node's settings; loopback addresses and IPv6 do not do",
    )


def resolv_conf(servers: Iterable[IPv4Address]) -> str:
    """What /etc/resolv.conf says inside. Without the host's search domains: they name its owner's network."""
    return "".join(f"nameserver {server}\n" for server in servers)
