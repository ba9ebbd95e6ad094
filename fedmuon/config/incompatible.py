"""Errors, with advice, for keys that are valid alone but cannot be combined."""

import math
from collections.abc import Iterator
from typing import Any

from fedmuon.config.methods import ORTHOGONALIZED, PRIVATE, has
from fedmuon.core.choices import GLUE, TEXTS, is_own, with_fact
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
RETRIES = (
    "[faults] retries must be 0 in a private run, because a client that repeats a request could "
    "release twice in the same round, but the ledger contains only one release per round. Set "
    "retries = 0. If the run stops, you can resume it."
)
RELEASES = (
    "[output] clients = true is not available in a private run, because it would release "
    "measurements of the clients' samples without noise. Set clients = false, or leave "
    "--clients out."
)
CUT = (
    "[privacy] max-lot needs adjacency = 'zero-out' or 'replace-one' without rate and "
    "population, because the accountant must know the number of samples of each client. Set "
    "adjacency = 'zero-out' and leave rate and population out, or set max-lot = 0."
)
Config = Any  # `fedmuon.config.load.Config`, which imports this module


def problems(config: Config) -> Iterator[str]:
    """Yield an error for each combination of keys that makes a config invalid."""
    data, federation = config.data, config.federation
    if federation.per_round > federation.clients:
        yield (
            f"[federation] per-round = {federation.per_round} exceeds clients = "
            f"{federation.clients}, but only existing clients can take part in a round. Lower "
            "per-round or raise clients."
        )
    dealt = not (is_own(federation.partition) or is_own(data.name))  # sizes are known in advance
    if dealt and federation.clients * data.minimum > data.train:
        yield (
            f"[data] train = {data.train} is too small, because each of {federation.clients} "
            f"clients needs minimum = {data.minimum} samples. Raise train, or lower minimum or "
            "[federation] clients."
        )
    if data.center != "none" and data.normalize == "tokens":
        yield (
            "[data] center = 'public' works only for numeric samples, but the samples are "
            "tokens. Set center = 'none'."
        )
    bare = data.normalize == "pixels" or (data.normalize == "tokens" and is_own(data.name))
    if config.task.name == "matrix" and bare:
        yield (
            f"[data] normalize = '{data.normalize}' does not scale samples to a norm of at most "
            "1, but the constants of the matrix task are proved only for such samples. Set "
            "normalize to unit or ball, or set [task] name = 'network'."
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
    if config.local.epochs and config.local.schedule == "heavy-tailed":
        yield (
            "[local] schedule = 'heavy-tailed' computes lr from the number of steps, but with "
            "epochs this number differs between clients. Set steps instead of epochs."
        )
    if 0 < config.local.tail_index <= 1:
        yield (
            f"[local] tail-index = {config.local.tail_index} describes gradient noise whose mean "
            "does not exist, but schedule = 'heavy-tailed' needs a mean. Set tail-index above 1 "
            "and up to 2, or set 0 if the tail index is unknown."
        )
    yield from _text_problems(config)
    yield from _compression_problems(config)
    yield from _device_problems(config)
    if config.privacy.level == "client":
        yield from client_level_problems(config)
    elif config.local.recipe in PRIVATE:
        yield from private_recipe_problems(config)
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


def _compression_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that cannot be combined with the compression of messages."""
    table, privacy = config.compression, config.privacy
    if table.uplink == table.downlink == "none":
        return
    way = "uplink" if table.uplink != "none" else "downlink"
    named = f"[compression] {way} = '{getattr(table, way)}'"
    if has(config.local.recipe, "low-rank messages"):
        yield (
            f"{named} cannot be combined with recipe = '{config.local.recipe}', because this "
            "optimizer already compresses its messages. Set recipe = 'fedmuon', or leave "
            "[compression] out."
        )
    if table.feedback == "ef21" and config.federation.aggregate != "mean":
        yield (
            "[compression] feedback = 'ef21' works only with the plain mean, but [federation] "
            f"aggregate = '{config.federation.aggregate}'. Set aggregate = 'mean', or feedback = "
            "'error'."
        )
    client_level = privacy.level == "client"
    if client_level or config.local.recipe in PRIVATE:
        for kept, choice, mend in (
            (table.feedback != "none", f"feedback = '{table.feedback}'", "feedback = 'none'"),
            (table.uplink == "power", "uplink = 'power'", "uplink = 'low-rank'"),
        ):
            if kept:
                yield (
                    f"[compression] {choice} stores a state of each client between rounds, but "
                    "the privacy guarantee of a private run does not cover this state. Set "
                    f"{mend}."
                )
    if client_level and privacy.trust != "local" and table.uplink != "none":
        yield (
            f"{named} can only compress messages that already contain noise, but with [privacy] "
            f"trust = '{privacy.trust}' the noise is added later. Set trust = 'local', or leave "
            "[compression] out."
        )
    if client_level and table.downlink != "none":
        yield (
            f"[compression] downlink = '{table.downlink}' cannot be combined with [privacy] "
            "level = 'client', because private releases are added to the exact model and not to "
            "a compressed model. Set downlink = 'none'."
        )


def _step_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that NorMuon, MuonBP, bfloat16 or Muon on the server exclude."""
    table, local, privacy = config.orthogonalizer, config.local, config.privacy
    drawn = table.name in with_fact("orthogonalizer.name", "draws random numbers")
    server_orthogonalizes = has(local.recipe, "server orthogonalizes")
    bias_corrected = has(local.recipe, "bias-corrected")
    if server_orthogonalizes and drawn:
        yield (
            f"[orthogonalizer] name = '{table.name}' draws random numbers, but the server of "
            f"recipe = '{local.recipe}' cannot draw random numbers. Choose another "
            "orthogonalizer, such as newton-schulz."
        )
    if table.products != "full" and bias_corrected:
        yield (
            f"[orthogonalizer] products = '{table.products}' has large rounding errors, which "
            f"hide the small bias that recipe = '{local.recipe}' corrects. Leave products out, "
            "or choose a recipe that ends in -muon."
        )
    stateful = [
        f"{key} = {value:g}"
        for key, value, off in (("row-memory", table.row_memory, 0), ("shards", table.shards, 1))
        if value != off
    ]
    if not stateful or local.recipe not in ORTHOGONALIZED:
        return
    centralized = has(local.recipe, "centralized")
    lasts = centralized or server_orthogonalizes  # their state continues from round to round
    alone = local.steps == 1 and not local.epochs and not lasts
    if table.shards > 1 and (table.full_every == 1 or alone):
        yield (
            f"[orthogonalizer] shards = {table.shards} has no effect, because the first step of "
            "each round orthogonalizes whole matrices, and a round has no other step. Set "
            "[local] steps and full-every above 1, or leave shards out."
            if alone
            else (
                f"[orthogonalizer] shards = {table.shards} has no effect with full-every = 1, "
                "because every step then orthogonalizes whole matrices. Raise full-every, or "
                "leave shards out."
            )
        )
    if table.row_memory and local.adjust == "polargrad":
        yield (
            f"[orthogonalizer] {stateful[0]} averages row sizes over steps, but [local] adjust = "
            "'polargrad' changes the scale in each step. Set adjust to another value, or set "
            "row-memory = 0."
        )
    if bias_corrected:
        yield (
            f"[orthogonalizer] {stateful[0]} cannot be combined with recipe = '{local.recipe}', "
            "because the bias correction of this optimizer needs an orthogonalizer without "
            f"state. Choose a recipe that ends in -muon, or leave {stateful[0].split()[0]} out."
        )
    if centralized and privacy.level == "client":
        yield (
            f"[orthogonalizer] {stateful[0]} adds a state to recipe = '{local.recipe}', and the "
            "noise of [privacy] level = 'client' would make this state useless. Choose recipe = "
            f"'fedmuon', which resets the state every round, or leave {stateful[0].split()[0]} "
            "out."
        )


def _device_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that cannot be combined with simulated devices."""
    table, federation, privacy = config.devices, config.federation, config.privacy
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
    if table.mode == "fedbuff":
        yield from _buffer_problems(config)
    if privacy.level == "client":
        yield (
            f"[devices] mode = '{table.mode}' would publish times that reveal how many samples "
            "clients have, but [privacy] level = 'client' must hide these numbers. Set mode = "
            "'none'."
        )
    chosen = [
        named
        for named, selects in (
            (f"availability = '{table.availability}'", table.availability != "always"),
            (f"dropout = {table.dropout:g}", table.dropout > 0),
            (f"mode = '{table.mode}'", table.mode != "synchronous"),
        )
        if selects
    ]
    if config.local.recipe in PRIVATE and chosen:
        yield (
            f"[devices] {chosen[0]} selects the clients that take part, but the privacy "
            "guarantee assumes that clients are sampled uniformly. Set mode = 'synchronous', "
            "availability = 'always' and dropout = 0."
        )


def _buffer_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that cannot be combined with the late updates of FedBuff."""
    local, table = config.local, config.orthogonalizer
    if has(local.recipe, "server orthogonalizes"):
        yield (
            "[devices] mode = 'fedbuff' adds up changes of models, but the clients of recipe = "
            f"'{local.recipe}' return directions. Choose another mode, or another recipe such as "
            "fedmuon."
        )
    muon = _is_centralized_muon(local)
    lasting = [
        named
        for named, held in (
            (
                f"[local] recipe = '{local.recipe}' stores a second moment",
                has(local.recipe, "averages second moments"),
            ),
            (
                f"[local] recipe = '{local.recipe}' with aux = 'adamw' stores AdamW's second "
                "moment",
                config.task.name == "network" and local.aux == "adamw" and muon,
            ),
            (
                f"[orthogonalizer] row-memory = {table.row_memory:g} with recipe = "
                f"'{local.recipe}' stores averages of squares",
                table.row_memory > 0 and muon,
            ),
            (
                f"[orthogonalizer] shards = {table.shards} with recipe = '{local.recipe}' stores "
                "a step counter",
                table.shards > 1 and muon,
            ),
        )
        if held
    ]
    if lasting:
        yield (
            f"{lasting[0]}. With [devices] mode = 'fedbuff', weighted updates could make this "
            "stored value negative or fractional. Choose recipe = 'fedmuon' or 'local-adamw', "
            "which reset the state every round, or choose mode = 'deadline'."
        )
    if config.compression.uplink != "none" and config.compression.feedback == "ef21":
        yield (
            "[compression] feedback = 'ef21' adds the mean of all clients' last updates in every "
            "round, so [devices] mode = 'fedbuff' cannot give late replies a smaller weight. Set "
            "feedback = 'error', or mode = 'deadline'."
        )


def _is_centralized_muon(local: Any) -> bool:
    """Return whether the server averages the states of the orthogonalizer and of `aux`."""
    return has(local.recipe, "centralized") and has(local.recipe, "orthogonalizes")


def _text_problems(config: Config) -> Iterator[str]:
    """Yield errors for text data without the model gpt, and for the model gpt without text data."""
    data, task = config.data, config.task
    is_text = data.name in TEXTS
    own = is_own(data.name) or is_own(task.name) or is_own(task.model)
    if not own and is_text != (task.name == "network" and task.model == "gpt"):
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
    if data.name in GLUE and task.head == "untied":
        yield (
            "[task] head = 'untied' needs a decoder that predicts tokens, but [data] name = "
            f"'{data.name}' is a classification task. Set head = 'tied'."
        )
    if task.lora_rank and not task.weights:
        yield (
            f"[task] lora-rank = {task.lora_rank} trains adapters of a pretrained decoder, but "
            "no weights are set. Set weights to the file of a decoder, or set lora-rank = 0."
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


def private_recipe_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that no private recipe supports."""
    if config.output.clients:
        yield RELEASES
    yield from mechanism_problems(config.privacy, config.local)
    if _is_correlated(config.privacy):
        if config.engine.name != "inline":
            yield in_one_process(config)
        if config.federation.clients != 1:
            yield one_client(config)
    aggregate = config.federation.aggregate
    if config.privacy.adjacency == "add-remove" and (
        aggregate == "by-samples" or is_own(aggregate)
    ):
        yield (
            f"[federation] aggregate = '{aggregate}' may weight clients by their number of "
            "samples, but [privacy] adjacency = 'add-remove' must hide this number. Set "
            "aggregate = 'mean', or adjacency = 'zero-out'."
        )
    if config.engine.name != "inline" and config.faults.retries:
        yield RETRIES


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
    """Yield errors for keys of [privacy] and [local] that no private recipe supports."""
    if privacy.level == "client":
        yield (
            "[privacy] level = 'client' cannot be combined with a recipe that makes a private "
            "release in each step, because the noise of these releases protects single examples "
            "within a client. Set level = 'example'."
        )
    yield from _lot_problems(privacy)
    yield from _noise_problems(privacy, local.recipe)
    if local.batch:
        yield (
            f"[local] batch = {local.batch} draws shuffled batches of fixed size, which the "
            "privacy accountant does not support. Set batch = 0, and set the size of a lot with "
            "[privacy] lot instead."
        )
    yield from _delta_problems(privacy)
    if privacy.noise and math.isinf(privacy.bound):
        yield (
            f"[privacy] noise = {privacy.noise:g} needs a finite clipping bound, but bound = "
            "inf. Set bound to a finite number, or set noise = 0."
        )
    corrected = has(local.recipe, "bias-corrected")
    if corrected and local.momentum_form not in ("ema", "polyak"):
        yield (
            f"[local] momentum-form = '{local.momentum_form}' is not available with recipe = "
            f"'{local.recipe}', because there is no bias correction for this form. Set "
            "momentum-form to ema or polyak."
        )
    if corrected and privacy.noise_correlation != "none":
        yield (
            f"[local] recipe = '{local.recipe}' corrects for noise that is independent between "
            f"steps, but [privacy] noise-correlation = '{privacy.noise_correlation}' correlates "
            "the noise. Set noise-correlation = 'none', or choose a recipe that ends in -muon."
        )
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


def _noise_problems(privacy: Any, recipe: str) -> Iterator[str]:
    """Yield errors for correlated noise, and for a clipping bound that adapts to a quantile."""
    if privacy.arithmetic == "grid" and (privacy.quantile or _is_correlated(privacy)):
        correlation = f"noise-correlation = '{privacy.noise_correlation}'"
        named, off = (
            (f"quantile = {privacy.quantile:g}", "quantile = 0")
            if privacy.quantile
            else (correlation, "noise-correlation = 'none'")
        )
        yield (
            f"[privacy] arithmetic = 'grid' cannot be combined with {named}, which needs "
            f"continuous noise. Set arithmetic = 'auto', or set {off}."
        )
    if not privacy.quantile:
        return
    if privacy.clipping.startswith("automatic"):
        yield (
            f"[privacy] clipping = '{privacy.clipping}' scales every gradient, so no gradient "
            "stays unclipped, but quantile sets a share of unclipped gradients. Set quantile = "
            "0, or set clipping to flat or block."
        )
    if math.isinf(privacy.bound):
        yield (
            "[privacy] quantile adapts the clipping bound and needs a finite start, but bound = "
            "inf. Set bound to a finite number, or set quantile = 0."
        )
    if has(recipe, "bias-corrected"):
        yield (
            f"[local] recipe = '{recipe}' corrects for noise of the same scale at every step, "
            "but [privacy] quantile changes the scale. Set quantile = 0, or choose a recipe that "
            "ends in -muon."
        )
    if privacy.noise_correlation != "none":
        yield (
            "[privacy] noise-correlation needs noise of the same scale in all steps, but "
            "quantile changes the clipping bound and therefore this scale. Set quantile = 0, or "
            "noise-correlation = 'none'."
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
    """Yield errors for settings that cannot be combined with client-level privacy."""
    if config.output.clients:
        yield RELEASES
    privacy, local, federation = config.privacy, config.local, config.federation
    if local.recipe in PRIVATE:
        yield (
            f"[privacy] level = 'client' cannot be combined with recipe = '{local.recipe}', "
            "which adds noise to each step to protect single examples. Choose a recipe without "
            "dp- and disk-, or set level = 'example'."
        )
    auxiliary = config.task.name == "network" and local.aux == "adamw"
    second_moments = has(local.recipe, "averages second moments")
    if second_moments or (auxiliary and _is_centralized_muon(local)):
        yield (
            f"[privacy] level = 'client' cannot be combined with recipe = '{local.recipe}' and "
            "AdamW, because noise can make AdamW's averaged second moment negative, which has no "
            "square root. Choose a recipe that sends only its model or momentum."
        )
    if federation.aggregate != "mean":
        yield (
            f"[federation] aggregate = '{federation.aggregate}' does not bound the influence of "
            "each client, but [privacy] level = 'client' needs this bound. Set aggregate = "
            "'mean'."
        )
    if privacy.trust != "central" and privacy.cohorts == "poisson":
        yield (
            "[privacy] cohorts = 'poisson' needs participants that stay secret, but with trust = "
            f"'{privacy.trust}' the server knows which clients answer. Set cohorts = 'fixed'."
        )
    if privacy.trust == "distributed":  # clients add shares of noise and masks to integers
        if not (privacy.noise or privacy.epsilon):
            yield (
                "[privacy] trust = 'distributed' without noise would release the exact sums of "
                "the clients' updates. Set noise or epsilon."
            )
        if privacy.arithmetic == "continuous":
            yield (
                "[privacy] trust = 'distributed' adds masks to integers, but arithmetic = "
                "'continuous' uses floating-point numbers. Set arithmetic to auto or grid."
            )
        if config.engine.name != "inline" and config.faults.policy != "strict":
            yield (
                "[faults] policy = 'drop' cannot be combined with [privacy] trust = "
                "'distributed', because the masks of a failed client would stay in the sum. Set "
                "policy = 'strict'. If the run stops, you can resume it."
            )
    if math.isinf(privacy.bound):
        yield (
            "[privacy] bound = inf clips no update, but level = 'client' needs clipped updates. "
            "Set bound to a finite number."
        )
    yield from _delta_problems(privacy)
    if privacy.trust != "central" and config.engine.name != "inline" and config.faults.retries:
        yield RETRIES
