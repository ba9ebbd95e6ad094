"""What a decoder writes after a prompt: greedily, or by a beam search (000, Appendix)."""

from collections.abc import Sequence

import torch

from fedmuon.tasks.base import Params
from fedmuon.tasks.decoder import Form, published

LEAST, MOST = 5, 100  # new tokens, as in 000
TOGETHER = 32  # prompts


def generate(
    form: Form, params: Params, prompts: Sequence[Sequence[int]], end: int, beams: int = 1
) -> list[list[int]]:
    """New tokens for each prompt, up to and without END; `params` are those of one replica.

    The search is transformers' own, with a length penalty of 1 and early stopping; one beam is the
    greedy choice. A sentence ends at the latest where the decoder's context does.
    """
    model = published(form, end).to(next(iter(params.values())))
    model.load_state_dict(params, strict=False)  # head and embedding are one
    model.tie_weights()
    model.eval()
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    found: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), TOGETHER):
        group = order[start : start + TOGETHER]
        told = _continued(model, [list(prompts[place]) for place in group], end, beams)
        for place, tokens in zip(group, told, strict=True):
            found[place] = tokens[: tokens.index(end)] if end in tokens else tokens
    return found


def _continued(model: torch.nn.Module, rows: list[list[int]], end: int, beams: int) -> list:
    """Prompts of unlike lengths side by side, filled up on the left where nothing looks."""
    device, width = next(model.parameters()).device, max(map(len, rows))
    tokens = torch.tensor([[end] * (width - len(row)) + row for row in rows], device=device)
    seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    most = max(1, min(MOST, model.config.n_positions + 1 - width))  # pyright: ignore
    more = {"early_stopping": True, "length_penalty": 1.0} if beams > 1 else {}
    with torch.no_grad():
        found = model.generate(  # pyright: ignore
            tokens, attention_mask=seen, do_sample=False, num_beams=beams, max_new_tokens=most,
            min_new_tokens=min(LEAST, most), pad_token_id=end, eos_token_id=end, **more,
        )  # fmt: skip
    return found[:, width:].tolist()
