"""How far the nodes of a graph are from their mean model, and how fast the graph mixes."""

from collections.abc import Mapping

from fedmuon.core.files import Record
from fedmuon.federated.experiment import Round
from fedmuon.federated.gossip import consensus_error
from fedmuon.optim.gossip import MODEL_OF_NODE, Gossip
from fedmuon.optim.graphs import contraction
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import NO_FILES
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import Run


class Consensus(Observer):
    """Records the consensus error of each round, and the spectral gap of its graph."""

    def __init__(self, run: Run, gossip: Gossip) -> None:
        self.run, self.graph = run, gossip.graph

    def after(self, finished: Round, record: Record) -> Record:
        """Return both measurements. The losses of the record are those of the mean model."""
        sigma = contraction(self.graph.weights(finished.state.round - 1))
        gap = max(0.0, 1 - sigma)  # rounding can raise sigma above 1
        return {"consensus_error": self._error(finished.state), "spectral_gap": gap}

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the consensus error of the last round for the summary."""
        return {"consensus_error": self._error(state)}, NO_FILES

    def _error(self, state: ServerState) -> float:
        memory = self.run.experiment.client_states
        states = (memory.read(node, state.round) for node in range(self.graph.nodes))
        return consensus_error([stored.get(MODEL_OF_NODE, state.params) for stored in states])
