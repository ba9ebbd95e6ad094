"""`fedmuon stability`: a run beside its replace-one neighbours, each held to its certificate.

Replica 0 of every stack is the unperturbed run and replica s the neighbour s - 1; all share one
realization of the run's randomness, and ||X_s^R - X_0^R||_F is what replacing one sample did. For
the Gaussian-smoothed sign a certificate may fail with probability 2 alpha, as both runs must stay
clear of clipping (001, Corollary D.11).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedmuon import config as tables
from fedmuon.analysis import MeasuredGap
from fedmuon.config import Config
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import census, draw, stack
from fedmuon.data.source import Source
from fedmuon.drive import Begin, Watch
from fedmuon.errors import InputError, NonFinite
from fedmuon.experiments.laboratory import bound
from fedmuon.experiments.laboratory.influence import worst
from fedmuon.experiments.laboratory.measure import measured_losses
from fedmuon.experiments.run import execute as run
from fedmuon.federated import setup
from fedmuon.federated.coupled import coupled, distances
from fedmuon.federated.simulate import Engine, Experiment, rounds
from fedmuon.files import (
    AFRESH,
    announce,
    append,
    crc,
    mendable,
    require_sound,
    sealed,
    sums_of,
    unsealed,
    whole_lines,
    write_bytes,
)
from fedmuon.locks import held, require_place
from fedmuon.own import NOTHING, Own
from fedmuon.randomness import Draw, generator
from fedmuon.storage import Record, RunDirectory, read_tensors

HEADER = "trial,client,index,replacement,perturbation,exposure,certificate\n"
CENSUS, PROGRESS = "neighbours.csv", ".neighbours.progress"
MEMORY, MOST = 1 << 30, 256  # bytes and neighbours of one stack


@dataclass(frozen=True)
class Laboratory:
    """A finished run with what its neighbours need."""

    config: Config
    source: Source
    data: FederatedData
    experiment: Experiment
    out: Path

    @classmethod
    def open(cls, out: Path, given: Own = NOTHING) -> "Laboratory":
        """The run in the directory, with its samples, some of which may have been given."""
        config = tables.load(out / "config.toml").beside(given)
        source = setup.source(config)
        data = setup.federated_data(config, source)
        experiment = setup.experiment(config, data, source.classes)
        return cls(config, source, data, experiment, out)


def in_doubles(config: Config) -> Config:
    """The config in float64, unless it names a precision: rounding hides small perturbations."""
    if "dtype" in config.engine.model_fields_set:
        return config
    engine = config.engine.model_copy(update={"dtype": "float64"})
    return config.model_copy(update={"engine": engine})


def execute(
    config: Config | None,
    out: Path,
    resume: bool = False,
    watch: Watch = lambda record: None,
    begun: Begin = lambda done, total: None,
) -> Record:
    """The run in `out`, its neighbours.csv and its bound.json, whose content is returned.

    `watch` sees each finished stack of neighbours.
    """
    with held(out):
        run(config, out, resume)
        given = config.given if config else NOTHING
        laboratory = Laboratory.open(out, given)
        case = bound.from_directory(out, given=given)
        verdict = bound.judge(case)
        on_engine(
            laboratory.config, lambda engine: measure(laboratory, verdict, watch, begun, engine)
        )
        record = bound.report(case, verdict) | _gap(laboratory)
        _write(out, record)
    return record


def _write(out: Path, record: Record) -> None:
    """bound.json, and the sums of it and of neighbours.csv, to which no line is added any more."""
    content = (json.dumps(record, indent=2, allow_nan=False) + "\n").encode()
    announce(out, {"bound.json": content, CENSUS: (out / CENSUS).read_bytes()})
    write_bytes(out / "bound.json", content)
    with mendable(out, "write to"):
        (out / PROGRESS).unlink(missing_ok=True)


def on_engine(config: Config, work: Callable[[Engine], None]) -> None:
    """Do `work` with the engine that the config names."""
    if config.engine.name == "inline":
        return work(rounds)
    if config.engine.name == "deployment":
        raise InputError(
            "neighbours run on [engine] name = 'inline' or 'ray': a deployment runs one model"
        )
    from fedmuon.experiments.engines import ray_engine

    return ray_engine.on_grid(config, lambda grid: work(ray_engine.engine(config, grid)))


def measure(
    laboratory: Laboratory,
    verdict: bound.Verdict,
    watch: Watch,
    begun: Begin,
    engine: Engine = rounds,
) -> None:
    """Run the neighbours that neighbours.csv lacks, stack by stack, and append their lines."""
    drawn = pick(laboratory, verdict)
    heads = _heads(laboratory.data, drawn)
    file, size = laboratory.out / CENSUS, stack_size(laboratory)
    done, mark = _cut_back(file, heads)
    begun(done, len(drawn))
    for start in range(done, len(drawn), size):
        part = slice(start, start + size)
        moved = perturbations(laboratory, drawn[part], engine)
        tails = _tails(verdict, drawn[part, 0], moved)
        lines = [a + b for a, b in zip(heads[part], tails, strict=True)]
        require_place(laboratory.out)
        append(file, lines, durable=True)
        done, mark = done + len(lines), crc("".join(lines), mark)
        write_bytes(file.with_name(PROGRESS), sealed({"lines": done, "crc": mark}).encode())
        watch({"done": done, "largest": float(moved.max())})


def pick(laboratory: Laboratory, verdict: bound.Verdict) -> np.ndarray:
    """(client, position, replacement) of every neighbour, [T, 3] int64."""
    config, data, source = laboratory.config, laboratory.data, laboratory.source
    seed, table = config.federation.seed, config.stability
    if table.neighbours == "all":
        return census(data, source, seed)
    if table.neighbours == "worst":
        return worst(laboratory.out, config, data, source, laboratory.experiment, verdict.exposures)
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
    moved = np.zeros(len(drawn))
    taking_part = np.isin(drawn[:, 0], laboratory.experiment.plan.schedule())
    if taking_part.any():
        moved[taking_part] = _simulated(laboratory, drawn[taking_part], engine)
    if not np.isfinite(moved).all():
        raise NonFinite("a neighbour is not finite after the last round: lower [local] lr")
    return moved


def _simulated(laboratory: Laboratory, drawn: np.ndarray, engine: Engine) -> np.ndarray:
    """The same by one stack with the run itself as replica 0."""
    table = laboratory.config
    neighbours = stack(laboratory.source, drawn, table.data.normalize)
    ends = coupled(laboratory.experiment, neighbours, table.federation.seed, engine)
    return distances(ends)[0]


def _heads(data: FederatedData, drawn: np.ndarray) -> list[str]:
    """`trial,client,index,replacement,` of every line; indices count in the source's order."""
    index = data.train_index[data.order[data.offsets[drawn[:, 0]] + drawn[:, 1]]]
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
    _, *lines = whole_lines(file) or [HEADER]
    start = crc(RunDirectory(file.parent).mark)  # lines of another run have another check
    count, mark = _known(file, lines, start)
    kept = lines[:count]
    fits = [line.startswith(head) for line, head in zip(kept, heads, strict=False)]
    if sum(fits) < count or crc("".join(kept), start) != mark:
        raise InputError(f"{file} is damaged, or not of this config and data: {AFRESH}")
    write_bytes(file, "".join([HEADER, *kept]).encode())
    return count, mark


def _known(file: Path, lines: list[str], start: int) -> tuple[int, int]:
    """How many lines are known to be whole, and their check; all of a file that has its sum."""
    progress = file.with_name(PROGRESS)
    if not progress.exists() and CENSUS in sums_of(file.parent):
        require_sound(file.parent, [CENSUS])
        return len(lines), crc("".join(lines), start)
    noted = whole_lines(progress)
    record = unsealed(noted[0]) if noted else {"lines": 0, "crc": start}
    if record is None:
        raise InputError(f"{progress} is damaged: {AFRESH}")
    return record["lines"], record["crc"]


def _gap(laboratory: Laboratory) -> Record:
    """gap, gap_low and gap_high, or nulls and `gap_refusal` where no interval can be had."""
    try:
        found = gap(laboratory)
    except InputError as error:
        return {"gap": None, "gap_low": None, "gap_high": None, "gap_refusal": str(error)}
    return {"gap": found.gap, "gap_low": found.low, "gap_high": found.high}


def gap(laboratory: Laboratory) -> MeasuredGap:
    """F - F_hat of the finished model, F at the clients' own label shares."""
    experiment = laboratory.experiment
    found = read_tensors(laboratory.out / "model.safetensors")[0]
    params = {
        name: value[None].to(experiment.shards.inputs.device) for name, value in found.items()
    }
    classes = laboratory.source.classes
    return measured_losses(laboratory.config, laboratory.data, classes, experiment, params)[0].gap


def verdict_table(out: Path, record: Record) -> Table:
    """Perturbations beside certificates, the gap beside the bound."""
    moved, promised = np.loadtxt(out / CENSUS, delimiter=",", skiprows=1, usecols=(4, 6), ndmin=2).T
    title = f"{len(moved)} neighbours; bound with {bound.constant_of(record)}: {record['status']}"
    shown = Table("", "", title=escape(title), title_justify="left")
    if tables.load(out / "config.toml").engine.dtype == "float32":
        shown.add_row("float32", "rounding hides small perturbations: prefer float64")
    shown.add_row("largest perturbation", f"{moved.max():.4g}")
    shown.add_row("mean perturbation", f"{moved.mean():.4g}")
    if record["value"] is None:
        shown.add_row("refused", escape(record["refusal"]))
    else:
        used = promised > 0
        ratio = (moved[used] / promised[used]).max() if used.any() else 0.0
        shown.add_row("largest share of its certificate", f"{ratio:.3g}")
        shown.add_row("perturbations within", _yes(bool((moved <= promised).all())))
        shown.add_row("bound", f"{record['value']:.4g}")
    return _with_gap(shown, record)


def _with_gap(shown: Table, record: Record) -> Table:
    if record["gap"] is None:
        shown.add_row("gap", escape(record["gap_refusal"]))
        return shown
    interval = f"{record['gap']:+.4g} [{record['gap_low']:+.4g}, {record['gap_high']:+.4g}]"
    shown.add_row("gap", escape(interval))
    if record["value"] is not None:
        shown.add_row("gap within", _yes(record["gap"] <= record["value"]))
    return shown


def _yes(holds: bool) -> str:
    return "yes" if holds else "[bold red]no[/]"
