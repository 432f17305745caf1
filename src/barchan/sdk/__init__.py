"""The client library. Import its names from `barchan`."""

from barchan.sdk._client import Client
from barchan.sdk._exec import CompletedExec
from barchan.sdk._files import Files
from barchan.sdk._many import Batch, CreateFailure
from barchan.sdk._process import Process, ProcessInput, ProcessOutput
from barchan.sdk._sandbox import Sandbox
from barchan.sdk._shell import Shell
from barchan.sdk._terminal import TerminalProcess
from barchan.sdk._tree import TransferReport

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
