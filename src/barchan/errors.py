"""Every error barchan raises, in one tree.

A class says who failed (`party`) and whether the same request may simply be sent again (`retry`). The text
says what happened, why, and what to do. Only the code travels on the wire; a client builds the class from
its own table, so that no remote side can choose what is imported or constructed here.

    BarchanError
    ├── CommandFailed                a command ended badly and its caller had asked for `check=True`; `result` says how
    ├── CallerError                  the request cannot be carried out as sent
    │   ├── InvalidRequest           a field is wrong; `field` names it
    │   ├── Unauthenticated          no token, or a wrong one
    │   ├── Conflict                 the same id or key was used for a different request
    │   ├── NotSupported             this backend or host cannot do that verb
    │   ├── EnvironmentNotFound
    │   ├── LockMismatch             what is there is not what a lock file says
    │   ├── ImageNotFound            the registry has no such image
    │   ├── ImageDenied              the registry wants other credentials, or says so instead of "not found"
    │   ├── SandboxNotFound
    │   ├── NodeNotFound
    │   ├── ExecNotFound
    │   ├── ShellBusy                the shell session is running another command
    │   ├── ShellEnded               the shell session is over; the text says how it ended
    │   ├── UserNotFound             the sandbox has no such user
    │   └── FileFailure              a file operation in the sandbox failed
    │       ├── FileMissing
    │       ├── FileDenied
    │       ├── FileAlreadyExists
    │       ├── FileIsDirectory
    │       └── FileNotDirectory
    ├── SandboxError                 the sandbox itself is at fault
    │   ├── SandboxUnavailable       its first process is dead or does not answer
    │   ├── SandboxStopped           it was stopped or its lifetime ended
    │   ├── TerminalsTaken           no pseudo-terminal of the sandbox is free
    │   ├── SandboxDiskFull
    │   └── SandboxLogFull           what it has on record is as much as one sandbox may have; it can be read, not used further
    ├── NodeError                    the host of the sandbox is at fault
    │   ├── AdmissionRefused         no room now; another node or a later try may do
    │   ├── CreateFailed             `phase` says where
    │   ├── RegistryUnavailable      it cannot be reached, or does not answer in time
    │   ├── LayerCorrupt
    │   ├── LogCorrupt               a trajectory segment does not hold what was written to it
    │   ├── RecordGone               it was recorded, and removed from the log since to make room
    │   ├── WrongVersion             the data directory was made by another version of barchan
    │   ├── FeatureMissing           the kernel or a program lacks something; `hint` says what to do
    │   ├── NodeStorageFull
    │   ├── NodeUnavailable          not connected at the moment
    │   └── OutcomeUnknown           it may or may not have run
    └── PlatformError                barchan or the way to it is at fault
        ├── ApiUnavailable
        ├── ProtocolError
        ├── RequestTimeout           no answer in the time the caller gave
        └── InternalError
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import msgspec

Party = Literal["caller", "program", "sandbox", "node", "platform"]


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it travels: HTTP body, link frame, `--json` output."""

    code: str
    message: str
    party: str = "platform"
    phase: str = ""
    field: str = ""
    hint: str = ""
    retry: bool = False


class BarchanError(Exception):
    """Root of the tree. `code` is stable; `message`, `hint` are for people."""

    code: ClassVar[str] = "error"
    party: ClassVar[Party] = "platform"
    retry: ClassVar[bool] = False
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str = "", phase: str = "", field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.phase = phase
        self.field = field

    def __str__(self) -> str:
        where = f" [{self.phase}]" if self.phase else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.message}{where}{hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.phase, self.field)

    def body(self) -> ErrorBody:
        return ErrorBody(
            code=self.code,
            message=self.message,
            party=self.party,
            phase=self.phase,
            field=self.field,
            hint=self.hint,
            retry=self.retry,
        )


def _rebuild(cls: type[BarchanError], message: str, hint: str, phase: str, field: str) -> BarchanError:
    return cls(message, hint=hint, phase=phase, field=field)


class CommandFailed(BarchanError):
    code = "command_failed"
    party = "program"

    def __init__(self, message: str, *, hint: str = "", phase: str = "", field: str = "", result: Any = None) -> None:
        super().__init__(message, hint=hint, phase=phase, field=field)
        self.result = result
        """The `CompletedExec`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_failed, (self.message, self.result)


def _rebuild_failed(message: str, result: Any) -> CommandFailed:
    return CommandFailed(message, result=result)


class CallerError(BarchanError):
    code = "caller_error"
    party = "caller"
    status = 400


class InvalidRequest(CallerError):
    code = "invalid_request"


class Unauthenticated(CallerError):
    code = "unauthenticated"
    status = 401


class Conflict(CallerError):
    code = "conflict"
    status = 409


class NotSupported(CallerError):
    code = "not_supported"
    status = 501


class EnvironmentNotFound(CallerError):
    code = "environment_not_found"
    status = 404


class LockMismatch(CallerError):
    code = "lock_mismatch"
    status = 409


class ImageNotFound(CallerError):
    code = "image_not_found"
    status = 404


class ImageDenied(CallerError):
    code = "image_denied"
    status = 403


class SandboxNotFound(CallerError):
    code = "sandbox_not_found"
    status = 404


class NodeNotFound(CallerError):
    code = "node_not_found"
    status = 404


class ExecNotFound(CallerError):
    code = "exec_not_found"
    status = 404


class ShellBusy(CallerError):
    code = "shell_busy"
    status = 409


class ShellEnded(CallerError):
    code = "shell_ended"
    status = 410


class UserNotFound(CallerError):
    code = "user_not_found"


class FileFailure(CallerError):
    code = "file_failure"


class FileMissing(FileFailure):
    code = "file_missing"
    status = 404


class FileDenied(FileFailure):
    code = "file_denied"
    status = 403


class FileAlreadyExists(FileFailure):
    code = "file_exists"
    status = 409


class FileIsDirectory(FileFailure):
    code = "file_is_directory"


class FileNotDirectory(FileFailure):
    code = "file_not_directory"


class SandboxError(BarchanError):
    code = "sandbox_error"
    party = "sandbox"
    status = 502


class SandboxUnavailable(SandboxError):
    code = "sandbox_unavailable"


class SandboxStopped(SandboxError):
    code = "sandbox_stopped"
    status = 410


class TerminalsTaken(SandboxError):
    code = "terminals_taken"
    status = 409


class SandboxDiskFull(SandboxError):
    code = "sandbox_disk_full"
    status = 507


class SandboxLogFull(SandboxError):
    code = "sandbox_log_full"
    status = 507


class NodeError(BarchanError):
    code = "node_error"
    party = "node"
    status = 500


class AdmissionRefused(NodeError):
    code = "admission_refused"
    retry = True
    status = 429


class CreateFailed(NodeError):
    code = "create_failed"


class RegistryUnavailable(NodeError):
    code = "registry_unavailable"
    retry = True
    status = 502


class LayerCorrupt(NodeError):
    code = "layer_corrupt"


class LogCorrupt(NodeError):
    code = "log_corrupt"


class RecordGone(NodeError):
    code = "record_gone"
    status = 410


class WrongVersion(NodeError):
    code = "wrong_version"


class FeatureMissing(NodeError):
    code = "feature_missing"
    status = 501


class NodeStorageFull(NodeError):
    code = "node_storage_full"
    retry = True
    status = 507


class NodeUnavailable(NodeError):
    code = "node_unavailable"
    retry = True
    status = 503


class OutcomeUnknown(NodeError):
    code = "outcome_unknown"


class PlatformError(BarchanError):
    code = "platform_error"


class ApiUnavailable(PlatformError):
    code = "api_unavailable"
    retry = True
    status = 503


class ProtocolError(PlatformError):
    code = "protocol_error"


class RequestTimeout(PlatformError):
    code = "request_timeout"
    retry = True
    status = 504


class InternalError(PlatformError):
    code = "internal_error"


def tree(root: type[BarchanError] = BarchanError) -> Iterator[type[BarchanError]]:
    """Every class of the tree, parents first."""
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


def from_body(body: ErrorBody) -> BarchanError:
    """The error a wire body stands for. An unknown code becomes `PlatformError` and keeps its text."""
    cls = next((c for c in tree() if c.code == body.code), PlatformError)
    return cls(body.message, hint=body.hint, phase=body.phase, field=body.field)
