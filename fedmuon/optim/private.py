"""Private training in your own loop: the optimizers dp-* and disk-* on any module.

    private = Private(model, population=len(inputs), recipe="dp-muon", lr=0.02,
                      privacy={"bound": 0.1, "noise": 2.0, "lot": 256.0})
    for lot in private.lots(steps=100):
        private.step(lot, inputs[lot.rows], labels[lot.rows])
    private.epsilon(delta=1e-5)  # joint, with both ends of the bracket

These optimizers clip, add noise and orthogonalize with the links of the simulator, so they follow
the same trajectory as a simulated run. `.grad` is not used, because gradients of single examples
are clipped and noise is added before the optimizer sees them.
"""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedmuon.config.demands import mechanism_problems
from fedmuon.config.methods import ORTHOGONALIZED, PRIVATE
from fedmuon.config.schema import Local, OrthogonalizerTable, Privacy, is_default, reads
from fedmuon.core.errors import WANTED, Guard, InputError, shown
from fedmuon.core.rng import Draw, generator, sample_keys
from fedmuon.core.tables import validate, value_of
from fedmuon.core.threads import without_autocast
from fedmuon.optim.chain import Context, forbidden_gradient
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.recipes import make_recipe
from fedmuon.optim.routing import routing_table
from fedmuon.privacy.accounting.composition import Answer, account, event, merge
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.noise import CAVEATS, uncertified
from fedmuon.tasks.base import Batch, Loss, Params, cross_entropy
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.thread_copies import stateless
from fedmuon.tasks.user_task import check_each, require_numbers


class Lot(NamedTuple):
    """The examples of one private step: a Poisson lot, which may be empty.

    Attributes:
        rows: Indices `[lot]` of the examples, int64.
        number: Number of the lot, counted from 0.

    Example:
        >>> import torch
        >>> from fedmuon.optim import DPSGD
        >>> model, privacy = torch.nn.Linear(4, 2), {"noise": 2.0, "lot": 20.0}
        >>> private = DPSGD(model, population=100, privacy=privacy)
        >>> lot = next(private.lots(steps=1))
        >>> lot.number, lot.rows.dtype
        (0, torch.int64)
    """

    rows: Tensor
    number: int


class Private(Optimizer):
    """A private optimizer over all trainable parameters of a module.

    `routing_table` shows which parameters are hidden matrices. The optimizer has one parameter
    group, which learning-rate schedulers can change.

    Args:
        model: The module.
        population: Number of examples from which lots are drawn. The guarantee covers a change of
            an example. If `privacy` sets `population` or `rate`, the guarantee covers the addition
            or removal of an example.
        recipe: Name of a private optimizer, such as "dp-muon", "dp-adam" or "disk-muon".
        lr: Step size η.
        loss: Function from `(outputs, targets)` to one number per example `[examples]`.
        local: Further keys of the config table `[local]`.
        orthogonalizer: Keys of the table `[orthogonalizer]`.
        privacy: Keys of the table `[privacy]`, such as `{"bound": 0.1, "noise": 2.0, "lot":
            256.0}`.
        seed: Seed of the lots, and of the noise if the noise is reproducible.

    Raises:
        InputError: If a custom loop or the privacy accountant does not support an option.

    Example:
        >>> import torch
        >>> from fedmuon.optim import Private
        >>> inputs, labels = torch.randn(100, 4), torch.randint(2, (100,))
        >>> model = torch.nn.Linear(4, 2)
        >>> private = Private(model, population=100, recipe="dp-adam", lr=0.01,
        ...                   privacy={"bound": 0.1, "noise": 2.0, "lot": 20.0})
        >>> for lot in private.lots(steps=3):
        ...     private.step(lot, inputs[lot.rows], labels[lot.rows])
        >>> round(private.epsilon(delta=1e-3).upper, 2)
        0.96
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        population: int,
        recipe: str = "dp-muon",
        lr: float = 0.02,
        loss: Loss = cross_entropy,
        local: Mapping[str, Any] | None = None,
        orthogonalizer: Mapping[str, Any] | None = None,
        privacy: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        _require_arguments(model, population, seed, loss)
        if recipe not in PRIVATE:
            raise InputError(f"recipe '{recipe}' is not private. Use one of {', '.join(PRIVATE)}.")
        table = _table("local", local)
        self._local = validate(Local, {**table, "recipe": recipe, "lr": lr})
        self._orthogonalizer = validate(
            OrthogonalizerTable, _table("orthogonalizer", orthogonalizer)
        )
        self._privacy = validate(Privacy, _table("privacy", privacy))
        _require_sound(self._privacy, self._local, self._orthogonalizer, population)
        self._model, self._loss, self._population, self._seed = model, loss, population, seed
        if loss is not cross_entropy and not stateless(loss):
            self._loss = check_each(loss, "loss", Guard("loss", loss))
        self._routes = {
            row.name: row.matrices[0] if row.matrices else 0 for row in routing_table(model)
        }
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if recipe in ORTHOGONALIZED and not any(self._routes.values()):
            raise InputError(
                f"no parameter of this model is a hidden matrix, so recipe '{recipe}' has "
                "nothing to orthogonalize. Use dp-adam or dp-sgd."
            )
        super().__init__(list(self._parameters.values()), {"lr": lr})
        self._tasks: dict[tuple[int, ...], NetworkTask] = {}
        self._recipe = self._current_recipe()
        self._chain_states = self._recipe.chain.init(self._params(), {})
        self._lots_drawn, self._open_lot = 0, None
        self._identity = secrets.token_hex(8)  # distinguishes our lots from those of a loaded state
        self._events: dict[str, list[Event]] = {}  # by the object that drew the lots
        self._public = bool(self._privacy.public_rate)  # whether all these lots had a public rate

    def lots(self, steps: int) -> Iterator[Lot]:
        """Draw Poisson lots. Pass each lot to `step` before you draw the next one.

        Args:
            steps: Number of lots.

        Returns:
            An iterator over the lots.

        Raises:
            InputError: If the last lot was not passed to `step`.
        """
        mechanism = self._mechanism()
        for _ in range(steps):
            if self._open_lot is not None:
                raise InputError(
                    f"lot {self._open_lot} was drawn but not used. Pass this lot to step() "
                    "before you draw the next lot."
                )
            rows = mechanism.rows(
                partial(generator, self._seed, step=self._lots_drawn), self._population
            )
            self._open_lot, self._lots_drawn = self._lots_drawn, self._lots_drawn + 1
            # Count the lot before the caller receives it.
            blocks = mechanism.clipping.blocks(self._parameters)
            spent = event(mechanism.noise, mechanism.rate(self._population), 1, blocks)
            self._events[self._identity] = merge([*self._events.get(self._identity, []), spent])
            yield Lot(torch.from_numpy(rows), self._open_lot)

    def step(self, lot: Lot, inputs: Tensor, labels: Tensor) -> None:  # type: ignore[override]
        """Take one private step on the lot that `lots` has just drawn.

        `torch.autocast` has no effect, because the norms that bound an example's contribution must
        be exact.

        Args:
            lot: The lot.
            inputs: Inputs `[lot, ...]` of the lot's examples, in the order of `lot.rows`.
            labels: Labels `[lot, ...]` of the lot's examples.

        Raises:
            InputError: If the lot was used before, or the number of examples differs from the size
                of the lot.
        """
        if lot.number != self._open_lot:
            last = f"lots() drew lot {self._open_lot} last"
            wrong = "all lots of lots() were already used" if self._open_lot is None else last
            raise InputError(
                f"step() received lot {lot.number}, but {wrong}. "
                "The accountant counts each drawn lot once. Pass each lot to step() only once, and "
                "before you draw the next lot."
            )
        if not len(lot.rows) == len(inputs) == len(labels):
            raise InputError(
                f"lot {lot.number} has {len(lot.rows)} examples, but step() received {len(inputs)} "
                f"inputs and {len(labels)} labels. Pass exactly the examples of lot.rows."
            )
        self._open_lot, self._recipe = None, self._current_recipe()
        params, shape = self._params(), tuple(inputs.shape[1:])
        with Guard("model", self._model), without_autocast():
            if shape not in self._tasks:  # created once, because it inspects the whole module
                first = next(iter(self._parameters.values()))
                self._tasks[shape] = NetworkTask(
                    self._model, shape, first.dtype, first.device, self._loss
                )
            draws = [partial(generator, self._seed, step=lot.number)]
            keys = sample_keys(draws[0](Draw.DROPOUT), lot.rows.numpy(), self._population)
            batches = [Batch(inputs, labels, keys=torch.from_numpy(keys))]
            released = self._mechanism().releases(self._tasks[shape], batches, draws)
            context = Context(params, forbidden_gradient, draws, released)
            moved, self._chain_states = self._recipe.chain.step(params, self._chain_states, context)
        with torch.no_grad():
            for name, value in moved.items():
                self._parameters[name].copy_(value[0])

    def epsilon(self, delta: float) -> Answer:
        """Return the privacy parameter ε of all lots drawn so far.

        Each drawn lot counts, even if it was not used, with the noise at the time of the draw.

        Args:
            delta: Privacy parameter δ.

        Returns:
            A lower and an upper bound of ε, and the assumptions of the guarantee.
        """
        adjacency = self._mechanism().adjacency
        # Removing one sample would move others to other rows, and change their dropout masks.
        moved = not self._public or any(task.keyed for task in self._tasks.values())
        adjacency = "zero-out" if moved and adjacency == "add-remove" else adjacency
        answer = account(chain.from_iterable(self._events.values()), delta, adjacency=adjacency)
        doubt = CAVEATS[self._mechanism().secrecy]
        return uncertified(answer, doubt) if doubt else answer

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in torch, with the link states and the record of drawn lots."""
        spent = {
            owner: [[*astuple(release)[:3]] for release in lots]
            for owner, lots in self._events.items()
        }
        content = {
            "chain": self._chain_states,
            "drawn": self._lots_drawn,
            "spent": spent,
            "public": self._public,
        }
        return {**super().state_dict(), **content}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as in torch. The privacy spent by this object never decreases.

        If this object has drawn more lots than the loaded state, the larger number still counts.

        Args:
            state_dict: The result of `state_dict()`.
        """
        content = dict(state_dict)
        self._chain_states = content.pop("chain")
        self._lots_drawn, self._open_lot = max(self._lots_drawn, content.pop("drawn")), None
        self._public &= content.pop("public", False)  # states of earlier versions lack this entry
        for owner, lots in content.pop("spent").items():
            recorded = self._events.get(owner, [])
            loaded = [Event(rate, noise, int(count)) for rate, noise, count in lots]
            self._events[owner] = max(
                recorded, loaded, key=lambda events: sum(release.count for release in events)
            )
        super().load_state_dict(content)

    def _current_recipe(self) -> Recipe:
        local = self._local.model_copy(update={"lr": float(self.param_groups[0]["lr"])})
        routed = self._routes if local.recipe in ORTHOGONALIZED else None
        return make_recipe(local, self._orthogonalizer, routed=routed, privacy=self._privacy)

    def _mechanism(self) -> Any:
        assert self._recipe.mechanism is not None
        return self._recipe.mechanism

    def _params(self) -> Params:
        return {name: param.detach()[None].clone() for name, param in self._parameters.items()}


def _require_arguments(model: Any, population: Any, seed: Any, loss: Any) -> None:
    """Reject arguments of the wrong type."""
    checks = {
        "model": (model, isinstance(model, nn.Module), WANTED["model"]),
        "population": (population, _is_whole(population, 1), WANTED["population"]),
        "seed": (seed, _is_whole(seed, 0), WANTED["seed"]),
        "loss": (loss, callable(loss), WANTED["loss"]),
    }
    for name, (value, sound, mend) in checks.items():
        if not sound:
            raise InputError(f"{name} is {shown(value)}, which is not valid. Pass {mend}.")
    if isinstance(model, nn.Module):
        require_numbers(model)


def _is_whole(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value < 2**63


def _table(name: str, table: Any) -> Mapping[str, Any]:
    """Check that a config table is a dictionary, and return it. None means an empty table."""
    if table is None:
        return {}
    if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
        raise InputError(
            f"{name} is {shown(table)}, which is not valid. Pass a dictionary of the keys of the "
            f"config table [{name}]."
        )
    return table


def _require_sound(
    privacy: Privacy, local: Local, orthogonalizer: OrthogonalizerTable, population: int
) -> None:
    """Reject options that the accountant does not support, or that need a known number of steps."""
    problems = [*mechanism_problems(privacy, local, orthogonalizer)]
    tables = SimpleNamespace(local=local, privacy=privacy, orthogonalizer=orthogonalizer)
    for key in ("privacy.inner-weights", "orthogonalizer.noise-floor"):
        if not is_default(key, value_of(tables, key)) and not reads(tables, key):
            name, _, option = key.partition(".")
            problems.append(
                f"{name} {option} has no effect on recipe '{local.recipe}' with the orthogonalizer "
                f"'{orthogonalizer.name}'. Leave {option} out."
            )
    if privacy.epsilon:
        problems.append(
            "privacy epsilon requires a known number of steps, but the number of steps of a custom "
            "loop is unknown in advance. Leave epsilon out, and set privacy noise. `fedmuon "
            "privacy sigma` finds the noise for an epsilon."
        )
    elif "noise" not in privacy.model_fields_set:
        problems.append(
            "privacy noise is not set, so epsilon would be infinite. Set noise. `fedmuon privacy "
            "sigma` finds the noise for an epsilon. For tests without privacy, set noise = 0."
        )
    at_level = ("trust", "honest", "cohorts", "state_weight")
    for name in (*at_level, "noise_correlation", "band", "buffers", "max_lot"):
        if getattr(privacy, name) != getattr(Privacy(), name):
            key = name.replace("_", "-")
            problems.append(f"privacy {key} has no effect in a custom loop. Leave {key} out.")
    if privacy.lot > population and not privacy.public_rate:
        problems.append(
            f"privacy lot = {privacy.lot:g} exceeds population = {population}. Lower lot."
        )
    if privacy.sampling != "poisson":
        problems.append(
            f"privacy sampling = '{privacy.sampling}' is not supported in a custom loop, which "
            "always uses Poisson lots. Leave sampling out."
        )
    if problems:
        raise InputError(" ".join(f"{problem.rstrip('.')}." for problem in problems))


class _Named(Private):
    """A private optimizer with a fixed recipe."""

    _name = ""

    def __init__(
        self,
        model: nn.Module,
        *,
        population: int,
        lr: float = 0.02,
        loss: Loss = cross_entropy,
        local: Mapping[str, Any] | None = None,
        orthogonalizer: Mapping[str, Any] | None = None,
        privacy: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            model,
            population=population,
            recipe=self._name,
            lr=lr,
            loss=loss,
            local=local,
            orthogonalizer=orthogonalizer,
            privacy=privacy,
            seed=seed,
        )


class DPSGD(_Named):
    """DP-SGD: SGD with momentum on clipped gradients with noise (Abadi et al. 2016).

    This class is `Private` with `recipe="dp-sgd"`, and has the same methods `lots`, `step` and
    `epsilon`.

    Args:
        model: The module.
        population: Number of examples from which lots are drawn. The guarantee covers a change of
            an example. If `privacy` sets `population` or `rate`, the guarantee covers the addition
            or removal of an example.
        lr: Step size η.
        loss: Function from `(outputs, targets)` to one number per example `[examples]`.
        local: Further keys of the config table `[local]`.
        orthogonalizer: Has no effect on this optimizer.
        privacy: Keys of the table `[privacy]`, such as `{"bound": 0.1, "noise": 2.0, "lot":
            256.0}`.
        seed: Seed of the lots, and of the noise if the noise is reproducible.

    Raises:
        InputError: If a custom loop or the privacy accountant does not support an option.

    Example:
        >>> import torch
        >>> from fedmuon.optim import DPSGD
        >>> inputs, labels = torch.randn(100, 4), torch.randint(2, (100,))
        >>> model = torch.nn.Linear(4, 2)
        >>> private = DPSGD(model, population=100, lr=0.02,
        ...                  privacy={"bound": 0.1, "noise": 2.0, "lot": 20.0})
        >>> for lot in private.lots(steps=2):
        ...     private.step(lot, inputs[lot.rows], labels[lot.rows])
        >>> 0 < private.epsilon(delta=1e-3).upper < 10
        True
    """

    _name = "dp-sgd"


class DPAdam(_Named):
    """DP-Adam: Adam on clipped gradients with noise.

    This class is `Private` with `recipe="dp-adam"`, and has the same methods `lots`, `step` and
    `epsilon`.

    Args:
        model: The module.
        population: Number of examples from which lots are drawn. The guarantee covers a change of
            an example. If `privacy` sets `population` or `rate`, the guarantee covers the addition
            or removal of an example.
        lr: Step size η.
        loss: Function from `(outputs, targets)` to one number per example `[examples]`.
        local: Further keys of the config table `[local]`.
        orthogonalizer: Has no effect on this optimizer.
        privacy: Keys of the table `[privacy]`, such as `{"bound": 0.1, "noise": 2.0, "lot":
            256.0}`.
        seed: Seed of the lots, and of the noise if the noise is reproducible.

    Raises:
        InputError: If a custom loop or the privacy accountant does not support an option.

    Example:
        >>> import torch
        >>> from fedmuon.optim import DPAdam
        >>> inputs, labels = torch.randn(100, 4), torch.randint(2, (100,))
        >>> model = torch.nn.Linear(4, 2)
        >>> private = DPAdam(model, population=100, lr=0.02,
        ...                  privacy={"bound": 0.1, "noise": 2.0, "lot": 20.0})
        >>> for lot in private.lots(steps=2):
        ...     private.step(lot, inputs[lot.rows], labels[lot.rows])
        >>> 0 < private.epsilon(delta=1e-3).upper < 10
        True
    """

    _name = "dp-adam"


class DPMuon(_Named):
    """DP-Muon: Muon on clipped gradients with noise (DP-Muon, Algorithm 1).

    This class is `Private` with `recipe="dp-muon"`, and has the same methods `lots`, `step` and
    `epsilon`.

    Args:
        model: The module.
        population: Number of examples from which lots are drawn. The guarantee covers a change of
            an example. If `privacy` sets `population` or `rate`, the guarantee covers the addition
            or removal of an example.
        lr: Step size η.
        loss: Function from `(outputs, targets)` to one number per example `[examples]`.
        local: Further keys of the config table `[local]`.
        orthogonalizer: Keys of the table `[orthogonalizer]`.
        privacy: Keys of the table `[privacy]`, such as `{"bound": 0.1, "noise": 2.0, "lot":
            256.0}`.
        seed: Seed of the lots, and of the noise if the noise is reproducible.

    Raises:
        InputError: If a custom loop or the privacy accountant does not support an option.

    Example:
        >>> import torch
        >>> from fedmuon.optim import DPMuon
        >>> inputs, labels = torch.randn(100, 4), torch.randint(2, (100,))
        >>> sizes = (4, 8), (8, 8), (8, 2)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
        >>> private = DPMuon(model, population=100, lr=0.02,
        ...                  privacy={"bound": 0.1, "noise": 2.0, "lot": 20.0})
        >>> for lot in private.lots(steps=2):
        ...     private.step(lot, inputs[lot.rows], labels[lot.rows])
        >>> 0 < private.epsilon(delta=1e-3).upper < 10
        True
    """

    _name = "dp-muon"


class DPMuonBC(_Named):
    """DP-MuonBC: DP-Muon with a correction of the bias that noise causes (DP-Muon, Section 4).

    This class is `Private` with `recipe="dp-muonbc"`, and has the same methods `lots`, `step` and
    `epsilon`.

    Args:
        model: The module.
        population: Number of examples from which lots are drawn. The guarantee covers a change of
            an example. If `privacy` sets `population` or `rate`, the guarantee covers the addition
            or removal of an example.
        lr: Step size η.
        loss: Function from `(outputs, targets)` to one number per example `[examples]`.
        local: Further keys of the config table `[local]`.
        orthogonalizer: Keys of the table `[orthogonalizer]`.
        privacy: Keys of the table `[privacy]`, such as `{"bound": 0.1, "noise": 2.0, "lot":
            256.0}`.
        seed: Seed of the lots, and of the noise if the noise is reproducible.

    Raises:
        InputError: If a custom loop or the privacy accountant does not support an option.

    Example:
        >>> import torch
        >>> from fedmuon.optim import DPMuonBC
        >>> inputs, labels = torch.randn(100, 4), torch.randint(2, (100,))
        >>> sizes = (4, 8), (8, 8), (8, 2)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
        >>> private = DPMuonBC(model, population=100, lr=0.02,
        ...                  privacy={"bound": 0.1, "noise": 2.0, "lot": 20.0})
        >>> for lot in private.lots(steps=2):
        ...     private.step(lot, inputs[lot.rows], labels[lot.rows])
        >>> 0 < private.epsilon(delta=1e-3).upper < 10
        True
    """

    _name = "dp-muonbc"


class DPMuonIM(_Named):
    """DP-MuonIM: DP-Muon with each example's gradient averaged over past models (DP-Muon-IM).

    The average is clipped, so a step costs as much privacy as a step of DP-Muon. The weights of the
    models are `privacy["inner-weights"]`, such as "0.5, 0.3, 0.2" for the current model and two
    past models. A step takes one gradient of each example for each model.

    This class is `Private` with `recipe="dp-muon-im"`, and has the same methods `lots`, `step` and
    `epsilon`.

    Args:
        model: The module.
        population: Number of examples from which lots are drawn. The guarantee covers a change of
            an example. If `privacy` sets `population` or `rate`, the guarantee covers the addition
            or removal of an example.
        lr: Step size η.
        loss: Function from `(outputs, targets)` to one number per example `[examples]`.
        local: Further keys of the config table `[local]`.
        orthogonalizer: Keys of the table `[orthogonalizer]`.
        privacy: Keys of the table `[privacy]`, such as `{"bound": 0.1, "noise": 2.0, "lot":
            256.0}`.
        seed: Seed of the lots, and of the noise if the noise is reproducible.

    Raises:
        InputError: If a custom loop or the privacy accountant does not support an option.

    Example:
        >>> import torch
        >>> from fedmuon.optim import DPMuonIM
        >>> inputs, labels = torch.randn(100, 4), torch.randint(2, (100,))
        >>> sizes = (4, 8), (8, 8), (8, 2)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
        >>> private = DPMuonIM(model, population=100, lr=0.02,
        ...                  privacy={"bound": 0.1, "noise": 2.0, "lot": 20.0,
        ...                             "inner-weights": "0.6, 0.4"})
        >>> for lot in private.lots(steps=2):
        ...     private.step(lot, inputs[lot.rows], labels[lot.rows])
        >>> 0 < private.epsilon(delta=1e-3).upper < 10
        True
    """

    _name = "dp-muon-im"
