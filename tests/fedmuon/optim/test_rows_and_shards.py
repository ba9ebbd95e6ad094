"""NorMuon and MuonBP against float64 loops over rows and shards, as links and in whole runs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compared import image, problem_of
from conftest import quick, small
from reference import methods, rounds
from test_federated_methods import LR, POLAR, config, ended
from torch import Tensor

import fedmuon
from fedmuon import links, recipes
from fedmuon.analysis.theory.corollaries import Uniform
from fedmuon.config.load import Config, parse
from fedmuon.core.errors import InputError
from fedmuon.experiments.stability.certificates import CertifiedSetting, certify
from fedmuon.federated.build import build_experiment
from fedmuon.optim import Muon
from fedmuon.optim.links import map_matrices
from fedmuon.orthogonalize import exact_sign

NOBODY: Any = None  # a context that nothing asks


def polar(matrix: np.ndarray) -> np.ndarray:
    u, _, vh = np.linalg.svd(matrix, full_matrices=False)
    return u @ vh


def normuon(image: np.ndarray, seen: np.ndarray, memory: float) -> np.ndarray:
    """Algorithm 1 of NorMuon row by row, with the rescaling of the authors' code; changes v."""
    even = np.zeros_like(image)
    for i, row in enumerate(image):
        seen[i] = memory * seen[i] + (1 - memory) * sum(x * x for x in row) / len(row)
        even[i] = row / (np.sqrt(seen[i]) + 1e-10)
    norm = lambda a: np.sqrt(sum(x * x for x in a.ravel()))  # noqa: E731
    return even * norm(image) / (norm(even) + 1e-10)


def close(found: Tensor, wanted: np.ndarray, tolerance: float = 1e-10) -> bool:
    gap = np.linalg.norm(found.double().numpy() - wanted)
    return bool(gap <= tolerance * np.linalg.norm(wanted))


def sign_link(
    shards: int = 1, adjust: str = "none", blocks: dict[str, int] | None = None
) -> links.Link:
    return map_matrices(lambda m, context, block: exact_sign(m), adjust, True, blocks, shards)


# NorMuon


def test_three_steps_of_normuon_with_filters_and_fused_matrices() -> None:
    torch.manual_seed(0)
    shapes = {"tall": (6, 4), "wide": (4, 6), "filter": (5, 2, 2), "fused": (6, 2), "side": (2, 6)}
    blocks = {"fused": 3, "side": 3}
    link = links.normalize_rows(sign_link(blocks=blocks), 0.6, blocks)
    params = {name: torch.zeros(2, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    state, seen = link.init(params), {}
    wrong = False
    for _ in range(3):
        direction = {name: torch.randn_like(value) for name, value in params.items()}
        found, state = link.update(direction, state, NOBODY)
        for name, value in direction.items():
            side = 0 if value.shape[1] >= value[0, 0].numel() else 1
            for r in range(2):
                matrix = value[r].flatten(1).numpy()
                parts = np.split(matrix, blocks.get(name, 1), side)
                steps = []
                for place, part in enumerate(parts):
                    v = seen.setdefault((name, r, place), np.zeros(len(part)))
                    steps.append(normuon(polar(part), v, 0.6))
                assert close(found[name][r].flatten(1), np.concatenate(steps, side))
                wrong |= not close(found[name][r].flatten(1), polar(matrix), 1e-2)
    assert wrong  # the control: it is not Muon
    assert {key.split()[0] for key in state} == {"rows"}


def test_rows_of_a_first_step_are_equal_and_the_norm_stays() -> None:
    torch.manual_seed(1)
    tall = torch.randn(1, 9, 3, dtype=torch.float64)
    link = links.normalize_rows(sign_link(), 0.95)
    found, _ = link.update({"w": tall}, link.init({"w": tall}), NOBODY)
    rows = found["w"][0].norm(dim=1)
    assert torch.allclose(rows, rows.mean().expand(9), rtol=1e-7)
    assert float(found["w"].norm()) == pytest.approx(3**0.5, rel=1e-9)
    plain = exact_sign(tall)[0].norm(dim=1)
    assert float(plain.max() / plain.min()) > 1.2  # the control


def test_match_rms_is_the_scale_that_the_paper_prints() -> None:
    """0.2 sqrt(m n) / ||N||_F N, if the map is exact and M has full rank."""
    torch.manual_seed(2)
    for m, n in ((7, 4), (4, 7)):
        value = torch.randn(1, m, n, dtype=torch.float64)
        link = links.normalize_rows(sign_link(1, "match-rms"), 0.9)
        found = link.update({"w": value}, link.init({"w": value}), NOBODY)[0]["w"][0]
        even = polar(value[0].numpy())
        even = even / np.sqrt(0.1 * (even**2).mean(1, keepdims=True))
        assert close(found, 0.2 * np.sqrt(m * n) / np.linalg.norm(even) * even, 1e-8)


def test_zeros_and_parameters_that_are_no_matrices_pass() -> None:
    link = links.normalize_rows(links.orthogonalize(exact_sign), 0.9)
    params = {"w": torch.zeros(1, 3, 2, dtype=torch.float64), "b": torch.ones(1, 3).double()}
    found, state = link.update(params, link.init(params), NOBODY)
    assert torch.equal(found["w"], params["w"]) and torch.equal(found["b"], params["b"])
    assert list(state) == ["rows w"]


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_optimizer_takes_normuon_steps(blocks: int) -> None:
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64)) for _ in range(3)]
    given: dict[str, Any] = {"orthogonalizer": exact_sign, "ns_dtype": torch.float64}
    optimizer = Muon([{"params": params, "blocks": blocks}], lr=0.5, weight_decay=0.0, momentum=0.0,
                     nesterov=False, row_memory=0.7, **given)  # fmt: skip
    seen = [[np.zeros(6 // blocks) for _ in range(blocks)] for _ in params]
    ends = [np.zeros((6, 4)) for _ in params]
    for _ in range(3):
        for param, end, v in zip(params, ends, seen, strict=True):
            param.grad = torch.randn_like(param)
            parts = np.split(param.grad.numpy(), blocks, 0)
            scale = max(1.0, parts[0].shape[0] / 4) ** 0.5
            steps = [normuon(polar(part), one, 0.7) for part, one in zip(parts, v, strict=True)]
            end -= 0.5 * scale * np.concatenate(steps, 0)
        optimizer.step()
    assert all(close(param.detach(), end) for param, end in zip(params, ends, strict=True))
    again = Muon([{"params": params, "blocks": blocks}], row_memory=0.7, **given)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[params[1]]["row_squares"],
                       optimizer.state[params[1]]["row_squares"])  # fmt: skip
    with pytest.raises(InputError, match="row_memory is 1"):
        Muon(params, row_memory=1.0)


# MuonBP


def test_shards_are_mapped_alone_and_every_third_step_is_whole() -> None:
    torch.manual_seed(4)
    shapes = {"tall": (7, 4), "wide": (4, 7), "fused": (6, 2)}
    link = links.block_periodic(
        sign_link(1, "match-rms", {"fused": 3}), sign_link(2, "match-rms", {"fused": 3}), 3
    )
    params = {name: torch.zeros(2, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    state = link.init(params)
    for step in range(5):
        direction = {name: torch.randn_like(value) for name, value in params.items()}
        found, state = link.update(direction, state, NOBODY)
        for name, value in direction.items():
            side = 0 if value.shape[1] >= value.shape[2] else 1
            pieces = np.split(value[1].numpy(), 3, side) if name == "fused" else [value[1].numpy()]
            if step % 3:
                pieces = [one for piece in pieces for one in np.array_split(piece, 2, side)]
            steps = [0.2 * np.sqrt(max(one.shape)) * polar(one) for one in pieces]
            assert close(found[name][1], np.concatenate(steps, side))
            whole = 0.2 * np.sqrt(max(value[1].shape)) * polar(value[1].numpy())
            assert name == "fused" or close(found[name][1], whole, 1e-3) == (step % 3 == 0)
    assert torch.equal(state["steps"], torch.full((2,), 5.0, dtype=torch.float64))


def test_more_shards_than_rows_are_single_rows() -> None:
    tall = torch.randn(1, 3, 2, dtype=torch.float64)
    found, _ = sign_link(10).update({"w": tall}, {}, NOBODY)
    assert torch.allclose(found["w"][0].norm(dim=1), torch.ones(3, dtype=torch.float64))


# In runs


def expected(config: Config, memory: float, shards: int, period: int) -> np.ndarray:
    """FedMuon with NorMuon's rows and MuonBP's shards; both begin anew in every round."""
    seen: dict[tuple[int, int], np.ndarray] = {}

    def step(M: np.ndarray, round: int, client: int, k: int) -> np.ndarray:
        v = seen.setdefault((round, client), np.zeros(len(M)))
        axis = 0 if M.shape[0] >= M.shape[1] else 1
        parts = np.array_split(M, 1 if k % period == 0 else shards, axis)
        steps = np.concatenate([image(config, part, round, client, k) for part in parts], axis)
        return normuon(steps, v, memory) if memory else steps

    problem = replace(problem_of(config), orthogonal=step)
    return rounds.run(problem, methods.fedmuon(LR)).server["model"]["weight"]


def chosen(**table: Any) -> Config:
    base = config(recipe="fedmuon")
    return parse(
        {
            **base.model_dump(by_alias=True),
            "orthogonalizer": {"name": "smoothed-polar", "lambda": 0.1, **table},
        }
    )


@pytest.mark.parametrize(
    ("memory", "shards", "period"), [(0.8, 1, 1), (0.0, 2, 2), (0.8, 2, 2), (0.0, 1, 1)]
)
def test_runs_of_fedmuon_are_the_loops(memory: float, shards: int, period: int) -> None:
    table = {"row-memory": memory} | (
        {"shards": shards, "full-every": period} if shards > 1 else {}
    )
    run = chosen(**table)
    found = ended(build_experiment(run).recipe, run).params["weight"][0].numpy()
    wanted = expected(run, memory, shards, period)
    assert np.abs(found - wanted).max() < 1e-9
    if memory or shards > 1:  # the control
        assert np.abs(found - expected(run, 0.0, 1, 1)).max() > 1e-3


def test_a_recipe_in_python_takes_the_links() -> None:
    run = chosen(**{"row-memory": 0.8, "shards": 2, "full-every": 2})
    whole, sharded = (links.orthogonalize(POLAR, shards=count) for count in (1, 2))
    link = links.normalize_rows(links.block_periodic(whole, sharded, 2), 0.8)
    found = ended(recipes.fedmuon(LR, 0.9, link), run).params["weight"]
    same = ended(build_experiment(run).recipe, run).params["weight"]
    assert float((found - same).abs().max()) < 1e-12
    other = ended(recipes.fedmuon(LR, 0.9, POLAR), run).params["weight"]
    assert float((found - other).abs().max()) > 1e-3  # the control


def test_other_recipes_take_them() -> None:
    for recipe in ("local-muon", "muon", "fedmuon-aligned", "fedmuon-corrected", "muloco"):
        ends = []
        for table in VARIANTS:
            run = small({}, local={"recipe": recipe, "steps": 2}, orthogonalizer=table)
            ends.append(ended(build_experiment(run).recipe, run).params["weight"])
        assert all(bool(end.isfinite().all()) for end in ends)
        assert not torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2]), recipe


VARIANTS: list[dict[str, Any]] = [{}, {"row-memory": 0.9}, {"shards": 2, "full-every": 2}]


@pytest.mark.parametrize("recipe", quick(["dp-muon", "disk-muon"], ["disk-muon"]))
def test_private_recipes_spend_the_same_with_any_step(recipe: str) -> None:
    """The step is computed from what was released, so epsilon does not change; the model does."""
    privacy = {"insecure-reproducible-noise": True, "lot": 8.0, "noise": 0.5, "bound": 0.3}
    spent, ends = [], []
    for table in VARIANTS:
        found = fedmuon.run(small({}, local={"recipe": recipe, "steps": 2}, privacy=privacy,
                                  orthogonalizer=table))  # fmt: skip
        spent.append(found.summary["privacy"]["epsilon"])
        ends.append(np.asarray(found.model["weight"]))
    assert spent[0] > 0 and spent == [spent[0]] * 3
    assert not np.array_equal(ends[0], ends[1]) and not np.array_equal(ends[0], ends[2])


def test_networks_with_fused_projections_and_auxiliary_parameters() -> None:
    """Biases, norms and embeddings take AdamW's steps; their rows have no running size."""
    ends = []
    for table in VARIANTS:
        run = small(
            {
                "data": {"name": "pydoc", "context": 12, "train": 40, "test": 20},
                "federation": {"clients": 2, "per-round": 2, "rounds": 2},
                "task": {"name": "network", "model": "gpt", "width": 8, "depth": 2, "heads": 2},
            },
            local={"recipe": "fedmuon", "steps": 2, "lr": 0.02, "aux": "adamw",
                   "adjust": "match-rms"},
            orthogonalizer=table,
        )  # fmt: skip
        ends.append(fedmuon.run(run).model)
    for name in ends[0]:
        assert all(np.isfinite(np.asarray(end[name])).all() for end in ends), name
    for other in ends[1:]:
        assert any(not np.array_equal(ends[0][name], other[name]) for name in ends[0])


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"orthogonalizer": {"full-every": 3}}, "Set shards above 1"),
        ({"orthogonalizer": {"row-memory": 0.9}, "local": {"adjust": "polargrad"}},
         "averages row sizes over steps"),
        ({"orthogonalizer": {"shards": 2}, "local": {"recipe": "dp-muonbc"},
          "privacy": {"noise": 1.0}}, "bias correction needs an orthogonalizer without state"),
        ({"orthogonalizer": {"row-memory": 0.9}, "local": {"recipe": "muon"},
          "privacy": {"level": "client", "noise": 1.0}}, "noise can make"),
    ],
)  # fmt: skip
def test_combinations_that_make_no_sense_are_rejected(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        parse(tables)
    assert said in str(error.value)


@pytest.mark.parametrize("table", [{"row-memory": 0.9}, {"shards": 2}])
def test_bounds_reject_them(table: dict[str, Any]) -> None:
    case = CertifiedSetting(parse({"orthogonalizer": table}), np.full(20, 200), Uniform(5, 0.05))
    found = certify(case)
    assert found.bound is None and f"[orthogonalizer] {next(iter(table))} = " in found.refusal
    plain = CertifiedSetting(parse({}), np.full(20, 200), Uniform(5, 0.05))
    assert certify(plain).bound is not None  # the control


def test_arguments_out_of_range_are_rejected() -> None:
    plain = links.orthogonalize(torch.sign)
    for call in (
        lambda: links.normalize_rows(plain, 1.0),
        lambda: links.block_periodic(plain, plain, 0),
        lambda: links.orthogonalize(torch.sign, shards=0),
    ):
        with pytest.raises(InputError, match="must be"):
            call()
