"""`flower-superexec` whose apps are forks of a process that has everything loaded.

Flower starts a process for each message, and most of its seconds go into loading Python and its
libraries. A fork is a process like any other, with the memory of one that has answered nothing yet.

    python -P forking_superexec.py early|late OPTIONS OF flower-superexec

Everything is loaded early, as a task whose process takes too long to answer is given up, or late,
with the first message: a SuperNode that may not be admitted never needs it.
"""

import contextlib
import ctypes
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

from fedmuon.experiments.engines import superlink_auth

Command = Callable[[], Any]
COMMANDS = {
    "flwr-clientapp": ("flwr.supernode.cli", "flwr_clientapp"),
    "flwr-serverapp": ("flwr.superlink.cli", "flwr_serverapp"),
}
ARGUMENTS = slice(45, 47)  # where /proc/self/stat says, after the name, where these lie in memory


def load() -> dict[str, Command]:
    """Load whatever the apps use, and return their commands by name."""
    import torch

    from fedmuon.clients.client_app import app
    from fedmuon.config.load import parse
    from fedmuon.experiments.run import execute

    torch.set_num_threads(1)
    importlib.import_module("fedmuon.server.server_app")
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers.models.llama.modeling_llama")
    app.load()
    folder = tempfile.mkdtemp()
    tables = {"data": {"name": "synthetic", "train": 60, "test": 60, "minimum": 5},
              "federation": {"clients": 3, "per-round": 2, "rounds": 1},
              "engine": {"device": "cpu"}}  # fmt: skip
    execute(parse(tables), Path(folder, "run"))
    shutil.rmtree(folder)
    return {
        name: getattr(importlib.import_module(module), command)
        for name, (module, command) in COMMANDS.items()
    }


def serve(orders: TextIO, early: bool) -> None:
    """Start a fork for each line, which holds a command and whether its output is unwanted."""
    commands = load() if early else {}
    for line in orders:
        commands = commands or load()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system clears away ended forks
        words, silent = json.loads(line)
        if not os.fork():
            _be(commands[words[0]], words, silent)


def _be(command: Command, words: list[str], silent: bool) -> None:
    """Do what the process of that command would, and end."""
    code: Any = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if silent:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        sys.argv = words
        _show(words)
        code = command()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _show(words: list[str]) -> None:
    """Write the command where /proc shows it, so that who looks for an app finds the fork."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = map(int, fields[ARGUMENTS])
    line = "\0".join(words).encode()[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def main() -> None:
    early = sys.argv.pop(1) == "early"
    reading, writing = os.pipe()
    if not os.fork():  # while there are no threads
        os.close(writing)
        serve(os.fdopen(reading), early)
        os._exit(0)
    os.close(reading)
    orders = os.fdopen(writing, "w", buffering=1)

    def start(command: list[str], **options: Any) -> None:
        orders.write(json.dumps([command, "stdout" in options]) + "\n")

    gate: Any = superlink_auth  # which writes the token of each task into a file
    gate.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    gate.superexec()


if __name__ == "__main__":
    main()
