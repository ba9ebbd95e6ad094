"""Keys of a config that are valid alone and cannot be combined, each with what to do."""

import math
from collections.abc import Iterator
from typing import Any

from fedmuon.core.choices import GLUE, ORTHOGONALIZED, PRIVATE, TEXTS, is_own
from fedmuon.orthogonalize.coefficients import schedule

LEAST_DELTA = 1e-12  # of the accountant
UNTRUE = (
    "[privacy] adjacency = 'add-remove' does not hold for rates lot / n_i, which one sample more "
    "changes for all: set a public population or rate, or adjacency = 'zero-out'"
)
MOVED = (
    "[privacy] adjacency = 'add-remove' does not hold for sampling = 'shuffle' and 'cyclic', where "
    "one sample more moves others to other lots: set adjacency = 'zero-out', or sampling = "
    "'poisson' and a public population or rate"
)
IN_ONE_PROCESS = (
    "[privacy] noise-correlation cancels noise by that of the steps before, which stays in the "
    "memory of one process, as whoever has it can undo it all: set [engine] name = 'inline'"
)
OF_REALS = (
    "[privacy] arithmetic = 'grid' has no place for noise that is mixed with that of other steps, "
    "nor for counts beside the sums: set 'auto', or noise-correlation = 'none' and quantile = 0"
)
ONE_CLIENT = (
    "[privacy] noise-correlation cancels noise in the sum of one client's releases, which no mean "
    "over others leaves as it is: set [federation] clients = 1, or noise-correlation = 'none'"
)
RETRIES = (
    "[faults] retries would ask a client for a second release in the same round, which no ledger "
    "foresaw: set retries = 0; a run that stops can be resumed"
)
RELEASES = (
    "[output] clients = true writes what single clients measure on their samples, and a private "
    "run would release it without noise: set clients = false"
)
CUT = (
    "[privacy] max-lot counts how often a lot from all samples of a client is too large, so their "
    "number must be public and the same in both data sets: leave rate and population out and set "
    "adjacency to 'zero-out' or 'replace-one', or set max-lot = 0"
)
Config = Any  # a `fedmuon.config.load.Config`, which asks here while it is made


def problems(config: Config) -> Iterator[str]:
    """One message for each combination in the config that cannot run."""
    data, federation = config.data, config.federation
    if federation.per_round > federation.clients:
        yield (
            f"[federation] per-round = {federation.per_round} exceeds clients = "
            f"{federation.clients}: sample at most as many clients as there are"
        )
    dealt = not (is_own(federation.partition) or is_own(data.name))  # of others not known yet
    if dealt and federation.clients * data.minimum > data.train:
        yield (
            f"[data] train = {data.train} cannot give {federation.clients} clients minimum = "
            f"{data.minimum} samples each: raise train, or lower minimum or [federation] clients"
        )
    if data.center != "none" and data.normalize == "tokens":
        yield "[data] center = 'public' has no meaning for tokens: set center = 'none'"
    bare = data.normalize == "pixels" or (data.normalize == "tokens" and is_own(data.name))
    if config.task.name == "matrix" and bare:
        yield (
            f"[data] normalize = '{data.normalize}' leaves the unit ball, where the constants of "
            "the matrix task are proved: use unit or ball, or [task] name = 'network'"
        )
    if config.task.name == "matrix" and config.local.adjust not in ("none", "polargrad"):
        yield (
            f"[local] adjust = '{config.local.adjust}' is for networks: the matrix task has one "
            "matrix, whose scale is lr, so set adjust = 'none' or 'polargrad'"
        )
    yield from _step_problems(config)
    default = type(config.local).model_fields["steps"].default
    if config.local.epochs and config.local.steps != default:
        yield (
            f"[local] steps = {config.local.steps} has no effect beside epochs = "
            f"{config.local.epochs:g}, which says how many steps a client takes: leave one of them "
            "out"
        )
    if config.local.epochs and config.local.schedule == "heavy-tailed":
        yield (
            "[local] schedule = 'heavy-tailed' sets lr by the number of steps, which epochs leaves "
            "open: set steps instead"
        )
    if 0 < config.local.tail_index <= 1:
        yield (
            f"[local] tail-index = {config.local.tail_index} leaves the noise without a mean: "
            "choose it in (1, 2], or 0 if unknown"
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
    """Settings that compressed messages exclude."""
    table, privacy = config.compression, config.privacy
    if table.uplink == table.downlink == "none":
        return
    way = "uplink" if table.uplink != "none" else "downlink"
    named = f"[compression] {way} = '{getattr(table, way)}'"
    if config.local.recipe == "fedmuon-svd":
        yield (
            f"{named} would compress what recipe = 'fedmuon-svd' has compressed: choose fedmuon, "
            "or leave [compression] out"
        )
    if table.feedback == "ef21" and config.federation.aggregate != "mean":
        yield (
            f"[compression] feedback = 'ef21' keeps the plain mean of the clients' estimates, and "
            f"[federation] aggregate = '{config.federation.aggregate}' is another one: set "
            "aggregate = 'mean', or feedback = 'error'"
        )
    client_level = privacy.level == "client"
    if client_level or config.local.recipe in PRIVATE:
        for kept, choice, mend in (
            (table.feedback != "none", f"feedback = '{table.feedback}'", "feedback = 'none'"),
            (table.uplink == "power", "uplink = 'power'", "uplink = 'low-rank'"),
        ):
            if kept:
                yield (
                    f"[compression] {choice} keeps a client's states between rounds, which no "
                    f"ledger of a private run counts: set {mend}"
                )
    if client_level and privacy.trust != "local" and table.uplink != "none":
        yield (
            f"{named} may follow the noise only, and with [privacy] trust = '{privacy.trust}' a "
            "client's message has not all of its noise yet: set trust = 'local', or leave "
            "[compression] out"
        )
    if client_level and table.downlink != "none":
        yield (
            f"[compression] downlink = '{table.downlink}' is not for [privacy] level = 'client', "
            "whose releases are added to the exact model: set downlink = 'none'"
        )


def _step_problems(config: Config) -> Iterator[str]:
    """What does not go with NorMuon's running sizes of rows, with MuonBP's two kinds of step, with
    steps on the server, or with products in bfloat16."""
    table, local, privacy = config.orthogonalizer, config.local, config.privacy
    drawn = table.name in ("gaussian-smoothed-sign", "randomized-polar")
    if local.recipe == "ef21-muon" and drawn:
        yield (
            f"[orthogonalizer] name = '{table.name}' draws random numbers, and the server of "
            "recipe = 'ef21-muon' draws none: choose another one, such as newton-schulz"
        )
    if table.products != "full" and local.recipe.endswith("muonbc"):
        yield (
            f"[orthogonalizer] products = '{table.products}' rounds away the small difference that "
            f"recipe = '{local.recipe}' corrects: leave it out, or choose a recipe ...-muon"
        )
    stateful = [
        f"{key} = {value:g}"
        for key, value, off in (("row-memory", table.row_memory, 0), ("shards", table.shards, 1))
        if value != off
    ]
    if not stateful or local.recipe not in ORTHOGONALIZED:
        return
    lasts = local.recipe in ("muon", "ef21-muon")  # and so counts the steps of all rounds
    alone = local.steps == 1 and not local.epochs and not lasts
    if table.shards > 1 and (table.full_every == 1 or alone):
        yield (
            f"[orthogonalizer] shards = {table.shards} has no effect: the first step of each round "
            "and each full-every-th are whole, so set full-every and [local] steps above 1"
            if alone
            else f"[orthogonalizer] shards = {table.shards} has no effect with full-every = 1, as "
            "every step is whole: raise full-every"
        )
    if table.row_memory and local.adjust == "polargrad":
        yield (
            f"[orthogonalizer] {stateful[0]} would average sizes that adjust = 'polargrad' changes "
            "in each step: set adjust to another scale, or row-memory = 0"
        )
    if local.recipe.endswith("muonbc"):
        yield (
            f"[orthogonalizer] {stateful[0]} is not for recipe = '{local.recipe}', whose bias "
            "correction needs one map without a state: choose a recipe ...-muon, or leave it out"
        )
    if local.recipe == "muon" and privacy.level == "client":
        yield (
            f"[orthogonalizer] {stateful[0]} adds a state to recipe = 'muon' that noise would "
            "spoil at [privacy] level = 'client': choose fedmuon, whose rounds begin it anew, or "
            "leave it out"
        )


def _device_problems(config: Config) -> Iterator[str]:
    """Settings that simulated devices exclude."""
    table, federation, privacy = config.devices, config.federation, config.privacy
    if table.mode == "none":
        return
    if table.mode == "deadline" and not (table.select or table.deadline):
        yield (
            "[devices] mode = 'deadline' needs deadline, or select above [federation] per-round: "
            "set one of them, or mode = 'synchronous'"
        )
    if table.select and not federation.per_round <= table.select <= federation.clients:
        yield (
            f"[devices] select = {table.select} must be from per-round = {federation.per_round} to "
            f"clients = {federation.clients}: change it, or set 0 for per-round"
        )
    if table.buffer > federation.per_round:
        yield (
            f"[devices] buffer = {table.buffer} exceeds [federation] per-round = "
            f"{federation.per_round}, the clients that are at work: lower it, or raise per-round"
        )
    if table.mode == "fedbuff":
        yield from _buffer_problems(config)
    if privacy.level == "client":
        yield (
            f"[devices] mode = '{table.mode}' would publish times that tell how many samples "
            "clients have, which [privacy] level = 'client' is to hide: set mode = 'none'"
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
            f"[devices] {chosen[0]} decides who takes part, and the account of a private run "
            "covers the schedule that is sampled uniformly: set mode = 'synchronous', "
            "availability = 'always' and dropout = 0"
        )


def _buffer_problems(config: Config) -> Iterator[str]:
    """What has no meaning for updates from older models."""
    local, table = config.local, config.orthogonalizer
    if local.recipe == "ef21-muon":
        yield (
            "[devices] mode = 'fedbuff' adds up moves of models, and the clients of recipe = "
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
                f"[orthogonalizer] row-memory = {table.row_memory:g} averages squares with recipe "
                "= 'muon'",
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
            f"{lasting[0]}, and the weighted moves of [devices] mode = 'fedbuff' could make it "
            "negative or leave no whole number: choose fedmuon or local-adamw, whose rounds begin "
            "these states anew, or mode = 'deadline'"
        )
    if config.compression.uplink != "none" and config.compression.feedback == "ef21":
        yield (
            "[compression] feedback = 'ef21' adds the mean of all clients' last updates in every "
            "round, and no weight of [devices] mode = 'fedbuff' for stale replies applies to it: "
            "set feedback = 'error', or mode = 'deadline'"
        )


def _text_problems(config: Config) -> Iterator[str]:
    """Text without a decoder, a decoder without text."""
    data, task = config.data, config.task
    is_text = data.name in TEXTS
    own = is_own(data.name) or is_own(task.name) or is_own(task.model)
    if not own and is_text != (task.name == "network" and task.model == "gpt"):
        yield (
            f"[task] model = '{task.model}' ({task.name}) cannot read [data] name = '{data.name}': "
            "text is for [task] name = 'network' with model = 'gpt', which reads nothing else"
        )
    if not is_own(data.name) and is_text != (data.normalize == "tokens"):
        yield (f"[data] normalize = '{data.normalize}' is not for name = '{data.name}': use auto")
    if task.name == "network" and task.model == "gpt" and task.width % task.heads:
        yield (
            f"[task] width = {task.width} cannot be shared by heads = {task.heads}: make it a "
            "multiple"
        )
    if data.name in GLUE and task.head == "untied":
        yield (
            f"[task] head = 'untied' is for a decoder that predicts tokens, and [data] name = "
            f"'{data.name}' is classified: set head = 'tied'"
        )
    if task.lora_rank and not task.weights:
        yield (
            f"[task] lora-rank = {task.lora_rank} learns adapters beside a decoder that stays: set "
            "weights to its file"
        )


def has_no_noise(config: Config) -> bool:
    """Whether a private run would add no noise to what it releases."""
    privacy = config.privacy
    private = privacy.level == "client" or config.local.recipe in PRIVATE
    return private and not (privacy.noise or privacy.epsilon)


def missing_noise(config: Config) -> Iterator[str]:
    """The message for a private run for which nobody set the noise."""
    if has_no_noise(config) and "noise" not in config.privacy.model_fields_set:
        yield noise_advice(config)


def noise_advice(config: Config) -> str:
    """Say that a private run needs noise or a target epsilon."""
    named = f"[local] recipe = '{config.local.recipe}'"
    named = "[privacy] level = 'client'" if config.privacy.level == "client" else named
    return (
        f"{named} adds no noise by itself, so epsilon would be infinite: set [privacy] epsilon, "
        "such as 8, or noise, such as 1 (noise = 0 is for tests without privacy)"
    )


def private_recipe_problems(config: Config) -> Iterator[str]:
    """What a private recipe, built-in or custom, cannot be combined with."""
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
            f"[federation] aggregate = '{aggregate}' may weigh clients by how many samples they "
            "have, which [privacy] adjacency = 'add-remove' is to hide: use mean, or 'zero-out'"
        )
    if config.engine.name != "inline" and config.faults.retries:
        yield RETRIES


def mechanism_problems(privacy: Any, local: Any) -> Iterator[str]:
    """What [privacy] and [local] cannot say with a private recipe."""
    if privacy.level == "client":
        yield (
            "[privacy] level = 'client' is not for a recipe that releases each step: its noise "
            "protects single examples within a client, so set level = 'example'"
        )
    yield from _lot_problems(privacy)
    yield from _noise_problems(privacy, local.recipe)
    if local.batch:
        yield (
            f"[local] batch = {local.batch} is a shuffled batch of fixed size, which the "
            "accountant does not cover: set batch = 0, and [privacy] lot for Poisson lots, or for "
            "ones that sampling = 'shuffle' has take turns, without amplification"
        )
    yield from _delta_problems(privacy)
    if privacy.noise and math.isinf(privacy.bound):
        yield "[privacy] noise needs a finite bound: set bound, or noise = 0"
    corrected = local.recipe.endswith("muonbc")
    if corrected and local.recipe in PRIVATE and local.momentum_form not in ("ema", "polyak"):
        yield (
            f"[local] momentum-form = '{local.momentum_form}' has no bias correction: set ema or "
            "polyak"
        )
    if corrected and privacy.noise_correlation != "none":
        yield (
            f"[local] recipe = '{local.recipe}' corrects for noise that is independent from step "
            "to step: set [privacy] noise-correlation = 'none', or choose ...-muon"
        )
    if privacy.noise_correlation.endswith("momentum") and local.recipe != "dp-muon":
        yield (
            f"[privacy] noise-correlation = '{privacy.noise_correlation}' is for dp-muon, and "
            f"recipe = '{local.recipe}' adds up what it releases, or filters it: set "
            f"{'blt' if privacy.noise_correlation == 'blt-momentum' else 'sqrt-toeplitz'}"
        )


def in_turns(lot: float, public_rate: float, adjacency: str) -> str:
    """Why lots cannot be cut from an order; empty where they can."""
    if adjacency == "add-remove" and not public_rate:
        return MOVED
    if lot != int(lot):
        return f"[privacy] lot = {lot:g} is to be cut from samples in an order: give a whole number"
    if public_rate:
        return (
            "[privacy] sampling = 'shuffle' and 'cyclic' have no rate that could be public, lots "
            "being cut from the samples that a client has: leave rate and population out, and "
            "adjacency = 'add-remove' with them"
        )
    return ""


def _lot_problems(privacy: Any) -> Iterator[str]:
    """Lots that cannot be drawn, or that no account covers."""
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
        yield "[privacy] rate and population both say how likely a sample is: leave one of them out"
    if 0 < privacy.population < privacy.lot:
        yield f"[privacy] lot = {privacy.lot:g} exceeds population = {privacy.population}: lower it"


def _noise_problems(privacy: Any, recipe: str) -> Iterator[str]:
    """What cannot be combined with correlated noise, or a bound that follows a quantile."""
    if privacy.arithmetic == "grid" and (privacy.quantile or privacy.noise_correlation != "none"):
        yield OF_REALS
    if not privacy.quantile:
        return
    if privacy.clipping.startswith("automatic"):
        yield (
            f"[privacy] clipping = '{privacy.clipping}' scales every gradient, so none is below a "
            "quantile: set quantile = 0, or clipping = 'flat' or 'block'"
        )
    if math.isinf(privacy.bound):
        yield "[privacy] quantile begins at bound, which must be finite then: set bound"
    if recipe.endswith("muonbc"):
        yield (
            f"[local] recipe = '{recipe}' corrects for noise that is as wide at every step: set "
            "[privacy] quantile = 0, or choose ...-muon"
        )
    if privacy.noise_correlation != "none":
        yield (
            "[privacy] noise-correlation cancels noise of one scale, which a bound that moves does "
            "not have: set quantile = 0, or noise-correlation = 'none'"
        )


def _delta_problems(privacy: Any) -> Iterator[str]:
    """A delta that no accountant can resolve."""
    if 0 < privacy.delta < LEAST_DELTA:
        yield (
            f"[privacy] delta = {privacy.delta} is below {LEAST_DELTA:g}, where an accountant sees "
            "nothing but rounding: raise it, or set 0 for 1e-5 or less"
        )
    if not privacy.delta and (many := privacy.public_population) > LEAST_DELTA ** (-1 / 1.1):
        yield (
            f"[privacy] delta = 0 is n^-1.1, and rate = {privacy.rate:g} says that n = {many:.3g}: "
            f"that is below {LEAST_DELTA:g}, so set delta, or raise rate"
        )


def client_level_problems(config: Config) -> Iterator[str]:
    """What cannot be combined with a release of the sum of clients' clipped updates."""
    if config.output.clients:
        yield RELEASES
    privacy, local, federation = config.privacy, config.local, config.federation
    if local.recipe in PRIVATE:
        yield (
            f"[privacy] level = 'client' is not for recipe = '{local.recipe}', which releases each "
            "step of a client with noise for its examples, an account of another unit: choose one "
            "without dp- and disk-, or level = 'example'"
        )
    auxiliary = config.task.name == "network" and local.aux == "adamw"
    if local.recipe == "adamw" or (local.recipe == "muon" and auxiliary):
        yield (
            f"[privacy] level = 'client' is not for recipe = '{local.recipe}' with AdamW, whose "
            "averaged second moment would be negative with noise and has no root: choose a recipe "
            "that sends its model or momentum alone"
        )
    if federation.aggregate != "mean":
        yield (
            f"[federation] aggregate = '{federation.aggregate}' has no bounded part of each client "
            "in a sum of equal weights, which is what client level releases: set aggregate = 'mean'"
        )
    if privacy.trust != "central" and privacy.cohorts == "poisson":
        yield (
            f"[privacy] cohorts = 'poisson' amplifies nothing under trust = '{privacy.trust}', "
            "where the server knows who answers: set cohorts = 'fixed'"
        )
    if privacy.trust == "distributed":  # shares of noise in masked sums of integers
        if not (privacy.noise or privacy.epsilon):
            yield (
                "[privacy] trust = 'distributed' without shares of noise would release clients' "
                "bare sums: set noise or epsilon"
            )
        if privacy.arithmetic == "continuous":
            yield (
                "[privacy] arithmetic = 'continuous' has no integers, which masks are added to "
                "under trust = 'distributed': set auto or grid"
            )
        if config.engine.name != "inline" and config.faults.policy != "strict":
            yield (
                "[faults] policy = 'drop' would leave masks in the sum of those who answered, "
                "under trust = 'distributed': set policy = 'strict'; a run that stops can be "
                "resumed"
            )
    if math.isinf(privacy.bound):
        yield "[privacy] bound = inf clips no update: set a finite bound at level = 'client'"
    yield from _delta_problems(privacy)
    if privacy.trust != "central" and config.engine.name != "inline" and config.faults.retries:
        yield RETRIES
