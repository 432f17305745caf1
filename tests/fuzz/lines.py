"""`python -m tests.fuzz.lines TARGET FILE… -- CORPUS…` prints `[lines, covered]` of the functions in those files of barchan.

Lines of modules and class bodies run at import and say nothing, so they do not count.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import barchan

PACKAGE = Path(barchan.__file__).parent


def functions(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x2:  # CO_NEWLOCALS: a function, not a class body
                yield constant
            yield from functions(constant)


def lines_of(file: Path) -> set[tuple[str, int]]:
    codes = functions(compile(file.read_text(), str(file), "exec"))
    return {
        (str(file), line) for code in codes for _, _, line in code.co_lines() if line and line > code.co_firstlineno
    }


def replay(target: str, files: list[Path], corpora: list[Path]) -> set[tuple[str, int]]:
    check = importlib.import_module(f"tests.fuzz.{target}").check
    names, seen = set(map(str, files)), set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in names:
            return None
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    for corpus in corpora:
        for path in sorted(corpus.iterdir()):
            check(path.read_bytes())
    sys.settrace(None)
    return seen


def main(words: list[str]) -> None:
    middle = words.index("--")
    files = [PACKAGE / name for name in words[1:middle]]
    lines = {line for file in files for line in lines_of(file)}
    covered = lines & replay(words[0], files, [Path(word) for word in words[middle + 1 :]])
    print(json.dumps([len(lines), len(covered)]))


if __name__ == "__main__":
    main(sys.argv[1:])
