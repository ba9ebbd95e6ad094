"""Layers that people bring, in runs: against plain loops of torch, in float64."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cut_off import run_until
from torch import Tensor, nn
from torch.nn import functional

import fedmuon
from fedmuon.config.load import Config, parse
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator, sample_keys
from fedmuon.experiments.run import execute
from fedmuon.federated.build import build_plan
from fedmuon.tasks.base import Batch
from fedmuon.tasks.dropout import Masks, Shapes, sample_axes
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipping import Clipping

SEED, FEATURES = 3, 6
X = np.random.default_rng(0).normal(size=(90, FEATURES))
Y = (X[:, 0] + X[:, 1] > 0).astype(int)
WRAP = 2**64


def settings(**local: Any) -> dict[str, dict[str, Any]]:
    return {
        "data": {"test": 18},
        "federation": {"clients": 4, "per-round": 3, "rounds": 3, "seed": SEED},
        "local": {"recipe": "fedavg", "lr": 0.2, "batch": 7, "steps": 2, **local},
        "engine": {"dtype": "float64"},
    }


def run(module: Any, config: dict | None = None, **more: Any) -> fedmuon.Result:
    return fedmuon.run(config or settings(), data=(X, Y), task=module, **more)


def plain_loop(
    result: fedmuon.Result,
    module: nn.Module,
    forward: Callable[[nn.Module, Tensor, tuple[int, int, int], np.ndarray], Tensor],
) -> dict[str, Tensor]:
    """FedAvg with torch.optim.SGD on copies of a module, and the weighted mean of their state
    dicts."""
    plan = build_plan(result.config.with_objects(result.given))
    dealt = np.load(result.path / "partition.npz")
    module = copy.deepcopy(module).double()
    for number in range(plan.rounds):
        ends, sizes = [], []
        for client in map(int, plan.participants(number)):
            mine = dealt["train_index"][dealt["client"] == client]
            own = copy.deepcopy(module).train()
            learned = [one for one in own.parameters() if one.requires_grad]
            sgd = torch.optim.SGD(learned, lr=result.config.local.lr)
            for step in range(plan.steps):
                rows = plan.rows(number, client, step, len(mine))
                rows = np.arange(len(mine)) if rows is None else rows
                inputs, labels = (torch.from_numpy(one[mine[rows]]) for one in (X, Y))
                sgd.zero_grad()
                outputs = forward(own, inputs, (number, client, step), rows)
                functional.cross_entropy(outputs, labels).backward()
                sgd.step()
            ends.append(own.state_dict())
            sizes.append(len(mine) if result.config.federation.aggregate == "by-samples" else 1)
        shares = torch.tensor(sizes).double() / sum(sizes)
        means = {
            name: torch.tensordot(shares, torch.stack([end[name].double() for end in ends]), 1)
            for name in ends[0]
        }
        module.load_state_dict(means)
    return module.state_dict()


def without_draws(own: nn.Module, inputs: Tensor, when: Any, rows: np.ndarray) -> Tensor:
    return own(inputs)


def largest_difference(result: fedmuon.Result, expected: dict[str, Tensor]) -> float:
    apart = [(torch.as_tensor(one) - expected[name]).abs() for name, one in result.model.items()]
    return max(float(one.max()) for one in apart)


# --- Dropout --------------------------------------------------------------------------------------


def finalized(value: int) -> int:
    """splitmix64's, with Python's whole numbers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % WRAP
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % WRAP
    return value ^ (value >> 31)


def mask_by_hand(
    when: tuple[int, int, int], rows: np.ndarray, number: int, entries: int, p: float
) -> Tensor:
    """[b, entries] of 0 and 1, for dropout `number` of a call."""
    round, client, step = when
    rng = generator(SEED, Draw.DROPOUT, round=round, client=client, step=step)
    first, stride = int(rng.integers(WRAP, dtype=np.uint64)), 0x9E3779B97F4A7C15
    found = []
    for row in map(int, rows):
        key = finalized((first + (row + 1) * stride) % WRAP)
        start = finalized((key + (number + 1) * 0xBF58476D1CE4E5B9) % WRAP)
        hashes = (finalized((start + (k + 1) * stride) % WRAP) for k in range(entries))
        found.append([float((one >> 11) / 2**53 >= p) for one in hashes])
    return torch.tensor(found, dtype=torch.float64)


def dropping(p: float = 0.4) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(FEATURES, 9), nn.Tanh(), nn.Dropout(p), nn.Linear(9, 8), nn.Dropout(p / 2)]
    return nn.Sequential(*layers, nn.Linear(8, 2))


@pytest.mark.parametrize("batch", [0, 7])
def test_a_run_with_dropout_is_a_plain_loop_with_the_same_masks(batch: int) -> None:
    def forward(own: Any, inputs: Tensor, when: Any, rows: np.ndarray) -> Tensor:
        hidden = own[1](own[0](inputs)) * mask_by_hand(when, rows, 0, 9, 0.4) / 0.6
        return own[5](own[3](hidden) * mask_by_hand(when, rows, 1, 8, 0.2) / 0.8)

    result = run(dropping(), settings(batch=batch))
    assert largest_difference(result, plain_loop(result, dropping(), forward)) < 1e-10

    def shifted(own: Any, inputs: Tensor, when: Any, rows: np.ndarray) -> Tensor:
        return forward(own, inputs, (when[0] + 1, *when[1:]), rows)

    assert largest_difference(result, plain_loop(result, dropping(), shifted)) > 1e-3


def test_masks_differ_between_rounds_clients_steps_samples_and_dropouts() -> None:
    seen = set()
    for when in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        for number in (0, 1):
            mask = mask_by_hand(when, np.arange(3), number, 64, 0.5)
            seen |= {tuple(row) for row in mask.tolist()}
    assert len(seen) == 4 * 2 * 3


def test_entries_of_masks_are_independent_coins() -> None:
    """Means of rows, of columns and of products of neighbours, within five standard deviations."""
    keys = torch.from_numpy(sample_keys(np.random.default_rng(0), None, 400))
    for p in (0.1, 0.5, 0.9):
        kept = Masks(keys, (0,)).kept(torch.zeros(400, 500, dtype=torch.float64), p)
        assert kept is not None and set(kept.unique().tolist()) == {0.0, 1.0}
        unit = (kept - (1 - p)) / (p * (1 - p)) ** 0.5
        for scores in (
            unit.mean(0) * 400**0.5, unit.mean(1) * 500**0.5,
            (unit[:, 1:] * unit[:, :-1]).mean(1) * 499**0.5,
            (unit[1:] * unit[:-1]).mean(1) * 500**0.5,
        ):  # fmt: skip
            assert float(scores.abs().max()) < 5 and 0.85 < float(scores.std()) < 1.15


class Encoder(nn.Module):
    """Attention and a perceptron with dropout, for samples of two tokens."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.batch_first = batch_first
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.3, batch_first=batch_first)
        self.read, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.read(x.unflatten(1, (2, 3)))
        tokens = self.layer(tokens if self.batch_first else tokens.transpose(0, 1))
        return self.head(tokens.mean(1 if self.batch_first else 0))


class Channels(nn.Module):
    """Dropouts of channels and alpha dropouts, by layers and by functions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.head = nn.Conv1d(1, 4, 3, padding=1), nn.Linear(24, 2)
        self.parts = nn.Sequential(nn.Dropout1d(0.2), nn.AlphaDropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.parts(self.conv(x[:, None]))
        hidden = functional.feature_alpha_dropout(hidden, 0.2, self.training)
        return self.head(functional.dropout(hidden.flatten(1), 0.1, self.training))


DROPPING: dict[str, Callable[[], nn.Module]] = {
    "layers": dropping,
    "encoder": lambda: Encoder(True),
    "sequence first": lambda: Encoder(False),
    "channels": Channels,
}


def task_of(module: nn.Module, **more: Any) -> NetworkTask:
    return NetworkTask(module.double().train(), (FEATURES,), torch.float64, **more)


def keyed_batch(seed: int, count: int = 9) -> Batch:
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.normal(size=(count, FEATURES)))
    keys = torch.from_numpy(sample_keys(rng, None, count))
    return Batch(inputs, torch.from_numpy(rng.integers(2, size=count)), keys=keys)


@pytest.mark.parametrize("name", DROPPING)
def test_masks_are_the_same_together_alone_and_in_pieces(name: str) -> None:
    """Clients in one call or in turns, all samples or one by one, and clipped sums without a bound
    that clips, have one gradient."""
    batches = [keyed_batch(seed) for seed in (0, 1)]
    together = task_of(DROPPING[name](), vectorized=True)
    start = {n: p.detach()[None].clone() for n, p in together.module.named_parameters()}
    stack = {n: torch.cat([value, 1.1 * value]) for n, value in start.items()}
    assert together.keyed
    loss, slope = together.gradient(stack, batches)
    turns = task_of(DROPPING[name](), vectorized=False)
    other_loss, other = turns.gradient(stack, batches)
    torch.testing.assert_close(loss, other_loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(slope, other, rtol=1e-10, atol=1e-12)
    turns.chunks.most = 1  # one sample at a time
    pieces = turns.gradient(stack, batches)[1]
    sums = together.clipped([(1.0, stack)], batches, Clipping("flat", 1e6))[1]
    for key, value in slope.items():
        torch.testing.assert_close(pieces[key], value, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(sums[key] / 9, value, rtol=1e-9, atol=1e-12)
    drawn_anew = [Batch(one.inputs, one.labels, keys=one.keys + 1) for one in batches]  # type: ignore[operator]
    assert not torch.allclose(together.gradient(stack, drawn_anew)[0], loss, rtol=1e-4)


def test_an_evaluation_drops_nothing() -> None:
    task, batch = task_of(Encoder(True)), keyed_batch(0)
    params = {n: p.detach()[None] for n, p in task.module.named_parameters()}
    losses = task.losses(params, batch)[0][0]
    module = copy.deepcopy(task.module).eval()
    expected = functional.cross_entropy(module(batch.inputs), batch.labels, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(task.gradient(params, [batch])[0], losses.mean(), rtol=1e-4)
    assert all(layer.training for layer in task.module.modules())  # as before


def test_attention_with_given_masks_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no entry is dropped, against torch's kernel; every kind of attention mask."""
    monkeypatch.setattr(Masks, "kept", lambda self, like, p, axes=None: torch.ones_like(like))
    q, k, v = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64)
    added, allowed = torch.randn(5, 5).double(), torch.rand(5, 5) < 0.7
    allowed.fill_diagonal_(True)
    kinds: list[dict[str, Any]] = [
        {}, {"is_causal": True}, {"attn_mask": added}, {"attn_mask": allowed}, {"scale": 0.3}
    ]  # fmt: skip
    for more in kinds:
        expected = functional.scaled_dot_product_attention(q, k, v, **more)
        with Masks(torch.arange(2)):
            found = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2, **more)
        torch.testing.assert_close(0.8 * found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", DROPPING)
def test_torch_draws_nothing_and_stays_as_it_is(name: str) -> None:
    before = torch.get_rng_state()
    task, batch = task_of(DROPPING[name]()), keyed_batch(0)
    torch.set_rng_state(before)
    params = {n: p.detach()[None] for n, p in task.module.named_parameters()}
    first = task.gradient(params, [batch])[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(task.gradient(params, [batch])[0], first)
    hidden = functional.dropout(torch.ones(1000), 0.5)
    assert not torch.equal(torch.get_rng_state(), before) and 300 < int((hidden > 0).sum()) < 700


def test_neighbours_share_the_masks() -> None:
    """A stack of coupled replicas is a loop over data sets; a replaced sample keeps the mask."""
    config = settings() | {"stability": {"trials": 2}}
    result = fedmuon.stability(config, data=(X, Y), task=dropping())
    assert 0 < max(one["perturbation"] for one in result.neighbours) < 0.5


def test_a_run_with_dropout_resumes_bit_identically(tmp_path: Path) -> None:
    def configured(module: nn.Module) -> Config:
        tables = settings() | {"task": {"name": "given"}, "output": {"checkpoint-every": 1}}
        tables["data"] = tables["data"] | {"name": "given"}
        return parse(tables).with_objects(UserObjects(data=(X, Y), task=module))

    run_until(2, configured(dropping()), tmp_path / "cut")
    execute(configured(dropping()), tmp_path / "cut", resume=True)
    whole = run(dropping())
    for name, value in fedmuon.Result(tmp_path / "cut").model.items():
        assert np.array_equal(whole.model[name], value)
    other = settings()
    other["federation"]["seed"] = SEED + 1
    assert not np.array_equal(run(dropping(), other).model["0.bias"], whole.model["0.bias"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_draw_the_same_masks(cluster: str) -> None:
    ray = settings()
    ray["engine"] |= {"name": "ray", "ray-address": cluster}
    here, there = run(dropping()), run(dropping(), ray)
    for name, value in here.model.items():
        np.testing.assert_allclose(there.model[name], value, rtol=1e-12, atol=1e-14)


def test_a_private_example_keeps_its_mask_whoever_else_is_in_the_lot() -> None:
    task, batch = task_of(dropping()), keyed_batch(0)
    params = {n: p.detach()[None] for n, p in task.module.named_parameters()}

    def contribution(rows: list[int]) -> dict[str, Tensor]:
        assert batch.keys is not None
        some = Batch(batch.inputs[rows], batch.labels[rows], keys=batch.keys[rows])
        return task.clipped([(1.0, params)], [some], Clipping("flat", 0.5))[1]

    alone, others, both = (contribution(rows) for rows in ([4], [0, 7], [0, 4, 7]))
    for name, value in both.items():
        torch.testing.assert_close(value - others[name], alone[name], rtol=1e-9, atol=1e-12)
    config = settings(recipe="dp-sgd", batch=0) | {
        "privacy": {"noise": 1.0, "bound": 1.0, "lot": 8, "insecure-reproducible-noise": True}
    }
    one, two = run(dropping(), config), run(dropping(), config)
    assert np.array_equal(one.model["0.bias"], two.model["0.bias"])


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda x: x + torch.randn_like(x), "global generator \\(randn_like\\)"),
        (lambda x: x * torch.rand(x.shape[-1]), "global generator \\(rand\\)"),
        (lambda x: x * float(np.random.rand()), "generator \\(numpy.random\\)"),  # noqa: NPY002
        (lambda x: x * random.random(), "generator \\(random\\)"),
        (lambda x: x * functional.dropout(torch.ones(4), 0.5), "no axis of samples"),
    ],
)
def test_draws_that_cannot_be_keyed_are_rejected(forward: Any, words: str) -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(forward(self.first(x)))

    with pytest.raises(InputError, match=words):
        run(Drawing())


def test_the_axis_of_the_samples_is_found() -> None:
    one, two = Shapes([(1, 3), (5, 1, 2), (4, 6)]), Shapes([(2, 3), (5, 2, 2), (8, 6)])
    assert sample_axes(one, two) == (0, 1, 0)
    with pytest.raises(InputError, match="no axis"):
        sample_axes(Shapes([(3,)]), Shapes([(3,)]))


# --- Frozen and tied parameters, norms ------------------------------------------------------------


def test_frozen_parameters_stay_and_are_not_sent() -> None:
    def make() -> nn.Module:
        found = dropping(0.0)
        found[3].weight.requires_grad_(False)
        found[0].bias.requires_grad_(False)
        return found

    result = run(make())
    assert set(result.model) == {"0.weight", "3.bias", "5.weight", "5.bias"}
    assert largest_difference(result, plain_loop(result, make(), without_draws)) < 1e-10
    assert largest_difference(result, plain_loop(result, dropping(0.0), without_draws)) > 1e-3
    table = (result.path / "routes.txt").read_text()
    assert "3.weight" not in table and "0.weight" in table
    private = settings(recipe="dp-sgd", batch=0) | {"privacy": {"noise": 1.0, "lot": 8}}
    assert set(run(make(), private).model) == set(result.model)
    muon = run(make(), settings(recipe="fedmuon"))
    assert set(muon.model) == set(result.model)
    with pytest.raises(InputError, match="all parameters of the module are frozen"):
        run(dropping().requires_grad_(False))


class TiedTwice(nn.Module):
    """One matrix in two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.again = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.first.weight
        self.head = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.first(x).tanh()).tanh())


def normed(kind: str) -> nn.Module:
    torch.manual_seed(5)
    norm = nn.LayerNorm(8) if kind == "layer" else nn.GroupNorm(2, 8)
    return nn.Sequential(nn.Linear(FEATURES, 8), norm, nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    "make",
    [TiedTwice, lambda: normed("layer"), lambda: normed("group")],
    ids=["tied", "LayerNorm", "GroupNorm"],
)
def test_tied_weights_and_norms_are_those_of_torch(make: Callable[[], nn.Module]) -> None:
    """A tied parameter is one, and its gradient the sum over its uses."""
    result, module = run(make()), make()
    assert set(result.model) == {name for name, _ in module.named_parameters()}
    assert largest_difference(result, plain_loop(result, module, without_draws)) < 1e-10
    if isinstance(module, TiedTwice):
        module.again.weight = nn.Parameter(module.first.weight.detach().clone())
        assert largest_difference(result, plain_loop(result, module, without_draws)) > 1e-3


# --- BatchNorm ------------------------------------------------------------------------------------


def batch_normed(p: float = 0.0) -> nn.Module:
    torch.manual_seed(5)
    first = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Tanh(), nn.Dropout(p)]
    return nn.Sequential(*first, nn.Linear(8, 2))


def convolved() -> nn.Module:
    torch.manual_seed(5)
    norms = nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    layers = nn.Conv1d(1, 4, 3), norms[0], nn.ReLU(inplace=True), nn.Conv1d(4, 4, 2), norms[1]
    return nn.Sequential(nn.Unflatten(1, (1, FEATURES)), *layers, nn.Flatten(), nn.Linear(12, 2))


@pytest.mark.parametrize("aggregate", ["mean", "by-samples"])
@pytest.mark.parametrize("make", [batch_normed, convolved])
def test_running_statistics_are_averaged_like_the_model(make: Any, aggregate: str) -> None:
    config = settings()
    config["federation"] |= {"aggregate": aggregate, "partition": "dirichlet"}
    result = run(make(), config)
    expected = plain_loop(result, make(), without_draws)
    assert {name for name in expected if "tracked" not in name} == set(result.model)
    assert largest_difference(result, expected) < 1e-10
    norm = make()[1 if make is batch_normed else 2]
    norm.momentum = 0.2
    other = {name: one for name, one in make().state_dict().items() if "running" in name}
    assert largest_difference(result, expected | other) > 1e-2
    # An evaluation normalizes by them.
    module = make().double()
    module.load_state_dict({k: torch.as_tensor(v) for k, v in result.model.items()}, strict=False)
    held = np.load(result.path / "partition.npz")["test_index"]
    inputs, labels = (torch.from_numpy(one[held]) for one in (X, Y))
    with torch.no_grad():
        running = float(functional.cross_entropy(module.eval()(inputs), labels))
        batched = float(functional.cross_entropy(module.train()(inputs), labels))
    assert running == pytest.approx(result.summary["test_loss"], rel=1e-12)
    assert batched != pytest.approx(running, rel=1e-4)


@pytest.mark.parametrize("recipe", ["fedmuon", "fedavgm", "fedadam", "scaffold", "local-adamw"])
def test_no_rule_of_an_optimizer_moves_running_statistics(recipe: str) -> None:
    """After a round of one client they are those of its last step; a server's step is not taken."""
    config = settings(recipe=recipe, batch=0, steps=1, **{"weight-decay": 0.1})
    config["federation"] |= {"clients": 1, "per-round": 1, "rounds": 1}
    result = run(batch_normed(), config)
    index = np.load(result.path / "partition.npz")["train_index"]
    module = batch_normed().double().train()
    module(torch.from_numpy(X[index]))
    for name in ("1.running_mean", "1.running_var"):
        np.testing.assert_allclose(result.model[name], module.state_dict()[name], rtol=1e-12)


def test_batch_norm_is_measured_but_has_no_bound_and_no_private_run() -> None:
    config = settings() | {"stability": {"trials": 2}}
    found = fedmuon.stability(config, data=(X, Y), task=batch_normed())
    assert found.bound["status"] == "refused" and "Use GroupNorm" in str(found.bound)
    assert max(one["perturbation"] for one in found.neighbours) > 0
    private = settings(recipe="dp-sgd", batch=0) | {"privacy": {"noise": 1.0, "lot": 8}}
    for tables in (private, settings() | {"privacy": {"level": "client", "noise": 1.0}}):
        with pytest.raises(InputError, match="1 is a BatchNorm1d, which mixes the samples"):
            run(batch_normed(), tables)
    with pytest.raises(
        InputError, match=r"only one sample\. Set \[local\] batch and \[data\] minimum to 2 or more"
    ):
        run(batch_normed(), settings(batch=1))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(8, track_running_stats=False), "Set track_running_stats=True"),
        (nn.BatchNorm1d(8, momentum=None), "Set momentum to a number"),
        (nn.SyncBatchNorm(8), "Use BatchNorm of the same size"),
    ],
)
def test_norms_that_cannot_be_averaged_are_rejected_by_name(layer: nn.Module, words: str) -> None:
    with pytest.raises(InputError, match=f"1 is a {type(layer).__name__}, .*{words}"):
        run(nn.Sequential(nn.Linear(FEATURES, 8), layer, nn.Linear(8, 2)))


# --- Recurrent layers, and calls that vmap cannot trace -------------------------------------------


class Recurrent(nn.Module):
    """Reads a sample as three tokens of two numbers."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.read = kind(2, 5, num_layers=2, bidirectional=kind is nn.GRU, batch_first=True)
        self.head = nn.Linear(10 if kind is nn.GRU else 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(x.unflatten(1, (3, 2)))[0][:, -1])


class Branching(nn.Module):
    """Branches on a value, which vmap cannot trace; its parameter is in no layer with a rule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.head = nn.Linear(FEATURES, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * self.scale
        return self.head(hidden if hidden.abs().sum() > -1 else 0 * hidden)


ODD: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "branch": Branching,
}


@pytest.mark.parametrize("name", ODD)
def test_recurrent_and_branching_modules_are_plain_loops(name: str) -> None:
    result = run(ODD[name]())
    assert largest_difference(result, plain_loop(result, ODD[name](), without_draws)) < 1e-10
    other = plain_loop(run(ODD[name](), settings(lr=0.1)), ODD[name](), without_draws)
    assert largest_difference(result, other) > 1e-4


@pytest.mark.parametrize("name", ODD)
def test_their_clipped_sums_are_those_of_a_loop_over_examples(name: str) -> None:
    task, batch = task_of(ODD[name]()), keyed_batch(0)
    params = {n: p.detach()[None] for n, p in task.module.named_parameters()}
    found = task.clipped([(1.0, params)], [batch], Clipping("flat", 0.5))[1]
    expected = {key: torch.zeros_like(value[0]) for key, value in params.items()}
    for inputs, label in zip(batch.inputs, batch.labels, strict=True):
        loss = functional.cross_entropy(task.module(inputs[None]), label[None])
        slopes = torch.autograd.grad(loss, list(task.module.parameters()))
        norm = float(torch.cat([one.flatten() for one in slopes]).norm())
        for key, slope in zip(params, slopes, strict=True):
            expected[key] += min(1.0, 0.5 / norm) * slope
    for key, value in expected.items():
        torch.testing.assert_close(found[key][0], value, rtol=1e-10, atol=1e-12)
    unclipped = task.clipped([(1.0, params)], [batch], Clipping("flat", 1e3))[1]
    assert not torch.allclose(unclipped["head.bias"], found["head.bias"], rtol=1e-3)


def test_dropout_within_recurrent_layers_is_rejected_by_name() -> None:
    net = Recurrent(nn.LSTM)
    net.read.dropout = 0.5
    with pytest.raises(
        InputError, match=r"read is a LSTM, whose dropout .* put nn.Dropout between"
    ):
        run(net)


# --- Several inputs by name, and outputs with logits ----------------------------------------------


class Named(nn.Module):
    """As a classifier of Hugging Face: two inputs by name, and an object with logits."""

    def __init__(self, returned: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.returned, self.read, self.head = returned, nn.Linear(2, 5), nn.Linear(5, 2)

    def forward(self, values: Tensor, weights: Tensor) -> Any:
        hidden = (self.read(values).tanh() * weights[..., None]).mean(1)
        logits = self.head(hidden)
        named = {"object": SimpleNamespace(logits=logits), "mapping": {"logits": logits}}
        return named.get(self.returned, [logits])


@pytest.mark.parametrize("returned", ["object", "mapping"])
def test_named_inputs_and_logits_are_a_plain_loop(returned: str) -> None:
    """The first four numbers of a sample are two tokens, the last two are their weights."""

    def forward(own: Any, inputs: Tensor, when: Any, rows: np.ndarray) -> Tensor:
        values, weights = inputs[:, :4].unflatten(1, (2, 2)), inputs[:, 4:]
        return own.head((own.read(values).tanh() * weights[..., None]).mean(1))

    shapes = {"values": (2, 2), "weights": (2,)}
    result = run(fedmuon.Task(Named(returned), inputs=shapes))
    assert set(result.model) == {"read.weight", "read.bias", "head.weight", "head.bias"}
    assert largest_difference(result, plain_loop(result, Named(returned), forward)) < 1e-10
    private = settings(recipe="dp-sgd", batch=0) | {"privacy": {"noise": 1.0, "lot": 8}}
    assert set(run(fedmuon.Task(Named(returned), inputs=shapes), private).model) == {*result.model}
    with pytest.raises(InputError, match=r"a sample has 6 numbers, .* have 4"):
        run(fedmuon.Task(Named(returned), inputs={"values": (2,), "weights": (2,)}))


def test_outputs_without_logits_are_rejected_by_their_kind() -> None:
    with pytest.raises(InputError, match=r"the module returns a list, .* Return a tensor"):
        run(fedmuon.Task(Named("list"), inputs={"values": (2, 2), "weights": (2,)}))


def test_a_module_that_writes_into_a_buffer_is_rejected_by_its_name() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.seen = nn.Linear(FEATURES, 2), nn.Buffer(torch.zeros(FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.mul_(0.9)
            return self.head(x + self.seen)

    with pytest.raises(InputError, match=r"changes its buffer seen, .* or use BatchNorm"):
        run(Counting())


class Tokens(nn.Module):
    """Classifies the mean of embedded tokens, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.embedding, self.drop = nn.Embedding(9, 5), nn.Dropout(0.3)
        self.head = nn.Linear(5, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.embedding(tokens)).mean(1))


def test_removing_a_sample_moves_the_masks_of_others() -> None:
    """So a bounded sum of gradients may move by many bounds, and add-remove is rejected."""
    task, batch, bound = task_of(dropping(0.5)), keyed_batch(3, 40), 0.1
    params = {n: p.detach()[None] for n, p in task.module.named_parameters()}

    def clipped(keys: Tensor | None, first: int) -> Tensor:
        part = Batch(batch.inputs[first:], batch.labels[first:], keys=keys)
        found = task.clipped([(1.0, params)], [part], Clipping("flat", bound))[1]
        return torch.cat([one.flatten() for one in found.values()])

    assert batch.keys is not None
    whole = clipped(batch.keys, 0)
    assert (whole - clipped(batch.keys[1:], 1)).norm() <= bound * (1 + 1e-9)  # each keeps its mask
    assert (whole - clipped(batch.keys[:-1], 1)).norm() > 2 * bound  # each moves up by a row
    private = settings(recipe="dp-sgd", batch=0)
    for privacy in ({"population": 90}, {"rate": 0.1}):
        tables = private | {"privacy": {"noise": 0.5, "lot": 8} | privacy}
        with pytest.raises(InputError, match="the model has dropout"):
            run(dropping(), tables)


def test_tokens_with_dropout_train_and_train_privately() -> None:
    tokens = np.random.default_rng(1).integers(9, size=(90, 4))
    private = settings(recipe="dp-sgd", batch=0) | {"privacy": {"noise": 0.5, "lot": 8}}
    for config in (settings(), private):
        result = fedmuon.run(config, data=(tokens, Y), task=Tokens())
        assert set(result.model) == {"embedding.weight", "head.weight", "head.bias"}
