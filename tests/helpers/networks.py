"""Networks and their runs that several tests share."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedmuon.config.load import Config
from fedmuon.federated.build import build_experiment, build_plan, build_task
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.rounds import begin, simulate
from fedmuon.optim.stage import ServerState
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
            attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, tie_word_embeddings=form.tied,
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


Step = Callable[[Params, Params, Params], None]  # (X, gradient, M), all changed in place
LossOf = Callable[[Params, Tensor, Tensor], Tensor]  # (X, inputs, labels) -> mean loss


def by_hand(config: Config, step: Step, loss_of: LossOf | None = None) -> tuple[Params, Params]:
    """001, Algorithm 1 with modules and autograd, one client after the other; X and M."""
    source = read_source(config)
    data, plan = build_data(config, source), build_plan(config)
    experiment = build_experiment(config, data)
    task = experiment.task
    assert isinstance(task, NetworkTask)

    def loss_of_network(params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
        images = inputs.double().view(-1, *task.shape)
        return cross_entropy(functional_call(task.module, params, (images,)), labels)

    X = replica(begin(experiment.recipe, task, config.federation.seed).params)
    M = {name: torch.zeros_like(value) for name, value in X.items()}
    for r in range(plan.rounds):
        ends = []
        for i in plan.participants(r):
            inputs, labels = (torch.from_numpy(part) for part in data.samples(int(i)))
            Xi = {name: value.clone().requires_grad_() for name, value in X.items()}
            Mi = {name: v.clone() * ("fedmuon" in config.local.recipe) for name, v in M.items()}
            for k in range(plan.steps):
                rows = plan.rows(r, int(i), k, len(labels))
                own = slice(None) if rows is None else torch.from_numpy(rows)
                loss = (loss_of or loss_of_network)(Xi, inputs[own], labels[own])
                G = dict(zip(Xi, torch.autograd.grad(loss, list(Xi.values())), strict=True))
                with torch.no_grad():
                    step(Xi, G, Mi)
            ends.append((Xi, Mi))
        X, M = (
            {name: torch.stack([end[w][name].detach() for end in ends]).mean(0) for name in X}
            for w in (0, 1)
        )
    return X, M


def loss_of_windows(form: Form, weights: Params, windows: Tensor) -> Tensor:
    """The mean loss of windows [n, T + 1] by transformers' own model."""
    given = {**weights, "lm_head.weight": weights["transformer.wte.weight"]}
    windows = windows.long()
    logits = functional_call(own_model(form), given, (windows[:, :-1],)).logits
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
