"""First inputs for every target, from the encoders that the product itself uses.

`python -m tests.fuzz.seeds TARGET…` adds them to the kept corpus; `python -m tests.fuzz TARGET SECONDS --keep` goes on from there.
"""

from __future__ import annotations

import struct
import sys

from barchan.backends.spawn_request import ParkRequest, Place, PlacedRequest, Removal, SpawnFlag, SpawnRequest
from barchan.errors import SandboxNotFound
from barchan.spec import Exec, SandboxSpec
from barchan.wire import frames as f
from barchan.wire import guest as g
from barchan.wire import messages as m
from barchan.wire import websocket as ws
from barchan.wire.guest import KEEP, OpKind, blob
from tests.fuzz.targets import TARGETS

HEAD = f.HEAD.size


def exec_request(**changes: object) -> bytes:
    """What follows `user` in an EXEC request."""
    given: dict[str, object] = {
        "flags": g.ExecFlag.STDIN,
        "timeout_ms": 3000,
        "grace_ms": 10,
        "output_limit": 1 << 20,
        "nofile": 64,
        "cwd": b"work",
        "argv": (b"sh", b"-c", b"true"),
        "env": [b"A=b", b"PATH=/bin"],
    }
    return g.exec_parts(**(given | changes))  # type: ignore[arg-type]


def requests() -> list[tuple[OpKind, bytes]]:
    path, owner = blob(b"/a/b"), struct.pack("<II", KEEP, 1000)
    return [
        (OpKind.EXEC, exec_request()),
        (OpKind.EXEC, exec_request(cwd=b"", argv=(b"ls",), env=[], flags=g.ExecFlag.MERGE)),
        (OpKind.STAT, path + b"\1"),
        (OpKind.LIST, path + struct.pack("<I", 2)),
        (OpKind.READ, path + struct.pack("<QQ", 5, g.ALL)),
        (OpKind.WRITE, path + struct.pack("<II", 1, 0o644) + owner),
        (OpKind.MKDIR, path + struct.pack("<II", 1, 0o755)),
        (OpKind.REMOVE, path + struct.pack("<I", 3)),
        (OpKind.RENAME, path + blob(b"c")),
        (OpKind.GET_TREE, blob(b"c/d")),
        (OpKind.PUT_TREE, path + struct.pack("<I", 1) + owner),
        (OpKind.PROCESSES, b""),
        (OpKind.EXEC, exec_request(argv=(), flags=g.ExecFlag.SHELL, rows=24, columns=80)),
        (OpKind.RUN, g.run_parts(shell=1, timeout_ms=3000, grace_ms=10, output_limit=1 << 20, command=b"cd /tmp")),
    ]


def of_requests() -> list[bytes]:
    return [
        g.start(1, kind, b"bob:wheel", body)[HEAD : HEAD + 1] + blob(b"bob:wheel") + body for kind, body in requests()
    ]


def of_link() -> list[bytes]:
    """A byte of dice, one of manners, then conversations as the node has them."""
    hello = g.hello()
    run = (
        g.start(1, OpKind.EXEC, b"", exec_request(grace_ms=0))
        + f.encode_credit(1, 1, 1 << 20)
        + f.encode_credit(1, 2, 1 << 20)
    )
    fed = run + f.encode_data(1, 0, 0, b"input") + f.encode_eof(1, 0, 5)
    taken = fed + f.encode(f.FrameType.ACK, 1, f.U64.pack(1000), 1) + f.encode(f.FrameType.FORGET, 1)
    ended = (
        run
        + g.resize(1, 24, 80)
        + g.signal(1, 15, everyone=True)
        + f.encode(f.FrameType.CANCEL, 1)
        + f.encode(f.FrameType.FORGET, 1)
    )
    files = b"".join(g.start(i + 1, kind, b"root", body) for i, (kind, body) in enumerate(requests()))
    ping = f.encode(f.FrameType.PING, 9, b"pong")
    talks = [hello, hello + ping, hello + fed, hello + taken, hello + ended, hello + files + ping]
    again = fed + hello + f.encode_credit(1, 1, 1 << 20) + f.encode_data(1, 0, 0, b"input")
    modest = [b"\0\0" + talk for talk in talks] + [b"\0\7" + hello + fed, b"\5\3" + hello + taken]
    return modest + [b"\x80\x7f" + hello + again]


def entry(path: bytes, kind: str, target: bytes = b"") -> bytes:
    return g.encode_entry(g.Entry(path, kind, 0o644, 1000, 1000, 1, 5, -1_999_999_995, target))


def of_tree() -> list[bytes]:
    file = entry(b"dir/name", "f") + blob(b"hello") + blob(b" world") + blob(b"")
    trees = [
        entry(b"", "d") + entry(b"new", "d") + entry(b"new/f", "f") + blob(b"x") + blob(b""),
        file + entry(b"dir/l", "l", b"../../name") + entry(b"dir", "d"),
        entry(b"file", "f") + blob(b"") + entry(b"link", "l", b"/etc/passwd"),
        entry(b"dir/pipe", "p") + entry(b"dir/closed", "x") + file,
        entry(b"link/f", "f") + blob(b""),
    ]
    return [bytes((1, failing)) + tree for tree in trees for failing in (0, 5)]


PASSWD = (
    b"root:x:0:0:root:/root:/bin/sh\n\nbroken\nbob:x:1000:1001::/home/bob:/bin/sh\n1005:x:7:8::/odd:\nlast:x:5:5::/l:"
)
GROUP = b"root:x:0:\nwheel:x:10:bob,ann\nusers:x:100:ann,bob\nempty:x:11:"


def of_accounts() -> list[bytes]:
    return [name + b"\n" + text for name in (b"bob", b"1000", b"wheel", b"4242") for text in (PASSWD, GROUP)]


STATUS = b"Name:\tsh\nUmask:\t0022\nState:\tS (sleeping)\nPPid:\t1\nUid:\t0\t0\t0\t0\nVmRSS:\t     960 kB\n"


def of_processes() -> list[bytes]:
    return [STATUS + b"\1sh\0-c\0sleep 1\0", STATUS + b"\1", STATUS + b"\1a\0\0b", b"1\n20\n4000\n", b"12"]


def of_spawn() -> list[bytes]:
    """A byte with the number of descriptors, then what the node agent sends with them."""

    def one(**changes: object) -> SpawnRequest:
        given: dict[str, object] = {
            "uid_base": 1 << 20,
            "uid_count": 1 << 16,
            "hostname": "box",
            "listener": 0,
            "writable": 0,
            "cgroup": 0,
            "layers": (0, 0),
        }
        return SpawnRequest(**(given | changes))  # type: ignore[arg-type]

    place = Place(
        "box-01", ("0/memory.limit_in_bytes=64", "?0/memory.memsw.limit_in_bytes=64", "v2/pids.max=8"), 1 << 24
    )
    asked: list[SpawnRequest | ParkRequest | PlacedRequest | Removal] = [
        one(groups=(0,)),
        one(netns=0, layers=(0,), data=((0, "/data"), (0, "/srv/set"))),
        one(layers=(0,) * 120, groups=(0,) * 8, guest_uid=900_000_001),
        one(parked=7, data=((0, "/d"),)),
        ParkRequest(uid_base=1 << 20, uid_count=1 << 16, cgroup=0, groups=(0, 0)),
        PlacedRequest(place=place, hostname="box", layers=(0, 0), data=((0, "/data"),)),
        PlacedRequest(place=place, flags=SpawnFlag.PARK),
        PlacedRequest(place=Place("box-02"), layers=(0,), parked=7),
        Removal(("box-01", "pool-2")),
    ]
    return [bytes((len(request.descriptors()),)) + request.pack(1) for request in asked]


def event(number: int, argument: int = 0) -> bytes:
    """As native/fuzz/shell.c has them."""
    return bytes((0x80 | argument << 4 | number,))


RUN, CANCEL, TIME, SIGNAL, ROOM, DRAIN, OUTPUT, CLOSE, HANG_UP, EXIT, KILLED, LEFT, END = range(13)


def of_shell() -> list[bytes]:
    """A byte of dice and manners (1: a group, 2: began, 4: one output, 8: fails to start), then reports and events."""
    ready = b"0\n"
    command = [event(RUN, number) for number in range(8)]
    late = event(TIME) * 3
    told = [
        b"\2" + ready + command[1] + ready + command[2] + b"127\n" + event(DRAIN),
        b"\3" + ready + command[5] + event(LEFT, 2) + late + b"130\n" + event(DRAIN),
        b"\7" + command[0] + ready + event(OUTPUT, 5) + event(CLOSE, 1) + b"5\n" + event(DRAIN),
        b"\3" + ready + command[3] + event(CANCEL) + event(LEFT, 1) + event(SIGNAL) + b"1\n" + late + event(DRAIN),
        b"\2" + event(ROOM, 1) + ready + command[2] + event(ROOM, 7) + b"0\n" + event(DRAIN),
    ]
    broken = [b"12x", b"1234", b"\n", b"\xff", b"77\n7\n", event(HANG_UP)]
    ended = [event(EXIT, 3), event(KILLED), event(END) + event(KILLED)]
    begun = b"\3" + ready + command[1]
    return told + [begun + rest + command[1] for rest in broken + ended] + [b"\x0b" + ready + command[2], b"\0"]


def of_paths() -> list[bytes]:
    """A byte of dice (odd: calls fail), then a path, or the name of an open file."""
    paths = (b"/a/b", b"//srv/./data//..", b"/proc/self/fd", b"/1/dir/7x/file", b"relative/12", b"/x/")
    return [bytes((dices,)) + path for path in paths for dices in (0, 1)]


def of_host_guest() -> list[bytes]:
    """A byte that chooses, one of dice, then what a guest sends. 0: a conversation, 1: frames, 2: entries, 3: processes, 4: a tree."""
    welcome = f.encode(
        f.FrameType.WELCOME,
        0,
        struct.pack("<HHIQQ", 1, 0, 1, 77, 1) + struct.pack("<QBBHIQQQQ", 1, 4, 0, 0, 5, 0, 0, 0, 0),
    )
    data, eof = f.encode_data(1, 1, 0, b"content"), f.encode_eof(1, 1, 7)
    done = f.encode(f.FrameType.DONE, 1, struct.pack("<B3xiQQQQI", 0, 0, 1, 2, 3, 4, 0) + blob(b""))
    failed = f.encode(f.FrameType.DONE, 1, struct.pack("<B3xiQQQQI", 4, 2, 1, 2, 3, 4, 0) + blob(b"open"))
    refused = f.encode(f.FrameType.REFUSED, 1, struct.pack("<I", 2) + blob(b"malformed request"))
    credit, pong = f.encode_credit(1, 0, 1 << 18), f.encode(f.FrameType.PONG, 1)
    started = f.encode(f.FrameType.STARTED, 1, struct.pack("<I", 5))
    large = [f.encode_data(1, 1, at, bytes(700)) for at in (0, 700, 1400)]  # enough at once to be joined
    talks = [started + data + eof + done, credit + failed, refused, pong + data + done + eof, b"".join(large) + done]
    process = struct.pack("<IIIB3xQQ", 5, 1, 0, ord("S"), 960 << 10, 1) + g.blobs([b"sh", b"-c", b"true"])
    frames = [bytes((which, dices)) + welcome + talk for talk in talks for which in (0, 1) for dices in (0, 7)]
    lists = [b"\2\0" + entry(b"a", "f") + entry(b"b", "l", b"a"), b"\3\0" + process + process]
    return frames + lists + [b"\4" + tree[:1] + tree[2:] for tree in of_tree()]


def of_host_link() -> list[bytes]:
    """A byte of manners, one of dice, then what the other end of a link sends: answers to calls 1, 3 and 5, calls of its own."""
    answers = [m.pack(None), m.pack(m.ExecStarted(id="e", pid=5)), b"\x90"]
    failure = m.pack(SandboxNotFound("gone", hint="look elsewhere", field="sandbox").body())
    streams = (
        f.encode_data(1, 1, 0, b"out")
        + f.encode_eof(1, 1, 3)
        + f.encode_data(1, 2, 0, b"error")
        + f.encode_eof(1, 2, 5)
    )
    event = f.encode(f.FrameType.EVENT, 1, m.pack(m.ExecStarted(id="e", pid=5))) + f.encode_credit(1, 0, 100)
    ends = [f.encode(f.FrameType.REPLY, 1, answer) for answer in answers] + [f.encode(f.FrameType.ERROR, 5, failure)]
    calls = [
        m.ListNodes(),
        m.GetSandbox(sandbox="s"),
        m.ReadFile(sandbox="s", path=b"/a"),
        m.StartExec(sandbox="s", id="e", exec=Exec(argv=("ls",))),
        m.CreateSandbox(spec=SandboxSpec(environment="base"), key="k"),
    ]
    called = [
        f.encode(f.FrameType.CALL, 1 + 2 * i, m.pack_call(call)) + f.encode_credit(1 + 2 * i, 1, 100)
        for i, call in enumerate(calls)
    ]
    asked = [b"\3\0" + event + streams + end for end in ends] + [b"\5\7" + streams + ends[0]]
    bare = asked + [b"\2\0" + call for call in called] + [b"\2\5" + called[0] + f.encode(f.FrameType.ABANDON, 1)]
    return bare + [framed(seed) for seed in bare]


def framed(seed: bytes) -> bytes:
    """The same conversation in WebSocket messages: one cut in two, a ping between them, an end."""
    mask = b"" if seed[0] & 1 else b"\1\2\3\4"

    def message(first: int, data: bytes) -> bytes:
        head = bytearray(ws.head(first & 0x0F, len(data), mask))
        head[0] = first
        return bytes(head) + (ws.apply_mask(data, mask) if mask else data)

    data = seed[2:]
    half = len(data) // 2
    parts = (message(0x02, data[:half]), message(0x89, b"alive?"), message(0x80, data[half:]), message(0x88, b"\3\350"))
    return bytes((seed[0] | 8, seed[1])) + b"".join(parts)


SEEDS = {
    "host_guest": of_host_guest,
    "host_link": of_host_link,
    "link": of_link,
    "requests": of_requests,
    "tree": of_tree,
    "accounts": of_accounts,
    "processes": of_processes,
    "spawn": of_spawn,
    "shell": of_shell,
    "paths": of_paths,
}


def write(name: str) -> None:
    corpus = TARGETS[name].corpus
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(SEEDS[name]()):
        (corpus / f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(name)
