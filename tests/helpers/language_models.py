"""Tiny pretrained language models with a tokenizer of bytes, saved to a folder."""

from pathlib import Path
from typing import Any

import torch

VOCABULARY, CONTEXT, END = 257, 32, 256
TEXTS = {
    "one": "the cat sat on the mat and saw the rat. " * 12,
    "two": "a stone is grey, a leaf is green, the sea is blue. " * 10,
    "three": "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 " * 11,
}


def save_model(folder: Path, kind: str = "llama", seed: int = 0) -> Path:
    """Save a random model of width 16 with two layers, in float32."""
    # Loaded for seconds, which tests without language models need not wait for.
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    common = {"bos_token_id": None, "eos_token_id": END, "vocab_size": VOCABULARY}
    config: Any = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.3, **common,
    )  # fmt: skip
    if kind == "gpt2":
        config = GPT2Config(
            n_embd=16, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.3, **common
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, template: str | None = None) -> Path:
    """Save a tokenizer whose tokens are the 256 bytes and END."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: k for k, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pieces = Tokenizer(models.BPE(letters, []))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<end>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def save_texts(folder: Path) -> Path:
    """Save a text file for each of three clients."""
    folder.mkdir(exist_ok=True)
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder
