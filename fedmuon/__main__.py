"""`python -m fedmuon` is the command `fedmuon`."""

import os
import signal
import sys
from types import FrameType
from typing import Any

from fedmuon.errors import NOTHING_SAVED  # which reads no library


def main() -> Any:
    """The command; Ctrl-C ends it in a sentence, too, while its libraries are still being read."""
    reading = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if reading:  # else it is ignored, as in the background
        signal.signal(signal.SIGINT, _stop)
    from fedmuon.experiments.cli import main as command

    if reading:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command()


def _stop(number: int, frame: FrameType | None) -> None:
    sys.stderr.write(f"fedmuon: interrupted: {NOTHING_SAVED}\n")
    sys.stderr.flush()
    os._exit(128 + number)


if __name__ == "__main__":
    main()
