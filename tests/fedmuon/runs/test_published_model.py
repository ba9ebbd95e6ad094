"""The model with noise that a run with certificates publishes, and its certificate."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small
from safetensors.numpy import load_file

import fedmuon
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.certifying import stored
from fedmuon.experiments.certifying.certify import certify
from fedmuon.experiments.run import execute

CERTIFIED = {"local": {"lr": 1e-5}, "engine": {"dtype": "float64"}}
DEVIATION = 0.05


def run(folder: Path, deviation: float = DEVIATION, **tables: Any) -> Path:
    execute(small({**CERTIFIED, "stability": {"output-noise": deviation}}, **tables), folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("published") / "run")


def by_noise(certificates: fedmuon.RiskCertificates) -> list[Any]:
    return [row for row in certificates.rows if row.name == "noise on the output"]


def test_the_published_model_is_the_final_model_with_keyed_noise(folder: Path) -> None:
    model, published = (load_file(folder / f"{n}.safetensors") for n in ("model", "published"))
    drawn = generator(3, Draw.OUTPUT).standard_normal(model["weight"].shape)  # the seed of `small`
    np.testing.assert_array_equal(published["weight"], model["weight"] + DEVIATION * drawn)
    other = generator(4, Draw.OUTPUT).standard_normal(model["weight"].shape)
    assert not np.allclose(published["weight"], model["weight"] + DEVIATION * other)


def test_nothing_else_changes(folder: Path, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", 0.0)
    assert not (plain / "published.safetensors").exists()
    for name in ("model.safetensors", "initial.safetensors"):
        assert (plain / name).read_bytes() == (folder / name).read_bytes()


def test_the_certificate_uses_the_noise_of_the_config(folder: Path, tmp_path: Path) -> None:
    by_default, passed = certify(folder), certify(folder, output_noise=DEVIATION)
    assert by_default == passed and len(by_noise(by_default)) == 2
    assert by_default.output_noise == by_default.configured_noise == DEVIATION
    other, none = certify(folder, output_noise=0.4), certify(folder, output_noise=0.0)
    assert other.output_noise == 0.4 and not by_noise(none)
    assert by_noise(other)[0].value != by_noise(by_default)[0].value
    plain = certify(run(tmp_path / "plain", 0.0), output_noise=DEVIATION)
    assert by_noise(plain) == by_noise(by_default)  # the file and the computed model agree


def test_the_command_has_only_other_noise(folder: Path) -> None:
    for noise, words in ((None, ""), (0.4, " --output-noise 0.4"), (0.0, " --output-noise 0.0")):
        certificates = fedmuon.certify(folder, output_noise=noise)
        assert stored.command(folder, certificates) == f"fedmuon certify {folder}{words}"


def test_a_damaged_published_model_is_found(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    file = copy / "published.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"published\.safetensors"):
        certify(copy)


def test_the_average_has_no_noise(tmp_path: Path) -> None:
    found = certify(run(tmp_path / "a", output={"average": 0.5}), average=True)
    assert not by_noise(found) and found.output_noise == 0


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"task": {"name": "network", "model": "mlp"}}, r"Set \[task\] name = 'matrix'"),
        ({"local": {"recipe": "scaffold"}}, "choose an optimizer with a certificate"),
        ({"local": {"recipe": "dp-sgd"}}, "choose an optimizer with a certificate"),
        ({"privacy": {"level": "client", "noise": 1.0}}, r"keys of \[privacy\]"),
        ({"engine": {"dtype": "float32"}}, r"Set \[engine\] dtype = 'float64'"),
    ],
)
def test_runs_without_certificates_are_refused(tables: dict[str, Any], words: str) -> None:
    merged = {"engine": {"dtype": "float64"}, "stability": {"output-noise": 0.1}, **tables}
    with pytest.raises(InputError, match=f"(?i)output-noise = 0.1 has no effect.*{words}"):
        parse(merged)
