"""`fedmuon stability`: a run beside its replace-one neighbours, each held to its certificate.

Replica 0 of every stack is the unperturbed run and replica s the neighbour s - 1; all share one
realization of the run's randomness, and ||X_s^R - X_0^R||_F is what replacing one sample did. For
the Gaussian-smoothed sign a certificate may fail with probability 2 alpha, as both runs must stay
clear of clipping (001, Corollary D.11).
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from fedmuon.analysis.report.numbers import written
from fedmuon.config import load as tables
from fedmuon.config.load import Config
from fedmuon.config.user_objects import NOTHING
from fedmuon.core import files
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.core.locks import held, require_place
from fedmuon.core.rng import Draw, generator
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import census, draw, stack
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.run import on_engine
from fedmuon.experiments.spending import unreleased
from fedmuon.experiments.stability import bound, gap, realized
from fedmuon.experiments.stability.influence import Ranking, require_smooth
from fedmuon.experiments.stability.measure import Laboratory
from fedmuon.experiments.stability.prediction_check import CALIBRATION, PREDICTED, calibrated, lines
from fedmuon.experiments.stability.ranking import RANKING, kept
from fedmuon.experiments.tables import facts
from fedmuon.federated.rounds import Engine, distances, run_neighbours, run_rounds
from fedmuon.runs.directory import Record, RunDirectory
from fedmuon.runs.loop import OnRoundEnd, OnStart

HEADER = "trial,client,index,replacement,perturbation,exposure,certificate\n"
CENSUS, PROGRESS = bound.CENSUS, ".neighbours.progress"
ONE_MODEL = "neighbours run on [engine] name = 'inline' or 'ray': a deployment runs one model"
SECRET_COHORTS = (
    "neighbours of a run share its participants, and [privacy] cohorts = 'poisson' draws them in "
    "secret, round by round: set cohorts = 'fixed'"
)
GAP = "population gap"  # at the clients' label shares; the test gap is of the samples held out
MEMORY, MOST = 1 << 30, 256  # bytes and neighbours of one stack


def execute(
    config: Config | None,
    out: Path,
    resume: bool = False,
    on_round_end: OnRoundEnd = lambda record: None,
    on_start: OnStart = lambda done, total: None,
) -> Record:
    """The run in `out`, its neighbours.csv and its bound.json, whose content is returned.

    `on_round_end` sees each finished stack of neighbours.
    """
    if config:
        require_measurable(config)
    with held(out):
        run(config, out, resume, more_files={CENSUS: HEADER.encode()})
        given = config.given if config else NOTHING
        laboratory = Laboratory.open(out, given)
        require_measurable(laboratory.config)
        case = bound.from_directory(out, given=given)
        verdict = bound.judge(case)
        if (finished := _ranked_before(out)) is not None:
            return finished
        with RunDirectory(out).failing():
            compared = on_engine(
                laboratory.config,
                lambda engine: _measured(laboratory, verdict, on_round_end, on_start, engine),
            )
        moved = bound.largest_moves(out / CENSUS, len(case.sizes))
        case = dataclasses.replace(case, moved=moved)
        record = bound.report(case, verdict)
        record |= gap.measured(laboratory, case, verdict) | compared[0]
        if laboratory.config.stability.realized:
            record["realized"] = realized.measured(laboratory, verdict)
        _write(out, record, compared[1])
    return record


def require_measurable(config: Config) -> None:
    """Refuse what has no neighbours that could be run, or not those that are asked for."""
    privacy, table = config.privacy, config.stability
    if config.engine.name == "deployment":
        raise InputError(ONE_MODEL)
    if privacy.level == "client" and privacy.cohorts == "poisson":
        raise InputError(SECRET_COHORTS)
    if table.realized:
        realized.require_covered(config)
    if table.neighbours == "worst":
        require_smooth(config)


def _ranked_before(out: Path) -> Record | None:
    """bound.json where the worst neighbours were ranked, which takes long, and all has ended."""
    if (out / PROGRESS).exists() or PREDICTED not in files.sums_of(out):
        return None
    files.require_sound(out, [PREDICTED, CENSUS, "bound.json"])
    return json.loads(files.read_text(out / "bound.json"))


def _measured(
    laboratory: Laboratory,
    verdict: bound.Verdict,
    on_round_end: OnRoundEnd,
    on_start: OnStart,
    engine: Engine,
) -> tuple[Record, dict[str, bytes]]:
    """Run the neighbours; of a ranking, what exact runs say of it, with predicted.csv."""
    ranking = measure(laboratory, verdict, on_round_end, on_start, engine)
    if ranking is None:
        return {}, {}
    top = bound.read_census(laboratory.out / CENSUS, usecols=(4,))[:, 0]
    drawn, size = ranking.rows[ranking.top :], stack_size(laboratory)
    parts = np.split(drawn, range(size, len(drawn), size))
    moved = np.concatenate([top, *(perturbations(laboratory, one, engine) for one in parts)])
    content = lines(ranking, _index(laboratory.data, ranking.rows), moved)
    return {"influence": calibrated(ranking, moved)}, {PREDICTED: content}


def _write(out: Path, record: Record, more: dict[str, bytes]) -> None:
    """bound.json and `more`, and the sums of them and of neighbours.csv, to which no line is added
    any more."""
    content = (json.dumps(record, indent=2, allow_nan=False) + "\n").encode()
    made = {"bound.json": content, **more}
    files.announce(out, {**made, CENSUS: files.read_bytes(out / CENSUS)})
    for name, held_there in made.items():
        files.write_bytes(out / name, held_there)
    with files.mendable(out, "write to"):
        for name in (RANKING, PROGRESS):
            (out / name).unlink(missing_ok=True)


def measure(
    laboratory: Laboratory,
    verdict: bound.Verdict,
    on_round_end: OnRoundEnd,
    on_start: OnStart,
    engine: Engine = run_rounds,
) -> Ranking | None:
    """Run the neighbours that neighbours.csv lacks, stack by stack, and append their lines; the
    ranking that they come from, if any."""
    worst = laboratory.config.stability.neighbours == "worst"
    ranking = kept(laboratory, on_round_end, on_start) if worst else None
    drawn = pick(laboratory) if ranking is None else ranking.rows[: ranking.top]
    heads = _heads(laboratory.data, drawn)
    file, size = laboratory.out / CENSUS, stack_size(laboratory)
    done, mark = _cut_back(file, heads)
    on_start(done, len(drawn))
    for start in range(done, len(drawn), size):
        part = slice(start, start + size)
        moved = perturbations(laboratory, drawn[part], engine)
        tails = _tails(verdict, drawn[part, 0], moved)
        lines = [a + b for a, b in zip(heads[part], tails, strict=True)]
        require_place(laboratory.out)
        files.append(file, lines, durable=True)
        done, mark = done + len(lines), files.crc("".join(lines), mark)
        noted = files.sealed({"lines": done, "crc": mark})
        files.write_bytes(file.with_name(PROGRESS), noted.encode())
        on_round_end({"done": done, "largest": float(moved.max())})
    return ranking


def pick(laboratory: Laboratory) -> np.ndarray:
    """(client, position, replacement) of every neighbour, [T, 3] int64."""
    config, data, source = laboratory.config, laboratory.data, laboratory.source
    seed, table = config.federation.seed, config.stability
    if table.neighbours == "all":
        return census(data, source, seed)
    assert table.neighbours != "worst"  # which are ranked, not drawn
    return draw(data, source, table.trials, seed, table.neighbours)


def stack_size(laboratory: Laboratory) -> int:
    """How many neighbours fit into one stack: a function of the config, so that runs repeat.

    A replica holds about 8 copies of its parameters, two a reply, and 4 of the cohort's logits.
    """
    federation, task = laboratory.config.federation, laboratory.experiment.task
    entries = sum(value.numel() for value in task.initial(generator(0, Draw.INITIAL)).values())
    rows = int(np.sort(laboratory.data.sizes)[-federation.per_round :].sum())
    doubles = entries * (8 + 2 * federation.per_round) + 4 * laboratory.source.classes * rows
    return max(1, min(MOST, MEMORY // (8 * doubles) - 1))


def perturbations(laboratory: Laboratory, drawn: np.ndarray, engine: Engine) -> np.ndarray:
    """||X_s^R - X_0^R||_F of the neighbours drawn [T, 3], [T].

    Neighbours in a client that never took part are 0 without a run: no step reads its samples, but
    a replica's place in the stack can change its last bit.
    """
    table, moved = laboratory.config, np.zeros(len(drawn))
    taking_part = np.isin(drawn[:, 0], laboratory.experiment.plan.schedule())
    if taking_part.any():
        neighbours = stack(laboratory.source, drawn[taking_part], table.data.normalize)
        ends = run_neighbours(laboratory.experiment, neighbours, table.federation.seed, engine)
        moved[taking_part] = distances(ends)[0]
    if not np.isfinite(moved).all():
        raise NonFinite("a neighbour is not finite after the last round: lower [local] lr")
    return moved


def _index(data: FederatedData, drawn: np.ndarray) -> np.ndarray:
    """Where the replaced samples [T] are in the source."""
    return data.train_index[data.order[data.offsets[drawn[:, 0]] + drawn[:, 1]]]


def _heads(data: FederatedData, drawn: np.ndarray) -> list[str]:
    """`trial,client,index,replacement,` of every line; indices count in the source's order."""
    index = _index(data, drawn)
    rows = zip(drawn[:, 0].tolist(), index.tolist(), drawn[:, 2].tolist(), strict=True)
    return [f"{t},{client},{old},{new}," for t, (client, old, new) in enumerate(rows)]


def _tails(verdict: bound.Verdict, client: np.ndarray, moved: np.ndarray) -> list[str]:
    """`perturbation,exposure,certificate`; nan where the certificate is refused."""
    unknown = np.full(len(moved), np.nan)
    promised = [
        unknown if every is None else every[client]
        for every in (verdict.exposures, verdict.certificates)
    ]
    return [f"{a!r},{b!r},{c!r}\n" for a, b, c in np.stack([moved, *promised], 1).tolist()]


def _cut_back(file: Path, heads: list[str]) -> tuple[int, int]:
    """Keep the header and the whole stacks of an interrupted file, as the progress beside it knows
    them; how many neighbours they are, and their check."""
    _, *lines = files.whole_lines(file) or [HEADER]
    start = files.crc(RunDirectory(file.parent).mark)  # lines of another run have another check
    count, mark = _known(file, lines, start)
    kept = lines[:count]
    fits = [line.startswith(head) for line, head in zip(kept, heads, strict=False)]
    if sum(fits) < count or files.crc("".join(kept), start) != mark:
        raise InputError(f"{file} is damaged, or not of this config and data: {files.AFRESH}")
    files.write_bytes(file, "".join([HEADER, *kept]).encode())
    return count, mark


def _known(file: Path, lines: list[str], start: int) -> tuple[int, int]:
    """How many lines are known to be whole, and their check; all of a file that has its sum."""
    progress = file.with_name(PROGRESS)
    if not progress.exists() and CENSUS in files.sums_of(file.parent):
        files.require_sound(file.parent, [CENSUS])
        return len(lines), files.crc("".join(lines), start)
    noted = files.whole_lines(progress)
    record = files.unsealed(noted[0]) if noted else {"lines": 0, "crc": start}
    if record is None:
        raise InputError(f"{progress} is damaged: {files.AFRESH}")
    return record["lines"], record["crc"]


def verdict_table(out: Path, record: Record) -> Table:
    """Perturbations beside certificates, the gap beside the bound."""
    moved, promised = bound.read_census(out / CENSUS, usecols=(4, 6)).T
    used, value, hidden = promised > 0, record["value"], ""
    if tables.load(out / "config.toml").engine.dtype == "float32":
        hidden = "no certificate counts its rounding, which hides perturbations: prefer float64"
    rows: list[tuple[str, object]] = [
        ("float32", hidden),
        ("largest perturbation", moved.max()),
        ("mean perturbation", moved.mean()),
        ("refused", record["refusal"]),
        ("violated" if record["status"] == "violated" else "note", record["note"]),
    ]
    if not np.isnan(promised).any():
        share = (moved[used] / promised[used]).max() if used.any() else 0.0
        rows += [
            ("largest share of its certificate", share),
            ("perturbations within", _yes(bool((moved <= promised).all()))),
            ("bound", value),
            ("bound over B", record.get("share")),
        ]
    if after := record.get("realized"):
        rows += [("certificates after the run", after["status"]),
                 ("largest share of one", after["largest_share"]),
                 ("certificate over it, at most", after["certified_over_realized"]),
                 ("above it", after["exceeded"])]  # fmt: skip
    if record["gap"] is None:
        rows += [(GAP, record["gap_refusal"])]
    else:
        rows += [(GAP, written(record["gap"], "+.4g"))]
        ends = [written(record[end], "+.4g") for end in ("gap_low", "gap_high")]
        rows += [("its 95% interval", " to ".join(ends))]
        if value is None or _is_undecided(record, value):
            rows += [("why so wide", " ".join(record.get("gap_notes", [])))]
        rows += [(f"{GAP} within", _within(record, value))] if value is not None else []
    summary = RunDirectory(out).summary() or {}
    rows += [(k.replace("_", " "), summary.get(k)) for k in ("accuracy", "train_loss", "test_loss")]
    if (found := record.get("influence")) is not None:
        rows += [(words, found[name]) for name, words in CALIBRATION.items()]
    title = f"{len(moved)} neighbours; bound with {bound.constant_of(record)}: {record['status']}"
    return facts(title + unreleased(summary), rows, 4)


def _within(record: Record, value: float) -> Text:
    """Whether the gap's whole interval is at most the bound, or above it."""
    if _is_undecided(record, value):
        return Text("undecided: its interval reaches above the bound", style="yellow")
    return _yes(record["gap_high"] <= value)


def _is_undecided(record: Record, value: float) -> bool:
    return record["gap_low"] <= value < record["gap_high"]


def _yes(holds: bool) -> Text:
    return Text("yes") if holds else Text("no", style="bold red")
