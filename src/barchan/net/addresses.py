"""What the network device of a sandbox is called and which addresses it has, from the number of its id range alone.

A sandbox and the host share a /31 of their own (RFC 3021): the even address is the host's and the sandbox's way out, the
odd one the sandbox's. So no two sandboxes are neighbours on any link, and nothing has to be remembered: whoever knows the
slot (`kernel.idranges`) knows the rest, after a crash too.

The prefix is 198.18.0.0/15 where nobody says otherwise: 65536 sandboxes a host. It is set aside for test networks, so
neither the Internet nor clouds route it. 100.64.0.0/10 belongs to VPNs that drop it from any other device, and to pods of
managed clusters; 10.0.0.0/8 is what most companies and clouds use inside.
"""

from __future__ import annotations

import hashlib
import re
from ipaddress import IPv4Address, IPv4Network

import msgspec

from barchan.config import NetworkAccess
from barchan.errors import CreateFailed

DEFAULT_PREFIX = NetworkAccess().prefix
FAMILY = "barc"
"""How the device names of every installation begin."""
_TAG = 6
_MOST_SLOTS = 1 << 20
_NAME = re.compile(rf"{FAMILY}([0-9a-f]{{{_TAG}}})(0|[1-9a-f][0-9a-f]{{0,4}})")
"""15 characters at most, as many as the kernel allows."""
_FIRST_INDEX = 1 << 30
"""Far above what the kernel counts up to by itself."""


class Link(msgspec.Struct, frozen=True):
    """Both ends of one sandbox's device."""

    name: str
    """Of the host's end."""
    index: int
    """Of the host's end. Chosen, so that nothing needs to be asked after the device was made."""
    gateway: IPv4Address
    gateway_mac: bytes
    address: IPv4Address
    mac: bytes


class Addressing(msgspec.Struct, frozen=True):
    """Of one installation on a host."""

    instance: str
    prefix: IPv4Network = DEFAULT_PREFIX

    @property
    def tag(self) -> str:
        return hashlib.sha256(self.instance.encode()).hexdigest()[:_TAG]

    @property
    def slots(self) -> int:
        """Sandboxes that have room in the prefix."""
        return min(self.prefix.num_addresses // 2, _MOST_SLOTS)

    @property
    def devices(self) -> str:
        """How the names of its devices begin."""
        return FAMILY + self.tag

    @property
    def leaving(self) -> int:
        """Group of its devices that are being removed; nobody else's by its number."""
        return 0xBA000000 | int(self.tag, 16)

    def link(self, slot: int) -> Link:
        """`CreateFailed` when the prefix is too small for the slot."""
        if not 0 <= slot < self.slots:
            raise CreateFailed(
                f"no network address is left: {self.prefix} has room for {self.slots} sandboxes",
                phase="network",
                hint="give this node a larger prefix",
            )
        first = self.prefix.network_address + 2 * slot
        return Link(
            name=f"{self.devices}{slot:x}",
            index=_FIRST_INDEX + slot,
            gateway=first,
            gateway_mac=_mac(0, slot),
            address=first + 1,
            mac=_mac(1, slot),
        )

    def slot(self, name: str) -> int | None:
        """Of a device of this installation; None for any other."""
        match = _NAME.fullmatch(name)
        found = int(match[2], 16) if match and match[1] == self.tag else self.slots
        return found if found < self.slots else None


def _mac(end: int, slot: int) -> bytes:
    """Locally administered, unicast."""
    return bytes((0x02, 0xBA, end)) + slot.to_bytes(3, "big")
