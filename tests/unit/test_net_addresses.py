"""What follows from a slot's number, and from the host's own files."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.errors import CreateFailed, FeatureMissing
from barchan.net import host, resolver, rules
from barchan.net.addresses import DEFAULT_PREFIX, Addressing

ONE = Addressing("3fa9c1d20b7e")
SLOTS = st.integers(0, ONE.slots - 1)
ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
barc3fa9c11\t020012C6\t00000000\t0001\t0\t0\t0\tFEFFFFFF\t0\t0\t0
*\t0000000A\t00000000\t0200\t0\t0\t0\t000000FF\t0\t0\t0
"""


@given(SLOTS)
def test_names_lead_back_to_their_slot_and_fit(slot: int) -> None:
    name = ONE.link(slot).name
    assert ONE.slot(name) == slot
    assert len(name) <= 15
    assert Addressing("another").slot(name) is None


@given(SLOTS, SLOTS)
def test_two_slots_share_nothing(a: int, b: int) -> None:
    one, two = ONE.link(a), ONE.link(b)
    of = [{link.name, link.index, link.gateway, link.address, link.mac, link.gateway_mac} for link in (one, two)]
    assert all(len(values) == 6 for values in of)
    assert bool(of[0] & of[1]) == (a == b)


@given(SLOTS)
def test_both_ends_are_one_pair_within_the_prefix(slot: int) -> None:
    link = ONE.link(slot)
    pair = IPv4Network((link.gateway, 31))
    assert link.address in pair
    assert pair.subnet_of(DEFAULT_PREFIX)
    assert all(mac[0] & 3 == 2 and len(mac) == 6 for mac in (link.mac, link.gateway_mac))
    assert 0 < link.index < 1 << 31


@pytest.mark.parametrize("slot", [-1, 128])
def test_a_small_prefix_says_when_it_is_full(slot: int) -> None:
    with pytest.raises(CreateFailed, match="128 sandboxes"):
        Addressing("one", IPv4Network("10.9.8.0/24")).link(slot)


def test_the_last_slot_of_the_largest_prefix_has_a_name() -> None:
    wide = Addressing("one", IPv4Network("10.0.0.0/8"))
    assert len(wide.link(wide.slots - 1).name) == 15


@pytest.mark.parametrize(
    "name", ["eth0", "barc", f"{ONE.devices}", f"{ONE.devices}01", f"{ONE.devices}g", f"{ONE.devices}fffff"]
)
def test_other_devices_have_no_slot(name: str) -> None:
    assert ONE.slot(name) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nameserver 10.0.0.2\nnameserver 192.0.2.9 # second\n", ["10.0.0.2", "192.0.2.9"]),
        ("nameserver 127.0.0.53\noptions edns0\n", []),
        ("nameserver 0.0.0.0\nnameserver ::1\nnameserver fe80::1%eth0\nnameserver\n", []),
        ("nameserver 169.254.169.253\n", []),
        ("#nameserver 10.0.0.2\nsearch corp.example\n", []),
        ("nameserver 10.0.0.2\n" * 5, ["10.0.0.2"]),
        ("".join(f"nameserver 10.0.0.{n}\n" for n in range(5)), ["10.0.0.0", "10.0.0.1", "10.0.0.2"]),
    ],
)
def test_name_servers(text: str, found: list[str]) -> None:
    assert resolver.nameservers(text) == tuple(map(IPv4Address, found))


def test_behind_a_resolver_on_loopback_are_its_own_servers(tmp_path: Path) -> None:
    stub, behind = tmp_path / "stub", tmp_path / "behind"
    stub.write_text("nameserver 127.0.0.53\n")
    behind.write_text("nameserver 10.0.0.2\nsearch corp.example\n")
    found = resolver.host_nameservers([tmp_path / "none", stub, behind])
    assert resolver.resolv_conf(found) == "nameserver 10.0.0.2\n"
    with pytest.raises(FeatureMissing):
        resolver.host_nameservers([stub])


def test_routes() -> None:
    default, connected = host.parse_routes(ROUTES)
    assert (default.device, default.default, default.connected) == ("eth0", True, False)
    assert default.gateway == IPv4Address("192.0.2.1")
    assert connected.network == IPv4Network("192.0.2.0/24")
    assert connected.connected


def test_only_a_host_that_is_no_router_drops_what_is_not_of_sandboxes() -> None:
    guard = 'iifname != "barc*" oifname != "barc*" drop'
    texts = [rules.ruleset(rules.Policy(addressing=ONE, nameservers=(), router=router)) for router in (True, False)]
    assert [guard in text for text in texts] == [False, True]
