"""A Python target as a libFuzzer program: `python -m tests.fuzz.python_target NAME SCRIPT [LIBFUZZER OPTIONS] [CORPUS…]`.

SCRIPT is how libFuzzer starts the same again, which it does to merge corpora.

Atheris counts the edges of the modules that decode; without instrumentation it would be blind.
"""

from __future__ import annotations

import importlib
import sys

import atheris

INSTRUMENTED = ["barchan.wire", "barchan.node.channel", "barchan.node.operation", "barchan.sdk._tree"]


def main() -> None:
    name, *command = sys.argv[1:]
    with atheris.instrument_imports(include=INSTRUMENTED):
        target = importlib.import_module(f"tests.fuzz.{name}")
        mutate = importlib.import_module("tests.fuzz.mutate").mutate
    atheris.Setup(command, target.check, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
