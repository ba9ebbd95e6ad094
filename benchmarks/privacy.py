"""Compare per-example clipping of this package with three methods of Opacus.

    python -m benchmarks.privacy [--device cpu] [--lot 1024] [--pairs 3] [--threads 2]
        [--models cnn mlp wrn-16-2 decoder] [--against ghost hooks fast]

All methods use the same networks and one lot of 28 x 28 images, or of windows of 64 tokens. Each
gradient of an example is clipped to C in its full norm, and the clipped gradients are summed,
without noise. Each method runs in its own process. The time is the median of warm calls. CPU time
is measured, too, because other load on the machine disturbs it less. The memory is what a first
call adds to the process (on a GPU, the peak of torch). `hooks` and fast gradient clipping (`fast`)
of Opacus store all gradients. They need up to 13 GB for the CNN and a minute per run, so they run
once. Ghost clipping (`ghost`) stores norms and runs two backward passes. The decoder uses linear
layers for GPT-2's projections and an untied head, because Opacus supports ghost norms neither for
the layers of transformers nor for tied weights.
"""

# pyright: reportMissingImports=false
# Opacus is only installed with the `bench` extra.

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import page
from benchmarks.page import Row, say
from fedmuon.core.rng import Draw, generator
from fedmuon.tasks.base import Batch, Params, Targets, cross_entropy, labels_as_targets
from fedmuon.tasks.decoder import Form, decoder, next_tokens
from fedmuon.tasks.models import network
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipping import Clipping

SHAPE, CLASSES, BOUND = (1, 28, 28), 10, 1
FORM = Form(vocabulary=256, context=64, width=128, depth=4, heads=4)
STORING = ("hooks", "fast")
PEERS = ("ghost", *STORING)
# Samples that are checked in float64, and the largest relative difference of sums. Opacus adds 1e-6
# to norms.
CHECKED, SAME = 64, 1e-5
PATIENCE = 5.0  # warm calls stop after this number of seconds
Work = Callable[[], Params]  # returns the clipped sum of each parameter


@dataclass(frozen=True)
class Setting:
    """A network and a lot."""

    model: str
    lot: int
    device: str
    dtype: torch.dtype = torch.float32

    def batch(self) -> Batch:
        """Return random images of Fashion-MNIST's size as rows, or random tokens."""
        rng = generator(0, Draw.SYNTHETIC)
        if self.is_text:
            inputs = torch.from_numpy(rng.integers(FORM.vocabulary, size=(self.lot, *self.shape)))
        else:
            inputs = torch.from_numpy(rng.random((self.lot, math.prod(SHAPE)), np.float32))
        labels = torch.from_numpy(rng.integers(CLASSES, size=self.lot))
        return Batch(inputs.to(self.device, self.dtype), labels.to(self.device))

    def start(self) -> tuple[NetworkTask, Params]:
        """Return the task and its initial parameters, for one replica."""
        task = NetworkTask(
            self.module(), self.shape, self.dtype, torch.device(self.device), targets=self.targets
        )
        return task, task.initial(generator(0, Draw.INITIAL))

    @property
    def is_text(self) -> bool:
        """Whether the network is the decoder."""
        return self.model == "decoder"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return (FORM.context + 1,) if self.is_text else SHAPE

    @property
    def targets(self) -> Targets:
        """The function that returns the prediction targets. Threads may share it."""
        return next_tokens if self.is_text else labels_as_targets

    def module(self) -> nn.Module:
        """Return the network without allocated parameters."""
        return text_network() if self.is_text else network(self.model, SHAPE, CLASSES)


def text_network() -> nn.Module:
    """Return the decoder with layers that both packages support."""
    found = decoder(FORM)
    with torch.device("meta"):
        found.lm_head = nn.Linear(FORM.width, FORM.vocabulary, bias=False)
        for block in found.transformer.h:
            for part, key in product((block.attn, block.mlp), ("c_attn", "c_fc", "c_proj")):
                if hasattr(part, key):
                    setattr(part, key, nn.Linear(*getattr(part, key).weight.shape))
    return found


class Criterion:
    """Cross-entropy with the interface that Opacus expects."""

    reduction = "mean"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, or the mean loss."""
        each = cross_entropy(outputs, targets)
        return each if self.reduction == "none" else each.mean()


def ours(setting: Setting) -> Work:
    """Return a call of `Task.clipped`."""
    task, params = setting.start()
    batch, clipping = setting.batch(), Clipping("flat", BOUND)
    none = Batch(batch.inputs[:0], batch.labels[:0])
    task.clipped([(1.0, params)], [none], clipping)  # inspect the module now, as Opacus does
    return lambda: task.clipped([(1.0, params)], [batch], clipping)[1]


def module_of(setting: Setting) -> nn.Module:
    """Return the same network with the same parameters, as a plain module."""
    _, params = setting.start()
    module = setting.module().to(setting.dtype)
    module = module.to_empty(device=setting.device)
    module.load_state_dict({name: value[0] for name, value in params.items()})
    return module


def opacus(kind: str, setting: Setting) -> Work:
    """Return a call of one method of Opacus, without noise and without an optimizer step."""
    from opacus.grad_sample import GradSampleModule
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import DPOptimizer
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    plain, batch = module_of(setting), setting.batch()
    settings: dict[str, Any] = {
        "noise_multiplier": 0.0,
        "max_grad_norm": BOUND,
        "expected_batch_size": setting.lot,
    }
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    criterion = Criterion()
    private: Any
    if kind == "hooks":
        module, loss = GradSampleModule(plain), criterion
        private = DPOptimizer(optimizer, **settings)
        gather = private.clip_and_accumulate
    else:
        module = GradSampleModuleFastGradientClipping(
            plain, max_grad_norm=BOUND, use_ghost_clipping=kind == "ghost"
        )
        private = DPOptimizerFastGradientClipping(optimizer, **settings)
        loss = DPLossFastGradientClipping(module, private, criterion)
        gather = private.accumulate
    for layer in plain.modules():
        if isinstance(layer, nn.Embedding):  # its ghost norms require contiguous tokens
            layer.register_forward_pre_hook(lambda _, given: (given[0].contiguous(),))
    samples = batch.inputs.view(-1, *setting.shape)
    targets = setting.targets(batch.inputs, batch.labels)

    def work() -> Params:
        private.zero_grad(set_to_none=True)
        loss(module(samples), targets).backward()
        gather()
        return {name: getattr(param, "summed_grad") for name, param in plain.named_parameters()}  # noqa: B009

    return work


def work_of(kind: str, setting: Setting) -> Work:
    """Return the call of a method."""
    return ours(setting) if kind == "ours" else opacus(kind, setting)


def resident() -> int:
    """Return the bytes of memory that this process uses now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def first(work: Work, device: str) -> tuple[int, Params]:
    """Return the bytes that the first call adds at its peak, and the result of the call."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        sums = work()
        return torch.cuda.max_memory_allocated() - before, sums
    before = resident()
    sums = work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, sums


def seconds(work: Work, device: str) -> tuple[float, float]:
    """Return the elapsed time and the CPU time of one call."""
    start = perf_counter(), process_time()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start[0], process_time() - start[1]


def warm(work: Work, asked: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the times of `calls` warm calls, or of fewer if `PATIENCE` runs out."""
    times: list[tuple[float, float]] = []
    while len(times) < asked.calls and sum(elapsed for elapsed, _ in times) < PATIENCE:
        times.append(seconds(work, asked.device))
    return times


def contest(kind: str, model: str, asked: argparse.Namespace) -> None:
    """Run one method in this process: print its figures to stdout, and save its sums to a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(asked.threads)
    if asked.device == "cuda":
        torch.zeros(1, device="cuda")  # create the CUDA context
    setting = Setting(model, asked.lot, asked.device)
    work = work_of(kind, setting)
    memory, sums = first(work, asked.device)
    exact = work_of(kind, replace(setting, lot=CHECKED, dtype=torch.float64))()
    flat = {f"{v.dtype}/{name}": v.reshape(-1) for p in (sums, exact) for name, v in p.items()}
    np.savez(asked.out, allow_pickle=False, **{key: v.cpu().numpy() for key, v in flat.items()})
    elapsed, busy = (1e3 * median(column) for column in zip(*warm(work, asked), strict=True))
    print(json.dumps({"ms": elapsed, "CPU ms": busy, "MiB": memory / 2**20}))


def run(kind: str, model: str, asked: argparse.Namespace, out: Path) -> dict[str, float]:
    """Run one method in a separate process, and return its figures."""
    options = ("device", "lot", "calls", "threads")
    command = [sys.executable, "-m", "benchmarks.privacy", "--work", kind, "--models", model]
    command += [f"--{name}={getattr(asked, name)}" for name in options] + [f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def distance(folder: Path, kind: str, dtype: torch.dtype) -> float:
    """Return the largest relative difference of a parameter's clipped sum from our sum."""
    with np.load(folder / "ours.npz") as own, np.load(folder / f"{kind}.npz") as other:
        return max(
            float(np.linalg.norm(own[name] - other[name]) / np.linalg.norm(own[name]))
            for name in own
            if name.startswith(str(dtype))
        )


def compare(model: str, asked: argparse.Namespace) -> Iterator[Row]:
    """Run the methods in turn, in pairs of runs. Ratios are medians over the pairs."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in ("ours", *asked.against)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for pair in range(asked.pairs):
            for kind, figures in found.items():
                if pair == 0 or kind not in STORING:
                    figures.append(run(kind, model, asked, folder / f"{kind}.npz"))
                    say(f"{pair + 1}/{asked.pairs} {model}, {kind}: {figures[-1]['ms']:.0f} ms")
        away = {
            kind: [distance(folder, kind, dtype) for dtype in (torch.float32, torch.float64)]
            for kind in found
        }
    for kind in asked.against:
        if away[kind][1] > SAME:
            raise SystemExit(f"{kind}'s sums are not ours")
        yield from ratios(f"{model}, lot {asked.lot}, clipped / Opacus's {kind}", found, kind)


def ratios(figure: str, found: dict[str, list[dict[str, float]]], kind: str) -> Iterator[Row]:
    """Return the rows of the time, with CPU time in the note, and of the memory."""

    def row(name: str, unit: str, scale: float, note: str = "") -> Row:
        mine, theirs = ([one[name] / scale for one in found[who]] for who in ("ours", kind))
        ratio = median(t / o for t, o in zip(theirs, mine, strict=False))
        return Row(figure, median(mine), median(theirs), ratio, note=note, unit=unit)

    busy = row("CPU ms", "s", 1e3).ratio
    yield row("ms", "s", 1e3, f"{busy:.2f} x by the processors' time")
    yield row("MiB", "MiB", 1)


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = page.parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--lot", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--calls", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--models", nargs="*", default=["cnn", "mlp"])
    parser.add_argument("--against", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        contest(asked.work, asked.models[0], asked)
        return
    rows = (row for model in asked.models for row in compare(model, asked))
    page.tell(rows, asked.rows)


if __name__ == "__main__":
    main()
