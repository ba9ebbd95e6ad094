"""The schedule of step sizes that a config names."""

from collections.abc import Callable

from fedmuon.config.load import Config
from fedmuon.config.user_objects import guard, make_named, user_objects
from fedmuon.core.registry import require_callable
from fedmuon.federated.plan import as_factor
from fedmuon.optim.schedules import SCHEDULES


def schedule_of(config: Config) -> Callable[[int], float] | None:
    """Return the schedule as a function from a round to a step-size factor, or None."""
    if (schedule := make_named(config, "schedule", SCHEDULES)) is None:
        return None
    if user_objects(config).schedule is None:
        return schedule
    within = guard(config, "schedule")
    with within:
        called = require_callable(schedule, "schedule", "a function of the round", within.named)
    return within.calling(called, as_factor)
