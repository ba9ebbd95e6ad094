"""The examples: short, and the same on every engine; and objects that a config names."""

import hashlib
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.nursery import Nursery
from torch import Tensor

import fedmuon
from fedmuon.core import files
from fedmuon.core.arrays import read_tensors
from fedmuon.experiments.cli import main
from fedmuon.experiments.engines import ray_engine
from fedmuon.server.ray import worker_pool

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
OTHERS = {"resnet18": "torchvision", "vit_b_16": "torchvision", "bert_classifier": "transformers"}
RUN = [
    file
    for file in FILES
    if file.name != "named.py"  # which `named.toml` is run with
    and file.stem != "participation_gap"  # which prints a table, see test_participation_gap.py
    and file.stem not in OTHERS
]
LINES = {
    "fedmuon_from_parts": 62,
    "data_kinds": 62,
    "stage_with_state": 62,
    "participation_gap": 220,
}
LONG = pytest.mark.slow
Models = list[dict[str, Tensor]]
Example = Callable[..., Models]


def printed(file: Path, folder: Path, patch: pytest.MonkeyPatch, capsys: Any, *words: str) -> str:
    """The line that `python EXAMPLE.py ENGINE ...` prints; its folders are made in this one."""
    patch.setattr(tempfile, "tempdir", str(folder))
    patch.setattr(sys, "argv", [str(file), *words])
    runpy.run_path(str(file), run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    return said


@pytest.fixture
def example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Example:
    """Says `python example.py engine ...`, and returns the models of its runs in order."""

    def say(file: Path, engine: str) -> Models:
        (folder := tmp_path / engine).mkdir()
        monkeypatch.setattr(files, "_remove", lambda *_: None)  # the models are looked at
        with monkeypatch.context() as patch:
            printed(file, folder, patch, capsys, engine)
        made = sorted(folder.glob("*/config.toml"), key=lambda one: one.stat().st_mtime_ns)
        assert all(f'name = "{engine}"' in one.read_text() for one in made)
        return [read_tensors(one.parent / "model.safetensors")[0] for one in made]

    return say


def test_an_example_is_short_and_documented() -> None:
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= LINES.get(file.stem, 25), file
        assert file.stem not in OTHERS or len(text.splitlines()) <= 15
        assert text.startswith('"""') and (
            file not in RUN or '\nif __name__ == "__main__":' in text
        )


LATER = {"aggregate", "ditto", "fedadam", "scaffold"}  # each takes a second
RUNS = [pytest.param(file, id=file.stem, marks=[LONG] * (file.stem in LATER)) for file in RUN]


@pytest.mark.parametrize("file", RUNS)
def test_an_example_runs(file: Path, example: Example) -> None:
    models = example(file, "inline")
    assert models and all(value.isfinite().all() for model in models for value in model.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stem", OTHERS)
def test_a_model_of_others_runs(
    stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip(OTHERS[stem], reason=f"{OTHERS[stem]} is not installed")
    said = printed(EXAMPLES / f"{stem}.py", tmp_path, monkeypatch, capsys)
    assert 0 <= float(said.removeprefix("accuracy ")) <= 1


def test_fedmuon_from_parts_is_the_built_in_one(example: Example) -> None:
    """Up to rounding: the example computes M (M^T M + lambda I)^(-1/2) in its own way."""
    parts, whole = example(EXAMPLES / "fedmuon_from_parts.py", "inline")
    assert torch.allclose(parts["weight"], whole["weight"], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_robust_aggregates_withstand_the_client_that_the_mean_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file, figure = EXAMPLES / "aggregate.py", tmp_path / "by-round.png"
    said = printed(file, tmp_path, monkeypatch, capsys, "inline", str(figure))
    clipped, mean, *robust = map(float, said.split()[1:])
    assert mean < 0.2 < clipped and min(robust) > 0.6
    assert figure.read_bytes()[:4] == b"\x89PNG"


def test_a_map_has_a_bound_where_its_constant_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    said = printed(EXAMPLES / "maps.py", tmp_path, monkeypatch, capsys, "inline")
    assert said == "without a constant refused and with one claimed\n"


@pytest.fixture(scope="module")
def workers(cluster: str) -> Iterator[None]:
    """Runs reuse the worker of the last one: to start and load torch takes it seconds.

    Elsewhere, workers with objects of the caller serve one run (test_joined_ray.py); here, objects
    of one name in two runs are the same. A second worker would only have to be started;
    test_engines_agree.py has workers on both nodes.
    """
    machines = worker_pool._machines
    with pytest.MonkeyPatch.context() as patch, fedmuon.flower.shared_ray():
        patch.setattr(worker_pool, "_machines", lambda: machines()[:1])
        patch.setattr(
            ray_engine,
            "_kind_of_workers",
            lambda config: tuple(ray_engine.resources_of(config).items()),
        )
        yield


# The recipes of these are compared on Ray by test_engines_agree.py, and the kinds of data are
# arrays before an engine sees them.
SAME_WORKERS = {"data_kinds", "ditto", "fedadam", "scaffold"}
ON_RAY = [pytest.param(file, id=file.stem) for file in RUN if file.stem not in SAME_WORKERS]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", ON_RAY)
@pytest.mark.usefixtures("workers")
def test_an_example_on_ray_is_that_inline(
    cluster: str, file: Path, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects of the example's own, which no module holds, reach the client processes."""
    joined = ray_engine.connected
    monkeypatch.setattr(ray_engine, "connected", lambda address, *more: joined(cluster, *more))
    inline, ray = example(file, "inline"), example(file, "ray")
    assert len(inline) == len(ray)
    for mine, theirs in zip(inline, ray, strict=True):
        same_models(mine, theirs)


def same_models(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert set(a) == set(b)
    for name, value in a.items():
        assert value.dtype == torch.float64
        assert (value - b[name]).norm() <= 1e-12 * value.norm(), name


def digest(run: Path) -> dict[str, str]:
    """A hash of each file of a run that does not depend on when it was made."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in run.iterdir()
        if file.suffix not in (".jsonl", ".json") and file.name != "SHA256SUMS"
    }


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_named_objects_are_the_same_on_ray(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)
    for engine, where in (("inline", []), ("ray", [f"--ray-address={cluster}"])):
        out = f"--out={tmp_path / engine}"
        with pytest.raises(SystemExit) as end:
            main(["run", "named.toml", f"--engine={engine}", *where, out])
        assert not end.value.code
    files = (tmp_path / engine / "model.safetensors" for engine in ("inline", "ray"))
    same_models(*(read_tensors(file)[0] for file in files))


@pytest.mark.slow
def test_named_objects_after_kill_9(forks: Nursery, tmp_path: Path) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    settings = ["named.toml", "--set=federation.rounds=100"]
    process = forks.start(["run", *settings, f"--out={cut}"], at=EXAMPLES)
    deadline = time.monotonic() + 200
    while not (cut / "checkpoint.safetensors").exists():  # of round 10 of 100
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send(signal.SIGKILL)
    assert process.wait().code == -signal.SIGKILL
    assert not (cut / "summary.json").exists()
    for arguments in ([f"--out={cut}", "--resume"], [*settings, f"--out={whole}"]):
        said = forks.run(["run", *arguments], 240, at=EXAMPLES)
        assert said.code == 0, said.err
    assert digest(cut) == digest(whole)


def test_an_option_that_is_missing_or_misspelled_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(EXAMPLES)
    with pytest.raises(SystemExit) as end:
        main(["run", "named.toml", "--set=local.options.power=2", f"--out={tmp_path / 'a'}"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "Traceback" not in said
    assert "power = 2 has no effect" in said.replace("\n", " ")
