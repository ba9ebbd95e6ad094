"""Modes of torch around a call of ours change nothing of what it finds; and modules whose values a
run cannot use are rejected by the name of the parameter."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sentences import one_sentence
from torch import Tensor, nn

import fedmuon
from fedmuon.experiments.planning import cost
from fedmuon.optim import Muon, MuonWithAux, Private, param_groups_for_muon
from fedmuon.runs.fingerprints import parts

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 6)), np.arange(60) % 3
SMALL = {
    "federation": {"clients": 2, "rounds": 1, "partition": "iid"},
    "local": {"steps": 2},
    "stability": {"trials": 2},
}


def network() -> Any:
    """With a hidden matrix, whose weights the caller's seed draws."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


@contextlib.contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)


AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
MODES: dict[str, Callable[[], Any]] = {
    "autocast": AUTOCAST,
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "float64": partial(default, torch.float64),
    "bfloat16": partial(default, torch.bfloat16),
    "meta": partial(torch.device, "meta"),
}


def results(task: Any) -> list[Any]:
    """What a run and its neighbours find; of a class the run draws the weights."""
    given = {"data": (X, Y), "task": task}
    run = fedmuon.run(SMALL, **given)
    found = [run.summary["train_loss"], *run.model.values()]
    if task is None:
        found.append(fedmuon.stability(SMALL, **given).neighbours[0]["perturbation"])
    return found


def same(some: list[Any], others: list[Any]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("task", [None, network, network()], ids=["matrix", "class", "module"])
def test_modes_around_a_run_change_nothing(task: Any) -> None:
    plain = results(task)
    for name, mode in MODES.items():
        with mode():
            assert same(plain, results(task)), name
    assert torch.get_default_dtype() == torch.float32 and not torch.is_autocast_enabled("cpu")


def test_a_plan_is_made_without_the_mode_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(config: fedmuon.Config) -> dict[str, Any]:
        return {
            "plain": not torch.is_autocast_enabled("cpu") and not torch.is_inference_mode_enabled(),
            "values": not torch.ones(2, requires_grad=True).sum().is_meta,
            "dtype": torch.get_default_dtype(),
        }

    monkeypatch.setattr(cost, "plan", seen)
    for mode in MODES.values():
        with mode():
            found = fedmuon.plan(SMALL)
        assert found == {"plain": True, "values": True, "dtype": torch.float32}


def trained(make: Callable[[Any], torch.optim.Optimizer], mode: Callable[[], Any]) -> Tensor:
    torch.manual_seed(0)
    model, inputs = network(), torch.from_numpy(X).float()
    optimizer = make(model)
    nn.functional.cross_entropy(model(inputs), torch.from_numpy(Y)).backward()
    with mode():
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def test_a_step_inside_autocast_is_that_outside() -> None:
    makers: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
        lambda model: Muon([model[2].weight], ns_dtype=torch.float32),
        lambda model: MuonWithAux(param_groups_for_muon(model)),
    )
    for make in makers:
        assert torch.equal(trained(make, contextlib.nullcontext), trained(make, AUTOCAST))


def test_a_closure_keeps_autocast() -> None:
    model = network()
    seen = []

    def closure() -> Tensor:
        seen.append(model(torch.from_numpy(X).float()).dtype)
        return torch.zeros(())

    with AUTOCAST():
        Muon([model[2].weight]).step(closure)
    assert seen == [torch.bfloat16]


def test_a_private_step_inside_autocast_is_that_outside() -> None:
    def moved(mode: Callable[[], Any]) -> Tensor:
        torch.manual_seed(0)
        model = network()
        privacy = {"noise": 1.0, "lot": 8.0, "insecure-reproducible-noise": True}
        loop = Private(model, population=60, recipe="dp-sgd", privacy=privacy)
        for lot in loop.lots(1):
            with mode():
                loop.step(lot, torch.from_numpy(X).float()[lot.rows], torch.from_numpy(Y)[lot.rows])
        return torch.cat([one.detach().flatten() for one in model.parameters()])

    assert torch.equal(moved(contextlib.nullcontext), moved(AUTOCAST))


def with_weight(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    def changed(model: Any) -> None:
        learns = change(model[2].weight.data).is_floating_point()
        model[2].weight = nn.Parameter(change(model[2].weight.data), requires_grad=learns)

    return changed


def put_nested(model: Any) -> None:
    rows = [torch.ones(2), torch.ones(3)]
    held = torch.nested.nested_tensor(rows, layout=torch.jagged)
    model.register_parameter("odd", nn.Parameter(held))


def put_uncopied(model: Any) -> None:
    model[0].kept = 2 * model[2].weight  # not a leaf, which torch does not copy


def buffer(value: Tensor) -> Callable[[Any], Any]:
    return lambda model: model.register_buffer("odd", value)


quantized = partial(torch.quantize_per_tensor, scale=0.1, zero_point=0, dtype=torch.qint8)
UNUSABLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "meta": (lambda model: model.to("meta"), "parameter 0.weight of the module .*device meta"),
    "sparse": (with_weight(Tensor.to_sparse), "parameter 2.weight of the module .*sparse_coo"),
    "csr": (with_weight(Tensor.to_sparse_csr), "parameter 2.weight of the module .*sparse_csr"),
    "quantized": (with_weight(quantized), "parameter 2.weight of the module .*dequantize"),
    "complex": (with_weight(lambda w: w + 1j), "parameter 2.weight of the module .*complex64"),
    "nan": (with_weight(lambda w: w * torch.nan), "parameter 2.weight .*NaN or infinity"),
    "infinite bias": (lambda model: model[0].bias.data.fill_(torch.inf), "0.bias .*NaN or inf"),
    "lazy": (
        lambda model: model.__setitem__(0, nn.LazyLinear(8)),
        "parameter 0.weight of the module is not initialized",
    ),
    "nested": (put_nested, "parameter odd of the module is a nested tensor"),
    "no copy": (put_uncopied, "the module cannot be copied"),
    "meta buffer": (buffer(torch.ones(2, device="meta")), "buffer odd of the module .*meta"),
    "sparse buffer": (buffer(torch.eye(2).to_sparse()), "buffer odd of the module .*sparse_coo"),
    "complex buffer": (buffer(torch.ones(2) * 1j), "buffer odd of the module is complex"),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", list(UNUSABLE))
def test_a_module_that_no_run_can_use_is_named(name: str) -> None:
    change, words = UNUSABLE[name]
    change(model := network())
    with one_sentence(words):
        fedmuon.run(SMALL, data=(X, Y), task=model)


def test_a_module_made_in_inference_mode_is_the_same() -> None:
    torch.manual_seed(0)
    plain = network()
    torch.manual_seed(0)
    with torch.inference_mode():
        inferring = network()
    assert same(results(plain), results(inferring))


def test_sparse_tensors_are_told_apart_by_their_values() -> None:
    """In the digests by which a resumed run knows its objects again."""

    def known(held: Tensor) -> str:
        return "\n".join(parts(held, {}))

    eye, two = torch.eye(2), torch.diag(torch.tensor([1.0, 2.0]))
    assert known(eye.to_sparse()) == known(torch.eye(2).to_sparse())
    assert len({known(one) for one in (eye, eye.to_sparse(), two, two.to_sparse())}) == 4
