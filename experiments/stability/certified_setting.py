"""A run as the theory sees it: what is to be judged, by what is known of it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedmuon.analysis import Realized, Run, Uniform
from fedmuon.analysis.theory.recursion import Method
from fedmuon.analysis.theory.trajectories import Reach, Start
from fedmuon.config.load import Config
from fedmuon.data.partition import weights
from fedmuon.experiments.stability.covered_recipes import method_of
from fedmuon.experiments.stability.reachable_ball import reached
from fedmuon.tasks.constants import Constants, constants

CALLER = "The caller gave {} = {:g}: nothing here proves it."


@dataclass(frozen=True)
class Case:
    """A run to judge: sizes n_i [N], the model's shape if known, and who took part.

    `l_orth` and `l_g` replace the proved constants by the caller's, `constants` those of the task
    by estimates, with their caveats; `l_map` is what the user's own map promises of itself.
    `dropped` says that a participant was left out of some round, `stopped` why a callback ended the
    run, `refusal` why there is no bound; `factors` [R] are what step sizes are times. `moved` [N]
    is the largest perturbation that neighbours of each client were seen to make. `start` is what is
    known of X0, if it is; `gaps` makes the run again and returns s_q of its momenta [R, E, K].
    """

    config: Config
    sizes: np.ndarray
    participation: Realized | Uniform
    shape: tuple[int, int] | None = None
    l_orth: float | None = None
    l_g: float | None = None
    dropped: bool = False
    constants: Constants | None = None
    caveats: tuple[str, ...] = ()
    refusal: str = ""
    l_map: float | None = None
    stopped: str = ""
    factors: np.ndarray | None = None
    moved: np.ndarray | None = None
    start: Start | None = None
    gaps: Callable[[], np.ndarray] | None = None

    @cached_property
    def reach(self) -> Reach | None:
        """The constants along the way, if none are the caller's and there are others than those of
        all models."""
        given = self.constants is not None or self.l_g is not None
        return None if given else reached(self.config, self.start, self.factors)

    @cached_property
    def run(self) -> Run:
        """The same in the words of `analysis`."""
        federation, local = self.config.federation, self.config.local
        proved = self.reach.last if self.reach else self.constants or constants()
        smoothness = proved.smoothness if self.l_g is None else self.l_g
        return Run(
            lr=local.lr,
            beta=local.momentum,
            rounds=federation.rounds,
            local_steps=local.steps,
            sizes=self.sizes,
            weights=weights(self.sizes, federation.risk_weights),
            constants=dataclasses.replace(proved, smoothness=smoothness),
            batch=local.batch,
            factors=self.factors,
            reach=self.reach,
            by_samples=self.config.federation.aggregate == "by-samples",
        )

    @property
    def aligned(self) -> bool:
        """Whether Remark 3.2 is what covers it."""
        return self.config.local.recipe == "fedmuon-aligned"

    @property
    def plain(self) -> bool:
        """Whether it is FedMuon as 001 has it, but for its steps."""
        return method_of(self.config) == Method(self.config.local.momentum)

    @property
    def exact(self) -> bool:
        """Whether it is computed in float64."""
        return self.config.engine.dtype == "float64"

    def under(self, **changes: Any) -> "Case":
        """The same under other settings of [stability]."""
        stability = self.config.stability.model_copy(update=changes)
        config = self.config.model_copy(update={"stability": stability})
        return dataclasses.replace(self, config=config)

    @property
    def given(self) -> tuple[str, ...]:
        """What rests on estimates, or on the caller's word."""
        named = (("L_orth", None if self.constants else self.l_orth), ("Lg", self.l_g))
        said = (CALLER.format(name, value) for name, value in named if value is not None)
        return (*self.caveats, *said)
