"""Prints docs/reference/seccomp.md from the lists beside this file:

python native/seccomp/document.py > docs/reference/seccomp.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent

HEAD = """\
# System calls in a container

Made by `native/seccomp/document.py` from the lists in `native/seccomp/`; a test keeps the two in step. The filter is compiled
at build time by libseccomp (`native/seccomp/generate.c`) and set on the first process of every container before it runs, so it
holds for everything inside. It is one BPF program with a binary tree, about ten steps per call.

| answer | to what |
|---|---|
| allowed | the calls of the first list, with the limits on arguments below |
| `EPERM` | the calls of the second list, whatever their arguments |
| `ENOSYS` | everything else, calls newer than the lists included, so that libraries fall back. `clone3` is one for every program: its flags lie in memory, which a filter cannot read |
| killed by `SIGSYS` | a call through another ABI (i386, x32) |

## Limits on arguments

| call | limit |
|---|---|
| `clone`, `unshare` | a flag that makes a namespace: `EPERM` |
| `socket` | `AF_UNIX`; `AF_INET` and `AF_INET6` with streams of TCP and datagrams of UDP. Raw sockets: `EPERM`; other types and protocols (SCTP, MPTCP, ICMP …): `EPROTONOSUPPORT`; other families (netlink, vsock, packet, key, alg …): `EAFNOSUPPORT`. [Why](isolation.md#what-no-limit-of-the-kernel-covers) |
| `socketpair` | `AF_UNIX`. Others: `EAFNOSUPPORT` |
| `setsockopt` | `EPERM` for `TCP_MD5SIG`, `TCP_MD5SIG_EXT`, `TCP_AO_…`, `TCP_ULP`; multicast and anycast groups (`IP_ADD_MEMBERSHIP` to `MCAST_MSFILTER`, `IPV6_JOIN_GROUP` and the like); `IPV6_FLOWLABEL_MGR` |
| `ioctl` | `EPERM` for `TIOCSTI`, `TIOCLINUX`, `TIOCCONS`, `TIOCSETD`; for `SIOCGIFBR`, `SIOCSIFBR`, `SIOCBRADDBR`, `SIOCBRDELBR`, `SIOCGIFVLAN`, `SIOCSIFVLAN`; all of type `X` (`FIFREEZE`, `FITHAW`, `FITRIM`, `FS_IOC_FSSETXATTR`, XFS's own) but `FS_IOC_FSGETXATTR`; making or destroying btrfs subvolumes, `FS_IOC_SETFLAGS`, encryption policies, fs-verity. Compared in 32 bits, as the kernel reads it |
| `personality` | `PER_LINUX`, `PER_LINUX32`, each with `UNAME26`; `ADDR_NO_RANDOMIZE`; the query `0xffffffff`. Others: `ENOSYS` |

A sandbox that was asked to be debuggable gets the third list as well.

The first process may call `clone3`, the fourth list. Before it starts a program it sets one more filter on it (`native/no_clone3.h`), and a program that
cannot be given that filter is not started. Setting filters needs `no_new_privs` or SYS_ADMIN: a sandbox that was asked for set-user-id
programs has neither, so there the spawner sets that filter on everything, and starting a program after a pause takes some 10 ms longer.
"""


def paragraphs(name: str) -> Iterator[tuple[str, list[str]]]:
    """(comment, calls) of each paragraph of a list; the head of the file is not one."""
    for block in (HERE / name).read_text().split("\n\n"):
        lines = block.strip().splitlines()
        calls = [line for line in lines if not line.startswith("#")]
        if calls:
            yield " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#")), calls


def section(title: str, name: str) -> Iterator[str]:
    yield f"\n## {title}\n"
    for comment, calls in paragraphs(name):
        if comment:
            yield f"\n{comment}\n"
        yield f"\n{', '.join(f'`{call}`' for call in calls)}\n"


def page() -> str:
    parts = [HEAD]
    for title, name in (
        ("Allowed", "allow.txt"),
        ("Refused with EPERM", "refuse.txt"),
        ("For debugging", "ptrace.txt"),
        ("For the first process only", "guest.txt"),
    ):
        parts += section(title, name)
    return "".join(parts).replace("\n\n\n", "\n\n")


if __name__ == "__main__":
    print(page(), end="")
