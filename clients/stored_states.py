"""The states that a client stores between rounds.

In a simulation, the server stores the states of all clients. In a deployment, each node stores the
states of its client on its disk.

A state is identified by the last round in which the client took part. The server sends the round of
the required state, and the rounds of its checkpoints. A resumed run therefore reads the states of
its checkpoint. If a node does not have the required state, the node reports an error and never
starts from a new state.

Each run has a unique id, so a run never reads the states of another run, even with the same config.
When a node starts another run, the node removes states that were not used for a week.
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict

from fedmuon.clients.messages import array_record
from fedmuon.core.errors import InputError
from fedmuon.core.files import digest, mendable
from fedmuon.federated.client_states import ClientStates, flat_states, nested_states
from fedmuon.federated.wire import distrusted
from fedmuon.optim.chain import States

MEMORY = "memory"  # name of the record in a message
PREFIX = "fedmuon-state-"  # beginning of the name of the record in a context; the round follows
FOLDER = "state-dir"  # key of a node's config
UNUSED = 7 * 86400.0  # seconds after which the states of another run are removed


def state_record(states: States, round: int) -> RecordDict:
    """Convert a client's states after a round to a state of Flower's context."""
    return RecordDict({f"{PREFIX}{round}": array_record(flat_states(states))})


def states_of(held: RecordDict, round: int) -> States:
    """Convert a state of Flower's context back to a client's states after a round."""
    record = held.array_records[f"{PREFIX}{round}"]
    return nested_states(dict(record.to_torch_state_dict()))


class Memory:
    """Access to the stored states of one client, for one message of the server."""

    def __init__(self, message: Message, context: Context, client: int) -> None:
        with distrusted():
            record: dict[str, Any] = dict(message.content.config_records[MEMORY])
            last = int(dict(zip(record["clients"], record["last"], strict=True))[client])
            self._round = int(record["round"])
            self._saved = tuple(int(number) for number in record["saved"])
            self._with_server, self._run = bool(record["with-server"]), str(record["run"])
        self._context, self.client = context, client
        self._last = None if last < 0 else last

    def recall(self, round: int) -> States:
        """Return the states that the client stored before a round.

        The result is empty before the client's first round.

        Raises:
            InputError: If the node does not have the required states.
        """
        if self._last is None:
            return {}
        if self._with_server:
            return states_of(self._context.state, self._last)
        try:
            return self._store().read(self.client, round)
        except InputError as error:
            raise InputError(
                f"the node of client {self.client} has lost the state of the client after round "
                f"{self._last} ({error}). Start the node with its previous folder, --node-config "
                f"'{FOLDER}=\"PATH\"', or start a new run."
            ) from None

    def keep(self, own: States) -> None:
        """Store the client's states of this round.

        The states that the server's checkpoints need also stay stored.
        """
        if self._with_server:
            self._context.state = state_record(own, self._round)
            return
        store = self._store()
        # If the reply is lost or rejected, the server may repeat the request from the old state.
        store.checkpoints = (*self._saved, 0 if self._last is None else self._last + 1)
        store.write(self.client, self._round, own)
        store.flush()

    def _store(self) -> ClientStates:
        """Open the folder with the states of this client in this run.

        States of replies that the server did not use are removed.
        """
        configured = str(self._context.node_config.get(FOLDER, ""))
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        place = Path(configured) if configured else Path(home, "fedmuon")
        of_client = f"-client-{self.client}"
        folder = place / f"{digest(self._run.encode())[:16]}{of_client}"
        with mendable(folder, "create"):
            if not folder.exists():
                _forget_unused(place, of_client)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        store = ClientStates(folder, self._run)
        if self._last is None:
            store.restore(0, {})
        else:
            store.restore(self._last + 1, {self.client: self._last})
        return store


def _forget_unused(place: Path, of_client: str) -> None:
    """Remove the client's states of other runs that were not active for a week."""
    for other in place.glob(f"{'[0-9a-f]' * 16}{of_client}"):
        if other.is_dir() and time.time() - other.stat().st_mtime > UNUSED:
            shutil.rmtree(other, ignore_errors=True)
