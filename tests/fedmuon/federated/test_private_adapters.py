"""Private training of low-rank adapters: what is clipped, where noise is added, and epsilon."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapted import adapted, fresh
from compared import built, ended, gap, problem_of, with_module
from conftest import small
from reference import adapters, rounds
from reference.private_methods import block, flat, private
from reference.rounds import Method

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute
from fedmuon.federated.rounds import begin
from fedmuon.optim.stage import Reply

N, LR, LOT, BOUND, NOISE, MEMORY = 5, 0.3, 6.0, 0.05, 0.7, 0.9
ROUNDS, STEPS = 4, 2


def config(way: str, recipe: str = "dp-sgd", **tables: Any) -> Config:
    below: dict[str, dict[str, Any]] = {
        "federation": {"clients": N, "per-round": 3, "rounds": ROUNDS, "adapters": way},
        "local": {"recipe": recipe, "lr": LR, "steps": STEPS, "momentum": MEMORY,
                  "momentum-form": "polyak", "route": "all-matrices"},
        "privacy": {"noise": NOISE, "lot": LOT, "bound": BOUND, "clipping": "flat", "delta": 1e-3,
                    "insecure-reproducible-noise": True},
        "task": {"name": "given"},
    }  # fmt: skip
    return with_module(small(below, **tables), fresh())


SPACE = {"federation": {"subspace-rounds": 2}}
WAYS: dict[str, tuple[dict[str, Any], Callable[[Method], Method]]] = {
    "factors": ({}, lambda method: method),
    "freeze-a": ({}, adapters.freeze_a),
    "exact": ({}, adapters.exact),
    "subspace": (SPACE, lambda method: adapters.subspace(method, 1, 2, 2)),
}
RULES = {"flat": flat, "block": block}


def reference(way: str, recipe: str, rule: str, table: Config, noise: float = NOISE) -> Any:
    method = private(LR, RULES[rule](BOUND), noise * BOUND, LOT, MEMORY, recipe == "dp-muon")
    return rounds.run(problem_of(table), WAYS[way][1](method)).server


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("recipe", ["dp-sgd", "dp-muon"])
@pytest.mark.parametrize("way", WAYS)
def test_a_private_run_equals_the_loop_over_examples(way: str, recipe: str, rule: str) -> None:
    """Lots, clipping of the trained variables alone, noise on them alone, momenta, periods."""
    table = config(way, recipe, **WAYS[way][0], privacy={"clipping": rule})
    state, expected = ended(built(table)), reference(way, recipe, rule, table)
    for tree, arrays in expected.items():
        found = state.params if tree == "model" else state.states[tree]
        assert gap(found, arrays) < 1e-10
    other = reference(way, recipe, rule, table, 1.01 * NOISE)  # the negative control
    assert gap(state.params, other["model"]) > 1e-6


def test_clipping_counts_the_trained_variables_alone() -> None:
    """With norms over both factors, the sums would differ."""
    module = adapted(0.5, 2)
    for way in ("freeze-a", "subspace"):
        table = config(way, **WAYS[way][0])
        made, problem = built(table), problem_of(table)
        mechanism = made.recipe.mechanism
        assert mechanism is not None and mechanism.space is not None
        trained = {name: value.detach()[None].double() for name, value in module.named_parameters()
                   if value.requires_grad}  # fmt: skip
        batch = made.client(0)[1].batch(None)
        clipping = mechanism._clipping([(1.0, trained)], 0)
        sums = made.task.clipped([(1.0, trained)], [batch], clipping)[1]
        arrays = {name: value[0].numpy() for name, value in trained.items()}
        U = {f"{layer}.lora_B.weight": adapters.bases(3, number, 0, shape, 1)[0]
             for number, (layer, shape) in enumerate({0: (4, 7), 2: (3, 4)}.items())}  # fmt: skip

        def active(G: dict[str, np.ndarray], way: str = way, U: Any = U) -> dict[str, np.ndarray]:
            B = {name: g for name, g in G.items() if "lora_B" in name}
            return B if way == "freeze-a" else {name: U[name].T @ B[name][:, :1] for name in B}

        expected = {name: np.zeros(value[0].shape) for name, value in sums.items()}
        of_both = {name: np.zeros(value[0].shape) for name, value in sums.items()}
        inputs, labels = problem.samples[0]
        norms = []
        for row in range(len(labels)):
            G = problem.gradient(arrays, inputs[row : row + 1], labels[row : row + 1])
            norms.append(math.sqrt(sum((g**2).sum() for g in active(G).values())))
            both = math.sqrt(sum((g**2).sum() for g in G.values()))
            for name, value in active(G).items():
                expected[name] += value * min(1, BOUND / norms[-1])
                of_both[name] += value * min(1, BOUND / both)
        assert max(norms) > BOUND
        assert gap(sums, expected) < 1e-12
        assert gap(sums, of_both) > 1e-4  # the negative control
        sizes = {tuple(value.shape[1:]) for value in sums.values()}
        assert sizes == ({(4, 2), (3, 2)} if way == "freeze-a" else {(1, 1)})


@pytest.mark.parametrize("way", WAYS)
def test_blocks_are_those_of_the_trained_variables(way: str, tmp_path: Path) -> None:
    """With clipping by blocks, epsilon depends on the number of blocks that are released."""
    table = config(way, **WAYS[way][0], privacy={"clipping": "block"})
    summary = execute(table, tmp_path / way)
    assert summary["privacy"]["blocks"] == (4 if way in ("factors", "exact") else 2)


def test_without_clipping_the_sums_are_those_of_gradients() -> None:
    """An infinite bound takes a path of its own."""
    for way in ("freeze-a", "subspace"):
        tables = {**WAYS[way][0], "privacy": {"bound": math.inf, "noise": 0.0}}
        table = config(way, **tables)
        bounded = config(way, **WAYS[way][0], privacy={"bound": 1e6, "noise": 0.0})
        state, other = ended(built(table)), ended(built(bounded))
        for name, value in state.params.items():
            torch.testing.assert_close(value, other.params[name], rtol=1e-9, atol=1e-12)


def test_a_frozen_factor_gets_no_noise() -> None:
    made = built(config("freeze-a"))
    start = begin(made.recipe, made.task, made.plan.seed).params
    after = ended(made).params
    for name, value in start.items():
        assert torch.equal(value, after[name]) == ("lora_A" in name)
    factors = built(config("factors"))
    control = ended(factors).params["0.lora_A.weight"]
    assert not torch.equal(control, start["0.lora_A.weight"])


@pytest.mark.parametrize("recipe", ["disk-sgd", "disk-muon", "dp-muonbc"])
@pytest.mark.parametrize("way", ["freeze-a", "exact", "subspace"])
def test_other_private_recipes(recipe: str, way: str) -> None:
    """They average more than momenta, which only `freeze-a` can average."""
    table = config(way, recipe, **WAYS[way][0])
    if way != "freeze-a":
        with pytest.raises(InputError, match=r"averages the state .* 'dp-sgd' or 'dp-muon'"):
            built(table)
        return
    after = ended(built(table)).params
    assert all(bool(value.isfinite().all()) for value in after.values())


def test_an_error_about_an_adapted_bound_names_its_key() -> None:
    """The recipe is not the reason."""
    for way in ("exact", "subspace"):
        table = config(way, "dp-muon", **WAYS[way][0], privacy={"quantile": 0.5})
        with pytest.raises(InputError, match=r"'log-bound', .* Set \[privacy\] quantile = 0"):
            built(table)
    built(config("freeze-a", "dp-muon", privacy={"quantile": 0.5}))


def test_add_remove_accepts_the_plain_mean_of_products() -> None:
    """Its weights do not depend on the numbers of samples, which this adjacency hides."""
    privacy = {"adjacency": "add-remove", "population": 90}
    replies = [Reply(k, {}, {}, torch.zeros(1), samples) for k, samples in enumerate((5, 50))]
    made = built(config("exact", "dp-muon", privacy=privacy))
    assert made.recipe.aggregate.shares is not None
    assert [*made.recipe.aggregate.shares(replies)] == [0.5, 0.5]
    with pytest.raises(InputError, match="may weight clients by their number of samples"):
        config("exact", "dp-muon", privacy=privacy, federation={"aggregate": "by-samples"})


def test_a_private_run_can_be_repeated_and_resumed(tmp_path: Path) -> None:
    for way, (tables, _) in WAYS.items():
        table = config(way, "dp-muon", **tables)

        def stop(record: Any) -> None:
            if record["round"] == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            execute(table, tmp_path / way, on_round_end=stop)
        execute(table, tmp_path / way, resume=True)
        execute(table, tmp_path / f"{way}-whole")
        files = [(tmp_path / name / "model.safetensors").read_bytes()
                 for name in (way, f"{way}-whole")]  # fmt: skip
        assert files[0] == files[1], way
        lines = (tmp_path / way / "ledger.jsonl").read_text().splitlines()
        assert len([line for line in lines if "round" in json.loads(line)]) >= ROUNDS


# Privacy of clients

CLIENTS: dict[str, Any] = {
    "federation": {"adapters": "subspace", "subspace-rounds": 2},
    "privacy": {"level": "client", "noise": 0.5, "bound": 0.05},
}


@pytest.mark.parametrize("trust", ["central", "local", "distributed"])
def test_clients_clip_x_with_secret_noise(trust: str, tmp_path: Path) -> None:
    """Noise on a lattice, and with distributed trust, masked integers of the size of X."""
    cohorts = "poisson" if trust == "central" else "fixed"
    below: dict[str, Any] = {
        "federation": {"clients": N, "per-round": 3, "rounds": ROUNDS},
        "local": {"recipe": "fedmuon", "lr": LR, "steps": STEPS, "batch": 4},
        "task": {"name": "given"},
    }
    privacy = {**CLIENTS["privacy"], "trust": trust, "cohorts": cohorts}
    table = with_module(small(below, **{**CLIENTS, "privacy": privacy}), fresh())
    summary = execute(table, tmp_path / "run")
    assert summary["privacy"]["unit"] == "client" and summary["privacy"]["certified"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").open()]
    replies = [line["bytes_up"] / max(1, len(line["participants"])) for line in lines]
    if trust != "central":  # the participants of Poisson cohorts are secret
        assert {*replies} == {2 * 2 * 8}  # X [1, 1] of two adapters, and its momentum
    assert all(line["bytes_up"] % 32 == 0 for line in lines)


def test_the_product_of_clipped_factors_is_not_released() -> None:
    below = {"federation": {"clients": N, "per-round": 3, "adapters": "exact"},
             "local": {"recipe": "fedavg"}, "task": {"name": "given"}}  # fmt: skip
    with pytest.raises(InputError, match="only the plain mean bounds the influence") as error:
        built(with_module(small(below, privacy=CLIENTS["privacy"]), fresh()))
    assert "Set adapters = 'factors'" in str(error.value)
