"""The command `barchan`, also as `python -m barchan`."""

import signal


def main() -> None:
    """Nothing is begun while modules are imported: an interrupt ends the process there and then.

    Python 3.11 makes other errors of some interrupts that come in the middle of an import (in `__set_name__`).
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from barchan.cli.main import main as command

    signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    main()
