"""Environments of tasks, as benchmarks for agents have them, built from Dockerfiles on a Debian with Python."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from barchan import Client, Limits
from barchan.builds.build import BuildOrder, build
from barchan.builds.context import LocalContext, read_ignore
from barchan.builds.dockerfile import parse
from barchan.builds.report import BuildResult
from tests.e2e.conftest import MIB
from tests.e2e.test_build import Told

LIMITS = Limits(memory=512 * MIB, pids=256, disk=256 * MIB)
FILES = {
    "repo/calc/__init__.py": "",
    "repo/calc/core.py": "def add(a, b):\n    return a + b\n",
    "repo/tests/test_core.py": "import unittest\nfrom calc.core import add\n\nclass T(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n",
    "repo/.git/HEAD": "ref: refs/heads/main\n",
    "repo/build/junk.o": "junk",
    "app/__main__.py": "import sys\nprint('app', *sys.argv[1:])\n",
    "task.yaml": "instruction: fix it\n",
    ".dockerignore": "**/.git\n**/build\n*.md\n",
}
TASKS = {
    "repository": """\
ARG BASE
FROM $BASE
ENV PYTHONDONTWRITEBYTECODE=1 \\
    PYTHONPATH=/testbed
RUN useradd --create-home --shell /bin/bash agent
WORKDIR /testbed
COPY --chown=agent:agent repo/ .
RUN <<EOT
set -e
python3 -m unittest discover -s tests 2>&1 | tee /var/log/before.txt
test ! -e .git && test ! -e build
EOT
USER agent
RUN touch calc/mine && python3 -c 'import calc.core'
CMD ["python3", "-m", "unittest", "discover", "-s", "tests"]
""",
    "terminal": """\
ARG BASE
FROM $BASE
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /app
COPY task.yaml ./
COPY <<-"SCRIPT" /usr/local/bin/check
	#!/bin/bash
	grep -q "instruction" /app/task.yaml && echo "$0 ok"
	SCRIPT
RUN chmod +x /usr/local/bin/check && check && seq 100000 | sort -R --random-source=/dev/zero | md5sum > sum
RUN <<EOT
#!/usr/bin/env python3
import pathlib
pathlib.Path("data").mkdir()
for number in range(50):
    pathlib.Path(f"data/{number}.txt").write_text(str(number))
EOT
ENTRYPOINT ["/usr/local/bin/check"]
""",
    "stages": """\
ARG BASE
FROM $BASE AS compile
WORKDIR /src
COPY app app
COPY repo/calc app/calc
RUN python3 -m compileall -q app && python3 -m zipapp app -o /app.pyz

FROM $BASE AS final
COPY --from=compile --chmod=755 /app.pyz /opt/app/
USER nobody
WORKDIR /tmp
RUN python3 /opt/app/app.pyz built
""",
}
SAID = {
    "repository": ("cat /var/log/before.txt | tail -1; stat -c %U calc/mine calc; id -un", "OK\nagent\nagent\nagent\n"),
    "terminal": ("check; ls data | wc -l; wc -c <sum", "/usr/local/bin/check ok\n50\n36\n"),
    "stages": ("python3 /opt/app/app.pyz run; id -un; ls /src 2>/dev/null; pwd", "app run\nnobody\n/tmp\n"),
}


async def built(client: Client, root: Path, base: str, what: str) -> BuildResult:
    order = BuildOrder(
        dockerfile=parse(TASKS[what].encode()),
        context=LocalContext(root, read_ignore(root, None)),
        name=f"task-{what}",
        build_args={"BASE": base},
        network="deny",
        limits=LIMITS,
    )
    return await build(client, order, Told())


@pytest.mark.parametrize("what", TASKS)
async def test_a_task(client: Client, debian_env: str, tmp_path: Path, what: str) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "repo/calc/run").write_text(str(tmp_path))
    (tmp_path / "task.yaml").write_text(f"instruction: {tmp_path}\n")
    first = await built(client, tmp_path, debian_env, what)
    async with await client.create(first.name, limits=LIMITS) as sandbox:
        command, expected = SAID[what]
        assert (await sandbox.run(command, check=True)).text == expected
    began = time.monotonic()
    again = await built(client, tmp_path, debian_env, what)
    assert again.cached == len(again.steps) and again.digest == first.digest and time.monotonic() - began < 2
    (tmp_path / "repo/calc/core.py").write_text("def add(a, b):\n    return b + a\n")
    (tmp_path / "task.yaml").write_text("instruction: another\n")
    changed = await built(client, tmp_path, debian_env, what)
    fresh = [step.text.split()[0] for step in changed.steps if not step.cached]
    assert (
        fresh
        == {
            "repository": ["COPY", "RUN", "RUN"],
            "terminal": ["COPY", "COPY", "RUN", "RUN"],
            "stages": ["COPY", "RUN", "COPY", "WORKDIR", "RUN"],
        }[what]
    )
