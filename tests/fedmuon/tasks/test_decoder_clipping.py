"""Clipped sums of the decoder: tied head, [in, out] projections, a masked loss, against loops."""

import dataclasses

import pytest
import torch
from networks import own_model, replica
from torch import Tensor, nn
from torch.nn import functional

from fedmuon.core.rng import Draw, generator
from fedmuon.tasks.base import IGNORED, Batch, Params
from fedmuon.tasks.decoder import Form, decoder, gpt2_law, next_tokens, sentence_tokens
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipping import Clipping
from fedmuon.tasks.per_example.ghost import find_ghosts
from fedmuon.tasks.per_example.gradients import Explicit, Lookup, Outer, Tied

END = 12
LONG, WIDE = Form(13, 9, 8, 2, 2), Form(13, 4, 16, 1, 2)  # heads held as Gram matrices, and formed


def task_of(form: Form, masked: bool) -> NetworkTask:
    def targets(inputs: Tensor, labels: Tensor) -> Tensor:
        return sentence_tokens(END, inputs, labels) if masked else next_tokens(inputs, labels)

    return NetworkTask(
        decoder(form), (form.context + 1,), torch.float64, targets=targets, start=gpt2_law
    )


def windows_of(form: Form, rows: int) -> Tensor:
    """Each with the end of a table at its second place, and that of a sentence in all but one."""
    rng = generator(0, Draw.BATCH)
    found = torch.from_numpy(rng.integers(0, END, (rows, form.context + 1))).double()
    found[:, 1] = END
    found[1:, -1] = END
    return found


def naive(form: Form, points: list, windows: Tensor, task: NetworkTask, clip: Clipping) -> Params:
    """One example after the other through transformers' own model and autograd."""
    model = own_model(form)
    totals = {name: torch.zeros_like(v) for name, v in model.named_parameters()}
    for window in windows:
        own = {name: torch.zeros_like(v) for name, v in model.named_parameters()}
        wanted = task.targets(window[None], window[:1])[0]
        kept = wanted != IGNORED
        for c, params in points:
            model.load_state_dict({n: v[0] for n, v in params.items()}, strict=False)
            model.tie_weights()
            model.zero_grad()
            logits = model(window[None, :-1].long()).logits[0]
            functional.cross_entropy(logits[kept], wanted[kept]).backward()
            for name, value in model.named_parameters():
                assert value.grad is not None
                own[name] += c * value.grad
        factors = clip.factors({name: v.square().sum()[None] for name, v in own.items()})
        for name, value in own.items():
            totals[name] += factors[name] * value
    return totals


@pytest.mark.parametrize("form", [LONG, WIDE], ids=["grams", "formed"])
@pytest.mark.parametrize(
    ("rule", "masked", "weights"),
    [("block", True, (1.0,)), ("flat", False, (1.0,)), ("automatic", True, (3.0, -2.0))],
)
def test_clipped_sums_are_the_loops(
    form: Form, rule: str, masked: bool, weights: tuple[float, ...]
) -> None:
    task, windows = task_of(form, masked), windows_of(form, 4)
    together = frozenset({"transformer.wpe.weight", "transformer.ln_f.bias"})
    clip = Clipping(rule, 0.05, together)
    points = [
        (c, {n: 20 * v for n, v in task.initial(generator(k, Draw.INITIAL)).items()})
        for k, c in enumerate(weights)
    ]
    batch = Batch(windows, torch.zeros(4, dtype=torch.int64))
    assert find_ghosts(task.module, task.shape) is not None
    loss, found = task.clipped(points, [batch], clip)
    slow = dataclasses.replace(task.clipped_sums(), ghosts=None, each=None)
    _, other = slow(
        points, [dataclasses.replace(batch, labels=task.targets(windows, batch.labels))], clip
    )
    expected = naive(form, points, windows, task, clip)
    for sums in (found, other):
        torch.testing.assert_close(replica(sums), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(loss, task.gradient(points[-1][1], [batch])[0])
    whole = task.clipped(points, [batch], Clipping(rule, 0.1, together))[1]
    assert not torch.allclose(whole["transformer.wte.weight"], found["transformer.wte.weight"])


def test_the_norm_of_a_tied_gradient_has_a_mixed_term() -> None:
    """Against the gradients themselves, with tokens that come twice; squares do not add up."""
    torch.manual_seed(0)
    at, falls = torch.randint(0, 5, (3, 6)), torch.randn(3, 6, 4).double()
    reads, slopes = torch.randn(3, 1, 6, 4).double(), torch.randn(3, 1, 6, 5).double()
    looked, head = Lookup(at, falls, 5), Outer(reads, slopes)
    whole = slopes[:, 0].mT @ reads[:, 0]
    for i in range(3):
        whole[i].index_add_(0, at[i], falls[i])
    factors = torch.rand(3).double()
    for held in (head, head.explicit()):
        assert isinstance(held, Outer | Explicit)
        tied, total = Tied(looked, held), torch.zeros(5, 4).double()
        torch.testing.assert_close(tied.squares(), whole.square().sum((1, 2)))
        tied.add_to_(total, factors)
        torch.testing.assert_close(total, (factors[:, None, None] * whole).sum(0))
    alone = looked.squares() + head.squares()
    assert not torch.allclose(alone, whole.square().sum((1, 2)), rtol=1e-2)


def test_what_else_is_shared_has_no_records() -> None:
    """Two linear layers of one weight, or a weight used thrice, take torch's way."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    assert find_ghosts(Twice(), (4,)) is None
