"""Kernels that keep the content of equal files in different EROFS images once in memory (CONFIG_EROFS_FS_PAGE_CACHE_SHARE, from 7.0).

Files count as equal that bear the same digest, which mkfs.erofs wrote into the image (erofs-utils from 1.9); an image without digests is
mounted all the same. The kernel calls it an experiment.
"""

from __future__ import annotations

import functools

from barchan.kernel import syscalls

OPTIONS: tuple[syscalls.Option, ...] = (("domain_id", "barchan"), ("inode_share", None))
"""For mounts: images share with those of the same domain, no others."""


@functools.cache
def options() -> tuple[syscalls.Option, ...]:
    """What this kernel takes: all or nothing."""
    return OPTIONS if syscalls.accepts("erofs", OPTIONS) else ()
