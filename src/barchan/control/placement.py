"""Which node gets a new sandbox. Pure: values in, a name out.

The node has the last word (admission); this only makes a good first try likely. Power of k choices: among k random nodes
that should have room, the least loaded. Views may be stale, so a node that looks full is tried last, never left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from barchan.errors import AdmissionRefused, FeatureMissing, InvalidRequest, NodeUnavailable, NotSupported
from barchan.sizes import size
from barchan.spec import NodeInfo, NodeName, SandboxSpec

CHOICES = 4
_DOCTOR = "`barchan doctor` on the node says what to do"


def able(nodes: Iterable[NodeInfo], spec: SandboxSpec) -> list[NodeInfo]:
    """The nodes that could ever hold such a sandbox. Raises why there is none: `InvalidRequest` when all are too small."""
    present = list(nodes)
    if not present:
        raise NodeUnavailable("no node is connected", hint="barchan up")
    with_backend = [node for node in present if spec.backend in node.backends]
    if not with_backend:
        raise NotSupported(f"no node has the backend {spec.backend!r}", field="backend")
    wanted = {mount.source for mount in spec.mounts}
    with_data = [node for node in with_backend if wanted <= set(node.data_mounts)]
    if not with_data:
        raise _no_data(with_backend, wanted)
    with_backend = with_network(with_data, spec)
    large_enough = [node for node in with_backend if too_small(node, spec) is None]
    if not large_enough:
        raise _never_fits(with_backend, spec)
    return large_enough


def with_network(nodes: Sequence[NodeInfo], spec: SandboxSpec) -> list[NodeInfo]:
    """Those that have such networks. Raises `FeatureMissing`."""
    able = [node for node in nodes if spec.network.mode == "deny" or node.network.open]
    if not able:
        said = "; ".join(f"{node.name}: {node.network.missing or 'unknown'}" for node in nodes)
        raise FeatureMissing(
            f"no node can give a sandbox an open network: {said}", phase="network", field="network.mode", hint=_DOCTOR
        )
    return able


def _no_data(nodes: Sequence[NodeInfo], wanted: set[str]) -> InvalidRequest:
    said = "; ".join(f"{node.name} has {', '.join(node.data_mounts) or 'none'}" for node in nodes)
    return InvalidRequest(
        f"mounts: no node has all of these data mounts: {', '.join(sorted(wanted))}",
        field="mounts.source",
        hint=f"{said} (`barchan up --data-mount`)",
    )


class Lack(NamedTuple):
    resource: str
    has: float
    wants: float

    def __str__(self) -> str:
        return f"has {amount(self.resource, self.has)} in all, {amount(self.resource, self.wants)} asked"


def amount(resource: str, value: float) -> str:
    return f"{value:g} {resource}" if resource == "cpus" else f"{size(value)} of {resource}"


def _never_fits(nodes: Sequence[NodeInfo], spec: SandboxSpec) -> InvalidRequest:
    """Not a refusal: nothing that ends would make room, so that a later try is no use."""
    lacks = [(node, lack) for node in nodes if (lack := too_small(node, spec)) is not None]
    said = "; ".join(f"{node.name}: {lack}" for node, lack in sorted(lacks, key=lambda pair: pair[0].name))
    largest = {lack.resource: max(getattr(node, f"{lack.resource}_total") for node in nodes) for _, lack in lacks}
    # Where the nodes lack different things, the field is what all lack, if there is such a thing.
    asked = {lack.resource: lack.wants for _, lack in lacks}
    common = [resource for resource, most in largest.items() if most < asked[resource]]
    hint = "; ".join(f"at most {amount(resource, largest[resource])}" for resource in common or largest)
    return InvalidRequest(
        f"no node could ever hold the sandbox: {said}",
        field=f"limits.{common[0]}" if common else "limits",
        hint=f"{hint}, on one node" if common else f"{hint}, on different nodes",
    )


def too_small(node: NodeInfo, spec: SandboxSpec) -> Lack | None:
    """What the node has too little of even when empty."""
    for resource in ("memory", "disk", "cpus"):
        has, wants = getattr(node, f"{resource}_total"), getattr(spec.limits, resource)
        if has and wants > has:
            return Lack(resource, has, wants)
    return None


def load(node: NodeInfo) -> float:
    """How full, by the fullest of its resources; 1 and more is full."""
    return max(
        node.sandboxes / max(1, node.capacity),
        node.memory_promised / max(1, node.memory_total),
        node.disk_promised / max(1, node.disk_total),
    )


def choose(nodes: Sequence[NodeInfo], random: Random, k: int = CHOICES) -> NodeName:
    """The least loaded of k random ones that have a free place; of all when none has."""
    free = [node for node in nodes if node.sandboxes < node.capacity] or nodes
    picked = random.sample(free, k) if len(free) > k else free
    return min(picked, key=load).name


def refused(reasons: Mapping[NodeName, str], field: str = "") -> AdmissionRefused:
    """One refusal that says what each node said. `field`: of the spec, when they agree on it."""
    said = "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items()))
    return AdmissionRefused(
        f"no node takes the sandbox: {said}", field=field, hint="wait for sandboxes to end, or ask for less"
    )
