"""The interface between the loop of a run and the parts that measure, record or report."""

from collections.abc import Mapping, Sequence

from fedmuon.core.files import Record
from fedmuon.federated.experiment import Round
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import NO_FILES
from fedmuon.tasks.base import Params


class Observer:
    """A part of a run that measures, records or reports one thing. The base class does nothing.

    `train` calls each method for all observers, in the order of `observers_of`.
    """

    def begin(self, state: ServerState, earlier: Sequence[Record]) -> None:
        """Prepare for the rounds after `state`, before later rounds are removed from rounds.jsonl.

        Args:
            state: The server's state from which the run continues.
            earlier: The records of the rounds before.
        """

    def after(self, finished: Round, record: Record) -> Record:
        """Return fields for the record of a finished round.

        Files that this method appends to are written before the record in rounds.jsonl.

        Args:
            finished: The round.
            record: The fields so far. A returned field replaces a field with the same name.
        """
        return {}

    def tensors(self, state: ServerState) -> Params:
        """Return tensors that a checkpoint of this state contains, by names with a unique prefix.

        The state is that of the last finished round, or of the round before if the run was
        interrupted between `after` and the end of the round.
        """
        return {}

    def react(self, record: Record, state: ServerState) -> str:
        """React to a record that was written, and return a reason to end the run, or no text.

        After the first reason, no further observer is called for this round.
        """
        return ""

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return fields for the summary, and files for the run folder, of a run that has ended."""
        return {}, NO_FILES

    def close(self, summary: Record) -> None:
        """React to the written summary."""
