"""The program `nft`: called a few times when an installation starts and ends, never for a sandbox."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import msgspec

from barchan.errors import FeatureMissing
from barchan.net.rules import FORWARDED, TABLES

_SECONDS = 30
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/sbin:/usr/local/bin"
_HINT = "install nftables; the kernel needs nf_tables with nat, fib and reject"


def load(text: str) -> None:
    """All of it or nothing. Raises `FeatureMissing`."""
    _run(["-f", "-"], text)


def forwarded() -> dict[str, frozenset[str]]:
    """By table of an installation: devices on which it turned forwarding on. Raises `FeatureMissing`."""
    rows: list[dict[str, Any]] = msgspec.json.decode(_run(["-j", "list", "sets", "inet"]))["nftables"]
    found = [row["set"] for row in rows if row.get("set", {}).get("name") == FORWARDED]
    return {one["table"]: frozenset(one.get("elem", ())) for one in found if one["table"].startswith(TABLES)}


def dropping() -> tuple[str, ...]:
    """Tables of others, with the chain, that drop what passes through the host unless they know it. Raises `FeatureMissing`.

    An accepting verdict of our table does not count there. Those of the older `iptables-legacy` are not seen.
    """
    rows: list[dict[str, Any]] = msgspec.json.decode(_run(["-j", "list", "chains"]))["nftables"]
    chains = (row["chain"] for row in rows if "chain" in row)
    return tuple(
        f"{chain['family']} {chain['table']} {chain['name']}"
        for chain in chains
        if chain.get("hook") == "forward" and chain.get("policy") == "drop" and not chain["table"].startswith(TABLES)
    )


def _run(arguments: list[str], text: str = "") -> str:
    program = shutil.which("nft", path=_PATH)
    if program is None:
        raise FeatureMissing("nft is not installed", phase="network", hint=_HINT)
    try:
        done = subprocess.run(
            [program, *arguments], input=text, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FeatureMissing(f"nft: {error}", phase="network", hint=_HINT) from error
    if done.returncode:
        raise FeatureMissing(f"nft: {done.stderr.strip()}", phase="network", hint=_HINT)
    return done.stdout
