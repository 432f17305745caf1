"""Which paths a policy leaves out, and which look alike and stay."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from barchan.errors import InvalidRequest
from barchan.layers.scrub import NOTHING, RULES, Policy, policy_of
from barchan.packing import RuleName, ScrubRules

LEFT_OUT = {
    "histories": ["root/.bash_history", "home/ann/.python_history", "root/.lesshst", "home/ann/.viminfo"],
    "temporary": ["tmp/x", "var/tmp/.hidden", "tmp/\xff\n"],
    "runtime": ["run/lock", "run/\n"],
    "logs": ["var/log/syslog", "var/log/apt/history.log"],
    "caches": [
        "root/.cache/pip",
        "home/b/.cache/x",
        "var/lib/apt/lists/mirror_dists_x",
        "var/cache/apt/pkgcache.bin",
    ],
    "credentials": [
        "root/.netrc",
        "home/ann/.git-credentials",
        "root/.ssh/id_ed25519",
        "root/.aws/credentials",
        "root/.docker/config.json",
        "home/ann/.npmrc",
        "root/.config/gcloud/x",
        "root/.kube/config",
        "root/.pypirc",
        "root/.cargo/credentials.toml",
        "root/.gnupg/private-keys-v1.d",
    ],
    "identity": ["etc/machine-id", "etc/ssh/ssh_host_rsa_key", "etc/ssh/ssh_host_rsa_key.pub"],
}
KEPT = [
    "tmp",
    "run",
    "root/.cache",
    "root/.ssh/id_ed25519.pub",
    "root/.ssh/known_hosts",
    "root/.ssh/authorized_keys",
    "srv/root/.netrc",
    "home/.netrc",
    "home/a/b/.netrc",
    "root/xnetrc",
    "root/.netrc2",
    "opt/tmp/x",
    "var/lib/apt/lists/partial",
    "usr/lib/python3/__pycache__/x.pyc",
    "etc/machine-id2",
    "var/log",
    "root/.aws",
]


@pytest.mark.parametrize(("rule", "path"), [(rule, path) for rule, paths in LEFT_OUT.items() for path in paths])
def test_left_out(rule: str, path: str) -> None:
    raw = path.encode("latin-1")
    assert Policy().rule_of(raw, directory=False) == rule
    assert Policy().without(rule).rule_of(raw, directory=False) == ""
    assert NOTHING.rule_of(raw, directory=False) == ""


@pytest.mark.parametrize("path", KEPT)
def test_kept(path: str) -> None:
    assert Policy().rule_of(path.encode(), directory=False) == ""


def test_every_rule_is_tried() -> None:
    assert {rule.name for rule in RULES} == set(LEFT_OUT)


def test_the_page_lists_every_pattern() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/scrub-policy.md").read_text()
    for rule in RULES:
        line = next(line for line in page.splitlines() if line.startswith(f"| `{rule.name}` |"))
        assert not [pattern for pattern in (*rule.patterns, *rule.but) if f"`{pattern}`" not in line]


def test_directories_of_logs_stay() -> None:
    assert Policy().rule_of(b"var/log/nginx", directory=True) == ""
    assert Policy().rule_of(b"var/log/nginx/access.log", directory=False) == "logs"


@pytest.mark.parametrize(
    ("pattern", "path", "kept"),
    [
        ("srv/*/key", b"srv/one/key", b"srv/one/two/key"),
        ("**/.env", b"srv/app/.env", b"srv/app/.environment"),
        ("**/.env", b".env", b"x.env"),
        ("srv/**", b"srv/a/b/c", b"srv"),
        ("~/secret?", b"root/secret1", b"root/secret12"),
        ("srv/[ab-c]", b"srv/b", b"srv/d"),
        ("srv/a[", b"srv/a[", b"srv/a"),
        ("srv/a.b", b"srv/a.b", b"srv/axb"),
        ("srv/é", "srv/é".encode(), b"srv/e"),
        ("srv/[^a]", b"srv/^", b"srv/b"),
        ("srv/*a*b", b"srv/xaabab", b"srv/baba"),
        ("*/*ab", b"x/aab", b"x/ab/c"),
    ],
)
def test_extra_patterns(pattern: str, path: bytes, kept: bytes) -> None:
    policy = NOTHING.adding(pattern)
    assert policy.rule_of(path, directory=False) == "extra"
    assert policy.rule_of(kept, directory=False) == ""


@pytest.mark.parametrize("pattern", ["", "/etc/x", "a//b", "../x", "a/./b", "a/", "**", "~", "a/**/b", "a**", "x\0y"])
def test_patterns_that_match_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="no pattern"):
        Policy().adding(pattern)


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'logz'"):
        Policy().without("logz")


def test_many_stars_take_no_time() -> None:
    """A pattern that is tried in every way takes longer than this universe."""
    assert NOTHING.adding("*a" * 200 + "b").rule_of(b"a" * 255, directory=False) == ""


def test_rules_of_a_request() -> None:
    assert get_args(RuleName) == tuple(rule.name for rule in RULES)
    policy = policy_of(ScrubRules(also=("srv/*",), keep=("temporary", "logs")))
    paths = (b"srv/x", b"tmp/x", b"var/log/x", b"root/.netrc")
    assert [policy.rule_of(path, directory=False) for path in paths] == ["extra", "", "", "credentials"]
