"""A decoder with the architecture of GPT-2, built from the blocks of the library transformers.

A sample is a row of T + 1 tokens. The model predicts each token, except the first, from the tokens
before it. Rows store tokens exactly, as floating-point numbers, like the samples of any other task.

transformers stores projections as [in, out], and the joint query-key-value projection as [d, 3 d].
In the files of a run, every parameter therefore has the same name and shape as in GPT2LMHeadModel.
Only the initial values are drawn by fedmuon. The last functions of this file read stored weights
and add low-rank adapters to them.
"""

import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedmuon.core.errors import InputError
from fedmuon.core.extras import installing
from fedmuon.core.files import require_regular
from fedmuon.tasks.base import IGNORED, Params
from fedmuon.tasks.models import torch_law

SPREAD = 0.02  # standard deviation of the entries of an initial weight
LEAST, MOST = 5, 100  # minimum and maximum number of generated tokens, as in DP-Muon
PROMPTS = 32  # number of prompts that are continued in one batch


class Form(NamedTuple):
    """The sizes of a decoder. GPT-2 has a width of 768, 12 blocks and 12 heads.

    Attributes:
        vocabulary: Number of tokens. The last token is END. If `padded`, the last two tokens are
            END and [PAD].
        context: Number of position embeddings.
        width: Length of a token's vector.
        depth: Number of blocks.
        heads: Number of attention heads.
        tied: Whether the last layer (head) and the token embeddings share one parameter.
        padded: Whether the vocabulary contains a token [PAD].
    """

    vocabulary: int
    context: int
    width: int
    depth: int
    heads: int
    tied: bool = True
    padded: bool = False

    @property
    def entries(self) -> int:
        """The number of entries in all matrices, without biases and norm layers."""
        blocks, tokens = 12 * self.depth * self.width**2, self.vocabulary * (2 - self.tied)
        return blocks + (tokens + self.context) * self.width

    @property
    def end(self) -> int:
        """The number of the token END."""
        return self.vocabulary - 1 - self.padded


class Decoder(nn.Module):
    """A network that predicts, for each of the first T tokens of a window, the next token.

    The network maps windows [n, T + 1] to logits [n, T, V].

    The `forward` of GPT2LMHeadModel cannot be used, because it reads values of its mask. Tensors on
    the device `meta` have no values.
    """

    def __init__(self, model: nn.Module) -> None:
        """Use the layers of a GPT2LMHeadModel, whose head and embedding may share one parameter."""
        super().__init__()
        self.transformer: Any = model.transformer
        self.lm_head: Any = model.lm_head

    def hidden(self, windows: Tensor) -> Tensor:
        """Return the vector of each token after the last norm layer, as a tensor [n, T, d]."""
        tokens, body = windows[:, :-1].long(), self.transformer
        length = tokens.shape[1]
        # Expanded to one row per sample, because per-example gradients need this.
        place = torch.arange(length, device=tokens.device).expand_as(tokens)
        hidden = body.wte(tokens) + body.wpe(place)
        later = hidden.new_full((length, length), -math.inf).triu(1)
        for block in body.h:
            hidden = block(hidden, attention_mask=later)
        return body.ln_f(hidden)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        return self.lm_head(self.hidden(windows))


class Classifier(Decoder):
    """A network that maps a window of tokens to one logit for each class.

    The inputs have the shape [n, T + 1], and the outputs have the shape [n, C].

    A window has the form `sentence END ...`. The logits are read at the END of the last sentence.
    As in transformers' GPT2ForSequenceClassification, the layer `score` has no bias.
    """

    def __init__(self, model: nn.Module, classes: int, sentences: int, end: int) -> None:
        """Use the layers of a GPT2LMHeadModel without its head, and add the layer `score`.

        `sentences` is the number of sentences in a window.
        """
        nn.Module.__init__(self)
        self.transformer: Any = model.transformer
        width = self.transformer.wte.weight.shape[1]
        self.score = nn.Linear(width, classes, bias=False)
        self.sentences, self.end = sentences, end

    def forward(self, windows: Tensor) -> Tensor:
        """Return the logits of the classes, from the vector at the end of the last sentence."""
        hidden, tokens = self.hidden(windows), windows[:, :-1].long()
        at = ((tokens == self.end).cumsum(1) < self.sentences).sum(1)
        at = at.clamp(max=hidden.shape[1] - 1)  # if a window has no END, such as one of zeros
        place = at[:, None, None].expand(-1, 1, hidden.shape[2])
        return self.score(hidden.gather(1, place)[:, 0])


def decoder(form: Form, classes: int = 0, sentences: int = 1) -> Decoder:
    """Build a decoder on torch's `meta` device, with shapes but no values.

    Args:
        form: The sizes of the decoder.
        classes: Number of classes of a classifier. 0 builds a decoder that predicts tokens.
        sentences: Number of sentences in each window of a classifier.
    """
    with torch.device("meta"):
        model = gpt2_model(form)
        return Classifier(model, classes, sentences, form.end) if classes else Decoder(model)


def gpt2_model(form: Form, end: int | None = None) -> Any:
    """Build a GPT2LMHeadModel on torch's current device. Generation stops at the token `end`."""
    try:
        # Imported here: transformers is optional, and takes seconds to load.
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise InputError(
            f"[task] model = 'gpt' needs the package transformers. Run {installing('lm')}."
        ) from None
    shape = GPT2Config(
        vocab_size=form.vocabulary, n_positions=form.context, n_embd=form.width,
        n_layer=form.depth, n_head=form.heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=end is not None,
        bos_token_id=None, eos_token_id=end, pad_token_id=end, tie_word_embeddings=form.tied,
        activation_function="gelu_pytorch_tanh",  # the function of GPT-2, in one kernel
    )  # fmt: skip
    shape._attn_implementation = "eager"  # plain products, which torch.vmap and `meta` support
    return GPT2LMHeadModel(shape)


def next_tokens(inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the targets of windows: for each token except the last, the token that follows.

    The labels are ignored, because they only divide the windows into groups.
    """
    return inputs[:, 1:].long()


def sentence_tokens(end: int, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the targets of windows `table END sentence END ...`.

    The targets are the tokens after the first END, including the second END. All other targets are
    IGNORED. The model therefore reads the table but does not learn to predict it (DP-Muon,
    Appendix).
    """
    ended = (inputs[:, :-1] == end).cumsum(1)
    return inputs[:, 1:].long().where(ended == 1, IGNORED)


def gpt2_law(network: nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw the initial parameters as in GPT-2.

    Entries are drawn from N(0, 0.02^2). Weights whose output is added to the residual stream are
    then divided by sqrt(2 depth). Biases start at 0. In norm layers, the scale starts at 1 and the
    shift at 0.
    """
    shapes = {name: tuple(value.shape) for name, value in network.named_parameters()}
    adding = sum(name.endswith("c_proj.weight") for name in shapes)  # two per block
    params = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            params[name] = np.full(shape, 1.0 if name.endswith("weight") else 0.0)
        else:
            spread = SPREAD / math.sqrt(adding) if name.endswith("c_proj.weight") else SPREAD
            params[name] = spread * rng.standard_normal(shape)
    return params


HEAD, TOKENS, SCORE = "lm_head.weight", "transformer.wte.weight", "score.weight"


def matching_weights(
    weights: Mapping[str, np.ndarray], network: nn.Module, padded: bool = False
) -> dict[str, np.ndarray]:
    """Find the parameters of a network among stored arrays. Other arrays are ignored.

    Stored names may lack the first part of the parameter's name, as in the published GPT-2. If the
    head is not stored, the token embeddings are used as the head (tied weights). The last layer of
    a classifier is not taken from the stored arrays.

    Args:
        weights: The stored arrays by name.
        network: The decoder.
        padded: Whether the last token of the network is [PAD]. If the stored embeddings have no row
            for [PAD], this row is the mean of the other rows.

    Raises:
        InputError: If a parameter is missing or has another shape.
    """
    params = {}
    for name, value in network.named_parameters():
        if name == SCORE:
            continue
        stored = weights.get(name, weights.get(name.removeprefix("transformer.")))
        if stored is None and name == HEAD:
            stored = weights.get(TOKENS, weights.get(TOKENS.removeprefix("transformer.")))
        by_token = padded and name in (HEAD, TOKENS)
        if by_token and stored is not None and len(stored) == len(value) - 1:
            stored = np.concatenate([stored, stored.mean(0, keepdims=True)])
        if stored is None or stored.shape != tuple(value.shape):
            has = (
                "is missing from the weights"
                if stored is None
                else f"has shape {stored.shape} in the weights"
            )
            raise InputError(
                f"[task] weights do not fit the model: the parameter {name} of shape "
                f"{tuple(value.shape)} {has}. Set width, depth, heads and positions to the "
                "values of the stored model."
            )
        params[name] = stored
    return params


def generate(
    form: Form,
    params: Params,
    prompts: Sequence[Sequence[int]],
    end: int,
    beams: int = 1,
    banned: Sequence[int] = (),
) -> list[list[int]]:
    """Generate new tokens for each prompt, up to END (DP-Muon, Appendix).

    Args:
        form: Sizes of the decoder.
        params: Parameters of one replica.
        prompts: Tokens of each prompt.
        end: The number of the token END.
        beams: Number of beams of the beam search. 1 means greedy search. The library transformers
            does the search, with a length penalty of 1 and early stopping.
        banned: Tokens that are never generated, such as line breaks.

    Returns:
        The new tokens for each prompt, without END. Generation also ends when the decoder's context
        is full.
    """
    model = gpt2_model(form, end).to(next(iter(params.values())))
    odd = model.load_state_dict(params, strict=False).unexpected_keys  # the head may be missing
    if odd:
        raise InputError(
            f"the parameter {odd[0]} does not belong to the decoder, which has no adapters. Pass "
            "parameters of the decoder only. If the model has LoRA adapters, merge the adapters "
            "into the weights first."
        )
    model.tie_weights()
    model.eval()
    options: dict[str, Any] = {"early_stopping": True, "length_penalty": 1.0} if beams > 1 else {}
    if banned:
        options["bad_words_ids"] = [[token] for token in banned]
    device = next(model.parameters()).device
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    completions: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), PROMPTS):
        # Prompts with different lengths form one batch, padded and masked on the left.
        group = order[start : start + PROMPTS]
        rows = [list(prompts[place]) for place in group]
        width = max(map(len, rows))
        tokens = [[end] * (width - len(row)) + row for row in rows]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        max_tokens = max(1, min(MOST, model.config.n_positions + 1 - width))
        with torch.no_grad():
            written = model.generate(
                torch.tensor(tokens, device=device),
                attention_mask=torch.tensor(mask, device=device),
                do_sample=False, num_beams=beams, max_new_tokens=max_tokens,
                min_new_tokens=min(LEAST, max_tokens), pad_token_id=end, eos_token_id=end,
                **options,
            )  # fmt: skip
        for place, new in zip(group, written[:, width:].tolist(), strict=True):
            completions[place] = new[: new.index(end)] if end in new else new
    return completions


# Stored parameters of a network. Only safetensors files are supported, because reading them runs
# no code.


def read_weights(place: str | Path) -> dict[str, np.ndarray]:
    """Read the arrays of a .safetensors file, or of all .safetensors files in a folder, by name."""
    path = Path(place).expanduser()
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError(
            f"[task] weights = '{place}' is not a .safetensors file or a folder with "
            ".safetensors files. Check the path."
        )
    arrays: dict[str, np.ndarray] = {}
    for file in files:
        try:
            with safe_open(require_regular(file), framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"[task] weights: {file} is not a readable safetensors file ({error}). Download "
                "the file again."
            ) from None
        for name, value in tensors.items():  # numpy has no bfloat16
            arrays[name] = (value.float() if value.itemsize < 4 else value).numpy()
    return arrays


def weights_digest(place: str | Path) -> str:
    """Return a hash of the names, dtypes and values of all stored arrays."""
    hasher = sha256()
    for name, array in sorted(read_weights(place).items()):
        hasher.update(f"{name} {array.dtype} {array.shape}\n".encode())
        hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()[:16]


# Low-rank adapters for a decoder whose weights stay fixed (LoRA: Hu et al. 2022).
#
# Every projection to queries, keys and values, x W + b, becomes x W + b + (x A) B with A [d, r] and
# B [r, 3 d]. Only A and B are trained: 4 d r numbers per block instead of 12 d^2. B starts at 0, so
# the first outputs are those of the decoder. The factor alpha / r of the paper is 1. A and B are
# linear layers, so their per-example gradients are computed as for other layers.

INNER = ".base"  # part of the names of the fixed tensors within an adapted projection


class WithAdapters(nn.Module):
    """A projection with fixed weights, together with trainable low-rank adapters."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        inner, outer = base.get_parameter("weight").shape
        self.base = base
        self.down = nn.Linear(inner, rank, bias=False)
        self.up = nn.Linear(rank, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection of the inputs, with the adapters added to the weights."""
        return self.base(x) + self.up(self.down(x))


def add_adapters(
    network: Decoder,
    rank: int,
    weights: Mapping[str, np.ndarray],
    like: Tensor,
    padded: bool = False,
) -> Decoder:
    """Add low-rank adapters to a decoder in place, and turn its stored weights into fixed buffers.

    The last layer of a classifier stays a parameter. The adapters are on the device `meta`. The
    buffers have the dtype and device of `like`. For `padded`, see `matching_weights`.

    Raises:
        InputError: If the rank exceeds the width, or the stored weights do not fit the decoder.
    """
    width = network.transformer.wte.weight.shape[1]
    if rank > width:
        raise InputError(
            f"[task] lora-rank = {rank} exceeds width = {width}, so the adapters would have more "
            f"numbers than the weights that they change. Set lora-rank = {width} or less."
        )
    stored = matching_weights(weights, network, padded)
    with torch.device("meta"):
        for block in network.transformer.h:
            block.attn.c_attn = WithAdapters(block.attn.c_attn, rank).to(like.dtype)
        if isinstance(network, Classifier):
            network.score.to(like.dtype)
    tensors = {name: torch.as_tensor(value).to(like) for name, value in stored.items()}
    names = {id(param): name for name, param in network.named_parameters()}
    for layer in network.modules():
        for key, param in list(layer.named_parameters(recurse=False)):
            tensor = tensors.get(names[id(param)].replace(INNER, ""))
            if tensor is not None:  # tied parameters stay tied
                delattr(layer, key)
                layer.register_buffer(key, tensor)
    return network


def lora_law(network: nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw the initial adapters: A as torch initializes linear layers, and B = 0."""
    drawn = torch_law(network, rng)
    return {name: 0 * v if name.endswith("up.weight") else v for name, v in drawn.items()}


def fold_adapters(network: nn.Module, params: Params) -> Params:
    """Return the parameters of an equivalent decoder without adapters.

    A weight W with the adapters A and B becomes W + A B.

    If the network has no adapters, return `params`.
    """
    layers = {
        name: module for name, module in network.named_modules() if isinstance(module, WithAdapters)
    }
    if not layers:
        return params
    fixed = {name: value for name, value in network.named_buffers() if not value.is_meta}
    for name in layers:
        down, up = (params[f"{name}.{key}.weight"] for key in ("down", "up"))
        weight_name = f"{name}{INNER}.weight"
        fixed[weight_name] = fixed[weight_name] + (up @ down).mT
    return {name.replace(INNER, ""): value for name, value in fixed.items()}
