"""Study `poisoning`: how far one client can move the model, and how far it can be certified to.

One client replaces all its samples and follows the protocol. There are three attacks. `fresh` draws
new samples with the client's own labels, which is no attack but a comparison. `labels` gives one
label to all samples of the client, the label that moves the final model most. `found` searches for
a sample with a label, by derivatives through the run (`stability.client_neighbours`). All runs of a
setting share their random draws, so the distance between two final models is the effect of the
client alone. The certificate holds for any samples of norm at most 1.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from fedmuon.analysis import Realized
from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows
from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import NEGATIVE, Claim, Effect, Rule, Slope, mean_of
from fedmuon.config.load import Config
from fedmuon.config.schema import Count
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table
from fedmuon.data.client_neighbours import draw_clients, stack_clients
from fedmuon.experiments.stability.certificates import CertifiedSetting, certify, start_of
from fedmuon.experiments.stability.client_neighbours import search
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.shift_by_round import certificates_by_round
from fedmuon.experiments.studies.study import Call, Study, distinct, heading
from fedmuon.experiments.suites.contents import Nested, SuiteRequest, cell, require_matrix
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.evaluation import risk
from fedmuon.federated.neighbour_runs import distances, neighbour_rounds
from fedmuon.federated.rounds import begin
from fedmuon.runs.directory import Record

ATTACKS = {"fresh": "new samples, own labels", "labels": "worst label", "found": "worst found"}


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    `attacked` is the number of clients that are attacked one at a time, those that take part in
    most rounds.
    """

    seeds: Annotated[list[int], Field(min_length=1)]
    attacked: Count
    variants: Annotated[dict[str, Nested], Field(min_length=1)]
    base: Nested = Field(default_factory=dict)


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each variant and seed."""
    source = {"data": {"name": request.data}, "engine": {"dtype": "float64", "device": "cpu"}}
    calls = []
    for place, (name, tables) in enumerate(settings.variants.items()):
        for seed in settings.seeds:
            clients = {"unit": "clients", "trials": settings.attacked, "neighbours": "worst"}
            drawn = {"federation": {"seed": seed}, "stability": clients}
            config = cell(source, settings.base, tables, drawn)
            require_matrix(name, config, "certificates need")
            calls.append(Call(f"{place}-{seed}", partial(measure, name, config)))
    return calls


# Measurements


def measure(variant: str, config: Config) -> Record:
    """Return a row for each attack and client, and a row for each round of the first client."""
    config = resolve(config)
    source, seed = read_source(config), config.federation.seed
    data = build_data(config, source)
    run = FinishedRun(config, source, data, build_experiment(config, data), Path())
    relabelled_clients, worst = search(run)
    clients = [int(rows[0, 0]) for rows in worst]
    fresh = [_fresh(run, client) for client in clients]
    attacks = [*fresh, *relabelled_clients, *worst]
    start = begin(run.experiment.recipe, run.experiment.task, seed).params["weight"]
    neighbours = stack_clients(source, attacks, config.data.normalize)
    moved, last = [], {}
    for last in neighbour_rounds(run.experiment, neighbours, seed):
        moved.append(distances(last)[0].reshape(len(ATTACKS), -1))
    shifts = np.array(moved)  # [R, attacks, clients]
    certified = _certificates(run, start[0].cpu().numpy())[:, clients]
    held_out = run.experiment.shards.held_out
    scores = risk(run.experiment.task, last, held_out.inputs, held_out.labels).scores["accuracy"]
    accuracy = scores[1:].reshape(len(ATTACKS), -1).tolist()
    about = {"variant": variant, "seed": seed}
    travelled = float((last["weight"][0] - start[0]).norm())
    rows = [
        about | {"attack": attack, "client": client, "shift": float(shifts[-1, a, t]),
                 "certificate": float(certified[-1, t]), "travelled": travelled,
                 "accuracy": float(scores[0]), "accuracy_after": accuracy[a][t]}
        for a, attack in enumerate(ATTACKS)
        for t, client in enumerate(clients)
    ]  # fmt: skip
    curves = [
        about | {"round": r + 1, "certificate": float(certified[r, 0])}
        | {attack: float(shifts[r, a, 0]) for a, attack in enumerate(ATTACKS)}
        for r in range(len(shifts))
    ]  # fmt: skip
    return {"rows": rows, "curves": curves}


def _fresh(run: FinishedRun, client: int) -> np.ndarray:
    """Return the first random neighbour that replaces this client."""
    seed, trials = run.config.federation.seed, 8
    while True:
        for rows in draw_clients(run.data, run.source, trials, seed)[trials // 2 :]:
            if rows[0, 0] == client:
                return rows
        trials *= 2


def _certificates(run: FinishedRun, start: np.ndarray) -> np.ndarray:
    """Return the certificates [R, N] of the run as if it had ended after each round."""
    plan = run.experiment.plan
    case = CertifiedSetting(
        run.config,
        run.data.sizes,
        Realized(plan.schedule()),
        start.shape,
        factors=plan.factors(),
        start=start_of(start, run.source),
    )
    if refusal := certify(case).refusal:
        raise InputError(f"the run has no certificate: {refusal}")
    return certificates_by_round(case, range(1, plan.rounds + 1))


# Claims


STANDS_ON = (
    "The attacked client follows the protocol and chooses its samples. The certificate holds for "
    "any samples of norm at most 1, and for the participants that the run drew. Shifts are "
    "distances ‖X − X'‖ of final models, which share all random draws. A relative shift is divided "
    "by the distance ‖X − X⁰‖ that the run without attack travelled. The worst found samples are "
    "the result of a search, so a worse attack may exist. Intervals are 95% intervals over seeds."
)


def by_seed(rows: Columns, values: np.ndarray) -> np.ndarray:
    """Return the largest value of each seed."""
    return np.array([values[rows["seed"] == seed].max() for seed in distinct(rows, "seed")])


def estimate(values: np.ndarray) -> Slope:
    """Return the mean over seeds with its interval, or without an interval for one seed."""
    if len(values) > 1:
        return mean_of(values)
    return Slope(float(values[0]), np.nan, np.nan)


def relative(rows: Columns, variant: str) -> np.ndarray:
    """Return the largest shift of the worst found samples over the travelled distance, by seed."""
    part = where(rows, variant=variant, attack="found")
    return by_seed(part, part["shift"] / part["travelled"])


def claims(rows: Columns, curves: Columns) -> Sequence[Claim]:
    """Return the claims about certificates, and about the first FedMuon and FedAvg variants."""
    del curves
    shares = rows["shift"] / rows["certificate"]
    largest = {
        name: Slope(value, value, value)
        for name in distinct(rows, "variant")
        for value in [float(shares[rows["variant"] == name].max())]
    }
    within = Claim(
        "No attack moves the model further than the certificate of the client.",
        Effect.between("largest shift / certificate", largest, unit="ratio"),
        Rule(high=1.0),
        "; ".join(f"{name}: {number(slope.value, 3)}" for name, slope in largest.items()),
    )
    names = distinct(rows, "variant")
    better = next((name for name in names if "FedAvg" not in name), names[0])
    than = next((name for name in names if "FedAvg" in name), names[-1])
    lead = estimate(relative(rows, better) - relative(rows, than))
    less = Claim(
        f"One client moves {better} less than {than}, relative to the distance from X⁰.",
        Effect.between("difference of relative shifts", {"": lead}),
        NEGATIVE,
        f"relative shift {number(float(relative(rows, better).mean()), 3)} and "
        f"{number(float(relative(rows, than).mean()), 3)}",
    )
    return [within, less]


def numbers(rows: Columns, curves: Columns) -> Rows:
    """Return the rows of the report's table: means over seeds for each variant and attack."""
    del curves
    lines: Rows = [("attack", "shift", "of the certificate", "of ‖X − X⁰‖", "accuracy")]
    for variant in distinct(rows, "variant"):
        part = where(rows, variant=variant)
        lines.append(heading(f"{variant}:", lines[0]))
        lines.append(("  no attack", "0", "0", "0", number(float(part["accuracy"].mean()), 3)))
        for attack, words in ATTACKS.items():
            chosen = where(part, attack=attack)
            shift = chosen["shift"]
            ratios = shift / chosen["certificate"], shift / chosen["travelled"]
            cells = [estimate(by_seed(chosen, values)).value for values in (shift, *ratios)]
            after = float(chosen["accuracy_after"].mean())
            lines.append((f"  {words}", *(number(value, 3) for value in (*cells, after))))
        certified, travelled = by_seed(part, part["certificate"]), by_seed(part, part["travelled"])
        ends = (
            number(float(certified.mean()), 3),
            "1",
            number(float((certified / travelled).mean()), 3),
        )
        lines.append(("  certificate", *ends, ""))
    return lines


# Figure


@style.styled
def shifts(rows: Columns, curves: Columns, narrow: bool = False) -> Figure:
    """Draw the shift of the client that takes part most over rounds, with the certificate above."""
    names, seed = distinct(rows, "variant"), distinct(curves, "seed")[0]
    figure, panels = style.canvas(len(names), narrow, 2.2, min(4, len(names)))
    for place, (axes, name) in enumerate(zip(panels, names, strict=True)):
        part = where(curves, variant=name, seed=seed)
        took_part = part["certificate"] > 0
        part = {column: values[took_part] for column, values in part.items()}
        axes.plot(part["round"], part["certificate"], color=style.BLACK, lw=1.6,
                  label="certificate")  # fmt: skip
        for (attack, words), look in zip(reversed(ATTACKS.items()), style.SERIES, strict=False):
            axes.plot(part["round"], part[attack], color=look[0], lw=1.4, label=words)
        style.log_y(axes)
        axes.set_title(name, loc="left")
        axes.set_xlabel("round")
        if narrow or place % 4 == 0:
            axes.set_ylabel(r"shift $\Vert X-X'\Vert_F$")
    style.legend_below(figure, panels[0], 4)
    return figure


STUDY = Study(
    "poisoning",
    Settings,
    cells,
    claims,
    numbers,
    STANDS_ON,
    {"poisoning": shifts},
    tables=("rows", "curves"),
)
