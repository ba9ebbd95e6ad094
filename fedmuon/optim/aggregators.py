"""What the server makes of a round's replies: a function of them, by name or the user's own.

A function sees one model at a time: `replies` have `.client`, `.params` and `.states` (name ->
tensor), `.samples` (n_i) and `.loss`, in order of the client, and it returns name -> tensor like
`.params`; it keeps nothing from call to call. States that come back are combined by the same
function, as their parameters would be.

What lasts from round to round is declared: `Aggregator(apply, init=init)`, with `init(params) ->
state` and `apply(replies, state) -> (params, state)`, mappings of names to tensors. The state is
part of the server's, hence of every checkpoint; each state that comes back has one of its own.
The theory of 001 follows the plain mean: of any other there is no certificate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.core.guard import Guard, called, mapping
from fedmuon.core.hidden_state import Held
from fedmuon.core.registry import Registry
from fedmuon.tasks.base import Params, stack_results

Function = Callable[..., Any]  # (replies) -> params, or (replies, state) -> (params, state)
Init = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Aggregator:
    """A function of replies; `stacked` ones take those of a whole stack [S, ...] at once. `shares`
    says of a weighted mean the weight of each reply, which sum to 1. With `init` it has a state,
    which is saved and resumed: `apply(replies, state) -> (params, state)`."""

    apply: Function
    stacked: bool = False
    averages: bool = False  # with weight 1/K: what the theory follows
    shares: Callable[[Sequence[Any]], Sequence[float]] | None = None
    init: Init | None = None

    def __post_init__(self) -> None:
        for name in ("apply", "shares", "init"):
            if (one := getattr(self, name)) is not None and not callable(one):
                raise InputError(
                    f"{name} of an Aggregator has type {type(one).__name__}: give a function"
                )
        if self.init is not None and self.averages:
            raise InputError(
                "an Aggregator with averages = True is the plain mean, which has no state: leave "
                "init out, or set averages = False"
            )

    def __call__(self, replies: Sequence[Any], *state: Mapping[str, Tensor]) -> Any:
        """Combine the replies; with a state, return the next state as well."""
        return self.apply(replies, *state)

    def combine(self, replies: Sequence[Any], state: Params | None = None) -> tuple[Params, Params]:
        """Combine the replies of a stack of models, and check what comes of it.

        Args:
            replies: Replies whose tensors have a leading replica axis [S, ...]. An aggregator that
                is not `stacked` sees them replica by replica.
            state: The aggregator's state [S, ...]; None if it has none.

        Returns:
            The combined parameters, and the next state (empty without one).

        Raises:
            InputError: The function returned something unlike the replies.
        """
        like = replies[0].params
        if self.stacked:
            return self._applied(replies, state, like)
        found, after = [], []
        for s in range(len(next(iter(like.values())))):
            alone = [
                replace(
                    reply,
                    params=_at(reply.params, s),
                    states={link: _at(held, s) for link, held in reply.states.items()},
                    loss=reply.loss[s],
                )
                for reply in replies
            ]
            own = None if state is None else _at(state, s)
            combined, kept = self._applied(alone, own, _at(like, s))
            found.append(combined)
            after.append(kept)
        return stack_results(found), stack_results(after)

    def _applied(
        self, replies: Sequence[Any], state: Params | None, like: Params
    ) -> tuple[Params, Params]:
        if state is None:
            return _checked(self.apply(replies), like), {}
        found, after = self.apply(replies, dict(state))
        kept = _checked(after, state, "its state")  # copied: a file cannot hold a tensor twice
        return _checked(found, like), {name: value.clone() for name, value in kept.items()}


def _at(tree: Params, s: int) -> Params:
    """The tensors of one replica."""
    return {name: value[s] for name, value in tree.items()}


def _checked(found: Any, like: Params, what: str = "each parameter") -> Params:
    """Reject what is no model like the clients', or no state like the one before."""
    if not isinstance(found, Mapping) or set(found) != set(like):
        raise InputError(
            f"[federation] aggregate returns no tensor for {what}: return a mapping of "
            f"{', '.join(sorted(like)[:3])}{', ...' if len(like) > 3 else ''} to tensors"
        )
    for name, value in found.items():
        held = like[name]
        alike = isinstance(value, Tensor) and (
            (value.shape, value.dtype, value.device, value.layout)
            == (held.shape, held.dtype, held.device, held.layout)
        )
        if not alike:
            raise InputError(
                f"[federation] aggregate returns for {name} what is not {tuple(held.shape)} "
                f"{held.dtype} on {held.device}: return tensors like those of the replies"
            )
    # A graph of the aggregate's own is dropped; one that the replies brought is followed (adjoint).
    return {
        name: value if like[name].requires_grad else value.detach() for name, value in found.items()
    }


def as_aggregator(found: Any, guard: Guard | None = None) -> Aggregator:
    """What was given: a value, or a function of replies; one of the user's is called within its
    `guard`, and refused once it keeps something between calls."""
    if not isinstance(found, Aggregator):
        if not callable(found):
            raise InputError(
                f"an aggregate of type {type(found).__name__} is none: give a function"
            )
        found = Aggregator(cast(Function, found))
    return found if guard is None else _within(guard, found)


def _within(guard: Guard, found: Aggregator) -> Aggregator:
    """The aggregator, whose functions are called within the guard."""
    apply = found.apply
    with guard:
        held = Held(apply)

    def unchanged(made: Any) -> Any:
        if name := held.changed():
            raise InputError(
                f"your aggregate {called(apply)} changes {name} when it is called, and a resumed "
                "run would begin without that: declare it as a state, fedmuon.Aggregator(apply, "
                "init=init) with init(params) -> state and apply(replies, state) -> (params, "
                "state), or keep it in a state of the recipe, which its server's rule changes"
            )
        return made

    def read(made: Any) -> Any:
        if found.init is None:
            return unchanged(dict(made) if isinstance(made, Mapping) else None)
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise TypeError(f"it returns a {type(made).__name__} and no pair (params, state)")
        params, state = unchanged(made)
        return mapping(params), mapping(state)

    return replace(
        found,
        apply=guard.calling(apply, read),
        init=None if found.init is None else guard.calling(found.init, mapping),
        shares=None if found.shares is None else guard.calling(found.shares, _numbers),
    )


def _numbers(shares: Any) -> list[float]:
    return [float(share) for share in shares]


AGGREGATORS: Registry[Aggregator] = Registry()


@AGGREGATORS.add("mean")
def mean() -> Aggregator:
    """Weight 1/K for each of the K replies (001 (4), (5))."""

    def apply(replies: Sequence[Any]) -> Params:
        return average([one.params for one in replies])

    def shares(replies: Sequence[Any]) -> list[float]:
        return [1 / len(replies)] * len(replies)

    return Aggregator(apply, stacked=True, averages=True, shares=shares)


@AGGREGATORS.add("by-samples")
def by_samples() -> Aggregator:
    """Weight n_i / sum of the participants' n_j: FedAvg of McMahan et al. 2017."""

    def shares(replies: Sequence[Any]) -> list[float]:
        total = sum(one.samples for one in replies)
        return [one.samples / total for one in replies]

    def apply(replies: Sequence[Any]) -> Params:
        return weighted([one.params for one in replies], shares(replies))

    return Aggregator(apply, stacked=True, shares=shares)


@AGGREGATORS.add("median")
def median() -> Aggregator:
    """The median of every entry; of an even number of replies, the mean of the middle two."""
    return Aggregator(lambda replies: _entrywise(replies, _middle), stacked=True)


@AGGREGATORS.add("trimmed-mean")
def trimmed_mean(trim: float = 0.2) -> Aggregator:
    """The mean of every entry without its floor(trim K) smallest and largest values (Yin et al.
    2018)."""
    if not 0 <= trim < 0.5:
        raise InputError(f"[federation.options] trim = {trim} is refused: give a share below 0.5")

    def kept(values: Tensor) -> Tensor:
        cut = int(trim * len(values))
        return values.sort(0).values[cut : len(values) - cut].mean(0)

    return Aggregator(lambda replies: _entrywise(replies, kept), stacked=True)


@AGGREGATORS.add("krum")
def krum(faulty: int = 1) -> Aggregator:
    """The reply whose K - faulty - 2 nearest others are nearest (Blanchard et al. 2017)."""

    def apply(replies: Sequence[Any]) -> Params:
        count = len(replies) - faulty - 2
        if faulty < 0 or count < 1:
            raise InputError(
                f"krum with faulty = {faulty} needs more than {faulty + 2} replies a round and has "
                f"{len(replies)}: raise [federation] per-round or lower faulty"
            )
        flat = torch.stack([_flat(one.params) for one in replies])
        apart = torch.cdist(flat[None], flat[None], compute_mode="donot_use_mm_for_euclid_dist")[0]
        nearest = apart.square().sort(1).values[:, 1 : count + 1].sum(1)
        best = flat.index_select(0, nearest.argmin(keepdim=True))[0]  # without asking which
        like = replies[0].params
        parts = best.split([value.numel() for value in like.values()])
        return {
            name: part.view(value.shape).to(value.dtype)
            for (name, value), part in zip(like.items(), parts, strict=True)
        }

    return Aggregator(apply)


Params = dict[str, Tensor]


def average(trees: Sequence[Params]) -> Params:
    """The entrywise mean of K trees."""
    total = {name: value / len(trees) for name, value in trees[0].items()}
    for tree in trees[1:]:
        for name, value in tree.items():
            total[name].add_(value, alpha=1 / len(trees))
    return total


def weighted(trees: Sequence[Params], shares: Sequence[float]) -> Params:
    """The entrywise sum of trees with weights."""
    total = {name: value * shares[0] for name, value in trees[0].items()}
    for tree, share in zip(trees[1:], shares[1:], strict=True):
        for name, value in tree.items():
            total[name].add_(value, alpha=share)
    return total


def _entrywise(replies: Sequence[Any], kept: Callable[[Tensor], Tensor]) -> Params:
    names = replies[0].params
    return {name: kept(torch.stack([one.params[name] for one in replies])) for name in names}


def _middle(values: Tensor) -> Tensor:
    ordered, half = values.sort(0).values, (len(values) - 1) // 2
    return (ordered[half] + ordered[len(values) - 1 - half]) / 2


def _flat(params: Params) -> Tensor:
    return torch.cat([value.flatten() for value in params.values()])
