"""The clients' replies in each round: their loss, failures, missing replies, and traffic."""

import dataclasses

import numpy as np

from fedmuon.core.files import Record
from fedmuon.federated.clock import Timetable
from fedmuon.federated.experiment import Round
from fedmuon.runs.observers.observer import Observer


class Replies(Observer):
    """Records the clients' loss, the failed attempts, the missing replies, and the bytes sent."""

    def __init__(self, clock: Timetable | None) -> None:
        self.clock = clock

    def after(self, finished: Round, record: Record) -> Record:
        """Return the fields about the replies. A private client reports no loss."""
        fields: Record = {}
        if np.isfinite(finished.loss[0]):
            fields["client_loss"] = float(finished.loss[0])
        if finished.faults:
            fields["faults"] = [dataclasses.asdict(fault) for fault in finished.faults]
        if self.clock is not None and self.clock.discarded:
            fields["discarded"] = self.clock.discarded[finished.state.round - 1]
        if dropped := sorted(set(record["participants"]) - set(finished.answered.tolist())):
            fields["dropped"] = dropped
        return fields | sent_bytes(self.clock, finished)


def sent_bytes(clock: Timetable | None, finished: Round) -> Record:
    """Return `bytes_down` and `bytes_up` of a round.

    Clients that were lost also received the model. Replies that came too late were sent, too.
    """
    each = finished.bytes_down // max(1, len(finished.participants))
    each_up = finished.bytes_up // max(1, len(finished.answered))
    receivers, number = len(finished.participants), finished.state.round - 1
    too_late = 0
    if clock is not None:
        receivers = len(clock.selected[number]) + (clock.lost[number] if clock.lost else 0)
        too_late = clock.discarded[number] if clock.discarded else 0
    return {
        "bytes_down": each * receivers,
        "bytes_up": finished.bytes_up + each_up * too_late,
    }
