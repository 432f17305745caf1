"""What may be mounted where, and what an administrator may share."""

from __future__ import annotations

from pathlib import Path

import pytest

from barchan.backends.container_data import check_sources
from barchan.cli.request import parse_mount
from barchan.cli.up import parse_data_mounts
from barchan.config import Layout
from barchan.errors import InvalidRequest
from barchan.mounts import MOST_MOUNTS, MOST_TARGET, DataMount, check_mounts
from barchan.spec import EnvironmentRef, SandboxSpec


def at(*targets: str) -> tuple[DataMount, ...]:
    return tuple(DataMount(source="set", target=target) for target in targets)


@pytest.mark.parametrize(
    "target", ["/a", "/proc2", "/data/set one", "/etc/..hidden", "/é", "/" + "x" * (MOST_TARGET - 1)]
)
def test_good_targets(target: str) -> None:
    check_mounts(at(target))


@pytest.mark.parametrize(
    "target",
    [
        "",
        "/",
        "a",
        "/a/",
        "//a",
        "/a/..",
        "/../a",
        "/.",
        "/proc",
        "/sys/x",
        "/dev/null",
        "/a\0",
        "/" + "x" * MOST_TARGET,
    ],
)
def test_bad_targets(target: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_mounts(at(target))
    assert refused.value.field == "mounts.target" and refused.value.hint


def test_targets_keep_apart() -> None:
    check_mounts(at("/a", "/ab", "/b/a", "/b/ab"))
    for pair in (("/a", "/a"), ("/a", "/a/b"), ("/a/b/c", "/a/b")):
        with pytest.raises(InvalidRequest, match="another target"):
            check_mounts(at(*pair))


def test_not_too_many() -> None:
    many = at(*(f"/d{number}" for number in range(MOST_MOUNTS + 1)))
    check_mounts(many[1:])
    with pytest.raises(InvalidRequest):
        check_mounts(many)


def test_sources_are_names() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_mounts((DataMount(source="/etc", target="/a"),))
    assert refused.value.field == "mounts.source"


def test_an_unknown_source_is_told_names_and_no_paths() -> None:
    spec = SandboxSpec(environment=EnvironmentRef(base="tiny"), mounts=at("/a"))
    check_sources(spec, {"set": Path("/srv/set")})
    with pytest.raises(InvalidRequest) as refused:
        check_sources(spec, {"other": Path("/srv/secret")})
    assert "other" in refused.value.hint and "secret" not in str(refused.value)


def test_the_option_of_run() -> None:
    assert parse_mount("set:/data") == DataMount(source="set", target="/data")
    assert parse_mount("set:/data:ro") == DataMount(source="set", target="/data")
    assert parse_mount("set:/data:noexec") == DataMount(source="set", target="/data", noexec=True)
    assert parse_mount("set:/data:ro,noexec") == DataMount(source="set", target="/data", noexec=True)
    for text in (
        "set:/data:rw",
        "set:/data:",
        "set:/a:/b",
        "set:/data:ro:noexec",
        "set:",
        "set",
        "set:/data:noexec,rw",
    ):
        with pytest.raises(InvalidRequest) as refused:
            parse_mount(text)
        assert refused.value.field == "mounts", text
    with pytest.raises(InvalidRequest):
        parse_mount("/data")


def test_what_may_be_shared(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "server/data")
    layout.data.mkdir(parents=True)
    (tmp_path / "set").mkdir()
    (tmp_path / "link").symlink_to(layout.data)
    assert parse_data_mounts((f"a={tmp_path}/set",), layout) == {"a": tmp_path / "set"}
    inside = layout.data / "layers"
    inside.mkdir()
    for path in (layout.data, inside, layout.data.parent, Path("/"), tmp_path / "link", tmp_path / "none", Path("set")):
        with pytest.raises(InvalidRequest) as refused:
            parse_data_mounts((f"a={path}",), layout)
        assert refused.value.field == "data_mount"
    with pytest.raises(InvalidRequest):
        parse_data_mounts((f"A B={tmp_path}/set",), layout)
