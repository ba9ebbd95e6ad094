"""`fedmuon stability`: train a run and its neighbours, and compare them with certificates.

A neighbour is the same run with one sample replaced, or with all samples of one client replaced
([stability] unit, see `client_neighbours`). Replica 0 of every stack is the run itself,
and replica s is neighbour s - 1. All replicas use the same random numbers, so ||X_s^R - X_0^R||_F
is the effect of the replaced sample. For the Gaussian-smoothed sign, a certificate may fail with
probability 2 alpha. The certificate is valid if no call of the orthogonalizer is clipped in the run
or in the neighbour (Stability note, Corollary D.11).
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from fedmuon.analysis.report.numbers import written
from fedmuon.config.load import Config, load
from fedmuon.config.schema import biased_participation
from fedmuon.config.user_objects import NOTHING
from fedmuon.core import files
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.core.locks import held, require_place
from fedmuon.core.rng import Draw, generator
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import Neighbours, census, draw, stack
from fedmuon.experiments.run import execute as make_run
from fedmuon.experiments.run import on_engine
from fedmuon.experiments.stability import certificates, gap, prediction, realized
from fedmuon.experiments.stability.client_neighbours import (
    DrawnClients,
    pick_clients,
    require_client_neighbours,
)
from fedmuon.experiments.stability.finished_run import (
    CENSUS,
    FinishedRun,
    from_directory,
    largest_moves,
    read_census,
)
from fedmuon.experiments.stability.held_out_change import held_out_change, held_out_words
from fedmuon.experiments.stability.influence import (
    CALIBRATION,
    PREDICTED,
    RANKING,
    Ranking,
    calibration,
    require_smooth,
    stored_ranking,
)
from fedmuon.experiments.stability.participation_bound import bound_rows
from fedmuon.experiments.stability.participation_gap import gap_rows, measure_participation_gap
from fedmuon.experiments.stability.shift_by_round import shift_file
from fedmuon.experiments.tables import facts, unreleased
from fedmuon.federated.experiment import Engine
from fedmuon.federated.neighbour_runs import distances, run_neighbours
from fedmuon.federated.plan import BIASED
from fedmuon.federated.rounds import run_rounds
from fedmuon.runs.directory import Record, RunDirectory
from fedmuon.runs.loop import OnRoundEnd, OnStart

HEADER = "trial,client,index,replacement,perturbation,exposure,certificate\n"
PREDICTED_HEADER = "client,index,replacement,predicted,perturbation\n"
PROGRESS = ".neighbours.progress"
ONE_MODEL = (
    "runs on neighbouring data sets need [engine] name = 'inline' or 'ray', because a deployment "
    "runs only one model"
)
SECRET_COHORTS = (
    "runs on neighbouring data sets need the same participants in each round, but [privacy] "
    "cohorts = 'poisson' draws secret participants. Set cohorts = 'fixed'."
)
GAP = "population gap"  # at the clients' label shares; the test gap uses the held-out samples
IS_NEIGHBOUR = {
    "samples": "A neighbour is the run with one sample replaced.",
    "clients": "A neighbour is the run with all samples of one client replaced.",
    "removed-clients": "A neighbour is the run with one client that has no samples: the client "
    "takes part in the same rounds, and its gradient is 0.",
}
OF_NEIGHBOURS = (
    "Its perturbation is the distance between the two final models, and its certificate is the "
    "proved maximum of this distance."
)
MEANINGS = (
    "The population gap is the loss on new samples, estimated from held-out samples with the "
    "clients' label shares, minus the train loss."
)
PARTICIPATION_GAP = (
    "The participation gap is the loss on unseen clients minus the train loss of the clients that "
    "train. Each client has the same weight."
)
PREDICTED_GAP = (
    " The predicted gap follows from derivatives through the run. It is an estimate and no bound "
    "(SE: standard error)."
)
MEMORY, MOST = 1 << 30, 256  # maximum bytes and maximum number of neighbours of one stack
INCONCLUSIVE = Text("inconclusive: the interval of the gap reaches above the bound", style="yellow")


def execute(
    config: Config | None,
    out: Path,
    resume: bool = False,
    on_round_end: OnRoundEnd = lambda record: None,
    on_start: OnStart = lambda done, total: None,
) -> Record:
    """Train a run and its neighbours in the folder `out`, and return the content of bound.json.

    `on_round_end` is called after each stack of neighbours.
    """
    if config:
        require_measurable(config)
    with held(out):
        make_run(config, out, resume, more_files={CENSUS: HEADER.encode()})
        objects = config.given if config else NOTHING
        run = FinishedRun.open(out, objects)
        require_measurable(run.config)
        case = from_directory(out, given=objects)
        certificate = certificates.certify(case)
        if not (out / PROGRESS).exists() and PREDICTED in files.sums_of(out):
            # Everything has finished, and ranking the worst neighbours again would take long.
            files.require_sound(out, [PREDICTED, CENSUS, "bound.json"])
            return json.loads(files.read_text(out / "bound.json"))
        with RunDirectory(out).failing():
            compared, extra = on_engine(
                run.config,
                lambda engine: _run_and_compare(
                    run, case, certificate, on_round_end, on_start, engine
                ),
            )
        moved = largest_moves(out / CENSUS, len(case.sizes))
        case = dataclasses.replace(case, moved=moved)
        record = certificates.report(case, certificate)
        record |= gap.measure_gap(run, case, certificate) | prediction.prediction(run) | compared
        record |= measure_participation_gap(run, case, certificate)
        record |= gap.beside_start(run, record["value"])
        failure = certificate.bound.failure if certificate.bound else run.config.stability.delta
        record |= held_out_change(run, failure, gap.change_range(case, certificate))
        if run.config.stability.realized:
            record["realized"] = realized.write_certificates(run, certificate)
        # neighbours.csv is complete now, so its checksum is written, too.
        content = (json.dumps(record, indent=2, allow_nan=False) + "\n").encode()
        contents = {"bound.json": content, **extra}
        files.announce(out, {**contents, CENSUS: files.read_bytes(out / CENSUS)})
        for name, written_there in contents.items():
            files.write_bytes(out / name, written_there)
        with files.mendable(out, "write to"):
            for name in (RANKING, PROGRESS):
                (out / name).unlink(missing_ok=True)
    return record


def require_measurable(config: Config) -> None:
    """Raise InputError if the neighbours that the config requests cannot be trained."""
    privacy, table = config.privacy, config.stability
    if config.engine.name == "deployment":
        raise InputError(ONE_MODEL)
    if privacy.level == "client" and privacy.cohorts == "poisson":
        raise InputError(SECRET_COHORTS)
    if biased_participation(config):
        raise InputError(BIASED)
    if table.realized:
        realized.require_covered(config)
    if certificates.of_clients(config):
        require_client_neighbours(config)
    if table.neighbours == "worst":
        require_smooth(config)


def _run_and_compare(
    run: FinishedRun,
    case: certificates.CertifiedSetting,
    certificate: certificates.Certificate,
    on_round_end: OnRoundEnd,
    on_start: OnStart,
    engine: Engine,
) -> tuple[Record, dict[str, bytes]]:
    """Train the neighbours. If they were ranked, also compare predictions with exact runs."""
    ranking = measure(run, certificate, on_round_end, on_start, engine)
    if certificates.of_clients(run.config):
        return {}, shift_file(run, case, engine)
    if ranking is None:
        return {}, {}
    top = read_census(run.out / CENSUS, usecols=(4,))[:, 0]
    drawn, size = ranking.rows[ranking.top :], stack_size(run)
    parts = np.split(drawn, range(size, len(drawn), size))
    moved = np.concatenate([top, *(perturbations(run, part, engine) for part in parts)])
    index = _index(run.data, ranking.rows)
    columns = (ranking.rows[:, 0], index, ranking.rows[:, 2], ranking.predicted, moved)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = [PREDICTED_HEADER, *(",".join(map(repr, row)) + "\n" for row in rows)]
    return {"influence": calibration(ranking, moved)}, {PREDICTED: "".join(lines).encode()}


def measure(
    run: FinishedRun,
    certificate: certificates.Certificate,
    on_round_end: OnRoundEnd,
    on_start: OnStart,
    engine: Engine = run_rounds,
) -> Ranking | None:
    """Train the neighbours that are missing in neighbours.csv, and append a line for each.

    Returns:
        The ranking of the worst neighbours, if the config requests them.
    """
    worst = run.config.stability.neighbours == "worst"
    size, ranking = stack_size(run), None
    if certificates.of_clients(run.config):
        drawn = pick_clients(run, engine, size)
    else:
        ranking = stored_ranking(run, on_round_end, on_start) if worst else None
        drawn = DrawnSamples(run, pick(run) if ranking is None else ranking.rows[: ranking.top])
    heads, clients, file = drawn.heads, drawn.clients, run.out / CENSUS
    finished, mark = _cut_back(file, heads)
    on_start(finished, len(drawn))
    promised = certificate.exposures, certificate.certificates
    largest = float(read_census(file, usecols=(4,)).max()) if finished else 0.0
    for start in range(finished, len(drawn), size):
        part = slice(start, start + size)
        moved = perturbations(run, drawn[part], engine)
        unknown = np.full(len(moved), np.nan)  # used without a certificate
        columns = [unknown if values is None else values[clients[part]] for values in promised]
        numbers = np.stack([moved, *columns], 1).tolist()
        lines = [f"{head}{a!r},{b!r},{c!r}\n"
                 for head, (a, b, c) in zip(heads[part], numbers, strict=True)]  # fmt: skip
        require_place(run.out)
        files.append(file, lines, durable=True)
        finished, mark = finished + len(lines), files.crc("".join(lines), mark)
        noted = files.sealed({"lines": finished, "crc": mark})
        files.write_bytes(file.with_name(PROGRESS), noted.encode())
        largest = max(largest, float(moved.max()))
        on_round_end({"done": finished, "largest": largest})
    return ranking


@dataclass(frozen=True)
class DrawnSamples:
    """Neighbours that replace one sample, as an array [T, 3] with rows as in `Neighbours.rows`."""

    run: FinishedRun
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice | np.ndarray) -> "DrawnSamples":
        return DrawnSamples(self.run, self.rows[part])

    @property
    def clients(self) -> np.ndarray:
        """The client of each neighbour [T]."""
        return self.rows[:, 0]

    @property
    def heads(self) -> list[str]:
        """The first columns of neighbours.csv."""
        index = _index(self.run.data, self.rows)
        rows = zip(self.clients, index, self.rows[:, 2], strict=True)
        return [f"{t},{client},{old},{new}," for t, (client, old, new) in enumerate(rows)]

    def stacked(self) -> Neighbours:
        """Return the data sets: the original data set, and then the neighbours."""
        return stack(self.run.source, self.rows, self.run.config.data.normalize)


def pick(run: FinishedRun) -> np.ndarray:
    """Return the client, the position of the sample and the replacement, for every neighbour.

    The result is an int64 array [T, 3].
    """
    config, data, source = run.config, run.data, run.source
    seed, table = config.federation.seed, config.stability
    if table.neighbours == "all":
        return census(data, source, seed)
    assert table.neighbours != "worst"  # the worst neighbours are ranked, not drawn
    return draw(data, source, table.trials, seed, table.neighbours)


def stack_size(run: FinishedRun) -> int:
    """Return the number of neighbours that are trained together in one stack.

    The number depends only on the config, so that repeated runs are identical. The memory of a
    replica is about 8 copies of its parameters, two more for each reply of a client, and 4 copies
    of the logits of a round's clients.
    """
    federation, task = run.config.federation, run.experiment.task
    entries = sum(value.numel() for value in task.initial(generator(0, Draw.INITIAL)).values())
    rows = int(np.sort(run.data.sizes)[-federation.per_round :].sum())
    doubles = entries * (8 + 2 * federation.per_round) + 4 * run.source.classes * rows
    if certificates.of_clients(run.config):  # the replacements of all samples of a client
        doubles += int(run.data.sizes.max()) * math.prod(run.source.inputs.shape[1:])
    return max(1, min(MOST, MEMORY // (8 * doubles) - 1))


def perturbations(
    run: FinishedRun, drawn: np.ndarray | DrawnSamples | DrawnClients, engine: Engine
) -> np.ndarray:
    """Return the perturbation ||X_s^R - X_0^R||_F of each given neighbour.

    The value is set to 0 if the client never took part. No step uses the samples of such a client,
    but rounding in another position of the stack could change the last bit of the model.
    """
    drawn = DrawnSamples(run, drawn) if isinstance(drawn, np.ndarray) else drawn
    moved, seed = np.zeros(len(drawn)), run.config.federation.seed
    taking_part = np.isin(drawn.clients, run.experiment.plan.schedule())
    if taking_part.any():
        ends = run_neighbours(run.experiment, drawn[taking_part].stacked(), seed, engine)
        moved[taking_part] = distances(ends)[0]
    if not np.isfinite(moved).all():
        raise NonFinite(
            "a model that was trained on a neighbouring data set contains NaN or infinity. Lower "
            "[local] lr."
        )
    return moved


def _index(data: FederatedData, drawn: np.ndarray) -> np.ndarray:
    """Return the indices of the replaced samples [T] in the source."""
    return data.train_index[data.order[data.offsets[drawn[:, 0]] + drawn[:, 1]]]


def _cut_back(file: Path, heads: list[str]) -> tuple[int, int]:
    """Remove the incomplete stack at the end of an interrupted neighbours.csv.

    The progress file contains the number of neighbours in complete stacks, and the check value of
    their lines. A neighbours.csv with a checksum is complete.

    Returns:
        The number of remaining neighbours, and the check value of their lines.
    """
    _, *lines = files.whole_lines(file) or [HEADER]
    start = files.crc(RunDirectory(file.parent).mark)  # lines of other runs fail the check
    progress = file.with_name(PROGRESS)
    if not progress.exists() and CENSUS in files.sums_of(file.parent):
        files.require_sound(file.parent, [CENSUS])
        count, mark = len(lines), files.crc("".join(lines), start)
    else:
        noted = files.whole_lines(progress)
        record = files.unsealed(noted[0]) if noted else {"lines": 0, "crc": start}
        if record is None:
            raise InputError(f"{progress} is damaged: {files.AFRESH}")
        count, mark = record["lines"], record["crc"]
    complete = lines[:count]
    fits = [line.startswith(head) for line, head in zip(complete, heads, strict=False)]
    if sum(fits) < count or files.crc("".join(complete), start) != mark:
        raise InputError(
            f"{file} is damaged, or does not belong to this config and data: {files.AFRESH}"
        )
    files.write_bytes(file, "".join([HEADER, *complete]).encode())
    return count, mark


def verdict_table(out: Path, record: Record) -> Table:
    """Return a table that compares perturbations with certificates, and the gap with the bound."""
    moved, promised = read_census(out / CENSUS, usecols=(4, 6)).T
    used, value, hidden = promised > 0, record["value"], ""
    travel = record.get("model_moved")  # missing in folders of version 0.1
    if load(out / "config.toml").engine.dtype == "float32":
        hidden = (
            "the certificates ignore the rounding of float32, which can hide perturbations: use "
            "float64"
        )
    rows: list[tuple[str, object]] = [
        ("float32", hidden),
        ("largest perturbation", moved.max()),
        ("mean perturbation", moved.mean()),
        ("distance of the model from X⁰", travel),
        ("largest perturbation / distance from X⁰", moved.max() / travel if travel else None),
        ("no bound", record["refusal"]),
        ("violated" if record["status"] == "violated" else "note", record["note"]),
    ]
    if not np.isnan(promised).any():
        share = (moved[used] / promised[used]).max() if used.any() else 0.0
        rows += [
            ("largest share of its certificate", share),
            ("perturbations within their certificates", _yes(bool((moved <= promised).all()))),
            ("bound", value),
            ("bound over the range B of the loss", record.get("share")),
        ]
    rows += [*gap.start_words(record), *held_out_words(record)]
    if after := record.get("realized"):
        rows += [("certificates after the run", after["status"]),
                 ("largest perturbation / certificate after the run", after["largest_share"]),
                 ("certificate / certificate after the run", after["certified_over_realized"]),
                 ("exceeded certificates after the run", after["exceeded"])]  # fmt: skip
    if record["gap"] is None:
        rows += [(GAP, record["gap_refusal"])]
    else:
        low, high = record["gap_low"], record["gap_high"]
        within = None if value is None else _within(low, high, value)
        ends = f"{written(low, '+.4g')} to {written(high, '+.4g')}"
        rows += [(GAP, written(record["gap"], "+.4g")), ("its 95% interval", ends)]
        if within is None or within is INCONCLUSIVE:
            rows += [("why so wide", " ".join(record.get("gap_notes", [])))]
        rows += [] if within is None else [(f"{GAP} within the bound", within)]
    rows += [*prediction.rows_of(record), *_of_participation(record)]
    summary = RunDirectory(out).summary() or {}
    names = ("accuracy", "train_loss", "test_loss")
    rows += [(f"{name.replace('_', ' ')} (measured)", summary.get(name)) for name in names]
    if (influence := record.get("influence")) is not None:
        rows += [(words, influence[name]) for name, words in CALIBRATION.items()]
    constants = certificates.constant_of(record)
    title = f"{len(moved)} neighbours; the bound is {record['status']} (with {constants})"
    table = facts(title + unreleased(summary), rows, 4)
    words = [IS_NEIGHBOUR[record.get("unit", "samples")], OF_NEIGHBOURS]
    words += [PARTICIPATION_GAP] if "participation_bound" in record else []
    words[2:2] = [MEANINGS] if record["gap"] is not None else []
    table.caption = " ".join(words)
    if record.get("predicted_gap") is not None:
        table.caption += PREDICTED_GAP
    return table


def _of_participation(record: Record) -> list[tuple[str, object]]:
    """Return the rows on the participation gap: its bound, the measured gap, and the verdict."""
    rows = [*bound_rows(record), *gap_rows(record)]
    gap, value = record.get("participation_gap"), record.get("participation_bound")
    if gap is None or value is None:
        return rows
    low, high = record["participation_gap_low"], record["participation_gap_high"]
    return [*rows, ("participation gap within its bound", _within(low, high, value))]


def _within(low: float, high: float, value: float) -> Text:
    """State as text whether the gap's interval is below the bound, above the bound, or neither."""
    return INCONCLUSIVE if low <= value < high else _yes(high <= value)


def _yes(holds: bool) -> Text:
    return Text("yes") if holds else Text("no", style="bold red")
