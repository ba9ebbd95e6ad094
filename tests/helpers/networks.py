"""Networks and their runs that several tests share."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from fedmuon.config.load import Config
from fedmuon.federated.build import build_experiment, build_task
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.rounds import ServerState, begin, simulate
from fedmuon.tasks.base import Params
from fedmuon.tasks.decoder import Form
from fedmuon.tasks.networks import NetworkTask

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


def own_model(form: Form) -> "GPT2LMHeadModel":
    """transformers' model of that shape as published, activation included, in float64."""
    from transformers import GPT2Config, GPT2LMHeadModel  # slow, and collecting needs it not

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=form.vocabulary, n_positions=form.context, n_embd=form.width,
            n_layer=form.depth, n_head=form.heads, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    nn.Module.double(model)
    return model


def task_of(config: Config) -> NetworkTask:
    source = read_source(config)
    found = build_task(config, source.inputs.shape[1:], source.classes, source.vocabulary)
    assert isinstance(found, NetworkTask)
    return found


def trained(config: Config, data=None, neighbours=None) -> tuple[NetworkTask, ServerState]:
    """All rounds of a config, in a stack of neighbours if there are any."""
    source = read_source(config)
    data = data or build_data(config, source)
    experiment = build_experiment(config, data, neighbours)
    stack = len(neighbours.client) if neighbours else 1
    state = begin(experiment.recipe, experiment.task, config.federation.seed, stack)
    assert isinstance(experiment.task, NetworkTask)
    return experiment.task, simulate(experiment, state)


def replica(params: Params, number: int = 0) -> Params:
    """The parameters of one replica."""
    return {name: value[number] for name, value in params.items()}
