"""Asynchronous modes: the server updates the model while clients still train older models.

A mode says after how many replies the server updates the model, how much a late reply counts, and
which replies are discarded. A reply that is tau updates late has the staleness tau.

| mode        | replies per update | weight of a reply   | discarded if      | source             |
|-------------|--------------------|---------------------|-------------------|--------------------|
| `fedbuff`   | `buffer`           | 1 / sqrt(1 + tau)   | never             | Nguyen et al. 2022 |
| `threshold` | `buffer`           | 1                   | tau >= R k^growth | arXiv:2605.18174   |
| `fedasync`  | 1                  | mixing (1 + tau)^-p | never             | Xie et al. 2019    |

k = 1, 2, ... is the number of the update. The modes `fedbuff` and `threshold` add weighted changes
to the newest model. `fedasync` moves the newest model towards the client's model.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.federated.clock import ATTEMPTS, Devices, Timetable


@dataclass(frozen=True)
class LateRule:
    """What the server does with the replies of clients that train older models.

    Attributes:
        mode: The name of the mode, for errors.
        replies: Number of replies after which the server updates the model.
        weight: Function from the staleness of a reply to its weight.
        limit: Function from the number of earlier updates to the staleness from which a reply is
            discarded.
        mixes: Whether a reply pulls the newest model towards the client's model.
    """

    mode: str
    replies: int
    weight: Callable[[int], float]
    limit: Callable[[int], float] = lambda updates: math.inf
    mixes: bool = False


def late_rule(config: Config) -> LateRule:
    """Return the rule of the configured mode."""
    table, working = config.devices, config.federation.per_round
    if table.mode == "fedbuff":
        return LateRule(table.mode, table.buffer or working, lambda late: (1 + late) ** -0.5)
    if table.mode == "fedasync":
        share, power = table.mixing, table.staleness_power
        return LateRule(table.mode, 1, lambda late: share * (1 + late) ** -power, mixes=True)
    threshold, growth = table.threshold or working, table.threshold_growth

    def limit(updates: int) -> float:
        return math.ceil(threshold * (updates + 1) ** growth)

    return LateRule(table.mode, table.buffer or 1, lambda late: 1.0, limit)


def late_replies(config: Config, devices: Devices) -> Timetable:
    """Simulate all rounds of a run in an asynchronous mode. A round is an update of the model."""
    federation, rule = config.federation, late_rule(config)
    schedule = updates(devices, federation.rounds, federation.per_round, rule)
    weights = tuple(
        np.array([rule.weight(round - int(version)) for version in versions])
        for round, versions in enumerate(schedule.versions)
    )
    return replace(schedule, weights=weights, mixes=rule.mixes)


def updates(devices: Devices, rounds: int, many: int, rule: LateRule) -> Timetable:
    """Simulate the updates: `many` clients work at a time.

    A client starts when another client has replied or is lost. Simultaneous replies arrive in the
    order of the client numbers, and before any client starts. A client does not start again while
    its reply is in the buffer, because its random draws would repeat.
    """
    now, starts, waiting = 0.0, 0, dict[int, int]()  # client -> the round in which it started
    last_starts = 0  # number of attempts until the last update
    working: list[tuple[float, int, int, bool]] = []  # end, client, round, and whether it is lost
    answered, versions, ends, losses, discarded = [], [], [], [0], [0]
    while len(ends) < rounds:
        if starts - last_starts > 10 * ATTEMPTS * many:
            raise InputError(
                f"round {len(ends) + 1} of [devices] mode = {rule.mode!r} has received too few "
                f"replies after {starts - last_starts} attempts to start clients. Raise [devices] "
                "available, or lower [devices] dropout."
            )
        busy = [client for _, client, _, _ in working]
        start, clients = devices.choose(
            now, starts, many - len(busy), barred=(*sorted(busy), *sorted(waiting))
        )
        if start > now and working:
            clients = clients[:0]  # no client is available yet, and a reply may come earlier
        else:
            now = start
        for client in map(int, clients):
            loss, needed = devices.lost_after(client, starts), float(devices.needed[client])
            end = now + min(needed, loss)
            heapq.heappush(working, (end, client, len(ends), loss < math.inf))
        starts += 1
        if not working:
            continue
        now = working[0][0]
        while working and working[0][0] == now and len(ends) < rounds:
            _, client, version, is_lost = heapq.heappop(working)
            late = not is_lost and len(ends) - version >= rule.limit(len(ends))
            losses[-1] += is_lost or late
            discarded[-1] += late
            if not is_lost and not late:
                waiting[client] = version
            if len(waiting) == rule.replies:
                answered.append(np.array(sorted(waiting)))
                versions.append(np.array([waiting[client] for client in sorted(waiting)]))
                ends.append(now)
                losses.append(0)
                discarded.append(0)
                waiting, last_starts = {}, starts
    return Timetable(
        tuple(answered), tuple(answered), np.array(ends), False, tuple(versions),
        tuple(losses[:rounds]), discarded=tuple(discarded[:rounds]) if any(discarded) else (),
    )  # fmt: skip
