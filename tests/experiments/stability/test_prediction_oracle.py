"""The predicted gap and its exact check against a NumPy copy of FedAvg with sample weights."""

import numpy as np
import pytest
from conftest import small

from fedmuon.data.neighbours import held_out
from fedmuon.data.partition import weights
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.influence import smooth
from fedmuon.experiments.stability.predicted_gap import Groups, HeldOutEnd, predict
from fedmuon.experiments.stability.replaced_gap import draw_replacements, replace_samples

STEP = 1e-3  # of the weights, for central differences


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    out = tmp_path_factory.mktemp("oracle") / "run"
    tables = {
        "local": {"recipe": "fedavg", "lr": 6.0, "steps": 2},
        "data": {"train": 48},
        "federation": {"aggregate": "by-samples", "clients": 3, "per-round": 2, "rounds": 6},
        "engine": {"dtype": "float64"},
    }  # fmt: skip
    execute(small(tables), out)
    return FinishedRun.open(out)


class FedAvg:
    """FedAvg on the matrix task, with a weight for each sample and for each extra sample."""

    def __init__(self, run: FinishedRun) -> None:
        shards, local = run.experiment.shards, run.config.local
        self.inputs, self.labels = shards.inputs.numpy().copy(), shards.labels.numpy()
        self.sizes, self.lr, self.steps = run.data.sizes, local.lr, local.steps
        self.start = run.model("initial")["weight"][0].numpy()
        self.schedule = run.experiment.plan.schedule()
        self.owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        chances = weights(self.sizes, run.config.federation.risk_weights)
        self.sample_weights = (chances / self.sizes)[self.owner]

    def losses(self, model: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return 1 - self._chances(model, inputs)[np.arange(len(labels)), labels]

    def train(
        self,
        factors: np.ndarray,
        extra: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Train with these factors of the samples. `extra`: inputs, labels, clients, weights."""
        model = self.start
        for cohort in self.schedule:
            sizes = self.sizes[cohort]
            ends = [self._local(model, int(i), factors, extra) for i in cohort]
            model = np.einsum("k,kdc->dc", sizes / sizes.sum(), np.stack(ends))
        return model

    def _local(
        self, model: np.ndarray, client: int, factors: np.ndarray,
        extra: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None,
    ) -> np.ndarray:  # fmt: skip
        mine = self.owner == client
        parts = [(self.inputs[mine], self.labels[mine], factors[mine])]
        if extra is not None:
            inputs, labels, clients, weight = extra
            its = clients == client
            parts.append((inputs[its], labels[its], weight[its]))
        for _ in range(self.steps):
            slope = sum(self._slope(model, *part) for part in parts)
            model = model - self.lr * slope / self.sizes[client]
        return model

    def _slope(
        self, model: np.ndarray, inputs: np.ndarray, labels: np.ndarray, factors: np.ndarray
    ) -> np.ndarray:
        chances = self._chances(model, inputs)
        right = chances[np.arange(len(labels)), labels]
        slopes = right[:, None] * (chances - np.eye(chances.shape[1])[labels])
        return inputs.T @ (factors[:, None] * slopes)

    @staticmethod
    def _chances(model: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        logits = inputs @ model
        raised = np.exp(logits - logits.max(1, keepdims=True))
        return raised / raised.sum(1, keepdims=True)


def influence(oracle: FedAvg) -> np.ndarray:
    """s_ab [n, n]: the derivative of the loss of sample a by the weight of sample b."""
    count = len(oracle.labels)
    columns = []
    for b in range(count):
        ends = []
        for sign in (1, -1):
            factors = np.ones(count)
            factors[b] += sign * STEP
            model = oracle.train(factors)
            ends.append(oracle.losses(model, oracle.inputs, oracle.labels))
        columns.append((ends[0] - ends[1]) / (2 * STEP))
    return np.stack(columns, 1)


def trace(oracle: FedAvg, matrix: np.ndarray, same_label: bool = True) -> float:
    """The sum of w_a (mean of s_ab over other samples b of its client and label - s_aa)."""
    total = 0.0
    for a, label in enumerate(oracle.labels):
        alike = (oracle.labels == label) if same_label else np.ones(len(oracle.labels), bool)
        others = alike & (oracle.owner == oracle.owner[a])
        others[a] = False
        if not others.any():
            others = alike & (oracle.owner != oracle.owner[a])
        total += oracle.sample_weights[a] * (matrix[a, others].mean() - matrix[a, a])
    return total


def test_the_prediction_is_the_trace_of_finite_differences(run: FinishedRun) -> None:
    oracle = FedAvg(run)
    trained = oracle.train(np.ones(len(oracle.labels)))
    np.testing.assert_allclose(trained, run.model()["weight"][0].numpy(), atol=1e-12)
    matrix, predicted = influence(oracle), predict(run, 600)
    error = predicted.standard_error
    assert abs(predicted.value - trace(oracle, matrix)) < 4 * error
    # negative controls: without the mean over the same label, and with that of the whole client
    alone = -float(oracle.sample_weights @ np.diag(matrix))
    assert abs(predicted.value - alone) > 4 * error
    assert abs(predicted.value - trace(oracle, matrix, same_label=False)) > 4 * error


def test_the_prediction_at_held_out_samples_is_the_trace_of_finite_differences(
    run: FinishedRun,
) -> None:
    oracle, groups = FedAvg(run), Groups.of(run)
    end = HeldOutEnd.of(run, smooth(run), groups, 2)
    assert end is not None
    inputs, labels = end.samples.inputs.numpy(), end.samples.labels.numpy()
    ones, count = np.ones(len(oracle.labels)), len(labels)
    pairs = list(zip(end.client.tolist(), labels.tolist(), strict=True))
    matrix = np.zeros((count, count))
    for c in range(count):
        ends = []
        for sign in (1, -1):
            weight = np.zeros(count)
            weight[c] = sign * STEP
            model = oracle.train(ones, (inputs, labels, end.client, weight))
            ends.append(oracle.losses(model, inputs, labels))
        matrix[:, c] = (ends[0] - ends[1]) / (2 * STEP)
    exact = 0.0
    for client, label in dict.fromkeys(pairs):
        mine = np.array([pair == (client, label) for pair in pairs])
        members = (oracle.owner == client) & (oracle.labels == label)
        part, size = matrix[np.ix_(mine, mine)], mine.sum()
        others = (part.sum() - np.trace(part)) / (size * (size - 1))
        exact += oracle.sample_weights[members].sum() * (others - np.trace(part) / size)
    predicted = predict(run, 600, ends=True)
    assert predicted.outside is not None
    error = predicted.outside.std(ddof=1) / np.sqrt(600)
    assert abs(predicted.outside.mean() - exact) < 4 * error
    assert abs(predicted.outside.mean() + exact) > 4 * error  # negative control: the wrong sign


def test_exact_replacements_are_runs_with_another_sample(run: FinishedRun) -> None:
    oracle, count = FedAvg(run), 20
    rows, found = draw_replacements(run, count), replace_samples(run, count)
    before = oracle.train(np.ones(len(oracle.labels)))
    normalize = run.config.data.normalize
    for (client, position, new), change in zip(rows.tolist(), found.changes, strict=True):
        a = int(run.data.offsets[client]) + position
        assert new in held_out(run.data, run.source, client)
        assert run.source.labels[new] == oracle.labels[a]
        sample = oracle.inputs[a : a + 1].copy(), oracle.labels[a : a + 1]
        oracle.inputs[a] = run.source.rows(normalize, np.array([new]))[0]
        after = oracle.train(np.ones(len(oracle.labels)))
        oracle.inputs[a] = sample[0][0]
        expected = oracle.losses(after, *sample)[0] - oracle.losses(before, *sample)[0]
        assert change == pytest.approx(expected, abs=1e-12)
    assert np.abs(found.changes).max() > 1e-6  # negative control: the changes are not all 0


@pytest.mark.slow
def test_prediction_and_exact_replacements_agree(run: FinishedRun) -> None:
    predicted, exact = predict(run, 200, ends=True), replace_samples(run, 400)
    mean = predicted.both_ends
    assert mean is not None
    assert abs(exact.value - mean.mean()) < 4 * exact.standard_error
    assert abs(exact.value) > 4 * exact.standard_error
