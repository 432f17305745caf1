"""barchan: self-hosted sandboxes for AI agents.

async with Client() as client:
    async with await client.create("debian-12") as sandbox:
        result = await sandbox.run("echo hello")
        print(result.text, result.exit_code)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from barchan._version import __version__

if TYPE_CHECKING:
    from barchan.environments import PullProgress
    from barchan.errors import (
        AdmissionRefused,
        ApiUnavailable,
        BarchanError,
        CallerError,
        CommandFailed,
        Conflict,
        CreateFailed,
        EnvironmentNotFound,
        ExecNotFound,
        FeatureMissing,
        FileAlreadyExists,
        FileDenied,
        FileFailure,
        FileIsDirectory,
        FileMissing,
        FileNotDirectory,
        ImageDenied,
        ImageNotFound,
        InternalError,
        InvalidRequest,
        LayerCorrupt,
        LockMismatch,
        LogCorrupt,
        NodeError,
        NodeNotFound,
        NodeStorageFull,
        NodeUnavailable,
        NotSupported,
        OutcomeUnknown,
        PlatformError,
        ProtocolError,
        RecordGone,
        RegistryUnavailable,
        RequestTimeout,
        SandboxDiskFull,
        SandboxError,
        SandboxLogFull,
        SandboxNotFound,
        SandboxStopped,
        SandboxUnavailable,
        ShellBusy,
        ShellEnded,
        TerminalsTaken,
        Unauthenticated,
        UserNotFound,
        WrongVersion,
    )
    from barchan.images import ImageConfig
    from barchan.locks import EnvironmentLock
    from barchan.mounts import DataMount
    from barchan.networks import NetworkRules
    from barchan.packing import PackedLayer, ScrubRules
    from barchan.sdk import (
        Batch,
        Client,
        CompletedExec,
        CreateFailure,
        Files,
        Process,
        ProcessInput,
        ProcessOutput,
        Sandbox,
        Shell,
        TerminalProcess,
        TransferReport,
    )
    from barchan.spec import (
        EnvironmentRef,
        ExecInfo,
        ExecResult,
        FileStat,
        Limits,
        NodeInfo,
        ProcessInfo,
        SandboxInfo,
        SandboxSpec,
    )
    from barchan.usage import SandboxStats

__all__ = [
    "AdmissionRefused",
    "ApiUnavailable",
    "BarchanError",
    "Batch",
    "CallerError",
    "Client",
    "CommandFailed",
    "CompletedExec",
    "Conflict",
    "CreateFailed",
    "CreateFailure",
    "DataMount",
    "EnvironmentLock",
    "EnvironmentNotFound",
    "EnvironmentRef",
    "ExecInfo",
    "ExecNotFound",
    "ExecResult",
    "FeatureMissing",
    "FileAlreadyExists",
    "FileDenied",
    "FileFailure",
    "FileIsDirectory",
    "FileMissing",
    "FileNotDirectory",
    "FileStat",
    "Files",
    "ImageConfig",
    "ImageDenied",
    "ImageNotFound",
    "InternalError",
    "InvalidRequest",
    "LayerCorrupt",
    "Limits",
    "LockMismatch",
    "LogCorrupt",
    "NetworkRules",
    "NodeError",
    "NodeInfo",
    "NodeNotFound",
    "NodeStorageFull",
    "NodeUnavailable",
    "NotSupported",
    "OutcomeUnknown",
    "PackedLayer",
    "PlatformError",
    "Process",
    "ProcessInfo",
    "ProcessInput",
    "ProcessOutput",
    "ProtocolError",
    "PullProgress",
    "RecordGone",
    "RegistryUnavailable",
    "RequestTimeout",
    "Sandbox",
    "SandboxDiskFull",
    "SandboxError",
    "SandboxInfo",
    "SandboxLogFull",
    "SandboxNotFound",
    "SandboxSpec",
    "SandboxStats",
    "SandboxStopped",
    "SandboxUnavailable",
    "ScrubRules",
    "Shell",
    "ShellBusy",
    "ShellEnded",
    "TerminalProcess",
    "TerminalsTaken",
    "TransferReport",
    "Unauthenticated",
    "UserNotFound",
    "WrongVersion",
    "__version__",
]

_HOMES = (
    "barchan.errors",
    "barchan.spec",
    "barchan.environments",
    "barchan.images",
    "barchan.locks",
    "barchan.packing",
    "barchan.usage",
    "barchan.sdk",
)


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are first used: a command line that needs no client starts without one."""
    if name in __all__:
        for home in _HOMES:
            module = import_module(home)
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
