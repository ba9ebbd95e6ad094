"""Objects that fit no slot, and every slot that takes an object of the user's.

A case puts one object into one slot of a tiny run. It passes where the run works, and where it is
refused by one sentence; every other exception is an error that the user cannot read.

    PYTHONPATH=tests:tests/helpers python tests/helpers/unsuitable_objects.py [NAME [all]]

It prints counts. NAME is a part of a name of cases; `all` takes each object for every slot.
"""

import contextlib
import functools
import io
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from brought import CLASSES, X
from conftest import small
from torch import nn

import fedmuon
from fedmuon import links
from fedmuon.core.errors import InputError, Interrupted
from fedmuon.optim import DPMuon, Muon
from fedmuon.optim.aggregator import Aggregator
from fedmuon.optim.recipes import fedmuon as recipe_of
from fedmuon.optim.server_rules import replace_by_mean

SAID = "the words of the user"
PAIR = {"clients": 2, "per-round": 2, "rounds": 2}


WHOLE = torch.zeros(2, dtype=torch.long)


class Mute:
    """Takes no arguments and does nothing."""


def _raises(kind: type[BaseException], *said: object) -> Callable[..., Any]:
    """A function of any arguments that raises."""

    def called(*given: Any, **named: Any) -> Any:
        raise kind(*said)

    return called


_raise = _raises(ValueError, SAID)


def raising(method: str, also: dict[str, Any] | None = None) -> Any:
    """An object that can be called and that raises in one special method."""
    held = {"__call__": lambda self, *given: None, method: _raise, **(also or {})}
    return type(f"Raises{method.strip('_').title()}", (), held)()


def _property(name: str) -> Any:
    held = {"__call__": lambda self, *given: None, name: property(_raise)}
    return type("RaisesInProperty", (), held)()


def _deep(*given: Any, **named: Any) -> Any:
    return _deep(*given, **named)


def _of_torch(*given: Any, **named: Any) -> Any:
    return torch.ones(2, 3) @ torch.ones(2, 3)


def throwing(make: Callable[[], Exception]) -> Callable[..., Any]:
    """A function of one argument or more that raises."""

    def thrown(one: Any, *more: Any) -> Any:
        raise make()

    return thrown


_exits = _raises(SystemExit, SAID)
ERRORS: dict[str, Callable[[], Exception]] = {
    "key": lambda: KeyError(SAID),
    "wordless": type("Wordless", (Exception,), {"__str__": _raise, "__repr__": _raise}),
    "lines": lambda: RuntimeError(f"{SAID}\nand a second line"),
    "stop": lambda: StopIteration(SAID),
    "assertion": AssertionError,
    "not-implemented": lambda: NotImplementedError(SAID),
    "of-system": lambda: FileNotFoundError(2, SAID, "/nowhere"),
}


def _generates(*given: Any, **named: Any) -> Iterator[int]:
    yield 1


async def _awaits(*given: Any, **named: Any) -> int:
    return 1


def _itself() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


def returning(value: Callable[[], Any]) -> Callable[..., Any]:
    """A function of one argument or more, which a maker cannot be."""
    return lambda one, *more: value()


class Draws(nn.Module):
    """A module that fails in torch."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.called = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.called(self, x)


def module(forward: Callable[..., Any]) -> Callable[[], nn.Module]:
    """What makes a module whose forward is that function."""
    return lambda: Draws(forward)


VALUES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "whole-number": lambda: 3,
    "minus-one": lambda: -1,
    "nan": lambda: float("nan"),
    "huge": lambda: 10**400,
    "true": lambda: True,
    "complex": lambda: 1j,
    "word": lambda: "nonesuch",
    "empty-word": lambda: "",
    "bytes": lambda: b"bytes",
    "list": lambda: [1, "two", None],
    "empty-list": list,
    "empty-dict": dict,
    "dict": lambda: {1: 2},
    "set": lambda: {1, 2},
    "in-itself": _itself,
    "object": object,
    "array": lambda: np.zeros((2, 2)),
    "array-of-objects": lambda: np.array([None, "a"], dtype=object),
    "tensor": lambda: torch.zeros(2, 2),
    "meta-tensor": lambda: torch.zeros(2, 2, device="meta"),
    "tensor-with-gradient": lambda: torch.zeros(2, 2, requires_grad=True),
    "half-tensor": lambda: torch.zeros(2, 2, dtype=torch.float16),
    "sparse-tensor": lambda: torch.zeros(2, 2).to_sparse(),
    "module": lambda: nn.Linear(3, 2),
    "wrong-module": lambda: nn.Linear(7, 3),
    "lazy-module": lambda: nn.LazyLinear(2),
    "meta-module": lambda: nn.Linear(3, 2, device="meta"),
    "module-list": lambda: nn.ModuleList([nn.Linear(3, 2)]),
    "optimizer": lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
    "generator": lambda: (one for one in range(3)),
    "python-module": lambda: sys,
    "path": lambda: Path("nowhere"),
    "exception": lambda: ValueError(SAID),
}
FUNCTIONS: dict[str, Callable[[], Any]] = {
    "class": lambda: Mute,
    "class-of-module": lambda: nn.Linear,
    "class-of-optimizer": lambda: torch.optim.SGD,
    "builtin": lambda: print,
    "type": lambda: int,
    "partial": lambda: functools.partial(_raise, 1),
    "no-arity": lambda: lambda: 1,
    "makes-none": lambda: lambda: None,
    "many-arity": lambda: lambda a, b, c, d, e, f: 1,
    "keyword-only": lambda: lambda *, nonesuch: 1,
    "raises": lambda: lambda one, *more: _raise(),
    "raises-always": lambda: _raise,
    "raises-in-torch": lambda: lambda one, *more: _of_torch(),
    **{f"raises-{name}": functools.partial(throwing, make) for name, make in ERRORS.items()},
    "exits": lambda: lambda one, *more: _exits(),
    "exits-always": lambda: _exits,
    "deep": lambda: lambda one, *more: _deep(),
    "generates": lambda: _generates,
    "awaits": lambda: _awaits,
    "returns-none": lambda: returning(lambda: None),
    "returns-nan": lambda: returning(lambda: float("nan")),
    "returns-word": lambda: returning(lambda: "word"),
    "returns-itself": lambda: lambda one, *more: one,
    "returns-dict": lambda: returning(lambda: {"weight": 1}),
    "returns-pair": lambda: returning(lambda: ({}, {})),
    "returns-odd-pair": lambda: returning(lambda: ({"weight": 1}, {"weight": None})),
    "returns-tensor": lambda: returning(lambda: torch.zeros(2, 2)),
    "returns-meta": lambda: returning(lambda: torch.zeros(1, device="meta")),
    "returns-gradient": lambda: returning(lambda: torch.zeros(2, requires_grad=True)),
    "returns-array": lambda: returning(lambda: np.zeros(3)),
    "returns-module": lambda: returning(lambda: nn.Linear(3, 2)),
    "returns-raising-bool": lambda: returning(lambda: raising("__bool__")),
    "returns-raising-len": lambda: returning(lambda: raising("__len__")),
    "returns-raising-attributes": lambda: returning(lambda: raising("__getattr__")),
    "returns-generator": lambda: returning(lambda: (one for one in "ab")),
    **{
        f"raising-{method.strip('_')}": functools.partial(raising, method)
        for method in (
            "__repr__", "__str__", "__len__", "__bool__", "__getattr__", "__getattribute__",
            "__iter__", "__getitem__", "__eq__", "__hash__", "__call__", "__deepcopy__",
            "__reduce_ex__", "__contains__", "__float__",
        )
    },
    "raising-class": lambda: _property("__class__"),
    "raising-signature": lambda: _property("__signature__"),
    "raising-name": lambda: _property("__name__"),
    "raising-apply": lambda: _property("apply"),
    "raising-load": lambda: _property("load_partition"),
}  # fmt: skip
OBJECTS = VALUES | FUNCTIONS
MODULES: dict[str, Callable[[], Any]] = {
    "forward-raises": module(lambda self, x: _raise()),
    "forward-raises-in-torch": module(lambda self, x: _of_torch()),
    "forward-exits": module(lambda self, x: _exits()),
    "forward-deep": module(lambda self, x: _deep()),
    "forward-none": module(lambda self, x: None),
    "forward-pair": module(lambda self, x: (self.layer(x), 1)),
    "forward-word": module(lambda self, x: "word"),
    "forward-empty": module(lambda self, x: x[:0]),
    "forward-number": module(lambda self, x: x.sum()),
    "forward-meta": module(lambda self, x: self.layer(x).to("meta")),
    "forward-nan": module(lambda self, x: self.layer(x) * float("nan")),
    "forward-whole": module(lambda self, x: self.layer(x).long()),
    "forward-half": module(lambda self, x: self.layer(x).half()),
    "forward-complex": module(lambda self, x: self.layer(x) * 1j),
    "forward-detached": module(lambda self, x: self.layer(x).detach()),
    "forward-constant": module(lambda self, x: torch.zeros(len(x), 2)),
    "forward-asks": module(lambda self, x: self.layer(x) if x.sum() > 0 else -self.layer(x)),
    "forward-item": module(lambda self, x: self.layer(x) * x.sum().item()),
    "forward-numpy": module(lambda self, x: torch.from_numpy(self.layer(x).detach().numpy())),
    "forward-later": module(lambda self, x: self.layer(x) if len(x) < 9 else _raise()),
    "forward-of-arity": module(lambda self: None),
    "lazy-inside": lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)),
    "meta-inside": lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, device="meta")),
    "convolution": lambda: nn.Conv2d(1, 2, 3),
    "embedding": lambda: nn.Embedding(3, 2),
    "recurrent": lambda: nn.LSTM(3, 2),
    "whole-parameters": lambda: nn.Sequential(
        nn.Linear(3, 2), nn.ParameterList([nn.Parameter(WHOLE, False)])
    ),
    "shares-with-itself": lambda: _tied(),
    "scripted-raises": lambda: torch.compile(Draws(lambda self, x: _raise()), backend="eager"),
}  # fmt: skip


def _tied() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, layer, nn.Linear(3, 2))


def _run(config: dict[str, Any] | None = None, **given: Any) -> None:
    changes = {name: dict(held) for name, held in (config or {}).items()}
    changes["federation"] = PAIR | changes.get("federation", {})
    changes["output"] = {"evaluate-every": 1} | changes.get("output", {})
    changes["data"] = {"train": 24, "test": 6} | changes.get("data", {})
    fedmuon.run(small(changes), **given)


def _of_own(**given: Any) -> None:
    """A run of samples and a module that are handed over."""
    config = {
        "data": {"train": 40, "test": 20, "minimum": 1},
        "federation": {"partition": "iid", **PAIR, "seed": 3},
        "local": {"recipe": "fedavg", "lr": 0.05, "steps": 1},
        "engine": {"dtype": "float64", "device": "cpu"},
    }
    fedmuon.run(config, **{"data": (X, CLASSES), "task": nn.Linear(3, 2), **given})


MEAN = fedmuon.aggregators.mean().apply
GRADIENT, DESCENT = links.gradient(), links.descend(0.05)


def _chained(*middle: Any) -> None:
    _run(recipe=[GRADIENT, *middle, DESCENT])


def _recipe(**fields: Any) -> None:
    held = {"chain": fedmuon.Chain((GRADIENT, links.momentum(0.9), DESCENT)),
            "server": replace_by_mean}  # fmt: skip
    _run(recipe=fedmuon.Recipe(**{**held, **fields}))


def _kept(params: Any) -> Any:
    return {name: torch.zeros_like(value) for name, value in params.items()}


def _passed(direction: Any, state: Any, context: Any) -> Any:
    return direction, state


def _muon(**given: Any) -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = Muon([weight], **given)
    for _ in range(2):
        weight.grad = torch.ones(3, 2)
        optimizer.step()
    optimizer.state_dict()


def _private(**given: Any) -> None:
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)
    held: dict[str, Any] = {"population": 60, "privacy": {"bound": 0.5, "noise": 3.0, "lot": 20.0}}
    model = given.pop("model") if "model" in given else nn.Sequential(*layers)
    private = DPMuon(model, **{**held, **given})
    inputs, labels = torch.from_numpy(X).float(), torch.from_numpy(CLASSES)
    for lot in private.lots(1):
        private.step(lot, inputs[lot.rows], labels[lot.rows])


HELD = ModuleType("unsuitable_held")
NAMES = iter(range(10**9))


def _named(table: str, key: str, **config: Any) -> Callable[[Any], None]:
    """A slot in which a config names the object."""

    def use(found: Any) -> None:
        sys.modules[HELD.__name__] = HELD
        name = f"thing_{next(NAMES)}"
        setattr(HELD, name, found)
        held = {one: dict(keys) for one, keys in config.items()}
        held.setdefault(table, {})[key] = f"{HELD.__name__}:{name}"
        _run(held)

    return use


def _named_task(found: Any) -> None:
    sys.modules[HELD.__name__] = HELD
    name = f"thing_{next(NAMES)}"
    setattr(HELD, name, found)
    _of_own(task=f"{HELD.__name__}:{name}")


class Telling(fedmuon.callbacks.Callback):
    """A callback with functions of the table's."""

    def __init__(self, on_round: Any = None, on_end: Any = None) -> None:
        self.heard, self.ended = on_round, on_end

    def on_round(self, record: Any, state: Any) -> Any:
        return None if self.heard is None else self.heard(record, state)

    def on_end(self, result: Any) -> None:
        if self.ended is not None:
            self.ended(result)


Slot = tuple[Callable[[Any], object], dict[str, Callable[[], Any]]]
MAP: dict[str, Any] = {"local": {"recipe": "fedmuon"}}
SLOTS: dict[str, Slot] = {
    "task": (lambda x: _of_own(task=x), OBJECTS | MODULES),
    "task-module": (lambda x: _of_own(task=fedmuon.Task(x)), VALUES | MODULES),
    "task-named": (_named_task, MODULES | FUNCTIONS),
    "loss": (lambda x: _of_own(task=(nn.Linear(3, 2), x)), OBJECTS),
    "metric": (lambda x: _of_own(task=fedmuon.Task(nn.Linear(3, 2), None, {"m": x})), OBJECTS),
    "metrics": (lambda x: _of_own(task=fedmuon.Task(nn.Linear(3, 2), None, x)), VALUES),
    "real-loss": (
        lambda x: _of_own(data=(X, X[:, :1]), task=(nn.Linear(3, 1), x)), FUNCTIONS
    ),
    "data": (lambda x: _of_own(data=x), OBJECTS),
    "inputs": (lambda x: _of_own(data=(x, CLASSES)), VALUES),
    "labels": (lambda x: _of_own(data=(X, x)), VALUES),
    "test": (lambda x: _of_own(test=x), OBJECTS),
    "data-named": (_named("data", "name"), OBJECTS),
    "partition": (lambda x: _run(partition=x), OBJECTS),
    "partition-named": (_named("federation", "partition"), FUNCTIONS),
    "aggregate": (lambda x: _run(aggregate=x), OBJECTS | MODULES),
    "aggregate-value": (lambda x: _run(aggregate=Aggregator(x)), OBJECTS),
    "aggregate-shares": (
        lambda x: _run(aggregate=Aggregator(MEAN, True, shares=x)), OBJECTS
    ),
    "aggregate-stacked": (lambda x: _run(aggregate=Aggregator(x, stacked=True)), FUNCTIONS),
    "aggregate-named": (_named("federation", "aggregate"), OBJECTS),
    "schedule": (lambda x: _run(schedule=x), OBJECTS),
    "schedule-named": (_named("local", "schedule"), OBJECTS),
    "orthogonalizer": (lambda x: _run(MAP, orthogonalizer=x), OBJECTS | MODULES),
    "orthogonalizer-value": (
        lambda x: _run(MAP, orthogonalizer=fedmuon.Orthogonalizer(x)), OBJECTS
    ),
    "lipschitz": (
        lambda x: _run(MAP, orthogonalizer=fedmuon.Orthogonalizer(lambda m: m / 2, x)), VALUES
    ),
    "orthogonalizer-named": (_named("orthogonalizer", "name", **MAP), FUNCTIONS),
    "recipe": (lambda x: _run(recipe=x), OBJECTS),
    "recipe-named": (_named("local", "recipe"), FUNCTIONS),
    "recipe-of-map": (lambda x: _run(recipe=recipe_of(lr=0.1, orthogonalizer=x)), FUNCTIONS),
    "links": (lambda x: _chained(x), VALUES),
    "chain": (lambda x: _run(recipe=fedmuon.Chain(x)), VALUES),
    "link-init": (lambda x: _chained(fedmuon.Link("own", x, _passed)), OBJECTS),
    "link-update": (lambda x: _chained(fedmuon.Link("own", _kept, x)), OBJECTS | MODULES),
    "link-stateless": (lambda x: _chained(links.stateless("own", x)), OBJECTS),
    "link-name": (lambda x: _chained(fedmuon.Link(x, _kept, _passed)), VALUES),
    "link-lasting": (lambda x: _chained(fedmuon.Link("own", _kept, _passed, lasting=x)), VALUES),
    "link-averaged": (
        lambda x: _chained(fedmuon.Link("own", _kept, _passed, True, averaged=x)), OBJECTS
    ),
    "links-momentum": (lambda x: _chained(links.momentum(x)), VALUES),
    "links-descend": (lambda x: _run(recipe=[GRADIENT, links.descend(x)]), VALUES),
    "links-align": (lambda x: _chained(links.align(x)), VALUES),
    "links-only": (lambda x: _chained(links.only(x, links.normalize())), OBJECTS),
    "links-only-link": (lambda x: _chained(links.only(lambda name: True, x)), VALUES),
    "links-orthogonalize": (lambda x: _chained(links.orthogonalize(x)), OBJECTS),
    "recipe-chain": (lambda x: _recipe(chain=x), VALUES),
    "recipe-server": (lambda x: _recipe(server=x), OBJECTS),
    "recipe-sent": (lambda x: _recipe(sent=x), VALUES),
    "recipe-returned": (lambda x: _recipe(returned=x), VALUES),
    "recipe-kept": (lambda x: _recipe(kept=x), VALUES),
    "recipe-mechanism": (lambda x: _recipe(mechanism=x), VALUES),
    "recipe-aggregate": (lambda x: _recipe(aggregate=x), OBJECTS),
    "recipe-steps": (lambda x: _recipe(steps=x), VALUES),
    "callbacks": (lambda x: _run(callbacks=x), VALUES),
    "callback": (lambda x: _run(callbacks=[x]), OBJECTS | MODULES),
    "callback-round": (lambda x: _run(callbacks=[Telling(x)]), FUNCTIONS),
    "callback-end": (lambda x: _run(callbacks=[Telling(None, x)]), FUNCTIONS),
    "callback-named": (_named("output", "callback"), FUNCTIONS),
    "muon-orthogonalizer": (lambda x: _muon(orthogonalizer=x), OBJECTS),
    **{
        f"muon-{name}": (lambda x, name=name: _muon(**{name: x}), VALUES)
        for name in ("lr", "momentum", "weight_decay", "ns_coefficients", "eps", "ns_steps",
                     "adjust_lr_fn", "ns_dtype", "momentum_form")
    },
    "muon-params": (lambda x: Muon(x), VALUES),
    "dpmuon-model": (lambda x: _private(model=x), VALUES | MODULES),
    "dpmuon-loss": (lambda x: _private(loss=x), OBJECTS),
    **{
        f"dpmuon-{name}": (lambda x, name=name: _private(**{name: x}), VALUES)
        for name in ("population", "lr", "local", "orthogonalizer", "privacy", "seed")
    },
    "control": (lambda x: {}[SAID], {"raw": object}),
}  # fmt: skip


def cases(every: int = 4) -> list[tuple[str, str]]:
    """(slot, object): for the main slots all objects, for the others one of `every`."""
    found = []
    for number, (slot, (_, objects)) in enumerate(SLOTS.items()):
        step = 1 if slot in MAIN else every
        names = list(objects)[number % step :: step]
        found += [(slot, name) for name in names if slot != "control"]
    return found


MAIN = ("loss", "data", "partition", "aggregate", "schedule", "orthogonalizer", "recipe",
        "link-update", "callback")  # fmt: skip


def sample(each: int = 3) -> list[tuple[str, str]]:
    """Some of them, the same ones always: `each` of every group of slots, such as `aggregate`."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for slot, name in cases():
        groups.setdefault(slot.partition("-")[0], []).append((slot, name))
    return [held[len(held) * k // each] for held in groups.values() for k in range(each)]


def outcome(slot: str, name: str) -> str:
    """What became of a case: `works`, `refused`, or what a user cannot read of it."""
    use, objects = SLOTS[slot]
    with warnings.catch_warnings(), contextlib.ExitStack() as printed:
        warnings.simplefilter("ignore")  # such as of coroutines that nobody awaits
        printed.enter_context(contextlib.redirect_stdout(io.StringIO()))  # by the builtin
        found = objects[name]()
        try:
            use(found)
        except InputError as error:
            return unreadable(error) or "refused"
        except (KeyboardInterrupt, Interrupted):
            raise
        except BaseException as error:
            return f"a traceback of ours: {type(error).__name__}"
    return "works"


def unreadable(error: InputError) -> str:
    """What a refusal lacks: it is one line, of a length that can be read."""
    said = str(error)
    if "\n" in said or not 10 < len(said) < 900:
        return f"no sentence: {said!r}"
    return ""


def main() -> None:
    """Run the cases that contain the word given, or all, and count."""
    tempfile.tempdir = tempfile.mkdtemp(prefix="unsuitable-")
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    for slot, name in cases(1 if sys.argv[2:] else 4):
        if wanted in f"{slot}:{name}":
            found = outcome(slot, name)
            counts[found.partition(":")[0]] = counts.get(found.partition(":")[0], 0) + 1
            if found not in ("works", "refused"):
                print(f"{slot}:{name}  {found}", flush=True)
    print(counts)


if __name__ == "__main__":
    main()
