"""The first link: where a direction comes from."""

from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Context, Link, State


def gradient() -> Link:
    """The mini-batch or full-batch gradient at X; its state is the last loss [S]."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        loss, slope = context.gradient(context.params)
        return slope, {"loss": loss}

    return Link("gradient", lambda params: {}, update)


def released() -> Link:
    """What the Gaussian mechanism releases of the lot's gradient at X; no loss leaves the data."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        return context.released([(1.0, context.params)]).gradient, state

    return Link("gradient", lambda params: {}, update)
