"""Where a private run's noise comes from: what its folder tells, and what is called private."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from torch import nn

from fedmuon.config.load import Config, load
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments import spending
from fedmuon.experiments.run import execute
from fedmuon.optim.private import Private
from fedmuon.privacy import noise
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.per_example.clipping import Clipping


def private(**privacy: Any) -> Config:
    given = {"noise": 1.0, "lot": 6.0, "bound": 0.2, "delta": 1e-3} | privacy
    recipe = {"recipe": "dp-sgd", "lr": 0.1, "steps": 2}
    return small(federation={"rounds": 3}, local=recipe, privacy=given)


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def test_nothing_on_disk_rebuilds_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No key of the run is in its files or in what it says, in any spelling; the config that it
    left makes another model; with the same keys (the control) the same."""
    keys: list[bytes] = []

    def taken(count: int) -> bytes:
        keys.append(np.random.default_rng(len(keys)).bytes(count))
        return keys[-1]

    def run(name: str, config: Config | None = None) -> bytes:
        execute(config or load(tmp_path / "first" / "config.toml"), tmp_path / name)
        return model(tmp_path / name)

    with monkeypatch.context() as patched:
        patched.setattr(noise.os, "urandom", taken)
        first, used, said = run("first", private(arithmetic="grid")), [*keys], capfd.readouterr()
        keys.clear()
        assert run("same keys") == first
    assert run("other keys") != first
    files = [one.read_bytes() for one in (tmp_path / "first").rglob("*") if one.is_file()]
    everything = b"".join([*files, said.out.encode(), said.err.encode()])
    assert len(used) > 10 and {len(key) for key in used} == {32} and len(files) > 7
    for key in used:
        numbers = [int.from_bytes(key, order) for order in ("big", "little")]
        texts = [key.hex(), key.hex().upper(), base64.b64encode(key).decode(), *map(str, numbers)]
        assert not any(text.encode() in everything for text in texts)
        assert not any(key[at : at + 8] in everything for at in range(25))


def test_the_lattice_spends_what_real_noise_does(tmp_path: Path) -> None:
    summaries = {how: execute(private(arithmetic=how), tmp_path / how)["privacy"]
                 for how in ("auto", "grid", "continuous")}  # fmt: skip
    for how, found in summaries.items():
        assert found["certified"] and found["arithmetic"] == ("grid" if how == "auto" else how)
    for end in ("lower", "upper"):
        assert summaries["grid"][end] == summaries["continuous"][end] > 0


def test_a_lattice_may_be_repeatable_too(tmp_path: Path) -> None:
    changes = {"insecure-reproducible-noise": True, "arithmetic": "grid"}
    for name in "ab":
        summary = execute(private(**changes), tmp_path / name)
        assert not summary["privacy"]["certified"]
    for name, how in (("c", "continuous"), ("d", "auto")):
        execute(private(**changes | {"arithmetic": how}), tmp_path / name)
    assert model(tmp_path / "a") == model(tmp_path / "b") != model(tmp_path / "c")
    assert model(tmp_path / "c") == model(tmp_path / "d")  # of old, to the same bytes


def test_without_noise_a_lattice_changes_nothing(tmp_path: Path) -> None:
    quiet = {"insecure-reproducible-noise": True, "noise": 0.0}
    for how in ("grid", "continuous"):
        execute(private(**quiet, arithmetic=how), tmp_path / how)
    assert model(tmp_path / "grid") == model(tmp_path / "continuous")


def test_a_statistical_generator_is_not_certified(tmp_path: Path) -> None:
    summary = execute(private(**{"noise-source": "pcg64"}), tmp_path)
    told = spending.spent(tmp_path)
    for found in (summary["privacy"], told):
        assert not found["certified"] and "no cryptographic generator" in found["note"]
    assert told["epsilon"] == summary["privacy"]["epsilon"] > 0


def test_a_source_beside_repeatable_noise_is_refused() -> None:
    with pytest.raises(InputError, match="only secret noise reads it"):
        private(**{"noise-source": "pcg64", "insecure-reproducible-noise": True})
    wrong: list[dict[str, Any]] = [{"source": "dice"}, {"arithmetic": "sand"}]
    for options in wrong:
        with pytest.raises(InputError, match="is unknown: use"):
            Mechanism(Clipping(), 1.0, 2.0, **options)


@pytest.mark.parametrize("source, certified", [("secure", True), ("pcg64", False)])
@pytest.mark.parametrize("clipping", ["block", "automatic-flat"])
def test_a_loop_of_ones_own_on_a_lattice(source: str, certified: bool, clipping: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    inputs, labels = torch.randn(50, 6), torch.randint(0, 3, (50,))
    privacy = {"noise": 1.0, "lot": 20.0, "noise-source": source, "arithmetic": "grid",
               "clipping": clipping}  # fmt: skip
    loop = Private(network, recipe="dp-muonbc", population=50, privacy=privacy)
    for lot in loop.lots(steps=3):
        loop.step(lot, inputs[lot.rows], labels[lot.rows])
    assert all(bool(one.isfinite().all()) for one in network.parameters())
    assert loop.epsilon(1e-5).certified == certified


def test_lots_are_poisson_from_either_source() -> None:
    """Each row with its rate, 4 standard deviations; the seed has no say."""
    draw: Any = lambda what, block=0: generator(0, Draw(what))  # noqa: E731
    for source in ("secure", "pcg64"):
        mechanism = Mechanism(Clipping(), 1.0, 5.0, source=source)
        lots = [mechanism.rows(draw, 50) for _ in range(1000)]
        counts = np.bincount(np.concatenate(lots), minlength=50)
        assert abs(counts.sum() - 5000) < 4 * np.sqrt(4500) and counts.min() > 50
        assert len({lot.tobytes() for lot in lots}) > 900
        assert all((np.diff(lot) > 0).all() for lot in lots)
