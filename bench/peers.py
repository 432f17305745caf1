"""What the benches compare with: crun command by command, `podman run --rm`, both on the same tiny root file system.

They run in a mount namespace without the host's second cgroup hierarchy: crun 1.8 refuses a hybrid host otherwise. The
process that runs them (`python -m bench.peers DIR`) reads a peer's name a line and answers with milliseconds, so that
a bench can take turns between them and barchan.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HYBRID = Path("/sys/fs/cgroup/unified")
LIMITS = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]


class Peers:
    """The client's side of the peers' process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, name: str) -> dict[str, float]:
        """Milliseconds of each step of one round, with the whole as `cycle`."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peers ended while running {name}; see above")
        steps: dict[str, float] = json.loads(answer)
        return steps


@contextmanager
def peers(rootfs: Path, scratch: Path) -> Iterator[Peers]:
    """Start them. `rootfs` is not changed; `scratch` takes their stores."""
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "bench.peers", str(rootfs), str(scratch)]
    leave = f"umount {HYBRID} || exit 9; " if HYBRID.is_dir() else ""
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{leave}exec "$@"', "sh", *command]
    with subprocess.Popen(private, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Peers(process)
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait(60)
            shutil.rmtree(scratch, ignore_errors=True)


def timed(argv: list[str], cwd: Path, quiet: bool = False) -> float:
    """Run to the end, in milliseconds. The output of `crun create` must not be a pipe: the container keeps it open."""
    error = subprocess.DEVNULL if quiet else None
    started = time.perf_counter()
    done = subprocess.run(argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=error, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: exit code {done.returncode}")
    return (time.perf_counter() - started) * 1e3


class Crun:
    """create, start, exec, kill, delete: what a daemon on top of an OCI runtime issues."""

    def __init__(self, rootfs: Path, scratch: Path) -> None:
        self._bundle = scratch / "bundle"
        self._bundle.mkdir()
        self._state = scratch / "crun"
        self._rounds = 0
        self._crun("spec")
        path = self._bundle / "config.json"
        config = json.loads(path.read_text())
        config["root"] = {"path": str(rootfs), "readonly": True}
        config["process"] |= {"args": ["/bin/sleep", "1000"], "terminal": False}
        config["process"].pop("rlimits", None)
        config["linux"].pop("resources", None)
        config["linux"]["cgroupsPath"] = f"/barchan-bench-crun-{os.getpid()}"
        path.write_text(json.dumps(config))

    def _crun(self, *argv: str) -> float:
        return timed(["crun", "--root", str(self._state), *argv], self._bundle)

    def __call__(self) -> dict[str, float]:
        self._rounds += 1
        name = f"bench-{os.getpid()}-{self._rounds}"
        steps = {
            "create": self._crun("create", "--bundle", ".", name),
            "start": self._crun("start", name),
            "exec": self._crun("exec", name, "/bin/true"),
            "kill": self._crun("kill", name, "KILL"),
            "delete": self._crun("delete", "--force", name),
        }
        return steps | {"cycle": sum(steps.values()), "first": steps["create"] + steps["start"] + steps["exec"]}


class Podman:
    """`podman run --rm` of `true`, without a network of its own making."""

    def __init__(self, rootfs: Path, scratch: Path) -> None:
        self._cwd = scratch
        self._podman = ["podman", "--root", str(scratch / "store"), "--runroot", str(scratch / "runroot")]
        self._podman += ["--cgroup-manager=cgroupfs", "--events-backend=none", "--runtime=crun"]
        archive = scratch / "rootfs.tar"
        subprocess.run(["tar", "-C", str(rootfs), "-cf", str(archive), "."], check=True)
        timed([*self._podman, "import", str(archive), "tiny"], scratch, quiet=True)

    def __call__(self) -> dict[str, float]:
        return {
            "cycle": timed([*self._podman, "run", "--rm", "--network=none", *LIMITS, "tiny", "/bin/true"], self._cwd)
        }


def main() -> None:
    rootfs, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    rounds: dict[str, Callable[[], dict[str, float]]] = {
        "crun": Crun(rootfs, scratch),
        "podman": Podman(rootfs, scratch),
    }
    for line in sys.stdin:
        print(json.dumps(rounds[line.strip()]()), flush=True)


if __name__ == "__main__":
    main()
