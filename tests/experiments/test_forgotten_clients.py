"""Forgetting clients: the noise covers a run in which the clients' gradients were 0."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import small
from typer.testing import CliRunner

import fedmuon
from fedmuon.analysis.theory.corollaries import noise_multiplier
from fedmuon.core.arrays import read_tensors
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.stability import certificates
from fedmuon.experiments.stability.finished_run import FinishedRun, from_directory
from fedmuon.experiments.unlearning import execute, table
from fedmuon.federated.rounds import begin, simulate


def made(folder: Path) -> Path:
    run(small(), folder / "run")
    return folder / "run"


def zeroed(run: FinishedRun, clients: list[int]) -> np.ndarray:
    """The final model of a run whose clients have samples of zeros, from changed data."""
    shards = run.experiment.shards
    inputs = shards.inputs.clone()
    for i in clients:
        inputs[int(shards.offsets[i]) : int(shards.offsets[i + 1])] = 0
    experiment = dataclasses.replace(
        run.experiment, shards=dataclasses.replace(shards, inputs=inputs)
    )
    start = begin(experiment.recipe, experiment.task, run.config.federation.seed)
    return simulate(experiment, start).params["weight"][0].numpy()


@pytest.mark.parametrize("clients", [[2], [0, 4, 5]])
def test_the_noise_covers_the_run_without_the_clients(clients: list[int], tmp_path: Path) -> None:
    folder = made(tmp_path)
    record = execute(folder, [], 1.0, 1e-5, tmp_path / "out", clients=clients)
    model = read_tensors(folder / "model.safetensors")[0]["weight"].numpy()
    apart = np.linalg.norm(model - zeroed(FinishedRun.open(folder), clients))
    assert record["distance"] == pytest.approx(apart, rel=1e-9) and apart > 1e-3
    promised = certificates.certify(
        from_directory(folder).under(unit="removed-clients", constants="global")
    ).certificates
    assert promised is not None
    entry = record["kinds"]["global"]
    assert entry["sensitivity"] == pytest.approx(promised[clients].sum()) and apart < promised.sum()
    assert entry["sigma"] == pytest.approx(entry["sensitivity"] * noise_multiplier(1.0, 1e-5))
    assert record["kinds"]["ball"]["sensitivity"] >= apart
    assert record["clients"] == clients and record["samples"] == []


def test_one_sample_of_noise_would_not_hide_a_client(tmp_path: Path) -> None:
    """Negative control: the noise that hides one sample is too little for its client."""
    folder = made(tmp_path)
    of_client = execute(folder, [], 1.0, 1e-5, tmp_path / "a", clients=[2])
    with np.load(folder / "partition.npz") as split:
        sample = int(split["train_index"][split["client"] == 2][0])
    of_sample = execute(folder, [sample], 1.0, 1e-5, tmp_path / "b")
    assert of_sample["kinds"]["ball"]["sensitivity"] < of_client["distance"]


def test_the_command_and_the_function_forget_clients(tmp_path: Path) -> None:
    folder = made(tmp_path)
    words = ["unlearn", str(folder), "--client", "1", "--client", "3", "--json"]
    shown = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "a")])
    assert shown.exit_code == 0, shown.output
    record = json.loads(shown.stdout)
    again = fedmuon.unlearn(folder, clients=[1, 3], out=tmp_path / "b")
    assert record["clients"] == [1, 3] and record["kinds"]["ball"]["sigma"] == pytest.approx(
        again["kinds"]["ball"]["sigma"]
    )
    assert "2 clients forgotten" in str(table(record).title)


@pytest.mark.parametrize(
    "samples, clients, fix",
    [([], [], "pass samples or clients"), ([1], [1], "Use two commands"), ([], [6], "from 0 to 5")],
)
def test_bad_input_is_one_sentence_with_the_fix(
    samples: list[int], clients: list[int], fix: str, tmp_path: Path
) -> None:
    folder = made(tmp_path)
    with pytest.raises(InputError, match=fix):
        execute(folder, samples, 1.0, 1e-5, tmp_path / "out", clients=clients)
    assert not (tmp_path / "out").exists()
