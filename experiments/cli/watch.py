"""`fedmuon watch`, and `--watch` of commands that run something: a page that follows runs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedmuon.core.errors import Interrupted
from fedmuon.experiments.cli.options import console, refuse

Watch = Annotated[
    bool, Option("--watch", help="Print the address of a page, on this machine, that follows it.")
]


def watch(
    folder: Annotated[Path, Argument(help="A run directory, or a folder of them.")] = Path("runs"),
) -> None:
    """Follow runs on a page in the browser, on this machine alone, until Ctrl-C.

    Example: [bold]fedmuon watch runs[/]
    """
    from fedmuon.experiments.inspect.watch_server import Server

    if not folder.is_dir():
        refuse(f"{folder} is no folder: name a run directory, or a folder that holds some")
    try:
        server = Server(folder)
    except OSError as error:
        refuse(f"no page can be served on 127.0.0.1 ({error.strerror}): free a port, or a socket")
    with server, contextlib.suppress(Interrupted):
        _say(f"{server.url} follows {folder} until Ctrl-C")
        server.serve_forever()


@contextlib.contextmanager
def followed(folder: Path, wanted: bool) -> Iterator[None]:
    """Serve the page of what is within, if it is wanted."""
    from fedmuon.experiments.inspect.watch_server import watched

    with watched(folder, _say) if wanted else contextlib.nullcontext():
        yield


def _say(sentence: str) -> None:
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)
