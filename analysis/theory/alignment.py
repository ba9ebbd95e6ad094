"""The stability recursion of FedMuon with local-global alignment (001, Remark 3.2).

The paper leaves the perturbation of the global direction D to "a separate recursion". It is the one
of `methods`, which certifies every recipe, where steps and constants are the same in all rounds and
nothing else is set: there is its proof, with alpha the `alignment`. `fedmuon bound` and `stability`
get there by the config of the recipe `fedmuon-aligned`; this is for callers with numbers alone.
"""

import numpy as np

from fedmuon.analysis.theory.checks import entries, positive, whole
from fedmuon.analysis.theory.methods import Method, method_amplification
from fedmuon.analysis.theory.recursion import of_rounds
from fedmuon.core.errors import InputError


def aligned_amplification(
    lr: float,
    beta: float,
    l_orth: float,
    l_g: float,
    rounds: int,
    local_steps: int = 1,
    alignment: float = 0.0,
) -> np.ndarray:
    """a_s of the aligned run, [R], infinite where it overflows; with alignment 0 it is 001 (8)."""
    if lr == 0:
        raise InputError("lr = 0 is refused: the global direction divides by it.")
    horizon = whole("rounds", rounds), whole("local_steps", local_steps)
    entries("rounds times local_steps", horizon[0] * horizon[1])
    rates = np.full(horizon[0], positive("lr", lr))
    how = Method(beta, alignment=alignment)
    return of_rounds(method_amplification(how, rates, l_orth, l_g, horizon[1]))
