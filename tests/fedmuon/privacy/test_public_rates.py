"""Rates that are public, or are not: what runs, ledgers and loops then call their epsilon."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from torch import nn

import fedmuon
from fedmuon.config.load import Config
from fedmuon.config.schema import Local, OrthogonalizerTable, Privacy
from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute
from fedmuon.experiments.spending import privacy_record
from fedmuon.federated.accountant import delta_of
from fedmuon.optim import DPSGD
from fedmuon.optim.aggregators import by_samples
from fedmuon.optim.private import Private
from fedmuon.optim.recipe_tables import make_recipe
from fedmuon.privacy.accounting.composition import account
from fedmuon.privacy.ledger import Ledger
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.per_example.clipping import Clipping

OLD = {"ledger": 2, "fingerprint": "run", "adjacency": "add-remove", "sampling": "poisson",
       "noise": "secret"}  # fmt: skip


def private(federation: dict[str, Any] | None = None, **privacy: Any) -> Config:
    given = {"epsilon": 4.0, "lot": 6.0, "bound": 0.2, "delta": 1e-3} | privacy
    local = {"recipe": "dp-sgd", "lr": 0.1, "steps": 2}
    return small(federation={"rounds": 2} | (federation or {}), local=local, privacy=given)


def noise_of(out: Path, **changes: Any) -> tuple[float, set[float]]:
    """The noise that was found, and the rates of all that was released."""
    summary = execute(private(**changes), out)
    entries = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()[1:]]
    return summary["privacy"]["noise"], {rate for one in entries for rate in one["rates"]}


def test_a_public_population_hides_how_many_samples_there_are(tmp_path: Path) -> None:
    """Rates and noise are the same however the samples are dealt; with lot / n_i they are not."""
    dealt = [{"per-round": 6, "seed": seed} for seed in (1, 2)]
    public = [noise_of(tmp_path / f"a{n}", federation=one, population=40)
              for n, one in enumerate(dealt)]  # fmt: skip
    assert public[0] == public[1] and public[0][1] == {6 / 40}
    own = [noise_of(tmp_path / f"b{n}", federation=one) for n, one in enumerate(dealt)]
    assert own[0] != own[1] and len(own[0][1]) > 1  # control
    spent = [json.loads((tmp_path / name / "summary.json").read_text())["privacy"]
             for name in ("a0", "b0")]  # fmt: skip
    assert [(one["adjacency"], one["rate_from"]) for one in spent] == [
        ("add-remove", "public"), ("zero-out", "samples")]  # fmt: skip
    assert "fewer samples than a lot" not in spent[0]["note"]
    assert Ledger.read(tmp_path / "a0" / "ledger.jsonl").epsilons(1e-3)[0].adjacency == "add-remove"


def test_a_public_rate_and_the_delta_that_follows() -> None:
    sizes = np.array([10**6])
    assert Privacy(rate=0.25).public_rate == 0.25 and Privacy().public_rate == 0
    assert Privacy(lot=8.0, population=32).public_rate == 0.25
    assert delta_of(private(delta=0.0, rate=1e-4), sizes) == pytest.approx((6e4) ** -1.1)
    assert delta_of(private(delta=0.0, population=60_000), sizes) == pytest.approx((6e4) ** -1.1)
    assert delta_of(private(delta=0.0), sizes) == pytest.approx(1e6**-1.1)


@pytest.mark.parametrize(("changes", "why"), [
    ({"adjacency": "add-remove"}, "does not hold for rates lot / n_i"),
    ({"rate": 0.1, "population": 60}, "leave one of them out"),
    ({"population": 5}, "lot = 6 exceeds population = 5"),
    ({"population": 60, "federation": {"aggregate": "by-samples"}}, "which .* is to hide"),
    ({"population": 60, "federation": {"aggregate": "statistics:mean"}}, "which .* is to hide"),
    ({"rate": 1.5}, "rate"),
])  # fmt: skip
def test_words_that_would_not_be_true_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        private(**changes)
    private(population=60, adjacency="zero-out", federation={"aggregate": "by-samples"})


def test_a_mechanism_of_ones_own_is_held_to_it() -> None:
    given = Clipping("block", 1.0), 1.0, 4.0
    with pytest.raises(InputError, match="does not hold for rates"):
        Mechanism(*given, adjacency="add-remove")
    with pytest.raises(InputError, match="not accounted for"):
        Mechanism(*given, adjacency="substitute")
    assert Mechanism(*given, public_rate=0.1, adjacency="add-remove").rate(7) == 0.1


def test_old_ledgers_are_read_as_what_holds(tmp_path: Path) -> None:
    """Format 2 said add-remove of rates lot / n_i; and so would a ledger of any format."""
    for number, first in enumerate((OLD, OLD | {"ledger": 3, "rate_from": "samples"})):
        made = Ledger(tmp_path / f"{number}.jsonl")._started(first)
        made.begin(0, [0], [0.1], 2.0, 1, 5)
        read = Ledger.read(made.path)
        assert read.about["adjacency"] == "zero-out" and read.about["rate_from"] == "samples"
        assert read.epsilons(1e-5)[0].adjacency == "zero-out"
    before = {"epsilon": 2.0, "certified": True, "adjacency": "add-remove"}  # its summary
    assert privacy_record(private(), {"privacy": before})["privacy"]["adjacency"] == "zero-out"


def test_a_ledger_accounts_for_what_it_names(tmp_path: Path) -> None:
    made = Ledger.open(tmp_path / "ledger.jsonl", "run", adjacency="replace-one")
    made.begin(0, [0], [0.1], 2.0, 1, 50)
    found = made.epsilons(1e-5)[0]
    assert found == account(made.events(0), 1e-5, adjacency="replace-one")
    assert found.lower > account(made.events(0), 1e-5).upper
    with pytest.raises(InputError, match="another run"):
        Ledger.open(made.path, "run", adjacency="zero-out")


def loop(**privacy: Any) -> Private:
    given = {"noise": 2.0, "lot": 20.0, **privacy}
    return DPSGD(nn.Linear(6, 3), population=200, lr=0.1, privacy=given)


def test_a_loop_of_ones_own_names_what_holds() -> None:
    inputs, labels = torch.zeros(200, 6), torch.zeros(200, dtype=torch.long)
    own, public, replaced = loop(), loop(population=250), loop(adjacency="replace-one")
    for one in (own, public, replaced):
        for lot in one.lots(5):
            one.step(lot, inputs[lot.rows], labels[lot.rows])
    names = [one.epsilon(1e-5).adjacency for one in (own, public, replaced)]
    assert names == ["zero-out", "add-remove", "replace-one"]
    assert public.epsilon(1e-5).upper < own.epsilon(1e-5).upper < replaced.epsilon(1e-5).lower
    state = own.state_dict()
    public.load_state_dict(state)  # lots at a rate that was not public count as well
    assert public.epsilon(1e-5).adjacency == "zero-out"
    assert public.epsilon(1e-5).upper > own.epsilon(1e-5).upper
    assert math.isfinite(replaced.epsilon(1e-5).rdp)


def test_weights_that_tell_of_sizes_are_refused_where_sizes_are_hidden(tmp_path: Path) -> None:
    """A mechanism of one's own says add-remove by itself, whatever the config says."""
    own = make_recipe(
        Local(recipe="dp-sgd", lr=0.01),
        OrthogonalizerTable(),
        privacy=Privacy(population=40, noise=1.0, lot=8.0),
    )
    assert own.mechanism is not None and own.mechanism.adjacency == "add-remove"
    given = {"data": {"name": "synthetic", "train": 60, "test": 20},
             "federation": {"clients": 3, "per-round": 2, "rounds": 1}}  # fmt: skip
    weighed = {**given, "federation": {**given["federation"], "aggregate": "by-samples"}}
    with pytest.raises(InputError, match="hides how many samples"):
        fedmuon.run(weighed, recipe=own, out=tmp_path / "config")
    with pytest.raises(InputError, match="hides how many samples"):
        mine = dataclasses.replace(own, aggregate=by_samples())
        fedmuon.run(given, recipe=mine, out=tmp_path / "recipe")
    found = fedmuon.run(given, recipe=own, out=tmp_path / "plain").summary["privacy"]
    assert found["adjacency"] == "add-remove"


@pytest.mark.parametrize(
    "more",
    [{"epsilon": 1.0}, {"noise-correlation": "sqrt-toeplitz", "band": 4}, {"trust": "local"}],
)
def test_a_loop_of_ones_own_refuses_what_it_does_not_read(more: dict) -> None:
    with pytest.raises(InputError, match="out"):
        Private(
            nn.Linear(6, 2),
            population=200,
            recipe="dp-sgd",
            privacy={"noise": 1.0, "lot": 8.0, **more},
        )
