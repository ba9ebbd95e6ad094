"""`python -m fedmuon` is the command `fedmuon`."""

import signal
from typing import Any

from fedmuon.core.interrupts import is_command, stop_at_interrupt

# Ctrl-C must have this effect before all imports of `main`, which take most of the start.
STOPS = (__name__ == "__main__" or is_command()) and stop_at_interrupt()


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
    try:
        return command()
    finally:
        if STOPS:  # Python's own handler would print a traceback while the program ends
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
