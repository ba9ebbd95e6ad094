"""Our optimizers in the training loops of transformers, accelerate, Lightning and torch.

After 20 steps, each loop has the losses of a plain loop. Two processes have those of one process.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_loops import (
    AUX,
    CLIP,
    LORA,
    MUON,
    OPTIMIZERS,
    SAMPLES,
    STEPS,
    TIMEOUT,
    batches,
    final_loss,
    language_model,
    loss_of,
    model_for,
    muon_with_aux,
    plain_loop,
    schedule,
    together,
)

from fedmuon.optim import LoRAMuon, Muon, MuonWithAux, groups

# The other libraries warn about settings and versions of their own.
pytestmark = pytest.mark.filterwarnings("ignore")
# Losses are about 3.5 in float32, whose spacing there is 2.4e-7. One process repeats the same
# operations. Two processes add the gradients of their samples in another order.
ATOL = 1e-6
plain = cache(plain_loop)
Losses = list[float]


def furthest(losses: Losses, others: Losses) -> float:
    """The largest difference of losses. The first loop ran as many steps as the second one."""
    assert len(losses) == len(others) == STEPS + 1
    return max(abs(loss - other) for loss, other in zip(losses, others, strict=True))


# --- transformers.Trainer -------------------------------------------------------------------------


def trainer(kind: str, optimizer: str, folder: Path, by_class: bool = False, **options: Any) -> Any:
    """A Trainer of the same model on the same batches, with clipped gradients."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Recorded(TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" in logs:
                recorded.append(logs["loss"])

    recorded: Losses = []
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=SAMPLES, max_grad_norm=CLIP,
        train_sampling_strategy="sequential", report_to=[], use_cpu=True, logging_steps=1,
        disable_tqdm=True, **{"save_strategy": "no", **options},
    )  # fmt: skip
    # The Trainer divides by the number of labels, and the first token of a sample is no label.
    rows = [
        {"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])}
        for row in batches().flatten(0, 1)
    ]
    model = model_for(kind, optimizer)
    chosen: dict[str, Any] = {}
    if by_class:
        chosen["optimizer_cls_and_kwargs"] = CLASSES[optimizer](model)
    else:
        made = OPTIMIZERS[optimizer](model)
        chosen["optimizers"] = (made, schedule(made))
    made_trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Recorded()], **chosen)
    made_trainer.recorded = recorded  # type: ignore[attr-defined]
    return made_trainer


def by_trainer(kind: str, optimizer: str, folder: Path) -> Losses:
    made = trainer(kind, optimizer, folder)
    made.train()
    return [*made.recorded, final_loss(made.model)]


def aux_by_class(model: nn.Module) -> tuple[type, dict[str, Any]]:
    return MuonWithAux, {"params": groups(model, show=False), "muon": MUON, "aux": AUX}


CLASSES: dict[str, Callable[[nn.Module], tuple[type, dict[str, Any]]]] = {
    "muon-with-aux": aux_by_class,
    "lora-muon": lambda model: (LoRAMuon, {"params": model.named_parameters(), **LORA}),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", CLASSES)
def test_the_trainer_makes_the_optimizer_itself(optimizer: str, tmp_path: Path) -> None:
    """It is given the class, its options, and a schedule; a checkpoint continues."""
    made = trainer("llama", optimizer, tmp_path, True, lr_scheduler_type="constant",
                   save_strategy="steps", save_steps=STEPS // 2)  # fmt: skip
    made.train()
    model = model_for("llama", optimizer)
    other = OPTIMIZERS[optimizer](model)
    for tokens in batches():
        loss_of(model.train(), tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        other.step()
        other.zero_grad()
    loss = final_loss(model)
    assert abs(final_loss(made.model) - loss) <= ATOL
    again = trainer("llama", optimizer, tmp_path, True, lr_scheduler_type="constant")
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert len(again.recorded) == STEPS // 2
    assert abs(final_loss(again.model) - loss) <= ATOL


# --- accelerate -----------------------------------------------------------------------------------


def by_accelerate(kind: str, optimizer: str, folder: Path) -> Losses:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    model = model_for(kind, optimizer)
    made = OPTIMIZERS[optimizer](model)
    loader: Any = DataLoader([*batches().flatten(0, 1)], batch_size=SAMPLES)  # type: ignore[arg-type]
    model, made, loader, steps = accelerator.prepare(model.train(), made, loader, schedule(made))
    losses = []
    for number, tokens in enumerate(loader):
        if number == STEPS // 2:  # a saved state continues
            accelerator.save_state(str(folder))
            made.param_groups[0]["lr"] = 9.0
            made.state.clear()
            accelerator.load_state(str(folder))
        loss = loss_of(model, tokens)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        made.step()
        steps.step()
        made.zero_grad()
        losses.append(float(loss.detach()))
    return [*losses, final_loss(model)]


# --- Lightning ------------------------------------------------------------------------------------


def by_lightning(kind: str, optimizer: str, folder: Path) -> Losses:
    """The first half of the steps, a checkpoint, and the second half in a new Trainer."""
    import lightning
    from torch.utils.data import DataLoader

    class Language(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_for(kind, optimizer).train()

        def training_step(self, tokens: Tensor, number: int) -> Tensor:
            loss = loss_of(self.model, tokens)
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            made = OPTIMIZERS[optimizer](self)
            return {
                "optimizer": made,
                "lr_scheduler": {"scheduler": schedule(made), "interval": "step"},
            }

    def fitted(epochs: int, tokens: Tensor, checkpoint: Path | None = None) -> tuple[Any, Any]:
        fitting = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, gradient_clip_val=CLIP, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder,
        )  # fmt: skip
        module, loader = Language(), DataLoader([*tokens.flatten(0, 1)], batch_size=SAMPLES)  # type: ignore[arg-type]
        fitting.fit(module, loader, ckpt_path=checkpoint)
        return fitting, module

    losses: Losses = []
    first, _ = fitted(1, batches()[: STEPS // 2])
    first.save_checkpoint(folder / "half.ckpt")
    _, module = fitted(2, batches()[STEPS // 2 :], folder / "half.ckpt")
    return [*losses, final_loss(module.model)]


LOOPS: dict[str, Callable[[str, str, Path], Losses]] = {
    "trainer": by_trainer,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
}


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("kind", "optimizer"), [
    ("llama", "muon"), ("llama", "muon-with-aux"), ("llama", "heads"), ("gpt2", "muon-with-aux"),
    ("llama", "lora-muon"), ("gpt2", "lora-muon"),
])  # fmt: skip
def test_a_loop_is_the_plain_loop(loop: str, kind: str, optimizer: str, tmp_path: Path) -> None:
    expected = plain(kind, optimizer)
    losses = LOOPS[loop](kind, optimizer, tmp_path)
    assert furthest(losses, expected) <= ATOL
    assert min(expected[-3:]) < expected[0] - 0.1  # it trains
    assert furthest(losses, plain(kind, optimizer, False)) > 1e-4  # the control: no clipping


# --- torch: DistributedDataParallel and fully_shard -----------------------------------------------


EQUAL = [
    ("ddp", "llama", "muon"), ("ddp", "llama", "muon-with-aux"), ("ddp", "gpt2", "heads"),
    ("ddp", "llama", "lora-muon"), ("fsdp2", "llama", "muon"), ("fsdp2", "llama", "muon-with-aux"),
    ("fsdp2", "gpt2", "heads"), ("fsdp2", "llama", "lora-muon"),
    ("fsdp2", "odd", "rows"), ("fsdp2-columns", "llama", "rows"),
]  # fmt: skip
REJECTED = [("fsdp1", "llama", "muon-with-aux"), ("fsdp1", "llama", "lora-muon")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """All cases in the same two processes, because transformers takes seconds to import."""
    return together([*EQUAL, *REJECTED], tmp_path_factory.mktemp("processes"))


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize(("task", "kind", "optimizer"), EQUAL)
def test_two_processes_are_one_process(
    task: str, kind: str, optimizer: str, reports: list[dict[str, dict[str, Any]]]
) -> None:
    expected = plain(kind, optimizer)
    both = [process[f"{task} {kind} {optimizer}"] for process in reports]
    for report in both:
        assert furthest(report["losses"], expected) <= ATOL
        if task != "ddp":
            once, again = report["continued"]
            assert max(abs(x - y) for x, y in zip(once, again, strict=True)) <= ATOL
            assert report["share"] == pytest.approx(0.5, abs=0.1)
    if task != "ddp":  # each process stores its part of weights and momenta, and not more
        assert sum(report["share"] for report in both) == pytest.approx(1)
        assert sum(report["momentum"] for report in both) == pytest.approx(1)
    assert furthest(plain(kind, optimizer, False), expected) > 1e-4  # the control: no clipping


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize(("task", "kind", "optimizer"), REJECTED)
def test_flat_parts_are_rejected(
    task: str, kind: str, optimizer: str, reports: list[dict[str, dict[str, Any]]]
) -> None:
    for process in reports:
        report = process[f"{task} {kind} {optimizer}"]
        flat = "another library divided it into flat parts"
        whole = "the model is a FullyShardedDataParallel" if optimizer != "lora-muon" else flat
        assert flat in report["step"] and whole in report["made"]
        assert all("fully_shard" in text for text in report.values())


def test_parts_are_not_orthogonalized_alone() -> None:
    """The control of the test above: an update per half of a matrix has other losses."""
    model = model_for("llama", "muon")
    hidden = OPTIMIZERS["muon"](model).param_groups[0]["params"]
    halves = [{"params": [param], "rows": (len(param) // 2,) * 2} for param in hidden]
    optimizer = Muon(halves, **MUON)
    steps, losses = schedule(optimizer), []
    for tokens in batches():
        loss = loss_of(model.train(), tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(hidden, CLIP)
        optimizer.step()
        steps.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert furthest([*losses, final_loss(model)], plain("llama", "muon")) > 1e-2


def test_one_process_with_fully_shard_takes_the_same_steps() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    store = dist.HashStore()  # type: ignore[attr-defined]  # not in __all__, but documented
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = fully_shard(language_model())
        optimizer = muon_with_aux(model)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        for tokens in batches(3):
            optimizer.zero_grad()
            loss_of(model, tokens).backward()
            optimizer.step()
        shared = {name: param.full_tensor() for name, param in model.named_parameters()}
    finally:
        dist.destroy_process_group()
    other = language_model()
    optimizer = muon_with_aux(other)
    for tokens in batches(3):
        optimizer.zero_grad()
        loss_of(other, tokens).backward()
        optimizer.step()
    for name, param in other.named_parameters():
        torch.testing.assert_close(shared[name], param, rtol=0, atol=1e-6)
