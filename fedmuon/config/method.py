"""The row of a federated method or optimizer: its name, its function, and facts about it."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fedmuon.core.choices import Choice

Value = TypeVar("Value")
# How a method fits the recursion of the Stability note. `averaged`: Muon whose momenta are averaged
# with the models. `reset`: the momenta start at 0 in each round. `aligned`: with the global
# direction of Remark 3.2. `gradients`: steps along gradients or momenta, so that L_orth = 1.
Certificate = Literal["averaged", "reset", "aligned", "gradients"]
FACTS = {
    "orthogonalizes": "the function has the parameters `orthogonalizer` and `routes`",
    "server orthogonalizes": "clients return directions instead of models",
    "centralized": "the server averages all states that last between rounds",
    "sends states": "messages contain momenta or other states",
    "averages second moments": "the server averages second moments",
    "client states": "clients store states between rounds",
    "personal parameters": "some parameters never leave a client",
    "personal model": "each client trains a model of its own",
    "gossip": "nodes exchange messages with neighbours, and there is no server",
    "votes": "clients vote on the sign of each entry of a step",
    "low-rank messages": "messages contain the factors of momenta",
    "adapters": "the model needs low-rank adapters",
    "no derivative": "the steps have no derivative where a gradient is 0",
    "private": "each example's gradient is clipped, and noise is added",
    "filtered": "a Kalman filter smooths the noisy gradients (DiSK)",
    "inner momentum": "each example's gradient is averaged over past models before clipping",
    "bias-corrected": "the bias of noise after orthogonalization is corrected (DP-Muon)",
}


@dataclass(frozen=True, kw_only=True)
class Method(Choice):
    """A federated method or optimizer: a name for `local.recipe`, a function, and facts.

    A package adds its own methods with entry points of the group `fedmuon.methods`.

    Attributes:
        name: The name in configs: lower-case letters, digits and hyphens.
        summary: A description, as `fedmuon list optimizers` shows it.
        make: The function that returns the method as a `fedmuon.Recipe`, as
            `"package.module:function"`. Its first parameter is the step size `lr`. It is called
            with the values of `keys` and `options`. If it has a parameter `clients`, it also
            receives the number of all clients, and with a parameter `seed` the seed of the run.
            With the fact "orthogonalizes", it also receives the orthogonalizer and `routes`, as
            `fedmuon.recipes.fedmuon` does.
        keys: The keys of [local] that the function takes, such as "lr" and "weight-decay". Other
            methods reject keys that they do not take.
        options: Mapping from an option in [local.options] that the function takes to its default,
            as in TOML, and its description.
        cites: References: keys of entries in `experiments/references.bib`, or whole BibTeX entries.
        facts: Properties of the method, of those in `fedmuon.config.method.FACTS`.
        by_samples: The reason why the server weights clients by their numbers of samples, with
            the source. If empty, the server takes the plain mean.
        certificate: How the method fits the recursion of the Stability note, or None if no
            certificate covers the method.
        uncertified: The reason why no certificate covers the method, if it is known.

    Example:
        >>> import fedmuon
        >>> method = fedmuon.Method(
        ...     "my-sgd", "SGD of my paper", make="my_package.sgd:sgd", keys=("lr", "weight-decay")
        ... )
        >>> method.facts
        ()
    """

    make: str
    by_samples: str = ""
    certificate: Certificate | None = None
    uncertified: str = ""


def parameter(key: str) -> str:
    """Return the name of the Python parameter that receives the value of a config key.

    The key `lambda` belongs to the parameter `lam`, because `lambda` is a reserved word of Python.
    """
    return "lam" if key == "lambda" else key.replace("-", "_")


def by_parameter(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values of config keys by the names of their parameters."""
    return {parameter(key): value for key, value in values.items()}


def mismatches(method: Method, function: Callable[..., Any]) -> Iterator[str]:
    """Yield each difference between the row of a method and the parameters of its function."""
    known = inspect.signature(inspect.unwrap(function)).parameters
    taken = {parameter(key) for key in (*method.keys, *method.options)}
    if "orthogonalizes" in method.facts:
        taken |= {"orthogonalizer", "routes"}
    for name in sorted(taken - known.keys()):
        yield f"has no parameter `{name}`"
    for name in known:
        if name not in taken | {"clients", "seed"}:
            yield f"has the parameter `{name}`, which is neither a key nor an option of its row"
