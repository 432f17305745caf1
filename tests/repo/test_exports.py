"""The public names, exactly. Changing this list is changing the interface."""

from __future__ import annotations

import inspect

import barchan
from barchan import errors, sync

PUBLIC = """
AdmissionRefused ApiUnavailable BarchanError Batch CallerError Client CommandFailed CompletedExec Conflict CreateFailed
CreateFailure DataMount EnvironmentLock EnvironmentNotFound EnvironmentRef ExecInfo ExecNotFound ExecResult FeatureMissing FileAlreadyExists FileDenied
FileFailure FileIsDirectory FileMissing FileNotDirectory FileStat Files ImageConfig ImageDenied ImageNotFound InternalError InvalidRequest LayerCorrupt
Limits LockMismatch LogCorrupt NetworkRules NodeError NodeInfo NodeNotFound NodeStorageFull NodeUnavailable NotSupported OutcomeUnknown PackedLayer
PlatformError Process ProcessInfo ProcessInput ProcessOutput ProtocolError PullProgress RecordGone RegistryUnavailable RequestTimeout Sandbox
SandboxDiskFull SandboxError SandboxInfo SandboxLogFull SandboxNotFound SandboxSpec SandboxStats SandboxStopped SandboxUnavailable ScrubRules Shell
ShellBusy ShellEnded TerminalProcess TerminalsTaken TransferReport Unauthenticated UserNotFound WrongVersion __version__
"""


def test_exactly_these_names_are_public() -> None:
    assert sorted(barchan.__all__) == sorted(PUBLIC.split())
    assert all(hasattr(barchan, name) for name in barchan.__all__)


def test_the_synchronous_client_has_the_same_names() -> None:
    """And only what talks to the API is an object of its own."""
    assert sync.__all__ == barchan.__all__
    own = [name for name in sync.__all__ if getattr(sync, name) is not getattr(barchan, name)]
    assert " ".join(own) == "Batch Client Files Process ProcessInput ProcessOutput Sandbox Shell TerminalProcess"
    for name in own:
        members = {member for member in vars(getattr(barchan, name)) if not member.startswith("_")}
        assert {member for member in vars(getattr(sync, name)) if not member.startswith("_")} == members


def test_every_error_is_public() -> None:
    assert {cls.__name__ for cls in errors.tree()} <= set(barchan.__all__)


def test_every_public_class_and_method_says_what_it_does() -> None:
    silent = []
    names = "Batch Client Sandbox Process ProcessInput ProcessOutput Shell TerminalProcess TransferReport CompletedExec"
    for name in names.split():
        cls = getattr(barchan, name)
        assert inspect.getdoc(cls), name
        for method, value in vars(cls).items():
            if inspect.isfunction(value) and not method.startswith("_") and not value.__doc__:
                silent.append(f"{name}.{method}")
    assert silent == []
