"""Forty images as projects have them: one Debian with Python, and a set of packages from PyPI with their compiled modules.

They are made once and kept as the storage of a registry in a cache outside the clone, by what went into them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from barchan.layers import content
from barchan.layers.attach import attach
from barchan.layers.bootstrap import bootstrap
from barchan.layers.store import LayerStore
from tests.images import CONFIG, MANIFEST, TAR, Layout
from tests.registry import Registry

CACHE = Path("/var/cache/barchan/bench-images")
MOST_CACHE = 12 << 30
"""Bytes. When the cache holds more, it is made anew."""
LEAST = 200 << 20
"""Bytes of the files of one image."""
REPOSITORY = "burst"
_PIECE = 1 << 20


@dataclass(frozen=True)
class Recipe:
    packages: str
    test: str
    """Python: what the image's own test command does."""

    @property
    def name(self) -> str:
        return self.packages.split()[0].lower()


RECIPES = tuple(
    Recipe(*pair)
    for pair in (
        ("scipy numpy", "import numpy, scipy.linalg as l; a = numpy.eye(60) * 2; assert l.det(a) == 2**60"),
        ("pandas", "import pandas as p; assert p.DataFrame({'a': [1, 2]}).groupby('a').size().sum() == 2"),
        ("scikit-learn", "from sklearn.linear_model import Ridge; Ridge().fit([[0], [1]], [0, 1])"),
        ("sympy networkx numpy", "from sympy import *; x = Symbol('x'); assert integrate(2 * x, x) == x**2"),
        ("django pillow numpy", "import django.conf, PIL.Image; django.conf.settings.configure(); django.setup()"),
        ("matplotlib", "import matplotlib; matplotlib.use('agg'); from matplotlib import pyplot; pyplot.plot([1])"),
        ("statsmodels", "import statsmodels.api as s; s.OLS([1.0, 2.0, 3.0], [1, 2, 3]).fit()"),
        ("pyarrow", "import pyarrow.compute as c, pyarrow as p; assert c.sum(p.array([1, 2])).as_py() == 3"),
        ("polars", "import polars as p; assert p.DataFrame({'a': [1, 2]})['a'].sum() == 3"),
        ("duckdb numpy", "import duckdb; assert duckdb.sql('select 42').fetchall() == [(42,)]"),
        ("opencv-python-headless", "import cv2, numpy; cv2.blur(numpy.zeros((9, 9)), (3, 3))"),
        ("scikit-image", "import skimage.filters, numpy; skimage.filters.gaussian(numpy.zeros((9, 9)))"),
        ("numba", "import numba; assert numba.njit(lambda x: x + 1)(1) == 2"),
        ("xarray", "import xarray; assert xarray.DataArray([1, 2]).sum() == 3"),
        ("h5py", "import h5py, io; h5py.File(io.BytesIO(), 'w')['a'] = [1]"),
        ("scrapy numpy", "import scrapy; assert scrapy.Selector(text='<b>x</b>').css('b::text').get() == 'x'"),
        (
            "sqlalchemy pandas",
            "import sqlalchemy as s; s.create_engine('sqlite://').connect().execute(s.text('select 1'))",
        ),
        (
            "boto3 numpy",
            "import boto3; boto3.client('s3', region_name='x', aws_access_key_id='x', aws_secret_access_key='x')",
        ),
        ("grpcio grpcio-tools numpy", "import grpc, grpc_tools.protoc; grpc.insecure_channel('localhost:1').close()"),
        ("ansible-core numpy pandas", "import ansible.playbook; ansible.playbook.Playbook"),
        ("plotly pandas", "import plotly.graph_objects as g; g.Figure(g.Bar(y=[1])).to_json()"),
        ("bokeh", "from bokeh.plotting import figure; figure().line([1, 2], [1, 2])"),
        (
            "dask distributed pandas",
            "import dask.dataframe, pandas; dask.dataframe.from_pandas(pandas.DataFrame({'a': [1]}))",
        ),
        ("nltk scikit-learn", "from nltk.stem import PorterStemmer; assert PorterStemmer().stem('running') == 'run'"),
        ("gensim", "from gensim.corpora import Dictionary; Dictionary([['a', 'b']])"),
        ("lightgbm", "import lightgbm, numpy; lightgbm.Dataset(numpy.zeros((9, 2)), [0] * 9).construct()"),
        ("xgboost-cpu", "import xgboost, numpy; xgboost.DMatrix(numpy.zeros((9, 2)))"),
        ("onnxruntime", "import onnxruntime; assert onnxruntime.get_available_providers()"),
        ("transformers numpy", "from transformers import BertConfig; BertConfig()"),
        ("geopandas", "import geopandas, shapely; geopandas.GeoSeries([shapely.Point(1, 2)]).buffer(1)"),
        ("astropy", "from astropy import units; assert (1 * units.km).to(units.m).value == 1000"),
        ("biopython pandas", "from Bio.Seq import Seq; assert Seq('ATG').translate() == 'M'"),
        ("paramiko pandas", "import paramiko; paramiko.ECDSAKey.generate()"),
        ("jupyterlab", "import jupyterlab, nbformat.v4 as n; n.new_notebook()"),
        ("sphinx pandas", "import sphinx.application, docutils.core as d; d.publish_string('*x*')"),
        ("mypy pylint pandas", "import mypy.api; assert mypy.api.run(['--version'])[2] == 0"),
        ("fastapi sqlalchemy pandas", "import fastapi; fastapi.FastAPI().openapi()"),
        ("tables", "import tables; tables.Float64Atom()"),
        ("cvxpy", "import cvxpy as c; x = c.Variable(); c.Problem(c.Minimize((x - 1) ** 2)).solve()"),
        ("ortools", "from ortools.sat.python import cp_model as c; c.CpSolver().solve(c.CpModel())"),
    )
)


@dataclass(frozen=True)
class Made:
    """One image at the registry."""

    recipe: Recipe
    tag: str
    size: int
    """Bytes of the tars of its layers."""
    shared: int
    """Of those, bytes of the layer that all have."""
    packed: int
    """Bytes of its own blob."""

    @property
    def command(self) -> list[str]:
        return ["python3", "-c", self.recipe.test]


def make(registry: Registry, recipes: Sequence[Recipe], say: Callable[[str], None]) -> list[Made]:
    """Push what is not there yet. Needs the network when something is not; some 30 s an image."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=registry.directory) as name:
        work = Path(name)
        base = _base(registry.directory, work, say)
        return [_made(registry, recipe, base, work, say) for recipe in recipes]


def bounded(cache: Path = CACHE) -> Path:
    """The cache, emptied if it has grown too large."""
    if sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) > MOST_CACHE:
        shutil.rmtree(cache)
    cache.mkdir(parents=True, exist_ok=True)
    return cache


@dataclass(frozen=True)
class _Blob:
    path: Path
    digest: str
    """Of the tar."""
    size: int
    """Of the tar."""

    def descriptor(self) -> dict[str, Any]:
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"mediaType": f"{TAR}+gzip", "digest": f"sha256:{digest}", "size": self.path.stat().st_size}


def _base(cache: Path, work: Path, say: Callable[[str], None]) -> _Blob:
    """The tar of a bootstrapped Debian whose Python is that of the host, so that modules are compiled for it."""
    suite = "debian-12" if sys.version_info < (3, 13) else "debian-13"
    image = bootstrap(LayerStore(work / "store"), suite, progress=say)
    found = next(cache.glob(f"base-{image.digest[7:23]}-*.tar.gz"), None)
    if found:
        _, _, digest, size = found.name.removesuffix(".tar.gz").split("-")
        return _Blob(found, digest, int(size))
    mount = attach(image.path / content.IMAGE, image.path / content.DATA)
    try:
        made = _packed(f"/proc/self/fd/{mount}", work / "base", mount)
    finally:
        os.close(mount)
    return _Blob(
        made.path.rename(cache / f"base-{image.digest[7:23]}-{made.digest}-{made.size}.tar.gz"), made.digest, made.size
    )


def _made(registry: Registry, recipe: Recipe, base: _Blob, work: Path, say: Callable[[str], None]) -> Made:
    tag = f"{recipe.name}-{hashlib.sha256(repr((recipe, base.digest)).encode()).hexdigest()[:12]}"
    note = registry.directory / f"{tag}.json"
    if not note.exists():
        say(f"making {recipe.packages}")
        with _tree(recipe) as tree:
            own = _packed(str(tree), work / "own")
        _push(registry, tag, recipe, [base, own], work)
        packed = own.path.stat().st_size
        own.path.unlink()
        note.write_text(json.dumps({"size": base.size + own.size, "shared": base.size, "packed": packed}))
    made = Made(recipe, tag, **json.loads(note.read_text()))
    if made.size < LEAST:
        raise RuntimeError(f"{tag} has {made.size >> 20} MiB; images of at least {LEAST >> 20} MiB were promised")
    return made


@contextmanager
def _tree(recipe: Recipe) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="barchan-bench-image-", dir="/var/tmp") as name:
        site = Path(name) / "opt/site"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-warn-conflicts", "--target", str(site)]
        command += ["--only-binary", ":all:", "--root-user-action", "ignore", *recipe.packages.split()]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        os.chmod(name, 0o755)
        yield Path(name)


def _packed(tree: str, target: Path, fd: int | None = None) -> _Blob:
    """The gzipped tar of a tree, with the digest of the tar."""
    command = ["tar", "-C", tree, "--sort=name", "--numeric-owner", "--xattrs", "-c", "."]
    pass_fds = [] if fd is None else [fd]
    path, digest, size = target.with_suffix(".tar.gz"), hashlib.sha256(), 0
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=pass_fds) as process,
        path.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1, mtime=0) as out,
    ):
        assert process.stdout
        while piece := process.stdout.read(_PIECE):
            digest.update(piece)
            size += len(piece)
            out.write(piece)
    if process.returncode:
        raise RuntimeError(f"tar ended with {process.returncode}")
    return _Blob(path, digest.hexdigest(), size)


def _push(registry: Registry, tag: str, recipe: Recipe, layers: Sequence[_Blob], work: Path) -> None:
    with tempfile.TemporaryDirectory(dir=work) as name:
        layout = Layout(Path(name) / "image")
        described = [layer.descriptor() for layer in layers]
        for layer, found in zip(layers, described, strict=True):
            (layout.root / "blobs/sha256" / found["digest"].removeprefix("sha256:")).hardlink_to(layer.path)
        diffs = [f"sha256:{layer.digest}" for layer in layers]
        settings = {"Env": ["PATH=/usr/bin:/bin", "PYTHONPATH=/opt/site"], "Cmd": ["python3", "-c", recipe.test]}
        config = {"os": "linux", "architecture": "amd64", "config": settings}
        config["rootfs"] = {"type": "layers", "diff_ids": diffs}
        value = {"schemaVersion": 2, "mediaType": MANIFEST, "config": layout.json(config, CONFIG), "layers": described}
        layout.entries.append(
            {**layout.json(value, MANIFEST), "annotations": {"org.opencontainers.image.ref.name": tag}}
        )
        layout.index()
        source, target = f"oci:{layout.root}:{tag}", f"docker://127.0.0.1:{registry.port}/{REPOSITORY}:{tag}"
        subprocess.run(("skopeo", "copy", "-q", "--dest-tls-verify=false", source, target), check=True)
