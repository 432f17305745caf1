"""The first file system of a test machine: busybox, kernel modules and an agent that runs one script after another.

The agent speaks on the virtio port `agent`; one request at a time:

    host: run SIZE\\n script         guest: CODE SIZE\\n output of both streams
    host: put SIZE PATH\\n bytes     guest: CODE 0\\n
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

from tests.debian import Unavailable

BUSYBOX = Path("/bin/busybox")
DIRECTORIES = "bin proc sys dev base rw new vm vm/more modules"
_INIT = r"""#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
for module in /modules/*.ko; do insmod "$module" || echo "init: $module"; done
disk() {
    for at in /sys/block/vd*; do [ "$(cat "$at/serial" 2>/dev/null)" = "$1" ] && echo "/dev/${at##*/}"; done
}
base=$(disk base) tree=$(disk tree) work=$(disk work)
[ -n "$base" ] || exec /bin/busybox sh /vm/agent
mount -t erofs -o ro "$base" /base
mount -t tmpfs none /rw; mkdir /rw/u /rw/w
mount -t overlay -o lowerdir=/base,upperdir=/rw/u,workdir=/rw/w root /new
cp -r /vm /new/; mkdir -p /new/opt/tree
[ -z "$tree" ] || mount -t erofs -o ro "$tree" /new/opt/tree
[ -z "$work" ] || mount -t ext4 "$work" /new/var/tmp
mount --move /proc /new/proc; mount --move /sys /new/sys; mount --move /dev /new/dev
exec switch_root /new /vm/busybox sh /vm/agent
"""
_AGENT = r"""
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TMPDIR=/var/tmp
b=/vm/busybox
$b mkdir -p /run /tmp /dev/pts /dev/shm /var/tmp
$b mount -t tmpfs -o size=128m,mode=0755 run /run; $b mount -t tmpfs -o mode=1777 tmp /tmp
$b mount -t tmpfs -o mode=1777 shm /dev/shm; $b mount -t devpts -o ptmxmode=0666 pts /dev/pts
$b mount -t cgroup2 none /sys/fs/cgroup
$b ip link set lo up; $b hostname machine
for at in /sys/class/virtio-ports/*; do [ "$($b cat "$at/name")" = agent ] && port=/dev/${at##*/}; done
exec 3<>"$port"
echo ready >&3
while read -r kind size path <&3; do
    $b head -c "$size" <&3 >"${path:-/run/script}"; code=$?; : >/run/output
    if [ "$kind" = run ]; then
        $b setsid $b sh /run/script </dev/null >/run/output 2>&1 3<&-; code=$?
    fi
    echo "$code $($b stat -c %s /run/output)" >&3; $b cat /run/output >&3
done
"""
_LOAD = r"""#!/vm/busybox sh
for module in /vm/more/*.ko; do /vm/busybox insmod "$module"; done
"""


def build(modules: Iterable[Path], more: Iterable[Path] = ()) -> bytes:
    """`more`: modules that `/vm/load` loads. A cpio archive; a few MB, made in some ten milliseconds."""
    if not BUSYBOX.exists():
        raise Unavailable("virtual machines need busybox-static")
    busybox = BUSYBOX.read_bytes()
    entries = [_entry(name, stat.S_IFDIR | 0o755) for name in DIRECTORIES.split()]
    entries += [
        _entry("bin/busybox", stat.S_IFREG | 0o755, busybox),
        _entry("vm/busybox", stat.S_IFREG | 0o755, busybox),
    ]
    entries += [
        _entry("init", stat.S_IFREG | 0o755, _INIT.encode()),
        _entry("vm/agent", stat.S_IFREG | 0o644, _AGENT.encode()),
    ]
    entries += [_entry("vm/load", stat.S_IFREG | 0o755, _LOAD.encode())]
    entries += [_entry(f"vm/more/{path.name}", stat.S_IFREG | 0o644, path.read_bytes()) for path in more]
    entries += [_entry(f"modules/{path.name}", stat.S_IFREG | 0o644, path.read_bytes()) for path in modules]
    # Without a console node PID 1 would start with no descriptors at all, and open its first files as 0, 1 and 2.
    console = _entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    return b"".join([*entries, console, _entry("TRAILER!!!", 0)])


def _entry(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    """One file in cpio's `newc` format: 13 hexadecimal fields, the name, the data, each padded to four bytes."""
    raw = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(raw), 0)
    return _padded(b"070701" + b"".join(b"%08x" % field for field in fields) + raw) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
