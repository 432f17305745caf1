"""What skopeo may: read what registries say, and nothing of this host.

It parses answers of strangers, so it runs as a user of its own without any capability, and gets copies of the two files that it
needs: logins, and where mirrors are. It can write no file longer than what it has to say when it fails.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from barchan.config import RegistryAccess
from barchan.errors import RegistryUnavailable

USER = 65520
"""Of the ids that no distribution gives to anybody (systemd: 65520 to 65533 are unused)."""
MOST_WRITTEN = 1 << 20
_SETPRIV = (
    "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs",
    "--inh-caps=-all", "--bounding-set=-all", "--pdeathsig=KILL", "--",
)  # fmt: skip
_PASSED_ON = frozenset({"PATH", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"})


class Given(NamedTuple):
    """Names of files that it can read, "" for none, and the descriptors that these names need."""

    auth_file: str
    registries_conf: str
    fds: tuple[int, ...]


def confined() -> tuple[str, ...]:
    """What comes in front of a command of it."""
    if os.geteuid() != 0:
        return ()  # it has no more rights than we
    return ("prlimit", f"--fsize={MOST_WRITTEN}", "--core=0", *_SETPRIV)


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    passed = {name: value for name, value in ours.items() if name.upper() in _PASSED_ON}
    return {**passed, "HOME": "/nonexistent"}


@contextmanager
def given_to_skopeo(access: RegistryAccess) -> Iterator[Given]:
    """Raises `RegistryUnavailable` when a file that was named cannot be read."""
    with ExitStack() as opened:
        logins = _read(access.auth_file) if access.auth_file else _logins_of_root(os.environ)
        conf = _read(access.registries_conf) if access.registries_conf else None
        auth_fd, conf_fd = (-1 if content is None else _copy(opened, content) for content in (logins, conf))
        yield Given(_name(auth_fd), _name(conf_fd), tuple(fd for fd in (auth_fd, conf_fd) if fd >= 0))


def _name(fd: int) -> str:
    return "" if fd < 0 else f"/proc/self/fd/{fd}"


def _copy(opened: ExitStack, content: bytes) -> int:
    """In memory, where whoever has the descriptor may read it."""
    fd = os.memfd_create("barchan-registry")
    opened.callback(os.close, fd)
    os.write(fd, content)
    os.fchmod(fd, 0o444)
    return fd


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RegistryUnavailable(f"{path}: {error.strerror}", hint="name another file", phase="resolve") from error


def _logins_of_root(environ: Mapping[str, str]) -> bytes | None:
    """The logins that skopeo would find as we, the first word on each registry counts: containers-auth.json(5)."""
    home, run = (
        Path(environ.get("HOME") or "/root"),
        Path(environ.get("XDG_RUNTIME_DIR") or f"/run/containers/{os.geteuid()}"),
    )
    places = [
        Path(environ.get("REGISTRY_AUTH_FILE") or "/nonexistent"),
        run / "containers/auth.json" if "XDG_RUNTIME_DIR" in environ else run / "auth.json",
        Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "containers/auth.json",
        home / ".docker/config.json",
    ]
    found: dict[str, Any] = {}
    for place in reversed(places):
        for kind, entries in _document(place).items():
            if kind in ("auths", "credHelpers") and isinstance(entries, dict):
                found[kind] = {**found.get(kind, {}), **entries}
    return json.dumps(found).encode() if found else None


def _document(path: Path) -> dict[str, Any]:
    """Empty if it is none: a login file of another program must not keep images away that need no login."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
