"""What an open network costs: python -m bench.network [--json] [-n N]

By turns sandboxes without and with one, N each time, all at the node's own socket and nothing made ahead: memory that an idle one holds (as
`bench.idle` counts it), time and CPU of the node agent, its spawner and the rest of the machine for one create and stop. The node
runs in a network namespace of its own, so that the host's network is not touched.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from ipaddress import IPv4Address
from statistics import median

from barchan.config import NetworkAccess
from barchan.kernel import netns
from barchan.networks import NetworkMode, NetworkRules
from bench import cpu
from bench.figures import Figure, show, spread
from bench.idle import kernel
from bench.node_link import Node, node
from bench.rig import machine, options, pss

MODES: tuple[NetworkMode, ...] = ("deny", "open")
ROUNDS = 3
AT_ONCE = 8
NAMESERVER = IPv4Address("192.0.2.53")

Found = dict[str, list[float]]


async def fill(agent: Node, n: int, rules: NetworkRules) -> list[str]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one() -> str:
        async with room:
            return (await agent.create(network=rules)).id

    return list(await asyncio.gather(*(one() for _ in range(n))))


async def idle(agent: Node, n: int, rules: NetworkRules) -> float:
    """KiB for one, without the guest's own memory, which is the same for both."""
    before = sum(kernel().values()) + pss(agent.pid)
    made = await fill(agent, n, rules)
    after = sum(kernel().values()) + pss(agent.pid)
    await asyncio.gather(*(agent.stop(id) for id in made))
    await _removed(agent)
    return (after - before) / n / 1024


async def _removed(agent: Node) -> None:
    while (await agent.info()).pool.removing:
        await asyncio.sleep(0.05)


async def cycles(agent: Node, n: int, rules: NetworkRules, found: Found) -> None:
    processes = {"agent": agent.pid, **cpu.children(agent.pid, "spawner")}
    before, times = cpu.used(processes), []
    for _ in range(n):
        began = time.perf_counter()
        made = await agent.create(network=rules)
        times.append((time.perf_counter() - began) * 1000)
        await agent.stop(made.id)
    await _removed(agent)
    for name, us in cpu.used(processes).since(before, n).items():
        found[f"{name}_cpu"].append(us / 1000)
    found["create"].append(spread(times).p50)


async def measure(n: int) -> dict[NetworkMode, Found]:
    found: dict[NetworkMode, Found] = {mode: defaultdict(list) for mode in MODES}
    access = NetworkAccess(nameservers=(NAMESERVER,))
    async with node(max_sandboxes=n + 50, pool_most=0, network=access) as agent:
        for mode in MODES:
            await idle(agent, 20, NetworkRules(mode=mode))
        for _ in range(ROUNDS):
            for mode in MODES:
                rules = NetworkRules(mode=mode)
                await cycles(agent, n, rules, found[mode])
                found[mode]["idle"].append(await idle(agent, n, rules))
    return found


def figures(found: dict[NetworkMode, Found]) -> list[Figure]:
    units = {"idle": "KiB"}
    middle = {mode: {name: median(values) for name, values in of_mode.items()} for mode, of_mode in found.items()}
    deny, opened = middle["deny"], middle["open"]
    own = ("agent_cpu", "spawner_cpu")
    return [
        Figure("more_idle", opened["idle"] - deny["idle"], "KiB", 128),
        Figure("more_cpu", sum(opened[name] - deny[name] for name in own), "ms", note="agent and spawner"),
        *(
            Figure(
                f"{mode}_{name}", middle[mode][name], units.get(name, "ms"), note=" ".join(map("{:.3g}".format, values))
            )
            for mode in MODES
            for name, values in found[mode].items()
        ),
    ]


def main() -> None:
    given = options(200)
    netns.enter(netns.new())
    found = figures(asyncio.run(measure(given.n)))
    notes = [
        f"medians of {ROUNDS} rounds of {given.n}, each round beside; other work on the host counts in idle and rest"
    ]
    show("network", found, [*notes, machine()], given.json)


if __name__ == "__main__":
    main()
