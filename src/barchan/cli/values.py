"""What options mean: text from the command line to values. Every refusal names the option's value."""

from __future__ import annotations

import ipaddress
import math
import re
import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from barchan.errors import InvalidRequest

if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:  # generic only in recent releases of click
    _Type = click.ParamType

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE | re.ASCII)
_ADDRESS = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]\s]+)):(\d{1,5})", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """`512m`, `1.5g`, `1GiB`, `4096` → bytes; the units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r} is not a size", hint="use for example 512m or 1g")
    factor: int = 1024 ** _POWERS[match[2].lower()]
    return round(float(match[1]) * factor)


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `[IPV6]:PORT`."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise InvalidRequest(f"{text!r} is not an address", hint="use HOST:PORT or [IPV6]:PORT")
    return match[1] or match[2], int(match[3])


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_seconds(text: str) -> float:
    """A positive number of seconds; `90s`, `5m`, `2h` are understood too."""
    number, factor = text.strip(), 1
    if number and (unit := number[-1].lower()) in "smh":
        number, factor = number[:-1], {"s": 1, "m": 60, "h": 3600}[unit]
    try:
        seconds = float(number) * factor
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e9:
        raise InvalidRequest(f"{text!r} is not a number of seconds", hint="use for example 30 or 5m")
    return seconds


def parse_signal(text: str) -> int:
    """`TERM`, `SIGTERM` or `15`."""
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 64:
        return int(text)
    name = text.upper()
    try:
        return int(signal.Signals[name if name.startswith("SIG") else f"SIG{name}"])
    except KeyError as error:
        raise InvalidRequest(f"{text!r} is not a signal", hint="use for example TERM or 15") from error


def parse_pairs(items: Iterable[str], field: str) -> dict[str, str]:
    """`K=V` items to a mapping; the last one of a key counts."""
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not equals:
            got = "" if field == "secrets" else f", got {item!r}"
            raise InvalidRequest(f"{field}: expected KEY=VALUE{got}", field=field)
        pairs[key] = value
    return pairs


def parse_ipv4(text: str) -> ipaddress.IPv4Address:
    try:
        return ipaddress.IPv4Address(text)
    except ValueError as error:
        raise InvalidRequest(f"{text!r} is not an IPv4 address", hint="use for example 192.0.2.53") from error


def parse_ipv4_network(text: str) -> ipaddress.IPv4Network:
    """`10.1.0.0/16`, or one address."""
    try:
        return ipaddress.IPv4Network(text)
    except ValueError as error:
        hint = "use for example 10.1.0.0/16; its first address, not one in it"
        raise InvalidRequest(f"{text!r} is not an IPv4 network", hint=hint) from error


class Parsed(_Type):
    """An option type from one of the functions above; its refusal becomes click's usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except InvalidRequest as error:
            self.fail(str(error), param, ctx)


SIZE = Parsed("size", parse_size)
SECONDS = Parsed("seconds", parse_seconds)
SIGNAL = Parsed("signal", parse_signal)
ADDRESS = Parsed("host:port", parse_address)
IPV4 = Parsed("address", parse_ipv4)
IPV4_NETWORK = Parsed("network", parse_ipv4_network)
