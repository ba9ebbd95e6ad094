"""What no private run may be, refused before anything of it is written: lots that no client can
fill, noise that no account has or that spends more than its target."""

import math

import numpy as np
from torch import Tensor

from fedmuon.config.incompatible import IN_ONE_PROCESS, ONE_CLIENT
from fedmuon.config.load import Config
from fedmuon.config.schema import Privacy
from fedmuon.core.errors import InputError, rounded_up
from fedmuon.privacy import lattice
from fedmuon.privacy.accounting import LEAST_NOISE, Answer, event, require_delta
from fedmuon.privacy.client_level import ClientLevel
from fedmuon.privacy.mechanism import Mechanism

Releasing = Mechanism | ClientLevel


def require_counted(
    released: Releasing,
    rates: set[float],
    steps: int,
    blocks: int,
    delta: float,
    tensors: list[Tensor],
) -> None:
    """Refuse releases that no account has, or noise that no lattice holds in these tensors.

    An account has noise times its counted part: of K shares, that of H alone."""
    counted, shared = 1.0, False
    if isinstance(released, ClientLevel):
        counted, shared = released.counted, released.shared  # which has a lattice of its own
    if 0 < released.noise * counted < LEAST_NOISE:
        raise InputError(_too_little(released))
    for rate in rates:
        event(released.noise * counted, rate, steps, blocks)
    if released.noise:
        require_delta(delta)
        if released.on_grid and not shared:
            lattice.spacing(1.0, released.noise, sum(one[0].numel() for one in tensors))


def _too_little(released: Releasing) -> str:
    """Which keys give the account its noise, and how much of each is enough."""
    if not (isinstance(released, ClientLevel) and released.shared):
        return (
            f"[privacy] noise = {released.noise:g} is less than an account computes with: set "
            f"noise = {LEAST_NOISE:g} or more, or 0"
        )
    wanted = math.ceil((LEAST_NOISE / released.noise) ** 2 * released.cohort)  # shares of it
    share = rounded_up(wanted / released.cohort)
    few = (
        f", as only {released.shares} of {released.cohort} shares of it count (honest = "
        f"{released.honest:g})"
    ) * (released.shares < released.cohort)
    honest = f", or honest = {share}{' or more' * (share != '1')}" * (wanted <= released.cohort)
    return (
        f"[privacy] noise = {released.noise:g} is too little{few}: set noise = "
        f"{rounded_up(LEAST_NOISE / released.counted)} or more{honest}"
    )


def require_one_client(mechanism: Mechanism, config: Config) -> None:
    """Refuse correlated noise, of a mechanism of the user's, too, where it would not cancel."""
    if mechanism.turns is None or mechanism.turns.band == 1:
        return
    if config.engine.name != "inline":
        raise InputError(IN_ONE_PROCESS)
    if config.federation.clients > 1:
        raise InputError(ONE_CLIENT)


def require_lot(lot: float, sizes: np.ndarray) -> None:
    """Refuse a lot that no client can fill."""
    if lot > sizes.max():
        raise InputError(
            f"[privacy] lot = {lot:g} exceeds the {sizes.max()} samples of the largest client: "
            "lower it, or raise [data] train"
        )


def require_within(privacy: Privacy, answers: list[Answer]) -> None:
    """Refuse a noise that does not reach the target that stands beside it."""
    most = max((one.upper for one in answers), default=0.0)
    if most > privacy.epsilon:
        raise InputError(
            f"[privacy] noise = {privacy.noise:g} spends {most:.4g} ({answers[0].adjacency}), more "
            f"than epsilon = {privacy.epsilon:g}: leave one of them out"
        )
