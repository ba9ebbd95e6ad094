"""Activation checkpointing: the backward pass computes the activations of a block again.

Autograd then stores only the inputs of each transformer block, and the activations of one block at
a time. Gradients are the same. A step needs one more forward pass.

The function `torch.func.functional_call` restores the tensors of a module before the backward pass
begins. So the second computation of a block receives the parameters and buffers of the first one.
"""

from copy import copy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fedmuon.core.errors import InputError

BLOCK = "GradientCheckpointingLayer"  # the class of blocks in the library transformers


def checkpoint_blocks(model: nn.Module) -> int:
    """Let the backward pass compute the activations of each transformer block again.

    Returns:
        The number of blocks.

    Raises:
        InputError: If the model has no blocks that can be computed again.
    """
    blocks = [
        layer
        for layer in model.modules()
        if any(kind.__name__ == BLOCK for kind in type(layer).__mro__)
    ]
    if not blocks:
        raise InputError(
            "[task] checkpointing = true has no effect, because the model has no transformer "
            "blocks that can be computed again. Set checkpointing = false, or choose another "
            "model, such as a Llama or GPT-2 model."
        )
    for block in blocks:
        block.forward = Recomputed(block)
    return len(blocks)


class Recomputed:
    """The forward function of a block whose activations are computed again."""

    def __init__(self, block: nn.Module) -> None:
        self.block = copy(block)  # has the same layers, but keeps its own forward function

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the outputs of the block."""
        if not torch.is_grad_enabled():
            return self.block(*args, **options)
        tensors = {**dict(self.block.named_parameters()), **dict(self.block.named_buffers())}

        def compute(*args: Any) -> Any:
            return functional_call(self.block, tensors, args, options)

        return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False)
