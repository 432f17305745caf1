"""The data directory, its lock, and the background process."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from barchan.cli import daemon
from barchan.cli.datadir import UpRecord, delete, locked, node_name, occupied, prepare, read_record, write_record
from barchan.cli.processes import ProcessRef
from barchan.config import ApiConfig, Layout, NodeConfig
from barchan.errors import Conflict, InvalidRequest


def record_of(layout: Layout, name: str = "n") -> UpRecord:
    return UpRecord(
        api=ApiConfig(layout=layout, listen=("::1", 80), tls_cert=Path("/c"), tls_key=Path("/k")),
        node=NodeConfig(layout=layout, name=name),
        supervisor=ProcessRef(7, 8),
        services={"api": ProcessRef(1, 2)},
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_made_for_the_owner_alone(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "a/b")
    prepare(layout)
    assert (mode(layout.data), mode(layout.run)) == (0o700, 0o700)
    assert (mode(layout.token), mode(layout.instance)) == (0o600, 0o600)
    assert len(layout.token.read_text()) >= 43
    assert layout.instance.read_text().isalnum()


def test_secrets_are_made_once(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    prepare(layout)
    before = layout.token.read_bytes(), layout.instance.read_bytes()
    layout.data.chmod(0o755)
    prepare(layout)
    assert (layout.token.read_bytes(), layout.instance.read_bytes()) == before
    assert mode(layout.data) == 0o700


def test_two_installations_differ(tmp_path: Path) -> None:
    one, two = Layout(tmp_path / "1"), Layout(tmp_path / "2")
    prepare(one)
    prepare(two)
    assert one.token.read_bytes() != two.token.read_bytes()
    assert one.instance.read_bytes() != two.instance.read_bytes()


def test_somebody_elses_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(InvalidRequest, match=r"thesis\.tex"):
        prepare(Layout(tmp_path))
    assert mode(tmp_path) == 0o755
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="not a directory"):
        prepare(Layout(Path(f"{tmp_path}/file{below}")))


def test_a_path_too_long_for_sockets(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        prepare(Layout(tmp_path / ("x" * 100)))
    assert not os.listdir(tmp_path)


def test_one_supervisor_only(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    prepare(layout)
    write_record(layout, record_of(layout))
    with locked(layout):
        with pytest.raises(Conflict, match=r"pid 7") as caught, locked(layout, wait=0.05):
            pytest.fail("locked twice")
        assert "barchan down" in caught.value.hint
    with locked(layout):
        pass


def test_record_survives(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    prepare(layout)
    assert read_record(layout) is None
    write_record(layout, record_of(layout))
    assert read_record(layout) == record_of(layout)
    (layout.run / "up.json").write_text('{"other": "version"}')
    assert read_record(layout) is None


def test_node_name(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert node_name("given", record_of(layout, "before")) == "given"
    assert node_name(None, record_of(layout, "before")) == "before"
    assert node_name(node_name(None, None), None), "the host's name makes a valid one"
    with pytest.raises(InvalidRequest):
        node_name("..", None)


def test_background_process_tells_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log, fifo = tmp_path / "log", tmp_path / "fifo"
    os.mkfifo(fifo)

    def serve(tell: int) -> int:
        os.write(tell, f"{os.getcwd()} {os.getsid(0) == os.getpid()} {os.getppid()}".encode())
        os.close(tell)
        print("to the log", flush=True)
        fifo.write_text(f"{os.read(0, 1)!r}")
        return 0

    with capfd.disabled():
        told = daemon.in_background(log, serve).decode().split()
    assert told[0] == "/"
    assert told[1] == "False", "not a session leader: cannot get a terminal"
    assert int(told[2]) != os.getpid()
    assert fifo.read_text() == "b''"
    assert log.read_text() == "to the log\n"
    assert mode(log) == 0o600


def test_background_process_that_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"

    def serve(tell: int) -> int:
        raise OSError("broken")

    with capfd.disabled():
        assert daemon.in_background(log, serve) == b""
    assert daemon.last_lines(log)[-1] == "OSError: broken"


def test_log_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log.log"
    daemon.put_aside(log)
    with log.open("ab") as writer:
        writer.truncate(daemon.LOG_MOST)
        daemon.put_aside(log)
        writer.write(b"next")
    assert log.read_bytes() == b"next"
    assert (tmp_path / "log.log.1").stat().st_size == daemon.LOG_MOST
    daemon.put_aside(log)
    assert log.read_bytes() == b"next"


def test_only_the_lines_of_this_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert daemon.end_of(log) == 0
    log.write_text("earlier\n")
    began = daemon.end_of(log)
    with log.open("a") as file:
        file.write("now\n")
    assert daemon.last_lines(log, began) == ["now"]
    assert daemon.last_lines(log, daemon.end_of(log)) == []


def test_delete_all_that_is_ours(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "data")
    prepare(layout)
    for name in ("node.db", "node.db-wal", "scratch.img", "layers/x", "log/1.seg", "mnt/y", "scratch/z"):
        (layout.data / name).parent.mkdir(exist_ok=True)
        (layout.data / name).write_bytes(b"x")
    delete(layout)
    assert not layout.data.exists()


def test_delete_nothing_that_is_not_ours(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "data")
    layout.run.mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="no data directory of barchan"):
        delete(layout)
    prepare(layout)
    (layout.data / "thesis.tex").touch()
    with pytest.raises(InvalidRequest, match=r"thesis\.tex"):
        delete(layout)
    assert layout.token.exists()


def test_delete_leaves_what_links_point_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").touch()
    layout = Layout(tmp_path / "data")
    prepare(layout)
    layout.layers.symlink_to(tmp_path / "elsewhere")
    delete(layout)
    assert (tmp_path / "elsewhere/file").exists()


def test_occupied(tmp_path: Path) -> None:
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/a").write_bytes(bytes(8192))
    (tmp_path / "tree/sub/b").write_bytes(bytes(4096))
    assert occupied(tmp_path / "tree") == 12288
    assert occupied(tmp_path / "tree/a") == 8192
    assert occupied(tmp_path / "none") == 0
