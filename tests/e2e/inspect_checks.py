"""Run by test_inspect.py with the Python that holds Inspect: its checks, and what they leave out of our adapter.

Nothing of the adapter is imported: Inspect finds it as it finds any plug-in.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandbox,
)
from inspect_ai.util._sandbox.limits import override_max_exec_output_size
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *

from barchan import Client

ENVIRONMENT, USER = os.environ["CHECKED_ENVIRONMENT"], os.environ["CHECKED_USER"]
PROVIDER = registry_find_sandboxenv("barchan")
CONFIG = PROVIDER.config_deserialize({"environment": ENVIRONMENT, "user": USER})


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[SandboxEnvironment]:
    if request.node.originalname in os.environ["CHECKS_PASSED_BY_ROOT"].split():
        request.node.add_marker(pytest.mark.xfail(strict=True, reason="permission bits do not hold root back"))
    made = await PROVIDER.sample_init("checks", CONFIG, {})
    yield made["default"]
    await PROVIDER.sample_cleanup("checks", CONFIG, made, False)


async def test_adapter_runs_as_the_configured_user(sandbox_env: SandboxEnvironment) -> None:
    done = await sandbox_env.exec(["id", "-u"])
    assert done.stdout == ("0\n" if USER == "root" else USER.partition(":")[0] + "\n")


async def test_adapter_bounds_output(sandbox_env: SandboxEnvironment) -> None:
    with override_max_exec_output_size(1000), pytest.raises(OutputLimitExceededError) as flood:
        await sandbox_env.exec(["sh", "-c", "yes | head -c 5000"])
    assert flood.value.truncated_output == "y\n" * 500


async def test_adapter_says_what_is_missing(sandbox_env: SandboxEnvironment) -> None:
    done = await sandbox_env.exec(["no-such-program"])
    assert (done.success, done.returncode) == (False, 127) and "no-such-program" in done.stderr
    with pytest.raises(FileNotFoundError, match="nowhere"):
        await sandbox_env.exec(["true"], cwd="nowhere")
    with pytest.raises(SandboxUserUnsupportedError, match="nobody-here"):
        await sandbox_env.exec(["true"], user="nobody-here")


async def test_adapter_decodes_strictly(sandbox_env: SandboxEnvironment) -> None:
    await sandbox_env.write_file("odd", b"\xff\r\n")
    with pytest.raises(UnicodeDecodeError):
        await sandbox_env.read_file("odd")
    await sandbox_env.write_file("lines", "a\r\nb\r\n")
    assert await sandbox_env.read_file("lines") == "a\r\nb\r\n"


async def test_adapter_tells_how_to_connect_while_there_is_something(sandbox_env: SandboxEnvironment) -> None:
    id = (await sandbox_env.connection()).container
    assert (await sandbox_env.connection(user="root")).command == f"barchan exec -it --user root {id}"
    await PROVIDER.cli_cleanup(id)
    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.exec(["true"])
    with pytest.raises(ConnectionError):
        await sandbox_env.connection()


async def test_adapter_knows_before_the_first_sample_what_is_not_there() -> None:
    await PROVIDER.task_init("checks", ENVIRONMENT)
    with pytest.raises(PrerequisiteError) as caught:
        await PROVIDER.task_init("checks", "no-such-environment")
    assert "no environment no-such-environment (there are: " in str(caught.value.message)


@solver
def looks_around() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        done = await sandbox().exec(["cat", "given/file", "made"])
        state.output.completion = done.stdout
        return state

    return solve


def test_adapter_serves_an_evaluation(tmp_path: Path) -> None:
    samples = [
        Sample(input=str(i), files={"given/file": f"{i}\n"}, setup="#!/bin/sh\necho set up > made") for i in "ab"
    ]
    task = Task(dataset=samples, solver=looks_around(), sandbox=("barchan", ENVIRONMENT))
    (log,) = eval(task, model="mockllm/model", log_dir=str(tmp_path), display="none", fail_on_error=True)
    assert log.status == "success" and log.samples is not None
    assert [sample.output.completion for sample in log.samples] == ["a\nset up\n", "b\nset up\n"]


async def test_adapter_left_nothing() -> None:
    async with Client() as client:
        assert not [info.id for info in await client.list() if "inspect-task" in info.labels]
