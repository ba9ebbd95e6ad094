"""Measure a round with 1,000 of 10^9 clients on one process, with and without edge servers.

    python -m benchmarks.hierarchy [--clients N] [--per-round K] [--rows 784] [--columns 10]

The sampler, the messages (written, read and checked as in a run) and `by-samples`, which combines
the replies, are the real code. The clients are simulated: their replies are random arrays instead
of results of local steps, and no data set is distributed. The edge servers run one after the other,
and only the slowest counts for the critical path. Times are CPU seconds, without any network.
"""

import argparse
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.page import say
from fedmuon.core.arrays import npy_bytes
from fedmuon.core.rng import Draw, generator
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.wire import received
from fedmuon.optim.aggregators import by_samples
from fedmuon.optim.stage import Reply
from fedmuon.tasks.base import Params

RATE = 1.25e8  # bytes per second of a link of 1 Gbit/s
MOST = 1000  # the number of samples of a client is below this


@dataclass(frozen=True)
class Sample:
    """A cohort, with the CPU seconds and the memory that drawing it took."""

    cohort: np.ndarray
    seconds: float
    memory: int  # peak memory in bytes


@dataclass(frozen=True)
class Costs:
    """Costs of one reply.

    Attributes:
        read: CPU seconds to read and check the message.
        combine: CPU seconds to combine the reply with the others.
        size: Bytes of the message.
    """

    read: float
    combine: float
    size: int


def drawn(clients: int, per_round: int, seed: int = 0) -> Sample:
    """Draw a cohort with the sampler of a run."""
    plan = RandomnessPlan(seed, clients, per_round, 1)
    plan.participants(0)  # warm up: the first draw also loads libraries
    begun, before = time.process_time(), tracemalloc.is_tracing()
    cohort = plan.participants(0)
    seconds = time.process_time() - begun
    if not before:
        tracemalloc.start()
    tracemalloc.reset_peak()
    held, _ = tracemalloc.get_traced_memory()
    plan.participants(0)
    _, peak = tracemalloc.get_traced_memory()
    if not before:
        tracemalloc.stop()
    return Sample(cohort, seconds, peak - held)


def messages(cohort: np.ndarray, shape: tuple[int, int]) -> list[tuple[int, int, bytes]]:
    """Return the messages of a cohort: client, n_i and the float64 model [1, m, n] as bytes."""
    found = []
    for client in cohort.tolist():
        rng = generator(0, Draw.PROBE, client=client)
        model = npy_bytes(rng.standard_normal((1, *shape)))
        found.append((client, int(rng.integers(1, MOST)), model))
    return found


def read(sent: Sequence[tuple[int, int, bytes]], like: Params) -> list[Reply]:
    """Read and check the messages."""
    return [
        Reply(client, received({"model.weight": data}, like, {})[0], {}, torch.zeros(1), samples)
        for client, samples, data in sent
    ]


def combined(replies: Sequence[Reply]) -> Reply:
    """Return the reply of an aggregator: the weighted mean and the total number of samples."""
    found, _ = by_samples().combine(replies)
    samples = sum(one.samples for one in replies)
    return replace(replies[0], params=found, samples=samples)


def compared(
    sent: Sequence[tuple[int, int, bytes]], shape: tuple[int, int], edges: int
) -> tuple[Costs, float, float, float]:
    """Combine a cohort with one server, and with `edges` edge servers and a root.

    Returns:
        The costs of a reply, the seconds of the single server, the seconds of the slowest edge
        server plus the root, and the relative difference of the two models.
    """
    like = {"weight": torch.zeros(1, *shape, dtype=torch.float64)}
    begun = time.process_time()
    replies = read(sent, like)
    middle = time.process_time()
    flat = combined(replies)
    end = time.process_time()
    costs = Costs((middle - begun) / len(sent), (end - middle) / len(sent), len(sent[0][2]))
    del replies
    partial, took = [], []
    for part in np.array_split(np.arange(len(sent)), edges):
        start = time.process_time()
        partial.append(combined(read([sent[one] for one in part], like)))
        took.append(time.process_time() - start)
    upward = [(one.client, one.samples, npy_bytes(one.params["weight"].numpy()))
              for one in partial]  # fmt: skip
    start = time.process_time()
    root = combined(read(upward, like))
    took_root = time.process_time() - start
    apart = (flat.params["weight"] - root.params["weight"]).norm() / flat.params["weight"].norm()
    return costs, end - begun, max(took) + took_root, float(apart)


def table(costs: Costs) -> list[str]:
    """Extrapolate the server's seconds per round to cohorts up to 10^6.

    A server handles one reply after the other. `work` is the time on one processor, and `link` is
    the time of the messages at 1 Gbit/s. With two levels there are sqrt(K) edge servers with
    sqrt(K) clients each.
    """
    each, wire = costs.read + costs.combine, costs.size / RATE
    lines = ["       K   flat: work     link    held MB   two levels: work     link"]
    for exponent in range(3, 7):
        count = 10**exponent
        path = 2 * int(np.ceil(np.sqrt(count)))  # replies on the critical path
        lines.append(
            f"{count:>8,} {each * count:>10.3f} s {wire * count:>7.2f} s "
            f"{costs.size * count / 1e6:>9,.0f} {each * path:>16.4f} s {wire * path:>7.3f} s"
        )
    return lines


def main() -> None:
    """Draw, compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("clients", 10**9), ("per-round", 1000), ("rows", 784), ("columns", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    shape, size = (asked.rows, asked.columns), asked.per_round
    for clients in sorted({10**6, 10**7, 10**8, asked.clients}):
        one = drawn(clients, size)
        print(f"sample {size:,} of {clients:,}: {1e3 * one.seconds:.2f} ms, "
              f"{one.memory / 1e3:.0f} kB at the peak")  # fmt: skip
    sent = messages(drawn(asked.clients, size).cohort, shape)
    say("replies drawn")
    costs, flat, tree, apart = compared(sent, shape, int(np.sqrt(size)))
    print(f"a reply of {costs.size:,} bytes: read {1e6 * costs.read:.1f} us, "
          f"combine {1e6 * costs.combine:.1f} us")  # fmt: skip
    print(f"a round: flat {flat:.4f} s, {int(np.sqrt(size))} edge servers and a root {tree:.4f} s "
          f"(critical path); relative difference {apart:.1e}")  # fmt: skip
    print("Extrapolated from these costs:", *table(costs), sep="\n")


if __name__ == "__main__":
    main()
