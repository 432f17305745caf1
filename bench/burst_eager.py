"""The burst as it is done without layers on demand: skopeo fetches every image, umoci unpacks it, then containers start.

They are the cheapest that there are: an overlay over the unpacked tree, namespaces for mounts and processes, chroot.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

from bench.burst_images import REPOSITORY, Made

_CONTAINER = """
mkdir -p $2/u $2/w $2/m && mount -t overlay overlay -o lowerdir=$1,upperdir=$2/u,workdir=$2/w,volatile $2/m &&
mount -t proc proc $2/m/proc && exec chroot $2/m /usr/bin/env -i PATH=/usr/bin:/bin PYTHONPATH=/opt/site python3 -c "$3"
"""


def prepare(work: Path, images: Sequence[Made], port: int) -> None:
    """From the registry at `port` to a tree for each image. One is fetched while others are unpacked; a shared layer is
    fetched once."""
    (work / "trees").mkdir(parents=True)
    with ThreadPoolExecutor(2) as unpacking:
        unpacked = []
        for image in images:
            source = f"docker://127.0.0.1:{port}/{REPOSITORY}:{image.tag}"
            _run("skopeo", "copy", "-q", "--src-tls-verify=false", source, f"oci:{work}/layout:{image.tag}")
            unpacked.append(unpacking.submit(_unpack, work, image))
        for one in unpacked:
            one.result()


def _unpack(work: Path, image: Made) -> None:
    _run("umoci", "raw", "unpack", "--image", f"{work}/layout:{image.tag}", str(work / "trees" / image.tag))


def run(work: Path, images: Sequence[Made], containers: int, at_once: int) -> None:
    with ThreadPoolExecutor(at_once) as room:
        numbered = enumerate(islice(cycle(images), containers))
        for one in [room.submit(_container, work, image, number) for number, image in numbered]:
            one.result()


def _container(work: Path, image: Made, number: int) -> None:
    place, tree = work / f"containers/{number}", work / "trees" / image.tag
    new = ("unshare", "--mount", "--pid", "--fork", "--propagation", "private")
    _run(*new, "sh", "-c", _CONTAINER, "sh", str(tree), str(place), image.recipe.test)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{argv[0]}: {done.returncode}: {done.stderr.decode()[-500:]}")
