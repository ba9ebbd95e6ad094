"""The records of each client in each round, in clients.jsonl."""

from collections import Counter
from collections.abc import Sequence

from fedmuon.core.files import Record
from fedmuon.federated.experiment import Round
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import answered
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import Run


class ClientRecords(Observer):
    """Appends a record of each client that answered to clients.jsonl."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rounds: Counter[int] = Counter()  # client -> number of rounds so far

    def begin(self, state: ServerState, earlier: Sequence[Record]) -> None:
        """Count the clients' earlier rounds, and remove the records of later rounds."""
        self.run.directory.cut_back_clients(earlier)
        self.rounds.update(client for record in earlier for client in answered(record))

    def after(self, finished: Round, record: Record) -> Record:
        """Append the records of the round's clients. The record of the round has no more fields."""
        records: list[Record] = []
        for measures in finished.clients:
            client = measures["client"]
            self.rounds[client] += 1
            about = {"round": finished.state.round, "client": client}
            about |= {**self.run.data.named(client), "samples": measures["samples"]}
            records.append({**about, "participations": self.rounds[client], **measures})
        self.run.directory.append_clients(records)
        return {}
