"""A process that pulls one image: `python -m barchan.layers.pull_worker`, started by the node agent (`backends/pulls.py`).

Standard input: a `PullRequest` on one line, then nothing; its end means that nobody waits any more. Standard output: a `PullNews`
a line, the last with `done` or `error`. Of its own, because to convert is much computing, and because it can be ended at any moment.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import msgspec

from barchan.config import RegistryAccess, decode_config
from barchan.environments import PullProgress
from barchan.errors import BarchanError, ErrorBody, InternalError
from barchan.layers.catalog import described
from barchan.layers.content import Format
from barchan.layers.pull import pull
from barchan.layers.store import LayerStore
from barchan.wire.messages import EnvironmentInfo


class PullRequest(msgspec.Struct, frozen=True, kw_only=True):
    store: Path
    ref: str
    access: RegistryAccess = RegistryAccess()
    again: bool = False
    format: Format = "split"


class PullNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    progress: PullProgress | None = None
    done: EnvironmentInfo | None = None
    error: ErrorBody | None = None


def main() -> int:
    request = decode_config(sys.stdin.buffer.readline(), PullRequest)
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        store = LayerStore(request.store)
        entry = pull(
            store, request.ref, access=request.access, again=request.again, format=request.format, told=_progress
        )
    except BarchanError as error:
        _tell(PullNews(error=error.body()))
    except Exception as error:
        _tell(PullNews(error=InternalError(f"{type(error).__name__}: {error}", phase="convert").body()))
        raise
    else:
        _tell(PullNews(done=described(entry)))
    return 0


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _progress(progress: PullProgress) -> None:
    _tell(PullNews(progress=progress))


def _tell(news: PullNews) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
