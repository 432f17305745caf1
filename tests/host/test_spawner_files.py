"""Files of the node's in a container, above whatever the image has in their place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from barchan.backends.spawner import NO_FLAGS, SpawnFlag
from barchan.errors import CreateFailed
from barchan.kernel import mounts
from barchan.kernel.copies import Copies
from tests.host import spawn_site
from tests.host.spawn_site import Box, Site, end
from tests.host.test_spawner_data import KERNELS, WAYS, spawned

TEXT = "nameserver 192.0.2.1\n"
TARGET = "/etc/resolv.conf"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with spawn_site.open_site(tmp_path_factory.mktemp("files")) as made:
        yield made


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Copies]:
    made = Copies(tmp_path / "copies")
    made.prepare()
    try:
        yield made
    finally:
        made.close()


@contextlib.asynccontextmanager
async def boxed(
    site: Site,
    copies: Copies,
    image: Callable[[Path], object] = lambda root: None,
    *,
    flags: SpawnFlag = NO_FLAGS,
    parked: bool = False,
    target: str = TARGET,
) -> AsyncIterator[Box]:
    """`image` changes what the container finds in its root."""
    with contextlib.ExitStack() as stack:
        copy = stack.enter_context(contextlib.closing(copies.open(TEXT.encode())))
        request, path, tree, group = stack.enter_context(site.request(flags=flags, data=((copy.fd, target),)))
        (tree / "u/etc").mkdir()
        image(tree / "u")
        async with site.spawner() as spawner:
            child = await spawned(spawner, request, parked)
            try:
                yield Box(child, path, tree, group, request.uid_base)
            finally:
                await end(child)


IMAGES: dict[str, Callable[[Path], object]] = {
    "a file": lambda root: (root / "etc/resolv.conf").write_text("of the image\n"),
    "nothing": lambda root: None,
    "no directory": lambda root: (root / "etc").rmdir(),
    "a link to nothing": lambda root: (root / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf"),
    "a link to a file": lambda root: (root / "etc/resolv.conf").symlink_to("/lower/file"),
    "a link into proc": lambda root: (root / "etc/resolv.conf").symlink_to("/proc/1/comm"),
    "a link out of the root": lambda root: (root / "etc/resolv.conf").symlink_to("../../../../etc/passwd"),
    "a link to itself": lambda root: (root / "etc/resolv.conf").symlink_to("resolv.conf"),
    "a pipe": lambda root: os.mkfifo(root / "etc/resolv.conf"),
}


@WAYS
@KERNELS
@pytest.mark.parametrize("image", IMAGES)
async def test_it_is_read_in_place_of(site: Site, copies: Copies, image: str, flags: SpawnFlag, parked: bool) -> None:
    async with boxed(site, copies, IMAGES[image], flags=flags, parked=parked) as box:
        assert await box.sh(f"cat {TARGET}") == TEXT
        assert (await box.run("/bin/cat", TARGET, uid=1000)).output == TEXT
        if image == "a link to a file":
            assert await box.sh("cat /lower/file") == "from the layer\n", "a link is covered, not followed"
    if image == "nothing":
        assert (box.tree / "u/etc/resolv.conf").read_bytes() == b"", "nothing of the node's stays in the tree"


@WAYS
async def test_root_inside_changes_nothing_of_it(site: Site, copies: Copies, parked: bool) -> None:
    async with boxed(site, copies, flags=SpawnFlag.ALL_CAPS, parked=parked) as box:
        for attack in (
            f"echo x > {TARGET}",
            f"rm {TARGET}",
            f"mv {TARGET} /etc/other",
            f"chmod 666 {TARGET}",
            f"chown 0 {TARGET}",
            f"mount -o remount,bind,rw {TARGET}",
            f"umount {TARGET}",
        ):
            assert (await box.run("/bin/sh", "-c", attack)).code, attack
        assert await box.sh(f"cat {TARGET}") == TEXT


async def test_no_path_of_the_host_is_shown(site: Site, copies: Copies, tmp_path: Path) -> None:
    async with boxed(site, copies) as box:
        shown = await box.sh("cat /proc/mounts /proc/self/mountinfo")
    assert TARGET in shown and tmp_path.name not in shown and "copies" not in shown


@pytest.mark.parametrize("target", [TARGET, "/proc/version", "/bin/busybox/x"])
async def test_where_it_cannot_be_the_making_ends(site: Site, copies: Copies, target: str) -> None:
    with pytest.raises(CreateFailed) as failed:
        async with boxed(site, copies, lambda root: (root / "etc/resolv.conf").mkdir(), target=target):
            pass
    assert failed.value.phase == "data-mount"


async def test_two_sandboxes_share_no_file(site: Site, copies: Copies) -> None:
    async with boxed(site, copies) as one, boxed(site, copies) as other:
        shown = [await box.sh(f"stat -c %i {TARGET}") for box in (one, other)]
    assert shown[0] != shown[1]


HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\tbox\n"


@pytest.mark.parametrize(
    ("image", "shown"),
    [
        (lambda root: None, HOSTS),
        (lambda root: (root / "etc").rmdir(), HOSTS),
        (lambda root: (root / "etc/hosts").write_text("own\n"), "own\n"),
        (lambda root: (root / "etc/hosts").symlink_to("/lower/file"), "from the layer\n"),
    ],
    ids=["none", "no directory", "its own", "a link"],
)
async def test_hosts_are_made_only_where_the_image_has_none(
    site: Site, copies: Copies, image: Callable[[Path], object], shown: str
) -> None:
    async with boxed(site, copies, image, flags=SpawnFlag.HOSTS) as box:
        assert await box.sh("cat /etc/hosts") == shown


async def test_a_link_to_nothing_stays_one(site: Site, copies: Copies) -> None:
    async with boxed(
        site, copies, lambda root: (root / "etc/hosts").symlink_to("/lower/new"), flags=SpawnFlag.HOSTS
    ) as box:
        assert (await box.run("/bin/ls", "/lower/new")).code


async def test_without_the_flag_there_are_none(site: Site, copies: Copies) -> None:
    async with boxed(site, copies) as box:
        assert (await box.run("/bin/cat", "/etc/hosts")).code


def test_copies_are_mounted_once_and_leave_nothing(copies: Copies, tmp_path: Path) -> None:
    place = tmp_path / "copies"
    kept, lost = copies.open(b"x"), copies.open(b"y")
    with pytest.raises(OSError, match="Read-only"):
        os.close(os.open(f"/proc/self/fd/{kept.fd}", os.O_WRONLY))
    kept.close()
    assert list(place.iterdir()) == [lost.path]
    copies.prepare()
    assert [m.path for m in mounts.current()].count(str(place)) == 1
    assert not list(place.iterdir()), "what an agent that was killed left"
    for _ in range(2):
        copies.close()
        assert mounts.top(place) is None
    lost.close()
