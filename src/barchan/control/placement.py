"""Which node gets a new sandbox. Pure: values in, a name out.

The node has the last word (admission); this only makes a good first try likely. Power of k choices: among k random nodes
that should have room, the least loaded. Views may be stale, so a node that looks full is tried last, never left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from barchan.errors import AdmissionRefused, NodeUnavailable, NotSupported
from barchan.spec import NodeInfo, NodeName, SandboxSpec

CHOICES = 4


def able(nodes: Iterable[NodeInfo], spec: SandboxSpec) -> list[NodeInfo]:
    """The nodes that could ever hold such a sandbox. Raises why there is none."""
    present = list(nodes)
    if not present:
        raise NodeUnavailable("no node is connected", hint="barchan up")
    with_backend = [node for node in present if spec.backend in node.backends]
    if not with_backend:
        raise NotSupported(f"no node has the backend {spec.backend!r}", field="backend")
    fitting = [node for node in with_backend if not too_small(node, spec)]
    if not fitting:
        raise refused({node.name: too_small(node, spec) for node in with_backend})
    return fitting


def too_small(node: NodeInfo, spec: SandboxSpec) -> str:
    """Why the node cannot hold it even when empty, or an empty string."""
    if node.memory_total and spec.limits.memory > node.memory_total:
        return f"has {node.memory_total} bytes of memory in all, {spec.limits.memory} asked"
    if node.disk_total and spec.limits.disk > node.disk_total:
        return f"has {node.disk_total} bytes of disk in all, {spec.limits.disk} asked"
    return ""


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


def refused(reasons: Mapping[NodeName, str]) -> AdmissionRefused:
    """One refusal that says what each node said."""
    said = "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items()))
    return AdmissionRefused(f"no node takes the sandbox: {said}", hint="wait for sandboxes to end, or ask for less")
