"""Writes the synchronous client, and its tests, from the asynchronous ones.

    python -m tests.repo.unasync            write the files
    python -m tests.repo.unasync --check    fail when one of them is not what would be written

A file is changed by regular expressions and then formatted. What cannot be had that way is written by hand twice:
`sdk/_compat.py`, `sdk/_socket.py` and `wire/futures.py` have counterparts in `sdk/_sync/`, and `tests/rig.py` one in
`tests/rig_sync.py`. A rule that changes nothing is an error.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SDK, WIRE = "src/barchan/sdk", "src/barchan/wire"
MODULES = ("client", "connection", "exec", "files", "many", "process", "sandbox", "shell", "terminal")
FILES = {
    "src/barchan/__init__.py": "src/barchan/sync.py",
    f"{SDK}/__init__.py": f"{SDK}/_sync/__init__.py",
    **{f"{SDK}/_{name}.py": f"{SDK}/_sync/_{name}.py" for name in MODULES},
    f"{WIRE}/link.py": f"{SDK}/_sync/_link.py",
    f"{WIRE}/streams.py": f"{SDK}/_sync/_streams.py",
    f"{WIRE}/many.py": f"{SDK}/_sync/_arrivals.py",
}
JOURNEYS = (
    "cases_commands",
    "cases_ends",
    "cases_files",
    "cases_hostile",
    "cases_images",
    "cases_limits",
    "commands",
    "limits",
    "restart",
    "shell",
    "terminal",
)
TESTS = {
    "tests/contract/test_sdk.py": "tests/contract/sync/test_sdk.py",
    **{f"tests/e2e/test_{name}.py": f"tests/e2e/sync/test_{name}.py" for name in JOURNEYS},
}
HEAD = "# Generated from {} by `python -m tests.repo.unasync`: edit that file, not this one.\n"

KEYWORDS = ("and", "assert", "await", "else", "if", "in", "not", "or", "return", "yield")
Rules = dict[str, str]
"""Regular expressions and what comes in their place, applied in this order."""

WORDS: Rules = {
    r"\basync (def|with|for)\b": r"\1",
    r"\bawait ([\w.]+)(?![\w.(\[])": r"\1.wait()",
    r"\bawait ": "",
    r"\b__a(enter|exit|iter|next)__\b": r"__\1__",
    r"\bStopAsyncIteration\b": "StopIteration",
    r"\bAsync(Iterator|Iterable)\b": r"\1",
    r"\bAwaitable\[(\w+)\]": r"\1",
    r"\ban async iterable\b": "an iterable",
}
HOMES: Rules = {
    r"\bbarchan\.sdk import _compat\b": "barchan.sdk._sync import _compat",
    rf"\bbarchan\.sdk\._({'|'.join((*MODULES, 'socket'))})\b": r"barchan.sdk._sync._\1",
    r"\bbarchan\.wire\.(futures|link|streams)\b": r"barchan.sdk._sync._\1",
    r"\bbarchan\.wire\.many\b": "barchan.sdk._sync._arrivals",
}
PUBLIC: Rules = {
    r"(?m)^    from barchan\.sdk import\b": "    from barchan.sdk._sync import",
    r"\"barchan\.sdk\"(?=[,)])": '"barchan.sdk._sync"',
    r"barchan: self-hosted sandboxes for AI agents\.": "The names of `barchan`, with a client that blocks instead of being awaited.",
    r"The client library\. Import .*\.": "The client that blocks. Import its names from `barchan.sync`.",
}
TEXTS: Rules = {
    r"Cancelling this call \(also by `asyncio\.timeout`\) cancels": "Interrupting this call (ctrl-C) cancels",
}
CHECKS: Rules = {
    r"\btests\.(rig|contract\.api_site)\b": "tests.rig_sync",
    r"\bbarchan\.sdk import": "barchan.sync import",
    r"(?m)^from barchan import (.*)$": r"from barchan.sync import \1",
    r"(?m), errors$": "\nfrom barchan import errors",
    r"(?s)\n# --- (the command line|the platform alone)\n.*": "",
    r"(PLACE\] \+ \")-": r"\1-sync-",
    r"\ba(next|iter)\(": r"\1(",
}
SYNC_SDK: Rules = {**PUBLIC, **HOMES, **TEXTS, **WORDS}


def main(arguments: list[str]) -> int:
    stale = [(target, text) for target, text in generated().items() if not is_current(target, text)]
    for target, text in stale:
        if arguments == ["--check"]:
            print(f"{target} is stale: run python -m tests.repo.unasync", file=sys.stderr)
        else:
            (ROOT / target).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / target).write_text(text)
    return 1 if stale and arguments == ["--check"] else 0


def generated() -> dict[str, str]:
    """Every generated file by its path. Raises `ValueError` for a rule that changed nothing anywhere."""
    unused = {*SYNC_SDK, *CHECKS}
    made = {**converted(FILES, SYNC_SDK, unused), **converted(TESTS, {**CHECKS, **WORDS}, unused)}
    if unused:
        raise ValueError(f"rules that change nothing: {sorted(unused)}")
    return made


def converted(files: dict[str, str], rules: Rules, unused: set[str]) -> dict[str, str]:
    """Rules that changed something are taken out of `unused`."""
    made = {}
    for source, target in files.items():
        text = without_parentheses((ROOT / source).read_text())
        for pattern, replacement in rules.items():
            text, count = re.subn(pattern, replacement, text)
            unused -= {pattern} if count else set()
        made[target] = formatted(HEAD.format(source) + text, target)
    return made


def without_parentheses(text: str) -> str:
    """`(await f(x)).y` as `f(x).y`, and `(await task).y` as `task.wait().y`."""
    lines = text.splitlines(keepends=True)
    for (row, start), width, replacement in sorted(edits(text), reverse=True):
        lines[row - 1] = lines[row - 1][:start] + replacement + lines[row - 1][start + width :]
    return "".join(lines)


def edits(text: str) -> Iterator[tuple[tuple[int, int], int, str]]:
    """Where something goes, how many characters, and what comes instead."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for at, (before, token, after) in enumerate(zip(tokens, tokens[1:], tokens[2:], strict=False), 1):
        is_call = (before.type == tokenize.NAME and before.string not in KEYWORDS) or before.string in (")", "]")
        if is_call or (token.string, after.string) != ("(", "await"):
            continue
        depth, end = 0, at + 2
        while depth or tokens[end].string in (".", "(", "[") or tokens[end].type == tokenize.NAME:
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(tokens[end].string, 0)
            end += 1
        if tokens[end].string == ")":
            yield token.start, len("(await "), ""
            yield tokens[end].start, 1, "" if tokens[end - 1].string == ")" else ".wait()"


def formatted(text: str, target: str) -> str:
    """Without imports that became unused or double, and as `ruff format` has it."""
    text = ruff(
        ["check", "--fix-only", "--unsafe-fixes", "--quiet", "--select", "F401,F811,I001,SIM117,UP028"], text, target
    )
    return ruff(["format"], text, target)


def ruff(options: list[str], text: str, target: str) -> str:
    argv = [str(Path(sys.executable).parent / "ruff"), *options, "--stdin-filename", target, "-"]
    return subprocess.run(argv, input=text, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def is_current(target: str, text: str) -> bool:
    path = ROOT / target
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
