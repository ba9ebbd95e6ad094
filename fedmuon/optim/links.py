"""Links of a local chain, as factories: what `fedmuon.Chain` strings together.

    links.gradient(), links.momentum(0.9), links.orthogonalize(map), links.descend(0.1)

A link of one's own is a `fedmuon.Link(name, init, update)` or `links.stateless(name, update)`.
It returns new tensors: what it is given, other links and the model hold, too.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fedmuon.core.errors import InputError
from fedmuon.optim import orthogonal, steps
from fedmuon.optim.chain import Chain, Context, Link, stateless, zeros
from fedmuon.optim.gradients import gradient
from fedmuon.optim.orthogonalizers import as_orthogonalizer
from fedmuon.optim.steps import adamw, align, descend, momentum, normalize
from fedmuon.tasks.base import Params

__all__ = ["Chain", "Context", "Link", "Params", "adamw", "align", "descend", "gradient",
           "momentum", "normalize", "only", "orthogonalize", "stateless", "zeros"]  # fmt: skip


def only(chosen: Callable[[str], bool], link: Link) -> Link:
    """The link for the parameters whose names are chosen; the others pass as they are."""
    if not isinstance(link, Link) or not callable(chosen):
        raise InputError(
            "links.only takes a function of a name and a Link: give links.only(chosen, link)"
        )
    return steps.only(lambda name, value: chosen(name), link)


def orthogonalize(
    orthogonalizer: Any, adjust: str = "none", routes: Mapping[str, int] | None = None
) -> Link:
    """Replace matrices by their image under a map: a `fedmuon.Orthogonalizer` or a function.

    `routes` says which parameters, and into how many matrices each is cut (a recipe that is a
    function gets them by that name); without it, all that have two axes or more.
    """
    apply = orthogonal.of_value(as_orthogonalizer(orthogonalizer))
    link = orthogonal.orthogonalize(apply, adjust, True, routes)
    if routes is None:
        return steps.only(lambda name, value: value.ndim > 2, link)
    return only(lambda name: bool(routes.get(name)), link)
