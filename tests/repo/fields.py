"""What each field of a value or a setting means, for the tables of docs/reference."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from barchan import config, spec

DESCRIBED = {
    "SandboxSpec": spec,
    "Limits": spec,
    "Exec": spec,
    "ExecResult": spec,
    "NodeConfig": config,
    "NetworkAccess": config,
    "ApiConfig": config,
}
"""Sections of settings.md, by the class that each is about."""
SHORT = {
    "environment": "Layers to compose: `base`, at most one `workspace`, `toolkits`.",
    "backend": "Only `container` exists so far.",
    "limits": "See Limits.",
    "SandboxSpec.network": "`deny`: its own loopback alone; `open`: the Internet, too.",
    "NodeInfo.network": "Whether sandboxes can have an open network there: `open`, what is `missing`, `obstacles`.",
    "NodeConfig.network": "See NetworkAccess.",
    "labels": "At most 64, to find it again.",
    "user": "Who runs programs: a name or a number.",
    "workdir": "Where programs start.",
    "argv": "Program and arguments.",
    "cwd": "Absent: the sandbox's `workdir`.",
    "merge_stderr": "Standard error goes into standard output.",
    "hostname": "Lower-case letters, digits and `-`, at most 63.",
    "Exec.env": "Added to the sandbox's; of two values this one counts.",
    "Exec.secrets": "Like `env`, but the values are never stored or shown.",
    "ExecResult.id": "Of the command.",
    "outcome": "`exited`, `signaled`, `timed_out`, `cancelled`, `not_found`, `not_executable`. Those that come with an "
    "`error` (`failed`, `not_started`, `unknown`) are only seen in a sandbox's history.",
    "ExecResult.signal": "The signal that ended it, if one did.",
    "stderr_bytes": "As `stdout_bytes`.",
    "stdout_dropped": "The last of those bytes, beyond `output_limit`; they are in no record.",
    "stderr_dropped": "As `stdout_dropped`.",
    "duration": "Seconds of wall time.",
    "cpu_user": "Seconds, of all its processes that were waited for.",
    "cpu_system": "Seconds, likewise.",
    "max_rss": "Bytes, of its largest process.",
    "stderr": "As `stdout`.",
    "CompletedExec.stderr_text": "As `text`, of standard error.",
    "Sandbox.id": "Begins with its node's name.",
    "Sandbox.files": "See Files.",
    "Process.id": "Of the command; `Sandbox.attach` takes it, also in another process.",
    "Process.stdin": "See ProcessInput.",
    "Process.stdout": "See ProcessOutput.",
    "Process.stderr": "See ProcessOutput; stays empty with `merge_stderr`.",
    "SandboxInfo.limits": "As asked for.",
    "SandboxInfo.environment": "As asked for.",
    "SandboxInfo.labels": "As asked for.",
    "last_used": "When it was last asked for something.",
    "expires": "When its `lifetime` ends.",
    "created": "When it was made.",
    "EnvironmentInfo.created": "Unix seconds.",
    "EnvironmentInfo.size": "Bytes of its image.",
    "EnvironmentLock.base": "What each part was: `name`, `reference`, `digest`, `layers`, `config`.",
    "digest": "Names the content; usable as a reference.",
    "version": "Counts from 1.",
    "started": "Unix seconds.",
    "ProcessInfo.rss": "Bytes.",
    "ProcessInfo.state": "One letter, as in /proc: `R`, `S`, `D`, `Z`, `T`.",
    "exec_id": "The command it belongs to.",
    "oom_kills": "Processes that the memory limit ended.",
    "pids_hits": "Forks that the limit of processes refused.",
    "PackedLayer.name": "As asked for.",
    "PackedLayer.version": "Of that name; no new one when the newest has the same content.",
    "PackedLayer.sandbox": "Of whose changes it was made.",
    "ImageConfig.env": "Variables of every program.",
    "ImageConfig.user": "Who runs programs; empty: root.",
    "ImageConfig.workdir": "Where programs start; empty: `/`.",
    "entrypoint": "Kept for those who start it; barchan runs what it is told to run.",
    "command": "As `entrypoint`.",
    "ImageConfig.labels": "For people and tools.",
    "SandboxStats.id": "Of the sandbox.",
    "SandboxStats.at": "When this was measured.",
    "SandboxStats.pids": "Processes and threads.",
    "SandboxStats.cpu_system": "Likewise, in the kernel.",
    "data_mounts": "Names that a spec's `mounts` may use there.",
    "Batch.failures": "See CreateFailure.",
    "mtime_ns": "Nanoseconds since 1970.",
    "FileStat.size": "Bytes.",
    "FileStat.path": "As asked for; in listings relative to the directory.",
    "kernel": "`full` from 6.13 on, otherwise `reduced`.",
    "capacity": "Most sandboxes at once.",
    "sandboxes": "That exist now.",
    "memory_total": "Bytes that may be promised to sandboxes.",
    "memory_promised": "Bytes: the sum of their limits.",
    "disk_total": "Bytes that may be promised to sandboxes.",
    "disk_promised": "Bytes: the sum of their limits.",
    "layout": "Where everything is, below the data directory.",
    "pool": "What it makes ahead of requests.",
    "max_sandboxes": "At once; one more is `admission_refused`.",
    "scratch_most": "Bytes that `scratch_share` may come to.",
    "segment_bytes": "After which a segment of the record is sealed.",
    "tls_cert": "Certificate chain for `listen`, PEM.",
    "tls_key": "Its private key, PEM.",
}
"""For fields whose name says nearly all, so that the code says no more."""


def settings(name: str, module: Any = None) -> list[str]:
    """Rows of one class: field, type, default, meaning."""
    source = ast.parse(inspect.getsource(module or DESCRIBED[name]))
    body = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == name).body
    return [
        _row(name, field, following)
        for field, following in zip(body, [*body[1:], None], strict=True)
        if _is_field(field)
    ]


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign)


def _row(cls: str, field: ast.stmt, following: ast.stmt | None) -> str:
    assert isinstance(field, ast.AnnAssign)
    name = ast.unparse(field.target)
    doc = ""
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        doc = " ".join(str(following.value.value).split())
    default = ast.unparse(field.value) if field.value else "required"
    kind = ast.unparse(field.annotation).replace("|", "or").replace("_RawPath", "bytes")
    return f"| `{name}` | {kind} | {default} | {doc or SHORT.get(f'{cls}.{name}') or SHORT.get(name, '')} |"
