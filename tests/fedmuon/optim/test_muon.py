"""Muon against torch.optim.Muon and a float64 loop; MuonWithAux against its two parts.

Trajectories are compared over 100 steps, relative to the distance travelled. In bfloat16, with the
products of torch itself, ours are the same bits. Where float32 products stand in for missing
bfloat16 ones the roundings are the same and only the order of sums differs: entries flip by 2^-8
now and then, which five steps magnify along small singular values, to as much as 1% of one step.
Over 100 steps the flips average out: 5e-4 is seen, 2e-3 allowed.
"""

import copy
import io
import itertools
import math
import pickle
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import fedmuon.optim
from fedmuon.core.errors import InputError
from fedmuon.optim import Muon, MuonWithAux, muon, param_groups_for_muon, routing_table
from fedmuon.orthogonalize import newton_schulz, polynomial, smoothed_polar

JORDAN = (3.4445, -4.7750, 2.0315)
SHAPES = ((16, 16), (24, 10), (10, 24))
Make = Callable[[list[Tensor]], Optimizer]


def randoms(shapes: Sequence[tuple[int, ...]], seed: int, dtype=torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def trajectory(make: Make, steps: int = 100, shapes=SHAPES, dtype=torch.float32) -> list[Tensor]:
    """Where `steps` random gradients lead from a random start."""
    params = [value.requires_grad_() for value in randoms(shapes, 0, dtype)]
    go(make(params), params, range(steps))
    return [param.detach() for param in params]


def go(optimizer: Optimizer, params: Sequence[Tensor], steps: range) -> None:
    shapes = [tuple(param.shape) for param in params]
    for step in steps:
        for param, gradient in zip(params, randoms(shapes, step + 1, params[0].dtype), strict=True):
            param.grad = gradient.to(param.device)
        optimizer.step()


def apart(found: Sequence[Tensor], wanted: Sequence[Any]) -> float:
    """The largest distance between two ends, relative to the distance travelled."""
    start = randoms([tuple(value.shape) for value in found], 0, found[0].dtype)
    ratios = []
    for mine, given, begin in zip(found, wanted, start, strict=True):
        other = torch.as_tensor(given).double()
        ratios.append((mine.double() - other).norm() / (other - begin.double()).norm())
    return float(max(ratios))


def naive(
    shapes=SHAPES, steps=100, dtype=torch.float64, lr=0.02, decay=0.1, memory=0.95,
    nesterov=True, adjust: str | None = None, triple=JORDAN, eps=1e-7,
) -> list[np.ndarray]:  # fmt: skip
    """The same trajectory by a float64 loop over matrices, written from the equations."""
    params = [value.double().numpy() for value in randoms(shapes, 0, dtype)]
    momenta = [np.zeros_like(value) for value in params]
    for step in range(steps):
        for i, given in enumerate(randoms(shapes, step + 1, dtype)):
            gradient = given.double().numpy()
            momenta[i] = memory * momenta[i] + (1 - memory) * gradient
            z = (1 - memory) * gradient + memory * momenta[i] if nesterov else momenta[i]
            rows, columns = z.shape
            z = z / max(np.sqrt((z**2).sum()), eps)
            for _ in range(5):
                square = z @ z.T
                z = triple[0] * z + triple[1] * square @ z + triple[2] * square @ square @ z
            scale = math.sqrt(max(1, rows / columns))
            if adjust == "match_rms_adamw":
                scale = 0.2 * math.sqrt(max(rows, columns))
            params[i] = (1 - lr * decay) * params[i] - lr * scale * z
    return params


OPTIONS = [
    {"nesterov": nesterov, "adjust_lr_fn": adjust, "weight_decay": decay}
    for nesterov, adjust, decay in itertools.product(
        (True, False), (None, "original", "match_rms_adamw"), (0.0, 0.3)
    )
]


def theirs(**options: Any) -> Make:
    return partial(torch.optim.Muon, lr=0.02, **options)


def ours(**options: Any) -> Make:
    return partial(Muon, lr=0.02, **options)


@pytest.mark.parametrize(
    "options",
    [pytest.param(one, marks=[pytest.mark.slow] * (k % 4 > 0)) for k, one in enumerate(OPTIONS)],
    ids=str,
)
def test_the_same_bits_as_torch(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polynomial, "native_half", lambda *where: True)
    found = trajectory(ours(ns_dtype=torch.bfloat16, **options))
    for mine, other in zip(found, trajectory(theirs(**options)), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    "options",
    [OPTIONS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in OPTIONS[3::3])],
    ids=str,
)
def test_float32_products_in_place_of_bfloat16(
    options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polynomial, "native_half", lambda *where: False)
    wanted = trajectory(theirs(**options))
    assert apart(trajectory(ours(ns_dtype=torch.bfloat16, **options)), wanted) < 2e-3
    wrong = {"ns_coefficients": (3.46, -4.775, 2.0315), "ns_dtype": torch.bfloat16, **options}
    assert apart(trajectory(ours(**wrong)), wanted) > 2e-3


@pytest.mark.needs_gpu
def test_the_same_trajectory_on_a_gpu() -> None:
    """Batched products sum in another order than torch's single ones: 3.4e-3 apart on an H200."""
    shapes, ends = [*SHAPES, *SHAPES], []
    for make in (ours(ns_dtype=torch.bfloat16), theirs()):
        params = [value.cuda().requires_grad_() for value in randoms(shapes, 0)]
        go(make(params), params, range(100))
        ends.append([param.detach().cpu() for param in params])
    assert apart(*ends) < 1e-2


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("adjust", "nesterov"),
    [(None, True), slow(None, False), ("original", False), slow("original", True),
     slow("match_rms_adamw", True), slow("match_rms_adamw", False)],
)  # fmt: skip
def test_the_equations_in_float64(nesterov: bool, adjust: str | None) -> None:
    wanted = naive(steps=30, nesterov=nesterov, adjust=adjust)
    options = {"nesterov": nesterov, "adjust_lr_fn": adjust, "ns_dtype": torch.float64}
    found = trajectory(ours(**options), 30, dtype=torch.float64)
    assert apart(found, wanted) < 1e-9
    other = None if adjust == "match_rms_adamw" else "match_rms_adamw"
    for wrong in ({"nesterov": not nesterov}, {"momentum": 0.9}, {"weight_decay": 0.0},
                  {"ns_steps": 4}, {"adjust_lr_fn": other}):  # fmt: skip
        found = trajectory(ours(**{**options, **wrong}), 30, dtype=torch.float64)
        assert apart(found, wanted) > 1e-3


def test_the_default_is_the_equations_to_float32() -> None:
    """Each step rounds to 6e-8 and magnifies that by at most 3.4445^5 = 485."""
    assert apart(trajectory(ours()), naive(dtype=torch.float32)) < 3e-5
    assert apart(trajectory(theirs()), naive(dtype=torch.float32)) > 3e-4  # bfloat16 differs


def test_extreme_gradients_and_none() -> None:
    param = nn.Parameter(torch.ones(4, 3))
    optimizer = Muon([param], lr=0.1, weight_decay=0.0)
    param.grad = torch.zeros(4, 3)
    optimizer.step()
    assert torch.equal(param, torch.ones(4, 3))
    param.grad = torch.full((4, 3), 1e30)
    optimizer.step()
    assert param.isfinite().all() and not torch.equal(param, torch.ones(4, 3))
    param.grad = torch.full((4, 3), torch.nan)
    with pytest.raises(InputError, match="NaN or infinity"):
        optimizer.step()


def test_the_momentum_survives_bfloat16_gradients() -> None:
    """torch.optim.Muon without Nesterov divides its own buffer in place here; ours is the mean."""
    ends = []
    for make in (torch.optim.Muon, partial(Muon, ns_dtype=torch.bfloat16)):
        param = nn.Parameter(torch.ones(6, 6, dtype=torch.bfloat16))
        optimizer, mean = make([param], nesterov=False), torch.zeros(6, 6, dtype=torch.bfloat16)
        for (gradient,) in (randoms([(6, 6)], seed, torch.bfloat16) for seed in range(5)):
            param.grad = gradient
            mean.lerp_(gradient, 1 - 0.95)
            optimizer.step()
        ends.append(torch.equal(optimizer.state[param]["momentum_buffer"], mean))
    assert ends[1]
    if torch.__version__ < "2.14":
        assert not ends[0]


@pytest.mark.parametrize("limit", [1, 500, 10**9])
def test_stacks_give_what_single_matrices_give(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(muon._STACKED_ENTRIES, "cpu", limit)
    shapes = [(12, 5)] * 9 + [(5, 12)] * 2 + [(7, 7)] * 3
    options = {"ns_dtype": torch.float64}
    found = trajectory(ours(**options), 10, shapes, torch.float64)
    assert apart(found, naive(shapes, 10)) < 1e-10


def test_tensors_are_matrices_and_fused_ones_are_several() -> None:
    """[out, ...] is [out, -1]; [3 d, d] with three blocks moves as its three parts would."""
    for shape, blocks, parts in (
        ((6, 2, 3, 3), 1, [np.s_[:, :]]),
        ((12, 4), 3, [np.s_[4 * k : 4 * k + 4, :] for k in range(3)]),
        ((4, 12), 3, [np.s_[:, 4 * k : 4 * k + 4] for k in range(3)]),
    ):
        (gradient,) = randoms([shape], 1)
        whole = nn.Parameter(torch.zeros(shape))
        whole.grad = gradient
        Muon([{"params": [whole], "blocks": blocks}], lr=0.1).step()
        for place in parts:
            part = nn.Parameter(torch.zeros_like(gradient.flatten(1)[place]))
            part.grad = gradient.flatten(1)[place].contiguous()
            Muon([part], lr=0.1).step()
            torch.testing.assert_close(whole.detach().flatten(1)[place], part.detach())


def test_channels_last_filters_move_like_plain_ones() -> None:
    (start, gradient), ends = randoms([(8, 4, 3, 3)] * 2, 1), []
    for layout in (torch.contiguous_format, torch.channels_last):
        param = nn.Parameter(start.clone().to(memory_format=layout))
        param.grad = gradient.clone().to(memory_format=layout)
        Muon([param], lr=0.1).step()
        ends.append(param.detach())
    torch.testing.assert_close(*ends)


def test_any_map_orthogonalizes() -> None:
    seen = []

    def watched(stack: Tensor) -> Tensor:
        seen.append(tuple(stack.shape))
        return smoothed_polar(stack, 1e-4)

    def end(**options: Any) -> list[Tensor]:
        return trajectory(ours(**options), 3, [(6, 4)] * 3)

    found = end(orthogonalizer=watched)
    assert seen == [(3, 6, 4)] * 3
    for given in (partial(smoothed_polar, lam=1e-4), "smoothed-polar"):
        assert apart(end(orthogonalizer=given), found) < 1e-6
    assert apart(end(orthogonalizer="exact-sign"), found) > 1e-6
    plain = end()
    assert apart(end(orthogonalizer="newton-schulz"), plain) == 0
    for same in ([JORDAN, JORDAN], "jordan"):
        assert apart(end(ns_coefficients=same), plain) == 0
    assert apart(end(ns_coefficients="polar-express-e2"), plain) > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_newton_schulz(dtype: torch.dtype) -> None:
    """Singular values in 0.3 to 1 of the largest: nothing to magnify but a few roundings."""
    u, _, vh = torch.linalg.svd(torch.randn(3, 40, 20, dtype=torch.float64), full_matrices=False)
    matrix = ((u * torch.linspace(1, 0.3, 20)) @ vh).to(dtype)
    found = newton_schulz(matrix, 5, JORDAN, 1e-7, "max")
    wanted = newton_schulz(matrix.double(), 5, JORDAN, 1e-7, "max")
    assert found.dtype == dtype
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < 40 * torch.finfo(dtype).eps
    assert error > torch.finfo(torch.float32).eps  # it is not done in float32


@pytest.mark.parametrize("shape", [(70, 100), (70, 200), (70, 1000), (2, 80, 900)])
def test_either_side_of_a_rectangle(shape: tuple[int, ...]) -> None:
    """The Gram side and the matrix itself agree, wherever the choice between them falls."""
    for coefficients in ("cubic", "jordan", "taylor-4"):
        (matrix,) = randoms([shape], 3)
        found = newton_schulz(matrix, 4, coefficients)
        wanted = newton_schulz(matrix.double(), 4, coefficients)
        assert (found - wanted).norm() / wanted.norm() < 1e-5


def conv_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 3),
    )  # fmt: skip


def images() -> tuple[Tensor, Tensor]:
    (inputs,) = randoms([(60, 1, 8, 8)], 5)
    labels = torch.arange(60) % 3
    return inputs + labels.view(-1, 1, 1, 1), labels


def loss_of(model: nn.Module) -> Tensor:
    inputs, labels = images()
    return nn.functional.cross_entropy(model(inputs), labels)


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_aux(model: nn.Module, **options: Any) -> MuonWithAux:
    defaults = {"muon": {"lr": 0.02}, "aux": {"lr": 3e-3}}
    return MuonWithAux(param_groups_for_muon(model), **{**defaults, **options})


def test_a_convolutional_model_trains() -> None:
    for options in ({}, {"auxiliary": SGD, "aux": {"lr": 0.05, "momentum": 0.9}}):
        model = conv_model()
        losses = train(model, with_aux(model, **options), 30)
        assert losses[-1] < 0.3 * losses[0], options


@pytest.mark.parametrize(
    ("auxiliary", "aux"),
    [(AdamW, {"lr": 3e-3, "betas": (0.8, 0.9)}), (SGD, {"lr": 0.1, "momentum": 0.9})],
)
def test_one_optimizer_moves_as_its_two_parts(auxiliary: Any, aux: dict) -> None:
    together, apart_ = conv_model(), conv_model()
    one = with_aux(together, auxiliary=auxiliary, aux=aux)
    table = routing_table(apart_)
    hidden = Muon([row.param for row in table if row.optimizer == "muon"], lr=0.02)
    others = auxiliary([row.param for row in table if row.optimizer == "aux"], **aux)
    for _ in range(5):
        train(together, one, 1)
        for optimizer in (hidden, others):
            optimizer.zero_grad()
        loss_of(apart_).backward()
        hidden.step()
        others.step()
    for mine, other in zip(together.parameters(), apart_.parameters(), strict=True):
        assert torch.equal(mine, other)


def everywhere(state: Any) -> Any:
    """A state dictionary through a file, as weights alone."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_a_stopped_run_goes_on_alike(how: str) -> None:
    muon = {"lr": 0.02, "orthogonalizer": partial(smoothed_polar, lam=1e-3)}
    model = conv_model()
    optimizer = with_aux(model, muon=muon)
    train(model, optimizer, 3)
    if how == "state_dict":
        other = copy.deepcopy(model)
        resumed = with_aux(other, muon={**muon, "lr": 0.5})
        resumed.load_state_dict(everywhere(optimizer.state_dict()))
        assert resumed.param_groups[0]["lr"] == 0.02
    elif how == "pickle":
        other, resumed = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        other, resumed = copy.deepcopy((model, optimizer))
    assert train(other, resumed, 4) == train(model, optimizer, 4)
    fresh = copy.deepcopy(other)
    assert train(fresh, with_aux(fresh, muon=muon), 4) != train(model, optimizer, 4)


def test_the_state_of_torch_muon_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polynomial, "native_half", lambda *where: True)
    options = {"lr": 0.05, "momentum": 0.9, "nesterov": False}
    start = randoms(SHAPES, 9)
    mine = [nn.Parameter(value.clone()) for value in start]
    other = [nn.Parameter(value.clone()) for value in start]
    peer, own = torch.optim.Muon(other, **options), Muon(mine, ns_dtype=torch.bfloat16)
    go(peer, other, range(3))
    own.load_state_dict(everywhere(peer.state_dict()))
    with torch.no_grad():
        for param, copied in zip(other, mine, strict=True):
            copied.copy_(param)
    for optimizer, params in ((peer, other), (own, mine)):
        go(optimizer, params, range(3, 6))
    assert own.param_groups[0]["momentum"] == 0.9
    assert own.param_groups[0]["ns_dtype"] == torch.bfloat16
    for param, copied in zip(other, mine, strict=True):
        assert torch.equal(param, copied)


def test_schedulers_see_every_group() -> None:
    model = conv_model()
    optimizer = with_aux(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(4):
        train(model, optimizer, 1)
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.02 / 4, 3e-3 / 4]
    before = [param.detach().clone() for param in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1)
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old)
    param = nn.Parameter(torch.ones(3, 3))
    param.grad = torch.eye(3)
    Muon([param], lr=torch.tensor(0.1)).step()
    assert not torch.equal(param, torch.ones(3, 3))


def test_the_gradient_scaler() -> None:
    """Scaling by a power of two is exact; a step with an infinite gradient is left out."""
    plain, scaled = conv_model(), conv_model()
    train(plain, with_aux(plain), 3)
    optimizer = with_aux(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(scaled) * (math.inf if step == 1 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    for mine, other in zip(scaled[3].parameters(), plain[3].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


def test_closures_and_parameters_without_a_gradient() -> None:
    model = conv_model()
    optimizer = with_aux(model)
    frozen = cast(Tensor, model[6].weight).requires_grad_(False)  # after the groups were made
    before = frozen.clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first
    assert torch.equal(frozen, before)


def test_groups_have_their_own_options() -> None:
    one, two = (nn.Parameter(value) for value in randoms([(5, 5)] * 2, 0))
    start = [one.detach().clone(), two.detach().clone()]
    optimizer = Muon([{"params": [one], "lr": 0.0}, {"params": [two], "ns_steps": 1}], lr=0.1)
    one.grad, two.grad = randoms([(5, 5)] * 2, 1)
    optimizer.step()
    assert torch.equal(one, start[0])
    alone = nn.Parameter(start[1])
    alone.grad = two.grad
    Muon([alone], lr=0.1, ns_steps=1).step()
    assert torch.equal(two, alone)


class Attention(nn.Module):
    """A block with fused projections, under the names of several libraries."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(side, 3 * side, bias=False)
        self.attention = nn.MultiheadAttention(side, 2)
        self.c_attn = nn.Linear(3 * side, side)  # as [d, 3 d]
        self.kv = nn.Linear(side, 2 * side)


class Language(nn.Module):
    """An embedding tied to the head, and the block between them."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.block = Attention(4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tied", [True, False])
def test_the_routing_rule(tied: bool) -> None:
    table = {row.name: row for row in routing_table(Language(tied))}
    assert ("head.weight" in table) is not tied
    hidden = {name: row.matrices for name, row in table.items() if row.optimizer == "muon"}
    assert hidden == {
        "block.qkv.weight": (3, 4, 4),
        "block.attention.in_proj_weight": (3, 4, 4),
        "block.attention.out_proj.weight": (1, 4, 4),
        "block.c_attn.weight": (3, 4, 4),
        "block.kv.weight": (1, 8, 4),
    }
    assert table["embedding.weight"].reason == "embedding"
    assert table["norm.weight"].reason == "norm"


def test_the_routing_table_reads_well() -> None:
    lines = str(routing_table(conv_model())).splitlines()
    assert lines[0].split() == ["name", "shape", "matrices", "optimizer", "reason"]
    assert any("8 x 8 x 3 x 3  8 x 72" in line and "muon" in line for line in lines)
    assert sum("aux" in line for line in lines) == 8
    assert "3 of 4 x 4" in str(routing_table(Language(True)))


def test_the_rule_can_be_overruled() -> None:
    model = Language(tied=False)
    groups = param_groups_for_muon(model, to_muon=["head.*"], to_aux=["block.*"])
    names = [group["params"][0][0] for group in groups if group["use_muon"]]
    assert names == ["head.weight"]
    fused = param_groups_for_muon(model, fused={"kv": 2, "qkv": 1})
    counts = {name: group["blocks"] for group in fused[:-1] for name, _ in group["params"]}
    assert counts["block.kv.weight"] == 2 and counts["block.qkv.weight"] == 1
    with pytest.raises(InputError, match=r"No parameter name matches the pattern 'heads\.\*'"):
        routing_table(model, to_aux=["heads.*"])
    with pytest.raises(InputError, match="not a matrix"):
        routing_table(model, to_muon=["norm.weight"])


@pytest.mark.parametrize(
    ("layers", "names", "reason"),
    [
        ([nn.Linear(4, 3), nn.Linear(3, 2)], {"0.weight"}, "largest matrix"),
        ([nn.Linear(2, 3), nn.Linear(3, 4)], {"1.weight"}, "largest matrix"),
        ([nn.Linear(4, 3)], {"0.weight"}, "largest matrix"),
        ([nn.Embedding(50, 4), nn.Linear(4, 2)], {"1.weight"}, "largest matrix"),
        ([nn.Embedding(50, 4)], {"0.weight"}, "largest matrix"),
        ([nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 9)], {"1.weight"}, "hidden"),
        ([nn.Linear(4, 1), nn.Linear(1, 3), nn.Linear(3, 2)], {"2.weight"}, "largest matrix"),
        ([nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Linear(4, 9)], {"1.weight"},
         "hidden"),
    ],
)  # fmt: skip
def test_a_model_is_routed_by_its_shapes(
    layers: list[nn.Module], names: set[str], reason: str
) -> None:
    """Hidden matrices; or the largest one. A matrix with one row or column is a vector."""
    muon = [row for row in routing_table(nn.Sequential(*layers)) if row.optimizer == "muon"]
    assert {row.name for row in muon} == names
    assert {row.reason for row in muon} == {reason}


def test_recurrent_weights_are_cut_into_their_gates() -> None:
    """Those from hidden to hidden units are hidden, even in the first layer."""
    for kind, gates in ((nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)):
        model = nn.ModuleList([kind(5, 4, num_layers=2), nn.Linear(4, 2)])
        table = {row.name: row for row in routing_table(model)}
        assert table["0.weight_ih_l0"].reason == "first layer"
        assert table["0.weight_hh_l0"].matrices == table["0.weight_hh_l1"].matrices
        assert table["0.weight_hh_l1"].matrices == (gates, 4, 4)
    wide = {row.name: row for row in routing_table(nn.ModuleList([nn.GRU(40, 4)]), to_muon=["*w*"])}
    assert wide["0.weight_ih_l0"].matrices == (1, 12, 40)  # not cut across its gates


def test_a_muon_that_never_acts_is_refused() -> None:
    shallow = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    named = ["*.weight"]
    with pytest.raises(InputError, match="to_muon"):
        param_groups_for_muon(shallow, to_aux=named)
    with pytest.raises(InputError, match="to_muon"):
        param_groups_for_muon(nn.LayerNorm(4))
    assert param_groups_for_muon(shallow, to_muon=["0.weight"])[0]["use_muon"]
    with pytest.raises(InputError, match="param_groups_for_muon"):
        MuonWithAux([{"params": shallow.parameters(), "use_muon": False}])
    with pytest.raises(InputError, match="Set use_muon"):
        MuonWithAux([{"params": shallow.parameters()}])


def test_impossible_input_is_refused_with_the_mend() -> None:
    square = nn.Parameter(torch.ones(4, 4))
    drawn = partial(Muon, [square], orthogonalizer="randomized-polar")
    for call, word in [
        (lambda: Muon([nn.Parameter(torch.ones(3))]), "param_groups_for_muon"),
        (lambda: Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.cfloat))]), "complex"),
        (lambda: Muon([square], lr=-1.0), "lr is -1.0, but it must be 0 or more"),
        (lambda: Muon([square], lr=torch.ones(2)), "one value"),
        (lambda: Muon([square], momentum=-0.1), "momentum is -0.1, but it must be 0 or more"),
        (
            lambda: Muon([square], weight_decay=math.nan),
            "weight_decay is nan, but it must be 0 or more",
        ),
        (lambda: Muon([square], adjust_lr_fn="rms"), "match_rms_adamw"),
        (lambda: Muon([square], orthogonalizer="polar"), "smoothed-polar"),
        (lambda: Muon([square], ns_coefficients="jordon"), "jordan"),
        (lambda: Muon([square], ns_dtype=torch.int32), "floating"),
        (lambda: Muon([{"params": [square], "blocks": 3}]), "blocks to 1"),
        (lambda: Muon([square], momentum_form="nesterov"), "'ema' or 'polyak'"),
        (partial(drawn, rank=0), "rank"),
        (partial(drawn, oversample=-1), "oversample"),
        (partial(drawn, power=-1), "power"),
        (partial(drawn, sketch="sparse"), "kaczmarz"),
        (partial(drawn, ns_dtype=torch.bfloat16), "float32"),
    ]:
        with pytest.raises(InputError, match=word):
            call()
    optimizer = Muon([square])
    with pytest.raises(InputError, match="param_groups_for_muon"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))], "lr": 0.5})
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match="sparse=False"):
        Muon(embedding.parameters()).step()


@pytest.mark.slow
def test_beside_compiled_models() -> None:
    """A compiled model trains, and a compiled step is the step itself."""
    plain, model = conv_model(), conv_model()
    compiled = cast(nn.Module, torch.compile(model, backend="eager"))
    losses = train(plain, with_aux(plain), 3)
    optimizer = with_aux(model)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    assert train(compiled, optimizer, 3) == pytest.approx(losses, rel=1e-4)


def test_the_lines_of_the_manual_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, lines = (fedmuon.optim.__doc__ or "").partition("\n")
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(textwrap.dedent(lines), found)
    assert found["loss"].item() < 0.2
    assert "32 x 144  muon" in capsys.readouterr().out
