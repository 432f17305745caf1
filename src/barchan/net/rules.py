"""The packet filter of an installation: one nftables table, as text. No other table is read or touched.

What a sandbox sends is judged packet by packet (`outgoing`), so that another table, put in one step in the place of this
one, holds for connections that exist already. It reaches the outside, the name servers on port 53, and what the operator
grants; it does not reach other sandboxes, the host by any of its addresses, private and special ranges, or the networks
that the host is itself connected to. Refusals are answered at once ("No route to host"); packets with another source than
the sandbox's own, and IPv6, are dropped without a word. Nobody reaches a sandbox, except with answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network

import msgspec

from barchan.net.addresses import FAMILY, Addressing

TABLES = "barchan_"
"""How the table names of every installation begin."""
FORWARDED = "forwarded"
"""The set that remembers on which devices of the host forwarding was turned on for sandboxes."""
CLOSED = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # the agent of a cloud's hosts, with secrets to give away; others of the kind are private
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What the table says."""

    addressing: Addressing
    nameservers: tuple[IPv4Address, ...]
    granted: tuple[IPv4Network, ...] = ()
    """Reachable although private: a package mirror of the operator's."""
    connected: tuple[IPv4Network, ...] = ()
    """Networks that the host is on."""
    forwarded: tuple[str, ...] = ()
    router: bool = True
    """The host forwarded packets before. If not, the table drops those that are not of sandboxes."""


def table(addressing: Addressing) -> str:
    return TABLES + addressing.tag


def removal(addressing: Addressing) -> str:
    """Nothing is wrong when there is no table."""
    name = table(addressing)
    return f"table inet {name} {{\n}}\ndelete table inet {name}\n"


_REFUSE = "reject with icmpx admin-prohibited"
_DNS = "ip daddr @nameservers meta l4proto { tcp, udp } th dport 53 accept"
_DESTINATIONS = ("ip daddr @granted accept", f"ip daddr @closed {_REFUSE}")


def ruleset(policy: Policy) -> str:
    """One transaction: until it is through, the table before stays in force."""
    own, some = f'"{policy.addressing.devices}*"', f'"{FAMILY}*"'
    closed = (*CLOSED, policy.addressing.prefix, *policy.connected)
    lines = [
        _set("nameservers", "ipv4_addr", policy.nameservers),
        _set("granted", "ipv4_addr", policy.granted, ranges=True),
        _set("closed", "ipv4_addr", closed, ranges=True),
        _set(FORWARDED, "ifname", (f'"{name}"' for name in policy.forwarded)),
        _chain("honest", None, "meta nfproto ipv6 drop", "fib saddr . iif oif missing drop"),
        _chain("arriving", "filter hook prerouting priority raw", f"iifname {own} goto honest"),
        _chain("service", None, _DNS, _REFUSE),
        _chain("to_host", "filter hook input priority filter - 10", f"iifname {own} goto service"),
        _chain("outgoing", None, "ct state invalid drop", f"oifname {some} {_REFUSE}", _DNS, *_DESTINATIONS),
        _chain("incoming", None, "ct state established,related accept", "drop"),
        _chain("passing", "filter hook forward priority filter - 10", *_passing(policy, own, some)),
        _chain(
            "leaving",
            "nat hook postrouting priority srcnat",
            f"ip saddr {policy.addressing.prefix} oifname != {some} masquerade",
        ),
    ]
    return f"{removal(policy.addressing)}table inet {table(policy.addressing)} {{\n{''.join(lines)}}}\n"


def _passing(policy: Policy, own: str, some: str) -> list[str]:
    jumps = [f"iifname {own} goto outgoing", f"oifname {own} goto incoming"]
    return jumps if policy.router else [*jumps, f"iifname != {some} oifname != {some} drop"]


def _chain(name: str, hook: str | None, *rules: str) -> str:
    head = [f"type {hook}; policy accept;"] if hook else []
    body = "".join(f"\t\t{line}\n" for line in (*head, *rules))
    return f"\tchain {name} {{\n{body}\t}}\n"


def _set(name: str, kind: str, elements: Iterable[object], *, ranges: bool = False) -> str:
    shown = ", ".join(str(one) for one in elements)
    flags = "\t\tflags interval\n\t\tauto-merge\n" if ranges else ""
    holds = f"\t\telements = {{ {shown} }}\n" if shown else ""
    return f"\tset {name} {{\n\t\ttype {kind}\n{flags}{holds}\t}}\n"
