"""The arithmetic of a step: against torch's counter on real runs, loops, and 002's Table 2."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import quick
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedmuon.core.errors import InputError
from fedmuon.experiments import step_flops as account
from fedmuon.experiments.cli import main
from fedmuon.optim import Muon, routing_table
from fedmuon.optim.flops import (
    Part,
    Rule,
    Sketch,
    costs,
    factorization_flops,
    newton_schulz_flops,
    parts,
    performed_newton_schulz,
    randomized_flops,
    total,
)
from fedmuon.orthogonalize import newton_schulz, randomized_polar, schedule

SHAPES = [(40, 40), (30, 50), (784, 10), (10, 784), (512, 64), (128, 2000), (300, 200), (350, 500)]
SCHEDULES = [("cubic", 3), ("quintic", 5), ("jordan", 5), ("taylor-4", 2), ("polar-express-e2", 7)]


def counted(work) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "degree"), [("cubic", 1), ("quintic", 2), ("taylor-5", 5)])
def test_the_cost_model_of_newton_schulz(shape: tuple[int, int], name: str, degree: int) -> None:
    """Z Z^T, its powers by Horner, times Z; 2 flop for each multiply-add."""
    found = newton_schulz_flops(*shape, schedule(name, 4))
    low, high = sorted(shape)
    products = [low * high * low, *[low * low * low] * (degree - 1), low * low * high]
    assert found == 4 * sum(2 * one for one in products)
    if degree == 2:
        assert found == 4 * (4 * high * low**2 + 2 * low**3)
    assert found != newton_schulz_flops(*shape, schedule(name, 5))


DTYPES = (torch.float32, torch.float64, torch.bfloat16)
COUNTED = [(*schedule, dtype) for schedule in SCHEDULES for dtype in DTYPES]


@pytest.mark.parametrize(("name", "steps", "dtype"), quick(COUNTED, COUNTED[::4]))
def test_the_products_of_newton_schulz_are_those_counted(
    name: str, steps: int, dtype: torch.dtype
) -> None:
    polynomials = schedule(name, steps)
    for shape in SHAPES:
        matrix = torch.randn(2, *shape).to(dtype)
        seen = counted(lambda matrix=matrix: newton_schulz(matrix, steps, name, 1e-7, "max"))
        assert seen == 2 * performed_newton_schulz(*shape, polynomials, dtype), shape


def test_long_matrices_take_fewer_products_than_the_model() -> None:
    polynomials = schedule("jordan", 5)
    model = newton_schulz_flops(784, 10, polynomials)
    assert 4 * performed_newton_schulz(784, 10, polynomials, torch.float32) < model
    assert performed_newton_schulz(784, 10, polynomials, torch.bfloat16) == model
    assert performed_newton_schulz(40, 40, polynomials, torch.float32) == (
        newton_schulz_flops(40, 40, polynomials)
    )


@pytest.mark.parametrize("kind", ["gaussian", "kaczmarz"])
@pytest.mark.parametrize("power", [0, 1, 2])
def test_the_products_of_the_randomized_map(kind: str, power: int) -> None:
    """(4 h + 6) m n l, or 2 m n l less, and the iteration on l x n; of a square, either axis."""
    side, sketch = 120, Sketch(20, 5, power, kind)
    matrix, rng = torch.randn(side, side), np.random.default_rng(0)
    seen = counted(lambda: randomized_polar(matrix, 20, 5, power, 3, "cubic", kind, rng))
    passes = 4 * power + (6 if kind == "gaussian" else 4)
    inner = performed_newton_schulz(25, side, schedule("cubic", 3), torch.float32)
    inner += (kind == "kaczmarz") * 2 * side * 25**2  # Algorithm 2 divides by ||B||_op, from B B^T
    products, bases = passes * side * side * 25 + inner, 8 * (1 + 2 * power) * side * 25**2
    assert products <= seen <= products + bases  # a basis may be made by products, twice 4 m l^2
    model = randomized_flops(side, side, schedule("cubic", 3), sketch)
    wanted = passes * side**2 * 25 + 3 * 4 * side * 25**2
    assert model == wanted + (kind == "kaczmarz") * (2 * side**2 + 25 * side)


def test_the_formula_of_002() -> None:
    m, n, h, q, width = 70, 90, 3, 4, 12
    wanted = (4 * h + 6) * m * n * width + q * (4 * n * width**2 + 2 * width**3)
    assert randomized_flops(m, n, schedule("quintic", q), Sketch(10, 2, h)) == wanted
    # its example, d = 4096, l = 256, q = 5, h = 1: "about 40"
    full = newton_schulz_flops(4096, 4096, schedule("quintic", 5))
    thin = randomized_flops(4096, 4096, schedule("quintic", 5), Sketch(246, 10, 1))
    assert 35 < full / thin < 45


def test_the_factorization_counts_householder() -> None:
    """Reflection j works on (m - j) x (l - j) entries, 2 flop to project and 2 to subtract."""
    for m, width in ((400, 60), (60, 400), (80, 80)):
        long, short = max(m, width), min(m, width)
        reflections = sum(4 * (long - j) * (short - j) for j in range(short))
        assert math.isclose(factorization_flops(m, width), reflections, rel_tol=0.05)


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_of_muon_performs_the_products_counted(nesterov: bool) -> None:
    """On hidden matrices of several shapes, one of them fused."""
    layers = {"first": nn.Linear(9, 32), "qkv": nn.Linear(32, 96, bias=False),
              "wide": nn.Linear(32, 128), "conv": nn.Conv2d(16, 24, 3),
              "last": nn.Linear(128, 3)}  # fmt: skip
    table = routing_table(nn.ModuleDict(layers))
    rule = Rule(nesterov=nesterov, coefficients="jordan")
    found = costs(parts(table), rule)
    groups = [{"params": [one.param], "blocks": one.matrices[0]} for one in table if one.matrices]
    optimizer = Muon(groups, nesterov=nesterov)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn_like(param)
    assert counted(optimizer.step) == sum(one.performed for one in found) > 0
    for group in optimizer.param_groups:
        group.update(orthogonalizer="randomized-polar", rank=10, oversample=4, power=2)
    drawn = costs(parts(table), replace(rule, sketch=Sketch(10, 4, 2)))
    wide = [one.matrices for one in table if one.matrices]
    bases = 8 * (1 + 2 * 2) * 14**2 * sum(count * max(m, n) for count, m, n in wide)
    products = sum(one.performed for one in drawn)
    assert products <= counted(optimizer.step) <= products + bases
    other = costs(parts(table), Rule(nesterov=nesterov, coefficients="cubic"))
    assert counted(optimizer.step) != sum(one.performed for one in other)


class Tally:
    """A number that counts the arithmetic done to it: an update rule written out for one entry."""

    done = 0

    def _one(self, other: object = None) -> "Tally":
        Tally.done += 1
        return self

    __add__ = __sub__ = __mul__ = __rmul__ = __truediv__ = _one

    def sqrt(self) -> "Tally":
        return self._one()


def sgd(x: Tally, c: Tally, g: Tally, ahead: bool) -> Tally:
    c = 0.9 * c + g
    return x - 0.1 * (g + 0.9 * c if ahead else c)


def adamw(x: Tally, m: Tally, v: Tally, g: Tally, decay: bool) -> Tally:
    m = 0.9 * m + 0.1 * g
    v = 0.9 * v + 0.1 * (g * g)
    x = x - 0.1 * (m / (v.sqrt() + Tally()))
    return x - 0.01 * x if decay else x


@pytest.mark.parametrize("option", [True, False])
def test_entries_against_update_rules_written_out(option: bool) -> None:
    for rule, work in (
        (Rule("sgd", nesterov=option), lambda: sgd(Tally(), Tally(), Tally(), option)),
        (Rule("adamw", decay=option), lambda: adamw(Tally(), Tally(), Tally(), Tally(), option)),
    ):
        Tally.done = 0
        work()
        (found,) = costs([Part("w", (3, 5))], rule)
        assert found.entries == 15 * Tally.done
        assert found.total == found.entries and found.performed == 0


def test_muon_normalizes_what_it_iterates() -> None:
    """Momentum 2, step 2, and 3 for the norm and the division, of M or of the l x n matrix."""
    matrix = [Part("w", (20, 30), (1, 20, 30)), Part("b", (20,))]
    full, bias = costs(matrix, Rule(nesterov=False, aux=Rule("sgd", nesterov=False)))
    assert (full.entries, bias.entries) == (600 * 7, 20 * 4)
    thin, _ = costs(matrix, Rule(nesterov=False, sketch=Sketch(4, 2)))
    assert thin.entries == 600 * 4 + 3 * 6 * 30
    normalized, _ = costs(matrix, Rule("normalized-sgd", nesterov=False))
    assert normalized.entries == 600 * 7 and normalized.products == 0


@pytest.mark.parametrize("name", ["nanogpt", "airbench"])
def test_table_2_comes_out_to_its_last_decimal(name: str) -> None:
    rows = account.beside_table_2(name)
    assert len(rows) == 7
    for row in rows:
        assert abs(row["difference"]) < 6e-5, row
    printed = {row["optimizer"]: row["printed"] for row in rows}
    # Wrong hypotheses miss by far: fused Q, K, V, O; a factorization left out.
    rule = account.published_rules(name)["Rand Muon (Polyak)"]
    model = account.model(name)
    halved = [one if one.matrices else one._replace(copies=one.copies / 2) for one in model]
    used = halved if name == "nanogpt" else model
    without = total(costs(used, rule)) - sum(one.factorization for one in costs(used, rule))
    assert abs(without / 1e9 - printed["Rand Muon (Polyak)"]) > 1e-2
    if name == "nanogpt":
        whole = {"shape": (3072, 768), "matrices": (1, 3072, 768), "copies": 10}
        fused = [one._replace(**whole) if one.name == "attn" else one for one in used]
        muon = account.published_rules(name)["Muon (Polyak)"]
        assert abs(total(costs(fused, muon)) / 1e9 - printed["Muon (Polyak)"]) > 100


def test_the_models_have_the_published_sizes() -> None:
    def size(name: str) -> float:
        return sum(one.copies * math.prod(one.shape) for one in account.model(name))

    assert round(size("gpt2-small") / 1e6, 1) == 124.4
    assert size("airbench") == 1_967_616 + 2560 + 24 + 2 * 64 + 4 * 256
    assert size("mlp") == 784 * 512 + 512 + 512 * 256 + 256 + 256 * 10 + 10
    assert math.isclose(size("nanogpt"), 518.72e6, rel_tol=1e-5)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["flops", "--model", "cnn", "--rank", "8", "--json"])
    assert not end.value.code
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["parameters"]}
    assert rows["conv2.weight"]["products"] > 0 and rows["head.weight"]["products"] == 0
    assert found["total"] == sum(row["total"] for row in found["parameters"])
    with pytest.raises(SystemExit):
        main(["flops", "--model", "airbench"])
    shown = capsys.readouterr().out
    assert "8.0763" in shown and "public code" in shown
    for wrong in (["--model", "gpt5"], ["--optimizer", "lion"], ["--coefficients", "jordon"]):
        with pytest.raises(SystemExit) as end:
            main(["flops", *wrong])
        assert end.value.code == 2


def test_impossible_rules_are_refused() -> None:
    for word, call in (("adamw", lambda: Rule("adam")), ("rank", lambda: Sketch(0, 0)),
                       ("gaussian", lambda: Sketch(3, kind="sparse"))):  # fmt: skip
        with pytest.raises(InputError, match=word):
            call()
