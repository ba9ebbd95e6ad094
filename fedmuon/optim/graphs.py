"""Graphs of nodes that average with their neighbours, as doubly stochastic matrices W.

Node i replaces its tensors by sum_j w_ij T_j. W has no negative entry, and the sum of each row and
of each column is 1, so averaging keeps the mean of all nodes. Each round multiplies the distance to
the mean by at most sigma, the largest singular value of W - 1 1^T / N. For a symmetric matrix, this
is the absolute value of the second eigenvalue. 1 - sigma is the spectral gap.

Ring, torus and random graphs have Metropolis weights, w_ij = 1 / (1 + max(d_i, d_j)) for neighbours
with degrees d_i and d_j (Xiao and Boyd 2004). In the exponential graph, node i hears the nodes i, i
+ 1, i + 2, i + 4, ... with equal weights (Ying et al. 2021).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedmuon.core.errors import InputError, shown
from fedmuon.core.files import read_text
from fedmuon.core.rng import Draw, generator

TOLERANCE = 1e-9  # of the sums of rows and columns
LARGEST = 5000  # nodes: a matrix of weights then needs 200 MB
PERIOD = 1000  # rounds in which a graph that is drawn anew must connect all nodes
Matrices = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Graph:
    """The weights W of each round.

    Attributes:
        name: "ring", "torus", "exponential", "complete", "random" or "file".
        nodes: The number N of nodes.
        edges: For "random", the probability of each edge.
        file: For "file", the path of a CSV file with one or several N x N matrices.
        varying: Whether the graph changes from round to round. The exponential graph then has one
            neighbour per round, and a random graph is drawn anew. The matrices of a file take
            turns.
        seed: The seed of random graphs.

    Raises:
        InputError: If a matrix is not doubly stochastic, or the graph is not connected.
    """

    name: str
    nodes: int
    edges: float = 0.5
    file: str = ""
    varying: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.nodes > LARGEST:
            raise InputError(
                f"[federation] clients = {self.nodes} is too large for a graph, because its "
                f"weights are a table of all pairs of nodes. Use at most {LARGEST} clients."
            )
        drawn = self.name == "random" and self.varying
        redrawn = (self.weights(round) for round in range(PERIOD))
        require_connected(redrawn if drawn else self.period, self.name)
        if self.name == "file":  # all other graphs keep a part of each node's own tensors
            require_agreement(self.period)

    def weights(self, round: int) -> np.ndarray:
        """Return W [N, N] of a round. Do not change it."""
        if self.name == "random" and self.varying:
            return _random(self.nodes, self.edges, self.seed, round)
        return self.period[round % len(self.period)]

    @property
    def period(self) -> Matrices:
        """The matrices that take turns. A random graph that varies has only its first one."""
        return _period(self.name, self.nodes, self.edges, self.file, self.varying, self.seed)


@lru_cache(maxsize=8)
def _period(name: str, nodes: int, edges: float, file: str, varying: bool, seed: int) -> Matrices:
    """Return the matrices that take turns, of which an unchanging graph has one."""
    if name == "complete":
        return (np.full((nodes, nodes), 1 / nodes),)
    if name == "ring":
        return (metropolis(_circle(nodes)),)
    if name == "torus":
        return (metropolis(_torus(nodes)),)
    if name == "exponential":
        return _exponential(nodes, varying)
    if name == "random":
        return (_random(nodes, edges, seed, 0),)
    matrices = read_matrices(Path(file), nodes)
    if varying != (len(matrices) > 1):
        fix = "Set varying-graph = false" if varying else "Set varying-graph = true"
        raise InputError(
            f"[federation] graph-file = '{file}' has {len(matrices)} "
            f"{'matrix' if varying else 'matrices'}, but varying-graph = {str(varying).lower()}. "
            f"{fix}, or change the file."
        )
    return matrices


def _circle(nodes: int) -> np.ndarray:
    after = np.roll(np.eye(nodes, dtype=bool), 1, axis=1)
    return (after | after.T) & ~np.eye(nodes, dtype=bool)


def _torus(nodes: int) -> np.ndarray:
    """Return the neighbours in a grid whose opposite sides are connected, as square as possible."""
    rows = next(rows for rows in range(math.isqrt(nodes), 0, -1) if nodes % rows == 0)
    if rows == 1:
        raise InputError(
            f"[federation] graph = 'torus' needs a grid with at least 2 rows and 2 columns, but "
            f"clients = {nodes} is no product of two such numbers. Choose another number of "
            "clients, such as 16, or graph = 'ring'."
        )
    circles = _circle(rows), _circle(nodes // rows)
    here = (np.eye(len(circle), dtype=bool) for circle in circles)
    own_row, own_column = here
    return np.kron(circles[0], own_column) | np.kron(own_row, circles[1])


def _exponential(nodes: int, varying: bool) -> Matrices:
    jumps = [1 << power for power in range(max(1, (nodes - 1).bit_length()))]
    shifts = [np.roll(np.eye(nodes), jump % nodes, axis=1) for jump in jumps]
    if varying:  # one neighbour per round
        return tuple((np.eye(nodes) + shift) / 2 for shift in shifts)
    return ((np.eye(nodes) + sum(shifts)) / (1 + len(shifts)),)


@lru_cache(maxsize=64)
def _random(nodes: int, edges: float, seed: int, round: int) -> np.ndarray:
    rng = generator(seed, Draw.GRAPH, round=round)
    upper = np.triu(rng.random((nodes, nodes)) < edges, 1)
    return metropolis(upper | upper.T)


def metropolis(neighbours: np.ndarray) -> np.ndarray:
    """Return symmetric weights for a symmetric table [N, N] of neighbours."""
    degrees = neighbours.sum(1)
    weights = neighbours / (1.0 + np.maximum.outer(degrees, degrees))
    return weights + np.diag(1 - weights.sum(1))


# Matrices of a file


def read_matrices(file: Path, nodes: int) -> Matrices:
    """Read one or several N x N matrices, one below the other, from a CSV file.

    An entry is a number such as 0.25, or a fraction such as 1/3.
    """
    if file == Path():
        raise InputError(
            "[federation] graph = 'file' needs a file. Set graph-file to the path of a CSV file "
            "with the weights, or choose another graph, such as 'ring'."
        )
    try:
        lines = read_text(file, "utf-8-sig").splitlines()  # Excel writes a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InputError(
            f"[federation] graph-file = '{file}' cannot be read ({reason}). Write the path of a "
            "CSV file with a matrix of weights."
        ) from None
    rows = [[_number(cell, file) for cell in line.split(",")] for line in lines if line.strip()]
    widths = {len(row) for row in rows}
    if widths != {nodes} or len(rows) % nodes:
        found = f"{len(rows)} rows of {' or '.join(map(str, sorted(widths)))} numbers"
        raise InputError(
            f"[federation] graph-file = '{file}' has {found if rows else 'no numbers'}, but "
            f"clients = {nodes} needs {nodes} rows of {nodes} numbers, or a multiple of {nodes} "
            "rows for several matrices that take turns."
        )
    stacked = np.array(rows).reshape(-1, nodes, nodes)
    for number, matrix in enumerate(stacked):
        require_doubly_stochastic(matrix, f"matrix {number + 1} of {file}")
    return tuple(stacked)


def _number(cell: str, file: Path) -> float:
    try:
        return float(Fraction(cell.strip()))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise InputError(
            f"{file} contains {shown(cell.strip())}, which is no number. Write numbers such as "
            "0.25, or fractions such as 1/3, separated by commas."
        ) from None


def require_doubly_stochastic(matrix: np.ndarray, named: str) -> None:
    """Raise an error if an entry is negative, or a row or a column does not sum to 1."""
    fix = "Use weights of 0 or more, of which each row and each column sums to 1."
    if (matrix < 0).any():
        row, column = np.argwhere(matrix < 0)[0]
        raise InputError(
            f"{named} has the negative weight {matrix[row, column]:g} in row {row + 1}, column "
            f"{column + 1}, so it is not doubly stochastic. {fix}"
        )
    for axis, line in ((1, "row"), (0, "column")):
        sums = matrix.sum(axis)
        if (wrong := np.flatnonzero(abs(sums - 1) > TOLERANCE)).size:
            raise InputError(
                f"{line} {wrong[0] + 1} of {named} sums to {sums[wrong[0]]:.12g}, so the matrix "
                f"is not doubly stochastic. {fix} Write 1/3 for a number with many digits."
            )


# Properties


def require_connected(matrices: Iterable[np.ndarray], name: str) -> None:
    """Raise an error if some node never hears of another node, in the rounds of all matrices."""
    heard, reached = np.zeros((1, 1), dtype=bool), np.zeros(1, dtype=bool)
    for matrix in matrices:
        heard = heard | (matrix > 0)
        reached = _reached(heard)
        if reached.all():  # a doubly stochastic W has paths in both directions, or in none
            return
    lost = int(np.flatnonzero(~reached)[0])
    fixes = {
        "random": "Raise [federation] edge-share, or choose another seed.",
        "file": "Add weights between the parts of the graph to the file.",
    }
    raise InputError(
        f"the graph '{name}' is not connected: no path leads from node 0 to node {lost}, so the "
        f"nodes cannot agree. {fixes.get(name, 'Choose another graph.')}"
    )


def require_agreement(matrices: Matrices) -> None:
    """Raise an error if the nodes never agree, although the graph is connected.

    An example is a permutation: nodes exchange their tensors and never average them. Averaging in
    turns ends in the mean if a power of the product of all matrices has only positive entries. The
    product then has a path between any two nodes, and the greatest common divisor of the lengths of
    its cycles is 1.
    """
    product = matrices[0] > 0
    for matrix in matrices[1:]:
        product = (matrix > 0).astype(np.float32) @ product.astype(np.float32) > 0
    steps = np.full(len(product), -1)  # from node 0
    steps[0], last = 0, np.eye(len(product), dtype=bool)[0]
    while (last := product[last].any(0) & (steps < 0)).any():
        steps[last] = steps.max() + 1
    rows, columns = np.nonzero(product)
    cycles = np.gcd.reduce(abs(steps[rows] + 1 - steps[columns]))
    if (steps < 0).any() or cycles != 1:
        raise InputError(
            "the weights of the graph 'file' exchange the tensors of nodes without averaging them, "
            "so the nodes never agree. Give each node a weight above 0 for itself, such as 1/2."
        )


def _reached(heard: np.ndarray) -> np.ndarray:
    """Return the nodes [N] to which a path from node 0 leads."""
    reached = np.eye(len(heard), dtype=bool)[0]
    while (further := reached | heard[reached].any(0)).sum() > reached.sum():
        reached = further
    return reached


def contraction(weights: np.ndarray) -> float:
    """Return sigma, the largest singular value of W - 1 1^T / N."""
    return float(np.linalg.norm(weights - 1 / len(weights), 2))
