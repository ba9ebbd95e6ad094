"""The ClientApp of the CNN job: the ordinary torch loop of Flower's quickstart."""

from __future__ import annotations

from functools import cache

import torch
from cnn_work import Job, cnn, load, train
from flower_common import introduction, partition, work_path
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@cache
def job_at(path: str) -> Job:
    """Read the job, once per worker process."""
    torch.set_num_threads(1)
    return load(path)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Report the partition of this node to the server, and read the data before that."""
    job_at(work_path(message))
    return introduction(message, context)


@app.train()
def learn(message: Message, context: Context) -> Message:
    """Train for one local epoch from the server's model."""
    config = message.content.config_records["config"]
    job, round = job_at(work_path(message)), int(config["round"])  # type: ignore[arg-type]
    client = partition(context)
    place = job.schedule[round].tolist().index(client)
    model = cnn()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    train(model, *job.client(client), job.rows[round, place], job.lr)
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict())}), reply_to=message)
