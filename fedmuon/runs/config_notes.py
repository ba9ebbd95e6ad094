"""Notes on settings that may not do what the user wants: weights, noise, and blocks."""

import math

from fedmuon.config.load import Config
from fedmuon.config.methods import ORTHOGONALIZED, average_of
from fedmuon.config.user_objects import user_objects
from fedmuon.core.demands import setting
from fedmuon.data.federated import FederatedData
from fedmuon.data.partition import are_uneven
from fedmuon.federated.accountant import update_like
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin
from fedmuon.optim.adapters import find_pairs
from fedmuon.optim.client_privacy import level_of
from fedmuon.optim.recipe import shared_part
from fedmuon.privacy.mechanisms.client_level import leaves
from fedmuon.tasks.causal_lm import is_language_model

LONG, USUAL = 1.0, 0.04  # step sizes of Muon on adapters of a pretrained model


def config_notes(config: Config, data: FederatedData, experiment: Experiment) -> list[str]:
    """Return notes on settings that may not do what the user wants, for a run that begins."""
    return [*filter(None, (uneven_sizes(config, data, experiment),
                           swamping_noise(config, experiment),
                           separate_adapters(config, experiment),
                           long_steps(config, experiment)))]  # fmt: skip


def uneven_sizes(config: Config, data: FederatedData, experiment: Experiment) -> str:
    """Return a note if sizes differ by more than a factor of 2, and a mean ignores them.

    The note is empty if the plain mean is that of the optimizer's paper, which the run's card says.
    It is also empty for private runs, whose sizes are protected. It has no numbers, so that runs
    with other seeds have the same note.
    """
    if experiment.recipe.private or not experiment.recipe.aggregate.averages:
        return ""
    if config.federation.aggregate != "mean" or not are_uneven(data.sizes):
        return ""
    custom, name = user_objects(config).recipe is not None, config.local.recipe
    if not custom and average_of(name) == "mean":
        return ""
    subject = "your optimizer takes" if custom else f"this run of {name} takes"
    return (
        f"The sizes of the clients differ by more than a factor of 2, but {subject} the plain "
        "mean. To weight clients by their samples, set federation.aggregate = 'by-samples'."
    )


def swamping_noise(config: Config, experiment: Experiment) -> str:
    """Return a note if the noise of client-level privacy is longer than a mean update can be."""
    recipe = experiment.recipe
    if (level := level_of(recipe.stages)) is None:
        return ""
    fresh = begin(recipe, experiment.task, config.federation.seed)
    released = leaves(update_like(recipe, shared_part(recipe, fresh.params), fresh.states))
    return level.swamped(sum(leaf[0].numel() for leaf in released))


def separate_adapters(config: Config, experiment: Experiment) -> str:
    """Return a note if a private run clips the adapters of an example separately."""
    mechanism = experiment.recipe.mechanism
    if mechanism is None or not mechanism.noise:
        return ""
    params = begin(experiment.recipe, experiment.task, config.federation.seed).params
    blocks = mechanism.blocks(params)
    if blocks == 1 or not find_pairs(params):
        return ""
    return (
        f"{setting(config, 'privacy.clipping')} clips {blocks} blocks of each example's gradient "
        f"separately, so a release has the epsilon of noise / √{blocks} = "
        f"{mechanism.noise / math.sqrt(blocks):.4g}. To clip all adapters of an example together, "
        "set privacy.clipping = 'flat'."
    )


def long_steps(config: Config, experiment: Experiment) -> str:
    """Return a note if Muon's steps on the adapters of a pretrained model are very long.

    The default step size suits the linear model. With it, one round can destroy a language model.
    """
    local = config.local
    if local.lr < LONG or local.recipe not in ORTHOGONALIZED:
        return ""
    if not is_language_model(experiment.task):
        return ""
    return (
        f"local.lr = {local.lr:g} is very long for low-rank adapters: steps of {local.recipe} have "
        "this length in every direction, and usually destroy a pretrained model. Set local.lr to "
        f"a smaller value, such as {USUAL:g}."
    )
