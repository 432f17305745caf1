"""What of a sandbox's changes does not become part of a layer. Pure.

A pattern is a path from the root, without a slash in front. `*` and `?` stand for characters of one name, `[ab]` for one of
them; `**` at the end for everything below, at the start for any directory; `~` at the start for `/root` and each directory of
`/home`. What matches is left out with all that lies below it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

import msgspec

from barchan.errors import InvalidRequest
from barchan.packing import ScrubRules, check_pattern

_EXTRA = "extra"
_PART = re.compile(r"\*|\?|\[[^]/]+\]|[^*?\[]+|\[")


class Rule(msgspec.Struct, frozen=True):
    """`but`: patterns of what is kept all the same. `files_only`: directories stay, for programs that expect them."""

    name: str
    patterns: tuple[str, ...]
    but: tuple[str, ...] = ()
    files_only: bool = False


RULES = (
    Rule(
        "histories",
        (
            "~/.*_history",
            "~/.histfile",
            "~/.lesshst",
            "~/.viminfo",
            "~/.wget-hsts",
            "~/.local/share/fish/fish_history",
            "~/.local/state/*_history",
        ),
    ),
    Rule("temporary", ("tmp/*", "var/tmp/*")),
    Rule("runtime", ("run/*",)),
    Rule("logs", ("var/log/**",), files_only=True),
    Rule(
        "caches",
        (
            "~/.cache/*",
            "~/.npm/_cacache",
            "~/.npm/_logs",
            "var/cache/apt/archives/*.deb",
            "var/cache/apt/*.bin",
            "var/lib/apt/lists/*",
            "var/cache/apk/*",
            "var/cache/dnf/*",
            "var/cache/yum/*",
        ),
        but=("var/lib/apt/lists/partial", "var/lib/apt/lists/lock", "var/lib/apt/lists/auxfiles"),
    ),
    Rule(
        "credentials",
        (
            "~/.netrc",
            "~/.git-credentials",
            "~/.config/git/credentials",
            "~/.config/gh/hosts.yml",
            "~/.config/glab-cli/config.yml",
            "~/.ssh/id_*",
            "~/.ssh/identity",
            "~/.ssh/*.pem",
            "~/.ssh/*.key",
            "~/.gnupg/private-keys-v1.d",
            "~/.gnupg/secring.gpg",
            "~/.docker/config.json",
            "~/.config/containers/auth.json",
            "~/.aws/*",
            "~/.azure/*",
            "~/.config/gcloud/*",
            "~/.oci/*",
            "~/.kube/config",
            "~/.kube/cache",
            "~/.npmrc",
            "~/.yarnrc",
            "~/.yarnrc.yml",
            "~/.pypirc",
            "~/.cargo/credentials",
            "~/.cargo/credentials.toml",
            "~/.gem/credentials",
            "~/.composer/auth.json",
            "~/.config/composer/auth.json",
            "~/.m2/settings-security.xml",
            "~/.terraform.d/credentials.tfrc.json",
            "~/.vault-token",
            "~/.config/rclone/rclone.conf",
            "~/.s3cfg",
            "~/.boto",
            "~/.pgpass",
            "~/.my.cnf",
            "~/.huggingface/token",
        ),
        but=("~/.ssh/*.pub",),
    ),
    Rule(
        "identity",
        (
            "etc/machine-id",
            "var/lib/dbus/machine-id",
            "var/lib/systemd/random-seed",
            "etc/ssh/ssh_host_*_key",
            "etc/ssh/ssh_host_*_key.pub",
            "var/lib/dhcp/*",
        ),
    ),
)


class Policy(msgspec.Struct, frozen=True):
    """Rules in force. The first one that matches a path gives its name to what was left out."""

    rules: tuple[Rule, ...] = RULES

    def without(self, *names: str) -> Policy:
        """With these rules switched off. `InvalidRequest` for one that is not there."""
        known = {rule.name for rule in self.rules}
        if unknown := sorted(set(names) - known):
            raise InvalidRequest(
                f"scrub.keep: no rule {unknown[0]!r}", field="scrub.keep", hint="rules: " + ", ".join(sorted(known))
            )
        return Policy(tuple(rule for rule in self.rules if rule.name not in names))

    def adding(self, *patterns: str) -> Policy:
        """With more patterns, under the rule `extra`. `InvalidRequest` for one that can match nothing."""
        for pattern in patterns:
            check_pattern(pattern, "scrub.also")
        return Policy((*self.rules, Rule(_EXTRA, patterns))) if patterns else self

    def rule_of(self, path: bytes, *, directory: bool) -> str:
        """Name of the rule that leaves out what lies at `path` (from the root, no slash in front); "" for none."""
        for rule in self.rules:
            if directory and rule.files_only:
                continue
            wanted, kept = _compiled(rule)
            if wanted.fullmatch(path) and not kept.fullmatch(path):
                return rule.name
        return ""


NOTHING = Policy(())
"""Keeps all."""


def policy_of(rules: ScrubRules) -> Policy:
    """The rules above with these changes. Raises `InvalidRequest`."""
    return Policy().without(*rules.keep).adding(*rules.also)


@functools.lru_cache(maxsize=256)
def _compiled(rule: Rule) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    return _any(rule.patterns), _any(rule.but)


def _any(patterns: Iterable[str]) -> re.Pattern[bytes]:
    """Without patterns it matches nothing: no path is empty."""
    return re.compile(b"|".join(_expression(pattern) for pattern in patterns), re.DOTALL)


def _expression(pattern: str) -> bytes:
    *above, last = pattern.split("/")
    front = b""
    if above and above[0] in ("~", "**"):
        front = rb"(?:root|home/[^/]+)/" if above.pop(0) == "~" else rb"(?:.+/)?"
    middle = b"".join(_name(part) + b"/" for part in above)
    return front + middle + (b".+" if last == "**" else _name(last))


def _name(part: str) -> bytes:
    """Between stars the first place that fits is as good as any: without that, a few stars could take for ever."""
    fixed = [b""]
    for piece in _PART.findall(part):
        if piece == "*":
            fixed.append(b"")
        else:
            fixed[-1] += _piece(piece)
    first, *middle = fixed
    if not middle:
        return first
    last = middle.pop()
    return first + b"".join(b"(?>[^/]*?" + between + b")" for between in middle) + b"[^/]*" + last


def _piece(piece: str) -> bytes:
    if piece == "?":
        return b"[^/]"
    raw = piece.encode("utf-8", "surrogateescape")
    if piece.startswith("[") and len(piece) > 1:
        return b"[" + re.escape(raw[1:-1]).replace(rb"\-", b"-") + b"]"
    return re.escape(raw)
