"""The API's process: `python -m barchan.cli.serve_api`, its `ApiConfig` as JSON on standard input."""

from __future__ import annotations

import logging
import sys

import msgspec

from barchan.api.main import run
from barchan.config import ApiConfig, decode_config
from barchan.errors import BarchanError


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s api %(levelname)s %(message)s", stream=sys.stderr)
    try:
        run(decode_config(sys.stdin.buffer.read(), ApiConfig))
    except BarchanError as error:
        print(msgspec.json.encode(error.body()).decode(), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
