"""Write a small Llama model as a GGUF file, and read it. Needs the extra `llm` and nothing else."""

import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch

from fedmuon.tasks.frozen_base import frozen_model

WIDTH, LETTERS = 32, 256


def write_llama(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    for add in ("context_length", "embedding_length", "feed_forward_length"):
        getattr(writer, f"add_{add}")(WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(LETTERS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{number}>" for number in range(LETTERS)])
    writer.add_token_scores([0.0] * LETTERS)
    writer.add_eos_token_id(1)
    writer.add_token_merges([])
    square = np.eye(WIDTH, dtype=np.float32)
    block = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = {f"blk.0.{name}": square for name in block}
    tensors |= dict.fromkeys(("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"), square[0])
    tensors["token_embd"] = np.arange(LETTERS * WIDTH, dtype=np.float32).reshape(LETTERS, WIDTH)
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    """Return 0 if the weights that were written come back."""
    with tempfile.TemporaryDirectory(prefix="fedmuon-gguf-") as folder:
        file = Path(folder) / "model.gguf"
        write_llama(file)
        model = frozen_model(str(file), torch.float32, torch.device("cpu"))
        rows = model.get_input_embeddings().get_buffer("weight")
        expected = torch.arange(LETTERS * WIDTH, dtype=torch.float32).reshape(LETTERS, WIDTH)
        return int(not torch.equal(rows, expected))


if __name__ == "__main__":
    sys.exit(main())
