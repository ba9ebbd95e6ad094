"""Attack all certificates of runs of the matrix task with chosen neighbours.

    python -m benchmarks.attack [--pairs 20000] [--seed 0] [--only fedmuon clipped-sign ...]

A family is an optimizer with an orthogonalizer, among all names of a config. A cell of a family
draws a random value of every other setting: momentum form, decay, schedule, batches, weights,
participants, start, shape and samples. Each cell runs as in `fedmuon stability`, in float64,
together with neighbours that `benchmarks/adversary.py` chooses. No neighbour may exceed any
certificate of its run (ball or global constants, sharp or paper).

Every second cell is calm: its orthogonalizer is almost linear, its steps are short, and its samples
have the longest possible gradients, so neighbours almost reach the certificate. As a control, these
neighbours must exceed 99% of the certificate. The exit code is 1 if a neighbour exceeds a
certificate, or if no cell reaches the control.
"""

import argparse
import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

import fedmuon
from benchmarks.adversary import search, shares
from benchmarks.attack_cells import HALF, Cell, words
from fedmuon.config.load import parse
from fedmuon.config.names import NAMES
from fedmuon.config.schema import Stability
from fedmuon.core.choices import GIVEN
from fedmuon.experiments.cli.show import shown
from fedmuon.experiments.stability import certificates, finished_run
from fedmuon.experiments.stability.certificates import has_map, method_of
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.tables import columns, facts
from fedmuon.orthogonalize import Uncertified

PLANTED = 0.99  # share of the certificate that the control must exceed
CONSTANTS = words(Stability, "constants")
KINDS = [*itertools.product(CONSTANTS, words(Stability, "lipschitz"))]
HEAD, WIDTH = ("", "cells", "pairs", *CONSTANTS, "less 1%", "above"), 100
Kind = tuple[str, str]


@dataclass(frozen=True)
class Found:
    """The result of a cell.

    Attributes:
        cell: The cell.
        status: Status of its certificates.
        pairs: Number of pairs that were tried.
        shares: For each kind of certificate, the largest distance divided by the certificate.
        above: Number of distances that exceed a certificate.
        refusal: The reason if the theory rejects the cell.
    """

    cell: Cell
    status: str
    pairs: int = 0
    shares: Mapping[Kind, float] = field(default_factory=dict)
    above: int = 0
    refusal: str = ""

    @property
    def planted(self) -> bool:
        """Whether the attack would detect certificates that are 1% too small."""
        return min(self.shares.get((one, "sharp"), 0.0) for one in CONSTANTS) > PLANTED


def attacked(cell: Cell) -> Found:
    """Run a cell, compute its certificates, and search for the worst neighbours."""
    with tempfile.TemporaryDirectory() as folder:
        case, there = _run(cell, Path(folder))
        kinds = {kind: case.under(constants=kind[0], lipschitz=kind[1]) for kind in KINDS}
        verdicts = {kind: certificates.certify(one) for kind, one in kinds.items()}
        first = verdicts["ball", "sharp"]
        if first.certificates is None:
            return Found(cell, "refused", refusal=first.refusal)
        rng = np.random.default_rng([*cell.seed, 1])
        client, moved = search(there, first.certificates, cell.admissible, rng)
    held = {
        kind: one.certificates for kind, one in verdicts.items() if one.certificates is not None
    }
    each = {kind: shares(moved, certificates[client]) for kind, certificates in held.items()}
    above = sum(int((one > 1).sum()) for one in each.values())
    status = first.bound.status if first.bound else first.status
    largest = {kind: float(one.max(initial=0.0)) for kind, one in each.items()}
    return Found(cell, status, len(moved), largest, above)


def _run(cell: Cell, folder: Path) -> tuple[certificates.CertifiedSetting, FinishedRun]:
    """Run the cell, and return its certified setting and the finished run."""
    inputs, labels = cell.samples(np.random.default_rng([*cell.seed, 2]))
    np.savez(folder / "samples.npz", inputs=inputs, labels=labels)
    tables, ends = cell.tables(cell.rate()), np.cumsum(cell.drawn["sizes"])
    more = {
        "name": "npz",
        "folder": str(folder / "samples.npz"),
        "test": len(labels) - int(ends[-1]),
    }
    made = fedmuon.run(
        {**tables, "data": more}, partition=np.split(np.arange(ends[-1]), ends[:-1]),
        orthogonalizer=HALF if cell.orth == GIVEN else None, out=folder / "run",
    )  # fmt: skip
    case = finished_run.from_directory(made.path, given=made.given)
    if case.gaps is None:  # float32 only changes the status, except for the exact sign (rejected)
        engine = case.config.engine.model_copy(update={"dtype": cell.drawn["judged as"]})
        case = dataclasses.replace(case, config=case.config.model_copy(update={"engine": engine}))
    return case, FinishedRun.open(made.path, made.given)


def families(only: Sequence[str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return the (optimizer, orthogonalizer) pairs that have certificates.

    The second result maps each other optimizer to the reason why it has no certificate.
    """
    found, refused = [], {}
    for recipe in NAMES["local.recipe"]:
        config = parse({"local": {"recipe": recipe}, "privacy": {"noise": 0.0}})
        try:
            method_of(config)
        except Uncertified as error:
            refused[recipe] = str(error).partition(". ")[0]
            continue
        maps = (*NAMES["orthogonalizer.name"], GIVEN) if has_map(config) else ("",)
        found += [(recipe, orth) for orth in maps]
    return [one for one in found if not only or set(one) & set(only)], refused


def campaign(every: Sequence[tuple[str, str]], pairs: int, seed: int) -> Iterator[Found]:
    """Attack one cell of each family, and repeat until the number of pairs is reached."""
    done = 0
    for number in itertools.count():
        for place, (recipe, orth) in enumerate(every):
            found = attacked(Cell.of(recipe, orth, number, [seed, place, number]))
            done += found.pairs
            yield found
        if done >= pairs or not done:  # stop also if the first pass found nothing to attack
            return


def table(title: str, groups: Mapping[str, Sequence[Found]]) -> Table:
    """Return a table of the attack by group.

    The columns are the number of cells and of pairs, the largest share of the sharp certificate for
    each choice of constants, the number of cells in which a 1% smaller certificate is exceeded, and
    the number of distances above a certificate.
    """
    rows = []
    for name, every in groups.items():
        most = (max(one.shares[constants, "sharp"] for one in every) for constants in CONSTANTS)
        counts = len(every), sum(one.pairs for one in every)
        found = sum(one.planted for one in every), sum(one.above for one in every)
        rows.append((name, *map(str, counts), *(f"{one:.5f}" for one in most), *map(str, found)))
    return columns(title, HEAD, rows)


def grouped(pairs: Iterable[tuple[str, Found]]) -> dict[str, list[Found]]:
    """Group results by name, in the order in which names first appear."""
    found: dict[str, list[Found]] = {}
    for name, one in pairs:
        found.setdefault(name, []).append(one)
    return found


def settings(one: Found) -> list[str]:
    """Return the settings of a cell and the status of its certificates, as texts."""
    read = [f"{axis} = {one.cell.drawn[axis]}" for axis in one.cell.read]
    return [*read, f"called {one.status}"]


def report(every: Sequence[Found], refused: Mapping[str, str]) -> Iterator[Table]:
    """Return the tables by family and by setting, and a table of rejected cases."""
    tried = [one for one in every if one.pairs]
    of_family = ((f"{one.cell.recipe} {one.cell.orth}".strip(), one) for one in tried)
    yield table("largest perturbation over certificate", grouped(of_family))
    of_setting = [(name, one) for one in tried for name in settings(one)]
    yield table("the same by setting", grouped(sorted(of_setting, key=lambda pair: pair[0])))
    why = ((one.refusal.partition(": ")[0], one) for one in every if one.refusal)
    cells = [(text, f"{len(held)} cells") for text, held in grouped(why).items()]
    yield facts("refused, hence not attacked", [*refused.items(), *cells])


def main() -> int:
    """Run the attack, print the tables, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="*", default=[], help="names of optimizers or orthogonalizers"
    )
    asked, start, every = parser.parse_args(), perf_counter(), list[Found]()
    chosen, refused = families(asked.only)
    with shown("pairs") as (watch, begin):
        begin(0, asked.pairs)
        for found in campaign(chosen, asked.pairs, asked.seed):
            every.append(found)
            watch({"done": sum(one.pairs for one in every)})
    console, above = Console(width=WIDTH), sum(one.above for one in every)
    for one in report(every, refused):
        console.print(one)
    seen, planted = sum(one.pairs for one in every), sum(one.planted for one in every)
    console.print(
        f"{seen:,} pairs in {len(every)} cells, {above} above a certificate; less 1% it is "
        f"exceeded in {planted} cells; {perf_counter() - start:.0f} s"
    )
    return int(above > 0 or not planted)


if __name__ == "__main__":
    sys.exit(main())
