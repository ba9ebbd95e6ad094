"""Drawings for pages. The package computes them, and they use the text colour of the page."""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fedmuon
from fedmuon.analysis.report import style
from fedmuon.analysis.report.tables import read_table, where
from fedmuon.analysis.theory import certified_risk
from fedmuon.data import load
from fedmuon.experiments.certifying.account import Account
from fedmuon.experiments.studies import gap_bound
from fedmuon.privacy.accounting import composition
from fedmuon.privacy.accounting.dominating_pairs import Event

Drawn = Callable[[], Figure]
DRAWINGS: dict[str, tuple[Drawn, str]] = {}


def drawing(says: str) -> Callable[[Drawn], Drawn]:
    """Return a decorator that registers a drawing under the name of its function.

    `says` is the caption of the drawing.
    """

    def known(draw: Drawn) -> Drawn:
        DRAWINGS[draw.__name__] = style.styled(draw), says
        return draw

    return known


def inline(name: str) -> str:
    """Return a drawing as SVG inside HTML.

    Black becomes the text colour of the page, and the background is transparent.
    """
    draw, says = DRAWINGS[name]
    buffer = io.BytesIO()
    draw().savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :].replace(style.BLACK, "currentColor")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)  # keep ids unique in a page
    return f'<figure class="drawing">{text}<figcaption>{says}</figcaption></figure>'


@drawing(
    "How orthogonalizers change a singular value: 0 stays 0, and large values go towards 1. The "
    "steepest slope is the Lipschitz constant. The exact sign jumps at 0, so it has no Lipschitz "
    "constant."
)
def maps() -> Figure:
    """Draw how four orthogonalizers of the package map singular values."""
    from fedmuon.orthogonalize import clipped_sign, newton_schulz, smoothed_polar

    figure, (axes,) = style.canvas(1, False, 2.8)
    sigma = torch.linspace(0, 1, 401, dtype=torch.float64)
    unit = torch.stack([sigma, (1 - sigma**2).sqrt()], 1).diag_embed()  # has Frobenius norm 1
    axes.plot([0, 0, 1], [0, 1, 1], color=style.GREY, lw=0.9, ls="--", label="exact sign")
    lines = {
        "smoothed polar, λ = 0.01": smoothed_polar(unit, lam=0.01),
        "clipped sign, γ = 0.3": clipped_sign(unit, gamma=0.3),
        "five cubic Newton–Schulz steps": newton_schulz(unit, 5, "cubic", eps=1e-12),
    }
    for (name, mapped), (color, _) in zip(lines.items(), style.SERIES, strict=False):
        axes.plot(sigma, mapped[:, 0, 0], color=color, label=name)
    axes.set_xlabel("singular value of M, where ‖M‖ = 1")
    axes.set_ylabel("singular value of Orth(M)")
    style.legend(axes, 2)
    return figure


@drawing(
    "Left: the schedule, 5 of 20 clients in each round, which is drawn before the run. Right: the "
    "number of samples of each label that each client has (Dirichlet distribution, α = 0.5)."
)
def federation() -> Figure:
    """Draw a schedule and a partition of a run."""
    config = {"federation": {"rounds": 30}, "output": {"evaluate-every": 30}}
    run = fedmuon.run(config)
    figure, (left, right) = style.canvas(2, False, 3.0)
    schedule, held = np.load(run.path / "schedule.npy"), np.load(run.path / "partition.npz")
    rounds = np.repeat(np.arange(1, len(schedule) + 1), schedule.shape[1])
    left.plot(rounds, schedule.ravel(), "s", color=style.BLUE, ms=3)
    left.set_xlabel("round")
    for axes in (left, right):
        axes.set_yticks(range(0, 20, 5))
        axes.set_ylabel("client")
    _labels(right, held["client"], load("mnist5k")[1][held["train_index"]])
    return figure


def _labels(axes: Axes, client: np.ndarray, label: np.ndarray) -> None:
    """Draw the number of samples per client and label as bars, with one colour per label."""
    counts = np.zeros((client.max() + 1, label.max() + 1), int)
    np.add.at(counts, (client, label), 1)
    left = np.zeros(len(counts))
    for k, color in zip(
        range(counts.shape[1]), colormaps["viridis"](np.linspace(0, 1, 10)), strict=False
    ):
        axes.barh(range(len(counts)), counts[:, k], left=left, color=color, height=0.8)
        left += counts[:, k]
    axes.set_xlabel("samples, coloured by label")


@drawing(
    "Client drift of FedAvg on the bundled digits, over the first five rounds. Left: how far a "
    "client moves from the model that it received, by its number of local steps. Right: the cosine "
    "between its move and the mean move. Labels are skewed strongly (α = 0.1), as by default "
    "(α = 0.5), or not at all (α = ∞)."
)
def drift() -> Figure:
    """Draw the drift and the agreement of clients, by local steps and label skew."""
    figure, (left, right) = style.canvas(2, False, 2.8)
    steps = [1, 2, 5, 10, 20, 50]
    for alpha, (color, mark) in zip((0.1, 0.5, float("inf")), style.SERIES, strict=False):
        records = [_of_clients(alpha, one) for one in steps]
        name = "α = ∞" if alpha == float("inf") else f"α = {alpha:g}"
        for axes, measure in ((left, "drift"), (right, "cosine")):
            means = [np.mean([one[measure] for one in rows]) for rows in records]
            axes.plot(steps, means, mark + "-", color=color, ms=4, label=name)
    for axes, title in ((left, "mean drift ‖x − X‖"), (right, "mean cosine")):
        axes.set_xscale("log")
        axes.set_xlabel("local steps E")
        axes.set_ylabel(title)
    style.legend(left, 2)
    return figure


def _of_clients(alpha: float, steps: int) -> list[dict[str, float]]:
    return fedmuon.run({
        "data": {"alpha": alpha},
        "federation": {"rounds": 5},
        "local": {"recipe": "fedavg", "lr": 20.0, "steps": steps},
        "output": {"clients": True, "evaluate-every": 5},
    }).clients()  # fmt: skip


CONTROLLED = {
    "data": {"train": 1000, "test": 200},
    "task": {"initial": "zero"},
    "local": {"steps": 1, "lr": 0.01},
    "orthogonalizer": {"lambda": 0.1},
}


@drawing(
    "Twenty neighbours of one run. In each neighbour, one sample is replaced, and all random "
    "draws are the same. Blue: the distance of the neighbour's model from the run's model, by "
    "number of rounds. Thick line: the largest certificate of the clients whose samples were "
    "replaced, proved before the run. Linear model, 1,000 MNIST digits, 20 clients, η = 0.01, λ "
    "= 0.1."
)
def neighbours() -> Figure:
    """Draw measured distances by round, and the certificate of the theory."""
    figure, (axes,) = style.canvas(1, False, 2.8)
    _paths(axes)
    style.legend(axes, 2)
    return figure


def _paths(axes: Axes) -> None:
    rounds = np.array([1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50])
    runs = [
        fedmuon.stability(CONTROLLED | {"federation": {"rounds": int(last)}}, trials=20).neighbours
        for last in rounds
    ]
    moved = np.array([[one["perturbation"] for one in run] for run in runs])
    allowed = np.array([[one["certificate"] for one in run] for run in runs])
    for k, path in enumerate(moved.T):
        axes.plot(rounds, path, color=style.BLUE, lw=0.8,
                  label="20 runs, each with one sample replaced" if k == 0 else None)  # fmt: skip
    axes.plot(rounds, allowed.max(axis=1), color=style.BLACK, lw=1.6,
              label="proved maximum (certificate)")  # fmt: skip
    axes.set_xlabel("round")
    axes.set_ylabel("distance ‖X − X′‖")


@drawing(
    "Each of 300 samples is replaced once. Left: how far each replacement moves the model, "
    "compared with the certificate of its client. Clients are in order of exposure. Right: how "
    "close all replacements come to the certificate, and how close ten random replacements come."
)
def census() -> Figure:
    """Draw all neighbours of a small run."""
    small = {"data": {"train": 300, "test": 200}, "federation": {"clients": 10, "rounds": 20}}
    return fedmuon.stability(CONTROLLED | small, neighbours="all").plot().figure


@drawing(
    "The bound on the gap between population and training loss, by number of rounds, for three "
    "step sizes. The loss never exceeds B = 1, so a bound above B says nothing."
)
def bounds() -> Figure:
    """Draw the bound of Theorem 4.1 against the number of rounds, for several step sizes.

    The bound is known before any run.
    """
    figure, (axes,) = style.canvas(1, False, 2.8)
    rounds = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    for lr, (color, mark) in zip((1e-4, 1e-3, 1e-2), style.SERIES, strict=False):
        values = [fedmuon.bound(config=_certain(lr, last), size=1000)["value"] for last in rounds]
        axes.plot(rounds, values, mark + "-", color=color, ms=4, label=f"η = {lr:g}")
    axes.axhline(1, color=style.BLACK, lw=0.8, ls="--", label="B")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rounds")
    axes.set_ylabel("bound on the gap")
    style.legend(axes, 4)
    return figure


def _certain(lr: float, rounds: int) -> dict[str, dict[str, float]]:
    return {
        "federation": {"clients": 100, "per-round": 10, "rounds": rounds},
        "local": {"lr": lr, "steps": 1},
        "orthogonalizer": {"lambda": 0.1},
    }


@drawing(
    "ε by the number of parameter blocks per step, with the same noise. One line counts each "
    "block as if it had its own lot, as the paper does. The other line counts all blocks of a "
    "lot together. At 49 blocks, as in a published table, the values are 7.985 and 61.98."
)
def epsilon() -> Figure:
    """Draw ε of joint and per-release accounting, by the number of blocks."""
    figure, (axes,) = style.canvas(1, False, 2.8)
    _spent(axes)
    style.legend(axes, 2)
    return figure


def _spent(axes: Axes) -> None:
    blocks = [1, 2, 4, 7, 12, 20, 32, 49]
    named = {
        "joint": "correct: all blocks of a step together",
        "per-release": "as published: block by block",
    }
    for (mode, name), (color, mark) in zip(named.items(), style.SERIES[1::-1], strict=True):
        values = [composition.epsilon(2.3395, 1024 / 42043, 410, 8e-6, m, mode).epsilon
                  for m in blocks]  # fmt: skip
        axes.plot(blocks, values, mark + "-", color=color, ms=4, label=name)
    axes.set_yscale("log")
    axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("parameter blocks per step")
    axes.set_ylabel("ε at δ = 8e−6")


@drawing(
    "Upper limits of the error at a train error of 0.2, by noise multiplier: 50,000 samples, an "
    "expected lot of 200, 100 steps, and 95% confidence. The hold-out limit is that of 2,000 "
    "errors on 10,000 further samples."
)
def certificates() -> Figure:
    """Draw the limits of the error of a private run against its noise multiplier."""
    figure, (axes,) = style.canvas(1, False, 2.8)
    samples, train = 50_000, 0.2
    noises = [1, 1.4, 2, 3, 5, 10, 20, 50]
    releases = [(Event(200 / samples, noise, 100),) for noise in noises]
    accounts = [Account("example", [events], np.array([samples])) for events in releases]
    limits = {
        f"one draw, {count} setting{'s' * (count > 1)} (certified)": [
            account.released_limit(0.05 / count, train).risk(train) for account in accounts
        ]
        for count in (1, 9)
    }
    limits["in expectation (estimated)"] = [account.expected_risk(train) for account in accounts]
    for (name, values), (color, mark) in zip(limits.items(), style.SERIES, strict=False):
        axes.plot(noises, values, mark + "-", color=color, ms=4, label=name)
    held_out = certified_risk.clopper_pearson(2000, 10_000)
    axes.axhline(held_out, color=style.GREY, lw=1.4, ls="-.", label="hold-out (certified)")
    axes.axhline(train, color=style.BLACK, lw=0.8, ls="--", label="train error")
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("noise multiplier σ")
    axes.set_ylabel("error, at most")
    style.legend(axes, 2)
    return figure


@style.styled
def picture() -> Figure:
    """Draw the picture of the README.

    It shows distances with a certificate, and ε in two kinds of accounting.
    """
    figure, (left, right) = style.canvas(2, False, 2.6)
    _paths(left)
    _spent(right)
    for axes, title in (
        (left, "How far one sample moves the model"),
        (right, "Privacy loss ε of DP-Muon"),
    ):
        axes.set_title(title, loc="left")
        style.legend(axes, 1)
    return figure


def gaps(folder: Path) -> Figure:
    """Draw the gaps, predictions and bounds of FedMuon in a finished suite `gap-bound`.

    The README shows this picture in a column of a table, so it is narrow.
    """
    rows = read_table(folder / "rows.csv", words=("method", "key", "form", "status"))
    return gap_bound.three_curves(where(rows, method="FedMuon"), narrow=True)


if __name__ == "__main__":
    DOCS = Path(__file__).resolve().parent.parent
    style.saved_as(picture(), DOCS / "picture.png")
    for finished in sys.argv[1:]:  # the folder of a suite `gap-bound`, if it is to be drawn again
        style.saved_as(gaps(Path(finished)), DOCS / "uses" / "gap-bound.png")
