"""How far the momenta of a run keep from where the exact sign jumps: for the tube of Lemma D.12.

The rows of a softmax's gradients sum to 0, hence those of the momentum M [d, c] do; in the quotient
by the ones vector it has q = min(d, c - 1) singular values, which are the q largest of M.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmuon.config.user_objects import Own
from fedmuon.experiments.stability.exact_sign_calls import looked_at
from fedmuon.experiments.stability.measure import Laboratory


def smallest(folder: Path, given: Own) -> np.ndarray:
    """s_q(M) at all calls [R, E, K] of the run of the matrix task in the folder, which is made
    again; what rounding may have added, max(d, c) eps s_1, is taken off."""
    experiment = Laboratory.open(folder, given).experiment
    return np.array(looked_at(experiment, lambda client, model, momentum: _gap(momentum)))


def _gap(momentum: Tensor) -> float:
    d, c = momentum.shape
    s = torch.linalg.svdvals(momentum.double())
    floor = s[min(d, c - 1) - 1] - max(d, c) * torch.finfo(momentum.dtype).eps * s[0]
    return max(0.0, float(floor))
