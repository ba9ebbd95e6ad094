"""A client's own states between rounds: with the server where it simulates the nodes, else on the
node's disk.

A state is known by the round that the client took part in. The server says of which round the
client's state must be, and which checkpoints it may return to, so a run that is resumed reads what
was there at its checkpoint. A node that does not have that state reports an error, and never starts
again silently.

Each run has an id of its own, so a run never reads the states of another one, even of the same
config. A node that begins another run removes states that were not used for a week.
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Message, RecordDict

from fedmuon.core.errors import InputError
from fedmuon.core.files import digest, mendable
from fedmuon.federated.client_states import ClientStates, flat_states, nested_states
from fedmuon.federated.wire import distrusted
from fedmuon.optim.chain import States

MEMORY = "memory"  # the record of a message
PREFIX = "fedmuon-state-"  # followed by the round: the record of a context
FOLDER = "state-dir"  # a key of a node's config
UNUSED = 7 * 86400.0  # seconds after which the states of another run are removed


def state_record(states: States, round: int) -> RecordDict:
    """The state of a context that holds these states after that round."""
    return RecordDict({f"{PREFIX}{round}": ArrayRecord(flat_states(states))})


def states_of(held: RecordDict, round: int) -> States:
    """The states after that round."""
    record = held.array_records[f"{PREFIX}{round}"]
    return nested_states(dict(record.to_torch_state_dict()))


class Memory:
    """The states that a message asks for, and their place."""

    def __init__(self, message: Message, context: Context, client: int) -> None:
        with distrusted():
            held: dict[str, Any] = dict(message.content.config_records[MEMORY])
            last = int(dict(zip(held["clients"], held["last"], strict=True))[client])
            self._round = int(held["round"])
            self._saved = tuple(int(one) for one in held["saved"])
            self._with_server, self._run = bool(held["with-server"]), str(held["run"])
        self._context, self.client = context, client
        self._last = None if last < 0 else last

    def recall(self, round: int) -> States:
        """The client's states before a round; empty before its first.

        Raises:
            InputError: The node does not have them.
        """
        if self._last is None:
            return {}
        if self._with_server:
            return states_of(self._context.state, self._last)
        try:
            return self._store().read(self.client, round)
        except InputError as error:
            raise InputError(
                f"the node of client {self.client} has lost the client's state of round "
                f"{self._last} ({error}). Start the node with its previous folder, --node-config "
                f"'{FOLDER}=\"PATH\"', or begin the run again."
            ) from None

    def keep(self, own: States) -> None:
        """Keep the client's states after the round that uses its reply, and what the server's
        checkpoints need."""
        if self._with_server:
            self._context.state = state_record(own, self._round)
            return
        store = self._store()
        # The server may ask again from the state before, if it does not get or take this reply.
        store.checkpoints = (*self._saved, 0 if self._last is None else self._last + 1)
        store.write(self.client, self._round, own)
        store.flush()

    def _store(self) -> ClientStates:
        """The node's files of this client in this run, without what the server did not take."""
        given = str(self._context.node_config.get(FOLDER, ""))
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        place = Path(given) if given else Path(home, "fedmuon")
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
    """Remove the client's states of runs that it has not served for long; other runs may go on."""
    for other in place.glob(f"{'[0-9a-f]' * 16}{of_client}"):
        if other.is_dir() and time.time() - other.stat().st_mtime > UNUSED:
            shutil.rmtree(other, ignore_errors=True)
