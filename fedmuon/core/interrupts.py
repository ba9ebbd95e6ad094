"""Ctrl-C while the command `fedmuon` starts ends the program with one sentence.

The package `fedmuon` imports this module before all others. It therefore imports almost nothing.
"""

# This part of `signal` is built in: Ctrl-C cannot interrupt its import.
import _signal as signal  # pyright: ignore[reportMissingImports]
import os
import sys


def stop(number: int, frame: object) -> None:
    """Print one sentence and end the program, before a command has begun."""
    os.write(2, b"fedmuon: interrupted: nothing new was saved, run the command again\n")
    os._exit(128 + number)


def stop_at_interrupt() -> bool:
    """Let Ctrl-C call `stop`, and return whether it does.

    It does not in the background of a shell script, where programs ignore Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    return signal.getsignal(signal.SIGINT) is stop


def is_command() -> bool:
    """Return whether this process is `fedmuon` or `python -m fedmuon`, and not a child of it."""
    words = sys.orig_argv[1:3]  # of this process itself: a child process has other ones
    script = words[0] if words else ""
    return words == ["-m", "fedmuon"] or script.endswith(("/fedmuon", "\\fedmuon.exe"))


if is_command():
    stop_at_interrupt()
