"""Which recipes the recursion of `analysis.theory.recursion` covers, and why it does not others."""

from fedmuon.analysis.theory.recursion import Method
from fedmuon.config.load import Config
from fedmuon.core.choices import PRIVATE
from fedmuon.orthogonalize import Uncertified

MUON = ("fedmuon", "muon", "local-muon", "fedmuon-aligned")  # the second is the first by definition
MAPLESS = ("fedavg", "fedavgm", "sgd")  # step along gradients or momenta: L = 1
AVERAGES = ("mean", "by-samples")
HEAVY = "heavy-tailed"  # a run resolves it to constant steps
WHY = {
    "adamw": "the recursion has no second moment, by whose root AdamW divides",
    "normalized-sgd": "D / ||D|| jumps where the momentum D is 0",
}
OTHERS = "nothing is known of how far apart it keeps two models"
PRIVATELY = "clipping and Poisson lots are no part of the recursion of 001"


def method_of(config: Config) -> Method:
    """The recipe as bounds see it, or the sentence that refuses it."""
    local = config.local
    if local.recipe not in MUON + MAPLESS:
        why = PRIVATELY if local.recipe in PRIVATE else WHY.get(local.recipe, OTHERS)
        raise Uncertified(
            f"Recipe {local.recipe} has no certificate: {why}. Use one of "
            f"{', '.join(MUON + MAPLESS)}."
        )
    if config.privacy.level == "client":
        raise Uncertified(
            "A run at client level has no certificate: the recursion of 001 has no clipped updates "
            "and no noise. Set [privacy] level = 'example'."
        )
    if local.schedule == HEAVY:
        raise Uncertified(
            "The heavy-tailed schedule is a number only of a run: make it, or set [local] schedule "
            "to another one."
        )
    if config.federation.aggregate not in AVERAGES:
        raise Uncertified(
            "The recursion follows weighted means of what the participants return: set "
            "[federation] aggregate = 'mean' or 'by-samples'."
        )
    _require_one_rate(config)
    if local.recipe in ("fedavg", "fedavgm"):
        server = local.server_momentum if local.recipe == "fedavgm" else 0.0
        return Method(0.0, decay=local.weight_decay, server=server)
    aligned = local.recipe == "fedmuon-aligned"
    return Method(
        local.momentum,
        local.momentum_form,
        local.weight_decay,
        afresh=local.recipe == "local-muon",
        alignment=local.alignment if aligned else 0.0,
    )


def _require_one_rate(config: Config) -> None:
    """What is decayed by a step size of its own shrinks otherwise than the rest."""
    if config.task.name != "matrix" and config.local.weight_decay and has_map(config):
        raise Uncertified(
            "Of a network's two step sizes each decays its parameters in its own way, which the "
            "recursion does not follow: set [local] weight-decay = 0."
        )


def has_map(config: Config) -> bool:
    """Whether the recipe orthogonalizes."""
    return config.local.recipe in MUON
