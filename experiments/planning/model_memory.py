"""The memory of a pretrained language model in `fedmuon plan`: weights, adapters, activations."""

import torch

from fedmuon.analysis.report.numbers import in_bytes
from fedmuon.config.load import Config
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Task
from fedmuon.tasks.causal_lm import is_language_model
from fedmuon.tasks.networks import LOSS_COPIES, NetworkTask

SHARED = (
    "The peak memory of a process includes the frozen weights. The processes of a machine share "
    "one copy of these weights."
)


def model_memory(config: Config, task: Task, rows: int) -> Record:
    """Return the bytes of frozen weights, adapters, activations of a step, and an evaluation.

    The result is empty for tasks other than language models. The last two are estimates. The
    activations are the tensors that autograd and the loss store for the samples that are computed
    at once. An evaluation stores the logits of its samples and their log-probabilities.

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
    evaluated = min(evaluated_at_once(task), max(config.data.test, rows))
    return {
        "frozen weights": sum(frozen.values()),
        "adapters": sum(param.numel() for param in task.module.parameters()) * entry,
        "activations": at_once * (task.saved + LOSS_COPIES * task.outputs) * entry,
        "evaluation": evaluated * (LOSS_COPIES - 1) * task.outputs * entry,  # no gradient
    }


def evaluated_at_once(task: Task) -> int:
    """Return how many samples a language model evaluates at once, or 1 for other tasks."""
    if isinstance(task, NetworkTask) and is_language_model(task):
        return task.evaluation_chunks.most
    return 1


def model_rows(memory: Record) -> list[tuple[str, str, str, str]]:
    """Return rows of the table of memory, for a record of `model_memory`."""
    words = {
        "frozen weights": "frozen weights (per machine)",
        "adapters": "adapters of one model",
        "activations": "activations of a local step",
        "evaluation": "logits of an evaluation",
    }
    return [(words[name], "", "", in_bytes(size)) for name, size in memory.items()]
