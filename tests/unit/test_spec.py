"""What types let through is refused by name."""

from __future__ import annotations

import msgspec
import pytest

from barchan.errors import InvalidRequest
from barchan.names import check_name, check_ref
from barchan.spec import (
    EnvironmentRef,
    Exec,
    ExecId,
    Limits,
    SandboxSpec,
    Terminal,
    check_exec,
    check_spec,
    node_of,
)
from barchan.wire.fields import field_of
from barchan.wire.messages import CreateSandbox, pack, unpack_call

BASE = EnvironmentRef(base="debian-12")


@pytest.mark.parametrize("name", ["a", "debian-12", "a.b_c-d", "0" * 64])
def test_good_names(name: str) -> None:
    assert check_name(name, "name") == name


@pytest.mark.parametrize("name", ["", "..", "a..b", "/a", "a/b", "A", ".a", "a-", "a\0b", "0" * 65, "a\n", "é"])
def test_bad_names(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_name(name, "name")
    assert refused.value.field == "name" and refused.value.hint


@pytest.mark.parametrize("ref", ["debian-12", "debian-12@3", "x@latest", "sha256:" + "0" * 64])
def test_good_references(ref: str) -> None:
    assert check_ref(ref, "base") == ref


@pytest.mark.parametrize("ref", ["..", "a@", "@1", "a@1@2", "sha256:zz", "sha256:" + "0" * 63, "a/../b"])
def test_bad_references(ref: str) -> None:
    with pytest.raises(InvalidRequest):
        check_ref(ref, "base")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SandboxSpec(environment=EnvironmentRef(base="../etc")), "environment.base"),
        (SandboxSpec(environment=EnvironmentRef(base="a", toolkits=("x/y",))), "environment"),
        (SandboxSpec(environment=BASE, limits=Limits(memory=-1)), "limits.memory"),
        (SandboxSpec(environment=BASE, limits=Limits(cpus=0)), "limits.cpus"),
        (SandboxSpec(environment=BASE, limits=Limits(pids=1)), "limits.pids"),
        (SandboxSpec(environment=BASE, idle_timeout=-5), "idle_timeout"),
        (SandboxSpec(environment=BASE, lifetime=float("nan")), "lifetime"),
        (SandboxSpec(environment=BASE, hostname="a b"), "hostname"),
        (SandboxSpec(environment=BASE, workdir="tmp"), "workdir"),
        (SandboxSpec(environment=BASE, env={"A=B": "x"}), "env"),
        (SandboxSpec(environment=BASE, env={"A": "x\0y"}), "env"),
        (SandboxSpec(environment=BASE, secrets={"": "x"}), "secrets"),
        (SandboxSpec(environment=BASE, user="a\0b"), "user"),
        (SandboxSpec(environment=BASE, labels={"k": "v" * 5000}), "labels"),
    ],
)
def test_bad_specs_name_their_field(spec: SandboxSpec, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_spec(spec)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Exec(argv=()), "argv"),
        (Exec(argv=(b"a\0b",)), "argv"),
        (Exec(argv=(b"a",), cwd=b"a\0"), "cwd"),
        (Exec(argv=(b"a",), env={b"": b"x"}), "env"),
        (Exec(argv=(b"a",), secrets={b"A": b"\0"}), "secrets"),
        (Exec(argv=(b"a",), timeout=0), "timeout"),
        (Exec(argv=(b"a",), timeout=float("inf")), "timeout"),
        (Exec(argv=(b"a",), grace=-1), "grace"),
        (Exec(argv=(b"a",), output_limit=-1), "output_limit"),
        (Exec(argv=(b"a",), tty=Terminal(rows=0)), "tty.rows"),
        (Exec(argv=(b"a",), tty=Terminal(columns=1 << 16)), "tty.columns"),
        (Exec(argv=(), opens_shell=True, tty=Terminal()), "tty"),
        (Exec(argv=(b"a",), shell=ExecId("s"), tty=Terminal()), "tty"),
        (Exec(argv=(b"a", b"b"), shell=ExecId("s")), "argv"),
        (Exec(argv=(), shell=ExecId("s")), "argv"),
        (Exec(argv=(b"a",), shell=ExecId("s"), cwd=b"/"), "cwd"),
        (Exec(argv=(b"a",), shell=ExecId("s"), stdin=True), "stdin"),
        (Exec(argv=(b"a",), shell=ExecId("s"), opens_shell=True), "opens_shell"),
    ],
)
def test_bad_commands_name_their_field(request_: Exec, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_exec(request_)
    assert refused.value.field == field


def test_any_byte_but_nul_is_an_argument() -> None:
    argv = (bytes(range(1, 256)), "ü".encode(), b"")
    assert check_exec(Exec(argv=argv)).argv == argv


@pytest.mark.parametrize(("sandbox", "node"), [("n1-abcdefgh", "n1"), ("my-host-01abcdefgh", "my-host")])
def test_a_sandbox_names_its_node(sandbox: str, node: str) -> None:
    assert node_of(sandbox) == node


@pytest.mark.parametrize("sandbox", ["", "n1", "n1-", "-abcdefgh", "n1-short", "../x-abcdefgh", "n1-ABCDEFGH"])
def test_what_is_no_sandbox_id(sandbox: str) -> None:
    with pytest.raises(InvalidRequest):
        node_of(sandbox)


def test_unknown_fields_are_named_on_the_wire() -> None:
    good = {"spec": {"environment": {"base": "a"}}, "key": "k"}
    assert isinstance(unpack_call(pack(("sandbox.create", good))), CreateSandbox)
    for bad, field in (
        ({**good, "extra": 1}, "extra"),
        ({"spec": {"environment": {"base": "a"}, "memroy": 1}, "key": "k"}, "spec.memroy"),
        ({"spec": {"environment": {"base": 3}}, "key": "k"}, "spec.environment.base"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            unpack_call(pack(("sandbox.create", bad)))
        assert refused.value.field == field


def test_field_of_reads_msgspec_messages() -> None:
    with pytest.raises(msgspec.ValidationError) as failed:
        msgspec.json.decode(b'{"environment": {"base": "a"}, "limits": {"pids": "x"}}', type=SandboxSpec)
    assert field_of(failed.value) == "limits.pids"
