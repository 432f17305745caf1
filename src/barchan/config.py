"""Settings, read once at start, and the layout of the data directory.

DATA/                       0700 root
  token                     bearer token of the API, 0600
  instance                  random name of this installation: names its cgroups
  node.db                   registry (SQLite)
  log/NNNNNNNNNN.seg        trajectory segments
  layers/                   content-addressed layer store and its names; a link to it when nodes share one
  cache/                    of a shared store: images of layers, and where layers are made
  mnt/<digest>              each layer mounted once
  scratch.img, scratch/     btrfs volume that holds the writable trees
  run/                      api.sock, node.sock, lock files, one socket per sandbox
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from barchan.spec import GIB, MIB

T = TypeVar("T")

DEFAULT_DATA = Path("/var/lib/barchan")
MAX_SANDBOXES = 1000
"""Of a node that is not told otherwise."""


def default_data(environ: Mapping[str, str]) -> Path:
    """The data directory where none is named."""
    return Path(os.path.abspath(environ.get("BARCHAN_DATA") or DEFAULT_DATA))


class Layout(msgspec.Struct, frozen=True):
    """Where everything is below one data directory."""

    data: Path

    @property
    def token(self) -> Path:
        return self.data / "token"

    @property
    def instance(self) -> Path:
        return self.data / "instance"

    @property
    def registry(self) -> Path:
        return self.data / "node.db"

    @property
    def log(self) -> Path:
        return self.data / "log"

    @property
    def layers(self) -> Path:
        return self.data / "layers"

    @property
    def cache(self) -> Path:
        return self.data / "cache"

    @property
    def mounts(self) -> Path:
        return self.data / "mnt"

    @property
    def scratch_image(self) -> Path:
        return self.data / "scratch.img"

    @property
    def scratch(self) -> Path:
        return self.data / "scratch"

    @property
    def run(self) -> Path:
        return self.data / "run"

    @property
    def api_socket(self) -> Path:
        """Where clients on this host reach the API."""
        return self.run / "api.sock"

    @property
    def node_socket(self) -> Path:
        """Where the node agent reaches the API."""
        return self.run / "node.sock"


class RegistryAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How registries of images are reached. What is None is as skopeo has it: /etc/containers, and the agent's own login."""

    auth_file: Path | None = None
    """As `docker login`, `podman login` and `skopeo login` write it."""
    registries_conf: Path | None = None
    """Mirrors, and registries without TLS: containers-registries.conf(5)."""
    stall: float = 60.0
    """Seconds without a byte or an answer after which a registry is given up."""


class NetworkAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What sandboxes with an open network have and reach."""

    prefix: IPv4Network = IPv4Network("198.18.0.0/15")
    """Their addresses, two for each, that nothing else which this host reaches has. Must not change while sandboxes live."""
    nameservers: tuple[IPv4Address, ...] = ()
    """Whom they ask for names, three at most. None: those that this host asks, unless they are on loopback."""
    granted: tuple[IPv4Network, ...] = ()
    """Private networks that they may reach besides, as that of a package mirror. Everybody who may create sandboxes reaches them."""
    watch_seconds: float = 30.0
    """How often it is made sure that the packet filter and each sandbox's device are still there."""


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of one node agent."""

    layout: Layout
    name: str
    """Part of every sandbox id; must not change while sandboxes live."""
    kernel: Literal["auto", "reduced"] = "auto"
    """`reduced` forces the path of kernels below 6.13, for tests."""
    max_sandboxes: int = MAX_SANDBOXES
    pool_most: int = 32
    """Containers made ahead of requests, at most; 0 makes none."""
    pool_share: float = 0.01
    """Part of the host's available memory that they may take."""
    memory_group: bool = True
    """False leaves the memory of sandboxes unlimited and uncounted: to measure what the control group costs."""
    memory_share: float = 0.9
    """Part of the host's memory that may be promised to sandboxes, times `memory_overcommit`."""
    memory_overcommit: float = 4.0
    """Sandboxes mostly idle far below their limit."""
    disk_overcommit: float = 64.0
    """Promised bytes of writable disk over the size of the scratch volume."""
    scratch_share: float = 0.3
    """Of the free space of the data directory's file system, when `scratch_bytes` is 0."""
    scratch_most: int = 40 * GIB
    scratch_bytes: int = 0
    """Fully allocated when made, so that a full host disk cannot break the volume."""
    uid_first: int = 0x30000000
    """First of the host user ids given to sandboxes; the one below it is the spawner's."""
    uid_count: int = 65536
    """Host user ids per sandbox; the last of them is its first process's and has no number inside."""
    id_ranges: Path = Path("/run/barchan/ids")
    """Which sandbox of this host holds which ids. All installations on a host must name the same directory."""
    segment_bytes: int = 64 * MIB
    log_bytes: int = 8 * GIB
    """When the segments exceed this, the oldest sealed ones without a live sandbox are removed."""
    log_most: int = 0
    """When those that cannot be removed exceed this, new sandboxes and commands are `node_storage_full`. 0: four times
    `log_bytes`."""
    sandbox_log: int = 0
    """When what is recorded of one live sandbox exceeds this, its new commands are `sandbox_log_full`. 0: half of `log_bytes`."""
    data_mounts: dict[str, Path] = {}
    """Directories of this host that sandboxes may mount read-only, by the names that they know them by."""
    registry: RegistryAccess = RegistryAccess()
    layer_format: Literal["split", "packed"] = "split"
    """Of the layers that images of registries become here. *packed* takes half the room, and computing when it is read; an image
    is then fetched whole from a shared store."""
    pulls: int = 2
    """Images that are fetched and converted at the same time; others wait."""
    packs: int = 2
    """Sandboxes whose changes are made layers at the same time; others wait."""
    network: NetworkAccess = NetworkAccess()
    sweep_seconds: float = 2.0
    """How often lifetimes are checked; they are kept within 5 s."""
    scrub_seconds: float = 7 * 86400.0
    """How old the last whole reading of a layer may be; 0 reads none."""
    scrub_bytes: int = 256 * MIB
    """At most so much of them is read each `tidy_seconds`, but a layer at a time, at `scrub_rate`."""
    scrub_rate: float = 50 * MIB
    """Bytes a second."""
    tidy_seconds: float = 120.0
    """How often layers that nothing reaches are looked for; they go when they have been so for ten minutes."""


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of one API process."""

    layout: Layout
    listen: tuple[str, int] | None = None
    """TCP address beside the unix socket."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    """Allow plaintext beyond loopback."""
    uid: int = 0x30000000 - 2
    """User the process becomes after it opened its sockets and secrets, when started as root."""
    node_wait: float = 10.0
    """Seconds a request waits for its node to come back before `node_unavailable`."""
    batch_wait: float = 90.0
    """Seconds that what was made for a client whose connection was lost waits for it to come back and take it."""
    request_wait: float = 10.0
    """Seconds that a connection has for its TLS handshake, for its first request up to the end of the headers, and for each
    later one once that has begun."""
    strangers: int = 4096
    """TCP connections that have not shown the token yet. One more closes the oldest of them."""
    kept_files: int = 256
    """Of the open files that the process may have, those that TCP connections leave to the unix sockets."""


def encode_config(config: msgspec.Struct) -> bytes:
    """JSON; paths are strings."""
    return msgspec.json.encode(config, enc_hook=str)


def decode_config(data: bytes, type_: type[T]) -> T:
    """Raises `msgspec.DecodeError`."""
    return msgspec.json.decode(data, type=type_, dec_hook=_path_hook)


def _path_hook(type_: type, value: Any) -> Any:
    if issubclass(type_, (Path, IPv4Address, IPv4Network)):
        return type_(value)
    raise NotImplementedError(type_)
