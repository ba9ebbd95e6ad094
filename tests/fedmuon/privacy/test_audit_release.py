"""The code of private steps under audit: within its claim as it is, caught where it breaks it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from fedmuon.experiments.auditing.private_step import Step, examples, step
from fedmuon.federated.client_data import Shard
from fedmuon.privacy import audit
from fedmuon.privacy.accounting.composition import epsilon
from fedmuon.privacy.audit import Setting, counted
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.base import Batch
from fedmuon.tasks.matrix import MatrixTask

POPULATION = 16
NETWORK = Setting(1.0, 0.5, 1, 2)
MATRIX = Setting(0.7, 0.25, 2, 1)
DELTA = 0.05
SURE = 1 - 1e-7  # for what nobody can repeat


def of_network(blocks: int = NETWORK.blocks, seed: int = 0) -> Step:
    noise, rate = NETWORK[:2]
    return step(noise, rate * POPULATION, POPULATION, blocks, np.random.default_rng(seed))


def of_matrix() -> Step:
    """The matrix classifier, whose clipped gradients are another code."""
    one, rng = of_network(1), np.random.default_rng(0)
    data = examples(POPULATION, 1)
    shard, task = Shard(Batch(data.inputs.flatten(1), data.labels)), MatrixTask(4, 3)
    return replace(one, task=task, shard=shard, at=task.initial(rng), rng=rng)


def repeatable(own: Step, setting: Setting, kind: type[Mechanism] = Mechanism) -> Step:
    """The same, with a mechanism of that kind that draws from a seed."""
    noise, rate = setting[:2]
    mechanism = kind(own.mechanism.clipping, noise, rate * POPULATION, repeatable=True)
    return replace(own, mechanism=mechanism)


def shown(own: Step, setting: Setting, count: int, confidence: float = 0.95) -> float:
    return counted(audit.trials(setting, own.observe, count), DELTA, confidence).epsilon


def claimed(setting: Setting) -> float:
    return epsilon(*setting[:3], DELTA, setting.blocks).upper


@pytest.mark.slow
def test_a_private_step_keeps_its_claim() -> None:
    """And an audit sees a good part of what it spends."""
    own = repeatable(of_network(), NETWORK)
    assert 0.4 * claimed(NETWORK) < shown(own, NETWORK, 1500) < claimed(NETWORK)


class HalfNoise(Mechanism):
    """Draws half the noise that it is asked for."""

    def releases(self, task, batches, draws, step=0):
        quiet = Mechanism(self.clipping, self.noise / 2, self.lot, self.repeatable)
        return quiet.releases(task, batches, draws, step)


class TwiceTheBound(Mechanism):
    """Clips at 2 C, with noise for C."""

    def releases(self, task, batches, draws, step=0):
        loose = replace(self.clipping, bound=2 * self.clipping.bound)
        same = Mechanism(loose, self.noise / 2, self.lot, self.repeatable)
        return same.releases(task, batches, draws, step)


class WholeLots(Mechanism):
    """Every lot is all of the data."""

    def rows(self, draw, size):
        return np.arange(size)


@pytest.mark.parametrize(
    "defect",
    [HalfNoise, *(pytest.param(one, marks=pytest.mark.slow) for one in (TwiceTheBound, WholeLots)),
     None],
)  # fmt: skip
def test_a_defect_is_caught(defect: type[Mechanism] | None) -> None:
    """Negative controls: each shows more than is claimed; where there is none, less is shown."""
    own = repeatable(of_matrix(), MATRIX, defect or Mechanism)
    found = shown(own, MATRIX, 700)
    assert found > 1.5 * claimed(MATRIX) if defect else found < claimed(MATRIX)


def with_the_canary(x: np.ndarray) -> np.ndarray:
    """The law of an aligned sum: N(sqrt(2), 1) in half of the lots, else N(0, 1)."""
    return (stats.norm.cdf(x) + stats.norm.cdf(x - np.sqrt(2))) / 2


@pytest.mark.slow
def test_secret_noise_and_lots_have_the_projected_law() -> None:
    """As in a run, where nothing is keyed: no two audits agree."""
    own = of_network()
    present, absent = own.observe((300, 1), True).ravel(), own.observe((300, 1), False).ravel()
    assert stats.kstest(present, with_the_canary)[1] > 1e-7
    assert stats.kstest(absent, "norm")[1] > 1e-7
    assert stats.kstest(absent, with_the_canary)[1] < 1e-7
    assert not np.array_equal(own.observe((2, 2), True), own.observe((2, 2), True))
    assert shown(own, NETWORK, 100, SURE) < claimed(NETWORK)


@pytest.mark.parametrize("blocks", [1, 3, 49])
def test_the_canary_is_clipped_in_every_block_and_orthogonal_to_all_others(blocks: int) -> None:
    own = of_network(blocks, seed=blocks)
    clipping, point = own.mechanism.clipping, [(1.0, own.at)]
    lengths = [float(value.norm()) for value in own.canary.values()]
    assert len(lengths) == blocks and min(lengths) > 5 * clipping.bound
    assert {value.dtype for value in own.at.values()} == {torch.float32}
    alone, others = (
        own.task.clipped(point, [own.shard.batch(rows)], clipping)[1]
        for rows in (np.array([POPULATION - 1]), np.arange(POPULATION - 1))
    )
    for name, unit in own.directions.items():
        assert float((alone[name] * unit).sum()) == pytest.approx(clipping.bound, rel=1e-5)
        assert float(others[name].norm()) > 0 == float((others[name] * unit).sum())
