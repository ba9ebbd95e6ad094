"""The server's half of a round over Flower: messages out, replies in, the core in between.

Flower's node ids are random, so every node is asked once which partition it holds, and clients are
sampled as indices from the plan. What a round may not survive is named, counted and either retried
or recorded; it is never a silent change of the schedule.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from logging import INFO

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedmuon.config.load import Config, flatten
from fedmuon.core.errors import InputError, plain
from fedmuon.federated.rounds import (
    Engine,
    Experiment,
    Fault,
    Reply,
    Round,
    ServerState,
    broadcast,
    mean_loss,
    returned_like,
    server_update,
)
from fedmuon.federated.wire import distrusted, pack, received
from fedmuon.server import messaging, stopping
from fedmuon.server.messaging import OWN, Numbered, arrays_of, exchange, meet, reason

PAUSE = 2.0  # seconds more before every further attempt: a killed worker needs them to return


class RoundFailed(InputError):
    """A round that the policy does not let pass; the run can be resumed at its start."""


@dataclass
class FedMuonStrategy(Strategy):
    """Every recipe of the core as a Flower strategy; `state` is the server's, round by round."""

    config: Config
    experiment: Experiment
    state: ServerState
    nodes: dict[int, int] = field(default_factory=dict)  # partition -> node id
    roster: ConfigRecord | None = None  # the public keys of those whose replies are masked

    def rounds(self, grid: Grid) -> Iterator[Round]:
        """The rounds that remain, under the config's fault policy: the engine of a run."""
        while self.state.round < self.experiment.plan.rounds:
            participants = self.experiment.plan.participants(self.state.round)
            replies, faults = self._collect(grid, [int(i) for i in participants])
            self._take(replies)
            answered = np.sort([reply.client for reply in replies])
            yield Round(self.state, participants, answered, mean_loss(replies), tuple(faults))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The round's messages; Flower counts rounds from 1, the plan from 0."""
        participants = [int(i) for i in self.experiment.plan.participants(server_round - 1)]
        self._meet(grid, participants)
        self._agree(grid, participants)
        return self.messages(MessageType.TRAIN, participants)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """The next state from replies that must all be sound."""
        holders = {node: client for client, node in self.nodes.items()}
        sound = [self._read(reply, holders[reply.metadata.src_node_id]) for reply in replies]
        self._take(sound)
        return self.arrays(), MetricRecord({"loss": mean_loss(sound).tolist()})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """None: the server holds the test samples and evaluates by itself."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Nothing to aggregate."""
        return None

    def summary(self) -> None:
        """Name the recipe and the sampling in Flower's log."""
        table = self.config.federation
        log(INFO, "%s: %s of %s", self.config.local.recipe, table.per_round, table.clients)

    def _take(self, replies: list[Reply]) -> None:
        """The next state from these."""
        factor = self.experiment.plan.factor_at(self.state.round)
        self.state = server_update(self.experiment.recipe, self.state, replies, factor)

    def arrays(self) -> ArrayRecord:
        """What participants receive: the model, and the states that the recipe sends."""
        sent = broadcast(self.experiment.recipe, self.state)
        return ArrayRecord(pack(sent.params, sent.states))

    def messages(self, kind: str, clients: Iterable[int]) -> list[Message]:
        """The same records for every client; each array is serialized once."""
        stack = len(next(iter(self.state.params.values())))
        request: dict[str, int | float | str] = {"round": self.state.round, "stack": stack}
        request["dealt"] = self.experiment.shards.dealt
        if (plan := self.experiment.plan).factor is not None:
            request["factor"] = plan.factor_at(self.state.round)
        config = ConfigRecord({**flatten(self.config), **request})
        if (neighbours := self.experiment.shards.neighbours) is not None:
            config["rows"] = neighbours.rows.ravel().tolist()
        content = RecordDict({"arrays": self.arrays(), "config": config})
        if self.roster is not None:
            content["roster"] = self.roster
        deadline = self.config.faults.deadline
        return [Message(content, self.nodes[client], kind, ttl=deadline) for client in clients]

    def _collect(self, grid: Grid, clients: list[int]) -> tuple[list[Reply], list[Fault]]:
        """Sound replies of the participants: all of them under `strict`, or a failed round."""
        table, faults, missing = self.config.faults, [], clients
        replies: dict[int, Reply] = {}
        for attempt in range(1 + (table.retries if table.policy == "strict" else 0)):
            if missing:
                stopping.pause(attempt * PAUSE)
                found, new = self._attempt(grid, missing, attempt)
                replies, faults = replies | found, faults + new
                missing = [client for client in clients if client not in replies]
        own = [one.why for one in faults[-len(missing) :] if one.why.startswith(OWN)]
        if missing and own and (table.policy == "strict" or not replies):
            raise RoundFailed(own[0].removeprefix(OWN))
        if missing and (table.policy == "strict" or not replies):
            why = "; ".join(f"client {one.client}: {one.why}" for one in faults[-len(missing) :])
            raise RoundFailed(
                f"round {self.state.round} has no sound reply of {len(missing)} of {len(clients)} "
                f"participants ({why}): mend the cause and go on with --resume"
            )
        return list(replies.values()), faults

    def _attempt(
        self, grid: Grid, clients: list[int], attempt: int
    ) -> tuple[dict[int, Reply], list[Fault]]:
        """Ask the given clients once; those without a sound reply are faults, and met anew."""
        table, found = self.config.faults, {}
        self._meet(grid, clients)
        asked = [client for client in clients if client in self.nodes]
        why = {client: f"no node holds partition {client}" for client in clients}
        why |= dict.fromkeys(asked, f"no answer within {table.deadline:g} s")
        self._agree(grid, clients)
        messages = self.messages(MessageType.TRAIN, asked)
        replies = exchange(grid, messages, table.deadline)
        for number, message in replies.items():
            try:
                found[asked[number]] = self._read(message, asked[number])
            except InputError as error:
                why[asked[number]] = str(error)
        for client in set(clients) - set(found):
            self.nodes.pop(client, None)
        again = grid.mended if isinstance(grid, Numbered) else {}
        healed = [
            Fault(asked[number], attempt, again[name])
            for number, message in replies.items()
            if (name := message.metadata.reply_to_message_id) in again and asked[number] in found
        ]
        return found, healed + [Fault(i, attempt, why[i]) for i in clients if i not in found]

    def _agree(self, grid: Grid, clients: list[int]) -> None:
        """Have clients whose replies are masked know each other's keys of this attempt."""
        if self.experiment.recipe.masked:
            self.roster = messaging.agreed(grid, clients, self.nodes, self.config.faults.deadline)

    def _meet(self, grid: Grid, clients: list[int]) -> None:
        """Know the nodes of these clients; at first wait for all of them to appear."""
        table = self.config.faults
        if isinstance(grid, Numbered):
            self.nodes = {client: grid.node_of(client) for client in clients}
        elif not set(clients) <= set(self.nodes):
            everyone = range(self.config.federation.clients)
            wanted, patience = (
                (clients, table.deadline) if self.nodes else (everyone, table.patience)
            )
            self.nodes = meet(grid, self.nodes, wanted, patience)

    def _read(self, message: Message, client: int) -> Reply:
        """A client's reply, refused unless it is of this round, of the right shapes, and finite."""
        if message.has_error():
            raise InputError(reason(message))
        if message.metadata.src_node_id != self.nodes.get(client):
            raise InputError("it was answered by a node that was not asked")
        with distrusted():
            return self._reply(message.content, client)

    def _reply(self, content: RecordDict, client: int) -> Reply:
        """The same of a message that may hold anything."""
        recipe, who = self.experiment.recipe, content.config_records["who"]
        if (who["round"], who["partition"]) != (self.state.round, client):
            about = f"partition {plain(who['partition'], 20)}, round {plain(who['round'], 20)}"
            raise InputError(f"it answers for {about}")
        like = returned_like(recipe, self.state.params, self.state.states)
        params, states = received(arrays_of(content), *like)
        found = [one for tree in (params, *states.values()) for one in tree.values()]
        clipped = recipe.client_level is not None  # which makes 0 of them: a fault would tell
        if not clipped and not all(bool(tensor.isfinite().all()) for tensor in found):
            raise InputError("it returns values that are not finite")
        loss = torch.tensor(content.metric_records["metrics"]["loss"], dtype=torch.float64)
        if loss.shape != (len(found[0]),):
            raise InputError("it does not return one loss a replica")
        samples = self.experiment.shards.size(client)
        return Reply(client, params, states, loss, samples)


def engine(config: Config, grid: Grid) -> Engine:
    """Rounds of any experiment of this config, with the clients behind the grid."""
    return lambda experiment, state: FedMuonStrategy(config, experiment, state).rounds(grid)
