"""Measure secret noise: its speed, its fit to the distribution, and private runs with it.

    python -m benchmarks.noise speed [--draws 1000000]
    python -m benchmarks.noise fit [--draws 10000000]
    python -m benchmarks.noise runs [--seeds 3] [--set local.recipe=dp-sgd ...]

`speed` prints nanoseconds per draw, the best of several tries. `fit` compares draws from a key
stream with the discrete Gaussian in three tests:

- chi-square over all integers at sigma = 64. Tail cells with fewer than 25 expected draws are
  pooled. As a control, the draws are also compared with a distribution that is 0.5% wider.
- chi-square over 1,000 cells of equal probability, on the lattice of a release.
- a two-sided binomial test of the number of draws beyond 3, 4, 5 and 6 sigma.

`runs` prints for each kind of noise the interval of epsilon, the accuracies, and the smallest CPU
seconds of a private run.
"""

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from time import process_time

import numpy as np
import torch
from scipy import special, stats

from benchmarks.page import say
from fedmuon.config.load import load
from fedmuon.core.rng import normal
from fedmuon.experiments.run import execute
from fedmuon.privacy.mechanisms.discrete import STRIPS, gaussian
from fedmuon.privacy.mechanisms.gaussian import release, release_on_grid
from fedmuon.privacy.mechanisms.lattice import BITS, DEVIATION
from fedmuon.privacy.noise import KeyStream, normals, poisson_rows, secret_streams
from fedmuon.tasks.per_example.clipping import Clipping

TRIES, PART = 7, 10**6
RUN = ["local.recipe=dp-muon", "task.name=network", "task.model=mlp", "local.lr=0.05",
       "privacy.epsilon=8", "privacy.bound=0.5", "federation.clients=2", "federation.per-round=2",
       "federation.rounds=10", "privacy.lot=256", "privacy.delta=1e-5"]  # fmt: skip
KINDS = {
    "pcg64, continuous": ["privacy.noise-source=pcg64"],
    "secure, continuous": [],
    "secure, grid": ["privacy.arithmetic=grid"],
}


def speed(draws: int) -> None:
    """Print nanoseconds per draw."""
    stream, rng = KeyStream(), np.random.default_rng()
    sums, how = {"a": torch.zeros(1, draws)}, (Clipping(), 1.0, 64.0)
    work: dict[str, Callable[[], object]] = {
        "a normal, PCG64": lambda: rng.standard_normal(draws),
        "a normal, key stream": lambda: stream.standard_normal((draws,)),
        "an integer of the lattice, key stream": lambda: gaussian(stream.random_raw, draws, BITS),
        "a word of 64 bits, PCG64": lambda: rng.bit_generator.random_raw(draws),
        "a word of 64 bits, key stream": lambda: stream.random_raw(draws),
        "a row of a lot, PCG64": lambda: rng.random(draws) < 0.1,
        "a row of a lot, key stream": lambda: poisson_rows(stream, draws, 0.1),
        "an entry released, PCG64": lambda: release(
            sums, *how, lambda shape, block: normal([rng], shape)
        ),
        "an entry released, key stream": lambda: release(sums, *how, normals(secret_streams())),
        "an entry released on the lattice": lambda: release_on_grid(
            sums, *how, lambda block: [stream]
        ),
    }
    best = dict.fromkeys(work, math.inf)
    for _ in range(TRIES):
        for name, one in work.items():
            begun = process_time()
            one()
            best[name] = min(best[name], process_time() - begun)
    for name, seconds in best.items():
        say(f"{name:40}{seconds / draws * 1e9:8.2f} ns")


def fit(draws: int) -> None:
    """Print p-values. A small p-value would mean that the draws do not fit."""
    stream = KeyStream()
    at, cells = np.arange(-9 * STRIPS, 9 * STRIPS + 1), special.ndtri(np.arange(1, 1000) / 1000)
    coarse, fine = np.zeros(len(at), int), np.zeros(1000, int)
    beyond = dict.fromkeys((3, 4, 5, 6), 0)
    for start in range(0, draws, PART):
        count = min(PART, draws - start)
        small = gaussian(stream.random_raw, count, 0)
        coarse += np.bincount(small + 9 * STRIPS, minlength=len(at))
        drawn = gaussian(stream.random_raw, count, BITS) / DEVIATION
        fine += np.bincount(np.searchsorted(cells, drawn), minlength=1000)
        for far in beyond:
            beyond[far] += int((np.abs(drawn) > far).sum())
    for sigma in (STRIPS, 1.005 * STRIPS):
        p = pooled(at, coarse, sigma)
        say(f"{draws:,} draws at sigma = 64 against {sigma:g}, by integers: p = {p:.2g}")
    say(f"{draws:,} draws at sigma = 2^32, 1,000 cells: p = {stats.chisquare(fine).pvalue:.2g}")
    for far, many in beyond.items():
        share = 2 * special.ndtr(-far)
        likely = stats.binomtest(many, draws, share).pvalue
        say(f"beyond {far} sigma: {many:,} of {draws * share:,.2f} expected, p = {likely:.2g}")


def pooled(at: np.ndarray, counts: np.ndarray, sigma: float) -> float:
    """Return the chi-square p-value of counts of the integers `at`, with each tail in one cell."""
    chance = np.exp(-(at**2) / (2 * sigma**2))
    expected = chance / chance.sum() * counts.sum()
    inner = expected >= 25
    seen, likely = (
        [*one[inner], one[(at < 0) & ~inner].sum(), one[(at > 0) & ~inner].sum()]
        for one in (counts, expected)
    )
    return float(stats.chisquare(seen, likely).pvalue)


def runs(seeds: int, given: list[str]) -> None:
    """Run each kind in turn, at the same noise level."""
    found: dict[str, list[tuple[dict, float]]] = {name: [] for name in KINDS}
    for seed in range(seeds):
        for name, how in KINDS.items():
            config = load(None, [*RUN, *given, *how, f"federation.seed={seed}"])
            with tempfile.TemporaryDirectory() as folder:
                begun = process_time()
                summary = execute(config, Path(folder) / "run")
                found[name].append((summary, process_time() - begun))
    for name, rows in found.items():
        private = rows[0][0]["privacy"]
        accuracies = ", ".join(f"{one['accuracy']:.3f}" for one, _ in rows)
        say(f"{name:20} epsilon {private['lower']:.5f} to {private['upper']:.5f}, certified "
            f"{private['certified']}; accuracy {mean(one['accuracy'] for one, _ in rows):.3f} "
            f"({accuracies}); {min(seconds for _, seconds in rows):.2f} s")  # fmt: skip


def main() -> None:
    """Parse the arguments and run one of the three measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "fit", "runs"))
    parser.add_argument("--draws", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[])
    given = parser.parse_args()
    if given.what == "speed":
        speed(given.draws or 10**6)
    elif given.what == "fit":
        fit(given.draws or 10**7)
    else:
        runs(given.seeds, given.set)


if __name__ == "__main__":
    main()
