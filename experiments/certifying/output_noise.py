"""Noise on the final model of a run that has certificates, which turns them into an error rate.

The published model is W + N. The entries of N are independent, Gaussian, with standard deviation s,
and drawn independently of the samples. Let c_i be the certificate of client i: no replacement of
one of its samples moves W by more than c_i = Delta_i Y_i, with Delta_i = 2 G_max / n_i.

Let Q_a be the law of the published model if sample a has the gradient 0 in every step. It does not
depend on sample a. In step t, a replacement changes the mean of n_i gradients by at most D_t / n_i,
where D_t is the diameter of the set of sample gradients, and a gradient 0 changes it by at most
G_t / n_i, where G_t is the largest norm of a sample gradient. With the constants for all models,
D_t = 2 G_t. The recursion for the distance is linear in these numbers and uses only that gradients
are smooth, which is also true without the sample. So W moves by at most c_i max_t (G_t / D_t), and
the relative entropy of two Gaussians at this distance is

    KL_a <= (c_i max_t (G_t / D_t))^2 / (2 s^2).

A replacement moves W by at most c_i, and the account uses twice the distance above, which is at
least c_i because D_t <= 2 G_t. Certificates that hold only with a high probability are refused:
the relative entropy has no limit on the other event.

`fedmuon.analysis.theory.certified_risk` derives limits of the risk of the published model from
these numbers, for any loss in [0, 1], such as the error rate.
"""

import numpy as np

from fedmuon.core import files
from fedmuon.experiments.certifying.account import Account
from fedmuon.experiments.stability.certificates import FAR_ABOVE, Certificate, CertifiedSetting
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.orthogonalize import Uncertified
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.runs.directory import PUBLISHED_MODEL
from fedmuon.runs.observers.published_model import published
from fedmuon.tasks.base import Params

NO_CERTIFICATE = (
    "noise on the output needs certificates of the clients, but {}. Use a run of the matrix task "
    "in float64 that `fedmuon bound` certifies"
)


def published_by(run: FinishedRun, params: Params, deviation: float) -> Params:
    """Return the published model of a run: the one in its folder, if it has this noise.

    Args:
        run: The run.
        params: The final model.
        deviation: The standard deviation of the noise.
    """
    if deviation != run.config.stability.output_noise:
        return published(params, deviation, run.config.federation.seed)
    files.require_sound(run.out, [PUBLISHED_MODEL])
    return run.model(PUBLISHED_MODEL.removesuffix(".safetensors"))


def gradient_share(case: CertifiedSetting) -> float:
    """Return max_t G_t / D_t, the share of a certificate by which a gradient 0 moves the model."""
    if case.reach is None:
        return 0.5
    return float(np.max(case.reach.gradients / case.reach.diameters))


def of_certificates(case: CertifiedSetting, certificate: Certificate, deviation: float) -> Account:
    """Return the account of the published model.

    Args:
        case: The facts about the run.
        certificate: The certificate of these facts.
        deviation: The standard deviation of the noise.

    Raises:
        Uncertified: If the run has no certificates.
    """
    distances, status = certificate.certificates, certificate.status
    if certificate.bound is not None:
        status = certificate.bound.status
    if distances is None or status not in ("certified", "realized"):
        raise Uncertified(
            NO_CERTIFICATE.format(certificate.refusal.rstrip(".") or f"they are {status}")
        )
    if status == "realized":
        raise Uncertified(NO_CERTIFICATE.format("they hold only for the samples of this run"))
    delta, bound = case.config.stability.delta, certificate.bound
    smoothed = case.config.orthogonalizer.name == "gaussian-smoothed-sign"
    if smoothed if bound is None else bound.failure > delta * (1 + 1e-9):
        raise Uncertified(NO_CERTIFICATE.format("they hold only with a high probability"))
    rounded_up = 1 + 2 / FAR_ABOVE  # certificates contain a bound on rounding
    moved = distances * gradient_share(case) * rounded_up
    releases = [(Event(1.0, deviation / distance),) if distance else () for distance in moved]
    return Account("example", releases, np.asarray(case.sizes, float))
