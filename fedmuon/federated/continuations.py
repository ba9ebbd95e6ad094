"""Continuations of fixed prompts, which show what a language model has learnt."""

from fedmuon.config.load import Config
from fedmuon.data.pretrained import model_tokens
from fedmuon.federated.language_model import tokenizer_of
from fedmuon.tasks.base import Params, Task
from fedmuon.tasks.generation import continued
from fedmuon.tasks.networks import NetworkTask

PROMPTS = ("In the beginning", "A wise man", "The king said to his servant,")
COUNT = 30  # tokens


def continuations(config: Config, task: Task, params: Params) -> dict[str, str]:
    """Return how a model continues each prompt, with the most likely token at each place.

    If the tokenizer of the model is unknown, the result is empty. A model that
    trains on prompts and responses reads the prompt as a user's message.
    """
    assert isinstance(task, NetworkTask)  # the task is a language model
    if not (tokenizer := tokenizer_of(config)):
        return {}
    tokens = model_tokens(tokenizer)
    encode = tokens.question if config.data.name == "jsonl" else tokens.encode
    written = continued(task, params, [encode(prompt) for prompt in PROMPTS], COUNT, tokens.end)
    texts = (tokens.pieces.decode(part) for part in written)
    return dict(zip(PROMPTS, texts, strict=True))
