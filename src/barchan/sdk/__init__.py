"""The client library. Import its names from `barchan`."""

from barchan.sdk._client import Client
from barchan.sdk._exec import CompletedExec
from barchan.sdk._files import Files
from barchan.sdk._process import Process, ProcessInput, ProcessOutput
from barchan.sdk._sandbox import Sandbox
from barchan.sdk._tree import TransferReport

__all__ = [
    "Client",
    "CompletedExec",
    "Files",
    "Process",
    "ProcessInput",
    "ProcessOutput",
    "Sandbox",
    "TransferReport",
]
