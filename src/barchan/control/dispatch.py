"""Where each request goes: the node in its sandbox id, a node chosen for it, every node, or no further than here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from random import Random, SystemRandom
from typing import Any

from barchan.control.checks import check_request
from barchan.control.nodes import Nodes
from barchan.control.placement import able, choose, refused
from barchan.control.slots import Line
from barchan.errors import (
    AdmissionRefused,
    BarchanError,
    EnvironmentNotFound,
    InvalidRequest,
    NodeNotFound,
    SandboxNotFound,
)
from barchan.spec import NodeInfo, NodeName, node_of
from barchan.wire.link import Call, FrameSink, ignore_frame
from barchan.wire.messages import (
    AbandonCreate,
    CreateSandbox,
    EnvironmentInfo,
    ListEnvironments,
    ListNodes,
    ListSandboxes,
    LockEnvironment,
    OfSandbox,
    PullImage,
    Request,
    pack,
    pack_call,
    unpack,
)

Placed = Callable[[], None]


def _nobody() -> None:
    """Told when nobody wants to know."""


class Dispatch:
    """Everything the API can ask of nodes. Answers are REPLY payloads."""

    def __init__(self, nodes: Nodes, random: Random | None = None) -> None:
        self._nodes = nodes
        self._random = random or SystemRandom()

    async def open(self, request: OfSandbox, payload: bytes = b"", on_frame: FrameSink = ignore_frame) -> Call:
        """Start a call about one sandbox. `payload` is the packed request when the caller has it already."""
        check_request(request)
        return await self._nodes.call(node_of(request.sandbox), payload or pack_call(request), on_frame)

    async def answer(self, request: Request) -> bytes:
        """Carry out a request that has no streams."""
        if isinstance(request, OfSandbox):
            call = await self.open(request)
            return await _finished(call)
        check_request(request)
        if isinstance(request, CreateSandbox):
            return await self.create(request)
        if isinstance(request, ListNodes):
            return pack(self._nodes.infos())
        if isinstance(request, ListSandboxes):
            found = await self._everywhere(request, request.node)
            return pack(sorted(found, key=lambda info: str(info.id))[: request.limit])
        if isinstance(request, ListEnvironments):
            return pack(_distinct(await self._everywhere(request)))
        if isinstance(request, PullImage):
            return await self.pull(request)
        if isinstance(request, LockEnvironment):
            return await self._somewhere(request)
        raise InvalidRequest(f"{request.op} is not for clients", field="op")

    async def abandon(self, key: str) -> None:
        """Undo a create, wherever it went and however far it came. One that never left here is fine."""
        name = self._nodes.holder_of_key(key)
        if name is not None:
            await _finished(await self._nodes.call(name, pack_call(AbandonCreate(key=key))))

    async def _everywhere(self, request: Request, node: str | None = None) -> list[Any]:
        calls = await self._open_on(request, node)
        answers = await asyncio.gather(*(_finished(call) for call in calls.values()))
        return [item for answer in answers for item in unpack(answer, request.answer)]

    async def _open_on(
        self, request: Request, node: str | None, on_frame: FrameSink = ignore_frame
    ) -> dict[NodeName, Call]:
        """A call to every node, or to one."""
        infos, payload = await self._nodes.some(), pack_call(request)
        names = [NodeName(node)] if node is not None else [info.name for info in infos]
        try:
            return {name: await self._nodes.call(name, payload, on_frame) for name in names}
        except SandboxNotFound as error:
            hint = f"there are: {', '.join(sorted(info.name for info in infos))}"
            raise NodeNotFound(f"no node is called {node}", field="node", hint=hint) from error

    async def _somewhere(self, request: LockEnvironment) -> bytes:
        """The answer of the first node, by name, that has what it names; if none has it, the last one's refusal."""
        names, payload = sorted(info.name for info in await self._nodes.some()), pack_call(request)
        for name in names[:-1]:
            with contextlib.suppress(EnvironmentNotFound):
                return await _finished(await self._nodes.call(name, payload))
        return await _finished(await self._nodes.call(names[-1], payload))

    async def pull(self, request: PullImage, on_frame: FrameSink = ignore_frame) -> bytes:
        """On every node, or on one. The answer of the first by name; `on_frame` gets the events of all."""
        check_request(request)
        calls = await self._open_on(request, request.node, on_frame)
        return (await asyncio.gather(*(_finished(calls[name]) for name in sorted(calls))))[0]

    async def create(
        self,
        request: CreateSandbox,
        line: Line | None = None,
        placed: Placed = _nobody,
        on_frame: FrameSink = ignore_frame,
    ) -> bytes:
        """Where the key went before, else on the node that placement chooses, else on the next that has room.

        In a `line` it waits until such a node has a slot free. `placed` is told each time a node is asked;
        `on_frame` gets the node's events.
        """
        payload = pack_call(request)
        refusals: dict[NodeName, AdmissionRefused] = {}
        while True:
            name = self._nodes.holder_of_key(request.key)
            if name is None or name in refusals:
                name = await self._place(request, refusals, line)
            try:
                async with line.slots.of(name) if line is not None else contextlib.nullcontext():
                    placed()
                    return await self._create_on(name, request, payload, on_frame)
            except AdmissionRefused as error:
                refusals[name] = error

    async def _place(
        self, request: CreateSandbox, refusals: dict[NodeName, AdmissionRefused], line: Line | None
    ) -> NodeName:
        if line is None:
            return choose(self._left(request, await self._nodes.some(), refusals), self._random)
        # Whoever may not go everywhere must not hold up those behind it.
        async with line.turn if not refusals else contextlib.nullcontext():
            while True:
                left = self._left(request, await self._nodes.some(), refusals)
                if free := [node for node in left if line.slots.free(node.name)]:
                    return choose(free, self._random)
                await line.slots.change()

    def _left(
        self, request: CreateSandbox, nodes: tuple[NodeInfo, ...], refusals: dict[NodeName, AdmissionRefused]
    ) -> list[NodeInfo]:
        left = [node for node in able(nodes, request.spec) if node.name not in refusals]
        if not left:
            fields = {error.field for error in refusals.values()}
            raise refused(
                {name: str(error) for name, error in refusals.items()}, fields.pop() if len(fields) == 1 else ""
            )
        return left

    async def _create_on(self, name: NodeName, request: CreateSandbox, payload: bytes, on_frame: FrameSink) -> bytes:
        self._nodes.remember_key(request.key, name)
        peer = self._nodes.peer(name)
        if peer is not None:
            peer.placed(request.spec)
        try:
            return await _finished(await self._nodes.call(name, payload, on_frame))
        except BarchanError:
            if peer is not None:
                peer.not_placed(request.spec)
            raise


async def _finished(call: Call) -> bytes:
    try:
        return await call.answer
    except asyncio.CancelledError:
        call.abandon()
        raise


def _distinct(found: list[EnvironmentInfo]) -> list[EnvironmentInfo]:
    """Each version once, however many nodes have it."""
    return sorted({(e.name, e.version, e.digest): e for e in found}.values(), key=lambda e: (e.name, e.version))
