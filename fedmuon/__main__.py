"""`python -m fedmuon` is the command `fedmuon`."""

import os
import signal
import sys
from types import FrameType
from typing import Any


def stop(number: int, frame: FrameType | None) -> None:
    """End the program with one sentence. No command has begun."""
    sys.stderr.write("fedmuon: interrupted: nothing new was saved, run the command again\n")
    sys.stderr.flush()
    os._exit(128 + number)


# Ctrl-C must have this effect before all imports of `main`, which take most of the start.
STARTED = __name__ == "__main__" or sys.argv[0].endswith(("fedmuon", "fedmuon.exe"))
STOPS = STARTED and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if STOPS:  # not for a job in the background, which ignores Ctrl-C
    signal.signal(signal.SIGINT, stop)


def main() -> Any:
    """Run the command.

    During the import of libraries, Ctrl-C ends the program with one sentence.
    """
    from fedmuon.core import start

    start.require_room()
    start.print_anywhere()
    start.set_thread_defaults()
    from fedmuon.experiments.cli import main as command

    if STOPS:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command()


if __name__ == "__main__":
    main()
