"""A notebook beside folders that are called as our rooms are: it runs, and shows what it should."""

from pathlib import Path
from typing import Any

import pytest
from packages import archives

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.filterwarnings("ignore::ResourceWarning"),
              pytest.mark.filterwarnings("ignore::UserWarning")]  # fmt: skip
FIRST = """
import numpy as np, torch, fedmuon
X = np.random.default_rng(0).normal(size=(60, 3))
class Net(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layer = torch.nn.Linear(*shape, classes)
    def forward(self, samples):
        return self.layer(samples)
CONFIG = {"federation": {"clients": 2, "per-round": 2, "rounds": 2},
          "local": {"recipe": "fedavg", "steps": 1}, "engine": {"dtype": "float64"}}
def run(engine):
    table = {"name": engine, "dtype": "float64"}
    return fedmuon.run({**CONFIG, "engine": table}, data=(X, (X[:, 0] > 0).astype(int)), task=Net)
"""


def shown(tmp_path: Path, *cells: str) -> list[list[dict[str, Any]]]:
    """What each cell of a notebook shows, kind -> content; nothing may fail."""
    folder = archives.folder_of_others(tmp_path / "mine")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in cells])
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(book, timeout=280, kernel_name="python3", resources=resources)
    client.execute()
    return [[one.get("data", one) for one in cell.outputs] for cell in book.cells]


def test_what_a_notebook_shows(tmp_path: Path) -> None:
    beside = "fedmuon.stability({'data': {'name': 'synthetic', 'train': 60, 'test': 20}, "
    beside += "'federation': {'clients': 2, 'per-round': 2, 'rounds': 2}}, trials=2)"
    first, run, plot, stability, compared = shown(
        tmp_path, FIRST, "found = run('inline')\nfound", "found.plot()", beside,
        "fedmuon.compare([found, found])",
    )  # fmt: skip
    assert first == []
    said, bar, result = run
    assert said["name"] == "stdout" and "train samples are divided among 2 clients" in said["text"]
    assert "rounds 2/2" in bar["text/plain"] and "<progress" in bar["text/html"]
    assert "<th>accuracy</th>" in result["text/html"]
    assert "image/png" in plot[0]
    *_, trials, table = stability  # after a note on unequal clients
    assert "neighbours 2/2" in trials["text/plain"]
    assert "<th>largest perturbation</th>" in table["text/html"]
    assert "<th>seeds</th>" in compared[0]["text/html"]
    assert compared[0]["text/plain"].startswith("run ")


@pytest.mark.slow
def test_a_class_of_a_cell_on_ray(tmp_path: Path) -> None:
    compare = "a, b = run('inline'), run('ray')\n"
    compare += "max(float((a.model[n] - b.model[n]).norm()) for n in a.model) <= 1e-12"
    assert shown(tmp_path, FIRST, compare)[1][-1]["text/plain"] == "True"
