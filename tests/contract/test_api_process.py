"""The API as a process: what it gives up, what still works then, how it ends. TLS over TCP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barchan.config import ApiConfig, Layout
from barchan.errors import ApiUnavailable, InvalidRequest
from barchan.sdk import Client
from tests.contract.api_site import TOKEN
from tests.contract.fake_node import FakeNode

UID = 0x30000000 - 2
_PROGRAM = """
import msgspec, sys
from barchan.api.main import run
from barchan.config import ApiConfig
run(msgspec.json.decode(sys.argv[1], type=ApiConfig, dec_hook=lambda type_, value: type_(value)))
"""


@contextmanager
def api(data: Path, *, files: int | str | None = None, **options: Any) -> Iterator[dict[str, Any]]:
    """A running API process, which may have so many open files (as prlimit takes it); its ready line."""
    (data / "token").write_text(TOKEN)
    config = ApiConfig(layout=Layout(data), **options)
    text = msgspec.json.encode(config, enc_hook=str).decode()
    few = [] if files is None else ["prlimit", f"--nofile={files}"]
    process = subprocess.Popen([*few, sys.executable, "-c", _PROGRAM, text], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, "the process ended without its ready line"
        yield json.loads(line)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 0


async def test_everything_works_after_root_was_given_up(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: there is nothing to give up otherwise")
    tmp_path.chmod(0o700)
    with api(tmp_path, listen=("127.0.0.1", 0)) as ready:
        status = Path(f"/proc/{ready['pid']}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(fields["Uid"].split()) == set(fields["Gid"].split()) == {str(UID)}
        assert fields["Groups"].strip() == ""
        assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
        layout = Layout(tmp_path)
        async with FakeNode(layout.node_socket), Client(data=tmp_path) as near, Client(ready["url"], TOKEN) as far:
            sandbox = await near.create("debian-12")
            assert (await (await far.get(sandbox.id)).run("echo hi")).text == "hi\n"


def make_certificate(place: Path) -> None:
    """A self-signed one for 127.0.0.1."""
    done = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(place / "key"), "-out",
         str(place / "cert"), "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"openssl made no certificate: {done.stderr.decode()[-200:]}")


async def test_tls(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    make_certificate(tmp_path)
    (tmp_path / "key").chmod(0o600)
    with api(tmp_path, listen=("127.0.0.1", 0), tls_cert=tmp_path / "cert", tls_key=tmp_path / "key") as ready:
        assert ready["url"].startswith("https://")
        async with FakeNode(Layout(tmp_path).node_socket):
            async with Client(ready["url"], TOKEN, ca=tmp_path / "cert") as client:
                assert (await (await client.create("debian-12")).run("echo hi")).text == "hi\n"
            async with Client(ready["url"], TOKEN) as client:
                with pytest.raises(InvalidRequest, match="not trusted: self-signed certificate") as caught:
                    await client.list()
                assert caught.value.field == "ca" and "--ca-file" in caught.value.hint
            plain = ready["url"].replace("https:", "http:")
            async with Client(plain, TOKEN) as client:
                with pytest.raises(ApiUnavailable) as dropped:
                    await client.list()
                assert ready["url"] in dropped.value.hint
                assert "ssl" not in str(dropped.value).lower()


async def test_it_starts_again_over_its_own_leavings(tmp_path: Path) -> None:
    for _ in range(2):
        with api(tmp_path):
            async with FakeNode(Layout(tmp_path).node_socket), Client(data=tmp_path) as client:
                assert len(await client.nodes()) == 1


async def test_it_takes_as_many_files_as_it_may_have(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with api(tmp_path, files="300:500") as ready:
        limits = Path(f"/proc/{ready['pid']}/limits").read_text()
        assert re.search(r"Max open files +500 +500 ", limits)
