"""[federation] adapters: means of products, the error of mean factors, and what is rejected."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapted import adapted, fresh
from compared import built, ended, with_module
from conftest import small
from safetensors.numpy import load_file, save_file
from torch import nn

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute
from fedmuon.federated.build import build_experiment
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import (
    begin,
    next_state,
    received_message,
    run_round,
    simulate,
)
from fedmuon.optim.adapter_means import exact_mean, refactored
from fedmuon.optim.adapters import find_pairs, product
from fedmuon.optim.aggregator import mean
from fedmuon.optim.aggregators import by_samples, median
from fedmuon.optim.stage import Reply, ServerState, Stage
from fedmuon.runs.checkpoints import restored
from fedmuon.runs.directory import RunDirectory
from fedmuon.tasks.decoder import Form, decoder, gpt2_law

N, LR = 5, 0.3
WAYS = ("factors", "freeze-a", "exact", "subspace")


def config(way: str = "factors", module: nn.Module | None = None, **tables: Any) -> Config:
    below: dict[str, dict[str, Any]] = {
        "federation": {"clients": N, "per-round": 3, "rounds": 3, "adapters": way},
        "local": {"recipe": "fedmuon", "lr": LR, "steps": 2, "batch": 4},
        "task": {"name": "given"},
    }
    return with_module(small(below, **tables), module or fresh())


def one_round(made: Experiment, state: ServerState) -> tuple[ServerState, list[Any]]:
    """The state after the next round, and the models that clients had before they replied."""
    clients = [made.client(int(client)) for client in made.plan.participants(state.round)]
    _, replies, _ = run_round(made, state, clients)
    read = list(replies)
    for stage in reversed(made.recipe.stages):
        read, _ = stage.read(read, lambda: received_message(made.recipe, state), state)
    return next_state(made, state, replies)[0], [reply.params for reply in read]


def gaps(way: str, rank: int, per_round: int, **tables: Any) -> list[float]:
    """The relative distance of the server's products from the mean of products, in each round."""
    table = config(way, adapted(0.0, rank), federation={"per-round": per_round}, **tables)
    made = built(table)
    state, distances = begin(made.recipe, made.task, made.plan.seed), []
    for _ in range(made.plan.rounds):
        state, models = one_round(made, state)
        params = {**begin(made.recipe, made.task, made.plan.seed).params, **state.params}
        for pair in find_pairs(params):
            products = [product({**params, **model}, pair) for model in models]
            exact = torch.stack(products).mean(0)
            away = torch.linalg.matrix_norm(product(params, pair) - exact)
            distances.append(float(away / torch.linalg.matrix_norm(exact)))
    return distances


@pytest.mark.parametrize("way", ["freeze-a", "exact", "subspace"])
def test_products_are_averaged_exactly(way: str) -> None:
    """`exact` with a rank that suffices: layers 4 x 7 and 3 x 4 with adapters of rank 3."""
    rank, per_round = (3, 3) if way == "exact" else (2, 3)
    distances = gaps(way, rank, per_round)
    second = distances[1::2]  # of the layer 3 x 4, whose products have rank 3 at most
    assert max(second if way == "exact" else distances) < 1e-12
    assert max(gaps("factors", rank, per_round)) > 1e-4  # the negative control


def test_exact_discards_what_exceeds_the_rank(tmp_path: Path) -> None:
    """The server's product is the nearest one of rank 2, and the record says what is missing."""
    made = built(config("exact"))
    state = begin(made.recipe, made.task, made.plan.seed)
    state, models = one_round(made, state)
    above = below = 0.0
    for pair in find_pairs(state.params):
        whole = np.mean([product(model, pair)[0].numpy() for model in models], axis=0)
        U, values, V = np.linalg.svd(whole)
        nearest = U[:, :2] * values[:2] @ V[:2]
        np.testing.assert_allclose(product(state.params, pair)[0].numpy(), nearest, atol=1e-13)
        above, below = above + sum(values[2:] ** 2), below + sum(values**2)
        a, b = state.params[pair.a][0], state.params[pair.b][0]
        torch.testing.assert_close(a @ a.mT, b.mT @ b, rtol=0, atol=1e-13)  # balanced
    expected = np.sqrt(above / below)
    assert float(state.states["aggregate"]["discarded"][0]) == pytest.approx(expected, rel=1e-9)
    assert 1e-4 < expected < 0.5
    assert not any(value.any() for value in state.states["momentum"].values())
    with_factors = ended(built(config("factors"))).states["momentum"]
    assert all(value.any() for value in with_factors.values())  # the negative control


def test_weights_of_products_are_those_of_the_aggregate() -> None:
    """By numbers of samples."""
    table = config("exact", local={"recipe": "fedavg"}, federation={"aggregate": "by-samples"})
    made = built(table)
    state = begin(made.recipe, made.task, made.plan.seed)
    after, models = one_round(made, state)
    sizes = [made.client(int(client))[1].size for client in made.plan.participants(0)]
    pair = find_pairs(after.params)[1]
    products = [product(model, pair)[0].numpy() for model in models]
    after_mean = product(after.params, pair)[0].numpy()
    U, values, V = np.linalg.svd(np.average(products, axis=0, weights=sizes))
    np.testing.assert_allclose(after_mean, U[:, :2] * values[:2] @ V[:2], atol=1e-13)
    U, values, V = np.linalg.svd(np.mean(products, axis=0))  # the negative control
    assert np.abs(after_mean - U[:, :2] * values[:2] @ V[:2]).max() > 1e-6


def test_rows_without_a_singular_value_can_still_be_trained() -> None:
    """A product of rank 1, and one of rank 0, with factors of rank 2."""
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((1, 2, 7), (1, 4, 2)))
    length = torch.tensor([0.5], dtype=torch.float64)
    for scale in (torch.tensor([1.0, 0.0]), torch.zeros(2)):
        new_a, new_b, (discarded, norm) = refactored(b * scale, a, 2, length)
        torch.testing.assert_close(new_b @ new_a, (b * scale) @ a, rtol=1e-12, atol=1e-13)
        lengths = new_a[0].norm(dim=1)
        assert lengths[1] == pytest.approx(0.5) and lengths[0] > 0.1
        assert float(discarded) < 1e-13 and (float(norm) > 0) == bool(scale.any())
        assert not new_b[0, :, 1].any()  # so that the product does not change


def test_a_run_from_b_0_moves_all_adapters() -> None:
    for way in WAYS:
        after = ended(built(config(way))).params
        assert all(bool(after[pair.b].any()) for pair in find_pairs(after)), way
        assert len(find_pairs(after)) == 2


@pytest.mark.parametrize("way", WAYS)
def test_records_show_the_error_or_the_discarded_part(way: str, tmp_path: Path) -> None:
    """At each evaluation, and in the summary."""
    table = config(way, output={"evaluate-every": 2, "checkpoint-every": 1})
    summary = execute(table, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").open()]
    fields = {"factors": "adapter_error", "exact": "adapter_discarded"}
    shown = [[field for field in ("adapter_error", "adapter_discarded") if field in line]
             for line in (*lines, summary)]  # fmt: skip
    field = [fields[way]] if way in fields else []
    assert shown == [[], field, field, field]
    if field:
        assert 1e-5 < summary[field[0]] < 0.5 and summary[field[0]] == lines[2][field[0]]


def test_error_of_factors_equals_whole_products() -> None:
    made = built(config())
    state = begin(made.recipe, made.task, made.plan.seed)
    after, models = one_round(made, state)
    above = below = 0.0
    for pair in find_pairs(after.params):
        whole = np.mean([product(model, pair)[0].numpy() for model in models], axis=0)
        above += ((product(after.params, pair)[0].numpy() - whole) ** 2).sum()
        below += (whole**2).sum()
    error = float(after.states["adapters"]["error"][0])
    assert error == pytest.approx(np.sqrt(above / below), rel=1e-9) and error > 1e-5


def test_a_checkpoint_without_the_error_can_be_resumed(tmp_path: Path) -> None:
    """Earlier versions did not measure it."""
    table = config(output={"checkpoint-every": 1})

    def stop(record: Any) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(table, tmp_path / "run", on_round_end=stop)
    made = built(table)
    start = begin(made.recipe, made.task, made.plan.seed)

    class Earlier(RunDirectory):
        def newest_checkpoint(self) -> Any:
            arrays, about = super().newest_checkpoint() or ({}, {})
            return {name: x for name, x in arrays.items() if "adapters." not in name}, about

    state = restored(Earlier(tmp_path / "run"), start)
    assert state.round == 2 and float(state.states["adapters"]["error"][0]) == 0.0
    assert restored(RunDirectory(tmp_path / "run"), start).states["adapters"]["error"][0] > 0


# Subspaces


def test_merged_products_stay_when_bases_are_drawn_anew() -> None:
    table = config("subspace", adapted(0.0, 2), federation={"rounds": 4, "subspace-rounds": 2})
    made = built(table)
    state = begin(made.recipe, made.task, made.plan.seed)
    columns = []
    for _ in range(4):
        state, _ = one_round(made, state)
        columns.append(state.params["0.lora_B.weight"][0].clone())
    assert not columns[1][:, 1].any() and columns[3][:, 1].any()
    torch.testing.assert_close(columns[3][:, 0], columns[1][:, 0], rtol=1e-13, atol=1e-15)
    rows = state.params["0.lora_A.weight"][0]
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(2).double())
    other = config("subspace", adapted(0.0, 2), federation={"rounds": 4, "subspace-rounds": 2,
                                                            "seed": 4})  # fmt: skip
    assert float((ended(built(other)).params["0.lora_A.weight"][0] - rows).abs().max()) > 0.01


def test_replies_contain_only_x() -> None:
    """r^2 numbers per adapter instead of r (m + n)."""
    made = built(config("subspace", local={"recipe": "fedavg"}))
    state = begin(made.recipe, made.task, made.plan.seed)
    clients = [made.client(int(client)) for client in made.plan.participants(0)]
    _, replies, _ = run_round(made, state, clients)
    assert {value.shape for reply in replies for value in reply.params.values()} == {(1, 2, 2)}
    assert len(replies[0].params) == 2


def test_local_adamw_trains_x() -> None:
    """AdamW on X differs from AdamW on B, because it scales single entries."""
    made = built(config("subspace", local={"recipe": "local-adamw", "lr": 0.01}))
    after = ended(made).params
    step = torch.linalg.matrix_norm(after["0.lora_B.weight"])
    assert 0.001 < float(step) < 0.01 * 2 * 3 * 2 + 1e-9  # at most lr per entry of X and step


FOLLOWS = {"rounds": 6, "subspace-rounds": 2, "subspace-bases": "gradient"}


def test_sketches_are_sent_in_the_last_round_of_a_period(tmp_path: Path) -> None:
    """Up: r^2, and every F rounds r (m + n). Down: all factors. Both in numbers of 8 bytes."""
    table = config("subspace", adapted(0.0, 4), federation=FOLLOWS, local={"recipe": "fedavg"})
    execute(table, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").open()]
    x, sketches, factors = 2, (4 + 7) + (3 + 4), 4 * (4 + 7) + 4 * (3 + 4)  # rank 4 / (3 + 1) = 1
    ups = [x, x + sketches, x, x + sketches, x, x]  # no period follows the last one
    assert [line["bytes_up"] for line in lines] == [3 * 8 * up for up in ups]
    assert {line["bytes_down"] for line in lines} == {3 * 8 * factors}


def test_bases_follow_the_gradient() -> None:
    """They contain more of the mean gradient than random bases do, and stay orthonormal."""
    shares = {}
    for bases in ("gradient", "random"):
        federation = {"rounds": 4, "subspace-rounds": 2, "subspace-bases": bases}
        made = built(config("subspace", adapted(0.0, 6), federation=federation,
                            local={"recipe": "fedavg", "lr": 1e-6, "batch": 0}))  # fmt: skip
        state = begin(made.recipe, made.task, made.plan.seed)
        for _ in range(3):
            state, _ = one_round(made, state)
        rank = 2 if bases == "gradient" else 3
        rows = state.params["0.lora_A.weight"][0, rank : 2 * rank]
        torch.testing.assert_close(rows @ rows.mT, torch.eye(rank).double(), rtol=0, atol=1e-12)
        # The gradient of B with A = I is that of the weight, here at a model that hardly moved.
        wide = with_module(config("factors", adapted(0.0, 7)), adapted(0.0, 7))
        other = built(wide)
        params = begin(other.recipe, other.task, other.plan.seed).params
        params["0.lora_A.weight"] = torch.eye(7).double()[None]
        batches = [made.client(int(client))[1].batch(None) for client in made.plan.participants(1)]
        slopes = [other.task.gradient(params, [batch])[1] for batch in batches]
        G = torch.stack([slope["0.lora_B.weight"][0] for slope in slopes]).mean(0)
        kept = rows[:2] if bases == "random" else rows  # two directions of either
        shares[bases] = float((G @ kept.mT).norm() / G.norm())
    assert shares["gradient"] > 0.9 > 1.2 * shares["random"]


def test_replicas_have_their_own_bases() -> None:
    """Their gradients differ, because their step sizes do."""
    sizes = (0.1, LR)
    table = config("subspace", adapted(0.0, 4), federation=FOLLOWS)
    made = build_experiment(table, lr=torch.tensor(sizes, dtype=torch.float64))
    both = simulate(made, begin(made.recipe, made.task, made.plan.seed, len(sizes)))
    for replica, size in enumerate(sizes):
        alone = ended(built(config("subspace", adapted(0.0, 4), federation=FOLLOWS,
                                   local={"lr": size})))  # fmt: skip
        for name, value in both.params.items():
            torch.testing.assert_close(value[replica], alone.params[name][0], rtol=1e-7,
                                       atol=1e-10)  # fmt: skip
    rows = both.params["0.lora_A.weight"]
    assert float((rows[0] - rows[1]).abs().max()) > 1e-3


def test_sketches_are_rejected_in_private_runs() -> None:
    for tables in (
        {"local": {"recipe": "dp-sgd", "batch": 0}, "privacy": {"noise": 1.0, "lot": 8.0}},
        {"privacy": {"level": "client", "noise": 1.0}},
    ):
        federation = {"subspace-rounds": 2, "subspace-bases": "gradient"}
        with pytest.raises(InputError, match=r"second release\. Set subspace-bases = 'random'"):
            built(config("subspace", adapted(0.0, 4), federation=federation, **tables))


# Ranks of clients


def with_ranks(way: str, ranks: str, rank: int = 3, **tables: Any) -> Config:
    federation = {"adapter-ranks": ranks, **tables.pop("federation", {})}
    return config(way, adapted(0.0, rank), federation=federation, **tables)


def filling(stack: torch.Tensor, lam: float = 0.1) -> torch.Tensor:
    """An orthogonalizer that returns rows of norm 1 also for rows of 0."""
    u, _, v = torch.linalg.svd(stack, full_matrices=False)
    return u @ v


@pytest.mark.parametrize("recipe", ["fedavg", "fedmuon", "local-adamw", "fedprox", "lora-muon",
                                    "fedmuon, filling"])  # fmt: skip
@pytest.mark.parametrize("way", ["factors", "exact"])
def test_unused_rows_of_a_client_stay_0(way: str, recipe: str) -> None:
    """The models before the replies are cut, from momenta that are not 0 in all rows."""
    recipe, _, own = recipe.partition(", ")
    tables: dict[str, Any] = {"local": {"recipe": recipe, "lr": 0.01}}
    if own:
        tables["local"]["route"] = "all-matrices"
        tables["orthogonalizer"] = {"name": f"{__name__}:filling"}
    made = built(with_ranks(way, "1, 2", **tables))
    state = begin(made.recipe, made.task, made.plan.seed)
    cut = made.recipe.stages[-1]

    class Whole(Stage):
        """Returns all rows, but the clients start as before."""

        def assign(self, trees: Any, clients: Any) -> Any:
            return cut.assign(trees, clients)

    for _ in range(3):
        clients = [made.client(int(client)) for client in made.plan.participants(state.round)]
        recipe_of = replace(made.recipe, stages=(*made.recipe.stages[:-1], Whole()))
        other = replace(made, recipe=recipe_of)
        _, replies, _ = run_round(other, state, clients)
        for reply in replies:
            rank = (1, 2)[reply.client % 2]
            for trees in reply.trees.values():
                for layer in ("0", "2"):
                    if f"{layer}.lora_A.weight" in trees:
                        assert not trees[f"{layer}.lora_A.weight"][:, rank:].any()
                        assert not trees[f"{layer}.lora_B.weight"][..., rank:].any()
                        assert trees[f"{layer}.lora_A.weight"][:, :rank].any()
        state, _, _ = run_round(made, state, clients)


def test_each_reply_has_the_bytes_of_its_rank(tmp_path: Path) -> None:
    table = with_ranks("exact", "1, 3", local={"recipe": "fedavg"})
    execute(table, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").open()]
    row = (4 + 7) + (3 + 4)  # numbers of a rank of both adapters
    for line in lines:
        ranks = [(1, 3)[client % 2] for client in line["participants"]]
        assert line["bytes_up"] == 8 * row * sum(ranks)
        assert line["bytes_down"] == 3 * 8 * row * 3  # all clients get the same message
    assert {sum((1, 3)[client % 2] for client in line["participants"]) for line in lines} != {9}


def test_products_of_clients_of_different_ranks_are_averaged_exactly() -> None:
    """Each client starts from the best approximation of its rank to the server's product."""
    made = built(with_ranks("exact", "1, 2, 3", local={"recipe": "fedavg"}))
    state = begin(made.recipe, made.task, made.plan.seed)
    state, _ = one_round(made, state)
    state, models = one_round(made, state)
    pair = find_pairs(state.params)[0]
    exact = torch.stack([product(model, pair) for model in models]).mean(0)
    U, values, V = np.linalg.svd(exact[0].numpy())
    np.testing.assert_allclose(product(state.params, pair)[0].numpy(),
                               U[:, :3] * values[:3] @ V[:3], atol=1e-13)  # fmt: skip
    stage = made.recipe.stages[-1]
    for client in range(3):
        rank = client + 1
        start = stage.assign({"model": dict(state.params)}, [client])["model"]
        best = U[:, :rank] * values[:rank] @ V[:rank]
        np.testing.assert_allclose(product(start, pair)[0].numpy(), best, atol=1e-13)


@pytest.mark.parametrize(("way", "factor"), [("exact", 0.5), ("factors", 0.25)])
def test_directions_that_half_of_the_clients_use_shrink(way: str, factor: float) -> None:
    """By the share of these clients, or by its square."""
    made = built(with_ranks(way, "1, 3", local={"recipe": "fedavg", "lr": 1e-12}))
    state = begin(made.recipe, made.task, made.plan.seed)
    pair, rng = find_pairs(state.params)[0], np.random.default_rng(0)
    b = torch.from_numpy(rng.standard_normal(state.params[pair.b].shape))
    a, b, _ = refactored(b, state.params[pair.a], 3, torch.ones(1).double())
    state = replace(state, params={**state.params, pair.a: a, pair.b: b})
    after, _, _ = run_round(made, state, [made.client(client) for client in range(4)])
    before, now = (torch.linalg.svdvals(product(x.params, pair)[0])[:3] for x in (state, after))
    torch.testing.assert_close(now / before, torch.tensor([1.0, factor, factor]).double(),
                               rtol=1e-9, atol=0)  # fmt: skip


def test_rows_that_no_client_uses_keep_the_length_of_other_rows() -> None:
    """Two clients of rank 1 leave the second row without a singular value, as B = 0 does."""
    pair = find_pairs(["lora_A", "lora_B"])[0]

    def after(used: int) -> torch.Tensor:
        a, b = torch.zeros(1, 2, 7, dtype=torch.float64), torch.zeros(1, 4, 2, dtype=torch.float64)
        a[:, :used, 0], b[:, 0, 0] = 0.5, 1.0
        reply = Reply(0, {pair.a: a, pair.b: b}, {}, torch.zeros(1))
        combined, _ = exact_mean(mean()).combine(
            [reply, reply], {"discarded": torch.zeros(1).double()}
        )
        return combined[pair.a][0].norm(dim=1)

    for used in (1, 2):
        assert float(after(used)[1]) == pytest.approx(0.5)
        assert float(after(used)[0]) == pytest.approx(0.5**0.5)


def test_equal_ranks_change_nothing() -> None:
    for way in ("factors", "exact"):
        plain, ranked = (
            ended(built(config(way, adapted(0.0, 3)))),
            ended(built(with_ranks(way, "3"))),
        )
        for name, value in plain.params.items():
            assert torch.equal(value, ranked.params[name])


# What is rejected


@pytest.mark.parametrize("way", ["factors", "subspace"])
def test_factors_of_rank_1_have_no_matrix_for_muon(way: str) -> None:
    federation = {"subspace-rounds": 1} if way == "subspace" else {}
    with pytest.raises(InputError, match=r"adapters have rank 1, .* lora-rank = 2, or set"):
        built(config(way, adapted(0.0, 1), federation=federation))
    built(config(way, adapted(0.0, 3), federation=federation))


REJECTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "client rule": ("exact", {"local": {"recipe": "scaffold"}}, "stores or returns more than"),
    "own server": ("exact", {"local": {"recipe": "fedavgm"}}, "takes its own steps"),
    "second moments": (
        "subspace", {"local": {"recipe": "adamw", "lr": 0.01}}, "averages the state 'adamw'",
    ),
    "start of a link": ("subspace", {"local": {"recipe": "fedprox"}}, "the state of proximal"),
    "no weights": ("exact", {"federation": {"aggregate": "median"}}, "needs a weighted mean"),
    "too many periods": (
        "subspace", {"federation": {"subspace-rounds": 1}}, "3 periods, which need adapters",
    ),
    "no room for U": (
        "subspace", {"federation": {"subspace-rounds": 2, "subspace-bases": "gradient"}},
        "need adapters of rank 3 or more",
    ),
    "one period": (
        "subspace", {"federation": {"subspace-bases": "gradient"}}, "the first period are random",
    ),
    "ranks of a client rule": (
        "factors", {"federation": {"adapter-ranks": "1, 2"}, "local": {"recipe": "scaffold"}},
        "adapter-ranks = '1, 2' does not allow",
    ),
    "ranks and second moments": (
        "factors", {"federation": {"adapter-ranks": "1, 2"},
                    "local": {"recipe": "adamw", "lr": 0.01}}, "averages the state 'adamw'",
    ),
    "ranks and a server's steps": (
        "factors", {"federation": {"adapter-ranks": "1, 2"}, "local": {"recipe": "fedavgm"}},
        "takes its own steps, but .* adapter-ranks",
    ),
    "ranks without weights": (
        "factors", {"federation": {"adapter-ranks": "1, 2", "aggregate": "median"}},
        "adapter-ranks = '1, 2' needs a weighted mean",
    ),
    "a rank that is too large": (
        "exact", {"federation": {"adapter-ranks": "1, 4"}}, "contains 4, but .* has rank 2",
    ),
    "more ranks than clients": (
        "exact", {"federation": {"adapter-ranks": "1, 2, 1, 2, 1, 2"}}, "only 5 clients",
    ),
    "LoRA-Muon on X": ("subspace", {"local": {"recipe": "lora-muon"}}, "one matrix between them"),
    "late replies": (
        "exact", {"devices": {"mode": "fedbuff", "buffer": 2}}, "no common product of factors",
    ),
    "compression": (
        "subspace", {"compression": {"uplink": "top-k"}}, "messages can be compressed only once",
    ),
    "encoded twice": (
        "subspace", {"local": {"recipe": "fedmuon-svd", "rank": 1}}, "encoded only once",
    ),
    "average of rotating factors": (
        "exact", {"output": {"average": 0.5}}, "average of factors then belongs to no",
    ),
    "average of models with other bases": (
        "subspace", {"federation": FOLLOWS, "output": {"average": 0.5}},
        "changes the bases of adapters between rounds",
    ),
    "client privacy": (
        "exact", {"privacy": {"level": "client", "noise": 1.0}}, "does not take the plain mean",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_unsuitable_settings_are_rejected(name: str) -> None:
    way, tables, words = REJECTED[name]
    with pytest.raises(InputError, match=words) as error:
        built(config(way, **tables))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("way", WAYS[1:])
def test_adapters_of_embeddings_are_no_pairs(way: str) -> None:
    """PEFT starts them with A = 0. A product of which A is fixed could never be trained."""
    module = fresh()
    module[0].lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.zeros(2, 7))})
    with pytest.raises(InputError, match=r"0\.lora_embedding_A\.default belongs to an embedding"):
        built(config(way, module))
    built(config("factors", module))


PERSONAL_WAYS: dict[str, dict[str, Any]] = {
    "freeze-a": {}, "exact": {}, "subspace": {"subspace-rounds": 2},
    "factors": {"adapter-ranks": "1, 2"},
}  # fmt: skip


@pytest.mark.parametrize("way", PERSONAL_WAYS)
def test_personal_factors_come_in_pairs(way: str) -> None:
    """With one personal factor, A would be trained with `freeze-a`, and ranks would be ignored."""

    def with_personal(pattern: str) -> Experiment:
        local = {"recipe": "fedper", "personal": pattern}
        return built(config(way, federation=PERSONAL_WAYS[way], local=local))

    for pattern, other in (("*lora_A*", "0.lora_B.weight"), ("2.lora_B*", "2.lora_A.weight")):
        with pytest.raises(InputError, match=rf"both factors .* {other} is not\. Make both"):
            with_personal(pattern)
    with pytest.raises(InputError, match="no effect, because all adapters are personal"):
        with_personal("*lora*")
    after = ended(with_personal("0.*")).params  # the control
    assert bool(after["2.lora_B.weight"].any())


@pytest.mark.parametrize("ranks", ["0", "1, x", "2,,3", "-1", "1.5"])
def test_ranks_are_integers(ranks: str) -> None:
    with pytest.raises(InputError, match=r"is no rank\. Write integers"):
        config("exact", federation={"adapter-ranks": ranks})


@pytest.mark.parametrize("way", ["freeze-a", "subspace"])
def test_other_means_have_one_rank(way: str) -> None:
    with pytest.raises(InputError, match="adapter-ranks = '1, 2' has no effect"):
        config(way, federation={"adapter-ranks": "1, 2"})


def test_a_model_without_adapters_or_with_trained_ones_is_rejected() -> None:
    plain = nn.Sequential(nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3))
    for way in WAYS[1:]:
        with pytest.raises(InputError, match=f"adapters = '{way}' needs low-rank.* are 0, 2"):
            built(config(way, plain))
    with pytest.raises(InputError, match=r"0\.lora_B\.weight has other values"):
        built(config("subspace", adapted(0.5)))
    with pytest.raises(InputError, match="a subspace of rank 4 does not fit a weight of 3 x 4"):
        built(config("subspace", adapted(0.0, 4)))
    with pytest.raises(InputError, match="only by networks"):
        small(federation={"adapters": "exact"})
    for aggregate in (mean(), by_samples()):
        assert exact_mean(aggregate).shares is not None
    with pytest.raises(InputError, match="needs a weighted mean"):
        exact_mean(median())


# fedmuon's own decoder

FORM = Form(256, 12, 16, 2, 2)


@pytest.mark.parametrize("way", WAYS)
def test_adapters_of_the_decoder(way: str, tmp_path: Path) -> None:
    """The names of its factors are others."""
    numbers = gpt2_law(decoder(FORM), np.random.default_rng(0))
    save_file({name: 20 * v for name, v in numbers.items()}, tmp_path / "base.safetensors")
    task = {"name": "network", "model": "gpt", "width": 16, "depth": 2, "heads": 2,
            "lora-rank": 2, "weights": str(tmp_path / "base.safetensors")}  # fmt: skip
    table = small(
        data={"name": "pydoc", "train": 40, "test": 20, "minimum": 8, "context": 12},
        federation={"clients": 2, "per-round": 2, "rounds": 2, "adapters": way},
        task=task,
        local={"recipe": "fedmuon", "lr": 0.1, "steps": 1},
        output={"evaluate-every": 1},
    )
    summary = execute(table, tmp_path / "run")
    params = load_file(tmp_path / "run" / "model.safetensors")
    assert len(find_pairs(params)) == 2 and all(np.abs(x).max() > 0 for x in params.values())
    assert ("adapter_error" in summary) == (way == "factors")
    assert ("adapter_discarded" in summary) == (way == "exact")


# Together with other features

SHARED = "0.lora_A.weight", "0.lora_B.weight"


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_of_each_client_beside_a_shared_one(way: str) -> None:
    """FedPer leaves the adapters of the last layer with the clients."""
    local = {"recipe": "fedper", "personal": "2.*", "lr": LR}
    made = built(config(way, local=local))
    state = begin(made.recipe, made.task, made.plan.seed)
    first = dict(state.params)
    state, models = one_round(made, state)
    assert all({*model} <= {*SHARED} for model in models)
    after = ended(made)
    assert all(torch.equal(after.params[name], first[name]) for name in first if name[0] == "2")
    assert not torch.equal(after.params[SHARED[1]], first[SHARED[1]])
    stored = [made.client_states.read(client, made.plan.rounds) for client in range(N)]
    personal = [memory["personal"]["2.lora_B.weight"] for memory in stored if memory]
    assert len(personal) > 1 and not torch.equal(personal[0], personal[1])


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize("feedback", ["none", "error"])
def test_compressed_factors(way: str, feedback: str) -> None:
    compression = {"uplink": "top-k", "share": 0.4, "feedback": feedback}
    after = ended(built(config(way, compression=compression))).params
    plain = ended(built(config(way))).params
    assert not torch.equal(after[SHARED[1]], plain[SHARED[1]])
    assert torch.equal(after[SHARED[0]], plain[SHARED[0]]) == (way == "freeze-a")


def test_a_custom_stage_sees_adapters_as_they_are_sent() -> None:
    """The trial of custom stages passes through the stages of adapters, too."""

    class Noted(Stage):
        def reply(self, reply: Any, received: Any, memory: Any) -> Any:
            return reply.with_trees(
                {tree: {name: 1 * value for name, value in tensors.items()}
                 for tree, tensors in reply.trees.items()}
            )  # fmt: skip

    following = {"subspace-rounds": 2, "subspace-bases": "gradient"}
    for way, federation in (*((way, {}) for way in WAYS), ("subspace", following)):
        table = config(way, adapted(0.0, 3), federation={"stage": "given", **federation},
                       local={"recipe": "fedavg"})  # fmt: skip
        table = table.with_objects(replace(table.given, stage=Noted()))
        plain = config(way, adapted(0.0, 3), federation=federation, local={"recipe": "fedavg"})
        after, expected = ended(built(table)).params, ended(built(plain)).params
        assert all(torch.equal(after[name], value) for name, value in expected.items()), way


@pytest.mark.parametrize("way", WAYS)
def test_replicas_equal_single_runs(way: str) -> None:
    """Two step sizes side by side."""
    sizes = (0.2, LR)
    lr = torch.tensor(sizes, dtype=torch.float64)
    made = build_experiment(config(way), lr=lr)
    both = simulate(made, begin(made.recipe, made.task, made.plan.seed, len(sizes)))
    for replica, size in enumerate(sizes):
        alone = ended(built(config(way, local={"lr": size})))
        trees = {"model": alone.params, **alone.states}
        for tree, tensors in {"model": both.params, **both.states}.items():
            for name, value in tensors.items():
                torch.testing.assert_close(value[replica], trees[tree][name][0], rtol=1e-9,
                                           atol=1e-12)  # fmt: skip
    assert not torch.equal(both.params[SHARED[1]][0], both.params[SHARED[1]][1])


def rescaled(scale: float) -> nn.Module:
    """The same products B A, with factors of other sizes."""
    module = adapted(0.5)
    with torch.no_grad():
        for name, value in module.named_parameters():
            value *= scale if "lora_A" in name else 1 / scale if "lora_B" in name else 1.0
    return module.double()


@pytest.mark.parametrize("way", WAYS[:3])
def test_a_run_of_lora_muon_does_not_depend_on_the_scale_of_factors(way: str) -> None:
    """In all rounds, with averaged momenta and weight decay."""

    def products(recipe: str, scale: float) -> list[torch.Tensor]:
        local = {"recipe": recipe, "weight-decay": 0.1}
        orthogonalizer = {"name": "exact-sign"}
        table = config(way, rescaled(scale), local=local, orthogonalizer=orthogonalizer)
        made = built(table)
        params = {**begin(made.recipe, made.task, made.plan.seed).params, **ended(made).params}
        return [product(params, pair) for pair in find_pairs(params)]

    def distance(recipe: str) -> float:
        pairs = zip(products(recipe, 1.0), products(recipe, 8.0), strict=True)
        return max(float((first - second).abs().max()) for first, second in pairs)

    assert distance("lora-muon") < 1e-9
    assert distance("fedmuon") > 1e-2  # the negative control
