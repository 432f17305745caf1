"""Whether this host could give a sandbox an open network, found by doing it where nobody else is."""

from __future__ import annotations

import os
from contextlib import ExitStack
from ipaddress import IPv4Address

from barchan.config import NetworkAccess
from barchan.errors import BarchanError, FeatureMissing
from barchan.kernel import netns
from barchan.kernel.probe import Check
from barchan.net import host, nft
from barchan.net.access import nameservers
from barchan.net.addresses import FAMILY, Addressing
from barchan.net.devices import Devices, refuse_overlap

_SERVER = IPv4Address("192.0.2.1")
_LET_PASS = (
    f"accept what comes from or goes to devices {FAMILY}*, as with Docker: iptables -I DOCKER-USER -i {FAMILY}+ -j ACCEPT; "
    f"iptables -I DOCKER-USER -o {FAMILY}+ -j ACCEPT"
)


def attempt(addressing: Addressing) -> None:
    """The whole of it in namespaces that are gone afterwards; then what of the host's own network stands against it.

    Changes nothing. Raises `FeatureMissing`, `CreateFailed`, `OSError`.
    """
    refuse_overlap(addressing.prefix, host.routes())
    with ExitStack() as undo:
        outer, inner = _namespace(undo), _namespace(undo)
        undo.enter_context(netns.entered(outer))
        devices = undo.enter_context(Devices(addressing, [_SERVER]))
        devices.prepare()
        devices.attach(inner, 0)


def checks(access: NetworkAccess) -> tuple[Check, Check]:
    """For `barchan doctor`."""
    remedy = ""
    try:
        nameservers(access)
        attempt(Addressing("doctor", access.prefix))
        said = ""
    except (BarchanError, OSError) as error:
        said, remedy = str(error), error.hint if isinstance(error, BarchanError) else ""
    able = Check("open network", not said, False, 'sandboxes that reach the Internet (`network="open"`)', remedy, said)
    return able, _unobstructed()


def _unobstructed() -> Check:
    try:
        said = obstacles()
    except FeatureMissing:
        said = ""  # there is no nft: the other check says so
    detail = f"{said} drops packets that it does not know" if said else ""
    meaning = "other packet filters of this host let packets of sandboxes pass"
    return Check("packet filters", not said, False, meaning, _LET_PASS if said else "", detail)


def _namespace(undo: ExitStack) -> int:
    fd = netns.new()
    undo.callback(os.close, fd)
    return fd


def obstacles() -> str:
    """What else may drop packets of sandboxes; empty when nothing is seen. Raises `FeatureMissing`."""
    return ", ".join(nft.dropping())
