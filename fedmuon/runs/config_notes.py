"""Notes on settings that may not do what the user wants: unequal weights, and swamping noise."""

from fedmuon.config.load import Config
from fedmuon.data.federated import FederatedData
from fedmuon.federated.rounds import Experiment, begin, joint
from fedmuon.privacy.mechanisms.client_level import leaves


def config_notes(config: Config, data: FederatedData, experiment: Experiment) -> list[str]:
    """Return notes on settings that may not do what the user wants, for a run that begins."""
    return [*filter(None, (uneven_sizes(config, data, experiment),
                           swamping_noise(config, experiment)))]  # fmt: skip


def uneven_sizes(config: Config, data: FederatedData, experiment: Experiment) -> str:
    """Return a note if a plain mean averages clients whose sizes differ by more than a factor of 2.

    The note is empty for private runs, whose sizes are protected.
    """
    small, large = int(data.sizes.min()), int(data.sizes.max())
    if experiment.recipe.private or not experiment.recipe.aggregate.averages:
        return ""
    if large <= 2 * small or config.federation.aggregate != "mean":
        return ""
    return (
        f"The clients have {small} to {large} samples, but the server takes the plain mean, so "
        "each client of a round has the same weight. To weight clients by their samples, set "
        "federation.aggregate = 'by-samples'."
    )


def swamping_noise(config: Config, experiment: Experiment) -> str:
    """Return a note if the noise of client-level privacy is longer than a mean update can be."""
    recipe = experiment.recipe
    if recipe.client_level is None:
        return ""
    fresh = begin(recipe, experiment.task, config.federation.seed)
    released = leaves(joint(recipe, fresh.params, fresh.states))
    return recipe.client_level.swamped(sum(one[0].numel() for one in released))
