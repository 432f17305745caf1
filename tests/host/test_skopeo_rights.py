"""skopeo as it runs while it listens to a registry: another user, no capability, and only copies of the logins that it needs."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from barchan.config import RegistryAccess
from barchan.errors import BarchanError, RegistryUnavailable
from barchan.layers import skopeo
from barchan.layers.pull import pull
from barchan.layers.store import LayerStore
from tests import registry

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root can give rights away")


class Listener:
    """A registry that takes one connection, tells what it sees, and hangs up."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.ref = f"docker://127.0.0.1:{self.port}/a:b"
        self.seen: list[bytes] = []
        self.statuses: list[dict[str, str]] = []

    def serve(self) -> None:
        refusal = b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm=x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        while True:
            try:
                peer, _ = self.socket.accept()
            except OSError:
                return
            with peer:
                self.seen.append(peer.recv(65536))
                self.statuses += [status(pid) for pid in children()]
                peer.sendall(refusal)


def children() -> list[int]:
    me = Path(f"/proc/{os.getpid()}/task")
    return [int(pid) for task in me.iterdir() for pid in (task / "children").read_text().split()]


def status(pid: int) -> dict[str, str]:
    return dict(re.findall(r"(\w+):[ \t]*(.*)", Path(f"/proc/{pid}/status").read_text()))


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    if not Path("/usr/bin/skopeo").exists():
        pytest.skip("skopeo is not installed")
    listener = Listener()
    thread = threading.Thread(target=listener.serve)
    thread.start()
    yield listener
    listener.socket.shutdown(socket.SHUT_RDWR)
    listener.socket.close()
    thread.join()


def access(listener: Listener, path: Path, **more: Path) -> RegistryAccess:
    conf = path / "registries.conf"
    conf.write_text(registry.INSECURE.format(port=listener.port))
    conf.chmod(0o600)
    return RegistryAccess(registries_conf=conf, **more)


def logins(path: Path, port: int, user: str) -> Path:
    word = base64.b64encode(f"{user}:secret".encode()).decode()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(json.dumps({"auths": {f"127.0.0.1:{port}": {"auth": word}}}))
    path.chmod(0o600)
    return path


def test_it_has_no_rights_and_still_the_login(listener: Listener, tmp_path: Path) -> None:
    auth = logins(tmp_path / "private/auth.json", listener.port, "ann")
    with pytest.raises(BarchanError):
        pull(LayerStore(tmp_path / "layers"), listener.ref, access=access(listener, tmp_path, auth_file=auth))
    [running] = {tuple(one.items()): one for one in map(kept, listener.statuses) if one["Name"] == "skopeo"}.values()
    assert running == {
        "Name": "skopeo", "Uid": "65520\t65520\t65520\t65520", "Gid": "65520\t65520\t65520\t65520", "Groups": "",
        "CapInh": "0" * 16, "CapPrm": "0" * 16, "CapEff": "0" * 16, "CapBnd": "0" * 16, "CapAmb": "0" * 16, "NoNewPrivs": "1",
    }  # fmt: skip
    sent = re.findall(rb"Authorization: Basic (\S+)", b"".join(listener.seen))
    assert base64.b64decode(sent[-1]) == b"ann:secret"


def kept(one: dict[str, str]) -> dict[str, str]:
    fields = ("Name", "Uid", "Gid", "Groups", "NoNewPrivs")
    return {name: value.strip() for name, value in one.items() if name in fields or name.startswith("Cap")}


def test_logins_of_root_are_found_and_the_nearer_counts(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    logins(tmp_path / ".docker/config.json", listener.port, "far")
    logins(tmp_path / "run/containers/auth.json", listener.port, "near")
    (tmp_path / ".config/containers").mkdir(parents=True)
    (tmp_path / ".config/containers/auth.json").write_text("no JSON")
    with pytest.raises(BarchanError):
        pull(LayerStore(tmp_path / "layers"), listener.ref, access=access(listener, tmp_path))
    sent = re.findall(rb"Authorization: Basic (\S+)", b"".join(listener.seen))
    assert base64.b64decode(sent[-1]) == b"near:secret"


def test_a_login_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = RegistryAccess(auth_file=tmp_path / "none")
    with pytest.raises(RegistryUnavailable, match="none: No such file"):
        pull(LayerStore(tmp_path / "layers"), "docker://127.0.0.1:1/a:b", access=missing)


@contextmanager
def open_to_all() -> Iterator[Path]:
    """A place where another user may write."""
    place = Path("/tmp") / f"barchan-test-{os.getpid()}"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    try:
        yield place
    finally:
        for file in place.iterdir():
            file.unlink()
        place.rmdir()


def test_what_is_confined_so_can_neither_read_what_is_roots_nor_fill_a_disk(tmp_path: Path) -> None:
    secret = logins(tmp_path / "private/auth.json", 1, "ann")

    def confined(script: str) -> int:
        return subprocess.run([*skopeo.confined(), "sh", "-c", script], capture_output=True, check=False).returncode

    with open_to_all() as place:
        assert confined(f"echo said > {place}/said") == 0, "it is not refused for another reason"
        assert confined(f"cat {secret}") != 0
        assert confined(f"head -c 2000000 /dev/zero > {place}/large") != 0
        assert (place / "large").stat().st_size == skopeo.MOST_WRITTEN
        assert confined("cat /etc/shadow") != 0 and confined(f"echo x > {tmp_path}/x") != 0


def test_it_inherits_no_variable_that_is_not_its_business() -> None:
    ours = {
        "PATH": "/bin",
        "https_proxy": "p",
        "SSL_CERT_FILE": "c",
        "BARCHAN_TOKEN": "t",
        "HOME": "/root",
        "AWS_SECRET": "s",
    }
    assert skopeo.environment(ours) == {
        "PATH": "/bin",
        "https_proxy": "p",
        "SSL_CERT_FILE": "c",
        "HOME": "/nonexistent",
    }
