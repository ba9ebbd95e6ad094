"""The shift of the worst measured client neighbour after each round, and its certificate.

The neighbour is the one in neighbours.csv that moves the final model furthest. Its certificate
after a round is that of the same run if it had ended with this round.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from fedmuon.analysis import Realized
from fedmuon.analysis.report.tables import SHIFTS
from fedmuon.experiments.stability.certificates import CertifiedSetting, certify
from fedmuon.experiments.stability.client_neighbours import FILE as REPLACED
from fedmuon.experiments.stability.client_neighbours import DrawnClients, read_attacks
from fedmuon.experiments.stability.figure import SHIFTS_FILE
from fedmuon.experiments.stability.finished_run import CENSUS, FinishedRun, read_census
from fedmuon.federated.experiment import Engine
from fedmuon.federated.neighbour_runs import distances, neighbour_rounds

POINTS = 100  # maximum number of rounds with a row


def certificates_by_round(case: CertifiedSetting, rounds: Sequence[int]) -> np.ndarray:
    """Return the certificates of the run as if it had ended after each of the given rounds.

    Args:
        case: A run whose schedule is known.
        rounds: Numbers of rounds, each at least 1.

    Returns:
        The certificates [len(rounds), N], which are nan without a certificate.
    """
    return np.array([_after(case, count) for count in rounds])


def _after(case: CertifiedSetting, rounds: int) -> np.ndarray:
    assert isinstance(case.participation, Realized)
    federation = case.config.federation.model_copy(update={"rounds": rounds})
    factors, gaps = case.factors, case.gaps
    shorter = dataclasses.replace(
        case,
        config=case.config.model_copy(update={"federation": federation}),
        participation=Realized(case.participation.schedule[:rounds], case.participation.rows),
        factors=None if factors is None else factors[:rounds],
        gaps=None if gaps is None else lambda: gaps()[:rounds],
    )
    certificates = certify(shorter).certificates
    return np.full(len(case.sizes), np.nan) if certificates is None else certificates


def shift_file(run: FinishedRun, case: CertifiedSetting, engine: Engine) -> dict[str, bytes]:
    """Return the content of shifts.csv by its name, or {} if no neighbour moved the model.

    The files neighbours.csv and replaced.csv of the run are complete.
    """
    moved = read_census(run.out / CENSUS, usecols=(4,))[:, 0]
    trial = int(moved.argmax())
    if not moved[trial] > 0:
        return {}
    attacks, seed = read_attacks(run.out / REPLACED), run.config.federation.seed
    pair = DrawnClients(run, attacks[trial : trial + 1])
    client, total = int(pair.clients[0]), run.experiment.plan.rounds
    rounds = [*range(total, 0, -math.ceil(total / POINTS))][::-1]
    models = neighbour_rounds(run.experiment, pair.stacked(), seed, engine)
    shifts = [float(distances(params)[0, 0]) for params in models]
    certificates = certificates_by_round(case, rounds)[:, client].tolist()
    lines = [
        f"{count},{trial},{client},{shifts[count - 1]!r},{certificate!r}\n"
        for count, certificate in zip(rounds, certificates, strict=True)
    ]
    return {SHIFTS_FILE: "".join([",".join(SHIFTS) + "\n", *lines]).encode()}
