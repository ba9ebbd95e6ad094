"""Client processes that stay: one simulation on a Ray cluster, which many tests ask."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from fedmuon.config.load import Config
from fedmuon.experiments.engines.ray_engine import with_ray_grid

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

Result = TypeVar("Result")
Work = Callable[["Grid"], Any]


class LiveGrid:
    """A grid that is opened when first asked and keeps its warm workers until it is closed.

    A process has one Ray at a time: who wants another grid closes this one first.
    """

    def __init__(self, config: Config, client_app: "ClientApp") -> None:
        self._config, self._app = config, client_app
        self._asked: queue.Queue[tuple[Work, Future[Any]] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[["Grid"], Result], seconds: float = 500.0) -> Result:
        """What `work` returns or raises, called with the grid as a ServerApp is."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._live, daemon=True)
            self._thread.start()
        answer: Future[Result] = Future()
        self._asked.put((work, answer))
        return answer.result(seconds)

    def close(self) -> None:
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
            self._thread = None

    def _live(self) -> None:
        try:
            with_ray_grid(self._config, self._serve, client_app=self._app)
        except BaseException as error:  # the grid did not open: whoever waits is told
            while (waiting := self._asked.get()) is not None:
                waiting[1].set_exception(error)

    def _serve(self, grid: "Grid") -> None:
        while (asked := self._asked.get()) is not None:
            work, answer = asked
            try:
                answer.set_result(work(grid))
            except BaseException as error:
                answer.set_exception(error)
