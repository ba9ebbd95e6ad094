"""The tables of an experiment, frozen and typed: which keys there are, and which values they can
have; what people are told of them is in `key_texts`.

Tables hold scalars only, because Flower's run config has no lists: a coefficient schedule is named.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from fedmuon.core import choices
from fedmuon.core.choices import is_own
from fedmuon.core.errors import instead
from fedmuon.core.tables import Scalar, Table

# Numbers that a run can have: counts that end before the first round, sizes that a library's own
# integers hold, and reals that float32 holds with their squares.
SAMPLES, ROUNDS, CLIENTS, LARGE = 10**9, 10**6, 10**7, 1e15
Samples = Annotated[int, Field(ge=1, le=SAMPLES)]
Count = Annotated[int, Field(ge=1, le=10**6)]
Natural = Annotated[int, Field(ge=0, le=2**63 - 1)]
Few = Annotated[int, Field(ge=0, le=1000)]
Positive = Annotated[float, Field(ge=1 / LARGE, le=LARGE)]
Amount = Annotated[float, Field(ge=0, le=LARGE)]
Seconds = Annotated[float, Field(gt=0, le=1e7)]
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]
Share = Annotated[float, Field(ge=0, le=1)]
Chance = Annotated[float, Field(gt=0, lt=1)]


def _named(known: Any) -> Callable[[str], str]:
    """One of our names, or an object of the user's."""
    ours = get_args(known)

    def check(value: str) -> str:
        if value in ours or is_own(value):
            return value
        raise ValueError(f"{instead(value, ours)}, or package.module:object of your own")

    return check


def _pairs(value: Any) -> Any:
    """A table of options as pairs in order, which have a hash."""
    if not isinstance(value, Mapping):
        return value
    for name, one in value.items():
        if not isinstance(one, Scalar):
            raise ValueError(f"option {name} is no single value: give a number, a word or a switch")
    return tuple(sorted(value.items()))


# What the objects that are named beside them take by these names.
Options = Annotated[tuple[tuple[str, Scalar], ...], BeforeValidator(_pairs), PlainSerializer(dict)]


class Data(Table):
    """Which samples, and how unevenly their labels fall on the clients."""

    name: Annotated[Text, AfterValidator(_named(choices.SourceName))] = "mnist5k"
    train: Samples = 4000
    test: Samples = 1000
    alpha: Annotated[float, Field(ge=1 / LARGE)] = 0.5  # Dirichlet's; inf is an even split
    minimum: Samples = 10  # samples that every client is guaranteed
    # unit and ball put samples into the unit ball; pixels divides uint8 images by 255; tokens are
    # left alone; auto is tokens for text, unit for the matrix task and pixels for a network
    normalize: Literal["auto", "unit", "ball", "pixels", "tokens"] = "auto"
    folder: Text = ""  # where the files of a local source are, if not in its usual place
    context: Count = 64  # tokens seen by a window of text
    tokenizer: Text = ""  # of e2e and dart: a folder with GPT-2's, or empty for bytes
    dimension: Samples = 20  # of `synthetic`
    classes: Annotated[int, Field(ge=2, le=10**6)] = 4  # of `synthetic`
    options: Options = ()


class Federation(Table):
    """N clients, K of them a round, R rounds (001, Algorithm 1)."""

    clients: Annotated[int, Field(ge=1, le=CLIENTS)] = 20
    per_round: Annotated[int, Field(ge=1, le=CLIENTS)] = 5
    rounds: Annotated[int, Field(ge=1, le=ROUNDS)] = 50
    risk_weights: Literal["size", "uniform"] = "size"  # p_i = n_i / n, or 1 / N, of the risk
    # of what a round's participants return
    aggregate: Annotated[Text, AfterValidator(_named(choices.Aggregate))] = "mean"
    partition: Annotated[Text, AfterValidator(_named(choices.Partition))] = "dirichlet"
    seed: Natural = 0
    options: Options = ()


class TaskTable(Table):
    """What is learned: the classifier with proved constants, or a network with cross-entropy."""

    name: Annotated[Text, AfterValidator(_named(Literal["matrix", "network"]))] = "matrix"
    model: Annotated[Text, AfterValidator(_named(choices.Model))] = "cnn"  # of `network`
    width: Count = 128  # of `gpt`, as are the next four
    depth: Annotated[int, Field(ge=1, le=256)] = 4
    heads: Count = 4
    initial: Literal["gaussian", "zero"] = "gaussian"  # X0 of `matrix`
    weights: Text = ""  # a .safetensors file, or a folder of them, to start from
    lora_rank: Annotated[int, Field(ge=0, le=10**6)] = 0  # of adapters, which alone are learned
    options: Options = ()


class Local(Table):
    """A client's round: E steps of a named chain."""

    recipe: Annotated[Text, AfterValidator(_named(choices.Recipe))] = "fedmuon"
    steps: Count = 5
    batch: Annotated[int, Field(ge=0, le=SAMPLES)] = 0  # 0 is the full batch
    lr: Positive = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # beta, the memory coefficient
    momentum_form: Literal["ema", "ema-nesterov", "polyak", "nesterov"] = "ema"
    weight_decay: Amount = 0.0  # decoupled: lr decay X
    # What lr is times in each round. heavy-tailed: lr is times, and momentum is, what 002 has for
    # so many steps; tail-index is its alpha, 0 if unknown
    schedule: Annotated[Text, AfterValidator(_named(choices.Schedule))] = "constant"
    tail_index: Annotated[float, Field(ge=0, le=2)] = 0.0
    alignment: Share = 0.5  # alpha of 001 Remark 3.2
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of fedavgm
    # A network's parameters to orthogonalize: all matrices but the first and the last layer's, or
    # all. The others take the step -aux-lr M (sgd), or that of AdamW begun afresh every round.
    route: Literal["hidden", "all-matrices"] = "hidden"
    aux: Literal["sgd", "adamw"] = "sgd"
    aux_lr: Amount = 0.0  # 0: 0.05, or 1e-3 for adamw, which a resolved config says
    # Scale of a network's orthogonalized [m, n] step, as in torch.optim.Muon: 1,
    # sqrt(max(1, m / n)), or 0.2 sqrt(max(m, n))
    adjust: Literal["none", "original", "match-rms"] = "none"
    options: Options = ()


class OrthogonalizerTable(Table):
    """The map Orth and its parameters; each map reads its own."""

    name: Annotated[Text, AfterValidator(_named(choices.Orthogonalizer))] = "smoothed-polar"
    lambda_: Annotated[float, Field(ge=1e-300, le=LARGE)] = 1e-4
    steps: Annotated[int, Field(ge=0, le=100)] = 5
    coefficients: Text = "cubic"
    eps: Positive = 1e-7
    normalization: Literal["plus", "max", "unit"] = "plus"
    sigma: Positive = 0.01
    clip_level: Positive = 0.1  # gamma of the clipped sign
    rank: Count = 5
    oversample: Annotated[int, Field(ge=0, le=10**6)] = 2
    power: Few = 1
    sketch: Literal["gaussian", "kaczmarz"] = "gaussian"
    options: Options = ()


class Privacy(Table):
    """What dp-* and disk-* release, and what others do at client level.

    Recipes dp-* and disk-* have example-level privacy within each client; at level `client` `bound`
    is that of a client's whole update, `noise` times it is the deviation of a round's sum.

    Each example's gradient is clipped to `bound` in every matrix block (the auxiliary parameters
    are one block), in one norm (flat), or scaled to it (automatic); a lot's sum over `lot` has
    noise of standard deviation `noise` times `bound` over `lot` in every entry. A client's rate is
    `lot` over its samples, or over a public `population`, or a public `rate`.
    """

    clipping: Literal["block", "flat", "automatic", "automatic-flat"] = "block"
    bound: Annotated[float, Field(ge=1 / LARGE)] = 1.0  # C; inf clips nothing
    # gamma: C follows the quantile of the norms below which a share of quantile lies, from `bound`;
    # 0 keeps C. Its logarithm moves by quantile-rate times what the share is off; that is counted
    # with the noise count-noise; 0 is the larger of lot / 20 and `noise`
    quantile: Annotated[float, Field(ge=0, lt=1)] = 0.0
    quantile_rate: Annotated[float, Field(ge=1 / LARGE, le=10)] = 0.2
    count_noise: Amount = 0.0
    noise: Amount = 0.0  # sigma
    lot: Annotated[float, Field(ge=1e-3, le=SAMPLES)] = 64.0  # samples of a Poisson lot, on average
    epsilon: Annotated[float, Field(ge=0, le=1e6)] = 0.0  # finds `noise`, if that is 0
    delta: Annotated[float, Field(ge=0, lt=1)] = 0.0  # 0: n_i^-1.1, 1e-5 at most
    level: Literal["example", "client"] = "example"  # who is protected
    trust: Literal["central", "local", "distributed"] = "central"  # who adds a client's noise
    # of a cohort, how many add their shares of it under distributed trust and tell nobody
    honest: Annotated[float, Field(gt=0, le=1)] = 0.5
    state_weight: Positive = 1.0  # of momenta's part in a client's clipped update
    cohorts: Literal["poisson", "fixed"] = "poisson"  # who takes part: secret, or known to all
    adjacency: Literal["zero-out", "add-remove", "replace-one"] = "zero-out"
    # poisson: every sample on its own, which amplifies; or lots that take turns, a sample once an
    # epoch, in an order drawn anew for each (shuffle) or once (cyclic)
    sampling: choices.Sampling = "poisson"
    # sqrt-toeplitz: DP-FTRL, a step's noise takes back some of that of the `band` - 1 before it
    noise_correlation: Literal["none", "sqrt-toeplitz"] = "none"
    band: Count = 8
    population: Annotated[int, Field(ge=0, le=SAMPLES)] = 0  # 0: of each client its own
    rate: Annotated[float, Field(ge=0, le=1)] = 0.0  # 0: lot / population
    kappa: Annotated[float, Field(gt=0, le=1)] = 0.7  # gain of DiSK's filter
    lookahead: Positive = 0.5  # gamma of 003: how far ahead DiSK looks
    probes: Annotated[int, Field(ge=1, le=1024)] = 1  # antithetic pairs of DP-MuonBC
    noise_source: choices.NoiseSource = "secure"  # a key stream, or a statistical generator
    # grid is exact discrete noise on sums of a lattice; auto is that for secret noise
    arithmetic: choices.Arithmetic = "auto"
    insecure_reproducible_noise: bool = False  # lots and noise from the run's seed

    @model_validator(mode="before")
    @classmethod
    def _named(cls, keys: Any) -> Any:
        """With a public rate it is add-remove, unless told otherwise."""
        public = isinstance(keys, Mapping) and (keys.get("population") or keys.get("rate"))
        return {"adjacency": "add-remove", **keys} if public else keys

    @property
    def public_rate(self) -> float:
        """The chance of every sample, whoever has how many; 0 if it is lot / n_i."""
        return self.rate or (min(1.0, self.lot / self.population) if self.population else 0.0)

    @property
    def public_population(self) -> float:
        """The samples of a client as far as all may know; 0 if it is its own number."""
        return self.lot / self.public_rate if self.public_rate else 0.0


class Engine(Table):
    """Where the arithmetic happens. `kernel = auto` measures the GEMM kernels of this machine."""

    name: Literal["inline", "ray", "deployment"] = "inline"
    dtype: Literal["float32", "float64"] = "float32"
    device: Text = "auto"
    kernel: Literal["torch", "channels-last", "numpy", "fused", "auto"] = "torch"
    cpus_per_client: Positive = 1.0  # of the workers of `ray`
    gpus_per_client: Amount = 0.0  # a fraction shares one GPU
    ray_address: Text = ""  # of a running cluster; empty starts a local one


class Faults(Table):
    """What happens when a participant gives no sound reply (engines `ray` and `deployment`).

    `strict` asks again and then stops, resumable; `drop` averages over those who answered, which
    the run says and the bound no longer covers.
    """

    policy: Literal["strict", "drop"] = "strict"
    retries: Few = 2
    deadline: Seconds = 600.0  # for one attempt
    patience: Seconds = 120.0  # for all nodes to appear at first


def _constant(value: float | str) -> float | str:
    """C_hp: a number that the user answers for, or the name of a proved form."""
    known = value in ("explicit", "sharp") if isinstance(value, str) else 0 < value < math.inf
    if not known:
        raise ValueError(
            f"[stability] c-hp = {value!r} is refused: give a positive number, explicit or sharp"
        )
    return value


class Stability(Table):
    """Which neighbours `fedmuon stability` runs, and what its bound stands on."""

    trials: Count = 10  # if not all
    # a sample drawn like the client's own, like anybody's, the worst of all; or each once: a census
    neighbours: Literal["own", "any", "worst", "all"] = "own"
    delta: Chance = 0.05
    lipschitz: Literal["paper", "sharp"] = "sharp"  # which constant of the map
    # of the task: on the ball around X0 that its iterates stay in, or on all models (001)
    constants: Literal["ball", "global"] = "ball"
    realized: bool = False  # also a certificate of every neighbour from the run's own path
    c_hp: Annotated[float | str, AfterValidator(_constant)] = "explicit"
    alpha_smoothing: Chance = 0.05  # may fail for gaussian-smoothed-sign (001, D.11)


class Output(Table):
    """How often a run looks at itself, in rounds (the last one always counts), and who hears."""

    evaluate_every: Samples = 10
    checkpoint_every: Samples = 10
    callback: Annotated[Text, AfterValidator(_named(choices.CallbackName))] = (
        "none"  # told of every round
    )
    options: Options = ()
