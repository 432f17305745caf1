"""Dockerfiles become environments, step by step in sandboxes: what is built, what is taken up again, what is left when it fails."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from barchan import Client, CommandFailed, EnvironmentNotFound, InvalidRequest, Limits, Sandbox, UserNotFound
from barchan.builds.build import BuildOrder, build
from barchan.builds.context import LocalContext, read_ignore
from barchan.builds.dockerfile import parse
from barchan.builds.report import BuildResult, Heading
from barchan.errors import BarchanError
from tests.e2e.conftest import MIB
from tests.server import Server

SMALL = Limits(memory=256 * MIB, pids=128, disk=128 * MIB)


class Told:
    """All that a build tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.written = b""

    def began(self, heading: Heading) -> None:
        self.lines.append(f"began {heading}")

    def output(self, data: bytes) -> None:
        self.written += data

    def ended(self, heading: Heading, seconds: float, *, cached: bool) -> None:
        self.lines.append(f"{'cached' if cached else 'ended'} {heading}")

    def note(self, text: str) -> None:
        self.lines.append(f"note {text}")


class Site:
    """A directory to build from."""

    def __init__(self, client: Client, root: Path, base: str, name: str) -> None:
        self.client, self.root, self.base, self.name = client, root, base, name
        self.told = Told()

    def write(self, path: str, content: str | bytes = "", mode: int = 0o644) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        file.chmod(mode)
        return file

    async def build(self, dockerfile: str, **options: Any) -> BuildResult:
        self.told = Told()
        order = BuildOrder(
            dockerfile=parse(f"ARG BASE={self.base}\n{dockerfile}".encode()),
            context=LocalContext(self.root, read_ignore(self.root, None)),
            **{"name": self.name, "limits": SMALL, "network": "deny", **options},
        )
        return await build(self.client, order, self.told)

    async def said(self, command: str, **options: Any) -> str:
        """Of a shell in a sandbox of what was built."""
        async with await self.client.create(self.name, limits=SMALL) as sandbox:
            return (await sandbox.run(command, check=True, **options)).text


@pytest.fixture
async def site(client: Client, tiny_env: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """Its name is the test's own, and what other runs left of its steps is no matter: files say which run it is."""
    (tmp_path / "context").mkdir()
    name = "built-" + hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    made = Site(client, tmp_path / "context", tiny_env, name)
    made.write("run", str(tmp_path))
    yield made
    assert not await client.list(labels={"made-for": "build"}), "no sandbox stays"


def carried_out(result: BuildResult) -> list[int]:
    return [step.line - 1 for step in result.steps if not step.cached]


MULTI = """\
FROM $BASE AS compile
ARG GREETING=hello
ENV WORDS="$GREETING world"
WORKDIR /build
COPY run src/ ./
RUN <<E
set -e
tr a-z A-Z < text > made
echo "$WORDS from $(pwd) as $(id -un)" >> made
chmod 750 made
E

FROM $BASE
USER user
WORKDIR /home/user/app
COPY --from=compile --chown=user /build/made ./
COPY --from=compile /build /all/
RUN echo mine > own && cat made
ENV A=1
CMD ["cat", "made"]
LABEL who=me
"""


async def test_a_build_of_two_stages(site: Site) -> None:
    site.write("src/text", "text\n")
    result = await site.build(MULTI)
    assert carried_out(result) == [4, 5, 6, 15, 16, 17, 18]
    assert site.told.written == b"TEXT\nhello world from /build as root\n"
    assert await site.said("cat made own; stat -c '%a %u %g' made own . /all/made /all") == (
        "TEXT\nhello world from /build as root\nmine\n750 1000 1000\n644 1000 1000\n755 1000 1000\n750 0 0\n755 0 0\n"
    )
    assert await site.said("id -un; pwd; echo $A [$WORDS]") == "user\n/home/user/app\n1 []\n"
    described = (await site.client.lock(site.name)).base
    assert (described.config.command, described.config.labels) == (("cat", "made"), {"who": "me"})
    assert (described.config.user, described.config.workdir) == ("user", "/home/user/app")
    assert described.config.env["A"] == "1" and "WORDS" not in described.config.env


async def test_the_same_again_is_the_same(site: Site, tmp_path: Path) -> None:
    """Also from a copy elsewhere, of other times and owners."""
    site.write("src/text", "text\n")
    first = await site.build(MULTI)
    began = time.monotonic()
    again = await site.build(MULTI)
    assert not carried_out(again) and time.monotonic() - began < 2
    assert (again.reference, again.digest, again.layers) == (first.reference, first.digest, first.layers)
    site.root = site.root.rename(tmp_path / "moved")
    for path in site.root.rglob("*"):
        os.utime(path, (1, 1))
        os.chown(path, 1234, 1234)
    assert (await site.build(MULTI)).digest == first.digest


async def test_a_change_is_built_from_where_it_matters(site: Site) -> None:
    site.write("src/text", "text\n")
    await site.build(MULTI)
    site.write("src/text", "other\n")
    assert carried_out(await site.build(MULTI)) == [5, 6, 16, 17, 18]
    assert "OTHER" in await site.said("cat made")
    changed = MULTI.replace("echo mine", "echo yours")
    assert carried_out(await site.build(changed)) == [18]
    assert carried_out(await site.build(changed, build_args={"GREETING": "hi"})) == [6, 16, 17, 18]
    assert not carried_out(await site.build(MULTI)), "and back"


async def test_what_only_is_said_makes_no_layer(site: Site) -> None:
    first = await site.build("FROM $BASE\nCOPY run /\nENV A=1\n")
    second = await site.build("FROM $BASE\nCOPY run /\nENV A=2 B=3\nUSER user\n")
    assert second.steps[0].cached and second.layers == first.layers and second.digest != first.digest
    assert await site.said("echo $A $B; id -un") == "2 3\nuser\n"
    assert (await site.build("FROM $BASE\n")).steps == ()


async def test_without_the_cache(site: Site) -> None:
    text = "FROM $BASE\nCOPY run /\nRUN date +%N > /when\n"
    await site.build(text)
    assert carried_out(await site.build(text, cached=False)) == [2, 3]
    assert not carried_out(await site.build(text)), "what was made anew is taken up"


async def test_a_variable_that_is_gone_does_not_come_back(site: Site) -> None:
    """A step that is taken up was made by another Dockerfile, which said something else."""
    await site.build("FROM $BASE\nENV GONE=1\nUSER user\nCOPY run /\n")
    await site.build('FROM $BASE\nCOPY run /\nRUN echo "[$GONE] $(id -un)"\n')
    assert "cached" in site.told.lines[0] and site.told.written == b"[] root\n"


# --- RUN


async def test_a_run_that_fails(site: Site) -> None:
    text = "FROM $BASE\nCOPY run /\nRUN echo one; echo two >&2; exit 3\nRUN echo never\n"
    with pytest.raises(CommandFailed) as caught:
        await site.build(text)
    assert caught.value.message == "Dockerfile:4: RUN ended with exit code 3" and "two" in caught.value.hint
    assert caught.value.result.exit_code == 3
    with pytest.raises(EnvironmentNotFound):
        await site.client.lock(site.name)
    with pytest.raises(CommandFailed):
        await site.build(text)
    assert site.told.lines[0].startswith("cached"), "what came before it stays"
    result = await site.build(text.replace("exit 3", "true"))
    assert carried_out(result) == [3, 4]


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ('["/none"]', "found no such program"),
        ('["/run"]', "cannot execute"),
        ("kill -9 $$", "ended by signal 9"),
        ("dd if=/dev/zero of=/big bs=1M count=200", "disk_full"),
    ],
)
async def test_other_ways_to_fail(site: Site, run: str, why: str) -> None:
    with pytest.raises(CommandFailed, match=f"Dockerfile:4: RUN .*{why}"):
        await site.build(f"FROM $BASE\nCOPY run /\nRUN {run}\n")


async def test_how_programs_run(site: Site) -> None:
    await site.build(
        "FROM $BASE\nCOPY run /\nARG A=1\nENV B=2\nUSER user\nWORKDIR /w\n"
        'RUN echo $A $B $HOME $(id -un) $(pwd)\nRUN ["sh", "-c", "echo $0", "exec form"]\n'
        "RUN <<E\n#!/bin/cat\nscript $A\nE\nRUN cat <<X\nshell $A\nX\n"
        'SHELL ["/bin/sh", "-ec"]\nRUN false || echo $0\n'
    )
    assert site.told.written == b"1 2 /home/user user /w\nexec form\n#!/bin/cat\nscript $A\nshell 1\n/bin/sh\n"
    assert await site.said("ls /dev/shm") == ""


async def test_what_a_run_leaves_in_tmp_is_there_for_the_next(site: Site) -> None:
    await site.build(
        "FROM $BASE\nCOPY run /tmp/\nRUN mkdir -p /root/.cache/x && echo 1 >/tmp/one\nRUN cat /tmp/one /tmp/run\n"
    )
    assert site.told.written.startswith(b"1\n/")


async def test_proxies_are_not_recorded(site: Site) -> None:
    text = "FROM $BASE\nCOPY run /\nRUN echo $http_proxy\n"
    await site.build(text, build_args={"http_proxy": "http://me:secret@p"})
    assert site.told.written == b"http://me:secret@p\n"
    assert not carried_out(await site.build(text, build_args={"http_proxy": "http://other"}))


# --- COPY and ADD


COPIES = {
    "COPY f /new/dir/name": {"/new/dir/name": "f"},
    "COPY f /tmp": {"/tmp/f": "f"},
    "COPY f /new/": {"/new/f": "f"},
    "COPY f g /new/": {"/new/f": "f", "/new/g": "g"},
    "COPY d /new": {"/new/in": "in", "/new/deep/er": "er"},
    "COPY d /tmp": {"/tmp/in": "in"},
    "COPY d/ d2 /new/": {"/new/in": "in", "/new/two": "two"},
    "COPY *.txt d*/in /new/": {"/new/a.txt": "a", "/new/b.txt": "b", "/new/in": "in"},
    "COPY --exclude=deep d /new/": {"/new/in": "in", "/new/deep/er": None},
    "COPY link /new/": {"/new/link": "f"},
    "COPY linked /new": {"/new/in": "in"},
    "COPY f /usr/../tmp/x": {"/tmp/x": "f"},
    "COPY f /home/user": {"/home/user/f": "f"},
    "WORKDIR /w\nCOPY f ./\nCOPY g h": {"/w/f": "f", "/w/h": "g"},
    "COPY none* f /new/": {"/new/f": "f"},
    "COPY <<f <<g /new/\n1\nf\n2\ng": {"/new/f": "1\n", "/new/g": "2\n"},
    "RUN ln -s /tmp /to\nCOPY f /to/": {"/tmp/f": "f"},
    "RUN ln -s /tmp /to\nCOPY f /to/new/x": {"/tmp/new/x": "f"},
    "RUN ln -s /home /w && rm -r /tmp && ln -s ../../../../../home /tmp\nCOPY f /tmp/x": {"/home/x": "f"},
    "ADD x.tar /new": {"/new/x/y": "y"},
    "ADD x.tar.gz /new/": {"/new/x/y": "y", "/new/x.tar.gz": None},
    "ADD f d /new/": {"/new/f": "f", "/new/in": "in"},
    "ADD --unpack=false x.tar /new": {"/new": b"ustar"},
    "COPY x.tar /new": {"/new": b"ustar"},
}


@pytest.mark.parametrize("instructions", COPIES)
async def test_where_files_go(site: Site, instructions: str) -> None:
    for name in ("f", "g", "d/in", "d/deep/er", "d2/two", "a.txt", "b.txt"):
        site.write(name, name.split("/")[-1].removesuffix(".txt"))
    (site.root / "link").symlink_to("f")
    (site.root / "linked").symlink_to("./d")
    for mode in ("w", "w:gz"):
        with tarfile.open(site.root / f"x.tar{mode[1:].replace(':', '.')}", mode) as archive:
            info = tarfile.TarInfo("x/y")
            info.size = 1
            archive.addfile(info, io.BytesIO(b"y"))
    await site.build(f"FROM $BASE\nCOPY run /\n{instructions}\n")
    async with await site.client.create(site.name, limits=SMALL, user="root") as sandbox:
        for path, content in COPIES[instructions].items():
            await check(sandbox, path, content)


async def check(sandbox: Sandbox, path: str, content: str | bytes | None) -> None:
    if content is None:
        assert not await sandbox.files.exists(path)
    elif isinstance(content, bytes):
        assert content in await sandbox.files.read(path)
    else:
        assert (await sandbox.files.read(path)).decode() == content


async def test_owners_modes_and_times(site: Site) -> None:
    for name, mode in (("d/file", 0o640), ("d/in/set", 0o4711), ("one", 0o600)):
        os.utime(site.write(name, "x", mode), (1_000_000_000, 1_000_000_000))
    (site.root / "d/in").chmod(0o700)
    (site.root / "d").chmod(0o711)
    os.chown(site.root / "one", 1234, 1234)
    await site.build(
        "FROM $BASE\nCOPY run /\nCOPY d /plain/d\nCOPY --chown=user:7 --chmod=0704 d /forced/d\nCOPY --chown=9 one /nine\nCOPY one /\nCOPY d /tmp\n"
        "RUN addgroup() { echo staff:x:50: >> /etc/group; }; addgroup\nCOPY --chown=0:staff one /staff\n"
    )
    said = await site.said(
        "stat -c '%n %a %u:%g %Y' /plain/d/file /plain/d/in /plain/d/in/set /forced/d/in /forced/d/file /nine /one /staff;"
        "stat -c '%n %a %u:%g' /plain /plain/d /forced /forced/d /tmp"
    )
    lines = [line.split() for line in said.splitlines()]
    when = "1000000000"
    assert [line for line in lines if line[0] not in ("/plain/d/in", "/forced/d/in")] == [
        ["/plain/d/file", "640", "0:0", when],
        ["/plain/d/in/set", "4711", "0:0", when],
        ["/forced/d/file", "704", "1000:7", when],
        ["/nine", "600", "9:9", when],
        ["/one", "600", "0:0", when],
        ["/staff", "600", "0:50", when],
        ["/plain", "755", "0:0"],
        ["/plain/d", "755", "0:0"],
        ["/forced", "704", "1000:7"],
        ["/forced/d", "704", "1000:7"],
        ["/tmp", "1777", "0:0"],
    ]


async def test_what_comes_from_other_environments(site: Site) -> None:
    await site.build(
        "FROM $BASE AS one\nCOPY run /\nWORKDIR /w\nRUN echo 1 >a.x; echo 2 >b.x; mkdir d; echo 3 >d/c; ln -s d l; ln -s a.x k; chown -R user . ; chmod 4755 a.x\n"
        f"FROM $BASE\nCOPY --from=one /w/*.x /files/\nCOPY --from=one /w/l /linked/\nCOPY --from=one /w/k /k\nCOPY --from=one --exclude=d /w /w\n"
        f"COPY --from={site.base} /etc/passwd /other/\nCOPY --from=0 none* /run /x/\nCOPY --from=one --chown=7 /w/d /seven\n"
    )
    assert "matches 'none*'" in " ".join(site.told.lines)
    said = await site.said(
        "cat /files/a.x /files/b.x /linked/c /k /w/b.x; ls -A /w; ls /other /x; stat -c '%a %u:%g' /files/a.x /linked/c /seven/c /seven /w"
    )
    assert said == (
        "1\n2\n3\n1\n2\na.x\nb.x\nk\nl\n/other:\npasswd\n\n/x:\nrun\n4755 1000:0\n644 1000:0\n644 7:7\n755 7:7\n755 0:0\n"
    )


@pytest.mark.parametrize(
    ("instruction", "error", "why"),
    [
        ("COPY none /x", InvalidRequest, "'none' is not in the context"),
        ("COPY ignored /x", InvalidRequest, "excluded by .dockerignore"),
        ("COPY out /x", InvalidRequest, "leads out of the context"),
        ("COPY r* s* /x", InvalidRequest, "several sources"),
        ("COPY run[ /x", InvalidRequest, "bracket"),
        ("COPY --chown=nobody-here run /x", UserNotFound, "has no 'nobody-here'"),
        ("COPY run /etc/passwd/x", BarchanError, "is no directory"),
        ("COPY run /run/", BarchanError, "is no directory"),
        ("COPY --from=$BASE run /x", InvalidRequest, "cannot hold variables"),
        ("COPY --from=not-there run /x", BarchanError, "not-there"),
    ],
)
async def test_copies_that_are_refused_by_their_line(
    site: Site, instruction: str, error: type[BarchanError], why: str
) -> None:
    site.write("ignored")
    site.write("s1")
    site.write(".dockerignore", "ignored\n")
    (site.root / "out").symlink_to("/etc/passwd")
    with pytest.raises(error, match=why) as caught:
        await site.build(f"FROM $BASE\nCOPY run /\n{instruction}\n")
    assert caught.value.message.startswith("Dockerfile:4: ")


async def test_nothing_at_all(site: Site) -> None:
    result = await site.build("FROM scratch\nCOPY run /a/run\n")
    async with await site.client.create(site.name, limits=SMALL) as sandbox:
        assert await sandbox.files.read_text("/a/run") == (site.root / "run").read_text()
    assert result.layers == 2
    first = await site.build("FROM $BASE AS all\nFROM scratch\nCOPY --from=all / /\nCOPY run /\nRUN echo works\n")
    assert site.told.written == b"works\n" and first.layers == 3


async def test_what_cannot_be_is_refused_before_anything_runs(site: Site) -> None:
    with pytest.raises(InvalidRequest, match="Dockerfile:4"):
        await site.build("FROM $BASE\nRUN touch /x\nRUN --mount=type=cache,target=/x y\n")
    with pytest.raises(EnvironmentNotFound, match="Dockerfile:3"):
        await site.build("FROM $BASE AS x\nFROM sha256:" + "0" * 64 + "\nCOPY --from=x / /\n")
    assert not site.told.lines


async def test_three_builds_at_once(site: Site, tmp_path: Path) -> None:
    import asyncio

    text = "FROM $BASE\nCOPY run /\nRUN date +%N > /when; cat /when\n"
    results = await asyncio.gather(*(site.build(text, name=f"at-once-{number}") for number in range(3)))
    assert all(len(result.steps) == 2 for result in results)


# --- the command


def barchan(server: Server, *argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(server.command("env", "build", *argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


async def test_the_command(site: Site, server: Server) -> None:
    site.write(
        "Dockerfile",
        f"FROM {site.base}\nARG WORD\nCOPY run /\nRUN printf '\\033[1m%s\\rmoved' $WORD; printf '\\n\\377'; exit $WORD\n",
    )
    with barchan(server, str(site.root), "-t", site.name, "--build-arg", "WORD=3", "--progress", "plain") as failing:
        out, err = failing.communicate(timeout=60)
    lines = err.decode().splitlines()
    assert failing.returncode == 1 and not out
    assert "[stage-0 1/2] COPY run /" in lines and "  | moved" in lines
    assert lines[-1] == "error: Dockerfile:4: RUN ended with exit code 3 [command_failed]"
    with barchan(server, str(site.root), "-t", site.name, "--build-arg", "WORD=0") as working:
        out, err = working.communicate(timeout=60)
    assert working.returncode == 0 and out.decode().startswith(f"{site.name}@1  sha256:")
    assert "CACHED [stage-0 1/2] COPY run /" in err.decode().splitlines()
    report = server.run("env", "build", str(site.root), "-t", site.name, "--build-arg", "WORD=0")
    assert (report["reference"], report["cached"], len(report["steps"])) == (f"{site.name}@1", 2, 2)
    assert not [row for row in server.run("env", "ls") if row["name"].startswith("build-")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_build_leaves_no_sandbox(site: Site, server: Server, number: signal.Signals) -> None:
    site.write("Dockerfile", f"FROM {site.base}\nCOPY run /\nRUN echo begun; sleep 1000\n")
    with barchan(server, str(site.root), "-t", site.name, "--progress", "plain") as running:
        assert running.stderr is not None
        for line in running.stderr:
            if line.endswith(b"begun\n"):
                break
        running.send_signal(number)
        running.communicate(timeout=30)
    assert running.returncode in (-number, 128 + number)
    assert not await site.client.list(labels={"made-for": "build"})
    with pytest.raises(EnvironmentNotFound):
        await site.client.lock(site.name)
