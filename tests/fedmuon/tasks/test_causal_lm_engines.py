"""Low-rank adapters of a language model on every engine, and after kill -9: the same numbers.

Inline, in Ray workers, and on the SuperNodes of a SuperLink, for each way to combine adapters.
"""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chaos.nursery import Nursery
from deployments import NODES
from language_models import save_model, save_texts, save_tokenizer
from safetensors.numpy import load_file
from test_causal_lm import tiny

import fedmuon
from fedmuon.config.load import Config
from fedmuon.experiments.engines.deployment import Deployment
from fedmuon.experiments.run import execute

# The ways to combine adapters, with an optimizer; momenta are sent and averaged by fedmuon.
WAYS = {"factors": "lora-muon", "exact": "fedmuon", "subspace": "fedmuon"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny Llama. All processes use a cache of these tests."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDMUON_CACHE", str(folder / "cache"))
        yield save_tokenizer(save_model(folder / "llama"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_texts(tmp_path_factory.mktemp("base") / "texts")


@pytest.fixture(scope="module")
def ray_workers(model: Path) -> Iterator[None]:
    """Runs share the workers of one Ray, which take seconds to load what they need."""
    with fedmuon.flower.shared_ray():
        yield


def config_of(model: Path, texts: Path, way: str, rounds: int = 3, **engine: str) -> Config:
    lr = 0.02 if WAYS[way] == "lora-muon" else 0.1
    return tiny(
        model, texts,
        data={"train": 101, "test": 25},  # a SuperLink needs numbers that fit the texts
        federation={
            "adapters": way, "rounds": rounds, "clients": NODES, "per-round": 2,
            **({"subspace-rounds": 2} if way == "subspace" else {}),
        },
        task={"lora-rank": 4},
        local={"recipe": WAYS[way], "lr": lr},
        engine={"dtype": "float64", "device": "cpu", **engine},
    )  # fmt: skip


def differences(first: Path, second: Path) -> float:
    """The largest difference of entries of two models and their momenta."""
    largest = 0.0
    for name in ("model", "momentum"):
        one, other = (load_file(run / f"{name}.safetensors") for run in (first, second))
        assert one.keys() == other.keys() and one
        largest = max(largest, *(float(np.abs(one[k] - other[k]).max()) for k in one))
    return largest


def sizes(run: Path) -> list[tuple[int, int]]:
    records = map(json.loads, (run / "rounds.jsonl").read_text().splitlines())
    return [(record["bytes_down"], record["bytes_up"]) for record in records]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_workers")
@pytest.mark.parametrize("way", WAYS)
def test_ray_and_a_super_link_equal_inline(
    way: str, model: Path, texts: Path, deployment: Deployment, tmp_path: Path
) -> None:
    execute(config_of(model, texts, way), tmp_path / "inline")
    execute(config_of(model, texts, way, name="ray"), tmp_path / "ray")
    deployment.execute(config_of(model, texts, way), tmp_path / "deployed")
    for engine in ("ray", "deployed"):
        assert differences(tmp_path / "inline", tmp_path / engine) < 1e-12
        assert sizes(tmp_path / engine) == sizes(tmp_path / "inline")
    start, end = (
        load_file(tmp_path / "inline" / f"{name}.safetensors") for name in ("initial", "model")
    )
    assert max(np.abs(end[name] - start[name]).max() for name in end) > 1e-3


@pytest.mark.slow
def test_the_ways_to_combine_adapters_differ(model: Path, texts: Path, tmp_path: Path) -> None:
    """So the comparison of engines would notice another way."""
    for way in ("factors", "exact"):
        config = config_of(model, texts, "exact")
        federation = config.federation.model_copy(update={"adapters": way})
        execute(config.model_copy(update={"federation": federation}), tmp_path / way)
    models = [load_file(tmp_path / way / "model.safetensors") for way in ("factors", "exact")]
    assert max(np.abs(models[0][name] - models[1][name]).max() for name in models[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_resume_after_kill_9(
    way: str, model: Path, texts: Path, forks: Nursery, tmp_path: Path
) -> None:
    """The command is ended between two instructions, after a checkpoint, and run again."""
    rounds = 40
    settings = {
        "data.name": "text", "data.folder": texts, "data.context": 12, "data.minimum": 5,
        "federation.partition": "column", "federation.rounds": rounds, "federation.seed": 3,
        "federation.per-round": 2, "federation.adapters": way, "task.name": "causal-lm",
        "task.weights": model, "task.lora-rank": 4, "task.lora-layers": "q_proj, v_proj",
        "local.recipe": WAYS[way], "local.steps": 2, "local.batch": 4, "local.lr": 0.02,
        "engine.device": "cpu", "output.checkpoint-every": 1,
    }  # fmt: skip
    if way == "subspace":
        settings |= {"task.lora-rank": 8, "federation.subspace-rounds": 10}
    words = [f"--set={key}={value}" for key, value in settings.items()]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    process = forks.start(["run", f"--out={cut}", *words])
    deadline = time.monotonic() + 300
    while not (cut / "checkpoint.safetensors").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send(signal.SIGKILL)
    assert process.wait().code == -signal.SIGKILL
    assert not (cut / "summary.json").exists()
    done = len((cut / "rounds.jsonl").read_text().splitlines())
    assert 0 < done < rounds
    again = forks.run(["run", f"--out={cut}", "--resume"], 300)
    assert again.code == 0, again.err
    uncut = forks.run(["run", f"--out={whole}", *words], 300)
    assert uncut.code == 0, uncut.err
    for name in ("model", "momentum"):
        files = [(run / f"{name}.safetensors").read_bytes() for run in (cut, whole)]
        assert files[0] == files[1]
    start = (whole / "initial.safetensors").read_bytes()
    assert start != (whole / "model.safetensors").read_bytes()
