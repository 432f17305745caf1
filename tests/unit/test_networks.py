"""What may be said about networks, by callers and by an administrator."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest

from barchan.config import Layout, NetworkAccess, NodeConfig, decode_config, encode_config
from barchan.control.placement import able
from barchan.errors import FeatureMissing, InvalidRequest
from barchan.mounts import DataMount
from barchan.net.access import check_access
from barchan.networks import NetworkInfo, NetworkRules
from barchan.sdk._options import spec_of
from barchan.spec import check_spec
from tests.unit.test_placement import node, spec

OPEN = NetworkRules(mode="open")


def access(**values: object) -> NetworkAccess:
    return NetworkAccess(**values)  # type: ignore[arg-type]


def test_the_default_is_closed() -> None:
    assert spec().network.mode == "deny"
    assert spec_of("tiny").network.mode == "deny"


@pytest.mark.parametrize("given", ["open", OPEN])
def test_the_client_takes_the_mode_alone(given: object) -> None:
    assert spec_of("tiny", network=given).network == OPEN  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["Open", "", "host", 5, True, {"mode": "open", "more": 1}])
def test_other_modes_are_refused(given: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spec_of("tiny", network=given)  # type: ignore[arg-type]
    assert caught.value.field.startswith("network")


def test_only_nodes_that_have_it_are_able() -> None:
    nodes = [node("a", network=NetworkInfo(open=True)), node("b", network=NetworkInfo(missing="no nft"))]
    assert [one.name for one in able(nodes, spec(network=OPEN))] == ["a"]
    assert [one.name for one in able(nodes, spec())] == ["a", "b"]
    with pytest.raises(FeatureMissing, match="b: no nft") as caught:
        able(nodes[1:], spec(network=OPEN))
    assert caught.value.field == "network.mode" and caught.value.hint


@pytest.mark.parametrize("target", ["/etc", "/etc/resolv.conf", "/etc/resolv.conf/x"])
def test_name_servers_are_not_covered(target: str) -> None:
    mounts = (DataMount(source="a", target=target),)
    check_spec(spec(mounts=mounts))
    with pytest.raises(InvalidRequest, match="mounts") as caught:
        check_spec(spec(mounts=mounts, network=OPEN))
    assert caught.value.field == "mounts.target"
    check_spec(spec(mounts=(DataMount(source="a", target="/etc/resolv.conf.d"),), network=OPEN))


def test_settings_survive_the_way_to_the_node() -> None:
    given = access(
        prefix=IPv4Network("10.9.0.0/16"), nameservers=(IPv4Address("10.0.0.1"),), granted=(IPv4Network("10.1.0.0/16"),)
    )
    config = NodeConfig(layout=Layout("/x"), name="n", network=given)  # type: ignore[arg-type]
    assert decode_config(encode_config(config), NodeConfig).network == given


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("network_prefix", {"prefix": IPv4Network("10.0.0.0/24")}),
        ("network_prefix", {"prefix": IPv4Network("127.0.0.0/8")}),
        ("network_prefix", {"prefix": IPv4Network("0.0.0.0/0")}),
        ("network_prefix", {"prefix": IPv4Network("169.254.0.0/16")}),
        ("network_prefix", {"prefix": IPv4Network("224.0.0.0/8")}),
        ("nameservers", {"nameservers": tuple(map(IPv4Address, ("8.0.0.1", "8.0.0.2", "8.0.0.3", "8.0.0.4")))}),
        ("nameservers", {"nameservers": (IPv4Address("127.0.0.53"),)}),
        ("nameservers", {"nameservers": (IPv4Address("0.0.0.0"),)}),
        ("nameservers", {"nameservers": (IPv4Address("169.254.169.253"),)}),
        ("nameservers", {"nameservers": (IPv4Address("198.18.0.1"),)}),
        ("network_grants", {"granted": (IPv4Network("0.0.0.0/0"),)}),
        ("network_grants", {"granted": (IPv4Network("169.254.169.254/32"),)}),
        ("network_grants", {"granted": (IPv4Network("127.0.0.1/32"),)}),
        ("network_grants", {"granted": (IPv4Network("198.18.4.0/24"),)}),
    ],
)
def test_what_an_administrator_cannot_want(field: str, values: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        check_access(access(**values), 1032)
    assert caught.value.field == field


def test_room_in_the_prefix_is_counted() -> None:
    tight = access(prefix=IPv4Network("10.0.0.0/22"))
    assert check_access(tight, 512) is tight
    with pytest.raises(InvalidRequest, match=r"512 sandboxes of 513") as caught:
        check_access(tight, 513)
    assert caught.value.hint.startswith("/21 ")
    assert check_access(access(prefix=IPv4Network("10.0.0.0/21")), 513)
