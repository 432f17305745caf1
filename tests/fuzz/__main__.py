"""`python -m tests.fuzz TARGET [SECONDS] [--keep]`: see docs/how-to/fuzz.md. Inputs that break something stay in native/build/fuzz."""

from __future__ import annotations

import sys

from tests.fuzz.campaign import coverage, fuzz, keep, lacking, summary
from tests.fuzz.targets import ROOT, TARGETS


def wrong(given: list[str]) -> str:
    """What is wrong with the arguments; empty if nothing."""
    if not given:
        return "TARGET is missing"
    if given[0] not in TARGETS:
        return f"there is no target {given[0]!r}"
    if len(given) > 2 or not (given[1:] or ["1"])[0].isdecimal():
        return f"{' '.join(given[1:])!r} is no number of seconds"
    return ""


def main(words: list[str]) -> int:
    given = [word for word in words if word != "--keep"]
    if why := wrong(given):
        print(f"fuzz: {why}\nusage: fuzz TARGET [SECONDS] [--keep]\ntargets: {' '.join(TARGETS)}", file=sys.stderr)
        return 2
    target, seconds = TARGETS[given[0]], int((given[1:] or ["60"])[0])
    build = ROOT / "native/build/fuzz" / target.name
    build.mkdir(parents=True, exist_ok=True)
    if reason := lacking(target, build):
        print(f"fuzz: {reason}", file=sys.stderr)
        return 1
    target.build(build)
    try:
        print(f"{target.name}: {summary(fuzz(target, build, seconds))}")
    except AssertionError as found:
        print(found, file=sys.stderr)
        return 1
    if "--keep" in words:
        keep(target, build)
    print(f"{target.name}: the kept corpus reaches {coverage(target, build, target.corpus)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
