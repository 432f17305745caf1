"""A layer packed from an overlay shows, on top of the layers below, what the overlay showed."""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from barchan.config import Layout
from barchan.errors import CreateFailed, InvalidRequest
from barchan.images import ImageConfig
from barchan.kernel import syscalls
from barchan.kernel.scratch import Scratch
from barchan.layers import lower
from barchan.layers.attach import attach
from barchan.layers.catalog import Provenance
from barchan.layers.pack import KIND, PackReport, Whole, described, found, pack
from barchan.layers.scrub import NOTHING, Policy
from barchan.layers.sources import import_layer
from barchan.layers.store import Layer, LayerStore
from barchan.spec import MIB
from tests import trees
from tests.disks import real_disk

SIZE = 256 * MIB
LATER = 1 << 40
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
Change = Callable[[Path], object]


class Ground:
    """A store and a volume; overlays over layers of the one with writable trees in the other."""

    def __init__(self, root: Path, scratch: Scratch) -> None:
        self.root, self.scratch = root, scratch
        self.store = LayerStore(root / "layers")
        self._number = 0

    def fresh(self, what: str) -> str:
        self._number += 1
        return f"{what}-{self._number}"

    def imported(self, tree: Path) -> Layer:
        return import_layer(self.store, self.fresh("base"), tree)

    @contextmanager
    def overlay(self, layers: list[Layer], name: str) -> Iterator[Path]:
        """As a sandbox has it: the same options; `layers` are top first."""
        tree = self.scratch.make(name, SIZE).path
        with ExitStack() as stack:
            options: list[syscalls.Option] = [("lowerdir+", self._layer(stack, layer)) for layer in layers]
            for key, part in (("upperdir", "u"), ("workdir", "w")):
                fd = os.open(tree / part, lower.DIRECTORY)
                stack.callback(os.close, fd)
                options.append((key, fd))
            options += [("redirect_dir", "on"), ("metacopy", "on")]
            yield self._root(stack, options)

    @contextmanager
    def view(self, layers: list[Layer]) -> Iterator[Path]:
        (self.root / "empty").mkdir(exist_ok=True)
        with ExitStack() as stack:
            fds = [self._layer(stack, layer) for layer in layers]
            fds.append(syscalls.open_tree(self.root / "empty", clone=True))
            stack.callback(os.close, fds[-1])
            yield self._root(stack, [("lowerdir+", fd) for fd in fds])

    def _layer(self, stack: ExitStack, layer: Layer) -> int:
        fd = attach(layer.path / "image", layer.path / "data")
        stack.callback(os.close, fd)
        return fd

    def _root(self, stack: ExitStack, options: list[syscalls.Option]) -> Path:
        fd = syscalls.new_mount("overlay", options)
        stack.callback(os.close, fd)
        return Path(f"/proc/self/fd/{fd}")

    def packed(self, name: str, layers: list[Layer], policy: Policy = NOTHING, *, shared: bool = True) -> PackReport:
        images = [layer.path for layer in layers]
        with self.scratch.frozen(name) as (upper, stage), lower.mounted(images) as below:
            where = stage if shared else None
            made = self.fresh("packed")
            return pack(self.store, upper, made, below=below, stage=where, policy=policy, source=name)

    def changed(self, layers: list[Layer], change: Change, policy: Policy = NOTHING) -> tuple[PackReport, list[str]]:
        """Pack what `change` does to an overlay; also where the packed layer shows something else."""
        name = self.fresh("sandbox")
        with self.overlay(layers, name) as root:
            change(root)
            before = seen(root)
        report = self.packed(name, layers, policy)
        self.scratch.drop(name)
        with self.view([report.layer, *layers]) as root:
            return report, trees.differences(seen(root), before)


def seen(root: Path) -> trees.Described:
    return trees.describe(root, LATER)


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with real_disk(full=True) as path, Scratch.open(Layout(path), SIZE) as scratch:
        yield Ground(path, scratch)


@pytest.fixture(scope="module")
def base(ground: Ground) -> Layer:
    tree = ground.root / "tree"
    for path in ("etc/ssl", "usr/lib/deep/er", "opt/old/sub", "tmp", "root/.ssh", "root/.aws", "var/log/app", "home/u"):
        (tree / path).mkdir(parents=True)
    for number, path in enumerate(("etc/one", "usr/lib/a", "usr/lib/deep/er/b", "opt/old/c", "opt/old/sub/d", "tmp/t")):
        (tree / path).write_bytes(b"%d" % number * 9000)
    (tree / "usr/lib/link").symlink_to("deep/er/b")
    (tree / "usr/lib/deep/first").write_text("linked")
    os.link(tree / "usr/lib/deep/first", tree / "usr/lib/deep/again")
    os.mkfifo(tree / "usr/lib/deep/fifo")
    (tree / "root/.ssh/id_old").write_text("old key")
    (tree / "root/.aws/credentials").write_text("old")
    (tree / "root/.netrc").write_text("old")
    os.chown(tree / "usr/lib/deep", 5, 6)
    (tree / "usr/lib/deep").chmod(0o2711)
    os.setxattr(tree / "usr/lib/deep/er/b", "user.note", b"kept")
    for path in sorted(tree.rglob("*"), reverse=True):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789), follow_symlinks=False)
    return ground.imported(tree)


def write(root: Path, path: str, content: bytes = b"new") -> Path:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)
    return root / path


def setuid(root: Path) -> None:
    program = write(root, "usr/bin/su")
    os.chown(program, 7, 8)
    program.chmod(0o6755)
    os.setxattr(write(root, "usr/bin/ping"), "security.capability", CAPABILITY)
    os.setxattr(program, "user.key", b"\0value")


def odd_names(root: Path) -> None:
    for name in (b"\xff\xfe", b"new\nline", b"-rf", b" ", b"..a", "ü".encode(), b"n" * 254, b".wh.x"):
        Path(os.fsdecode(os.path.join(os.fsencode(root), name))).write_bytes(name)


def sparse(root: Path) -> None:
    with write(root, "sparse").open("r+b") as file:
        file.seek(3 * MIB)
        file.write(b"middle")
        file.truncate(5 * MIB)
    write(root, "hole", b"")
    os.truncate(root / "hole", MIB)


def recreate(root: Path) -> None:
    shutil.rmtree(root / "usr/lib")
    write(root, "usr/lib/deep/only")


def rename_twice(root: Path) -> None:
    (root / "usr/lib").rename(root / "opt/lib")
    write(root, "opt/lib/deep/er/new")
    (root / "opt/lib/a").unlink()
    (root / "opt/lib/deep/er").rename(root / "opt/lib/er")
    (root / "opt/lib/er/b").chmod(0o600)
    (root / "opt").rename(root / "srv")


def rename_over(root: Path) -> None:
    shutil.rmtree(root / "opt/old")
    (root / "usr/lib").rename(root / "opt/old")
    (root / "usr/lib").mkdir()
    shutil.rmtree(root / "opt/old/deep")
    write(root, "opt/old/deep/er/x")


def links(root: Path) -> None:
    os.link(write(root, "x/1"), root / "x/2")
    os.link(root / "x/1", root / "etc/3")
    os.link(root / "opt/old/c", root / "etc/linked-from-below")
    (root / "etc/absolute").symlink_to("/etc/shadow")
    (root / "etc/up").symlink_to("../../../../..")
    os.link(root / "etc/up", root / "etc/up-again", follow_symlinks=False)


def deep(root: Path) -> None:
    write(root, "/".join(["d"] * 300) + "/end", b"end")


CHANGES: dict[str, Change] = {
    "nothing": lambda root: None,
    "new files": lambda root: [write(root, f"srv/{i}/{j}", b"x" * i * j) for i in range(20) for j in range(10)],
    "modified": lambda root: (root / "usr/lib/deep/er/b").write_text("other"),
    "deleted": lambda root: ((root / "etc/one").unlink(), shutil.rmtree(root / "opt/old")),
    "deleted and made again": recreate,
    "only attributes": lambda root: ((root / "opt/old/c").chmod(0o4711), os.chown(root / "usr/lib/link", 3, 3)),
    "directory becomes a file": lambda root: (shutil.rmtree(root / "opt/old"), write(root, "opt/old")),
    "file becomes a directory": lambda root: ((root / "etc/one").unlink(), write(root, "etc/one/in")),
    "renamed": lambda root: (root / "usr/lib").rename(root / "usr/lib2"),
    "renamed beside": lambda root: ((root / "opt/old").rename(root / "opt/new"), write(root, "opt/old/c")),
    "renamed twice": rename_twice,
    "renamed over another": rename_over,
    "renamed file of which attributes changed": lambda root: (
        (root / "opt/old/c").chmod(0o611),
        (root / "opt/old/c").rename(root / "etc/c"),
    ),
    "links": links,
    "setuid and attributes": setuid,
    "odd names": odd_names,
    "sparse": sparse,
    "fifo": lambda root: os.mkfifo(root / "etc/fifo"),
    "deep": deep,
    "times": lambda root: os.utime(write(root, "old"), ns=(1, 987_654_321_123_456_789)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_layer_shows_what_the_overlay_showed(ground: Ground, base: Layer, what: str) -> None:
    report, differences = ground.changed([base], CHANGES[what])
    assert not differences
    assert not report.left_out


@pytest.mark.parametrize("what", ["renamed", "only attributes"])
def test_what_points_below_is_made_whole(ground: Ground, base: Layer, what: str) -> None:
    """Control: the upper directory does have the marks, and the layer has none."""
    with ground.overlay([base], name := ground.fresh("sandbox")) as root:
        CHANGES[what](root)
    upper = ground.scratch.root / name / "u"
    marks = {key for path in upper.rglob("*") for key in os.listxattr(path, follow_symlinks=False)}
    assert marks & {"trusted.overlay.redirect", "trusted.overlay.metacopy"}
    report = ground.packed(name, [base])
    assert report.renamed + report.completed > 0
    with lower.mounted([report.layer.path]) as layer, ExitStack() as stack:
        fd = stack.enter_context(layer.opened((b"usr",), 0))
        top = Path(f"/proc/self/fd/{fd}")
        marks = {key for path in top.rglob("*") for key in os.listxattr(path, follow_symlinks=False)}
    assert marks <= {"trusted.overlay.opaque", "user.note"}


def test_links_between_what_was_renamed_and_what_stayed_end(ground: Ground) -> None:
    """The one difference: overlayfs shows one file of the layers below under both names until one is written to."""
    tree = ground.root / ground.fresh("linked")
    (tree / "one").mkdir(parents=True)
    (tree / "one/file").write_text("content")
    os.link(tree / "one/file", tree / "stays")
    below = ground.imported(tree)
    report, differences = ground.changed([below], lambda root: (root / "one").rename(root / "two"))
    assert [line.split(":")[0] for line in differences] == ["b'stays'", "b'two/file'"]
    with ground.view([report.layer, below]) as root:
        assert (root / "stays").read_text() == (root / "two/file").read_text() == "content"


def test_the_same_changes_give_the_same_digest(ground: Ground, base: Layer) -> None:
    with ground.overlay([base], name := ground.fresh("sandbox")) as root:
        links(root)
        setuid(root)
        rename_twice(root)
    digests = {ground.packed(name, [base], shared=shared).layer.digest for shared in (True, True, False)}
    assert len(digests) == 1, "wherever it was put together"


def test_twenty_on_top_of_each_other(ground: Ground, base: Layer) -> None:
    layers, rng = [base], random.Random(4)
    for number in range(20):
        report, differences = ground.changed(layers, lambda root, n=number: step(root, n, rng))
        assert not differences, number
        layers = [report.layer, *layers]


def step(root: Path, number: int, rng: random.Random) -> None:
    write(root, f"srv/{number}/file", b"%d" % number)
    places = [path for path in sorted(root.rglob("*")) if path.is_dir() and not path.is_symlink()]
    chosen = rng.choice(places)
    chosen.rename(root / f"moved-{number}")
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()]
    rng.choice(files).chmod(0o700 + number)
    rng.choice(files).unlink()


def test_a_tree_of_nothing_below(ground: Ground, base: Layer) -> None:
    """Directories are opaque in the upper directory; on another base the layer must not hide what lies there."""
    report, _ = ground.changed([base], lambda root: write(root, "toolkit/bin/one"))
    other, _ = ground.changed([base], lambda root: write(root, "toolkit/bin/two"))
    with ground.view([report.layer, other.layer]) as root:
        assert sorted(os.listdir(root / "toolkit/bin")) == ["one", "two"]


def specials(root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(root / "etc/socket"))
    os.mknod(root / "etc/device", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    write(root, "etc/kept")


def test_sockets_and_devices_are_left_out(ground: Ground, base: Layer) -> None:
    report, differences = ground.changed([base], specials)
    assert report.left_out == {"devices": 1, "sockets": 1}
    assert [line.split(":")[0] for line in differences] == ["b'etc/device'", "b'etc/socket'"]


def test_owners_that_no_layer_has_are_refused(ground: Ground, base: Layer) -> None:
    with pytest.raises(InvalidRequest, match="70000"):
        ground.changed([base], lambda root: os.chown(write(root, "x"), 70000, 0))


def test_a_tree_too_deep_is_refused_by_name(ground: Ground, base: Layer) -> None:
    with pytest.raises(InvalidRequest, match="directories deep"):
        ground.changed([base], lambda root: os.makedirs(root / "/".join(["d"] * 402)))


SECRETS = [
    "root/.bash_history",
    "root/.netrc",
    "root/.ssh/id_new",
    "root/.ssh/id_new.pub",
    "root/.cache/pip/x",
    "tmp/a/b",
    "var/log/app/x",
    "home/u/.git-credentials",
    "run/pid/x",
    "etc/machine-id",
    "srv/kept",
]


def secrets(root: Path) -> None:
    for path in SECRETS:
        write(root, path, path.encode())
    (root / "root/.ssh/id_old").unlink()
    (root / "tmp/t").unlink()
    shutil.rmtree(root / "root/.aws")
    write(root, "root/.aws/credentials", b"new")


def test_secrets_stay_behind_and_removals_do_not(ground: Ground, base: Layer) -> None:
    report, _ = ground.changed([base], secrets, Policy())
    with ground.view([report.layer, base]) as root:
        files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())
        assert (root / "root/.netrc").read_text() == "old", "what lies below shows through"
    assert [f for f in files if f.startswith(("root", "tmp", "var", "home", "run", "srv", "etc/m"))] == [
        "root/.netrc",
        "root/.ssh/id_new.pub",
        "srv/kept",
    ]
    assert report.left_out == {
        "caches": 1,
        "credentials": 4,
        "histories": 1,
        "identity": 1,
        "logs": 1,
        "runtime": 1,
        "temporary": 1,
    }


def test_no_secret_is_in_the_bytes_of_the_image(ground: Ground, base: Layer) -> None:
    marker = os.urandom(16).hex().encode()
    report, _ = ground.changed([base], lambda root: write(root, "root/.netrc", marker), Policy())
    assert marker not in (report.layer.path / "data").read_bytes()
    report, _ = ground.changed([base], lambda root: write(root, "root/.netrc", marker), NOTHING)
    assert marker in (report.layer.path / "data").read_bytes(), "the control"


def whole(ground: Ground, base: Layer, name: str, into: str, key: str) -> PackReport:
    with ground.scratch.frozen(name) as (upper, stage), lower.mounted([base.path]) as below:
        return pack(
            ground.store,
            upper,
            into,
            below=below,
            stage=stage,
            source=name,
            whole=Whole((base.digest,), ImageConfig(user="ann")),
            provenance=Provenance(operation=key, environment=("base@1",)),
        )


def test_a_whole_image_of_no_changes_has_no_layer_more(ground: Ground, base: Layer) -> None:
    """Whenever its sandbox was made, it is the same image; what was done to the root itself is a change."""
    into, reports = ground.fresh("image"), []
    for time in (1_000_000_000, 2_000_000_000):
        with ground.overlay([base], name := ground.fresh("sandbox")) as root:
            os.utime(root, (time, time))
        reports.append(whole(ground, base, name, into, "k"))
    assert {(report.layers, report.layer.digest, report.entry.version) for report in reports} == {(1, base.digest, 1)}
    image = ground.store.resolve(into)
    assert (image.digest, image.below, image.config.user) == (base.digest, (), "ann")
    assert found(ground.store, into, reports[0].entry.source, "k") == described(reports[0], reports[0].entry.source)
    with ground.overlay([base], name := ground.fresh("sandbox")) as root:
        root.chmod(0o700)
    assert whole(ground, base, name, into, "k").layers == 2


def test_a_whole_image_and_who_made_it(ground: Ground, base: Layer) -> None:
    with ground.overlay([base], name := ground.fresh("sandbox")) as root:
        write(root, "tmp/secret")
        write(root, "srv/file")
    into = ground.fresh("image")
    report = whole(ground, base, name, into, "k1")
    image = ground.store.resolve(into)
    assert ([layer.digest for layer in image.below], image.digest) == ([base.digest], report.layer.digest)
    assert (image.config.user, report.layers, report.entry.kind, report.entry.source) == ("ann", 2, KIND, name)
    packed = described(report, name)
    assert packed.digest != packed.layer == image.digest and packed.left_out == {"temporary": 1}
    assert found(ground.store, into, name, "k1") == packed
    assert found(ground.store, into, name, "k2") is found(ground.store, into, "other", "k1") is None
    assert found(ground.store, "never-made", name, "k1") is None
    again = whole(ground, base, name, into, "k2")
    assert (again.entry.version, again.entry.digest) == (1, report.entry.digest), "the same content is no new version"


def test_layers_that_were_removed_meanwhile_are_missed(ground: Ground, base: Layer) -> None:
    with ground.overlay([base], name := ground.fresh("sandbox")) as root:
        write(root, "srv/file")
    gone = msgspec.structs.replace(base, digest="sha256:" + "0" * 64)
    with pytest.raises(CreateFailed, match="removed meanwhile"):
        whole(ground, gone, name, ground.fresh("image"), "k")
    assert not list((ground.root / "layers/tmp").iterdir()), "nothing half-made stays"


def test_hostile_marks_lead_nowhere(ground: Ground, base: Layer) -> None:
    for value in (b"/../../etc", b"../x", b"/usr/lib/link/x", b"/", b"a//b", b"/etc/one", b"gone"):
        name = ground.fresh("sandbox")
        upper = ground.scratch.make(name, SIZE).path / "u"
        (upper / "d").mkdir()
        os.setxattr(upper / "d", "trusted.overlay.redirect", value)
        with pytest.raises(InvalidRequest, match="/d"):
            ground.packed(name, [base])
    assert not list((ground.root / "layers/tmp").iterdir()), "nothing half-made stays"


def test_what_is_frozen_stays_as_it_was_and_goes(ground: Ground) -> None:
    upper = ground.scratch.make(name := ground.fresh("sandbox"), SIZE).path / "u"
    write(upper, "file", b"before")
    with ground.scratch.frozen(name) as (frozen, stage):
        write(upper, "file", b"after")
        assert (frozen / "file").read_bytes() == b"before"
        assert not list(stage.iterdir())
        with pytest.raises(OSError, match="Read-only"):
            write(frozen, "file")
        assert ground.scratch.list() >= {name} and not [n for n in ground.scratch.list() if "frozen" in n]
    with pytest.raises(LookupError), ground.scratch.frozen(name):
        raise LookupError
    assert not list(ground.scratch.root.glob(".frozen-*"))


NAMES = [
    "etc",
    "usr",
    "usr/lib",
    "usr/lib/deep",
    "usr/lib/deep/er",
    "opt/old",
    "opt/old/sub",
    "new",
    "new/in",
    "etc/one",
]
PLACES = st.sampled_from([*NAMES, "usr/lib/a", "usr/lib/deep/er/b", "opt/old/c", "new/file", "etc/new"])
STEPS = st.tuples(st.sampled_from(["write", "remove", "rename", "link", "chmod", "mkdir", "symlink"]), PLACES, PLACES)


def play(root: Path, steps: list[tuple[str, str, str]]) -> None:
    """What cannot be done is not: a program would get an error and go on."""
    for verb, one, two in steps:
        path, other = root / one, root / two
        try:
            if verb == "write":
                path.write_text(two)
            elif verb == "remove":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            elif verb == "rename":
                path.rename(other)
            elif verb == "link":
                os.link(path, other, follow_symlinks=False)
            elif verb == "chmod":
                path.chmod(0o750)
            elif verb == "mkdir":
                path.mkdir()
            else:
                path.symlink_to(two)
        except OSError:
            continue


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=12), st.lists(STEPS, max_size=12))
def test_whatever_is_done_twice(
    ground: Ground, base: Layer, first: list[tuple[str, str, str]], second: list[tuple[str, str, str]]
) -> None:
    report, differences = ground.changed([base], lambda root: play(root, first))
    assert not differences
    _, differences = ground.changed([report.layer, base], lambda root: play(root, second))
    assert not differences
