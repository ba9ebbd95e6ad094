"""A tiny language model, its batches, our optimizers, and a plain training loop.

As a script, one of several processes that train such a model together:

    python training_loops.py RANK PROCESSES FOLDER CASES
"""

import copy
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

STEPS, SAMPLES, LENGTH, VOCABULARY, CLIP = 20, 4, 12, 40, 0.5
TIMEOUT = 240  # seconds: until processes that wait for each other are ended


MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
AUX: dict[str, Any] = {"lr": 3e-3, "eps": 1e-6}
LORA: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


def language_model(kind: str = "llama", seed: int = 0) -> Any:
    """A random model with two layers and tied embeddings.

    Except "gpt2", models have fewer keys than queries. Two processes cannot divide the rows of the
    model "odd" evenly.
    """
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Phi3Config

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
        "tie_word_embeddings": True, "initializer_range": 0.2,
    }  # fmt: skip
    sizes = {
        "hidden_size": 16, "intermediate_size": 23 if kind == "odd" else 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    config: Any = (Phi3Config if kind == "phi3" else LlamaConfig)(**sizes, **common)
    if kind == "gpt2":
        drop = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        config = GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=LENGTH, **drop, **common)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def with_adapters(model: Any) -> Any:
    """The model with adapters of the package peft. All other weights are frozen."""
    from peft import LoraConfig, get_peft_model

    fused = "c_attn" in {name.rpartition(".")[2] for name, _ in model.named_modules()}
    layers = ["c_attn"] if fused else ["q_proj", "v_proj", "down_proj"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        options = LoraConfig(r=3, target_modules=layers, fan_in_fan_out=fused)
        return get_peft_model(model, options)


def batches(steps: int = STEPS) -> Tensor:
    """Tokens [steps, samples, length], in which each token is likely to follow a certain other."""
    rng = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (steps, SAMPLES, LENGTH), generator=rng)
    for place in range(1, LENGTH):
        follows = torch.rand((steps, SAMPLES), generator=rng) < 0.7
        next_one = (3 * tokens[..., place - 1] + 1) % VOCABULARY
        tokens[..., place] = torch.where(follows, next_one, tokens[..., place])
    return tokens


def muon_with_aux(model: nn.Module, **options: Any) -> Any:
    from fedmuon.optim import MuonWithAux, groups

    return MuonWithAux(groups(model, show=False, **options), muon=MUON, aux=AUX)


def muon(model: nn.Module) -> Any:
    """Muon alone, for the hidden matrices; all other parameters are fixed."""
    from fedmuon.optim import Muon, groups

    hidden = [group for group in groups(model, show=False) if group["use_muon"]]
    chosen = {param for group in hidden for _, param in group["params"]}
    for param in model.parameters():
        param.requires_grad_(param in chosen)
    return Muon(hidden, **MUON)


def lora_muon(model: nn.Module) -> Any:
    from fedmuon.optim import LoRAMuon

    return LoRAMuon(model.named_parameters(), **LORA)


def row_memory(model: nn.Module) -> Any:
    """NorMuon with weights that are cut into heads."""
    from fedmuon.optim import MuonWithAux, groups

    options = {**MUON, "row_memory": 0.9}
    return MuonWithAux(groups(model, split_heads=True, show=False), muon=options, aux=AUX)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "muon": muon,
    "muon-with-aux": muon_with_aux,
    "heads": partial(muon_with_aux, split_heads=True),
    "rows": row_memory,
    "lora-muon": lora_muon,
}


def model_for(kind: str, optimizer: str) -> Any:
    model = language_model(kind)
    return with_adapters(model) if optimizer == "lora-muon" else model


def schedule(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def plain_loop(kind: str, optimizer: str, clip: bool = True) -> list[float]:
    """The loss before each step, and the loss of the first batch after the last step."""
    model = model_for(kind, optimizer).train()
    made = OPTIMIZERS[optimizer](model)
    steps = schedule(made)
    trained = [param for param in model.parameters() if param.requires_grad]
    losses = []
    for tokens in batches():
        loss = loss_of(model, tokens)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(trained, CLIP)
        made.step()
        steps.step()
        made.zero_grad()
        losses.append(float(loss.detach()))
    return [*losses, final_loss(model)]


@torch.no_grad()
def final_loss(model: Any) -> float:
    return float(loss_of(model, batches(1)[0]))


# --- Several processes ----------------------------------------------------------------------------


def together(
    cases: list[tuple[str, str, str]], folder: Path, processes: int = 2
) -> list[dict[str, dict[str, Any]]]:
    """Train in several processes on this machine, and return what each process reports.

    A case is a task, a model and an optimizer. Reports are dictionaries by cases.

    The processes meet by a file and speak over the loopback interface. They end by themselves, or
    are ended after TIMEOUT.
    """
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join([str(root), *map(str, (root / "tests", root / "tests" / "helpers"))])
    environment = {
        **os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(processes), str(folder), json.dumps(cases)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=TIMEOUT)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0, text[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def ddp(kind: str, optimizer: str) -> Iterator[tuple[str, Any]]:
    """Train with DistributedDataParallel. The optimizer is made for the wrapped model."""
    from torch.nn.parallel import DistributedDataParallel

    model = model_for(kind, optimizer)
    if optimizer == "muon":
        OPTIMIZERS[optimizer](model)  # fixes parameters, which must happen before the wrapping
    wrapped = DistributedDataParallel(model)
    made = OPTIMIZERS[optimizer](wrapped)
    yield "losses", halves(wrapped, made, schedule(made), nn.utils.clip_grad_norm_)


def fsdp2(kind: str, optimizer: str, columns: bool = False) -> Iterator[tuple[str, Any]]:
    """Train with fully_shard, and continue from a saved state."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.tensor import DTensor

    def made_anew() -> tuple[Any, Any]:
        model = sharded(model_for(kind, optimizer), optimizer, columns)
        return model, OPTIMIZERS[optimizer](model)

    model, made = made_anew()
    yield "losses", halves(model, made, schedule(made), nn.utils.clip_grad_norm_)
    params = [param for group in made.param_groups for param in group["params"]]
    assert all(isinstance(param, DTensor) for param in params)
    whole, parts = (sum(param.numel() for param in params),
                    sum(param.to_local().numel() for param in params))  # fmt: skip
    yield "share", parts / whole
    momenta = [state["momentum_buffer"] for state in made.state.values()
               if "momentum_buffer" in state]  # fmt: skip
    yield "momentum", sum(m.to_local().numel() for m in momenta) / sum(m.numel() for m in momenta)
    # A whole state, as a checkpoint of one process, continues in a new model.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    weights, state = copy.deepcopy(get_state_dict(model, made, options=options))
    loss = [halves(model, made, None, nn.utils.clip_grad_norm_, 3)]
    again, other = made_anew()
    schedule(other)  # it adds an option to the groups, which the saved state contains
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state, options=options)
    loss.append(halves(again, other, None, nn.utils.clip_grad_norm_, 3))
    yield "continued", loss


def fsdp1(kind: str, optimizer: str) -> Iterator[tuple[str, Any]]:
    """The errors of optimizers for FullyShardedDataParallel, made before and after the wrapping."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from fedmuon.core.errors import InputError

    model = model_for(kind, optimizer)
    early = OPTIMIZERS[optimizer](model)
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    loss_of(wrapped, batches(1)[0]).backward()
    for name, act in (("step", early.step), ("made", lambda: OPTIMIZERS[optimizer](wrapped))):
        try:
            act()
        except InputError as error:
            yield name, str(error)


def sharded(model: Any, optimizer: str, columns: bool) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    if optimizer == "muon":
        OPTIMIZERS[optimizer](model)
    blocks = [layer for name, layer in model.named_modules()
              if name.rpartition(".")[0].endswith(("layers", ".h"))]  # fmt: skip
    assert len(blocks) == 2
    options: dict[str, Any] = {}
    if columns:  # instead of rows
        options["shard_placement_fn"] = lambda param: Shard(1) if param.ndim == 2 else None
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def halves(
    model: Any, optimizer: Any, steps: Any, clip: Callable[..., Any], count: int = STEPS
) -> list[float]:
    """Train on this process's samples of each batch; the mean losses of all processes."""
    import torch.distributed as dist

    rank, processes = dist.get_rank(), dist.get_world_size()
    trained = [param for param in model.parameters() if param.requires_grad]
    losses = []
    for tokens in batches(count):
        loss = loss_of(model, tokens.chunk(processes)[rank])
        loss.backward()
        clip(trained, CLIP)
        optimizer.step()
        if steps is not None:
            steps.step()
        optimizer.zero_grad()
        losses.append(mean(loss.detach()))
    with torch.no_grad():
        losses.append(mean(loss_of(model, batches(1)[0].chunk(processes)[rank])))
    return losses


def mean(value: Tensor) -> float:
    import torch.distributed as dist

    dist.all_reduce(value := value.clone())
    return float(value / dist.get_world_size())


TASKS: dict[str, Callable[..., Iterator[tuple[str, Any]]]] = {
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "fsdp2-columns": partial(fsdp2, columns=True),
}


def main(rank: str, processes: str, folder: str, cases: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    place = Path(folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/meeting", rank=int(rank), world_size=int(processes),
        timeout=datetime.timedelta(seconds=TIMEOUT / 2),
    )  # fmt: skip
    reports = {}
    try:
        for task, kind, optimizer in json.loads(cases):
            reports[f"{task} {kind} {optimizer}"] = dict(TASKS[task](kind, optimizer))
    finally:
        dist.destroy_process_group()
    (place / f"{rank}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
