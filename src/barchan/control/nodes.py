"""The only client of the node agents.

Nodes dial in on a unix socket and introduce themselves with `node.hello`; from then on the same link carries our calls to
them. A newer connection of the same name replaces the older one. All state here is soft: hellos rebuild it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from barchan.errors import BarchanError, InvalidRequest, NodeUnavailable, SandboxNotFound, Unauthenticated
from barchan.names import check_name
from barchan.spec import NodeInfo, NodeName, SandboxSpec, node_of
from barchan.wire.link import Call, FrameSink, Incoming, ignore_frame
from barchan.wire.messages import Hello, pack, unpack_call
from barchan.wire.transports import LinkProtocol

logger = logging.getLogger(__name__)
KEYS_KEPT = 100_000
_UCRED = struct.Struct("3i")
KEEP_FILE: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
"""Python 3.13's loops look at a unix socket's file to remove it later: without root, we may not."""


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end of a unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(raw)[1])


def trusted_uid(uid: int) -> bool:
    return uid in (0, os.geteuid())


class Peer:
    """One connected node: its link, what it last said, and what was asked of it since."""

    def __init__(self, protocol: LinkProtocol, info: NodeInfo) -> None:
        self.protocol = protocol
        self.info = info
        """With the sandboxes that were sent there since its last hello."""

    def update(self, info: NodeInfo) -> None:
        self.info = info

    def placed(self, spec: SandboxSpec) -> None:
        self._count(1, spec)

    def not_placed(self, spec: SandboxSpec) -> None:
        self._count(-1, spec)

    def _count(self, sandboxes: int, spec: SandboxSpec) -> None:
        info = self.info
        self.info = msgspec.structs.replace(
            info,
            sandboxes=max(info.sandboxes + sandboxes, 0),
            memory_promised=max(info.memory_promised + sandboxes * spec.limits.memory, 0),
            disk_promised=max(info.disk_promised + sandboxes * spec.limits.disk, 0),
        )


class Nodes:
    """The connected nodes by name. `wait` is how many seconds a call waits for a node that is away."""

    def __init__(self, wait: float) -> None:
        self._wait = wait
        self._started = time.monotonic()
        self._peers: dict[NodeName, Peer] = {}
        self._known: set[NodeName] = set()
        self._keys: OrderedDict[str, NodeName] = OrderedDict()
        self._protocols: set[LinkProtocol] = set()
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def listening(self, sock: socket.socket) -> AsyncIterator[None]:
        """Accept nodes on a bound unix socket until the block ends."""
        server = await asyncio.get_running_loop().create_unix_server(self._protocol, sock=sock, **KEEP_FILE)
        try:
            yield
        finally:
            server.close()
            for protocol in tuple(self._protocols):
                protocol.close(NodeUnavailable("the API is stopping"))

    def infos(self) -> tuple[NodeInfo, ...]:
        return tuple(peer.info for peer in self._peers.values())

    def peer(self, name: NodeName) -> Peer | None:
        return self._peers.get(name)

    async def call(self, name: NodeName, payload: bytes, on_frame: FrameSink = ignore_frame) -> Call:
        """Send a call to a node, waiting for it while it is away.

        Raises `NodeUnavailable` when it does not come back in time, `SandboxNotFound` for a name no node ever had.
        """
        peer = self._peers.get(name) or await self._arrival(name)
        return peer.protocol.link.call(payload, on_frame)

    async def some(self) -> tuple[NodeInfo, ...]:
        """The connected nodes; when there are none, waits for the first. May be empty after that."""
        if not self._peers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait):
                    while not self._peers:
                        await self._change()
        return self.infos()

    def holder_of_key(self, key: str) -> NodeName | None:
        """The node that a create with this key was last sent to."""
        return self._keys.get(key)

    def remember_key(self, key: str, name: NodeName) -> None:
        self._keys[key] = name
        self._keys.move_to_end(key)
        while len(self._keys) > KEYS_KEPT:
            self._keys.popitem(last=False)

    async def _arrival(self, name: NodeName) -> Peer:
        # Shortly after our own start every node is away, so that an unknown name proves nothing yet.
        now = time.monotonic()
        until = now + self._wait if name in self._known else self._started + self._wait
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - now)):
                while name not in self._peers:
                    await self._change()
        peer = self._peers.get(name)
        if peer is not None:
            return peer
        if name in self._known:
            raise NodeUnavailable(f"node {name} is not connected", hint="is its agent running? `barchan up` starts it")
        raise SandboxNotFound(f"no node is called {name}", field="sandbox")

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _protocol(self) -> LinkProtocol:
        protocol = _NodeProtocol(self)
        self._protocols.add(protocol)
        return protocol

    def hello(self, protocol: LinkProtocol, hello: Hello) -> None:
        name = NodeName(check_name(hello.info.name, "info.name"))
        peer = self._peers.get(name)
        if peer is not None and peer.protocol is protocol:
            peer.update(hello.info)
        else:
            self._peers[name] = Peer(protocol, hello.info)
            if peer is not None:
                peer.protocol.close(NodeUnavailable(f"node {name} dialled again"))
        self._known.add(name)
        for key, sandbox in hello.create_keys.items():
            with contextlib.suppress(InvalidRequest):
                self.remember_key(key, node_of(sandbox))
        self._changed.set()

    def gone(self, protocol: LinkProtocol) -> None:
        self._protocols.discard(protocol)
        for name, peer in tuple(self._peers.items()):
            if peer.protocol is protocol:
                del self._peers[name]
                logger.warning("node %s disconnected", name)


class _NodeProtocol(LinkProtocol):
    def __init__(self, nodes: Nodes) -> None:
        super().__init__(self._serve, dialled=False, lost=_lost, on_close=nodes.gone)
        self._nodes = nodes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        uid = peer_uid(transport.get_extra_info("socket"))
        if not trusted_uid(uid):
            logger.warning("connection from user %d to the node socket refused", uid)
            self.close(Unauthenticated("only root and the API's own user may be a node"))

    async def _serve(self, call: Incoming) -> bytes:
        request = unpack_call(call.payload)
        if not isinstance(request, Hello):
            raise InvalidRequest("a node may only say node.hello", field="op")
        self._nodes.hello(self, request)
        return pack(None)


def _lost() -> BarchanError:
    return NodeUnavailable("the node's connection was lost during the call")
