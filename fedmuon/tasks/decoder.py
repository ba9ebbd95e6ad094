"""A decoder with the architecture of GPT-2, from the blocks of the library transformers.

A sample is a row of T + 1 tokens. Each token but the first is predicted from those before it. Rows
store tokens as floating-point numbers, exactly, like the samples of any other task.

transformers stores projections as [in, out]; a fused query-key-value projection is [d, 3 d]. So in
the files of a run every parameter has the name and the shape that GPT2LMHeadModel has for it. Only
the initial values are drawn by fedmuon.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedmuon.core.errors import InputError
from fedmuon.tasks.base import IGNORED, Params

SPREAD = 0.02  # standard deviation of the entries of an initial weight
LEAST, MOST = 5, 100  # number of generated tokens, as in DP-Muon
PROMPTS = 32  # prompts that are continued as one batch


class Form(NamedTuple):
    """The sizes of a decoder; width 768 with 12 blocks of 12 heads is GPT-2."""

    vocabulary: int
    context: int
    width: int
    depth: int
    heads: int

    @property
    def entries(self) -> int:
        """The number of parameters in matrices, which excludes biases and norms."""
        blocks = 12 * self.depth * self.width**2
        return blocks + (self.vocabulary + self.context) * self.width


class Decoder(nn.Module):
    """Windows [n, T + 1] -> logits [n, T, V] of the tokens that follow.

    The `forward` of GPT2LMHeadModel cannot be used, because it reads values of its mask, and
    tensors on `meta` have none.
    """

    def __init__(self, model: nn.Module) -> None:
        """Take the parts of a GPT2LMHeadModel, whose head and embedding are one parameter."""
        super().__init__()
        self.transformer: Any = model.transformer
        self.lm_head: Any = model.lm_head

    def forward(self, windows: Tensor) -> Tensor:
        """Apply the embeddings, the blocks under a causal mask, and the head."""
        tokens, body = windows[:, :-1].long(), self.transformer
        length = tokens.shape[1]
        # Expanded to a row per sample, as per-example gradients need.
        place = torch.arange(length, device=tokens.device).expand_as(tokens)
        hidden = body.wte(tokens) + body.wpe(place)
        later = hidden.new_full((length, length), -math.inf).triu(1)
        for block in body.h:
            hidden = block(hidden, attention_mask=later)
        return self.lm_head(body.ln_f(hidden))


def decoder(form: Form) -> Decoder:
    """Build a decoder on torch's `meta` device, with shapes but no values."""
    with torch.device("meta"):
        return Decoder(published(form))


def published(form: Form, end: int | None = None) -> Any:
    """Build a GPT2LMHeadModel on the current device; `end` is the token that ends generation."""
    try:
        # Imported here: transformers is optional, and takes seconds to load.
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise InputError(
            "[task] model = 'gpt' needs transformers: pip install 'fedmuon[lm]'"
        ) from None
    shape = GPT2Config(
        vocab_size=form.vocabulary, n_positions=form.context, n_embd=form.width,
        n_layer=form.depth, n_head=form.heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=end is not None,
        bos_token_id=None, eos_token_id=end, pad_token_id=end,
        activation_function="gelu_pytorch_tanh",  # the function of GPT-2, in one kernel
    )  # fmt: skip
    shape._attn_implementation = "eager"  # plain products, which torch.vmap and `meta` support
    return GPT2LMHeadModel(shape)


def next_tokens(inputs: Tensor, labels: Tensor) -> Tensor:
    """Targets [n, T] of windows [n, T + 1]. The labels, which group the windows, are not used."""
    return inputs[:, 1:].long()


def sentence_tokens(end: int, inputs: Tensor, labels: Tensor) -> Tensor:
    """Targets of windows `table END sentence END ...`: the tokens from the first END to the second.

    Other targets are IGNORED, so the table is read but not learned (DP-Muon, Appendix).
    """
    ended = (inputs[:, :-1] == end).cumsum(1)
    return inputs[:, 1:].long().where(ended == 1, IGNORED)


def gpt2_law(network: nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw initial parameters by the law of GPT-2.

    Entries are N(0, 0.02^2), divided by sqrt(2 depth) for weights whose output is added to the
    residual stream. Biases are 0, and norms start at 1 and 0.
    """
    params = dict(network.named_parameters())
    adding = sum(name.endswith("c_proj.weight") for name in params)  # two per block
    return {name: _drawn(rng, name, tuple(value.shape), adding) for name, value in params.items()}


def _drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...], adding: int) -> np.ndarray:
    if len(shape) < 2:
        return np.full(shape, 1.0 if name.endswith("weight") else 0.0)
    spread = SPREAD / math.sqrt(adding) if name.endswith("c_proj.weight") else SPREAD
    return spread * rng.standard_normal(shape)


def fitted(weights: Mapping[str, np.ndarray], network: nn.Module) -> dict[str, np.ndarray]:
    """Pick the parameters of a network from stored arrays, and ignore other arrays.

    Names may lack the first part, as those of the published GPT-2 do.

    Raises:
        InputError: If a parameter is missing or has another shape.
    """
    found = {}
    for name, value in network.named_parameters():
        stored = weights.get(name, weights.get(name.removeprefix("transformer.")))
        if stored is None or stored.shape != tuple(value.shape):
            has = "is missing" if stored is None else f"has shape {stored.shape}"
            raise InputError(
                f"[task] weights do not fit: {name} of shape {tuple(value.shape)} {has} in them; "
                "set width, depth, heads and [data] context to theirs"
            )
        found[name] = stored
    return found


def generate(
    form: Form, params: Params, prompts: Sequence[Sequence[int]], end: int, beams: int = 1
) -> list[list[int]]:
    """Generate new tokens for each prompt, up to END (DP-Muon, Appendix).

    Args:
        form: Sizes of the decoder.
        params: Parameters of one replica.
        prompts: Tokens of each prompt.
        end: The token END.
        beams: Number of beams; 1 is greedy. The search is that of transformers, with a length
            penalty of 1 and early stopping.

    Returns:
        The new tokens of each prompt, without END. A sentence ends at the latest where the context
        of the decoder does.
    """
    model = published(form, end).to(next(iter(params.values())))
    if odd := model.load_state_dict(
        params, strict=False
    ).unexpected_keys:  # the head may be missing
        raise InputError(f"the decoder has no {odd[0]}: fold adapters into its weights")
    model.tie_weights()
    model.eval()
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    found: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), PROMPTS):
        group = order[start : start + PROMPTS]
        written = _continued(model, [list(prompts[place]) for place in group], end, beams)
        for place, tokens in zip(group, written, strict=True):
            found[place] = tokens[: tokens.index(end)] if end in tokens else tokens
    return found


def _continued(model: torch.nn.Module, rows: list[list[int]], end: int, beams: int) -> list:
    """Continue prompts of different lengths as one batch, padded and masked on the left."""
    device, width = next(model.parameters()).device, max(map(len, rows))
    tokens = torch.tensor([[end] * (width - len(row)) + row for row in rows], device=device)
    looked_at = torch.tensor(
        [[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device
    )
    most = max(1, min(MOST, model.config.n_positions + 1 - width))  # pyright: ignore
    more = {"early_stopping": True, "length_penalty": 1.0} if beams > 1 else {}
    with torch.no_grad():
        found = model.generate(  # pyright: ignore
            tokens, attention_mask=looked_at, do_sample=False, num_beams=beams, max_new_tokens=most,
            min_new_tokens=min(LEAST, most), pad_token_id=end, eos_token_id=end, **more,
        )  # fmt: skip
    return found[:, width:].tolist()
