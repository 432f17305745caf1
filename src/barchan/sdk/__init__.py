"""The client library. Import its names from `barchan`, or from `barchan.sync` for a client without `async`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from barchan.sdk._client import Client
    from barchan.sdk._files import Files
    from barchan.sdk._many import Batch
    from barchan.sdk._process import Process, ProcessInput, ProcessOutput
    from barchan.sdk._results import CompletedExec, CreateFailure
    from barchan.sdk._sandbox import Sandbox
    from barchan.sdk._shell import Shell
    from barchan.sdk._terminal import TerminalProcess
    from barchan.sdk._tree import TransferReport

_HOMES = {
    "Batch": "barchan.sdk._many",
    "Client": "barchan.sdk._client",
    "CompletedExec": "barchan.sdk._results",
    "CreateFailure": "barchan.sdk._results",
    "Files": "barchan.sdk._files",
    "Process": "barchan.sdk._process",
    "ProcessInput": "barchan.sdk._process",
    "ProcessOutput": "barchan.sdk._process",
    "Sandbox": "barchan.sdk._sandbox",
    "Shell": "barchan.sdk._shell",
    "TerminalProcess": "barchan.sdk._terminal",
    "TransferReport": "barchan.sdk._tree",
}
__all__ = [
    "Batch",
    "Client",
    "CompletedExec",
    "CreateFailure",
    "Files",
    "Process",
    "ProcessInput",
    "ProcessOutput",
    "Sandbox",
    "Shell",
    "TerminalProcess",
    "TransferReport",
]


def __getattr__(name: str) -> Any:
    """Loaded when first used: who takes one of the two clients does not load the other, nor its HTTP library."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
