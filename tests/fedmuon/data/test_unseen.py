"""Clients that never train: who they are, and that no other client has their samples."""

from typing import Any

import numpy as np
import pytest

from fedmuon.config.load import Config, parse
from fedmuon.core.errors import InputError
from fedmuon.data.source import Source
from fedmuon.data.unseen import TRAINING, UNSEEN, VALIDATION, groups, of_clients, some_of_each
from fedmuon.federated.build import resolve
from fedmuon.federated.client_data import build_data, left_out, read_source

CLIENTS = 6


def source(text: bool = False) -> Source:
    """Twelve train samples and six test samples; sample k has the input k."""
    owner = np.tile(np.arange(CLIENTS), 3)
    labels = owner if text else np.arange(18) % 4
    names = tuple("abcdef")
    return Source(
        "letters", np.arange(18.0)[:, None], labels, CLIENTS, 12, "letters",
        owner=owner, owner_names=names,
    )  # fmt: skip


def test_the_groups_contain_every_client_once() -> None:
    members = groups(20, 3, 5)
    assert [len(members[name]) for name in (UNSEEN, VALIDATION, TRAINING)] == [3, 5, 12]
    assert sorted(np.concatenate([*members.values()]).tolist()) == [*range(20)]
    assert groups(20, 3, 9)[UNSEEN].tolist() == members[UNSEEN].tolist()
    assert groups(20, 4, 5)[UNSEEN].tolist() != members[UNSEEN].tolist()


@pytest.mark.parametrize("counts", [(3, 3), (6, 0), (0, 7)])
def test_some_client_must_train(counts: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"leave no client for training, .* 6 clients. Lower them"):
        groups(CLIENTS, *counts)


@pytest.mark.parametrize("text", [False, True])
def test_a_part_has_the_samples_of_its_clients(text: bool) -> None:
    part = of_clients(source(text), np.array([1, 4]))
    assert part.inputs[:, 0].tolist() == [1, 4, 7, 10, 13, 16] and part.official_test == 4
    assert part.owner is not None and part.owner.tolist() == [0, 1] * 3
    assert part.owner_names == ("b", "e")
    assert part.labels.tolist() == ([0, 1] * 3 if text else [1, 0, 3, 2, 1, 0])


def test_a_part_of_each_client_is_spread_over_its_samples() -> None:
    assert some_of_each(source(), 100).tolist() == sorted(range(18), key=lambda k: (k % 6, k))
    assert some_of_each(source(), 12).tolist() == [k + 6 * j for k in range(6) for j in (0, 1)]
    assert len(some_of_each(source(), 2)) == CLIENTS  # at least one of each


def config(folder: Any, **tables: Any) -> Config:
    base = {"data": {"name": "npz", "folder": str(folder / "six.npz"), "minimum": 1,
                     "options": {"client": "who"}},
            "federation": {"partition": "column"}}  # fmt: skip
    merged = {name: {**base.get(name, {}), **tables.get(name, {})} for name in {*base, *tables}}
    return parse(merged)


@pytest.fixture
def folder(tmp_path: Any) -> Any:
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "six.npz", inputs=rng.standard_normal((60, 4)), labels=np.arange(60) % 3,
        who=np.array([f"client {k % CLIENTS}" for k in range(60)]),
    )  # fmt: skip
    return tmp_path


@pytest.mark.parametrize("seed", [0, 5])
def test_no_sample_of_an_unseen_client_trains(folder: Any, seed: int) -> None:
    chosen = resolve(config(folder, data={"unseen-clients": 2, "validation-clients": 1},
                            federation={"partition": "column", "seed": seed}))  # fmt: skip
    data = build_data(chosen)
    unseen, validation = left_out(chosen, UNSEEN), left_out(chosen, VALIDATION)
    assert unseen is not None and validation is not None
    assert chosen.federation.clients == 3 and len(unseen.owner_names) == 2
    groups_of_names = [{*data.client_names}, {*unseen.owner_names}, {*validation.owner_names}]
    assert sum(map(len, groups_of_names)) == len(set.union(*groups_of_names)) == CLIENTS
    seen = {tuple(row) for row in np.concatenate([data.inputs, data.test_inputs]).round(6)}
    apart = {tuple(row) for row in unseen.rows(chosen.data.normalize).round(6)}
    assert not seen & apart and len(apart) == 20
    assert len(read_source(chosen).labels) == 30
    assert left_out(resolve(config(folder)), UNSEEN) is None


@pytest.mark.parametrize("counts", [(2, 0), (0, 2)])
def test_a_group_may_be_empty(folder: Any, counts: tuple[int, int]) -> None:
    keys = dict(zip(("unseen-clients", "validation-clients"), counts, strict=True))
    chosen = resolve(config(folder, data=keys))
    parts = left_out(chosen, UNSEEN), left_out(chosen, VALIDATION)
    assert [part is not None for part in parts] == [count > 0 for count in counts]
    assert chosen.federation.clients == len(build_data(chosen).client_names) == 4


@pytest.mark.parametrize(
    ("counts", "per_round", "said"),
    [({"unseen-clients": 5}, 2, "has 6 clients, of which 5 are unseen, so 1 trains. Set .* = 1 or"),
     ({"unseen-clients": 1, "validation-clients": 2}, 4,
      "of which 1 are unseen and 2 are validation clients, so 3 train. "),
     ({}, 7, "per-round = 7, but the data has 6 clients. Set per-round = 6 or less")],
)  # fmt: skip
def test_a_round_has_only_clients_that_train(
    folder: Any, counts: dict[str, int], per_round: int, said: str
) -> None:
    federation = {"partition": "column", "per-round": per_round}
    with pytest.raises(InputError, match=said):
        resolve(config(folder, data=counts, federation=federation))
    fewer = {**federation, "per-round": 1}
    assert resolve(config(folder, data=counts, federation=fewer)).federation.per_round == 1


def test_clients_must_be_known() -> None:
    digits = parse({"data": {"name": "digits", "unseen-clients": 1},
                    "federation": {"partition": "column"}})  # fmt: skip
    with pytest.raises(InputError, match="need data with a column of clients"):
        read_source(digits)
