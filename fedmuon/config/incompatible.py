"""Errors, with advice, for numbers and names in a config that do not fit together.

`demands.py` has the errors of the form "this setting does something that another setting forbids".
"""

from collections.abc import Iterator
from typing import Any

from fedmuon.config.methods import ORTHOGONALIZED, PRIVATE, has
from fedmuon.core.choices import DIALOGUES, DOCUMENTS, TEXTS, is_own
from fedmuon.orthogonalize.coefficients import schedule

LEAST_DELTA = 1e-12  # the smallest delta that the accountant supports
UNTRUE = (
    "[privacy] adjacency = 'add-remove' needs a public sampling rate, because with the default "
    "rate lot / n_i, adding one sample to client i changes the rate of all its samples. Set "
    "population or rate, or set adjacency = 'zero-out'."
)
MOVED = (
    "[privacy] adjacency = 'add-remove' needs sampling = 'poisson', because in the fixed order "
    "of 'shuffle' and 'cyclic', adding one sample moves other samples to other lots. Set "
    "adjacency = 'zero-out', or sampling = 'poisson' with a public population or rate."
)
CUT = (
    "[privacy] max-lot needs adjacency = 'zero-out' or 'replace-one' without rate and "
    "population, because the accountant must know the number of samples of each client. Set "
    "adjacency = 'zero-out' and leave rate and population out, or set max-lot = 0."
)
Config = Any  # `fedmuon.config.load.Config`, which imports this module


def problems(config: Config) -> Iterator[str]:
    """Yield an error for each combination of values that makes a config invalid."""
    data, federation = config.data, config.federation
    # With a column of clients, their number is known when the data is read, and checked then.
    counted = federation.partition != "column" or "clients" in federation.model_fields_set
    if counted and federation.per_round > federation.clients:
        yield (
            f"[federation] per-round = {federation.per_round} exceeds clients = "
            f"{federation.clients}, but only existing clients can take part in a round. Lower "
            "per-round or raise clients."
        )
    dealt = not (is_own(federation.partition) or is_own(data.name))  # sizes are known in advance
    if counted and dealt and federation.clients * data.minimum > data.train:
        yield (
            f"[data] train = {data.train} is too small, because each of {federation.clients} "
            f"clients needs minimum = {data.minimum} samples. Raise train, or lower minimum or "
            "[federation] clients."
        )
    if data.public == data.name:
        yield (
            f"[data] public = '{data.public}' is also the data set of the run, but components must "
            "not be learnt from the samples of the run. Choose another public data set, or set "
            "public = 'none'."
        )
    if config.task.name == "matrix":
        yield from one_matrix_problems(config.local.adjust)
    yield from _step_problems(config)
    default = type(config.local).model_fields["steps"].default
    if config.local.epochs and config.local.steps != default:
        yield (
            f"[local] steps = {config.local.steps} has no effect, because epochs = "
            f"{config.local.epochs:g} already sets the number of steps. Leave steps or epochs "
            "out."
        )
    if 0 < config.local.tail_index <= 1:
        yield (
            f"[local] tail-index = {config.local.tail_index} describes gradient noise whose mean "
            "does not exist, but schedule = 'heavy-tailed' needs a mean. Set tail-index above 1 "
            "and up to 2, or set 0 if the tail index is unknown."
        )
    if has(config.local.recipe, "gossip") and federation.per_round != federation.clients:
        yield (
            f"[federation] per-round = {federation.per_round} is not possible with [local] recipe "
            f"= '{config.local.recipe}', because all nodes exchange messages in each round. Leave "
            f"per-round out, or set it to clients = {federation.clients}."
        )
    yield from _text_problems(config)
    yield from _device_problems(config)
    try:
        schedule(config.orthogonalizer.coefficients, config.orthogonalizer.steps)
    except ValueError as error:
        yield f"[orthogonalizer] coefficients: {error}"


def one_matrix_problems(adjust: str) -> Iterator[str]:
    """Yield an error for a scale of the steps that has no meaning for a single matrix."""
    if adjust not in ("none", "polargrad"):
        yield (
            f"[local] adjust = '{adjust}' is only for networks. In the matrix task there is only "
            "one matrix, so lr already sets the scale of its steps. Set adjust = 'none' or "
            "'polargrad'."
        )


def _step_problems(config: Config) -> Iterator[str]:
    """Yield errors for pieces of matrices that no step orthogonalizes."""
    table, local = config.orthogonalizer, config.local
    if table.shards == 1 or local.recipe not in ORTHOGONALIZED:
        return
    # The state of a server or of a centralized recipe continues from round to round.
    on_server = has(local.recipe, "server orthogonalizes") and not has(local.recipe, "votes")
    lasts = has(local.recipe, "centralized") or on_server
    if local.steps == 1 and not local.epochs and not lasts:
        yield (
            f"[orthogonalizer] shards = {table.shards} has no effect, because the first step of "
            "each round orthogonalizes whole matrices, and a round has no other step. Set "
            "[local] steps and full-every above 1, or leave shards out."
        )
    elif table.full_every == 1:
        yield (
            f"[orthogonalizer] shards = {table.shards} has no effect with full-every = 1, "
            "because every step then orthogonalizes whole matrices. Raise full-every, or "
            "leave shards out."
        )


def _device_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that cannot be combined with simulated devices."""
    table, federation = config.devices, config.federation
    if table.mode == "none":
        return
    if table.mode == "deadline" and not (table.select or table.deadline):
        yield (
            "[devices] mode = 'deadline' needs deadline or select, but both keys are 0. Set "
            "deadline to a number of seconds, or set select above [federation] per-round = "
            f"{federation.per_round}."
        )
    if table.select and not federation.per_round <= table.select <= federation.clients:
        yield (
            f"[devices] select = {table.select} is not valid, because it must lie between "
            f"[federation] per-round = {federation.per_round} and clients = {federation.clients}. "
            "Set select to a number in this range, or to 0, which means per-round."
        )
    if table.buffer > federation.per_round:
        yield (
            f"[devices] buffer = {table.buffer} exceeds [federation] per-round = "
            f"{federation.per_round}, but only {federation.per_round} clients train at a time. "
            "Lower buffer, or raise per-round."
        )
    if table.mode == "threshold" and 0 < table.threshold < 1:
        yield (
            f"[devices] threshold = {table.threshold:g} discards every reply, because a reply that "
            "is not late has the staleness 0 and needs a threshold of at least 1. Set threshold to "
            "1 or more, or to 0, which means per-round."
        )


def _text_problems(config: Config) -> Iterator[str]:
    """Yield errors for text data without the model gpt, and for the model gpt without text data."""
    data, task = config.data, config.task
    is_text = data.name in TEXTS
    own = is_own(data.name) or is_own(task.name) or is_own(task.model)
    if task.name == "causal-lm":
        yield from _language_model_problems(config)
    elif data.name in DIALOGUES and not is_own(task.name):
        yield (
            f"[data] name = '{data.name}' needs the tokens of a pretrained language model. Set "
            "[task] name = 'causal-lm'."
        )
    elif not own and is_text != (task.name == "network" and task.model == "gpt"):
        yield (
            f"[task] model = '{task.model}' ({task.name}) cannot train on [data] name = "
            f"'{data.name}', because text data needs the model gpt, and the model gpt needs text "
            "data. For text, set [task] name = 'network' and model = 'gpt'. For other data, "
            "choose another model."
        )
    if not is_own(data.name) and is_text != (data.normalize == "tokens"):
        yield (
            f"[data] normalize = '{data.normalize}' does not suit name = '{data.name}', because "
            "only text consists of tokens. Set normalize = 'auto'."
        )
    if task.name == "network" and task.model == "gpt" and task.width % task.heads:
        yield (
            f"[task] width = {task.width} is not divisible by heads = {task.heads}, but each "
            "attention head needs an equal part of the width. Set width to a multiple of heads."
        )
    if task.lora_rank and not task.weights and task.name != "causal-lm":
        yield (
            f"[task] lora-rank = {task.lora_rank} trains adapters of a pretrained decoder, but "
            "no weights are set. Set weights to the file of a decoder, or set lora-rank = 0."
        )


def _language_model_problems(config: Config) -> Iterator[str]:
    """Yield errors for the task causal-lm without documents, without weights, or without rank."""
    data, task = config.data, config.task
    if data.name not in DOCUMENTS and not is_own(data.name):
        yield (
            f"[task] name = 'causal-lm' cannot train on [data] name = '{data.name}'. Set [data] "
            f"name to one of {', '.join(DOCUMENTS)}."
        )
    if not task.weights:
        yield (
            "[task] name = 'causal-lm' trains adapters of a pretrained model, but no weights are "
            "set. Set weights to a folder, to a .gguf file, to a name on the Hugging Face hub, or "
            "to 'smollm2'."
        )
    if not task.lora_rank:
        yield (
            "[task] name = 'causal-lm' trains low-rank adapters only, but lora-rank is 0. Set "
            "lora-rank to 1 or more, such as 8."
        )


def is_private(config: Config) -> bool:
    """Return whether a config names a private recipe or privacy of clients.

    A custom recipe may be private, too. The config does not show this.
    """
    return config.privacy.level == "client" or config.local.recipe in PRIVATE


def has_no_noise(config: Config) -> bool:
    """Return whether a run with this config is private but would release results without noise."""
    return is_private(config) and not (config.privacy.noise or config.privacy.epsilon)


def missing_noise(config: Config) -> Iterator[str]:
    """Yield an error for a private run without noise, unless the user set the key `noise`."""
    if has_no_noise(config) and "noise" not in config.privacy.model_fields_set:
        yield f"{noise_advice(config)} For tests without privacy, set noise = 0."


def noise_advice(config: Config) -> str:
    """Return the error for a private run without noise: set noise or a target epsilon."""
    named = f"[local] recipe = '{config.local.recipe}'"
    named = "[privacy] level = 'client'" if config.privacy.level == "client" else named
    return (
        f"{named} adds no noise by default, so the privacy guarantee would be void (epsilon = "
        "inf). Set [privacy] epsilon, such as 8, or noise, such as 1."
    )


def correlated_noise_problems(config: Config) -> Iterator[str]:
    """Yield errors for correlated noise with several processes or clients."""
    if _is_correlated(config.privacy):
        if config.engine.name != "inline":
            yield in_one_process(config)
        if config.federation.clients != 1:
            yield one_client(config)


def _is_correlated(privacy: Any) -> bool:
    """Return whether noise-correlation has an effect. For other lots, it is rejected elsewhere."""
    return privacy.noise_correlation != "none" and privacy.sampling == "cyclic"


def _correlated_noise(privacy: Any) -> tuple[str, str]:
    """Return the source of the correlated noise, and what makes the noise independent."""
    if privacy.noise_correlation == "none":
        return "the correlated noise of your recipe", "use independent noise in your recipe"
    named = f"[privacy] noise-correlation = '{privacy.noise_correlation}'"
    return named, "set noise-correlation = 'none'"


def in_one_process(config: Config) -> str:
    """Return the error for correlated noise with an engine that uses several processes."""
    named, fix = _correlated_noise(config.privacy)
    return (
        f"{named} needs [engine] name = 'inline', but name = '{config.engine.name}'. Correlated "
        "noise reuses secret noise of earlier steps, which must stay in the memory of one "
        f"process. Set name = 'inline', or {fix}."
    )


def one_client(config: Config) -> str:
    """Return the error for correlated noise with several clients."""
    named, fix = _correlated_noise(config.privacy)
    return (
        f"{named} needs a single client, but [federation] clients = {config.federation.clients}. "
        "Correlated noise cancels in the sum of one client's releases, but not in a mean over "
        f"several clients. Set clients = 1 and per-round = 1, or {fix}."
    )


def mechanism_problems(privacy: Any, local: Any) -> Iterator[str]:
    """Yield errors for lots, delta and noise that no private recipe supports."""
    yield from _lot_problems(privacy)
    yield from _delta_problems(privacy)
    if privacy.noise_correlation.endswith("momentum") and local.recipe != "dp-muon":
        yield (
            f"[privacy] noise-correlation = '{privacy.noise_correlation}' is only for recipe = "
            f"'dp-muon', because recipe = '{local.recipe}' adds up or filters the released "
            "gradients. Set noise-correlation = "
            f"'{'blt' if privacy.noise_correlation == 'blt-momentum' else 'sqrt-toeplitz'}'."
        )


def in_turns(lot: float, public_rate: float, adjacency: str) -> str:
    """Return why lots cannot be cut from a shuffled or cyclic order of the samples, or ""."""
    if adjacency == "add-remove" and not public_rate:
        return MOVED
    if lot != int(lot):
        return (
            f"[privacy] lot = {lot:g} is not an integer, but sampling = 'shuffle' and 'cyclic' "
            "cut lots of a fixed size from an order of the samples. Set lot to an integer."
        )
    if public_rate:
        return (
            "[privacy] sampling = 'shuffle' and 'cyclic' have no sampling rate, because they cut "
            "lots from an order of the samples, so rate, population and adjacency = 'add-remove' "
            "do not apply. Leave these three keys out, or set sampling = 'poisson'."
        )
    return ""


def _lot_problems(privacy: Any) -> Iterator[str]:
    """Yield errors for lots that cannot be drawn, or that the accountant does not support."""
    if privacy.sampling != "poisson":
        if why := in_turns(privacy.lot, privacy.public_rate, privacy.adjacency):
            yield why
    elif privacy.adjacency == "add-remove" and not privacy.public_rate:
        yield UNTRUE
    if privacy.max_lot and (privacy.public_rate or privacy.adjacency == "add-remove"):
        yield CUT
    if 0 < privacy.max_lot < privacy.lot:
        yield (
            f"[privacy] max-lot = {privacy.max_lot} is below lot = {privacy.lot:g}, so most lots "
            "would be cut. Raise max-lot, or set max-lot = 0 for no maximum."
        )
    if privacy.rate and privacy.population:
        yield (
            f"[privacy] rate = {privacy.rate:g} and population = {privacy.population} both set "
            "the sampling rate. Leave one of the two keys out."
        )
    if 0 < privacy.population < privacy.lot:
        yield (
            f"[privacy] lot = {privacy.lot:g} exceeds population = {privacy.population}, but a "
            "lot cannot have more samples than a client. Lower lot, or raise population."
        )


def _delta_problems(privacy: Any) -> Iterator[str]:
    """Yield an error if delta is too small for the privacy accountant."""
    if 0 < privacy.delta < LEAST_DELTA:
        yield (
            f"[privacy] delta = {privacy.delta} is below {LEAST_DELTA:g}, where rounding errors "
            "would dominate the computed privacy guarantee. Raise delta, or set delta = 0 for "
            "the default (at most 1e-5)."
        )
    if not privacy.delta and (many := privacy.public_population) > LEAST_DELTA ** (-1 / 1.1):
        yield (
            f"[privacy] delta = 0 means n^-1.1, and rate = {privacy.rate:g} implies n = "
            f"{many:.3g} samples, so delta would be below the supported minimum {LEAST_DELTA:g}. "
            "Set delta, or raise rate."
        )


def client_level_problems(config: Config) -> Iterator[str]:
    """Yield errors for noise and delta that client-level privacy does not support."""
    privacy = config.privacy
    if privacy.trust == "distributed" and not (privacy.noise or privacy.epsilon):
        yield (
            "[privacy] trust = 'distributed' without noise would release the exact sums of "
            "the clients' updates. Set noise or epsilon."
        )
    yield from _delta_problems(privacy)
