"""The server's part of a round with Flower: send messages, read replies, compute the next state.

The plan samples clients by number. Flower's node ids are random, so the server asks each node once
for the number of its client. If a client fails, the request is repeated or the fault is recorded. A
fault never changes the schedule of clients silently.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from logging import INFO
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedmuon.clients.messages import MEASURED, array_record, record_of
from fedmuon.clients.stored_states import MEMORY, state_record, states_of
from fedmuon.config.facts import FACTS
from fedmuon.config.load import Config, flatten
from fedmuon.core.demands import Demand, Trait, require_allowed
from fedmuon.core.errors import SAME_VERSION, InputError, plain
from fedmuon.core.files import Record
from fedmuon.federated.experiment import Experiment, Fault, Round, mean_loss
from fedmuon.federated.personal import tests_personal_models
from fedmuon.federated.recipe_facts import FACTS as RECIPE_FACTS
from fedmuon.federated.recipe_facts import BuiltRecipe
from fedmuon.federated.rounds import broadcast, next_state, starts
from fedmuon.federated.traffic import returned_like, traffic
from fedmuon.federated.wire import distrusted, pack, received
from fedmuon.optim.chain import States
from fedmuon.optim.gossip import require_server
from fedmuon.optim.stage import Reply, ServerState
from fedmuon.runs.observers.profile import Profiled
from fedmuon.runs.observers.worker_memory import Measured
from fedmuon.server import stopping
from fedmuon.server.messaging import OWN, Numbered, Stateful, exchange, meet, public_keys, reason

MOST_METRICS, LONGEST_NAME = 100, 100  # limits for the measurements of a client
PAUSE = 2.0  # added seconds before each further attempt, so that a killed worker can restart


FLOWERS_LOOP: Demand[Any] = Demand(
    lambda subject: "the round loop of Flower's own strategies",
    {
        Trait.STORES_CLIENT_STATES: "it passes only messages of the current round",
        Trait.MEASURES_CLIENTS: "it writes no records of clients",
        Trait.LATE_REPLIES: "it sends only the current model",
    },
    instead="use `fedmuon run` or the ServerApp of fedmuon",
)


class RoundFailed(InputError):
    """A round failed under the fault policy. The run can resume from the start of this round."""


@dataclass
class FedMuonStrategy(Strategy):
    """A Flower strategy that runs any optimizer of fedmuon.

    The attribute `state` is the current state of the server.
    """

    config: Config
    experiment: Experiment
    state: ServerState
    nodes: dict[int, int] = field(default_factory=dict)  # partition -> node id
    keeps_states: bool = False  # whether the grid passes client states to the server
    keys: ConfigRecord | None = None  # public keys of the round's clients, if replies are masked
    counts_in: int = 0  # the round whose update uses the replies; FedBuff's replies begin earlier

    def rounds(self, grid: Grid) -> Iterator[Round]:
        """Run and yield the remaining rounds, with the config's fault policy."""
        self.keeps_states, recipe = isinstance(grid, Stateful), self.experiment.recipe
        # The server tests personal models, so it needs the client states.
        lacking = recipe.keeps_states and not self.keeps_states
        if lacking and tests_personal_models(self.config, recipe):
            raise RoundFailed(
                "[data] client-test needs the personal model of each client, but in a deployment "
                "this model stays on the client's SuperNode. Set client-test = 0, or set "
                "[engine] name = 'inline' or 'ray'."
            )
        while self.state.round < self.experiment.plan.rounds:
            participants = self.experiment.plan.participants(self.state.round)
            now, replies, faults = self.state, list[Reply](), list[Fault]()
            self.counts_in = now.round
            for start, clients in starts(self.experiment, now, participants.tolist()):
                self.state = start  # the state sent to these clients
                valid, failed = self._collect(grid, clients)
                replies += valid
                faults += failed
            self.state = now
            self._remember(grid, replies)
            self.state, records = next_state(self.experiment, now, replies)
            sizes = traffic(recipe, now, len(participants), replies)
            answered = np.sort([reply.client for reply in replies])
            loss = mean_loss(replies)
            yield Round(self.state, participants, answered, loss, tuple(faults), records, **sizes)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of a round. Flower counts rounds from 1."""
        built = BuiltRecipe(self.config, self.experiment.recipe)
        unmeasured = set() if self.experiment.measured else {Trait.MEASURES_CLIENTS}
        facts = [fact for fact in FACTS if fact.trait not in unmeasured]
        require_allowed(self.config, (FLOWERS_LOOP,), facts)
        require_allowed(built, (FLOWERS_LOOP,), RECIPE_FACTS)
        participants = [int(i) for i in self.experiment.plan.participants(server_round - 1)]
        self._meet(grid, participants)
        return self.messages(MessageType.TRAIN, participants)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Compute the next server state from the replies of all clients."""
        holders = {node: client for client, node in self.nodes.items()}
        sound = [self._read(reply, holders[reply.metadata.src_node_id]) for reply in replies]
        self.state, _ = next_state(self.experiment, self.state, sound)
        return self.arrays(), MetricRecord({"loss": mean_loss(sound).tolist()})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages, because the server evaluates the model on its test samples."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return None, because clients evaluate no model."""
        return None

    def summary(self) -> None:
        """Log the name of the optimizer, and how clients are sampled."""
        table = self.config.federation
        log(INFO, "%s: %s of %s", self.config.local.recipe, table.per_round, table.clients)

    def _remember(self, grid: Grid, replies: list[Reply]) -> None:
        """Store the client states, or only the number of the round if nodes store the states."""
        recipe, memory, round = (
            self.experiment.recipe,
            self.experiment.client_states,
            self.state.round,
        )
        for reply in replies if recipe.keeps_states else ():
            states: States = {}
            if isinstance(grid, Stateful):
                states = states_of(grid.collect_state(reply.client), round)
            memory.write(reply.client, round, states)

    def arrays(self) -> ArrayRecord:
        """Return the arrays that participants receive: the model, and the states that are sent."""
        sent = broadcast(self.experiment.recipe, self.state)
        return array_record(pack(sent.params, sent.states))

    @cached_property
    def _settings(self) -> ConfigRecord:
        """The config as a record. Flower checks each of its 200 entries when it is created."""
        return ConfigRecord({**flatten(self.config)})

    def messages(self, kind: str, clients: Sequence[int]) -> list[Message]:
        """Create messages with the same records for each client. Serialize each array only once."""
        stack = len(next(iter(self.state.params.values())))
        request: dict[str, int | float | str] = {"round": self.state.round, "stack": stack}
        request["dealt"] = self.experiment.shards.partition_digest
        if (plan := self.experiment.plan).factor is not None:
            request["factor"] = plan.factor_at(self.state.round)
        config = self._settings.copy()
        config.update(request)
        if (neighbours := self.experiment.shards.neighbours) is not None:
            config[neighbours.message] = neighbours.rows.ravel().tolist()
        content = RecordDict({"arrays": self.arrays(), "config": config})
        if self.keys is not None:
            content["roster"] = self.keys
        if self.experiment.recipe.keeps_states:
            memory = self.experiment.client_states
            last = [memory.last_round(client, self.state.round) for client in clients]
            content[MEMORY] = ConfigRecord(
                {
                    "run": memory.run,
                    "round": self.counts_in,
                    "clients": list(clients),
                    "last": [-1 if number is None else number for number in last],
                    "saved": list(memory.checkpoints),
                    "with-server": self.keeps_states,
                }
            )
        deadline = self.config.faults.deadline
        return [Message(content, self.nodes[client], kind, ttl=deadline) for client in clients]

    def _collect(self, grid: Grid, clients: list[int]) -> tuple[list[Reply], list[Fault]]:
        """Request replies from the participants. Return the valid replies, and the faults.

        Raises:
            RoundFailed: If a reply is missing and the policy is `strict`, or if all replies are
                missing.
        """
        table, faults, missing = self.config.faults, [], clients
        replies: dict[int, Reply] = {}
        for attempt in range(1 + (table.retries if table.policy == "strict" else 0)):
            if missing:
                stopping.pause(attempt * PAUSE)
                valid, failed = self._attempt(grid, missing, attempt)
                replies, faults = replies | valid, faults + failed
                missing = [client for client in clients if client not in replies]
        own_errors = [fault.why for fault in faults[-len(missing) :] if fault.why.startswith(OWN)]
        if missing and own_errors and (table.policy == "strict" or not replies):
            raise RoundFailed(own_errors[0].removeprefix(OWN))
        if missing and (table.policy == "strict" or not replies):
            clients_of: dict[str, list[str]] = {}
            for fault in faults[-len(missing) :]:
                clients_of.setdefault(fault.why, []).append(str(fault.client))
            summary_of_faults = "; ".join(
                f"client{'s' * (len(names) > 1)} {', '.join(names)}: {cause}"
                for cause, names in clients_of.items()
            )
            raise RoundFailed(
                f"round {self.state.round} has no valid reply from {len(missing)} of "
                f"{len(clients)} participants ({summary_of_faults}). Fix the cause, then continue "
                "with --resume."
            )
        return list(replies.values()), faults

    def _attempt(
        self, grid: Grid, clients: list[int], attempt: int
    ) -> tuple[dict[int, Reply], list[Fault]]:
        """Send one request to each client. Return the valid replies by client, and the faults.

        A client without a valid reply counts as a fault. The server then no longer uses the
        client's node, until the node reports its partition again.
        """
        table, valid = self.config.faults, {}
        self._meet(grid, clients)
        reachable = [client for client in clients if client in self.nodes]
        reasons = {
            client: (
                f"no connected node has partition {client}, so start a SuperNode with "
                f"partition-id={client}"
            )
            for client in clients
        }
        reasons |= dict.fromkeys(reachable, f"no answer within {table.deadline:g} s")
        if self.experiment.recipe.keeps_states and isinstance(grid, Stateful):
            memory, round = self.experiment.client_states, self.state.round
            for client in reachable:
                last, states = memory.last_round(client, round), RecordDict()
                if last is not None:
                    states = state_record(memory.read(client, round), last)
                grid.lend_state(client, states)
        messages = self.messages(MessageType.TRAIN, reachable)
        replies = exchange(grid, messages, table.deadline)
        for number, message in replies.items():
            try:
                valid[reachable[number]] = self._read(message, reachable[number])
            except InputError as error:
                reasons[reachable[number]] = str(error)
        for client in set(clients) - set(valid):
            self.nodes.pop(client, None)
        reasons_of_retries = grid.retried if isinstance(grid, Numbered) else {}
        retried = [
            Fault(reachable[number], attempt, reasons_of_retries[name])
            for number, message in replies.items()
            if (name := message.metadata.reply_to_message_id) in reasons_of_retries
            and reachable[number] in valid
        ]
        return valid, retried + [Fault(i, attempt, reasons[i]) for i in clients if i not in valid]

    def _meet(self, grid: Grid, clients: list[int]) -> None:
        """Find the nodes of these clients. If replies are masked, also request public keys.

        The first call waits until the nodes of all clients of the run are connected.
        """
        table = self.config.faults
        if isinstance(grid, Numbered):
            self.nodes = {client: grid.node_of(client) for client in clients}
        elif not set(clients) <= set(self.nodes):
            everyone = range(self.config.federation.clients)
            needed, patience = (
                (clients, table.deadline) if self.nodes else (everyone, table.patience)
            )
            self.nodes = meet(grid, self.nodes, needed, patience)
        if self.experiment.recipe.masked_clients:
            self.keys = public_keys(grid, clients, self.nodes, table.deadline)

    def _read(self, message: Message, client: int) -> Reply:
        """Read and check a client's reply. Replies are not trusted.

        Raises:
            InputError: If the reply is for another client or round, or its arrays have wrong shapes
                or are not finite.
        """
        if message.has_error():
            raise InputError(reason(message))
        if message.metadata.src_node_id != self.nodes.get(client):
            raise InputError(
                "the reply came from the wrong node: another node has the partition-id of this "
                "client. Start exactly one SuperNode per client, each with its own partition-id."
            )
        recipe, content = self.experiment.recipe, message.content
        with distrusted():
            sender = record_of(content, "who", ConfigRecord)
            if (sender["round"], sender["partition"]) != (self.state.round, client):
                place = (
                    f"partition {plain(sender['partition'], 20)}, "
                    f"round {plain(sender['round'], 20)}"
                )
                raise InputError(
                    f"the reply belongs to {place}, but partition {client}, round "
                    f"{self.state.round} was requested. {SAME_VERSION}"
                )
            like = returned_like(recipe, self.state.params, self.state.states, client)
            record = record_of(content, "arrays", ArrayRecord)
            params, states = received({name: array.data for name, array in record.items()}, *like)
            tensors = [tensor for tree in (params, *states.values()) for tensor in tree.values()]
            # Clipping replaces values that are not finite by 0. An error would reveal them.
            clipped = recipe.isolates
            if not clipped and not all(map(_finite, tensors)):
                raise InputError(
                    "the reply contains NaN or infinity. The training of this client may have "
                    "diverged. Lower [local] lr, or correct the samples of the client."
                )
            metric = record_of(content, "metrics", MetricRecord)
            loss = torch.tensor(metric["loss"], dtype=torch.float64)
            if loss.shape != (len(tensors[0]),):
                raise InputError(
                    f"the reply contains losses of shape {tuple(loss.shape)}, but one loss for "
                    f"each of the {len(tensors[0])} replicas was expected. {SAME_VERSION}"
                )
            size = self.experiment.shards.size(client)
            steps = self.experiment.plan.steps_of(size)
            metrics = _metrics(content) if self.experiment.measured else {}
            reply = Reply(client, params, states, loss, size, steps, metrics=metrics)
            for stage in recipe.stages:
                stage.check(reply, self.state)
            return reply


def _finite(tensor: Tensor) -> bool:
    """Return whether all entries are finite.

    If the sum is finite, all entries are. This check comes first, because it is faster. The sum of
    large finite entries can overflow, so then each entry is checked.
    """
    return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())


def _metrics(content: RecordDict) -> Mapping[str, float]:
    """Read and check the measurements in a client's reply."""
    if MEASURED not in content.metric_records:
        raise InputError(
            "the reply contains no measurements, but [output] clients = true needs them. "
            f"{SAME_VERSION}"
        )
    metrics = dict(content.metric_records[MEASURED])
    for name, value in metrics.items():
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise InputError(
                f"the reply contains a measurement with the name {plain(name, 60)}, but a name "
                f"must be printable and have at most {LONGEST_NAME} characters. {SAME_VERSION}"
            )
        if not isinstance(value, float):
            raise InputError(
                f"the measurement {plain(name, 60)} in the reply is not a number. {SAME_VERSION}"
            )
    if len(metrics) > MOST_METRICS:
        raise InputError(
            f"the reply contains {len(metrics)} measurements, but at most {MOST_METRICS} are "
            f"accepted. {SAME_VERSION}"
        )
    if missing := {"loss_before", "loss_after", "drift"} - set(metrics):
        raise InputError(
            f"the reply does not contain the measurement {min(missing)}. {SAME_VERSION}"
        )
    return metrics  # type: ignore[return-value]


@dataclass(frozen=True)
class FlowerEngine:
    """An engine that runs rounds on the nodes of a Flower grid."""

    config: Config
    grid: Grid

    def __call__(self, experiment: Experiment, state: ServerState) -> Iterator[Round]:
        """Run and yield the remaining rounds."""
        require_server(experiment.recipe)
        return FedMuonStrategy(self.config, experiment, state).rounds(self.grid)

    def memory(self) -> list[Record]:
        """Return the peak memory of each worker.

        The result is empty if the grid has no workers.
        """
        return self.grid.memory() if isinstance(self.grid, Measured) else []

    def profiles(self) -> list[Record]:
        """Return the profile of each worker. The result is empty if the grid has no workers."""
        return self.grid.profiles() if isinstance(self.grid, Profiled) else []
