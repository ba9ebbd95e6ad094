"""Compressors against the reference, their means by Monte Carlo, and errors against bounds."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import quick
from reference import compressors
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.optim.compression import (
    Compression,
    Compressor,
    decoded,
    identity,
    power,
    qsgd,
    random_k,
    rows,
    sign,
    svd,
    templates,
    top_k,
)

CONTRACTIVE = [top_k(0.3), top_k(0.01), rows(0.4), sign(), svd(1), svd(2)]
UNBIASED = [random_k(0.25), random_k(1.0), qsgd(1), qsgd(3), qsgd(40), identity()]
EVERY = [*CONTRACTIVE, *UNBIASED, power(1), power(2, 3)]


def matrices(seed: int, shape: tuple[int, ...] = (2, 7, 5)) -> Tensor:
    """Heavy-tailed entries, so that selections differ from draws at random."""
    return torch.from_numpy(np.random.default_rng(seed).standard_t(2, shape))


def through(compressor: Compressor, value: Tensor, seed: int = 0) -> Tensor:
    parts = compressor.encode(value, np.random.default_rng(seed))
    return compressor.decode(parts, value)


def means(compressor: Compressor, value: Tensor, count: int = 4000) -> tuple[Tensor, Tensor]:
    """The z-score of each entry's mean error, and the mean squared error over ||x||^2."""
    rng = np.random.default_rng(5)
    errors = torch.stack(
        [compressor.decode(compressor.encode(value, rng), value) - value for _ in range(count)]
    )
    spread = errors.std(0).clamp(min=1e-300) / math.sqrt(count)
    squares = errors.flatten(2).square().sum(2).mean(0) / value.flatten(1).square().sum(1)
    return errors.mean(0) / spread, squares


@pytest.mark.parametrize(
    "compressor", quick(UNBIASED[:-1], [UNBIASED[0], UNBIASED[3]]), ids=lambda one: one.name
)
def test_means_are_right_and_errors_below_their_bound(compressor: Compressor) -> None:
    value = matrices(1)
    scores, squares = means(compressor, value)
    scores = scores[scores.abs() < 1e10]  # entries that are never wrong but by rounding
    assert scores.numel() == 0 or scores.abs().max() < 4.5  # of 70
    assert (squares <= 1.05 * compressor.error(value) + 1e-20).all()


@pytest.mark.parametrize("compressor", CONTRACTIVE, ids=lambda one: one.name)
@pytest.mark.parametrize("seeds", quick([20, 200], [20]))
def test_selections_are_biased_and_contract(compressor: Compressor, seeds: int) -> None:
    """The control of the test above: their z-scores are large."""
    value = matrices(2)
    assert not compressor.unbiased
    scores, _ = means(compressor, value, 50)
    assert scores.abs().max() > 100
    for seed in range(seeds):
        for shape in ((2, 7, 5), (1, 4, 3, 2), (3, 9)):
            one = matrices(seed, shape)
            lost = (through(compressor, one) - one).flatten(1).square().sum(1)
            bound = compressor.error(one) * one.flatten(1).square().sum(1)
            assert (lost <= bound * (1 + 1e-12) + 1e-25).all(), (seed, shape)
    assert 0 < compressor.error(value) < 1


def test_the_bounds_are_attained() -> None:
    """A smaller bound would be wrong: equal entries for top-k, one entry for sign, and so on."""
    equal, one = torch.ones(1, 4, 4).double(), torch.zeros(1, 4, 4).double()
    one[0, 0, 0] = 1
    for compressor, value in ((top_k(0.25), equal), (rows(0.25), equal), (sign(), one)):
        lost = (through(compressor, value) - value).square().sum() / value.square().sum()
        assert float(lost) == pytest.approx(compressor.error(value), rel=1e-12, abs=0)
    wide = torch.eye(4, 12).double()[None]
    lost = (through(svd(1), wide) - wide).square().sum() / 4
    assert float(lost) == pytest.approx(svd(1).error(wide), rel=1e-12, abs=0)


def test_power_contracts_in_the_mean() -> None:
    """With a random R, and its bound is attained where all singular values are equal."""
    for value in (matrices(2), matrices(3, (1, 4, 9)), matrices(4, (3, 9, 2, 2))):
        for one in (power(1), power(2), power(1, 3)):
            _, squares = means(one, value, 400)
            assert (squares <= 1.05 * one.error(value)).all()
    equal = torch.eye(4, 12).double()[None]
    lost = (through(power(1), equal) - equal).square().sum() / 4
    assert float(lost) == pytest.approx(power(1).error(equal), rel=1e-12, abs=0)
    assert not power(1).unbiased and means(power(1), matrices(2), 400)[0].abs().max() > 20


EXPECTED: dict[str, tuple[Compressor, compressors.Compressor]] = {
    "top-k": (top_k(0.2), compressors.top_k(0.2)),
    "random-k": (random_k(0.2), compressors.random_k(0.2)),
    "rows": (rows(0.4), compressors.rows(0.4)),
    "qsgd": (qsgd(3), compressors.qsgd(3)),
    "sign": (sign(), compressors.sign),
    "low-rank": (svd(2), compressors.low_rank(2)),
    "power": (power(2), compressors.power(2)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_values_equal_the_reference(name: str) -> None:
    value, (compressor, expected) = matrices(3), EXPECTED[name]
    found = through(compressor, value, 9).numpy()
    for s, matrix in enumerate(value.numpy()):
        image = expected(matrix, np.random.default_rng(9), {})
        np.testing.assert_allclose(found[s], image, rtol=1e-11, atol=1e-13)
        assert np.abs(image - matrix).max() > 1e-3


def test_random_entries_are_those_of_all_replicas() -> None:
    value = matrices(3)
    some = through(random_k(0.2), value) / value
    assert set(some.numpy().round(12).ravel()) == {0.0, 5.0}
    assert (some[0] == some[1]).all()  # replicas share a draw


@pytest.mark.parametrize("compressor", EVERY, ids=lambda one: one.name)
@pytest.mark.parametrize("shape", [(2, 7, 5), (1, 3), (1, 6, 2, 2), (1, 300, 200)], ids=str)
def test_messages_are_as_templates_say(compressor: Compressor, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64):
        value = matrices(4, shape).to(dtype)
        parts = compressor.encode(value, np.random.default_rng(0))
        like = compressor.template(value)
        assert {n: (p.shape, p.dtype) for n, p in parts.items()} == {
            n: (p.shape, p.dtype) for n, p in like.items()
        }
        found = compressor.decode(parts, value)
        assert found.shape == value.shape and found.dtype == dtype
        zero = through(compressor, torch.zeros_like(value))
        assert (zero == 0).all()


def bytes_of(compressor: Compressor, value: Tensor) -> int:
    parts = compressor.encode(value, np.random.default_rng(0))
    return sum(part.numel() * part.element_size() for part in parts.values())


def test_bytes_are_what_the_formulas_say() -> None:
    """Of 300 x 200 numbers with 4 bytes each; positions below 2^15 have 2 bytes, others 4."""
    value = matrices(0, (1, 300, 200)).float()

    def size(compressor: Compressor) -> int:
        return bytes_of(compressor, value)

    assert size(identity()) == 240_000
    assert size(top_k(0.01)) == size(random_k(0.01)) == 600 * (4 + 4)
    assert size(rows(0.1)) == 30 * (200 * 4 + 2)
    assert size(sign()) == 60_000 // 8 + 4
    assert size(qsgd(1)) == 60_000 * 2 // 8 + 4
    assert size(qsgd(7)) == 60_000 * 4 // 8 + 4  # 15 codes
    assert size(qsgd(8)) == 60_000 * 5 // 8 + 4  # 17 codes
    assert size(svd(4)) == size(power(4)) == 4 * (300 + 200) * 4
    assert bytes_of(top_k(0.1), value[:, :10, :20]) == 20 * (4 + 2)


@pytest.mark.parametrize("make", [top_k, random_k, rows])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 10, 20), (2, 3, 1), (1, 300, 200), (2, 5)], ids=str)
def test_no_selection_sends_more_than_the_whole(
    make: Callable[[float], Compressor], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """From some share on, the tensor itself has fewer bytes, and is sent without an error."""
    value = matrices(6, shape).to(dtype)
    whole = bytes_of(identity(), value)
    for share in (0.3, 0.5, 0.6, 0.7, 0.9, 1.0):
        one = make(share)
        taken = bytes_of(one, value)
        assert taken <= whole and set(one.template(value)) == set(
            one.encode(value, np.random.default_rng(0))
        )
        if taken == whole:
            assert (through(one, value) == value).all() and one.error(value) == 0
        else:
            assert one.error(value) > 0
    assert bytes_of(make(1.0), value) == whole  # not vacuous
    few = make(0.3)
    assert bytes_of(few, value) < whole or (make is rows and value.ndim < 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [0.55, 0.99, -0.8])
def test_norms_out_of_range_leave_qsgd_sound(dtype: torch.dtype, exponent: float) -> None:
    """Squares that overflow, norms that do, and squares that vanish: finite, and right on average.

    The control: the norm of such numbers, without a scale, is infinite or 0.
    """
    top = math.log10(torch.finfo(dtype).max)
    value = (torch.randn(1, 40, 30).clamp(-3, 3).double() / 3).to(dtype)
    value = value * torch.tensor(10.0 ** (exponent * top), dtype=dtype)
    norm = float(torch.linalg.vector_norm(value))
    assert norm == 0 or norm == math.inf
    rng = np.random.default_rng(1)
    found = torch.stack(
        [qsgd(40).decode(qsgd(40).encode(value, rng), value) for _ in range(200)]
    ).double()
    assert found.isfinite().all()
    scale = value.double().abs().max()
    errors = (found / scale).mean(0) - value.double() / scale
    level = float(torch.linalg.vector_norm(value.double() / scale)) / 40
    assert errors.abs().max() < 6 * level / 2 / math.sqrt(200)  # a draw deviates by level / 2
    assert (value.double() / scale - found[0] / scale).abs().max() < 2


def test_values_that_are_not_finite_stay_visible_in_qsgd() -> None:
    value = torch.ones(1, 3, 4)
    value[0, 0, 0] = math.inf
    assert not through(qsgd(3), value).isfinite().all()


@pytest.mark.parametrize(
    "make",
    [lambda: top_k(0.0), lambda: random_k(1.5), lambda: rows(math.nan), lambda: qsgd(0),
     lambda: qsgd(1 << 15), lambda: svd(0), lambda: power(0),
     lambda: qsgd(2.5),  # type: ignore[arg-type]
     lambda: power(1, 0)],
)  # fmt: skip
def test_bad_parameters_are_rejected(make: Callable[[], Compressor]) -> None:
    with pytest.raises(InputError, match="must be"):
        make()


def test_a_message_with_wrong_positions_is_rejected() -> None:
    value = matrices(0)
    for compressor in (top_k(0.3), rows(0.3)):
        for odd in (-1, 35):
            parts = compressor.encode(value, np.random.default_rng(0))
            parts["indices"][0, 0] = odd
            with pytest.raises(InputError, match="outside"):
                compressor.decode(parts, value)


# PowerSGD: a client keeps the right factors of its last message


def sent_in_rounds(updates: list[np.ndarray], feedback: str, warm: bool = True) -> list[np.ndarray]:
    """C(u) of every round, from the messages of one client."""
    table, memory, found = Compression(power(2), feedback=feedback, seed=3, clients=1), {}, []
    zero = {"model": {"w": torch.zeros(1, *updates[0].shape).double()}}
    for r, update in enumerate(updates):
        returned = {"model": {"w": torch.from_numpy(update)[None]}}
        message, memory = table.message(returned, zero, memory, r, 0)
        if not warm:
            memory.pop("model.w:right")
        (read,), _ = table.replies([message], zero, {})
        found.append(read["model"]["w"][0].numpy())
    return found


def test_power_approaches_the_nearest_matrix_and_fresh_draws_do_not() -> None:
    left, _, right = np.linalg.svd(matrices(12, (7, 5)).numpy())
    values = np.array([4.0, 3.0, 1.0, 0.5, 0.1])
    update, nearest = ((left[:, :k] * values[:k]) @ right[:k] for k in (5, 2))
    found = sent_in_rounds([update] * 30, "none")
    errors = [float(np.abs(one - nearest).max()) for one in found]
    assert errors[0] > 0.1 and errors[10] < 1e-6 and errors[-1] < 1e-13
    cold = sent_in_rounds([update] * 30, "none", warm=False)
    assert min(np.abs(one - nearest).max() for one in cold) > 1e-3


def test_power_recovers_from_updates_without_two_directions() -> None:
    """Zeros and matrices of rank 1 leave rows of R at 0, which new draws replace."""
    full = matrices(13, (7, 5)).numpy()
    alone = np.zeros((7, 5))
    alone[6, 4] = 1.0
    found = sent_in_rounds([np.zeros((7, 5)), alone, alone, full, full], "none")
    assert (found[0] == 0).all()
    assert max(np.abs(one - alone).max() for one in found[1:3]) < 1e-14
    assert np.linalg.matrix_rank(found[3]) == 2


def test_feedback_reaches_the_mean_and_selection_alone_does_not() -> None:
    """Full participation: EF21 and EF14 end near the mean of the centres; top-1 alone stalls."""
    centres = np.array([[10.0, 1.0], [-10.0, 1.0]])
    errors = {}
    for kind in ("none", "error", "ef21"):
        table = Compression(top_k(0.5), feedback=kind, clients=2)
        x, memory = torch.zeros(1, 2).double(), [{}, {}]
        mean = {"model": {"w": torch.zeros(1, 2).double()}} if kind == "ef21" else {}
        for r in range(450):
            sent, messages = {"model": {"w": x}}, []
            for i in range(2):
                returned = {"model": {"w": x - 0.05 * (x - torch.from_numpy(centres[i]))}}
                message, memory[i] = table.message(returned, sent, memory[i], r, i)
                messages.append(message)
            models, mean = table.replies(messages, sent, mean)
            x = torch.stack([one["model"]["w"] for one in models]).mean(0)
        errors[kind] = float((x[0] - torch.tensor([0.0, 1.0])).abs().max())
    assert errors["none"] == 1.0  # the second entry is never sent
    assert errors["ef21"] < 1e-9 and errors["error"] < 0.3


@pytest.mark.parametrize("feedback", ["none", "error", "ef21"])
@pytest.mark.parametrize("compressor", EVERY, ids=lambda one: one.name)
def test_numbers_and_empty_parameters_are_sent_as_they_are(
    compressor: Compressor, feedback: str
) -> None:
    """A single number [S], and parameters without entries, beside one that is compressed."""
    shapes = {"g": (1,), "none": (1, 0), "flat": (1, 0, 3), "thin": (1, 3, 0), "w": (1, 7, 5)}
    began = {name: matrices(1, shape) for name, shape in shapes.items()}
    ended = {name: matrices(2, shape) for name, shape in shapes.items()}
    table = Compression(compressor, compressor, feedback, clients=1)
    mean = {"model": {"w": torch.zeros(1, 7, 5).double()}} if feedback == "ef21" else {}
    received = decoded(compressor, table.broadcast({"model": began}, 0), began)
    message, memory = table.message({"model": ended}, received, {}, 0, 0)
    shaped = templates(compressor, {"model": began}, began)
    assert {name: one.shape for name, one in message["model"].items()} == {
        name: one.shape for name, one in shaped["model"].items()
    }
    (found,), _ = table.replies([message], received, mean)
    for name in {*shapes} - {"w"}:
        assert torch.equal(received["model"][name], began[name])
        assert torch.equal(found["model"][name], ended[name])
    lossless = compressor.name == "none" or not compressor.error(began["w"])
    assert lossless == torch.allclose(received["model"]["w"], began["w"], atol=1e-12)  # the control
    assert not any(name.split(".")[1] in ("g", "none", "flat", "thin") for name in memory)


def test_what_is_no_parameter_is_sent_as_it_is() -> None:
    """Running statistics, and states with other shapes."""
    model = {"w": matrices(0, (1, 3, 8)), "bn.running_mean": matrices(1, (1, 3))}
    states = {"momentum": {"w": matrices(2, (1, 3, 8)), "count": torch.ones(1)}}
    table = Compression(svd(1), svd(1))
    message, memory = table.message({"model": model, **states}, {"model": model}, {}, 0, 0)
    assert set(message["model"]) == {"w:left", "w:right", "bn.running_mean"}
    assert set(message["momentum"]) == {"w:left", "w:right", "count"} and not memory
    assert (message["model"]["bn.running_mean"] == model["bn.running_mean"]).all()
    (found,), _ = table.replies([message], {"model": model}, {})
    assert (found["momentum"]["count"] == 1).all()
    assert (found["model"]["w"] - model["w"]).abs().max() < 1e-14  # nothing moved
    cut = through(svd(1), states["momentum"]["w"])
    assert (found["momentum"]["w"] - cut).abs().max() < 1e-14
