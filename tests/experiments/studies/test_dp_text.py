"""Study `dp-text` from its command to its report, and claims that can fail."""

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from networks import own_model
from test_pitfalls import unnamed

from fedmuon.analysis.report.tuning import Tuned
from fedmuon.core import files
from fedmuon.core.errors import InputError
from fedmuon.data.text import corpus, prompts, tokens_of
from fedmuon.experiments.cli import main
from fedmuon.experiments.studies import dp_text
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies.tuned import Stored
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import SuiteRequest, merged
from fedmuon.experiments.suites.suite import execute
from fedmuon.experiments.text_scores import SCORES
from fedmuon.tasks.decoder import Form, generate, read_weights

TINY: dict[str, Any] = {
    "made-tables": 20, "public-tables": 10, "prompts": 2, "beams": 2,
    "base": {
        "data": {"test": 3}, "task": {"width": 8, "depth": 1, "heads": 1},
        "federation": {"rounds": 1}, "local": {"steps": 1}, "privacy": {"lot": 4.0},
        "output": {"evaluate-every": 1},
    },
    "public": {"federation": {"rounds": 1}, "local": {"steps": 1, "batch": 4}},
}  # fmt: skip


def tiny(folder: Path) -> Path:
    file = folder / "dp-text.toml"
    content = contents.read("dp-text")
    small = merged(content.pop("small"), TINY)
    file.write_text(tomli_w.dumps({**content, "small": small}), encoding="utf-8")
    return file


@pytest.mark.usefixtures("undrawn")
@pytest.mark.slow
def test_the_suite_from_its_command_to_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tiny(tmp_path), tmp_path / "out"
    with pytest.raises(SystemExit, match="0"):
        main(["suite", str(file), "--data", "dart", "--scale", "small", "--out", str(out)])
    ends = list(csv.DictReader((out / "ends.csv").read_text().splitlines()))
    assert [row["recipe"] for row in ends] == ["dp-sgd", "dp-adam", "dp-muon", "dp-muonbc"]
    assert all(7.5 < float(row["epsilon"]) <= 8 for row in ends)
    assert [row["blocks"] for row in ends] == ["1", "1", "5", "5"]
    assert len({row["nll"] for row in ends}) == 4
    written = list(csv.DictReader((out / "written.csv").read_text().splitlines()))
    assert len(written) == 8 and " : food : " in written[0]["table"]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "The text is synthetic" in page and "DP-Muon, GPT-2" in page and "0.4531" in page
    assert not unnamed(out)
    ledger = next((out / "runs").glob("*/method-0/ledger.jsonl"))
    assert len(ledger.read_text().splitlines()) == 2
    before = (out / "ends.csv").read_bytes()
    next((out / "cells").iterdir()).unlink()
    execute(kinds.find(str(file), "dart", "small", {}), out, resume=True)
    assert (out / "ends.csv").read_bytes() == before  # finished runs are not released anew
    capsys.readouterr()


@pytest.mark.slow
def test_one_method_is_tuned_and_writes(tmp_path: Path) -> None:
    (whole,) = kinds.find(str(tiny(tmp_path)), "dart", "small", {}).within(tmp_path)
    assert isinstance(whole, dp_text.TextCell)
    few = {"DP-Muon": whole.settings.variants["DP-Muon"]}
    given = {"variants": few, "prompts": 1, "beams": 1}
    record = replace(whole, settings=whole.settings.model_copy(update=given)).compute()
    (end,), (point,), (one,) = (record[name] for name in ("ends", "curves", "written"))
    assert (end["method"], end["recipe"], end["blocks"]) == ("DP-Muon", "dp-muon", 5)
    assert 7.5 < end["epsilon"] <= end["target"] == 8 and end["note"] == ""
    # A decoder of bytes that has hardly learned anything guesses among 257 of them.
    assert end["nll"] == pytest.approx(np.log(257), abs=0.2)
    assert point["step"] == 1 and point["loss"] == pytest.approx(end["nll"], abs=0.01)
    assert 0 <= end["bleu"] <= 100 and 0 <= end["rouge_l"] <= 100
    assert " : " in one["table"] and one["written"].isprintable() and one["reference"]
    assert record["made_up"] and dp_text.STUDY.summary([record]) == {"made_up": True}


def cell_of(name: str, folder: Path, **changes: Any) -> dp_text.TextCell:
    """The first cell of a suite, with other settings, in a folder."""
    (first, *_) = kinds.find(name, "e2e", "small", {}).within(folder)
    assert isinstance(first, dp_text.TextCell)
    base = merged(first.settings.base, TINY["base"])
    public = merged(first.settings.public, TINY["public"])
    sizes = {"made_tables": 20, "public_tables": 10, "prompts": 2, "beams": 1}
    settings = {"base": base, "public": public, **sizes, **changes}
    return replace(first, settings=first.settings.model_copy(update=settings))


@pytest.mark.slow
def test_the_model_is_chosen_on_the_validation_part(tmp_path: Path) -> None:
    """The chosen model is the best one by scores that are computed anew, and so is the NLL."""
    cell = cell_of("dp-text-gpt2", tmp_path)
    few = {"DP-Muon": cell.settings.variants["DP-Muon"]}
    base = merged(cell.settings.base, {
        "federation": {"rounds": 3}, "task": {"width": 8, "heads": 1, "depth": 1},
        "privacy": {"insecure-reproducible-noise": True},
    })  # fmt: skip
    given = {"variants": few, "base": base, "choose": "nll"}
    record = replace(cell, settings=cell.settings.model_copy(update=given)).compute()
    (end,), written = record["ends"], record["written"]
    assert end["blocks"] == 5 and {"nll", "bleu", "rouge_l"} < {*end}  # 4 matrices and the rest
    assert 7.5 < end["epsilon"] <= 8 and written
    folder = cell.folder
    assert folder is not None
    models = sorted(next(folder.glob("*-models")).iterdir())
    assert [one.stem for one in models] == ["round-0000001", "round-0000002", "round-0000003"]
    stored = read_weights(models[-1])
    last = read_weights(next(folder.glob("method-0")) / "model.safetensors")
    assert all((stored[name] == value).all() for name, value in last.items())
    assert not (stored["lm_head.weight"] == stored["transformer.wte.weight"]).all()
    pairs = corpus("e2e", folder / "restaurants")["dev"]
    form = Form(258, 160, 8, 1, 1, tied=False, padded=True)
    found = [mean_loss(form, read_weights(one), pairs) for one in models]
    assert end["nll"] == pytest.approx(min(found), rel=1e-5) and len(set(found)) == 3
    # The order of the files says nothing: the worst of them under the last name is not chosen.
    worst, best = models[int(np.argmax(found))], models[int(np.argmin(found))]
    worst.rename(tmp_path / "kept")
    best.rename(worst)
    (tmp_path / "kept").rename(best)
    again = replace(cell, settings=cell.settings.model_copy(update=given)).compute()
    assert again["ends"][0]["nll"] == end["nll"] and again["written"] == written


@pytest.mark.slow
def test_each_seed_searches_the_settings_of_000(tmp_path: Path) -> None:
    """Methods go on with the least validation NLL of all settings, of the very run that had it."""
    cell = cell_of("dp-text-sweep", tmp_path)
    names = ("DP-SGD", "DP-Adam")
    few = {name: cell.settings.variants[name] for name in names}
    base = merged(cell.settings.base, {
        "federation": {"rounds": 2}, "output": {"evaluate-every": 1},
        "task": {"width": 8, "heads": 1, "depth": 1},
    })  # fmt: skip
    grid = {"DP-SGD": {"lr": [1e-9, 0.03], "momentum": [0.0, 0.9]}, "DP-Adam": {"lr": [0.002]}}
    given = {"variants": few, "base": base, "choose": "nll", "search": grid, "prompts": 1}
    record = replace(cell, settings=cell.settings.model_copy(update=given)).compute()
    rows = record["searched"]
    assert [row["setting"] for row in rows] == [
        f"lr {lr:g}, momentum {m:g}" for lr in (1e-9, 0.03) for m in (0, 0.9)
    ]
    assert cell.folder is not None
    form, pairs = (
        Form(258, 160, 8, 1, 1, tied=False, padded=True),
        corpus("e2e", cell.folder / "restaurants")["dev"],
    )
    for place, row in enumerate(rows):
        models = sorted((cell.folder / f"method-0-{place}-models").iterdir())
        found = [mean_loss(form, read_weights(one), pairs) for one in models]
        assert row["nll"] == pytest.approx(min(found), rel=1e-5) and len(found) == 2
    lowest = min(row["nll"] for row in rows)
    assert [row["chosen"] for row in rows] == [row["nll"] == lowest for row in rows]
    assert record["ends"][0]["nll"] == lowest
    assert len({row["nll"] for row in rows}) >= 3  # settings make a difference
    again = replace(cell, settings=cell.settings.model_copy(update=given)).compute()
    assert again == record  # nothing is released anew


def test_the_sweeps_are_those_that_000_prints(tmp_path: Path) -> None:
    for data, counts in (("e2e", (8, 4, 8, 8)), ("dart", (4, 2, 4, 4))):
        (cell, *rest) = kinds.find("dp-text-sweep", data, "full", {}).within(tmp_path)
        assert isinstance(cell, dp_text.TextCell) and len(rest) == 2
        methods = cell.settings.variants
        assert tuple(len(cell.settings.candidates(name)) for name in methods) == counts
        assert cell.size == 1 + sum(counts)
        for name, own in methods.items():  # what 000 chose is among them
            for key, values in cell.settings.search[name].items():
                assert own["local"].get(key, 0.9) in values


def test_methods_are_compared_and_searched_at_each_epsilon() -> None:
    """Every comparison is between two methods with the same ε, for which both are searched."""
    for data in ("e2e", "dart"):
        suite, tuning = (
            json.loads(kinds.find(name, data, "full", {}).lock)[4]
            for name in ("dp-text-epsilon", "dp-text-tuning")
        )
        common = suite["base"]["privacy"]["epsilon"]
        at = {name: tables.get("privacy", {}).get("epsilon", common)
              for name, tables in suite["variants"].items()}  # fmt: skip
        pairs = [(order["better"], order["than"]) for order in suite["orders"]]
        assert all(at[better] == at[than] for better, than in pairs)
        assert {at[better] for better, _ in pairs} == {1, 3, 8}
        assert all(f"ε = {x:g}" in name or x == 8 for name, x in at.items())
        assert tuning["search"].keys() == suite["variants"].keys()
        assert {len(values["lr"]) for values in tuning["search"].values()} == {5}
        assert not {*tuning["seeds"]} & {*suite["seeds"]}
        for name, tables in suite["variants"].items():
            assert tables["local"]["lr"] in tuning["search"][name]["lr"]


def test_a_search_is_of_methods_and_keys_that_are_there(tmp_path: Path) -> None:
    content = contents.at(contents.read("dp-text-sweep"), "e2e", "small")
    del content["kind"], content["data"]
    request = SuiteRequest("dp-text-sweep", "e2e", "small", {})
    for search, why in (
        ({"DP-Lion": {"lr": [1.0]}}, "contains DP-Lion, but this suite does not train"),
        ({"DP-SGD": {"aux-lr": [1.0]}}, "aux-lr"),
        ({"DP-SGD": {"lr": []}}, "set at least one value"),
    ):
        with pytest.raises(InputError, match=why):
            dp_text.STUDY.work({**content, "search": search}, request)
    with pytest.raises(InputError, match="takes the last model without looking at its"):
        dp_text.STUDY.work({**content, "choose": "last"}, request)


def mean_loss(form: Form, weights: dict, pairs: list) -> float:
    """The mean loss of the tokens of sentences, one after the other, by transformers' model."""
    model = own_model(form)
    model.load_state_dict({name: torch.from_numpy(one) for name, one in weights.items()})
    losses: list[float] = []
    for pair in pairs:
        table, sentence = list(pair.table.encode()), list(f" {pair.sentence}".encode())
        row = torch.tensor([*table, 256, *sentence, 256])
        logits = model(row[None, :-1]).logits[0].detach()
        each = torch.nn.functional.cross_entropy(logits, row[1:], reduction="none")
        losses += each[len(table) :].tolist()
    return float(np.mean(losses))


def test_bleu_chooses_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the BLEU of what each model writes about validation tables, without line breaks."""
    cell = cell_of("dp-text-gpt2", tmp_path, choose="bleu")
    few = {"DP-SGD": cell.settings.variants["DP-SGD"]}
    base = merged(cell.settings.base, {"federation": {"rounds": 2}, "output": {"evaluate-every": 1},
                                       "task": {"width": 8, "heads": 1, "depth": 1}})  # fmt: skip
    asked: list[tuple[float, list[str]]] = []
    scores = iter([30.0, 10.0, 20.0])  # of the two models, and of the test part

    def bleu(written: list[str], references: list[list[str]]) -> float:
        asked.append((next(scores), written))
        return asked[-1][0]

    monkeypatch.setitem(dp_text.SCORES, "bleu", bleu)
    given = {"variants": few, "base": base}
    record = replace(cell, settings=cell.settings.model_copy(update=given)).compute()
    assert record["ends"][0]["bleu"] == 20 and len(asked) == 3
    assert cell.folder is not None
    models = sorted(next(cell.folder.glob("*-models")).iterdir())
    pairs = corpus("e2e", cell.folder / "restaurants")
    form, tokens = Form(258, 160, 8, 1, 1, tied=False, padded=True), tokens_of("")
    params = {name: torch.from_numpy(one) for name, one in read_weights(models[0]).items()}
    for part, (_, sentences) in (("dev", asked[0]), ("test", asked[2])):
        tables = [*prompts(pairs[part])][:2]
        rows = generate(form, params, [tokens.prompt(one) for one in tables], 256, 1, [10, 13])
        assert sentences == [tokens.decode(row) for row in rows]


def test_real_files_are_asked_for(tmp_path: Path) -> None:
    (cell, *_) = kinds.find("dp-text-gpt2", "e2e", "full", {}).within(tmp_path)
    with pytest.raises(InputError, match=r"Pass --set data\.folder"):
        cell.compute()
    assert not [*tmp_path.rglob("*.safetensors")]
    rows = "mr,ref\n" + "name[A],A place.\n" * 9
    (tmp_path / "train.csv").write_text(rows)
    (tmp_path / "dev.csv").write_text(rows)
    base = merged(TINY["base"], {"data": {"folder": str(tmp_path), "context": 40}})
    small = cell_of("dp-text-gpt2", tmp_path)
    base = merged(small.settings.base, base)
    with pytest.raises(InputError, match="must have a dev part"):
        replace(small, settings=small.settings.model_copy(update={"base": base})).compute()
    content = contents.at(contents.read("disk-text"), "e2e", "small")
    del content["kind"], content["data"]
    request = SuiteRequest("disk-text", "e2e", "small", {})
    with pytest.raises(InputError, match=r"score 'spice' is not known\. Use one of nll, bleu"):
        dp_text.STUDY.work({**content, "scores": ["spice"]}, request)


@pytest.mark.slow
def test_disk_is_scored_beside_the_same_method_without(tmp_path: Path) -> None:
    """Tables 4 and 5 of 003: five scores, by the same step size and epsilon."""
    cell = cell_of("disk-text", tmp_path)
    names = ("DP-Adam, ε = 3", "DiSK, ε = 3")
    few = {name: cell.settings.variants[name] for name in names}
    record = replace(cell, settings=cell.settings.model_copy(update={"variants": few})).compute()
    ends = record["ends"]
    assert [end["recipe"] for end in ends] == ["dp-adam", "disk-adam"]
    for end in ends:
        assert 2.7 < end["epsilon"] <= end["target"] == 3 and end["blocks"] == 1
        assert all(math.isfinite(end[name]) for name in ("nll", *SCORES))
    assert ends[0]["nll"] != ends[1]["nll"]


def test_claims_of_disk_are_those_of_its_suite() -> None:
    settings = json.loads(kinds.find("disk-text", "dart", "full", {}).lock)[4]
    for data in ("e2e", "dart"):
        assert settings["variants"].keys() == settings["published"][data].keys()
    orders = [dp_text.Order(**one) for one in settings["orders"]]
    rising = ("rouge_l", "meteor", "nist", "cider")
    scored = columns(**{key: [1.0, 2.0, 3.0, 4.0] for key in rising})
    scored["method"] = np.tile(np.array([*settings["variants"]]), 2)
    found = dp_text.claims(scored, {}, orders)
    assert len(found) == 13 and all(claim.holds for claim in found[1:])
    assert "DiSK, ε = 8 has a higher METEOR than DP-Adam, ε = 8." in {one.sentence for one in found}
    worse = scored | {"meteor": -scored["meteor"]}
    assert sum(claim.holds is False for claim in dp_text.claims(worse, {}, orders)) == 2
    head, *lines = dp_text.numbers(settings["published"]["dart"], scored, {}, "003")
    assert head[3:] == ("NLL per target token", "BLEU", "ROUGE-L", "METEOR", "NIST", "CIDEr")
    assert lines[3][0] == "  DiSK, GPT-2" and lines[3][4:] == (
        "41.01", "57.53", "0.359", "7.949", "2.553")  # fmt: skip


def test_the_table_has_published_numbers_below_ours() -> None:
    for data, scale in itertools.product(("e2e", "dart"), ("small", "full")):
        work = kinds.find("dp-text", data, scale, {})
        settings = json.loads(work.lock)[4]
        assert settings["variants"].keys() == settings["published"][data].keys()
        assert work.cells[0].size == 5 and settings["base"]["privacy"]["epsilon"] == 8.0
    printed = {"DP-Muon": {"bleu": 61.0, "rouge_l": 65.0}}
    head, *lines = dp_text.numbers(printed, columns(), {})
    assert head == ("method", "noise σ", "blocks", "NLL per target token", "BLEU", "ROUGE-L")
    assert [line[0] for line in lines] == ["DP-SGD", "DP-Adam", "DP-Muon", "  DP-Muon, GPT-2",
                                           "DP-MuonBC"]  # fmt: skip
    assert lines[3][4:] == ("61", "65")


def columns(**values: list) -> dict[str, np.ndarray]:
    methods = ["DP-SGD", "DP-Adam", "DP-Muon", "DP-MuonBC"]
    base: dict[str, list] = {
        "method": methods, "nll": [4.0, 3.0, 2.0, 1.0], "bleu": [1.0, 2.0, 3.0, 4.0],
        "rouge_l": [1.0, 2.0, 4.0, 3.0], "epsilon": [7.9] * 4, "target": [8.0] * 4,
        "delta": [1e-5] * 4, "noise": [1.0] * 4, "blocks": [1.0, 1.0, 9.0, 9.0],
    }  # fmt: skip
    return {name: np.tile(column, 2) for name, column in (base | values).items()}  # two seeds


def test_claims_hold_and_fail() -> None:
    good = dp_text.claims(columns(), {})
    assert len(good) == 8 and all(claim.holds for claim in good)
    for changed, lost in (
        ({"epsilon": [7.9, 8.1, 7.9, 7.9]}, 0),
        ({"nll": [3.0, 4.0, 2.0, 1.0]}, 1),
        ({"nll": [4.0, 3.0, float("nan"), 1.0]}, 2),
        ({"nll": [4.0, 3.0, 1.0, 2.0]}, 3),
        ({"bleu": [1.0, 3.0, 2.0, 4.0]}, 4),
        ({"rouge_l": [1.0, 3.0, 2.0, 4.0]}, 5),
        ({"bleu": [1.0, 2.0, 4.0, 3.0]}, 6),
        ({"rouge_l": [1.0, 2.0, 3.0, 4.0]}, 7),
    ):
        assert dp_text.claims(columns(**changed), {})[lost].holds is False
    assert dp_text.ordered(columns(), "DP-Muon", "AdamW", "nll").holds is None
    one = {name: column[:4] for name, column in columns().items()}
    assert {claim.verdict for claim in dp_text.claims(one, {})[1:]} == {"not tested here"}


def test_curves_are_compared_at_every_step() -> None:
    def losses(**changed: float) -> dict[str, np.ndarray]:
        """Each method loses 0.1 a step; seeds differ by 0.5 for all methods."""
        starts = {"DP-SGD": 4.0, "DP-Adam": 3.0, "DP-Muon": 2.0, "DP-MuonBC": 1.0} | changed
        rows = [
            (method, step, seed, start - 0.1 * step + 0.5 * seed)
            for method, start in starts.items()
            for step, seed in itertools.product((5, 10), (0, 1))
        ]
        names = ("method", "step", "seed", "loss")
        return {
            name: np.array(part) for name, part in zip(names, zip(*rows, strict=True), strict=True)
        }

    pairs = dp_text.THROUGHOUT
    found = dp_text.claims(columns(), losses(), curves_of=pairs)
    assert len(found) == 9 and found[-1].holds
    assert "DP-Muon and DP-MuonBC have a lower NLL than DP-SGD and DP-Adam" in found[-1].sentence
    assert dp_text.throughout(losses(**{"DP-Adam": 1.5}), pairs).holds is False
    late = losses()
    crossed = (late["method"] == "DP-Muon") & (late["step"] == 10)
    late["loss"] = np.where(crossed, 9.0, late["loss"])
    assert dp_text.throughout(late, pairs).holds is False
    short = {name: column[:-1] for name, column in losses().items()}
    assert dp_text.throughout(short, pairs).holds is None


def tuned(**scores: list[float]) -> dict[str, list[Tuned]]:
    """Three step sizes for every method, of which the second is the best, or other scores."""
    every = {name: [2.0, 1.0, 2.0] for name in ("DP-SGD", "DP-Adam", "DP-Muon", "DP-MuonBC")}
    return {
        name: [Tuned(name, "local.lr", [0.1, 0.2, 0.4, 0.8][: len(found)], found)]
        for name, found in (every | scores).items()
    }


def test_methods_that_were_not_tuned_equally_well_are_not_compared() -> None:
    good = dp_text.claims(columns(), {}, tunings=tuned())
    assert all(claim.verdict == "holds" for claim in good)
    for tunings, why in (
        ({}, "the step sizes of DP-MuonBC and DP-Muon were not tuned"),
        (tuned(**{"DP-Muon": [1.0, 2.0, 3.0]}), "DP-Muon's best step size 0.1 is the smallest"),
        (tuned(**{"DP-MuonBC": [2.0, 1.0, 2.0, 3.0]}), "the numbers of tuned values differ"),
    ):
        first, adam, *_ = found = dp_text.claims(columns(), {}, tunings=tunings)
        assert first.verdict == "holds"  # what runs spend does not depend on step sizes
        assert (adam.verdict == "holds") == bool(tunings)  # DP-Adam and DP-SGD
        assert found[3].verdict == "inconclusive" and why in found[3].why


def test_tunings_are_those_of_the_search_or_of_the_stored_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["method,seed,setting,nll,chosen"]
    scores = {0.1: (3.0, 2.5), 0.2: (1.5, 4.0), 0.4: (2.0, 2.0)}  # without momentum, and with it
    for lr, losses in scores.items():
        for momentum, nll in zip((0.0, 0.9), losses, strict=True):
            lines.append(f'DP-SGD,0,"lr {lr:g}, momentum {momentum:g}",{nll},False')
    searched = ("\n".join(lines) + "\n").encode()
    files.announce(tmp_path, {"searched.csv": searched})
    (tmp_path / "searched.csv").write_bytes(searched)
    content = contents.at(contents.read("dp-text-sweep"), "e2e", "full")
    fields = {field.alias or name for name, field in dp_text.Settings.model_fields.items()}
    searching = dp_text.Settings.model_validate({k: v for k, v in content.items() if k in fields})
    ((sgd,),) = (dp_text.tunings(searching, tmp_path, "dp-text-sweep") or {}).values()
    assert (sgd.values, sgd.scores) == ([0.1, 0.2, 0.4], [2.5, 1.5, 2.0]) and sgd.inside
    published = searching.model_copy(update={"search": {}})
    assert dp_text.tunings(published, tmp_path, "dp-text-gpt2") is None
    plain = published.model_copy(update={"needs_files": False})
    assert dp_text.tunings(plain, tmp_path, "a suite of the user's") == {}
    record = {"method": "DP-SGD", "values": [0.016, 0.032, 0.064], "scores": [2.0, 1.0, 3.0]}
    about = {"key": "local.lr", "measure": "test_loss"}
    for best, fits in ((0.032, True), (0.016, False)):
        held = {**record, "scores": [2.0, 1.0, 3.0] if fits else [1.0, 2.0, 3.0]}
        monkeypatch.setattr(dp_text.tuned, "stored", lambda name, m=held: Stored([m], about))
        ((one,),) = (dp_text.tunings(plain, tmp_path, "dp-text") or {}).values()
        assert (one.best, one.fits) == (best, fits)  # dp-text-sweep has 0.032 for DP-SGD


def test_made_text_by_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["make-text", str(tmp_path), "--format", "dart", "--tables", "20"])
    assert capsys.readouterr().out.count("Written:") == 3
    assert len(list(tmp_path.glob("made-up-*.json"))) == 3
    with pytest.raises(SystemExit, match="2"):
        main(["make-text", str(tmp_path), "--format", "xml"])
    assert "choose the format from e2e, dart" in capsys.readouterr().err
