"""The example participation_gap.py: its clients, its intervals, and its table."""

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmuon

FILE = Path(__file__).resolve().parents[2] / "examples" / "participation_gap.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(FILE))


def test_no_image_belongs_to_two_clients(example: dict[str, Any]) -> None:
    labels = np.random.default_rng(1).integers(10, size=30_000)
    groups = example["draw_clients"](labels, (600, 150, 45), 0)
    assert [len(clients) for clients in groups] == [600, 150, 45]
    clients = [images for group in groups for images in group]
    every = np.concatenate(clients)
    assert len(every) == len({*every.tolist()})
    assert {len(images) for images in clients} == {*range(20, 31)}


def test_shares_of_labels_have_the_variance_of_dirichlet(example: dict[str, Any]) -> None:
    """A share of Dirichlet(1/2) with 10 labels has the variance a (1 - a) / 6, with a = 1/10.

    A client with m images adds a (1 - a) / m times 1 - 1/6. With equal shares, the first part would
    be missing, and the test would fail.
    """
    labels = np.random.default_rng(1).integers(10, size=60_000)
    (clients,) = example["draw_clients"](labels, (2000,), 3)
    sizes = np.array([len(images) for images in clients])
    shares = np.array([np.bincount(labels[images], minlength=10) for images in clients])
    shares = shares / sizes[:, None]
    of_sampling = 0.09 * (5 / 6) * (1 / sizes).mean()
    assert shares.var() == pytest.approx(0.09 / 6 + of_sampling, rel=0.03)
    assert shares.mean(0) == pytest.approx(np.full(10, 0.1), abs=0.012)
    assert shares.var() > 5 * of_sampling


def test_too_few_images_are_rejected(example: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="lower --clients"):
        example["draw_clients"](np.arange(10).repeat(10), (5,), 0)


def test_an_interval_contains_the_mean_in_95_of_100_cases(example: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    hits = {1.0: 0, 0.5: 0}
    for _ in range(2000):
        mean, half = example["mean_and_half"](rng.normal(0.3, 0.2, 50), rng.normal(0.1, 0.1, 100))
        for factor in hits:
            hits[factor] += abs(mean - 0.2) <= factor * half
    assert 0.92 <= hits[1.0] / 2000 <= 0.97
    assert hits[0.5] / 2000 < 0.8
    mean, half = example["mean_and_half"](np.array([0.0, 1.0, 0.0, 1.0]))
    assert (mean, half) == (0.5, pytest.approx(1.96 * (1 / 3 / 4) ** 0.5))


@pytest.mark.slow
def test_errors_of_participants_are_those_that_are_certified(example: dict[str, Any]) -> None:
    """The example computes them without fedmuon, from features that are not scaled to norm 1."""
    study = example["Study"]("mnist5k", 30)
    result = study.train(study.participants, 10, 0.05, "fedavg", 4.0)
    rows = [row for row in fedmuon.certify(result).rows if row.name == "privacy of clients"]
    errors = study.errors(result, study.participants)
    assert len(errors) == 30 and 0 < errors.mean() < 0.7
    assert [row.beside for row in rows] == pytest.approx([errors.mean()] * 2)
    assert study.errors(result, study.unseen).mean() != pytest.approx(errors.mean(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_table_and_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    figure = tmp_path / "gap.png"
    words = ["--data", "mnist5k", "--clients", "40", "--plot", str(figure)]
    monkeypatch.setattr(sys, "argv", [str(FILE), *words])
    runpy.run_path(str(FILE), run_name="__main__")
    head, *rows = capsys.readouterr().out.splitlines()
    assert "certified" in head and len(rows) == 9
    for row in rows:
        cells = row.replace(" ± ", "±").split()
        participants, limits = float(cells[3]), [float(cell) for cell in cells[5:8]]
        assert participants <= limits[0] <= limits[1] <= limits[2] <= 1
    assert figure.read_bytes()[:4] == b"\x89PNG"
