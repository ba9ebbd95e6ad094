"""The federated methods and optimizers, one row each: a name, a function, and facts.

A row says everything that the package must know about a method before the method runs. From the
rows follow the names that `local.recipe` accepts, the config keys that have an effect, the default
average, the references of a run, which methods have a certificate, and the pages of the methods.

An installed package adds methods with entry points of the group `fedmuon.methods`. The name of the
entry point is the name of the method, and its value is a `Method` or a function that returns one.
Rows of other packages are read only when they are needed.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fedmuon.config.method import Certificate, Method
from fedmuon.config.registered import (
    NAME,
    load,
    load_function,
    registered,
    require_one,
    require_readable,
)
from fedmuon.core.choices import GIVEN
from fedmuon.core.errors import InputError

# Keys that several methods take

_PLAIN = ("lr", "weight-decay")
_HEAVY = ("lr", "momentum", "momentum-form", "weight-decay")
_MUON = (*_HEAVY, "adjust", "aux", "aux-lr")
_ADAPTIVE = (*_PLAIN, "server-lr", "tau")
_ADAM = (*_ADAPTIVE, "server-momentum", "server-memory")
_PRIVATE = "fedmuon.optim.recipes:private"

ROWS = (
    Method(
        "fedavg",
        "local SGD; the server averages models (McMahan et al. 2017)",
        make="fedmuon.optim.recipes:fedavg",
        keys=_PLAIN,
        cites=("fedavg",),
        by_samples="McMahan et al. 2017, Algorithm 1",
        certificate="gradients",
    ),
    Method(
        "fedavgm",
        "local SGD; the server applies momentum to the average update",
        make="fedmuon.optim.recipes:fedavgm",
        keys=(*_PLAIN, "server-momentum"),
        cites=("non-identical-data",),
        by_samples="Hsu et al. 2019: the update of FedAvg, with momentum",
        certificate="gradients",
    ),
    Method(
        "local-muon",
        "local Muon with a new momentum in each round; the server averages models",
        make="fedmuon.optim.recipes:local_muon",
        keys=_MUON,
        cites=("fedavg",),
        facts=("orthogonalizes",),
        certificate="reset",
    ),
    Method(
        "fedmuon",
        "local Muon; the server averages models and momenta (Stability note)",
        make="fedmuon.optim.recipes:fedmuon",
        keys=_MUON,
        cites=("stability-note",),
        facts=("orthogonalizes", "sends states"),
        certificate="averaged",
    ),
    Method(
        "fedmuon-aligned",
        "fedmuon with steps towards the last global direction (Stability note, Remark 3.2)",
        make="fedmuon.optim.recipes:fedmuon_aligned",
        keys=(*_MUON, "alignment", "steps"),
        cites=("stability-note",),
        facts=("orthogonalizes", "sends states"),
        certificate="aligned",
    ),
    Method(
        "fedmuon-corrected",
        "local Muon on an estimate of the average momentum (arXiv:2509.26337)",
        make="fedmuon.optim.recipes:fedmuon_corrected",
        keys=_MUON,
        cites=("fedmuon-corrected",),
        facts=("orthogonalizes", "sends states", "client states"),
    ),
    Method(
        "fedmuon-svd",
        "fedmuon with momenta sent as low-rank factors (arXiv:2510.27403)",
        make="fedmuon.optim.recipes:fedmuon_svd",
        keys=(*_MUON, "rank"),
        cites=("fedmuon-svd",),
        facts=("orthogonalizes", "sends states", "low-rank messages"),
    ),
    Method(
        "lora-muon",
        "fedmuon on low-rank adapters, with steps that ignore their scale (arXiv:2606.12921)",
        make="fedmuon.optim.recipes:lora_muon",
        keys=_MUON,
        cites=("lora-muon",),
        facts=("orthogonalizes", "sends states", "adapters", "no derivative"),
        uncertified="the loss depends on the product of two factors of an adapter, so it is not "
        "smooth in both together",
    ),
    Method(
        "ef21-muon",
        "clients send momenta; the server takes Muon's step (arXiv:2510.00643)",
        make="fedmuon.optim.recipes:ef21_muon",
        keys=_MUON,
        cites=("ef21-muon",),
        facts=("orthogonalizes", "server orthogonalizes", "client states"),
    ),
    Method(
        "ringmaster",
        "clients send gradients; the server takes Muon's step (arXiv:2605.18174)",
        make="fedmuon.optim.recipes:ringmaster",
        keys=("lr", "momentum", "weight-decay", "adjust", "aux", "aux-lr"),
        cites=("ringmaster-lmo",),
        facts=("orthogonalizes", "server orthogonalizes"),
    ),
    Method(
        "ringmaster-free",
        "ringmaster with a growing momentum and a falling step size (arXiv:2605.18174)",
        make="fedmuon.optim.recipes:ringmaster_free",
        keys=("lr", "adjust", "aux", "aux-lr"),
        cites=("ringmaster-lmo",),
        facts=("orthogonalizes", "server orthogonalizes"),
    ),
    Method(
        "sign-muon",
        "clients vote with one bit per entry; the server takes the majority (arXiv:2605.16311)",
        make="fedmuon.optim.recipes:sign_muon",
        keys=(*_HEAVY, "aux", "aux-lr"),
        cites=("sign-muon",),
        facts=(
            *("orthogonalizes", "server orthogonalizes", "client states", "votes"),
            "no derivative",
        ),
        uncertified="the majority jumps where an entry of an orthogonalized momentum is 0",
    ),
    Method(
        "demuon",
        "Muon without a server: nodes average with their neighbours (arXiv:2510.01377)",
        make="fedmuon.optim.recipes:demuon",
        keys=("lr", "momentum", "weight-decay", "adjust", "aux-lr"),
        cites=("demuon",),
        facts=("orthogonalizes", "server orthogonalizes", "client states", "gossip"),
        uncertified="the recursion of the Stability note assumes a server",
    ),
    Method(
        "muloco",
        "local Muon; the server takes Nesterov steps (arXiv:2505.23725)",
        make="fedmuon.optim.recipes:muloco",
        keys=(*_MUON, "server-lr", "server-momentum"),
        cites=("muloco",),
        facts=("orthogonalizes",),
    ),
    Method(
        "fedprox",
        "local SGD, pulled towards the received model (Li et al. 2020)",
        make="fedmuon.optim.recipes:fedprox",
        keys=(*_PLAIN, "proximal"),
        cites=("fedprox",),
        by_samples="Li et al. 2020: Algorithm 2 draws clients with probability p_i = n_i / n and "
        "takes the plain mean; clients drawn uniformly need the weights n_i instead",
    ),
    Method(
        "fedper",
        "local SGD; named parameters never leave the client (Arivazhagan et al. 2019)",
        make="fedmuon.optim.recipes:fedper",
        keys=(*_PLAIN, "personal"),
        cites=("fedper",),
        facts=("client states", "personal parameters"),
        by_samples="Arivazhagan et al. 2019: FedAvg for the shared part",
    ),
    Method(
        "ditto",
        "local SGD, and a personal model per client, pulled towards the server's model (Li et al. "
        "2021)",
        make="fedmuon.optim.recipes:ditto",
        keys=(*_PLAIN, "personal-weight"),
        cites=("ditto",),
        facts=("client states", "personal model"),
    ),
    Method(
        "fednova",
        "local SGD; each update is normalized by its number of steps (Wang et al. 2020)",
        make="fedmuon.optim.recipes:fednova",
        keys=_PLAIN,
        cites=("fednova",),
        by_samples="Wang et al. 2020: weights p_i = n_i / n, scaled to the participants",
    ),
    Method(
        "scaffold",
        "local SGD corrected by control variates (Karimireddy et al. 2020)",
        make="fedmuon.optim.recipes:scaffold",
        keys=(*_PLAIN, "server-lr"),
        cites=("scaffold",),
        facts=("sends states", "client states"),
    ),
    Method(
        "fedadam",
        "local SGD; the server takes Adam's steps (Reddi et al. 2021)",
        make="fedmuon.optim.recipes:fedadam",
        keys=_ADAM,
        cites=("fedopt",),
    ),
    Method(
        "fedyogi",
        "local SGD; the server takes Yogi's steps (Reddi et al. 2021)",
        make="fedmuon.optim.recipes:fedyogi",
        keys=_ADAM,
        cites=("fedopt",),
        facts=("no derivative",),
    ),
    Method(
        "fedadagrad",
        "local SGD; the server takes Adagrad's steps (Reddi et al. 2021)",
        make="fedmuon.optim.recipes:fedadagrad",
        keys=_ADAPTIVE,
        cites=("fedopt",),
    ),
    Method(
        "local-adamw",
        "local AdamW with new moments in each round; the server averages models",
        make="fedmuon.optim.recipes:local_adamw",
        keys=_PLAIN,
        cites=("fedavg", "adamw"),
        facts=("no derivative",),
    ),
    Method(
        "diloco",
        "local AdamW; the server takes Nesterov steps (Douillard et al. 2023)",
        make="fedmuon.optim.recipes:diloco",
        keys=(*_PLAIN, "server-lr", "server-momentum"),
        cites=("diloco", "adamw"),
        facts=("no derivative",),
    ),
    Method(
        "sgd",
        "SGD with momentum that continues from round to round",
        make="fedmuon.optim.recipes:sgd",
        keys=_HEAVY,
        facts=("centralized", "sends states"),
        certificate="gradients",
    ),
    Method(
        "normalized-sgd",
        "sgd, with each step divided by its norm",
        make="fedmuon.optim.recipes:normalized_sgd",
        keys=_HEAVY,
        facts=("centralized", "sends states"),
        uncertified="the direction D / ||D|| jumps where the momentum D is 0",
    ),
    Method(
        "adamw",
        "AdamW with moments that continue from round to round",
        make="fedmuon.optim.recipes:adamw",
        keys=_PLAIN,
        cites=("adamw",),
        facts=("centralized", "sends states", "averages second moments", "no derivative"),
        uncertified="AdamW divides by the root of a second moment, which the recursion of the "
        "Stability note does not cover",
    ),
    Method(
        "muon",
        "Muon with momentum that continues from round to round",
        make="fedmuon.optim.recipes:muon",
        keys=_MUON,
        facts=("centralized", "orthogonalizes", "sends states"),
        certificate="averaged",  # with one client, it is fedmuon
    ),
    Method(
        "dp-sgd",
        "SGD with clipped and noisy gradients",
        make=_PRIVATE,
        keys=_HEAVY,
        cites=("dp-sgd",),
        facts=("private", "sends states"),
    ),
    Method(
        "dp-adam",
        "Adam with clipped and noisy gradients",
        make=_PRIVATE,
        keys=_PLAIN,
        cites=("dp-sgd", "adam"),
        facts=("private", "sends states", "averages second moments"),
    ),
    Method(
        "dp-muon",
        "Muon with clipped and noisy gradients (DP-Muon)",
        make=_PRIVATE,
        keys=_MUON,
        cites=("dp-muon",),
        facts=("private", "orthogonalizes", "sends states"),
    ),
    Method(
        "dp-muon-im",
        "dp-muon with each example's gradient averaged over past models (DP-Muon-IM)",
        make=_PRIVATE,
        keys=_MUON,
        cites=("dp-muon", "dp-muon-im"),
        facts=("private", "inner momentum", "orthogonalizes", "sends states"),
    ),
    Method(
        "dp-muonbc",
        "dp-muon, corrected for the bias of noise after orthogonalization (DP-Muon)",
        make=_PRIVATE,
        keys=_MUON,
        cites=("dp-muon",),
        facts=("private", "bias-corrected", "orthogonalizes", "sends states"),
    ),
    Method(
        "disk-sgd",
        "dp-sgd with a Kalman filter (DiSK)",
        make=_PRIVATE,
        keys=_HEAVY,
        cites=("disk",),
        facts=("private", "filtered", "sends states"),
    ),
    Method(
        "disk-adam",
        "dp-adam with a Kalman filter (DiSK)",
        make=_PRIVATE,
        keys=_PLAIN,
        cites=("disk", "adam"),
        facts=("private", "filtered", "sends states", "averages second moments"),
    ),
    Method(
        "disk-muon",
        "dp-muon with a Kalman filter (DiSK)",
        make=_PRIVATE,
        keys=_MUON,
        cites=("disk", "dp-muon"),
        facts=("private", "filtered", "orthogonalizes", "sends states"),
    ),
    Method(
        "disk-muonbc",
        "dp-muonbc with a Kalman filter (DiSK)",
        make=_PRIVATE,
        keys=_MUON,
        cites=("disk", "dp-muon"),
        facts=("private", "filtered", "bias-corrected", "orthogonalizes", "sends states"),
    ),
)
BUILT_IN = {row.name: row for row in ROWS}
KEYS = frozenset(key for row in ROWS for key in row.keys)  # keys of [local] that a method may take


class Methods(Mapping[str, Method]):
    """All methods by name: those of fedmuon, and then those of other packages.

    A row of another package is loaded at its first lookup. The names are known before.
    """

    def __getitem__(self, name: str) -> Method:
        require_one(name, name in BUILT_IN)
        if name not in self:
            raise KeyError(name)
        return BUILT_IN[name] if name in BUILT_IN else load(name, KEYS)

    def __contains__(self, name: object) -> bool:
        if name in BUILT_IN or name in registered():
            return True
        if isinstance(name, str) and NAME.fullmatch(name) and name != GIVEN:
            require_readable(name)
        return False

    def __iter__(self) -> Iterator[str]:
        require_readable()
        for name in registered():
            require_one(name, name in BUILT_IN)
        yield from BUILT_IN
        yield from registered()

    def __len__(self) -> int:
        return len(BUILT_IN.keys() | registered().keys())


METHODS = Methods()


# Names and fields of the methods, which are computed when they are read


@dataclass(frozen=True)
class Names(Collection[str]):
    """The names of the methods that have a property.

    Attributes:
        fits: A function that returns whether a method has the property.
        order: A function whose values sort the names. By default, they keep the order of the rows.
    """

    fits: Callable[[Method], bool]
    order: Callable[[Method], Any] | None = None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in METHODS and self.fits(METHODS[name])

    def __iter__(self) -> Iterator[str]:
        fitting = [method for method in _usable() if self.fits(method)]
        ordered = fitting if self.order is None else sorted(fitting, key=self.order)
        return (method.name for method in ordered)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _usable() -> Iterator[Method]:
    """Yield all methods but those of broken packages, which must not hide another error."""
    yield from ROWS
    for name in sorted(registered().keys() - BUILT_IN.keys()):
        with contextlib.suppress(InputError):
            yield METHODS[name]


@dataclass(frozen=True, eq=False)
class Column(Mapping[str, Any]):
    """One field of the methods that set it: a mapping of names to values."""

    field: str

    def __getitem__(self, name: str) -> Any:
        if value := getattr(METHODS[name], self.field):
            return value
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in METHODS if getattr(METHODS[name], self.field))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Summaries(Column):
    """The description of every method. The names alone load no row of another package."""

    def __contains__(self, name: object) -> bool:
        return name in METHODS

    def __iter__(self) -> Iterator[str]:
        return iter(METHODS)

    def __len__(self) -> int:
        return len(METHODS)


def using(key: str) -> Names:
    """Return the names of the methods that take a key of [local]."""
    return Names(lambda method: key in method.keys)


def function_of(method: Method) -> Callable[..., Any]:
    """Import the function that returns a method as a recipe."""
    if method.name not in BUILT_IN:
        return load_function(method)
    module, _, function = method.make.partition(":")
    return getattr(import_module(module), function)


def registered_function(name: str) -> Callable[..., Any] | None:
    """Import the function of a method that another package registers.

    Return None for a method of fedmuon, and for a custom recipe.
    """
    return None if name in BUILT_IN or name not in METHODS else function_of(METHODS[name])


def has(name: str, fact: str) -> bool:
    """Return whether a method has a fact. A custom recipe has none."""
    return name in METHODS and fact in METHODS[name].facts


def certified(*kinds: Certificate) -> tuple[str, ...]:
    """Return the names of the methods whose certificate is of one of these kinds."""
    return tuple(row.name for kind in kinds for row in ROWS if row.certificate == kind)


PRIVATE = tuple(row.name for row in ROWS if "private" in row.facts)
PERSONALIZED = Names(lambda method: {"personal model", "personal parameters"} & {*method.facts})
ORTHOGONALIZED = Names(lambda method: "orthogonalizes" in method.facts)
# Methods whose paper weights the clients of a round by their numbers of samples n_i. All other
# methods take the plain mean, 1/K per client, as in the Stability note.
BY_SAMPLES = Column("by_samples")
UNCERTIFIED = Column("uncertified")


def average_of(recipe: str, private: bool = False) -> str:
    """Return the aggregate of a recipe's paper: "mean", or "by-samples".

    A private run takes the plain mean, because weights by size would depend on protected data.
    """
    return "by-samples" if recipe in BY_SAMPLES and not private else "mean"


def rule_of(recipe: str) -> str:
    """Return words that say how a recipe combines the replies by default."""
    if has(recipe, "gossip"):
        return "weights of the graph"
    if has(recipe, "votes"):
        return "majority of the votes"
    return {"mean": "plain mean", "by-samples": "mean by samples"}[average_of(recipe)]
