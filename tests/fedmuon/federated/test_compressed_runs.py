"""Runs with compressed messages: bytes, engines, resume, and what is rejected."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick, small
from sentences import one_sentence

from fedmuon.config.load import Config, load
from fedmuon.experiments.cli import main
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability.certificates import Uncertified, method_of
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.rounds import (
    begin,
    client_updates,
    received_message,
    simulate,
)
from fedmuon.optim.compression import Compression, compressor
from fedmuon.optim.stage import ServerState

TOP = {"uplink": "top-k", "share": 0.3}
POWER = {"uplink": "power", "rank": 1, "feedback": "error"}
LOCAL = {"steps": 2, "batch": 4}


def config(compression: dict[str, Any], **tables: dict[str, Any]) -> Config:
    return small({"local": LOCAL}, compression=compression, **tables)


def ended(table: Config, change: Callable[[Any], Any] = lambda made: made) -> ServerState:
    made = change(build_experiment(resolve(table)))
    return simulate(made, begin(made.recipe, made.task, table.federation.seed))


def distance(one: ServerState, other: ServerState) -> float:
    return float((one.params["weight"] - other.params["weight"]).abs().max())


@pytest.mark.parametrize("measured", [False, True])
def test_a_broadcast_is_read_once_in_a_round(measured: bool) -> None:
    """By all clients together; the server reads it again to add what they return, also where it
    tells of each client."""
    seen: list[int] = []
    both = {"uplink": "qsgd", "downlink": "qsgd", "levels": 100}

    def counted(made: Any) -> Any:
        (compression,) = made.recipe.stages
        down = compression.downlink

        def decode(parts: Any, like: Any) -> Any:
            seen.append(1)
            return down.decode(parts, like)

        table = replace(compression, downlink=replace(down, decode=decode))
        recipe = replace(made.recipe, stages=(table,))
        return replace(made, recipe=recipe, measured=measured)

    assert distance(ended(config(both), counted), ended(config(both))) == 0
    rounds = config(both).federation.rounds
    assert len(seen) == 2 * 2 * rounds  # of a model and a momentum


def test_draws_depend_on_the_round_the_client_and_the_tensor() -> None:
    """Of the same update each has a message of its own; the same client and round has the same."""
    one = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 7, 5)))
    trees = {"model": {"a": one, "b": one}, "momentum": {"a": one}}
    zero = {tree: dict.fromkeys(held, torch.zeros_like(one)) for tree, held in trees.items()}
    for name, part in (("random-k", "indices"), ("qsgd", "codes")):
        table = Compression(compressor(name, 0.3), compressor(name, 0.3), seed=4)

        def parts(sent: Any, part: str = part) -> list[tuple[int, ...]]:
            places = ("model", "a"), ("model", "b"), ("momentum", "a")
            return [tuple(sent[tree][f"{at}:{part}"].flatten().tolist()) for tree, at in places]

        up = [
            one
            for round, client in ((0, 0), (0, 1), (1, 0))
            for one in parts(table.message(trees, zero, {}, round, client)[0])
        ]
        down = [one for round in (0, 1) for one in parts(table.broadcast(trees, round))]
        assert len({*up, *down}) == len(up) + len(down) == 15
        assert parts(table.message(trees, zero, {}, 0, 1)[0]) == up[3:6]  # the control


def test_fewer_bytes_go_up_and_down(tmp_path: Path) -> None:
    def sizes(name: str, compression: dict[str, Any]) -> tuple[int, int]:
        execute(config(compression), tmp_path / name)
        line = json.loads((tmp_path / name / "rounds.jsonl").read_text().splitlines()[0])
        return line["bytes_down"], line["bytes_up"]

    whole = sizes("whole", {})
    count = 2 * whole[0] // (8 * 21 * 2)  # models and momenta of participants
    assert whole[0] == whole[1] == count * 8 * 21
    assert sizes("top", TOP) == (whole[0], count * 6 * (8 + 2))
    both = sizes("qsgd", {"uplink": "qsgd", "downlink": "qsgd", "levels": 7})
    assert both == (count * (8 + 11), count * (8 + 11))  # 21 codes of 4 bits, and a scale


COMPRESSIONS = [{"downlink": "qsgd", "levels": 100}, {"uplink": "random-k", "share": 0.5},
                {**TOP, "feedback": "ef21"}, POWER,
                {"uplink": "sign", "feedback": "error", "downlink": "low-rank"}]  # fmt: skip
KINDS = [(recipe, one) for recipe in ("fedavg", "scaffold", "fedmuon", "ditto", "dp-sgd")
         for one in COMPRESSIONS]  # fmt: skip


@pytest.mark.parametrize(("recipe", "compression"), quick(KINDS, KINDS[::3]), ids=str)
def test_every_kind_of_recipe_runs(recipe: str, compression: dict[str, Any]) -> None:
    private = {"noise": 0.5, "lot": 8.0, "insecure-reproducible-noise": True}
    tables: dict[str, Any] = {"local": {"recipe": recipe, "steps": 2}}
    if recipe == "dp-sgd":
        tables["privacy"] = private
        if "feedback" in compression:
            return
    if recipe == "ditto":
        tables["data"] = {"client-test": 0.3}
    found = ended(small(compression=compression, **tables))
    assert torch.isfinite(found.params["weight"]).all()


CLIENTS = {"level": "client", "noise": 0.5, "bound": 0.3, "insecure-reproducible-noise": True}
REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"local": {"recipe": "fedmuon-svd"}, "compression": TOP}, "compressed only once"),
    ({"compression": {"uplink": "top-k", "share": 0.0}}, "share = 0.0"),
    ({"compression": {"uplink": "top-k", "share": 1.5}}, "share = 1.5"),
    ({"compression": {"uplink": "qsgd", "levels": 0}}, "levels = 0"),
    ({"compression": {"uplink": "qsgd", "share": 0.2}}, "share = 0.2 has no effect"),
    ({"compression": {"uplink": "qsgd", "feedback": "error"}}, "feedback = 'error' has no effect"),
    ({"compression": {"feedback": "ef21"}}, "feedback = 'ef21' has no effect"),
    ({"compression": {"uplink": "gzip"}}, "uplink = 'gzip'"),
    ({"federation": {"aggregate": "median"}, "compression": {**TOP, "feedback": "ef21"}}, "mean"),
    ({"privacy": CLIENTS, "local": {"recipe": "fedavg"}, "compression": TOP}, "trust = 'local'"),
    ({"privacy": {**CLIENTS, "trust": "local", "cohorts": "fixed"}, "local": {"recipe": "fedavg"},
      "compression": {"downlink": "qsgd"}}, "downlink = 'none'"),
    ({"privacy": CLIENTS, "local": {"recipe": "fedavg"}, "compression": {"downlink": "qsgd"}},
     "downlink = 'none'"),
    ({"compression": {"downlink": "power"}}, "downlink = 'power'"),
    ({"compression": {"uplink": "low-rank", "iterations": 2}}, "iterations = 2 has no effect"),
    ({"compression": {"uplink": "power", "iterations": 0}}, "iterations = 0"),
    ({"privacy": {"noise": 0.5}, "local": {"recipe": "dp-sgd"},
      "compression": {"uplink": "power"}}, "uplink = 'power' stores a state of each client"),
    ({"privacy": {**CLIENTS, "trust": "local", "cohorts": "fixed"}, "local": {"recipe": "fedavg"},
      "compression": {"uplink": "power"}}, "uplink = 'power' stores a state of each client"),
    ({"privacy": {"noise": 0.5}, "local": {"recipe": "dp-sgd"},
      "compression": {**TOP, "feedback": "error"}}, "guarantee does not cover stored states"),
]  # fmt: skip


@pytest.mark.parametrize(("tables", "said"), REJECTED, ids=lambda one: str(one)[:40])
def test_what_does_not_fit_is_rejected(tables: dict[str, Any], said: str) -> None:
    with one_sentence(said.replace("[", r"\[")):
        small(**tables)


def test_a_rejected_run_ends_with_code_2_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as ended_by:
        main(["run", "--set=compression.uplink=top-k", "--set=compression.share=7",
              "--out", str(out)])  # fmt: skip
    assert ended_by.value.code == 2 and not out.exists()
    assert "share = 7" in " ".join(capsys.readouterr().err.split())


def test_no_certificate_covers_compressed_messages() -> None:
    assert method_of(config({}))
    for table in (TOP, {"downlink": "qsgd"}):
        with pytest.raises(Uncertified, match="does not cover compression"):
            method_of(config(table))


def test_local_trust_compresses_what_is_noisy_already() -> None:
    """The message is C of the noisy update, and nothing else of the client."""
    privacy = {**CLIENTS, "trust": "local", "cohorts": "fixed"}
    table = small(local={"recipe": "fedavg"}, privacy=privacy, compression=TOP)
    made = build_experiment(resolve(table))
    state = begin(made.recipe, made.task, table.federation.seed)
    sent = received_message(made.recipe, state)
    clients = [(i, made.shards[i]) for i in (0, 1)]
    privacy_stage, compression = made.recipe.stages
    only_private = replace(made.recipe, stages=(privacy_stage,))
    noisy = client_updates(only_private, made.task, made.plan, clients, sent)
    replies = client_updates(made.recipe, made.task, made.plan, clients, sent)
    read, _ = compression.read(replies, lambda: sent, state)
    for before, after in zip(noisy, read, strict=True):
        update, found = (
            (one.params["weight"] - sent.params["weight"]).flatten() for one in (before, after)
        )
        largest = update.abs().topk(6).indices
        assert (found != 0).sum() == 6 and (found[largest] - update[largest]).abs().max() < 1e-14
    assert ended(table).params["weight"].isfinite().all()


def test_an_older_config_has_no_compression(tmp_path: Path) -> None:
    execute(config({}), tmp_path)
    file = tmp_path / "config.toml"
    text = file.read_text()
    start = text.index("[compression]")
    older = text[:start] + text[text.index("[", start + 1) :]
    (tmp_path / "older.toml").write_text(older)
    assert load(tmp_path / "older.toml").compression == config({}).compression
