"""A method of another package is used like one of fedmuon, and a broken package is named."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared import built, ended, gap, problem_of
from conftest import small
from reference.methods import sgd_client
from reference.rounds import MODEL, Answered, run
from reference.rounds import Method as Reference
from reference.trees import Tree, Trees, each, zeros
from registering import MODULES, NAME, ROW, RULE, install
from small_suites import TRAINING
from typer.testing import CliRunner

import fedmuon
from fedmuon.config import describe, registered
from fedmuon.config.load import Config, flatten, parse, unflatten
from fedmuon.config.methods import BUILT_IN, METHODS, average_of, has
from fedmuon.config.names import NAMES, OPTIONS
from fedmuon.config.schema import reads, refusal
from fedmuon.core.errors import InputError, OwnError
from fedmuon.experiments.cli import app, completion
from fedmuon.experiments.stability.influence import require_smooth
from fedmuon.federated.build import resolve
from fedmuon.runs.provenance import versions

ROUNDS, DECAY, STEP = 4, 0.3, 0.8
TABLES: dict[str, Any] = {
    "data": {"name": "synthetic", "train": 60, "test": 20},
    "federation": {"clients": 3, "per-round": 3, "rounds": ROUNDS, "partition": "iid"},
    "local": {"recipe": NAME, "lr": 0.5, "steps": 2, "options": {"decay": DECAY}},
    "engine": {"dtype": "float64"},
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path that packages are installed into."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    registered._registered_in.cache_clear()
    yield folder
    registered._registered_in.cache_clear()
    registered._loaded.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "decaying"]:
        del sys.modules[name]


@pytest.fixture
def decay(site: Path) -> Path:
    """An installed package with the method `fedavg-decay`."""
    install(site, {NAME: "decaying.row:METHOD"}, MODULES)
    return site


def said(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output + str(done.exception)
    return done.output


def tables(**local: Any) -> dict[str, Any]:
    return TABLES | {"local": TABLES["local"] | local}


def test_a_method_is_listed_after_those_of_fedmuon(decay: Path) -> None:
    assert [*METHODS] == [*BUILT_IN, NAME] and len(METHODS) == len(BUILT_IN) + 1
    assert [*NAMES["local.recipe"]][-1] == NAME
    assert "FedAvg whose server step decays; mean by samples" in said("list", "optimizers")
    listed = json.loads(said("list", "recipes", "--json"))["names"]
    assert [*listed] == [*METHODS]
    explained = said("config", "explain", "local.recipe")
    assert "FedAvg whose server step decays" in explained and "exponent of the decay" in explained
    assert OPTIONS["local.recipe"][NAME]["decay"][0] == "0.5"
    assert average_of(NAME) == "by-samples" and not has(NAME, "private")


def test_names_are_known_before_the_package_is_imported(decay: Path) -> None:
    assert completion.settings("local.recipe=fedavg-dec") == [f"local.recipe={NAME}"]
    assert describe.find("local.recipe").values.endswith(f"{NAME}, or your own")
    assert NAME in NAMES["local.recipe"] and parse({}).local.recipe == "fedmuon"
    assert not [name for name in sys.modules if name.startswith("decaying")]
    parse(tables())
    assert "decaying.row" in sys.modules and "decaying.rule" not in sys.modules


def test_only_keys_of_the_row_have_an_effect(decay: Path) -> None:
    config = parse(tables(**{"server-lr": STEP}))
    assert reads(config, "local.server-lr") and not reads(config, "local.tau")
    assert config.federation.aggregate == "by-samples"
    with pytest.raises(InputError, match=f"tau = 0.5 has no effect, because .*'{NAME}'"):
        parse(tables(tau=0.5))
    with pytest.raises(InputError, match=r"momentum = 0\.5 has no effect"):
        parse(tables(momentum=0.5))
    other = parse({"local": {"recipe": "fedavg"}})
    assert refusal(other, "local.server-lr", 0.5).endswith(
        f"diloco, {NAME}, muloco, or leave server-lr out."
    )
    assert unflatten(flatten(config)) == config  # as Flower carries it


def test_the_run_follows_the_formula_of_the_method(decay: Path) -> None:
    """The reference is FedAvg with the server's rule X <- X + s / r^decay (mean - X)."""

    def rule(server: Trees, means: Trees, answered: Answered) -> Trees:
        r = each(lambda r: r + 1, server["rounds"])
        X = each(lambda x, m, r: x + STEP / r**DECAY * (m - x), server[MODEL], means[MODEL], r)
        return {MODEL: X, "rounds": r}

    def first(model: Tree) -> Trees:
        return {"rounds": zeros(model)}

    options = {"recipe": NAME, "steps": 2, "batch": 7, "options": {"decay": DECAY}}
    table = small(local={"lr": 0.4, "server-lr": STEP, **options})
    state = ended(built(table))
    expected = run(problem_of(table), Reference(sgd_client(0.4, 0.0), rule, first)).server
    assert gap(state.params, expected["model"]) < 1e-12
    assert gap(state.states["rounds"], expected["rounds"]) == 0
    other = run(problem_of(table), Reference(sgd_client(0.4, 0.0))).server  # the control: FedAvg
    assert gap(state.params, other["model"]) > 1e-3


def test_a_run_resumes_only_with_the_same_function(decay: Path, tmp_path: Path) -> None:
    def stop(record: Mapping[str, Any], state: Any) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    whole = fedmuon.run(tables(), out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedmuon.run(tables(), out=tmp_path / "cut", callbacks=[stop])
    again = fedmuon.run(tables(), out=tmp_path / "cut", resume=True)
    assert (again.path / "model.safetensors").read_bytes() == (
        whole.path / "model.safetensors"
    ).read_bytes()
    saved = json.loads((whole.path / "objects.json").read_text())
    assert saved["recipe"].startswith("fedavg_decay:")
    with pytest.raises(KeyboardInterrupt):
        fedmuon.run(tables(), out=tmp_path / "other", callbacks=[stop])
    (decay / "decaying" / "rule.py").write_text(RULE.replace("value + 1", "value + 2.5"))
    for name in [name for name in sys.modules if name.startswith("decaying")]:
        del sys.modules[name]
    with pytest.raises(InputError, match="the recipe differs from the recipe"):
        fedmuon.run(tables(), out=tmp_path / "other", resume=True)


def test_sweeps_and_suites_take_the_method(decay: Path, tmp_path: Path) -> None:
    grid = {"local.options.decay": [0.0, 0.5]}
    swept = fedmuon.sweep(tables(), grid=grid, select="train-loss", out=tmp_path / "sweep")
    losses = [row["train_loss"] for row in swept.table]
    assert len(losses) == 2 and losses[0] < losses[1]  # smaller steps learn less
    file = tmp_path / "decays.toml"
    file.write_text(TRAINING.replace('recipe = "fedavg"', f'recipe = "{NAME}"'))
    suite = fedmuon.suite(str(file), data="synthetic", scale="small", out=tmp_path / "suite")
    configs = [*(tmp_path / "suite").rglob("config.toml")]
    assert suite.summary["scale"] == "small" and len(configs) == 2
    assert any(f'recipe = "{NAME}"' in config.read_text() for config in configs)


def test_the_entry_point_may_name_a_function(site: Path) -> None:
    install(site, {NAME: "decaying.row:method"}, MODULES)
    assert METHODS[NAME].summary == "FedAvg whose server step decays"


def test_the_references_of_a_method_are_cited(decay: Path, tmp_path: Path) -> None:
    run = fedmuon.run(tables(), out=tmp_path / "run")
    cited = said("cite", str(run.path))
    assert "@inproceedings{fedavg" in cited and "title = {Decay}" in cited
    require_smooth(run.config)


# Broken packages

WRONG = {
    "no module": ({NAME: "nowhere.row:METHOD"}, ROW, "nowhere.row:METHOD cannot be loaded"),
    "no object": ({NAME: "decaying.row:OTHER"}, ROW, "decaying.row:OTHER cannot be loaded"),
    "raises": ({NAME: "decaying.row:METHOD"}, "1 / 0", r"cannot be loaded \(ZeroDivisionError"),
    "exits": ({NAME: "decaying.row:METHOD"}, "raise SystemExit(3)", "cannot be loaded"),
    "another object": ({NAME: "decaying.row:NAME"}, "NAME = 3", "gives a int instead of"),
    "another name": (
        {NAME: "decaying.row:METHOD"}, ROW.replace(NAME, "mine", 1), "has the other name mine",
    ),
    "a name in capitals": (
        {"FedDecay": "decaying.row:METHOD"}, ROW.replace(NAME, "FedDecay", 1), "has a name with",
    ),
    "a list": (
        {NAME: "decaying.row:METHOD"}, ROW.replace('keys=("lr", "weight-decay", "server-lr")',
        'keys=["lr", "weight-decay"]'), "has a field keys that is not a tuple of texts",
    ),
    "options": (
        {NAME: "decaying.row:METHOD"}, ROW.replace('("0.5", "exponent of the decay")', "0.5"),
        "has a field options that is not a mapping",
    ),
    "no step size": (
        {NAME: "decaying.row:METHOD"}, ROW.replace('"lr", ', ""), "has no key lr",
    ),
    "an unknown key": (
        {NAME: "decaying.row:METHOD"}, ROW.replace("server-lr", "server-rate"),
        "has the key server-rate, but the possible keys are",
    ),
    "a key as option": (
        {NAME: "decaying.row:METHOD"}, ROW.replace('"decay":', '"tau":'),
        r"has the option tau, which is a key of \[local\]",
    ),
    "an unknown fact": (
        {NAME: "decaying.row:METHOD"}, ROW.replace("by_samples=", 'facts=("quick",), by_samples='),
        "has the fact 'quick', but the possible facts are",
    ),
    "privacy": (
        {NAME: "decaying.row:METHOD"},
        ROW.replace("by_samples=", 'facts=("private",), by_samples='),
        "has the fact 'private', which only methods of fedmuon can have",
    ),
    "a certificate": (
        {NAME: "decaying.row:METHOD"},
        ROW.replace("by_samples=", 'certificate="gradients", by_samples='),
        "has a certificate, which only methods of fedmuon can have",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_broken_package_is_named_and_leaves_the_others(site: Path, case: str) -> None:
    entries, row, why = WRONG[case]
    install(site, entries, MODULES | {"decaying/row.py": row})
    (name,) = entries
    begin = f"the package fedmuon-decay registers the method {name}, but .*{why}"
    end = ". Update or uninstall fedmuon-decay."
    with pytest.raises(InputError, match=begin) as error:
        METHODS[name]
    assert str(error.value).endswith(end)
    with pytest.raises(InputError, match=f"{begin}.*{end}"):
        parse({"local": {"recipe": name}})
    assert parse({"local": {"recipe": "fedprox", "proximal": 0.5}}).local.proximal == 0.5
    with pytest.raises(InputError, match=r"tau = 0\.5 has no effect"):  # it hides no other error
        parse({"local": {"recipe": "fedprox", "tau": 0.5}})
    done = CliRunner().invoke(app, ["list", "optimizers"])
    assert isinstance(done.exception, InputError) and done.exit_code != 0


def entry_points(folder: Path, package: str = "fedmuon_decay") -> Path:
    return folder / f"{package}-1.5.dist-info" / "entry_points.txt"


UNREADABLE = {
    "latin-1": f"[scripts]\nfo\xe9 = a:b\n[fedmuon.methods]\n{NAME} = decaying.row:METHOD\n",
    "no value": f"[fedmuon.methods]\n{NAME}\n",
    "no name": "[fedmuon.methods]\n= decaying.row:METHOD\n",
    "no METADATA": "",
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_unreadable_metadata_stop_only_their_own_method(site: Path, case: str) -> None:
    install(site, {NAME: "decaying.row:METHOD"}, MODULES)
    if text := UNREADABLE[case]:
        entry_points(site).write_bytes(text.encode("latin-1"))
    else:
        (entry_points(site).parent / "METADATA").unlink()
    why = r"fedmuon_decay-1\.5\.dist-info has entry points .* cannot be read .*Reinstall"
    for call in (lambda: METHODS[NAME], lambda: [*METHODS], lambda: parse(tables())):
        with pytest.raises(InputError, match=why):
            call()
    versions.cache_clear()
    built_in = {**TABLES, "local": {"recipe": "fedavg", "lr": 0.5, "steps": 2}}
    assert fedmuon.run(built_in).summary["train_loss"] > 0
    own = {**TABLES, "local": {"steps": 2}}
    assert fedmuon.run(own, recipe=fedmuon.recipes.fedavg(0.5)).summary["train_loss"] > 0


OTHERS = {
    "latin-1": "[console_scripts]\nfo\xe9 = a:b\n".encode("latin-1"),
    "malformed": b"[console_scripts]\nfoo\n= x\n",
    "malformed beside ours": b"[console_scripts]\nfoo\n[fedmuon.methods]\n",
}


@pytest.mark.parametrize("case", OTHERS)
def test_unreadable_metadata_of_other_packages_are_ignored(decay: Path, case: str) -> None:
    install(decay, {}, package="other")
    entry_points(decay, "other").write_bytes(OTHERS[case])
    assert parse(tables()).local.recipe == NAME and [*METHODS][-1] == NAME
    install(decay, {}, package="nameless")
    (entry_points(decay, "nameless").parent / "METADATA").unlink()
    registered._registered_in.cache_clear()
    assert parse(tables()).local.recipe == NAME
    assert versions.__wrapped__()["fedmuon-decay"] == "1.5"


def test_entry_points_may_begin_with_a_byte_order_mark(decay: Path) -> None:
    text = entry_points(decay).read_text()
    entry_points(decay).write_text(f"\ufeff{text}".replace("\n", "\r\n"), encoding="utf-8")
    assert parse(tables()).local.recipe == NAME


FUNCTIONS = {
    "no file": ("", r"decaying.rule:fedavg_decay cannot be loaded \(AttributeError"),
    "a number": ("fedavg_decay = 3", "decaying.rule:fedavg_decay is a int and not a function"),
    "a parameter less": (RULE.replace("server_lr=0.0, ", ""), "has no parameter `server_lr`"),
    "a parameter more": (
        RULE.replace("decay=0.5", "decay=0.5, other=1"), "has the parameter `other`, which is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_broken_function_is_named(site: Path, case: str) -> None:
    rule, why = FUNCTIONS[case]
    install(site, {NAME: "decaying.row:METHOD"}, MODULES | {"decaying/rule.py": rule})
    with pytest.raises(InputError, match=f"the package fedmuon-decay registers .*{why}"):
        fedmuon.run(tables(options={}))


RECIPES = {
    "raises": (RULE.replace("    def server", "    1 / 0\n\n    def server"), "ZeroDivisionError"),
    "no recipe": (RULE.replace("return Recipe(", "return dict(a=("), "cannot be used"),
    "shapes": (RULE.replace("return model,", "return {},"), "returns no tensor with the shape"),
    "fails late": (
        RULE.replace("        count =", "        assert float(max(states['rounds']['weight']"
                     ".flatten())) < 2\n        count ="),
        "in round 3 .*AssertionError",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RECIPES)
def test_errors_of_a_recipe_name_its_package(site: Path, case: str) -> None:
    rule, why = RECIPES[case]
    if case == "no recipe":
        rule = rule.replace('kept=("rounds",))', "))")
    install(site, {NAME: "decaying.row:METHOD"}, MODULES | {"decaying/rule.py": rule})
    whom = rf"recipe = '{NAME}' of the package fedmuon-decay"
    with pytest.raises((InputError, OwnError), match=f"{whom}.*{why}|{why}.*{whom}"):
        fedmuon.run(tables(options={}))


def test_two_methods_of_one_name_are_rejected(site: Path) -> None:
    install(site, {NAME: "decaying.row:METHOD"}, MODULES)
    install(site, {NAME: "decaying.row:method"}, package="other-decay")
    why = f"the packages fedmuon-decay and other-decay register the same method {NAME}"
    for call in (lambda: METHODS[NAME], lambda: [*METHODS], lambda: parse(tables())):
        with pytest.raises(InputError, match=why):
            call()
    assert parse({}).local.recipe == "fedmuon"


def test_a_name_of_fedmuon_is_rejected(site: Path) -> None:
    install(site, {"fedprox": "decaying.row:METHOD"}, MODULES)
    why = "the package fedmuon-decay registers the method fedprox, but fedmuon itself has a method"
    for call in (lambda: METHODS["fedprox"], lambda: [*METHODS],
                 lambda: parse({"local": {"recipe": "fedprox"}})):  # fmt: skip
        with pytest.raises(InputError, match=why):
            call()
    assert parse({"local": {"recipe": "fedavg"}}).local.recipe == "fedavg"


def program(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedmuon", *words]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_the_command_ends_with_2(site: Path) -> None:
    install(site, {NAME: "nowhere:METHOD"})
    done = program(site, "list", "optimizers")
    assert done.returncode == 2 and "the package fedmuon-decay registers" in done.stderr
    done = program(site, "run", "--set", f"local.recipe={NAME}")
    assert done.returncode == 2 and "nowhere:METHOD cannot be loaded" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "deployment"])
def test_other_processes_load_the_package(decay: Path, tmp_path: Path, engine: str) -> None:
    config = tables()  # of few messages, as each takes a process of a deployment seconds
    config["federation"] = config["federation"] | {"clients": 2, "per-round": 1, "rounds": 2}
    without = fedmuon.run(config, out=tmp_path / "without").model["weight"].numpy()
    config["federation"] = config["federation"] | {"stage": "decaying.stages:Halved"}
    inline = fedmuon.run(config, out=tmp_path / "inline").model["weight"].numpy()
    assert np.abs(inline - without).max() > 1e-3
    config["engine"] = {"name": engine, "dtype": "float64"}
    there = fedmuon.run(config, out=tmp_path / "there").model["weight"].numpy()
    np.testing.assert_allclose(there, inline, rtol=1e-12)


def test_resolved_configs_keep_the_name(decay: Path) -> None:
    config: Config = resolve(parse(tables()))
    assert config.local.recipe == NAME and config.local.aux_lr == 0.0
