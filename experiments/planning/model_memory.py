"""The memory of a pretrained language model in `fedmuon plan`: weights, adapters, activations."""

import torch

from fedmuon.analysis.report.numbers import in_bytes
from fedmuon.config.load import Config
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Task
from fedmuon.tasks.causal_lm import is_language_model
from fedmuon.tasks.networks import NetworkTask

SHARED = (
    "The peak memory of a process includes the frozen weights. The processes of a machine share "
    "one copy of these weights."
)


def model_memory(config: Config, task: Task, rows: int) -> Record:
    """Return the bytes of frozen weights, of adapters, and of the activations of a step.

    The result is empty for tasks other than language models. The activations are an estimate: the
    tensors that autograd stores for the samples that are computed at once.

    Args:
        config: The config of the run.
        task: The task of the run.
        rows: Number of samples of the largest client.
    """
    if not isinstance(task, NetworkTask) or not is_language_model(task):
        return {}
    frozen: dict[int, int] = {}
    for buffer in task.module.buffers():  # tied weights are one tensor
        frozen[buffer.data_ptr()] = max(frozen.get(buffer.data_ptr(), 0), buffer.nbytes)
    entry = torch.empty((), dtype=task.dtype).element_size()
    at_once = min(config.local.batch or rows, task.chunks.most)
    return {
        "frozen weights": sum(frozen.values()),
        "adapters": sum(param.numel() for param in task.module.parameters()) * entry,
        "activations": at_once * task.saved * entry,
    }


def model_rows(memory: Record) -> list[tuple[str, str, str, str]]:
    """Return rows of the table of memory, for a record of `model_memory`."""
    words = {
        "frozen weights": "frozen weights (per machine)",
        "adapters": "adapters of one model",
        "activations": "activations of a local step",
    }
    return [(words[name], "", "", in_bytes(size)) for name, size in memory.items()]
