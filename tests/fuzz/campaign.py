"""One run of a fuzz target from its kept corpus, and what the corpus reaches."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.targets import ROOT, Target, run

SEEDED_SECONDS = 60
_PROBE = "int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n);" + (
    "int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return n && !d; }"
)


@dataclass(frozen=True)
class Coverage:
    """Of the parser's own lines."""

    lines: int
    covered: int

    @property
    def percent(self) -> float:
        return 100 * self.covered / self.lines

    def __str__(self) -> str:
        return f"{self.percent:.1f} % of {self.lines} lines"


def lacking(target: Target, place: Path) -> str:
    """Why this host cannot run the target, or an empty string."""
    if not target.native:
        probe = subprocess.run([sys.executable, "-c", "import atheris"], capture_output=True, check=False)
        return "" if probe.returncode == 0 else "the Python package atheris is missing"
    if not (shutil.which("clang") and shutil.which("llvm-cov") and shutil.which("llvm-profdata")):
        return "clang or llvm is missing"
    command = ["clang", "-fsanitize=fuzzer,address", "-xc", "-", "-o", str(place / "probe")]
    probe_native = subprocess.run(command, input=_PROBE, capture_output=True, text=True, check=False)
    return "" if probe_native.returncode == 0 else f"clang cannot build fuzzers: {probe_native.stderr.strip()[-200:]}"


def fuzz(target: Target, build: Path, seconds: int, *options: str) -> str:
    """Raises `AssertionError` with the program's words when it found something. What is new is left in build/new."""
    new = build / "new"
    new.mkdir(exist_ok=True)
    limits = [f"-max_total_time={seconds}", f"-artifact_prefix={build}/", "-print_final_stats=1"]
    return run([*target.command(build), *limits, *options, str(new), str(target.corpus)])


def summary(output: str) -> str:
    """libFuzzer's last counters."""
    counters = re.findall(r"cov: \d+ ft: \d+ corp: \S+", output)
    runs = re.findall(r"Done (\d+) runs", output)
    return f"{runs[-1] if runs else '?'} runs, {counters[-1] if counters else 'no counters'}"


def finds_seeded_bug(target: Target, place: Path) -> bool:
    """Whether a build with the bug is caught in time. Raises `AssertionError` when the kept corpus alone hits it."""
    sources, build = target.seeded(place / "sources"), place / "build"
    target.build(build, sources)
    command = [*target.command(build), f"-artifact_prefix={place}/found-"]
    run([*command, "-runs=0", str(target.corpus)])
    (place / "new").mkdir()
    limits = ["-seed=1", f"-max_total_time={SEEDED_SECONDS}", str(place / "new"), str(target.corpus)]
    done = subprocess.run([*command, *limits], cwd=ROOT, capture_output=True, check=False)
    return done.returncode != 0 and any(place.glob("found-crash-*"))


def coverage(target: Target, build: Path, *corpora: Path) -> Coverage:
    """What the inputs in these directories reach."""
    if target.native:
        return _native_coverage(target, build, *corpora)
    command = [sys.executable, "-m", "tests.fuzz.lines", target.name, *target.parsers, "--", *map(str, corpora)]
    lines, covered = json.loads(run(command, PYTHONPATH=f"{ROOT / 'src'}:{ROOT}").splitlines()[-1])
    return Coverage(lines, covered)


def _native_coverage(target: Target, build: Path, *corpora: Path) -> Coverage:
    program, raw, merged = build / f"{target.name}-coverage", build / "raw", build / "merged"
    run([str(program), "-runs=0", *map(str, corpora)], LLVM_PROFILE_FILE=str(raw))
    run(["llvm-profdata", "merge", "-o", str(merged), str(raw)])
    report = json.loads(run(["llvm-cov", "export", "-summary-only", str(program), f"-instr-profile={merged}"]))
    found = [
        file["summary"]["lines"] for file in report["data"][0]["files"] if _is_parser(target, Path(file["filename"]))
    ]
    assert len(found) == len(target.parsers), report
    return Coverage(sum(lines["count"] for lines in found), sum(lines["covered"] for lines in found))


def _is_parser(target: Target, file: Path) -> bool:
    return file.name in target.parsers and file.resolve().parent.name != "fuzz"


def keep(target: Target, build: Path) -> None:
    """Replaces the kept corpus by the fewest of its inputs, and of what was found, that reach as much.

    Those to which the seeded bug falls are left out: to find it must take fuzzing.
    """
    merged = build / "kept"
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir()
    run([*target.command(build), "-merge=1", "-use_counters=0", str(merged), str(target.corpus), str(build / "new")])
    _leave_out_bug(target, build / "seeded", merged)
    shutil.rmtree(target.corpus, ignore_errors=True)
    shutil.copytree(merged, target.corpus)


def _leave_out_bug(target: Target, place: Path, corpus: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    target.build(place, target.seeded(place / "sources"))
    while True:  # libFuzzer stops at the first that breaks something, and names each before it runs it
        command = [*target.command(place), *map(str, corpus.iterdir())]
        done = subprocess.run(command, cwd=place, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            return
        Path(re.findall(r"^Running: (.+)$", done.stderr.decode(errors="replace"), re.MULTILINE)[-1]).unlink()
