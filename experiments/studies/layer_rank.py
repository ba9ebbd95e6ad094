"""Study `layer-rank`: how the nuclear norm of a layer's gradient depends on its width.

The source is Newton–Schulz convergence, Appendix H.2. The network is a CifarNet, and the layer is
the first convolution of its first pair. A cell sets the layer's number of output channels
(`width`). All other widths are fixed. As a matrix, the weight of the layer has `width` rows and 216
columns.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedmuon.analysis.report.tables import Columns
from fedmuon.analysis.report.tuning import UNTUNED
from fedmuon.analysis.report.verdicts import POSITIVE, Claim, Effect, Rule
from fedmuon.config.schema import Count, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.data.source import Source
from fedmuon.experiments.studies import rank_dependence
from fedmuon.experiments.studies.rank_dependence import (
    FLAT,
    METHODS,
    NAMES,
    less_than_sgd,
    slopes,
)
from fedmuon.experiments.studies.study import Call, Study, in_words, slopes_claim
from fedmuon.experiments.suites.contents import SuiteRequest, cell
from fedmuon.federated.client_data import read_source
from fedmuon.optim.muon import Muon
from fedmuon.orthogonalize import exact_sign
from fedmuon.runs.directory import Record
from fedmuon.tasks.models import GROUPS, LEAST, cifarnet, torch_law

LAYER = "pairs.0.0.weight"
COLUMNS = 24 * 3 * 3  # number of columns of the flattened weight


class Settings(Table):
    """The keys that the suite's TOML file may contain. Step sizes are the same for all widths."""

    widths: Annotated[list[Count], Field(min_length=2)]
    steps: Annotated[list[Count], Field(min_length=1)]  # numbers of steps to average over
    seeds: Annotated[int, Field(ge=2)]
    batch: Count
    pool: Count  # side of the square of pixels that pooling averages
    memory: Annotated[float, Field(ge=0, lt=1)]
    lr_sgd: Positive
    lr_muon: Positive
    lr_aux: Positive
    smoothing: Annotated[float, Field(ge=0, lt=1)]
    renormalize: bool


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each method and width, with all seeds."""
    for width in settings.widths:
        if width % GROUPS:
            raise InputError(
                f"widths contains {width}, but every width must be a multiple of {GROUPS}, because "
                f"the layers normalize {GROUPS} groups of channels: use multiples of {GROUPS}"
            )
    return [
        Call(f"{method}-w{width}", partial(measure, settings, request.data, method, width), width)
        for method in METHODS
        for width in settings.widths
    ]


# Measurements


def measure(settings: Settings, data: str, method: str, width: int) -> Record:
    """Return a row for each seed and K: the mean of the layer's ||grad||_* over K steps."""
    images, labels, classes = pictures(read_source(cell({"data": {"name": data}})), settings.pool)
    rows = []
    for seed in range(settings.seeds):
        sizes, losses = [], []
        for gradient, loss in trained(settings, images, labels, classes, method, width, seed):
            sizes.append(float(torch.linalg.svdvals(gradient.double().flatten(1)).sum()))
            losses.append(loss)
        head = {"method": method, "rank": min(width, COLUMNS), "seed": seed}
        rows += [
            head
            | {"steps": length, "mean_nuclear": float(np.mean(sizes[:length]))}
            | {"train_loss": float(np.mean(losses[:length]))}
            for length in settings.steps
        ]
    return {"rows": rows}


def pictures(source: Source, pool: int) -> tuple[Tensor, Tensor, int]:
    """Return images [n, C, H, W], their labels, and the number of classes.

    Images are averaged over `pool` x `pool` pixels, and each channel is standardized.
    """
    raw = torch.from_numpy(np.asarray(source.inputs, dtype=np.float32))
    if raw.ndim not in (3, 4):
        raise InputError(
            f"The data set {source.name} contains no images, but this suite needs images. Choose "
            "other data with --data."
        )
    images = functional.avg_pool2d(raw[:, None] if raw.ndim == 3 else raw, pool)
    if min(images.shape[-2:]) < LEAST["cifarnet"]:
        raise InputError(
            f"pool = {pool} leaves images with sides of {min(images.shape[-2:])} pixels, but a "
            f"CifarNet needs at least {LEAST['cifarnet']} pixels: set a smaller pool"
        )
    around = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    labels = torch.from_numpy(np.asarray(source.labels))
    return (images - around[0]) / around[1], labels, source.classes


def trained(
    settings: Settings, images: Tensor, labels: Tensor, classes: int, method: str, width: int,
    seed: int,
) -> Iterator[tuple[Tensor, float]]:  # fmt: skip
    """Yield the layer's mini-batch gradient and the loss before each step."""
    network = cifarnet(tuple(images.shape[1:]), classes, width).to_empty(device="cpu")
    law = torch_law(network, generator(seed, Draw.INITIAL))
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, value in law.items():
            parameters[name].copy_(torch.from_numpy(value))
    filters = [parameter for name, parameter in parameters.items() if is_filter(name, parameter)]
    others = [parameter for name, parameter in parameters.items() if not is_filter(name, parameter)]
    optimizers = [
        optimizer_of(settings, method, filters),
        torch.optim.SGD(others, settings.lr_aux, settings.memory, nesterov=settings.memory > 0),
    ]
    for step in range(max(settings.steps)):
        rng = generator(seed, Draw.BATCH, step=step)
        rows = torch.from_numpy(rng.integers(len(labels), size=settings.batch))
        loss = functional.cross_entropy(
            network(images[rows]), labels[rows], label_smoothing=settings.smoothing
        )
        network.zero_grad()
        loss.backward()
        gradient = parameters[LAYER].grad
        assert gradient is not None
        yield gradient.detach().clone(), float(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
        if settings.renormalize and method != "sgd-m":
            renormalize(filters)


def is_filter(name: str, value: nn.Parameter) -> bool:
    """Return whether the main optimizer trains this parameter.

    The main optimizer trains only the convolutions of a pair.
    """
    return name.startswith("pairs.") and value.ndim == 4


def optimizer_of(
    settings: Settings, method: str, filters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the main optimizer: SGD with momentum, or Muon with an orthogonalizer."""
    if method == "sgd-m":
        return torch.optim.SGD(filters, settings.lr_sgd, settings.memory)
    steps = 1 if method == "muon-svd" else int(method.rsplit("-", 1)[1])
    return Muon(
        filters, settings.lr_muon, 0.0, settings.memory, nesterov=False, momentum_form="polyak",
        ns_coefficients="quintic", ns_steps=steps,
        orthogonalizer=exact_sign if method == "muon-svd" else None,
    )  # fmt: skip


@torch.no_grad()
def renormalize(filters: Sequence[Tensor]) -> None:
    """Scale each weight to the Frobenius norm sqrt(out), as in Jordan's code.

    `out` is the number of output channels.
    """
    for weight in filters:
        weight.mul_(len(weight) ** 0.5 / torch.linalg.norm(weight).clamp_min(1e-30))


# Claims

STANDS_ON = (
    "The layer is the first convolution of the first pair of a CifarNet with a learned first "
    "layer and GroupNorms. The gradient is the gradient of a mini-batch before each step. All "
    'methods and widths share the batches of a seed. We chose the tolerance for "nearly flat". '
    "The paper publishes slopes after a normalization, whose formula is missing from the text "
    "that we read."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims that SGD-M's slope is positive, and that Muon's slope is nearly zero."""
    by_method = {name: slopes(rows, name) for name in METHODS}
    last = {name: list(by_length.values())[-1] for name, by_length in by_method.items()}
    return [
        Claim(
            "With SGD-M, the nuclear norm of the layer's gradient grows with the width of the "
            "layer.",
            Effect.between("log-log slope", {"": last["sgd-m"]}, unit="slope"),
            POSITIVE,
            in_words(by_method["sgd-m"]),
        ),
        Claim(
            "At the largest number of steps K, the nuclear norm grows less with the width for "
            "every variant of Muon than for SGD-M.",
            Effect.between("slope, SGD-M − Muon", less_than_sgd(last), unit="slope"),
            POSITIVE,
            "; ".join(f"{NAMES[name]} {slope}" for name, slope in last.items()),
            untuned=UNTUNED.format("all methods"),
        ),
        slopes_claim(
            "At the largest number of steps K, the nuclear norm is about flat in the width for "
            f"every variant of Muon (log-log slope within ±{FLAT}).",
            {NAMES[name]: slope for name, slope in last.items() if name != "sgd-m"},
            Rule(-FLAT, FLAT),
        ),
    ]


STUDY = Study(
    "layer-rank", Settings, cells, claims, rank_dependence.table, STANDS_ON,
    {"layer-rank": rank_dependence.dependence},
)  # fmt: skip
