"""Combinations of valid config keys that are rejected, each with advice."""

import math
from collections.abc import Iterator
from typing import Any

from fedmuon.core.choices import GLUE, ORTHOGONALIZED, PRIVATE, TEXTS, is_own
from fedmuon.orthogonalize.coefficients import schedule

LEAST_DELTA = 1e-12  # the smallest delta that the accountant supports
UNTRUE = (
    "[privacy] adjacency = 'add-remove' does not hold for the rates lot / n_i, because adding "
    "one sample changes all of them. Set a public population or rate, or adjacency = 'zero-out'."
)
MOVED = (
    "[privacy] adjacency = 'add-remove' does not hold for sampling = 'shuffle' and 'cyclic', "
    "because adding one sample moves others to other lots. Set adjacency = 'zero-out', or "
    "sampling = 'poisson' with a public population or rate."
)
IN_ONE_PROCESS = (
    "[privacy] noise-correlation needs [engine] name = 'inline'. It reuses the noise of earlier "
    "steps, which must not leave the memory of one process: whoever has it can remove all the "
    "noise."
)
OF_REALS = (
    "[privacy] arithmetic = 'grid' supports neither noise-correlation nor quantile: set "
    "arithmetic = 'auto', or noise-correlation = 'none' and quantile = 0"
)
ONE_CLIENT = (
    "[privacy] noise-correlation cancels noise in the sum of one client's releases, and a mean "
    "over several clients breaks this. Set [federation] clients = 1, or noise-correlation = "
    "'none'."
)
RETRIES = (
    "[faults] retries could make a client release twice in the same round, which the ledger does "
    "not account for. Set retries = 0; a run that stops can be resumed."
)
RELEASES = (
    "[output] clients = true writes what each client measures on its samples, so a private run "
    "would release it without noise: set clients = false"
)
CUT = (
    "[privacy] max-lot needs the number of samples of a client, which must be public and the "
    "same in both data sets. Leave rate and population out and set adjacency to 'zero-out' or "
    "'replace-one', or set max-lot = 0."
)
Config = Any  # `fedmuon.config.load.Config`, which imports this module


def problems(config: Config) -> Iterator[str]:
    """Yield an error for each combination of keys in the config that cannot run."""
    data, federation = config.data, config.federation
    if federation.per_round > federation.clients:
        yield (
            f"[federation] per-round = {federation.per_round} exceeds clients = "
            f"{federation.clients}: lower per-round or raise clients"
        )
    dealt = not (is_own(federation.partition) or is_own(data.name))  # sizes are known in advance
    if dealt and federation.clients * data.minimum > data.train:
        yield (
            f"[data] train = {data.train} is too small to give each of {federation.clients} "
            f"clients minimum = {data.minimum} samples: raise train, or lower minimum or "
            "[federation] clients"
        )
    if data.center != "none" and data.normalize == "tokens":
        yield (
            "[data] center = 'public' is only for numeric inputs, and the inputs are tokens: set "
            "center = 'none'"
        )
    bare = data.normalize == "pixels" or (data.normalize == "tokens" and is_own(data.name))
    if config.task.name == "matrix" and bare:
        yield (
            f"[data] normalize = '{data.normalize}' leaves the unit ball, but the constants of "
            "the matrix task are proved only inside it. Set normalize to unit or ball, or [task] "
            "name = 'network'."
        )
    if config.task.name == "matrix" and config.local.adjust not in ("none", "polargrad"):
        yield (
            f"[local] adjust = '{config.local.adjust}' is only for networks. The matrix task has "
            "one matrix, whose scale is lr: set adjust = 'none' or 'polargrad'."
        )
    yield from _step_problems(config)
    default = type(config.local).model_fields["steps"].default
    if config.local.epochs and config.local.steps != default:
        yield (
            f"[local] steps = {config.local.steps} has no effect, because epochs = "
            f"{config.local.epochs:g} already sets the number of steps: leave one of them out"
        )
    if config.local.epochs and config.local.schedule == "heavy-tailed":
        yield (
            "[local] schedule = 'heavy-tailed' computes lr from the number of steps, which "
            "epochs leaves open: set steps instead of epochs"
        )
    if 0 < config.local.tail_index <= 1:
        yield (
            f"[local] tail-index = {config.local.tail_index} means noise without a mean: choose "
            "it in (1, 2], or 0 if unknown"
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


def _compression_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that cannot be combined with compressed messages."""
    table, privacy = config.compression, config.privacy
    if table.uplink == table.downlink == "none":
        return
    way = "uplink" if table.uplink != "none" else "downlink"
    named = f"[compression] {way} = '{getattr(table, way)}'"
    if config.local.recipe == "fedmuon-svd":
        yield (
            f"{named} has no place with recipe = 'fedmuon-svd', which already compresses its "
            "messages: choose recipe = 'fedmuon', or leave [compression] out"
        )
    if table.feedback == "ef21" and config.federation.aggregate != "mean":
        yield (
            "[compression] feedback = 'ef21' needs the plain mean, but [federation] aggregate = "
            f"'{config.federation.aggregate}': set aggregate = 'mean', or feedback = 'error'"
        )
    client_level = privacy.level == "client"
    if client_level or config.local.recipe in PRIVATE:
        for kept, choice, mend in (
            (table.feedback != "none", f"feedback = '{table.feedback}'", "feedback = 'none'"),
            (table.uplink == "power", "uplink = 'power'", "uplink = 'low-rank'"),
        ):
            if kept:
                yield (
                    f"[compression] {choice} stores a client's state between rounds, which the "
                    f"ledger of a private run does not account for: set {mend}"
                )
    if client_level and privacy.trust != "local" and table.uplink != "none":
        yield (
            f"{named} may only compress a message that already has its noise. With [privacy] "
            f"trust = '{privacy.trust}', noise is added later: set trust = 'local', or leave "
            "[compression] out."
        )
    if client_level and table.downlink != "none":
        yield (
            f"[compression] downlink = '{table.downlink}' cannot be combined with [privacy] "
            "level = 'client', whose releases are added to the exact model: set downlink = 'none'"
        )


def _step_problems(config: Config) -> Iterator[str]:
    """Yield errors for NorMuon, MuonBP, Muon steps on the server, and products in bfloat16."""
    table, local, privacy = config.orthogonalizer, config.local, config.privacy
    drawn = table.name in ("gaussian-smoothed-sign", "randomized-polar")
    if local.recipe == "ef21-muon" and drawn:
        yield (
            f"[orthogonalizer] name = '{table.name}' draws random numbers, but the server of "
            "recipe = 'ef21-muon' draws none: choose another orthogonalizer, such as "
            "newton-schulz"
        )
    if table.products != "full" and local.recipe.endswith("muonbc"):
        yield (
            f"[orthogonalizer] products = '{table.products}' rounds away the small difference "
            f"that recipe = '{local.recipe}' corrects: leave products out, or choose a recipe "
            "that ends in -muon"
        )
    stateful = [
        f"{key} = {value:g}"
        for key, value, off in (("row-memory", table.row_memory, 0), ("shards", table.shards, 1))
        if value != off
    ]
    if not stateful or local.recipe not in ORTHOGONALIZED:
        return
    lasts = local.recipe in ("muon", "ef21-muon")  # their state continues from round to round
    alone = local.steps == 1 and not local.epochs and not lasts
    if table.shards > 1 and (table.full_every == 1 or alone):
        yield (
            f"[orthogonalizer] shards = {table.shards} has no effect, because the first step of "
            "each round orthogonalizes whole matrices: set full-every and [local] steps above 1"
            if alone
            else (
                f"[orthogonalizer] shards = {table.shards} has no effect with full-every = 1, "
                "because every step then orthogonalizes whole matrices: raise full-every"
            )
        )
    if table.row_memory and local.adjust == "polargrad":
        yield (
            f"[orthogonalizer] {stateful[0]} averages row sizes over steps, but [local] adjust = "
            "'polargrad' rescales each step: set adjust to another scale, or row-memory = 0"
        )
    if local.recipe.endswith("muonbc"):
        yield (
            f"[orthogonalizer] {stateful[0]} cannot be combined with recipe = '{local.recipe}', "
            "whose bias correction needs an orthogonalizer without state. Choose a recipe that "
            f"ends in -muon, or leave {stateful[0].split()[0]} out."
        )
    if local.recipe == "muon" and privacy.level == "client":
        yield (
            f"[orthogonalizer] {stateful[0]} adds a state to recipe = 'muon', which the noise of "
            "[privacy] level = 'client' would make useless. Choose recipe = 'fedmuon', which "
            f"resets this state every round, or leave {stateful[0].split()[0]} out."
        )


def _device_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that cannot be combined with simulated devices."""
    table, federation, privacy = config.devices, config.federation, config.privacy
    if table.mode == "none":
        return
    if table.mode == "deadline" and not (table.select or table.deadline):
        yield (
            "[devices] mode = 'deadline' needs a deadline, or select above [federation] "
            "per-round: set one of them, or mode = 'synchronous'"
        )
    if table.select and not federation.per_round <= table.select <= federation.clients:
        yield (
            f"[devices] select = {table.select} must lie between [federation] per-round = "
            f"{federation.per_round} and clients = {federation.clients}: change it, or set 0, "
            "which means per-round"
        )
    if table.buffer > federation.per_round:
        yield (
            f"[devices] buffer = {table.buffer} exceeds [federation] per-round = "
            f"{federation.per_round}, the number of clients that train at a time: lower buffer, "
            "or raise per-round"
        )
    if table.mode == "fedbuff":
        yield from _buffer_problems(config)
    if privacy.level == "client":
        yield (
            f"[devices] mode = '{table.mode}' would publish times that reveal how many samples "
            "clients have, which [privacy] level = 'client' must hide: set mode = 'none'"
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
            f"[devices] {chosen[0]} decides who takes part, but the privacy account assumes that "
            "clients are sampled uniformly: set mode = 'synchronous', availability = 'always' "
            "and dropout = 0"
        )


def _buffer_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that cannot be combined with FedBuff's delayed updates."""
    local, table = config.local, config.orthogonalizer
    if local.recipe == "ef21-muon":
        yield (
            "[devices] mode = 'fedbuff' adds up changes of models, but the clients of recipe = "
            "'ef21-muon' return directions: choose another mode, or a recipe such as fedmuon"
        )
    lasting = [
        named
        for named, held in (
            ("[local] recipe = 'adamw' averages a second moment", local.recipe == "adamw"),
            (
                "[local] recipe = 'muon' averages AdamW's second moment with aux = 'adamw'",
                config.task.name == "network" and local.aux == "adamw" and local.recipe == "muon",
            ),
            (
                f"[orthogonalizer] row-memory = {table.row_memory:g} averages squares with "
                "recipe = 'muon'",
                table.row_memory > 0 and local.recipe == "muon",
            ),
            (
                f"[orthogonalizer] shards = {table.shards} counts steps with recipe = 'muon'",
                table.shards > 1 and local.recipe == "muon",
            ),
        )
        if held
    ]
    if lasting:
        yield (
            f"{lasting[0]}. The weighted updates of [devices] mode = 'fedbuff' could make that "
            "state negative or fractional. Choose fedmuon or local-adamw, which reset it every "
            "round, or mode = 'deadline'."
        )
    if config.compression.uplink != "none" and config.compression.feedback == "ef21":
        yield (
            "[compression] feedback = 'ef21' adds the mean of all clients' last updates in every "
            "round, so [devices] mode = 'fedbuff' cannot weight stale replies: set feedback = "
            "'error', or mode = 'deadline'"
        )


def _text_problems(config: Config) -> Iterator[str]:
    """Yield errors for text without a decoder, and for a decoder without text."""
    data, task = config.data, config.task
    is_text = data.name in TEXTS
    own = is_own(data.name) or is_own(task.name) or is_own(task.model)
    if not own and is_text != (task.name == "network" and task.model == "gpt"):
        yield (
            f"[task] model = '{task.model}' ({task.name}) cannot train on [data] name = "
            f"'{data.name}': text needs [task] name = 'network' with model = 'gpt', which in "
            "turn accepts only text"
        )
    if not is_own(data.name) and is_text != (data.normalize == "tokens"):
        yield (
            f"[data] normalize = '{data.normalize}' does not apply to name = '{data.name}': set "
            "normalize = 'auto'"
        )
    if task.name == "network" and task.model == "gpt" and task.width % task.heads:
        yield (
            f"[task] width = {task.width} is not divisible by heads = {task.heads}: make it a "
            "multiple"
        )
    if data.name in GLUE and task.head == "untied":
        yield (
            "[task] head = 'untied' is for a decoder that predicts tokens, but [data] name = "
            f"'{data.name}' is a classification task: set head = 'tied'"
        )
    if task.lora_rank and not task.weights:
        yield (
            f"[task] lora-rank = {task.lora_rank} trains adapters of a frozen decoder, and no "
            "decoder is given: set weights to its file"
        )


def has_no_noise(config: Config) -> bool:
    """Return whether a private run would add no noise to its releases."""
    privacy = config.privacy
    private = privacy.level == "client" or config.local.recipe in PRIVATE
    return private and not (privacy.noise or privacy.epsilon)


def missing_noise(config: Config) -> Iterator[str]:
    """Yield an error for a private run without noise, unless the user set `noise`."""
    if has_no_noise(config) and "noise" not in config.privacy.model_fields_set:
        yield noise_advice(config)


def noise_advice(config: Config) -> str:
    """Return the error that a private run needs noise or a target epsilon."""
    named = f"[local] recipe = '{config.local.recipe}'"
    named = "[privacy] level = 'client'" if config.privacy.level == "client" else named
    return (
        f"{named} adds no noise by default, so epsilon would be infinite. Set [privacy] epsilon, "
        "such as 8, or noise, such as 1 (noise = 0 is for tests without privacy)."
    )


def private_recipe_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that cannot be combined with any private recipe."""
    if config.output.clients:
        yield RELEASES
    yield from mechanism_problems(config.privacy, config.local)
    if config.privacy.noise_correlation != "none":
        if config.engine.name != "inline":
            yield IN_ONE_PROCESS
        if config.federation.clients != 1:
            yield ONE_CLIENT
    aggregate = config.federation.aggregate
    if config.privacy.adjacency == "add-remove" and (
        aggregate == "by-samples" or is_own(aggregate)
    ):
        yield (
            f"[federation] aggregate = '{aggregate}' may weight clients by their number of "
            "samples, which [privacy] adjacency = 'add-remove' must hide: set aggregate = "
            "'mean', or adjacency = 'zero-out'"
        )
    if config.engine.name != "inline" and config.faults.retries:
        yield RETRIES


def mechanism_problems(privacy: Any, local: Any) -> Iterator[str]:
    """Yield errors for keys of [privacy] and [local] that a private recipe excludes."""
    if privacy.level == "client":
        yield (
            "[privacy] level = 'client' cannot be combined with a recipe that releases each "
            "step. Its noise protects single examples within a client: set level = 'example'."
        )
    yield from _lot_problems(privacy)
    yield from _noise_problems(privacy, local.recipe)
    if local.batch:
        yield (
            f"[local] batch = {local.batch} is a shuffled batch of fixed size, which the "
            "accountant does not cover. Set batch = 0 and use [privacy] lot: Poisson lots, or "
            "sampling = 'shuffle' for lots in a fixed order, without amplification."
        )
    yield from _delta_problems(privacy)
    if privacy.noise and math.isinf(privacy.bound):
        yield "[privacy] noise needs a finite clipping bound: set bound, or noise = 0"
    corrected = local.recipe.endswith("muonbc")
    if corrected and local.recipe in PRIVATE and local.momentum_form not in ("ema", "polyak"):
        yield (
            f"[local] momentum-form = '{local.momentum_form}' has no bias correction: set "
            "momentum-form to ema or polyak"
        )
    if corrected and privacy.noise_correlation != "none":
        yield (
            f"[local] recipe = '{local.recipe}' corrects for noise that is independent between "
            "steps: set [privacy] noise-correlation = 'none', or choose a recipe that ends in "
            "-muon"
        )
    if privacy.noise_correlation.endswith("momentum") and local.recipe != "dp-muon":
        yield (
            f"[privacy] noise-correlation = '{privacy.noise_correlation}' is only for recipe = "
            f"'dp-muon', because recipe = '{local.recipe}' adds up or filters what it releases: "
            f"set {'blt' if privacy.noise_correlation == 'blt-momentum' else 'sqrt-toeplitz'}"
        )


def in_turns(lot: float, public_rate: float, adjacency: str) -> str:
    """Return why lots cannot be cut from a fixed order of samples; empty if they can."""
    if adjacency == "add-remove" and not public_rate:
        return MOVED
    if lot != int(lot):
        return (
            f"[privacy] lot = {lot:g} must be a whole number, because sampling = 'shuffle' and "
            "'cyclic' cut lots from samples in a fixed order: give a whole number"
        )
    if public_rate:
        return (
            "[privacy] rate, population and adjacency = 'add-remove' do not apply to sampling = "
            "'shuffle' and 'cyclic', because their lots have no sampling rate: leave the three "
            "out"
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
            "would be cut: raise it, or set 0"
        )
    if privacy.rate and privacy.population:
        yield "[privacy] rate and population both set the sampling rate: leave one of them out"
    if 0 < privacy.population < privacy.lot:
        yield f"[privacy] lot = {privacy.lot:g} exceeds population = {privacy.population}: lower it"


def _noise_problems(privacy: Any, recipe: str) -> Iterator[str]:
    """Yield errors for correlated noise, and for a clipping bound that follows a quantile."""
    if privacy.arithmetic == "grid" and (privacy.quantile or privacy.noise_correlation != "none"):
        yield OF_REALS
    if not privacy.quantile:
        return
    if privacy.clipping.startswith("automatic"):
        yield (
            f"[privacy] clipping = '{privacy.clipping}' scales every gradient, so no gradient "
            "lies below a quantile: set quantile = 0, or clipping = 'flat' or 'block'"
        )
    if math.isinf(privacy.bound):
        yield (
            "[privacy] quantile adapts the clipping bound from a finite start: set bound to a "
            "finite number"
        )
    if recipe.endswith("muonbc"):
        yield (
            f"[local] recipe = '{recipe}' corrects for noise of the same scale at every step: "
            "set [privacy] quantile = 0, or choose a recipe that ends in -muon"
        )
    if privacy.noise_correlation != "none":
        yield (
            "[privacy] noise-correlation needs noise of one scale, but quantile changes the "
            "bound and with it the scale: set quantile = 0, or noise-correlation = 'none'"
        )


def _delta_problems(privacy: Any) -> Iterator[str]:
    """Yield an error for a delta that is too small for the accountant."""
    if 0 < privacy.delta < LEAST_DELTA:
        yield (
            f"[privacy] delta = {privacy.delta} is below {LEAST_DELTA:g}, where the accountant's "
            "result would be only rounding error: raise it, or set 0 for the default (at most "
            "1e-5)"
        )
    if not privacy.delta and (many := privacy.public_population) > LEAST_DELTA ** (-1 / 1.1):
        yield (
            f"[privacy] delta = 0 means n^-1.1, and rate = {privacy.rate:g} implies n = "
            f"{many:.3g}. That delta is below {LEAST_DELTA:g}: set delta, or raise rate."
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
            "dp- and disk-, or level = 'example'."
        )
    auxiliary = config.task.name == "network" and local.aux == "adamw"
    if local.recipe == "adamw" or (local.recipe == "muon" and auxiliary):
        yield (
            f"[privacy] level = 'client' cannot be combined with recipe = '{local.recipe}' and "
            "AdamW. Noise can make its averaged second moment negative, which has no square "
            "root: choose a recipe that sends only its model or momentum."
        )
    if federation.aggregate != "mean":
        yield (
            f"[federation] aggregate = '{federation.aggregate}' does not bound the influence of "
            "each client, as [privacy] level = 'client' requires: set aggregate = 'mean'"
        )
    if privacy.trust != "central" and privacy.cohorts == "poisson":
        yield (
            "[privacy] cohorts = 'poisson' gives no amplification with trust = "
            f"'{privacy.trust}', where the server knows who answers: set cohorts = 'fixed'"
        )
    if privacy.trust == "distributed":  # clients add shares of noise and masks to integers
        if not (privacy.noise or privacy.epsilon):
            yield (
                "[privacy] trust = 'distributed' without noise would release the exact sums of "
                "the clients' updates: set noise or epsilon"
            )
        if privacy.arithmetic == "continuous":
            yield (
                "[privacy] trust = 'distributed' adds masks to integers, and arithmetic = "
                "'continuous' has none: set arithmetic to auto or grid"
            )
        if config.engine.name != "inline" and config.faults.policy != "strict":
            yield (
                "[faults] policy = 'drop' would leave masks in the sum under [privacy] trust = "
                "'distributed' when a client fails. Set policy = 'strict'; a run that stops can "
                "be resumed."
            )
    if math.isinf(privacy.bound):
        yield "[privacy] bound = inf clips no update: set a finite bound for level = 'client'"
    yield from _delta_problems(privacy)
    if privacy.trust != "central" and config.engine.name != "inline" and config.faults.retries:
        yield RETRIES
