"""References for the methods, data and software that a run used, as BibTeX.

`references.bib` contains the entries. The tables in this module map each value of a config key to
its BibTeX entries. The entries of names, such as methods and data sets, stand in their rows. A
method without an entry, such as plain SGD or your own method, has no reference.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import fedmuon
from fedmuon.config.load import Config
from fedmuon.config.methods import ORTHOGONALIZED, PRIVATE
from fedmuon.config.names import cited
from fedmuon.config.schema import Privacy, reads
from fedmuon.core.errors import InputError
from fedmuon.core.tables import value_of

BIBLIOGRAPHY = Path(__file__).parent / "references.bib"
# Config key -> value -> keys of the entries.
CITED: dict[str, Mapping[str, tuple[str, ...]]] = {
    "local.recipe": cited("local.recipe"),
    "local.aux": {"adamw": ("adamw",)},
    "local.schedule": cited("local.schedule"),
    "orthogonalizer.name": cited("orthogonalizer.name"),
    "orthogonalizer.coefficients": {
        "polar-express": ("polar-express",), "turbo-scaled": ("turbo-muon",),
        "polar-express-e2": ("polar-express", "nesterov-muon"),
        "polar-express-e3": ("polar-express", "nesterov-muon"),
    },
    "orthogonalizer.normalization": {"aol": ("turbo-muon",)},
    "federation.adapters": cited("federation.adapters"),
    "task.name": {"causal-lm": ("lora",)},
    "federation.aggregate": cited("federation.aggregate"),
    "federation.partition": cited("federation.partition"),
    "compression.uplink": cited("compression.uplink"),
    "compression.downlink": cited("compression.downlink"),
    "compression.feedback": {"error": ("ef-signsgd",), "ef21": ("ef21",)},
    "devices.mode": {
        "fedbuff": ("fedbuff",), "threshold": ("ringmaster-lmo",), "fedasync": ("fedasync",),
    },
    "attacks.kind": cited("attacks.kind"),
    "privacy.level": {"client": ("dp-fedavg",)},
    "privacy.trust": {"distributed": ("distributed-gaussian", "secure-aggregation")},
    "privacy.clipping": {
        "automatic": ("automatic-clipping",), "automatic-flat": ("automatic-clipping",),
    },
    "privacy.noise-correlation": {
        "sqrt-toeplitz": ("dp-ftrl",), "momentum": ("dp-ftrl",), "blt": ("dp-ftrl",),
        "blt-momentum": ("dp-ftrl",),
    },
    "data.name": cited("data.name"),
    "data.features": cited("data.features"),
    "engine.name": {"ray": ("flower", "ray"), "deployment": ("flower",)},
}  # fmt: skip
# Config key -> the reason in the comment above an entry, with the value in place of {}.
REASONS = {
    "local.recipe": "optimizer {}", "local.aux": "auxiliary optimizer {}",
    "local.schedule": "step size schedule {}", "orthogonalizer.name": "orthogonalizer {}",
    "orthogonalizer.coefficients": "Newton-Schulz coefficients {}",
    "orthogonalizer.normalization": "orthogonalizer normalization {}",
    "federation.adapters": "adapters {}", "task.name": "task {}",
    "federation.aggregate": "aggregation {}", "federation.partition": "partition {}",
    "compression.uplink": "compression {}", "compression.downlink": "compression {}",
    "compression.feedback": "compression feedback {}", "devices.mode": "device mode {}",
    "privacy.level": "{}-level privacy", "privacy.trust": "{} noise",
    "privacy.clipping": "{} clipping", "privacy.noise-correlation": "noise correlation {}",
    "data.name": "data set {}", "data.features": "features {}", "engine.name": "engine {}",
    "attacks.kind": "attack {}",
}  # fmt: skip
YEAR = 2026  # year of the release, as in CITATION.cff
ACCOUNTANT = ("connect-the-dots", "rdp")  # cited by every private run


def references(runs: Iterable[tuple[Config, bool]]) -> dict[str, str]:
    """Return the BibTeX entries of everything that runs used.

    Args:
        runs: One pair per run: its resolved config, and whether the run has neighbours or a bound.

    Returns:
        The entries by key. The first entry is fedmuon itself. A comment above each entry says why
        the entry is cited.
    """
    all_entries = {"fedmuon": software()} | entries()
    reasons_by_key: dict[str, dict[str, None]] = {"fedmuon": {"simulator of the runs": None}}
    for config, stability in runs:
        for cite, reason in _used(config, stability):
            key = _key_of(cite) or cite
            if key not in all_entries and key == cite:
                raise InputError(
                    f"{reason} cites {cite!r}, which is no entry of the bibliography. Write the "
                    "whole BibTeX entry in `cites` of the method."
                )
            all_entries.setdefault(key, cite.strip())  # a method of another package has its own
            reasons_by_key.setdefault(key, {})[reason] = None
    return {
        key: f"% {', '.join(reasons)}\n{all_entries[key]}"
        for key, reasons in reasons_by_key.items()
    }


def _used(config: Config, stability: bool) -> Iterator[tuple[str, str]]:
    """Yield pairs (key of an entry or an entry, reason to cite it). A key may appear twice."""
    if config.local.recipe in ORTHOGONALIZED:
        yield "muon", f"optimizer {config.local.recipe}"
    for key, values in CITED.items():
        if reads(config, key):
            value = str(value_of(config, key))
            for entry in values.get(value, ()):
                yield entry, REASONS[key].format(value)
    yield from _by_number(config)
    if config.local.recipe in PRIVATE or config.privacy.level == "client":
        yield from ((accountant, "privacy accounting") for accountant in ACCOUNTANT)
        if config.privacy.quantile:
            yield "quantile-clipping", "clipping at a quantile"
        if _exact(config.privacy):
            yield "discrete-gaussian", "exact noise"
    if stability:
        yield "stability-note", "stability bound"
    yield "pytorch", "software"


def _by_number(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the entries of methods that a number selects, as `_used` does."""
    if reads(config, "orthogonalizer.name"):
        if config.orthogonalizer.row_memory:
            yield "normuon", "orthogonalizer row memory"
        if config.orthogonalizer.shards > 1:
            yield "muonbp", "orthogonalizer shards"
    if config.robust.mixing:
        yield "nearest-neighbour-mixing", "nearest-neighbour mixing"


def _exact(privacy: Privacy) -> bool:
    """Return whether the noise is a discrete Gaussian."""
    inexact = privacy.insecure_reproducible_noise or privacy.quantile
    if privacy.arithmetic != "auto" or privacy.trust == "distributed":
        return privacy.arithmetic == "grid" or privacy.trust == "distributed"
    return not (inexact or privacy.noise_correlation != "none")


@cache
def entries() -> dict[str, str]:
    """Return all entries of the bibliography by key."""
    parts = re.split(r"^(?=@)", BIBLIOGRAPHY.read_text("utf-8"), flags=re.MULTILINE)
    return {key: part.strip() for part in parts if (key := _key_of(part))}


def _key_of(entry: str) -> str:
    """Return the key of a BibTeX entry, or an empty text for any other text."""
    match = re.match(r"\s*@\w+\{([^,]+),", entry)
    return match[1] if match else ""


def software() -> str:
    """Return the BibTeX entry of fedmuon itself."""
    return (
        "@misc{fedmuon,\n"
        "  author = {{The fedmuon authors}},\n"
        "  title  = {{fedmuon}: Orthogonalized-Momentum Optimization in Federated and Private "
        "Learning},\n"
        f"  note   = {{Software, version {fedmuon.__version__}}},\n"
        f"  year   = {{{YEAR}}}\n"
        "}"
    )
