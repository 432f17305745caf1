"""CASES 18: what reaches for the kernel or the host is refused, and the host lives. Only attacks that could not harm this
host if they worked; the others, and the proof that each works where nothing forbids it: tests/vm/test_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from barchan.backends.spawner import NO_FLAGS, SpawnFlag
from tests.host import spawn_site
from tests.host.attacks import unexpected, verdicts
from tests.host.spawn_site import Inside, Site, inside


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with spawn_site.open_site(tmp_path_factory.mktemp("spawner")) as made:
        yield made


@pytest.mark.parametrize("user", [b"", b"1000:1000"], ids=["root", "user"])
@pytest.mark.parametrize(
    "flags", [NO_FLAGS, SpawnFlag.SETUID, SpawnFlag.PTRACE], ids=["plain", "set-user-id", "ptrace"]
)
async def test_attacks_are_refused(site: Site, flags: SpawnFlag, user: bytes) -> None:
    def attempt(within: Inside) -> None:
        done = within.program("/bin/attack_kernel", user=user)
        assert done.code == 0, done
        assert unexpected(verdicts(within.out.decode()), debugging=bool(flags & SpawnFlag.PTRACE)) == {}
        assert within.sh("echo alive") == "alive\n"

    await inside(site, attempt, flags)
