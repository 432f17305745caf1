"""Inspect: `sandbox="barchan"`, or `("barchan", "NAME")` for the environment NAME, or a `BarchanConfig`.

Each sample has a sandbox and a connection of its own. Inspect must run on asyncio, its default. Where the API is comes from
BARCHAN_URL and BARCHAN_TOKEN, as with any client.
"""

from __future__ import annotations

import errno
import posixpath
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload

try:
    from inspect_ai._util.error import PrerequisiteError
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxConnection,
        SandboxEnvironment,
        SandboxEnvironmentConfigType,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        sandboxenv,
    )
    from pydantic import BaseModel, ConfigDict
except ModuleNotFoundError as error:
    raise ImportError("barchan.integrations.inspect needs Inspect: pip install inspect-ai") from error

from barchan import errors
from barchan.sdk import Client, CompletedExec, Sandbox
from barchan.spec import EnvironmentRef, Limits, SandboxSpec, check_spec

LABEL = "inspect-task"
"""On every sandbox made for Inspect, with the task's name."""


class BarchanConfig(BaseModel):
    """What the sandbox of each sample shall be like. Meaning and units as in `SandboxSpec` and `Limits`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: str = "debian-12"
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    user: str = "root"
    """Of commands that name no other, and of all file operations."""
    workdir: str = "/workspace"
    """Where commands start and relative paths begin. Made if it is not there, for anybody to write."""
    env: dict[str, str] = {}
    memory: int = Limits().memory
    cpus: float = Limits().cpus
    pids: int = Limits().pids
    disk: int = Limits().disk
    idle_timeout: float = 3600.0
    lifetime: float = 86400.0
    setuid: bool = False
    ptrace: bool = False

    def spec(self, task: str) -> SandboxSpec:
        """Raises `InvalidRequest`."""
        return check_spec(
            SandboxSpec(
                environment=EnvironmentRef(base=self.environment, workspace=self.workspace, toolkits=self.toolkits),
                limits=Limits(memory=self.memory, cpus=self.cpus, pids=self.pids, disk=self.disk),
                labels={LABEL: task},
                env=self.env,
                user=self.user,
                idle_timeout=self.idle_timeout,
                lifetime=self.lifetime,
                setuid=self.setuid,
                ptrace=self.ptrace,
            )
        )


@sandboxenv(name="barchan")
class BarchanSandboxEnvironment(SandboxEnvironment):
    """One sandbox. Owns the client that it is given."""

    def __init__(self, client: Client, sandbox: Sandbox, workdir: str) -> None:
        super().__init__()
        self.sandbox = sandbox
        self._client = client
        self._workdir = workdir

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """As Inspect says; output beyond its limit is `OutputLimitExceededError`, a missing `cwd` `FileNotFoundError`.

        `timeout_retry` changes nothing: lost connections are taken up again, so a time-out here is the command's own, and
        a second run could do its work twice. Nor does `concurrency`: no process of this host is used.
        """
        with translated(cwd or self._workdir):
            done = await self.sandbox.run(
                cmd,
                stdin=input,
                cwd=self._path(cwd or ""),
                env=env,
                user=user,
                timeout=timeout,
                output_limit=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            )
        return result_of(done, cmd[0])

    async def write_file(self, file: str, contents: str | bytes) -> None:
        with translated(file):
            await self.sandbox.files.write(self._path(file), contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        most = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with translated(file):
            contents = await self.sandbox.files.read(self._path(file), length=most + 1)
        if len(contents) > most:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return contents.decode() if text else contents

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        with translated(""):
            info = await self.sandbox.refresh()
        if info.state != "ready":
            raise ConnectionError(f"sandbox {info.id} is {info.state}")
        options = [] if user is None else ["--user", user]
        command = shlex.join(["barchan", "exec", "-it", *options, info.id])
        return SandboxConnection(type="barchan", command=command, container=info.id)

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Finds out before the first sample whether there is a server and what the configuration names.

        What is not there is a `PrerequisiteError`, which Inspect shows without a traceback.
        """
        try:
            await find_layers(config_of(config).spec(task_name))
        except errors.BarchanError as error:
            raise PrerequisiteError(f"barchan: {error}") from error

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        wanted = config_of(config)
        client = Client()
        try:
            sandbox = await client.create_from(wanted.spec(task_name))
            await sandbox.files.mkdir(wanted.workdir, mode=0o1777, user="0:0")
        except BaseException:
            await client.close()
            raise
        return {"default": cls(client, sandbox, wanted.workdir)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            mine = environment.as_type(cls)
            try:
                await mine.sandbox.stop()
            finally:
                await mine._client.close()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Stop the sandbox `id`, or all that were made for Inspect."""
        async with Client() as client:
            made = [info.id for info in await client.list() if LABEL in info.labels] if id is None else [id]
            for each in made:
                await (await client.get(each)).stop()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return BarchanConfig(**config)

    def _path(self, file: str) -> str:
        return posixpath.join(self._workdir, file)


async def find_layers(spec: SandboxSpec) -> None:
    """Raises `EnvironmentNotFound`, and what a server that cannot be reached raises."""
    async with Client() as client:
        known = {layer.name for layer in await client.environments()}
    if missing := [name for name in spec.environment.names() if is_plain(name) and name not in known]:
        raise errors.EnvironmentNotFound(f"no environment {missing[0]}", hint=f"there are: {', '.join(sorted(known))}")


def config_of(config: SandboxEnvironmentConfigType | None) -> BarchanConfig:
    if isinstance(config, BarchanConfig):
        return config
    if isinstance(config, str):
        # Inspect takes text for the name of a file beside the task; a reference has no slash.
        return BarchanConfig(environment=posixpath.basename(config))
    if config is None:
        return BarchanConfig()
    raise TypeError(f"{type(config).__name__} is no configuration of barchan: give a name or a BarchanConfig")


def is_plain(name: str) -> bool:
    """Without a version, and no digest."""
    return "@" not in name and ":" not in name


def result_of(done: CompletedExec, program: str) -> ExecResult[str]:
    """Raises what Inspect wants raised."""
    if done.outcome == "timed_out":
        raise TimeoutError(f"{program} took longer than its time limit")
    if done.outcome == "cancelled":
        raise RuntimeError(f"{program} was cancelled by another client")
    if done.outcome == "not_executable":
        raise PermissionError(errno.EACCES, "not executable", program)
    if done.stdout_dropped or done.stderr_dropped:
        flood = done.text if done.stdout_dropped else done.stderr_text
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, flood)
    said = f"{program}: not found\n" if done.outcome == "not_found" else done.stderr_text
    code = 1 if done.exit_code is None else done.exit_code
    return ExecResult(success=done.ok, returncode=code, stdout=done.text, stderr=said)


@contextmanager
def translated(place: str) -> Iterator[None]:
    """Errors of ours become those of Inspect's contract; others stay."""
    try:
        yield
    except errors.BarchanError as error:
        raise _foreign(error, place) from error


_FILE_ERRORS: tuple[tuple[type[errors.BarchanError], int, str], ...] = (
    (errors.FileMissing, errno.ENOENT, "no such file or directory"),
    (errors.FileDenied, errno.EACCES, "permission denied"),
    (errors.FileIsDirectory, errno.EISDIR, "is a directory"),
    (errors.FileNotDirectory, errno.ENOTDIR, "not a directory"),
    (errors.SandboxDiskFull, errno.ENOSPC, "the sandbox's disk is full"),
)
_AWAY = (errors.SandboxError, errors.SandboxNotFound, errors.NodeUnavailable, errors.ApiUnavailable)


def _foreign(error: errors.BarchanError, place: str) -> Exception:
    for kind, number, text in _FILE_ERRORS:
        if isinstance(error, kind):
            return OSError(number, text, place)
    if isinstance(error, errors.UserNotFound):
        return SandboxUserUnsupportedError(str(error))
    if isinstance(error, _AWAY):
        return SandboxUnavailableError(str(error))
    return TimeoutError(str(error)) if isinstance(error, errors.RequestTimeout) else error
