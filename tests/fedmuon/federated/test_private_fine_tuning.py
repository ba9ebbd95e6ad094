"""Private fine-tuning of a tiny language model: epsilon by hand, and what the run says about it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from language_models import save_model, save_texts, save_tokenizer

from fedmuon.config.load import Config, parse
from fedmuon.experiments.run import execute
from fedmuon.experiments.suites.contents import merged
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data
from fedmuon.runs.config_notes import separate_adapters

SIGMA, LOT, STEPS, ROUNDS, DELTA = 1.3, 4.0, 2, 3, 1e-3
WAYS = ("factors", "freeze-a", "exact", "subspace")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path_factory.getbasetemp() / "models"))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A Llama model of width 16 with two layers, and a text of each of three clients."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tokenizer(save_model(folder / "model"))
    return {
        "data": {"name": "text", "folder": str(save_texts(folder / "texts")), "context": 12,
                 "minimum": 5},
        "federation": {"partition": "column", "rounds": ROUNDS, "per-round": 2, "seed": 3},
        "task": {"name": "causal-lm", "weights": str(folder / "model"), "lora-rank": 2},
        "local": {"recipe": "dp-muon", "lr": 0.05, "steps": STEPS},
        "engine": {"dtype": "float64", "device": "cpu"},
        "privacy": {"noise": SIGMA, "bound": 0.2, "delta": DELTA},
    }  # fmt: skip


def by_example(tables: dict[str, Any], way: str, **privacy: Any) -> Config:
    privacy = {"lot": LOT, "clipping": "flat", **privacy}
    return parse(merged(tables, {"federation": {"adapters": way}, "privacy": privacy}))


def epsilon(rate: float, noise: float, count: int) -> float:
    """Of this many Gaussian releases of Poisson samples."""
    import dp_accounting  # slow, and collecting does not need it

    accountant = dp_accounting.pld.PLDAccountant()
    release = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(release, count)
    return accountant.get_epsilon(DELTA)


def participations(run: Path, clients: int) -> np.ndarray:
    lines = [json.loads(line) for line in (run / "rounds.jsonl").open()]
    return np.bincount([client for line in lines for client in line["participants"]],
                       minlength=clients)  # fmt: skip


@pytest.mark.parametrize(
    ("way", "clipping"),
    [("subspace", "flat"), ("freeze-a", "block")]
    + [pytest.param(way, clipping, marks=pytest.mark.slow) for way, clipping in
       (("factors", "block"), ("exact", "flat"), ("exact", "block"), ("subspace", "block"))],
)  # fmt: skip
def test_epsilon_per_example_is_that_of_dp_accounting(
    tables: dict[str, Any], way: str, clipping: str, tmp_path: Path
) -> None:
    """Rate lot / n_i, steps times rounds of the client, noise / sqrt(blocks)."""
    config = by_example(tables, way, clipping=clipping)
    spent = execute(config, tmp_path / "run")["privacy"]
    factors = 2 * 2 * 7  # A and B of seven projections in each of two layers
    released = factors if way in ("factors", "exact") else factors // 2
    blocks = 1 if clipping == "flat" else released
    assert spent["blocks"] == blocks and spent["certified"]
    sizes = build_data(resolve(config)).sizes
    rounds = participations(tmp_path / "run", len(sizes))
    by_hand = {
        client: epsilon(LOT / sizes[client], SIGMA / math.sqrt(blocks), int(count) * STEPS)
        for client, count in enumerate(rounds)
        if count
    }
    assert spent["clients"].keys() == {str(client) for client in by_hand}
    for client, value in by_hand.items():
        assert spent["clients"][str(client)] == pytest.approx(value, rel=2e-3)
    assert spent["epsilon"] == pytest.approx(max(by_hand.values()), rel=2e-3)
    worst = max(by_hand, key=lambda client: by_hand[client])
    assert spent["client"] == worst
    twice = 2 * blocks  # as if both factors had noise, the negative control
    count = int(rounds[worst]) * STEPS
    assert epsilon(LOT / sizes[worst], SIGMA / math.sqrt(twice), count) > 1.1 * spent["epsilon"]


@pytest.mark.parametrize("recipe", ["fedavg", "fedmuon"])
@pytest.mark.parametrize("way", ["factors", "freeze-a", "subspace"])
def test_epsilon_per_client_is_that_of_dp_accounting(
    tables: dict[str, Any], way: str, recipe: str, tmp_path: Path
) -> None:
    """Rate K / N, one release a round, whatever is trained."""
    below = {
        "federation": {"adapters": way},
        "local": {"recipe": recipe, "batch": 4},
        "privacy": {"level": "client"},
    }
    run = execute(parse(merged(tables, below)), tmp_path / "run")
    spent = run["privacy"]
    assert spent["unit"] == "client" and spent["certified"]
    assert spent["epsilon"] == pytest.approx(epsilon(2 / 3, SIGMA, ROUNDS), rel=2e-3)
    assert abs(spent["epsilon"] / epsilon(2 / 3, SIGMA, ROUNDS + 1) - 1) > 0.05
    assert run["perplexity"] > 1


def test_a_run_says_what_it_assumes(tables: dict[str, Any], tmp_path: Path) -> None:
    note = execute(by_example(tables, "subspace"), tmp_path / "run")["privacy"]["note"]
    assert "assumes that the pretrained weights are public" in note
    assert "does not cover a text on which they were trained" in note


def test_a_run_says_that_an_example_is_a_window(tables: dict[str, Any], tmp_path: Path) -> None:
    """Windows are cut from the joined text of a client, so a line is no example."""
    note = execute(by_example(tables, "subspace"), tmp_path / "run")["privacy"]["note"]
    assert "a window that predicts at most 12 tokens, and epsilon protects one window." in note
    below = {"local": {"recipe": "fedavg", "batch": 4}, "privacy": {"level": "client"}}
    note = execute(parse(merged(tables, below)), tmp_path / "other")["privacy"]["note"]
    assert "window" not in note  # the control


def test_a_run_notes_that_adapters_are_clipped_separately(tables: dict[str, Any]) -> None:
    for clipping in ("block", "flat"):
        config = resolve(by_example(tables, "subspace", clipping=clipping))
        note = separate_adapters(config, build_experiment(config))
        assert ("clips 14 blocks" in note) == ("√14 = 0.3474" in note) == (clipping == "block")


def test_noise_has_the_size_of_x(tables: dict[str, Any], tmp_path: Path) -> None:
    """The larger the dimension of the noise, the larger its norm at the same epsilon."""
    entries = {}
    for way in WAYS:
        config = by_example(tables, way)
        run = execute(config, tmp_path / way)
        line = json.loads((tmp_path / way / "rounds.jsonl").open().readline())
        entries[way] = line["bytes_up"] // 16 // 2  # two clients, float64, model and momentum
        assert run["privacy"]["blocks"] == 1
    assert entries["subspace"] == 14 * 4  # r^2 for each of 14 layers
    assert entries["freeze-a"] < entries["factors"] == entries["exact"]
