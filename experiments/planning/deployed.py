"""Rounds of a deployment, from processes like those that Flower starts for its messages.

Constants were found by deployments of 3 and 4 clients on 2 cores beside such processes: they count
processes, or are seconds of Flower's own polling, and no machine's speed. Of a start they are
rough. `python -m benchmarks.plan --only deployment` holds them to a run.
"""

import math
import os
import tempfile
from pathlib import Path

from fedmuon.experiments.engines.probe import probed
from fedmuon.experiments.planning.pace import Pace
from fedmuon.federated.rounds import ServerState
from fedmuon.runs.loop import Run

WAIT = 1.0  # seconds of a round in which everybody waits for the next look
# The rest in processes that say who they are.
SERIAL = 1.5  # before any SuperNode starts
EACH = 0.75  # of a SuperNode, of which as many start at once as there are cores
ASKED = 0.5  # of each question who it is; the first are answered while other nodes start


def deployed(run: Run, state: ServerState) -> tuple[Pace, float, float, int, int, int, int]:
    """What `Engine` has of it; rounds are not tried."""
    from fedmuon.server import message_sizes

    federation, cores = run.config.federation, os.cpu_count() or 1
    asked = message_sizes.requests(run.config, run.experiment, state)
    who = message_sizes.questions(range(federation.clients))
    with tempfile.TemporaryDirectory(prefix="plan-of-fedmuon-") as folder:
        some, place = min(cores, len(asked), len(who)), Path(folder)
        query, _ = probed(who[:some], federation.clients, place)
        train, memory = probed(asked[:some], federation.clients, place)
    later = train * math.ceil(len(asked) / some) + WAIT
    turns = len(who) / some
    first, start = query * ASKED * turns, query * (SERIAL + EACH * turns)
    sent = message_sizes.on_link(run.config, run.experiment, state)
    pace = Pace(first, later, some)
    return pace, start, 0.0, federation.clients, memory, sent.down, sent.up
