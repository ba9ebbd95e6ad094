"""Text that a language model writes after a prompt, one most likely token after the other."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from fedmuon.tasks.base import Params
from fedmuon.tasks.networks import NetworkTask


def continued(
    task: NetworkTask, params: Params, prompts: Sequence[Sequence[int]], count: int,
    end: int | None = None,
) -> list[list[int]]:  # fmt: skip
    """Return the `count` most likely next tokens of each prompt, without any random draw.

    All prompts are continued together. A prompt is filled with zeros at its end. A token only
    depends on the tokens before it, so the zeros change nothing. The model reads at most the last
    T tokens, where T + 1 is the length of a training window.

    Args:
        task: The task of a language model.
        params: The parameters [S, ...], of which the first replica is used.
        prompts: The tokens of each prompt, at least one token each.
        count: Maximum number of new tokens.
        end: The token that ends a text. It and all later tokens are left out.
    """
    model = {name: value[0] for name, value in params.items()}
    texts = [[*prompt] for prompt in prompts]
    limit = task.shape[0] - 1
    with torch.no_grad():
        for _ in range(count):
            read = [text[-limit:] for text in texts]
            length = max(map(len, read))
            # The last token of a window is a target, which the model does not read.
            rows = [[*text, *[0] * (length + 1 - len(text))] for text in read]
            windows = torch.tensor(rows, device=task.device)
            logits: Tensor = functional_call(task.module, model, (windows,))
            for row, (text, part) in enumerate(zip(texts, read, strict=True)):
                text.append(int(logits[row, len(part) - 1].argmax()))
    written = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    return [text[: text.index(end)] if end in text else text for text in written]
