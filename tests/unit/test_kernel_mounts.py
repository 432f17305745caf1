from __future__ import annotations

from pathlib import Path

from barchan.kernel import mounts

TABLE = r"""27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
50 27 0:40 / /data/mnt rw,relatime - ext4 /dev/vda rw
51 50 0:41 / /data/mnt/ab ro,nosuid,nodev,relatime - erofs /data/layers/a\040b.erofs ro,user_xattr
52 27 0:42 / /data/with\040space rw,relatime master:2 propagate_from:1 - tmpfs none rw,size=4k
53 50 0:43 / /data/mnt rw - tmpfs second rw
"""


def test_lines_of_the_table() -> None:
    root, _, layer, space, _ = mounts.parse(TABLE)
    assert (root.path, root.fstype, root.device, root.shared) == ("/", "ext4", "254:0", True)
    assert "discard" in root.options
    assert (layer.path, layer.fstype, layer.source) == ("/data/mnt/ab", "erofs", "/data/layers/a b.erofs")
    assert (space.path, space.shared) == ("/data/with space", False)


def test_later_mount_hides_the_earlier_one() -> None:
    table = mounts.parse(TABLE)
    found = mounts.top(Path("/data/mnt"), table)
    assert found is not None
    assert found.source == "second"
    assert mounts.top(Path("/data/mn"), table) is None


def test_the_real_table_has_a_root() -> None:
    assert any(mount.path == "/" for mount in mounts.current())
