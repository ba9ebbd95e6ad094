"""The card of an experiment: what was run, in the letters of the papers, and what came of it."""

from fedmuon.analysis.report.numbers import digits
from fedmuon.config.describe import SYMBOLS
from fedmuon.config.load import Config
from fedmuon.config.read_if import reads
from fedmuon.core.tables import attribute
from fedmuon.experiments.inspect.status import Seen

# Name on the card -> the keys that it tells, where something reads them.
LINES = {
    "data": ("data.name", "data.train", "data.test", "data.alpha"),
    "clients": ("federation.clients", "federation.per-round", "federation.rounds", "local.steps"),
    "task": ("task.name", "task.model"),
    "recipe": ("local.recipe", "local.lr", "local.momentum", "local.batch", "local.schedule"),
    "map": ("orthogonalizer.name", "orthogonalizer.lambda", "orthogonalizer.steps",
            "orthogonalizer.rank"),
    "privacy": ("privacy.noise", "privacy.bound", "privacy.lot", "privacy.epsilon"),
    "computed": ("engine.name", "engine.dtype", "engine.device", "federation.seed"),
}  # fmt: skip
SHORT = SYMBOLS | {
    "data.test": "test", "local.batch": "batch", "local.schedule": "schedule", "privacy.lot": "lot",
    "privacy.epsilon": "ε asked", "federation.seed": "seed",
}  # fmt: skip


def settings(config: Config) -> dict[str, str]:
    """Name and words of every line that tells what is run."""
    lines = {name: _line(config, keys) for name, keys in LINES.items()}
    return {name: said for name, said in lines.items() if said}


def card(run: Seen) -> list[tuple[str, str]]:
    """Name and words of every line that says something."""
    lines = settings(run.config) | {"state": run.state}
    if run.rounds:
        done, seconds = len(run.rounds), (run.summary or run.rounds[-1])["seconds"]
        lines["state"] += (
            f", {done} of {run.config.federation.rounds} rounds in {digits(seconds)} s"
        )
    if run.summary is not None:
        lines["stopped"] = str(run.summary.get("stopped", ""))
        lines["commit"] = str(run.summary["git_commit"] or "")[:12]
    return [(name, said) for name, said in lines.items() if said]


def _line(config: Config, keys: tuple[str, ...]) -> str:
    return ", ".join(_said(config, key) for key in keys if reads(config, key))


def _said(config: Config, key: str) -> str:
    """`η = 0.1`; a name stands for itself."""
    table, _, name = key.partition(".")
    held = getattr(config, table)
    value = getattr(held, attribute(type(held), name))
    short = f"{SHORT[key]} = " if key in SHORT else ""
    said = "full" if key == "local.batch" and not value else value
    return f"{short}{said:g}" if isinstance(said, float) else f"{short}{said}"
