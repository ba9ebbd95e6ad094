"""Private training in a loop of your own: the recipes dp-* and disk-* on any module.

    private = Private(model, population=len(inputs), recipe="dp-muon", lr=0.02,
                      privacy={"bound": 0.1, "noise": 2.0, "lot": 256.0})
    for lot in private.lots(steps=100):
        private.step(lot, inputs[lot.rows], labels[lot.rows])
    private.epsilon(delta=1e-5)  # joint, both ends of the bracket

Who clips, adds noise and orthogonalizes are the links of the simulator, so a trajectory here is one
there. No `.grad` is read or written: gradients of single examples exist only inside a release.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedmuon.config.incompatible import unprivate
from fedmuon.config.schema import Local, OrthogonalizerTable, Privacy
from fedmuon.core.choices import PRIVATE
from fedmuon.core.errors import InputError, shown
from fedmuon.core.guard import WANTED, Guard
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import validate
from fedmuon.core.threads import without_autocast
from fedmuon.optim.chain import Context, forbidden_gradient
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.recipe_tables import make_recipe
from fedmuon.optim.routing import routing_table
from fedmuon.privacy.accounting.composition import Answer, account, event, merge
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.noise_visibility import CAVEATS, uncertified
from fedmuon.tasks.base import Batch, Loss, Params, cross_entropy
from fedmuon.tasks.networks import NetworkTask, stateless
from fedmuon.tasks.user_task import check_each, require_numbers


class Lot(NamedTuple):
    """The rows of a Poisson lot, for one step; there may be none."""

    rows: Tensor
    number: int


class Private(Optimizer):
    """A private optimizer over all trainable parameters of a module.

    `population` is the number of examples that lots are drawn from; with a public number in
    `privacy` (`population` or `rate`) adding and removing examples is hidden, and else what they
    are. `local`, `orthogonalizer` and
    `privacy` hold the keys of these tables of a config (lr and recipe may be given by name). Hidden
    matrices are routed as in `routing_table`; learning-rate schedulers see one group.
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
            raise InputError(f"recipe '{recipe}' is not private: use one of {', '.join(PRIVATE)}")
        own = _table("local", local)
        self._local = validate(Local, {**own, "recipe": recipe, "lr": lr})
        self._map = validate(OrthogonalizerTable, _table("orthogonalizer", orthogonalizer))
        self._privacy = validate(Privacy, _table("privacy", privacy))
        _require_sound(self._privacy, self._local, population)
        self._model, self._loss, self._population, self._seed = model, loss, population, seed
        if loss is not cross_entropy and not stateless(loss):
            self._loss = check_each(loss, "loss", Guard("loss", loss))
        self._routed = {
            one.name: one.matrices[0] if one.matrices else 0 for one in routing_table(model)
        }
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if "muon" in recipe and not any(self._routed.values()):
            raise InputError("no parameter of this model is a hidden matrix: use dp-adam or dp-sgd")
        super().__init__(list(self._named.values()), {"lr": lr})
        self._tasks: dict[tuple[int, ...], NetworkTask] = {}
        self._recipe = self._built()
        self._states = self._recipe.chain.init(self._params(), {})
        self._drawn, self._open = 0, None
        self._mine = secrets.token_hex(8)  # tells this object's lots from those of a loaded state
        self._spent: dict[str, list[Event]] = {}  # by whose lots they were
        self._public = bool(self._privacy.public_rate)  # the rates of all these lots

    def lots(self, steps: int) -> Iterator[Lot]:
        """So many Poisson lots, each to be given to `step` before the next is drawn."""
        mechanism = self._mechanism()
        for _ in range(steps):
            if self._open is not None:
                raise InputError(f"lot {self._open} was drawn and not used: give it to step()")
            rows = mechanism.rows(partial(self._draw, self._drawn), self._population)
            self._open, self._drawn = self._drawn, self._drawn + 1
            self._count()
            yield Lot(torch.from_numpy(rows), self._open)

    def step(self, lot: Lot, inputs: Tensor, labels: Tensor) -> None:  # type: ignore[override]
        """One private step on the examples of a lot that `lots` has just drawn.

        `torch.autocast` has no effect within: the norms that bound an example's part must be exact.
        """
        if lot.number != self._open:
            raise InputError(
                "this lot was not drawn by lots() for this step: the accountant covers its Poisson "
                "lots only, each used once"
            )
        if not len(lot.rows) == len(inputs) == len(labels):
            raise InputError(f"lot {lot.number} has {len(lot.rows)} rows: give these, no others")
        self._open, self._recipe = None, self._built()
        params = self._params()
        with Guard("model", self._model), without_autocast():
            moved, self._states = self._recipe.chain.step(
                params, self._states, self._context(lot, params, inputs, labels)
            )
        with torch.no_grad():
            for name, value in moved.items():
                self._named[name].copy_(value[0])

    def _context(self, lot: Lot, params: Params, inputs: Tensor, labels: Tensor) -> Context:
        task = self._task_for(tuple(inputs.shape[1:]))
        draws = [partial(self._draw, lot.number)]
        released = self._mechanism().releases(task, [Batch(inputs, labels)], draws)
        return Context(params, forbidden_gradient, draws, released)

    def _task_for(self, shape: tuple[int, ...]) -> NetworkTask:
        """Made once for a shape: a task looks through the whole module."""
        if shape not in self._tasks:
            first = next(iter(self._named.values()))
            task = NetworkTask(self._model, shape, first.dtype, first.device, self._loss)
            self._tasks[shape] = task
        return self._tasks[shape]

    def epsilon(self, delta: float) -> Answer:
        """What all lots drawn so far have spent, used or not, at the noise they were drawn for."""
        named = self._mechanism().adjacency
        named = named if self._public or named != "add-remove" else "zero-out"
        answer = account(chain.from_iterable(self._spent.values()), delta, adjacency=named)
        doubt = CAVEATS[self._mechanism().secrecy]
        return uncertified(answer, doubt) if doubt else answer

    def _count(self) -> None:
        """One more lot, before anybody sees it."""
        mechanism = self._mechanism()
        blocks = mechanism.clipping.blocks(self._named)
        one = event(mechanism.noise, mechanism.rate(self._population), 1, blocks)
        self._spent[self._mine] = merge([*self._spent.get(self._mine, []), one])

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with the states of the chain and the account of the lots drawn."""
        spent = {mine: [[*astuple(one)[:3]] for one in lots] for mine, lots in self._spent.items()}
        held = {"chain": self._states, "drawn": self._drawn, "spent": spent, "public": self._public}
        return {**super().state_dict(), **held}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; what was drawn stays spent, here and where the state comes from, and a
        state that goes back to an earlier step of this object takes nothing back."""
        held = dict(state_dict)
        self._states = held.pop("chain")
        self._drawn, self._open = max(self._drawn, held.pop("drawn")), None
        self._public &= held.pop("public", False)  # states of earlier versions have none
        for mine, lots in held.pop("spent").items():
            known = self._spent.get(mine, [])
            more = [Event(rate, noise, int(count)) for rate, noise, count in lots]
            self._spent[mine] = max(known, more, key=lambda those: sum(one.count for one in those))
        super().load_state_dict(held)

    def _built(self) -> Recipe:
        local = self._local.model_copy(update={"lr": float(self.param_groups[0]["lr"])})
        routed = self._routed if "muon" in local.recipe else None
        return make_recipe(local, self._map, routed=routed, privacy=self._privacy)

    def _mechanism(self) -> Any:
        assert self._recipe.mechanism is not None
        return self._recipe.mechanism

    def _params(self) -> Params:
        return {name: param.detach()[None].clone() for name, param in self._named.items()}

    def _draw(self, number: int, what: Draw, block: int = 0) -> np.random.Generator:
        return generator(self._seed, what, step=number, block=block)


def _require_arguments(model: Any, population: Any, seed: Any, loss: Any) -> None:
    """Refuse arguments of other types."""
    wanted = {
        "model": (model, isinstance(model, nn.Module), WANTED["model"]),
        "population": (population, _is_whole(population, 1), WANTED["population"]),
        "seed": (seed, _is_whole(seed, 0), WANTED["seed"]),
        "loss": (loss, callable(loss), WANTED["loss"]),
    }
    for name, (value, sound, mend) in wanted.items():
        if not sound:
            raise InputError(f"{name} is {shown(value)}: give {mend}")
    if isinstance(model, nn.Module):
        require_numbers(model)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _table(name: str, given: Any) -> Mapping[str, Any]:
    """The keys of a table, which are words."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InputError(f"{name} is {shown(given)}: give a dictionary of keys, as in [{name}]")
    return given


def _require_sound(privacy: Privacy, local: Local, population: int) -> None:
    """Refuse what the accountant cannot cover, or what only a run of known length can mean."""
    problems = [*unprivate(privacy, local)]
    if privacy.epsilon:
        problems.append(
            "privacy epsilon is a target that only a known number of steps can be held to: leave "
            "it out, and set noise, for instance to what `fedmuon privacy sigma` finds"
        )
    elif "noise" not in privacy.model_fields_set:
        problems.append(
            "privacy noise is not set, so epsilon would be infinite: set it, for instance to what "
            "`fedmuon privacy sigma` finds (noise = 0 is for tests without privacy)"
        )
    for name in ("trust", "honest", "cohorts", "state_weight", "noise_correlation", "band"):
        if getattr(privacy, name) != getattr(Privacy(), name):
            key = name.replace("_", "-")
            problems.append(f"privacy {key} is not read in a loop of your own: leave it out")
    if privacy.lot > population and not privacy.public_rate:
        problems.append(
            f"privacy lot = {privacy.lot:g} exceeds population = {population}: lower it"
        )
    if privacy.sampling != "poisson":
        problems.append(
            f"privacy sampling = '{privacy.sampling}' has no place in a loop of your own, which "
            "takes Poisson lots: leave it out"
        )
    if problems:
        raise InputError("; ".join(problems))


Make = Callable[..., Private]
DPSGD: Make = partial(Private, recipe="dp-sgd")
DPAdam: Make = partial(Private, recipe="dp-adam")
DPMuon: Make = partial(Private, recipe="dp-muon")
DPMuonBC: Make = partial(Private, recipe="dp-muonbc")
