"""RUN: a program in the sandbox, its output told as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from barchan.builds.report import Report
from barchan.builds.steps import Run
from barchan.errors import CommandFailed

if TYPE_CHECKING:
    from barchan.sdk import Sandbox
    from barchan.spec import ExecResult

OUTPUT_LIMIT = 1 << 30
_LAST = 2000
"""Bytes of output that an error tells."""


async def run_step(sandbox: Sandbox, step: Run, report: Report) -> None:
    """Raises `CommandFailed`, whose hint is the end of the output."""
    if step.script is not None:
        await sandbox.files.write(step.script.name, step.script.content, mode=0o755, user="root")
    process = await sandbox.start(
        step.argv,
        cwd=step.workdir,
        env=step.env,
        secrets=step.hidden,
        user=step.user or None,
        merge_stderr=True,
        output_limit=OUTPUT_LIMIT,
    )
    last = b""
    async for data in process.stdout:
        report.output(data)
        last = (last + data)[-_LAST:]
    result = await process.wait()
    if result.outcome != "exited" or result.exit_code != 0:
        text = last.decode("utf-8", "replace").strip()
        raise CommandFailed(f"RUN {how(result)}", hint="\n".join(text.splitlines()[-10:]), result=result)


def how(result: ExecResult) -> str:
    """It ended."""
    if result.limit:
        return f"ran into the sandbox's limit: {result.limit}"
    if result.outcome == "exited":
        return f"ended with exit code {result.exit_code}"
    if result.outcome == "signaled":
        return f"was ended by signal {result.signal}"
    return {"not_found": "found no such program", "not_executable": "cannot execute that program"}.get(
        result.outcome, f"did not end well: {result.outcome}"
    )
