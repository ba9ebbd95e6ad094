"""The ranking of a run's replacements, kept beside it until all that it names have been run."""

import numpy as np

from fedmuon.core import files
from fedmuon.experiments.stability.influence import Ranking, ranked
from fedmuon.experiments.stability.measure import Laboratory
from fedmuon.runs.directory import RunDirectory
from fedmuon.runs.loop import OnRoundEnd, OnStart

RANKING = ".neighbours.ranking"


def kept(laboratory: Laboratory, on_round_end: OnRoundEnd, on_start: OnStart) -> Ranking:
    """What an interrupted command left there for this very run, else made anew and left there."""
    file, home = laboratory.out / RANKING, RunDirectory(laboratory.out).mark
    lines = files.whole_lines(file)
    if lines and (there := files.unsealed(lines[0], home)) is not None:
        rows = np.array(there["rows"], dtype=np.int64).reshape(-1, 3)
        return Ranking(rows, np.array(there["predicted"]), there["top"], there["pairs"])
    found = ranked(laboratory, on_round_end, on_start)
    record = {"rows": found.rows.tolist(), "predicted": found.predicted.tolist()}
    record |= {"top": found.top, "pairs": found.pairs}
    files.write_bytes(file, files.sealed(record, home).encode())
    return found
