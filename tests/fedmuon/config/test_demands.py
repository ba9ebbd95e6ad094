"""Facts and demands: each pair is decided, and each error is plain English with its key and fix."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from conftest import small

import fedmuon
from fedmuon.config import demands as of_configs
from fedmuon.config.demands import problems
from fedmuon.config.facts import FACTS, METHOD_FACTS
from fedmuon.config.load import UNFINISHED, Config, parse
from fedmuon.core.demands import Demand, Fact, Trait, where
from fedmuon.core.errors import InputError
from fedmuon.experiments.auditing.one_run import BY_ONE_RUN, KNOWN_LAW, LAW_FACTS, OF_EXAMPLES
from fedmuon.experiments.stability.certificates import CERTIFICATE
from fedmuon.experiments.stability.influence import ADAMW_LINK, DERIVATIVES
from fedmuon.federated import recipe_demands as of_recipes
from fedmuon.federated.build import build_experiment
from fedmuon.federated.recipe_facts import FACTS as RECIPE_FACTS
from fedmuon.server.strategy import FLOWERS_LOOP

ALL_FACTS: tuple[Fact[Any], ...] = (
    *FACTS, *METHOD_FACTS, *RECIPE_FACTS, *LAW_FACTS, ADAMW_LINK
)  # fmt: skip


def declared(module: Any) -> dict[str, Demand[Any]]:
    """The demands that a module declares itself, in the order of its file."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, Demand) and not name.endswith("_KEY")
    }


OF_CONFIGS, OF_RECIPES = declared(of_configs), declared(of_recipes)
OTHERS = {
    "CERTIFICATE": CERTIFICATE, "DERIVATIVES": DERIVATIVES, "BY_ONE_RUN": BY_ONE_RUN,
    "KNOWN_LAW": KNOWN_LAW, "OF_EXAMPLES": OF_EXAMPLES, "FLOWERS_LOOP": FLOWERS_LOOP,
}  # fmt: skip
# The columns of the table: the demands of configs, of recipes, and of other computations
COLUMNS = (
    "CENTRED_DATA FEATURES MATRIX_TASK LABELLED_TEXT HEAVY_TAILED SERVER_STEPS POLARGRAD "
    "BIAS_CORRECTED NOISE_FLOOR COMPRESSION EF21 LATE_REPLIES WEIGHTED_CHANGES "
    "PRIVATE_RECIPE UNIFORM_COHORTS MECHANISM ADD_REMOVE NOISE QUANTILE GRID CLIENT_LEVEL "
    "TRUSTED_SERVER UNTRUSTED_SERVER MASKED_REPLIES MEAN_OF_PRODUCTS ADAPTER_RANKS AVERAGE "
    "ATTACKS BALL MIXING VOTES GOSSIP",
    "PRIVATE CLIENT_LEVEL TRUSTED_SERVER ADD_REMOVE COUNTED COUNTED_STATES DIFFERENT_STEPS "
    "COMPRESSION EF21 LATE_REPLIES WEIGHTED_CHANGES FINE_TUNING BATCH_NORM",
    "CERTIFICATE DERIVATIVES BY_ONE_RUN KNOWN_LAW OF_EXAMPLES FLOWERS_LOOP",
)
# A row per fact: x where the demand forbids it, and a dot where the demand allows it. If this table
# has no row for your fact, or no column for your demand, decide each pair, and add it.
TABLE = """
TOKENS               xx.............................. ............. ......
UNSCALED_SAMPLES     ..x............................. ............. ......
HOLDS_OUT_SAMPLES    ................................ ............. ....x.
DIFFERENT_STEPS      ....x........................... ............. x.....
FIXED_STEPS          ................................ ......x...... ......
SHUFFLED_BATCHES     ...............x................ ............. ......
STEP_SIZE_OF_RUN     ................................ ............. x.....
OTHER_MOMENTUM       .......x........................ ............. ......
NO_DERIVATIVE        ................................ ............. .x....
RETURNS_DIRECTIONS   ............x................... ..........xx. ......
PERSONAL_MODEL       ................................ ...........xx ......
RECOMPUTES           .............x.................. ............. ......
DROPOUT              ................................ ...x......... ......
DRAWS_RANDOM_NUMBERS .....x...................x...... ............. ......
UNSMOOTH_MAP         ................................ ............. .x....
ROUNDS_PRODUCTS      .......x........................ ............. .x....
ROUNDS_NEWTON_SCHULZ ................................ ............. x.....
ROW_MEMORY           ......xxx.....................xx ............. x.....
SPLITS_MATRICES      .......xx......................x ............. x.....
SCALES_BY_MOMENTUM   ................................ ............. x.....
SCALES_WEIGHTS       ................................ ............. x.....
SHRINKS_NETWORK      ................................ ............. x.....
STORES_CLIENT_STATES .............x......x........... xx........... .x...x
SERVER_STATE         ...........x........x......x.... ............. ......
COMPRESSES_REPLIES   .....................x...x.....x ..x....x..... xx....
COMPRESSES_MODEL     ....................x..........x .x.....x..... xx....
ENCODES_STATES       .........x...............x...... xx.....x..... .x....
SENDS_VARIABLES      .........x.....................x .......x..... .xx...
VARIES_RANKS         .............x......x..........x xx.....x..... .x....
CHANGES_BASES        ..........................x....x ............. ......
SKETCHES_GRADIENTS   .............x......x........... xx........... ......
TRAINS_VARIABLES     ...............................x ............. ..xx..
SUM_OF_ALL_CLIENTS   ...........x...............xxx.. .........x... ......
CUSTOM_STAGE         .........................x.....x xx.......x... xx....
CLIENT_RULE          ................................ .x........... ......
COUNTS_STEPS         ................................ .x.x......... ......
NOT_PLAIN_MEAN       ..........x.........x.........xx .x...x..x.... ......
NO_WEIGHTED_MEAN     ................................ ............. xx....
NO_WEIGHTS           ................................ ....x........ ......
WEIGHTS_BY_SIZE      ................x............... ...x......... ......
SELECTS_CLIENTS      ..............x................. ............. ......
PUBLISHES_TIMES      ....................x..........x ............. ......
LATE_REPLIES         ........................xx...... ............. .....x
SECRET_COHORTS       ......................x......... ............. ......
REPEATS_REQUESTS     .............x........x......... ............. ......
LEAVES_OUT_CLIENTS   .......................x.......x ............. ......
HAS_SERVER           ...............................x ............. ......
OTHER_PROCESSES      ................................ ............. ..x...
MEASURES_CLIENTS     .............x......x..........x ............. .....x
HOSTILE_CLIENTS      .......xx...........x.........xx ............. xxx...
CLIPS_CHANGES        .......xx...........x.........xx ............. xx....
MIXES_REPLIES        .......xx...........x.........xx ............. xx....
PRIVATE              ................................ ......x....x. .x....
NOISE_PER_STEP       ....................x........... ............. .x....
PROTECTS_CLIENTS     ...............x................ ............. xx....
UNCLIPPED            .................xx.x........... ............. ......
CLIPS_ALL            ..................x............. ............. ......
ADAPTS_CLIPPING      .......xx..........x............ ............. ...x..
CORRELATES_NOISE     .......xx.........xx............ ............. ......
FLOATING_POINT_NOISE .......................x........ ............. ......
FIXED_ORDER          ................................ ............. ...x..
UNTIED_HEAD          ...x............................ ............. ......
"""
BY_NAME = {**{f"config.{name}": demand for name, demand in OF_CONFIGS.items()},
           **{f"recipe.{name}": demand for name, demand in OF_RECIPES.items()},
           **OTHERS}  # fmt: skip


def undecided(
    table: str, traits: Iterable[str], groups: Iterable[Mapping[str, Demand[Any]]]
) -> list[str]:
    """Each pair of a fact and a demand on which the table and the demands do not agree."""
    rows = {name: cells for name, *cells in map(str.split, table.split("\n")[1:-1])}
    wrong = [f"no row for {trait}" for trait in traits if trait not in rows]
    for place, (columns, demands) in enumerate(zip(COLUMNS, groups, strict=True)):
        names = columns.split()
        wrong += [f"no column for {name}" for name in demands if name not in names]
        wrong += [
            f"{trait} and {name}"
            for trait, cells in rows.items()
            for name, cell in zip(names, cells[place], strict=True)
            if name in demands and (cell == "x") != (Trait[trait] in demands[name].forbids)
        ]
    return wrong


def test_each_fact_is_decided_for_each_demand() -> None:
    groups = (OF_CONFIGS, OF_RECIPES, OTHERS)
    traits = [trait.name for trait in Trait]
    assert undecided(TABLE, traits, groups) == []
    shown = {fact.trait for fact in ALL_FACTS}
    for name, demand in BY_NAME.items():
        assert {*demand.forbids} <= shown, f"{name} forbids what no fact shows"
    assert all(any(trait in demand.forbids for demand in BY_NAME.values()) for trait in Trait)


def test_the_table_of_pairs_finds_what_is_undecided() -> None:
    """The negative control: a fact, a demand and a pair that the table does not contain."""
    groups = (OF_CONFIGS, OF_RECIPES, OTHERS)
    new = {**OTHERS, "NEW": Demand(lambda subject: "new", {})}
    less = replace(CERTIFICATE, forbids={})
    assert undecided(TABLE, ["NEW"], groups) == ["no row for NEW"]
    assert undecided(TABLE, [], (OF_CONFIGS, OF_RECIPES, new)) == ["no column for NEW"]
    wrong = undecided(TABLE, [], (OF_CONFIGS, OF_RECIPES, {**OTHERS, "CERTIFICATE": less}))
    assert len(wrong) == len(CERTIFICATE.forbids) and "SCALES_WEIGHTS and CERTIFICATE" in wrong


# The sentences

FIXES = ("Set", "Choose", "Leave", "Remove", "Use", "Run")
RIDDLES = re.compile(r"\b(mend|refuse|beside|whole of|held to|nought|said|wanted|given)\b")


def flaws(error: str) -> list[str]:
    """What an error lacks: the setting, the reason, the fix, or plain sentences."""
    sentences = re.split(r"(?<=[.])\s(?=[A-Z])", error)
    first, *fixes = sentences
    lacks = []
    if not 2 <= len(sentences) <= 3 or not error.endswith("."):
        lacks.append("one to three sentences")
    if not re.fullmatch(r".+, but .+ does not allow this, because [^.]+.*\.", first):
        lacks.append("the setting, the demand and the reason")
    if not fixes or not fixes[0].startswith(FIXES):
        lacks.append("the fix")
    if len(first.split()) > 48 or ".." in error or "  " in error or RIDDLES.search(error):
        lacks.append("plain English")
    return lacks


SENTENCES = [
    demand.sentence(fact, "[table] key = 1", "[other] key = 2")
    for demand in BY_NAME.values()
    for fact in ALL_FACTS
    if fact.trait in demand.forbids
]


def test_each_error_is_plain_english_with_its_key_and_fix() -> None:
    assert len(SENTENCES) > 100
    for error in SENTENCES:
        assert not flaws(error), error


def test_flaws_of_errors_are_found() -> None:
    sound = SENTENCES[0]
    for error, flaw in (
        (sound.partition(". ")[0] + ".", "the fix"),
        (sound.replace("because", "since"), "the setting, the demand and the reason"),
        (sound.replace("Set", "Mend"), "the fix"),
        (sound + " A. B. C.", "one to three sentences"),
        (sound + ".", "plain English"),
    ):
        assert flaw in flaws(error), error


# Configs that show the facts, and configs that demand

PRIVATE = {"local": {"recipe": "dp-muon"}, "privacy": {"noise": 1.0}}
CLIENTS = {"privacy": {"level": "client", "noise": 1.0}}
NETWORK = {"task": {"name": "network"}}
ROUNDED = {"orthogonalizer": {"name": "newton-schulz", "products": "bfloat16"}}
RAY = {"engine": {"name": "ray"}}
SHOWS: dict[str, dict[str, Any]] = {  # key and trait -> tables
    "data.normalize TOKENS": {"data": {"name": "pydoc"}},
    "data.normalize UNSCALED_SAMPLES": {"data": {"normalize": "pixels"}},
    "data.client-test HOLDS_OUT_SAMPLES": {"data": {"client-test": 0.2}},
    "federation.aggregate NOT_PLAIN_MEAN": {"federation": {"aggregate": "by-samples"}},
    "federation.aggregate NO_WEIGHTED_MEAN": {"federation": {"aggregate": "median"}},
    "federation.aggregate WEIGHTS_BY_SIZE": {"federation": {"aggregate": "by-samples"}},
    "federation.adapters NOT_PLAIN_MEAN": NETWORK | {"federation": {"adapters": "exact"}},
    "federation.adapters NO_WEIGHTED_MEAN": NETWORK | {"federation": {"adapters": "exact"}},
    "federation.subspace-bases SKETCHES_GRADIENTS": NETWORK | {
        "federation": {"adapters": "subspace", "subspace-bases": "gradient"}},
    "federation.subspace-bases CHANGES_BASES": NETWORK | {
        "federation": {"adapters": "subspace", "subspace-bases": "gradient"}},
    "federation.adapters CHANGES_BASES": NETWORK | {"federation": {"adapters": "exact"}},
    "federation.adapter-ranks VARIES_RANKS": NETWORK | {"federation": {"adapter-ranks": "1, 2"}},
    "federation.adapters SENDS_VARIABLES": NETWORK | {"federation": {"adapters": "subspace"}},
    "federation.adapters TRAINS_VARIABLES": NETWORK | {"federation": {"adapters": "freeze-a"}},
    "federation.stage CUSTOM_STAGE": {"federation": {"stage": "stages:mine"}},
    "task.checkpointing RECOMPUTES": {"task": {"checkpointing": True}},
    "task.head UNTIED_HEAD": {"task": {"head": "untied"}},
    "local.recipe RETURNS_DIRECTIONS": {"local": {"recipe": "ef21-muon"}},
    "local.recipe ENCODES_STATES": {"local": {"recipe": "fedmuon-svd"}},
    "local.recipe SERVER_STATE": {"local": {"recipe": "adamw"}},
    "local.aux SERVER_STATE": NETWORK | {"local": {"recipe": "muon", "aux": "adamw"}},
    "local.recipe NOISE_PER_STEP": PRIVATE,
    "local.epochs DIFFERENT_STEPS": {"local": {"epochs": 1.0}},
    "local.batch SHUFFLED_BATCHES": {"local": {"batch": 4}},
    "local.schedule STEP_SIZE_OF_RUN": {"local": {"schedule": "heavy-tailed"}},
    "local.momentum-form OTHER_MOMENTUM": {"local": {"momentum-form": "nesterov"}},
    "local.adjust SCALES_BY_MOMENTUM": {"local": {"adjust": "polargrad"}},
    "local.renormalize SCALES_WEIGHTS": NETWORK | {"local": {"renormalize": True}},
    "local.weight-decay SHRINKS_NETWORK": NETWORK | {"local": {"weight-decay": 0.1}},
    "orthogonalizer.name DRAWS_RANDOM_NUMBERS": {"orthogonalizer": {"name": "randomized-polar"}},
    "orthogonalizer.name UNSMOOTH_MAP": {"orthogonalizer": {"name": "exact-sign"}},
    "orthogonalizer.products ROUNDS_PRODUCTS": ROUNDED,
    "orthogonalizer.products ROUNDS_NEWTON_SCHULZ": ROUNDED,
    "orthogonalizer.row-memory ROW_MEMORY": {"orthogonalizer": {"row-memory": 0.9}},
    "orthogonalizer.row-memory SERVER_STATE": {
        "orthogonalizer": {"row-memory": 0.9}, "local": {"recipe": "muon"}
    },
    "orthogonalizer.shards SPLITS_MATRICES": {"orthogonalizer": {"shards": 2}},
    "orthogonalizer.shards SERVER_STATE": {
        "orthogonalizer": {"shards": 2}, "local": {"recipe": "muon"}
    },
    "privacy.level PROTECTS_CLIENTS": CLIENTS,
    "privacy.bound UNCLIPPED": {"privacy": {"bound": float("inf")}},
    "privacy.clipping CLIPS_ALL": {"privacy": {"clipping": "automatic"}},
    "privacy.quantile ADAPTS_CLIPPING": {"privacy": {"quantile": 0.5}},
    "privacy.noise-correlation CORRELATES_NOISE": {
        "privacy": {"noise-correlation": "sqrt-toeplitz"}
    },
    "privacy.arithmetic FLOATING_POINT_NOISE": {"privacy": {"arithmetic": "continuous"}},
    "privacy.cohorts SECRET_COHORTS": {"privacy": {"cohorts": "poisson"}},
    "engine.name OTHER_PROCESSES": RAY,
    "engine.name HAS_SERVER": {"engine": {"name": "deployment"}},
    "faults.retries REPEATS_REQUESTS": RAY | {"faults": {"retries": 2}},
    "faults.policy LEAVES_OUT_CLIENTS": RAY | {"faults": {"policy": "drop"}},
    "devices.availability SELECTS_CLIENTS": {
        "devices": {"mode": "synchronous", "availability": "day-night"}
    },
    "devices.dropout SELECTS_CLIENTS": {"devices": {"mode": "synchronous", "dropout": 0.1}},
    "devices.mode SELECTS_CLIENTS": {"devices": {"mode": "deadline", "deadline": 9.0}},
    "devices.mode PUBLISHES_TIMES": {"devices": {"mode": "synchronous"}},
    "devices.mode LATE_REPLIES": {"devices": {"mode": "fedbuff"}},
    "compression.uplink COMPRESSES_REPLIES": {"compression": {"uplink": "qsgd"}},
    "compression.downlink COMPRESSES_MODEL": {"compression": {"downlink": "qsgd"}},
    "compression.feedback STORES_CLIENT_STATES": {
        "compression": {"uplink": "top-k", "feedback": "error"}
    },
    "compression.uplink STORES_CLIENT_STATES": {"compression": {"uplink": "power"}},
    "compression.feedback SUM_OF_ALL_CLIENTS": {
        "compression": {"uplink": "top-k", "feedback": "ef21"}
    },
    "attacks.kind HOSTILE_CLIENTS": {"attacks": {"kind": "mimic", "share": 0.5}},
    "robust.ball CLIPS_CHANGES": {"robust": {"ball": "matrix"}},
    "robust.mixing MIXES_REPLIES": {"robust": {"mixing": 1}},
    "output.clients MEASURES_CLIENTS": {"output": {"clients": True}},
    "local.recipe STORES_CLIENT_STATES": {"local": {"recipe": "scaffold"}},
    "local.recipe NO_DERIVATIVE": {"local": {"recipe": "local-adamw"}},
}  # fmt: skip
DEMANDS: dict[str, dict[str, Any]] = {
    "CENTRED_DATA": {"data": {"center": "public"}},
    "FEATURES": {"data": {"features": "hog"}},
    "MATRIX_TASK": {"task": {"name": "matrix"}},
    "LABELLED_TEXT": {"data": {"name": "sst-2"}},
    "HEAVY_TAILED": {"local": {"schedule": "heavy-tailed"}},
    "SERVER_STEPS": {"local": {"recipe": "ef21-muon"}},
    "POLARGRAD": {"local": {"adjust": "polargrad"}},
    "BIAS_CORRECTED": {"local": {"recipe": "dp-muonbc"}, "privacy": {"noise": 1.0}},
    "NOISE_FLOOR": {
        "local": {"recipe": "dp-muon"},
        "privacy": {"noise": 1.0},
        "orthogonalizer": {"noise-floor": 0.5},
    },
    "COMPRESSION": {"compression": {"uplink": "top-k"}},
    "EF21": {"compression": {"uplink": "top-k", "feedback": "ef21"}},
    "LATE_REPLIES": {"devices": {"mode": "threshold"}},
    "WEIGHTED_CHANGES": {"devices": {"mode": "fedbuff"}},
    "PRIVATE_RECIPE": PRIVATE,
    "UNIFORM_COHORTS": PRIVATE,
    "MECHANISM": PRIVATE,
    "ADD_REMOVE": {
        "local": {"recipe": "dp-muon"},
        "privacy": {"noise": 1.0, "adjacency": "add-remove", "population": 1000},
    },
    "NOISE": PRIVATE,
    "QUANTILE": {"local": {"recipe": "dp-muon"}, "privacy": {"noise": 1.0, "quantile": 0.5}},
    "GRID": {"local": {"recipe": "dp-muon"}, "privacy": {"noise": 1.0, "arithmetic": "grid"}},
    "CLIENT_LEVEL": CLIENTS,
    "TRUSTED_SERVER": CLIENTS,
    "UNTRUSTED_SERVER": {"privacy": {"level": "client", "noise": 1.0, "trust": "local"}},
    "MASKED_REPLIES": {"privacy": {"level": "client", "noise": 1.0, "trust": "distributed"}},
    "ADAPTER_RANKS": NETWORK | {"federation": {"adapter-ranks": "1, 2"}},
    "AVERAGE": {"output": {"average": 0.5}},
    "VOTES": {"local": {"recipe": "sign-muon"}},
    "GOSSIP": {"local": {"recipe": "demuon"}},
    "MEAN_OF_PRODUCTS": NETWORK | {"federation": {"adapters": "exact"}},
    "ATTACKS": {"attacks": {"kind": "sign-flip", "share": 0.5}},
    "BALL": {"robust": {"ball": "model"}},
    "MIXING": {"robust": {"mixing": 1}},
}


def merged(*tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    both: dict[str, dict[str, Any]] = {}
    for keys_of in tables:
        for table, keys in keys_of.items():
            both[table] = both.get(table, {}) | keys
    return both


def unfinished(tables: dict[str, Any]) -> Config:
    """A config whose combinations are not checked."""
    return Config.model_validate(tables, context=UNFINISHED)


def facts_of(key_and_trait: str) -> tuple[str, list[str], list[Fact[Any]]]:
    """The key of an example, what its config shows, and the facts with this trait."""
    key, _, trait = key_and_trait.partition(" ")
    facts = [fact for fact in (*FACTS, *METHOD_FACTS) if fact.trait is Trait[trait]]
    config = unfinished(SHOWS[key_and_trait])
    return key, [name for fact in facts if (name := fact.named(config))], facts


def test_each_fact_of_a_config_names_its_key_and_value() -> None:
    assert len(SHOWS) == len(FACTS) + len(METHOD_FACTS)
    for example in SHOWS:
        key, shown, facts = facts_of(example)
        table, _, name = key.partition(".")
        assert any(re.fullmatch(rf"\[{table}\] {name} = \S.*", text) for text in shown), example
        bare = unfinished(NETWORK)
        assert not any(fact.named(bare) for fact in facts if fact.trait not in SHOWN_BY_DEFAULT)


# Traits that some defaults show: without privacy, nothing forbids random cohorts.
SHOWN_BY_DEFAULT = {Trait.SECRET_COHORTS, Trait.UNSCALED_SAMPLES}

PAIRS = [
    (demand, example)
    for demand in OF_CONFIGS
    for example in SHOWS
    if Trait[example.partition(" ")[2]] in OF_CONFIGS[demand].forbids
    # The built recipe shows the former. Custom optimizers meet the latter (`mechanism_problems`).
    and example != "local.recipe STORES_CLIENT_STATES"
    and (demand, example) != ("MECHANISM", "privacy.level PROTECTS_CLIENTS")
]


@pytest.mark.parametrize(("name", "example"), PAIRS)
def test_a_forbidden_fact_is_rejected(name: str, example: str) -> None:
    """Each pair gives its error, and the config is not accepted."""
    demand, fact = OF_CONFIGS[name], Trait[example.partition(" ")[2]]
    tables = merged(SHOWS[example], DEMANDS[name])
    config = unfinished(tables)
    errors = [*demand.problems(config, FACTS)]
    assert any(f" {fact}, but {demand.named(config)} " in error for error in errors)
    assert {*errors} <= {*problems(config)}
    with pytest.raises(InputError):
        parse(tables)


# A new feature declares its facts, and no demand changes


class Factors(fedmuon.Stage):
    """A stage that says of itself that it encodes states."""

    facts = (Trait.ENCODES_STATES,)


def test_a_stage_declares_its_own_facts() -> None:
    def built(stage: fedmuon.Stage, **tables: Any) -> Any:
        config = small({}, **tables)
        return build_experiment(config.with_objects(replace(config.given, stage=stage)))

    named = {"federation": {"stage": "given"}}
    with pytest.raises(InputError, match=r"sends states in an encoded .* compressed only once"):
        built(Factors(), compression={"uplink": "qsgd"}, **named)
    built(fedmuon.Stage(), compression={"uplink": "qsgd"}, **named)  # the control
    odd = Factors()
    odd.facts = ("flies",)  # type: ignore[assignment]
    with pytest.raises(InputError, match="has the fact flies, which is unknown"):
        built(odd, **named)


def test_a_new_fact_meets_the_demands() -> None:
    new = Fact(Trait.STORES_CLIENT_STATES, where("local.lr", lambda lr: lr > 7), "Set lr = 1")
    config = unfinished(merged(PRIVATE, {"local": {"lr": 8.0}}))
    (error,) = OF_CONFIGS["PRIVATE_RECIPE"].problems(config, [new])
    assert error.startswith("[local] lr = 8 stores a state") and error.endswith("Set lr = 1.")
