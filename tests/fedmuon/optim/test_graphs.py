"""Graphs of gossip: their weights, their spectral gaps, and the graphs that are rejected."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from sentences import one_sentence

from fedmuon.core.errors import InputError
from fedmuon.optim.graphs import Graph, contraction, metropolis

NAMES = ("ring", "torus", "exponential", "complete", "random")


@pytest.mark.parametrize("nodes", [4, 6, 12, 16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("varying", [False, True])
def test_weights_are_doubly_stochastic(name: str, nodes: int, varying: bool) -> None:
    graph = Graph(name, nodes, edges=0.8, varying=varying, seed=3)
    for round in range(5):
        weights = graph.weights(round)
        assert (weights >= 0).all()
        np.testing.assert_allclose(weights.sum(0), 1, rtol=0, atol=1e-12)
        np.testing.assert_allclose(weights.sum(1), 1, rtol=0, atol=1e-12)
        assert np.array_equal(weights, Graph(name, nodes, 0.8, "", varying, 3).weights(round))


def test_neighbours_are_those_of_the_names() -> None:
    def neighbours(name: str, nodes: int, node: int) -> list[int]:
        row = Graph(name, nodes).weights(0)[node]
        return [other for other in np.flatnonzero(row).tolist() if other != node]

    assert neighbours("ring", 6, 0) == [1, 5]
    assert neighbours("ring", 2, 0) == [1]
    assert neighbours("torus", 12, 0) == [1, 3, 4, 8]  # three rows and four columns
    assert neighbours("torus", 4, 0) == [1, 2]
    assert neighbours("exponential", 8, 1) == [2, 3, 5]
    assert neighbours("complete", 5, 2) == [0, 1, 3, 4]


def test_metropolis_weights_equal_a_loop() -> None:
    rng = np.random.default_rng(0)
    table = np.triu(rng.random((7, 7)) < 0.5, 1)
    table = table | table.T
    expected = np.zeros((7, 7))
    for i in range(7):
        for j in range(7):
            if table[i, j]:
                expected[i, j] = 1 / (1 + max(table[i].sum(), table[j].sum()))
        expected[i, i] = 1 - expected[i].sum()
    np.testing.assert_allclose(metropolis(table), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("nodes", [5, 8, 13])
def test_contraction_of_a_ring_is_the_second_eigenvalue(nodes: int) -> None:
    """The eigenvalues of the ring are (1 + 2 cos(2 pi k / N)) / 3."""
    others = [abs(1 + 2 * math.cos(2 * math.pi * k / nodes)) / 3 for k in range(1, nodes)]
    sigma = contraction(Graph("ring", nodes).weights(0))
    assert sigma == pytest.approx(max(others), abs=1e-12)
    assert abs(sigma - sorted(others)[0]) > 0.1  # the negative control
    assert contraction(Graph("complete", nodes).weights(0)) < 1e-12


def test_varying_exponential_graph_agrees_after_one_period() -> None:
    """With N = 2^k nodes, one neighbour per round gives the exact mean after k rounds."""
    graph, product = Graph("exponential", 8, varying=True), np.eye(8)
    for round in range(3):
        assert ((graph.weights(round) > 0).sum(1) == 2).all()
        assert contraction(product) > 0.1
        product = graph.weights(round) @ product
    assert contraction(product) < 1e-12


def test_random_graphs_are_keyed() -> None:
    def first(seed: int, round: int = 0) -> np.ndarray:
        return Graph("random", 10, 0.6, varying=True, seed=seed).weights(round)

    assert np.array_equal(first(1), first(1)) and not np.array_equal(first(1), first(2))
    assert not np.array_equal(first(1), first(1, 1))
    still = Graph("random", 10, 0.6, seed=1)
    assert np.array_equal(still.weights(0), still.weights(5))


def test_a_file_can_have_fractions_and_several_matrices(tmp_path: Path) -> None:
    file = tmp_path / "graph.csv"
    file.write_text("1/3, 2/3, 0\n2/3, 1/3, 0\n0, 0, 1\n\n1,0,0\n0,0.5,0.5\n0,0.5,0.5\n")
    graph = Graph("file", 3, file=str(file), varying=True)
    assert graph.weights(0)[0].tolist() == [1 / 3, 2 / 3, 0] and graph.weights(3)[1, 2] == 0.5


def test_several_matrices_need_a_graph_that_varies(tmp_path: Path) -> None:
    file = tmp_path / "graph.csv"
    file.write_text("0.5,0.5\n0.5,0.5\n" * 2)
    with pytest.raises(InputError, match=r"has 2 matrices, but .* Set varying-graph = true"):
        Graph("file", 2, file=str(file))
    file.write_text("0.5,0.5\n0.5,0.5\n")
    with pytest.raises(InputError, match=r"has 1 matrix, but .* Set varying-graph = false"):
        Graph("file", 2, file=str(file), varying=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,0\n0,1\n", "not connected: no path leads from node 0 to node 1"),
        ("0.5,0.5\n0.5,0.4\n", r"row 2 of matrix 1 of .* sums to 0\.9, so .* doubly stochastic"),
        ("1,0\n1,0\n", r"column 1 of matrix 1 of .* sums to 2"),
        ("0.333,0.667\n0.667,0.3330001\n", r"row 2 of .* sums to 1\.0000001"),
        ("1.5,-0.5\n-0.5,1.5\n", r"negative weight -0\.5 in row 1, column 2"),
        ("0.5,x\n0.5,0.5\n", r"contains 'x', which is no number\. Write numbers"),
        ("nan,1\n1,0\n", "contains 'nan', which is no number"),
        ("1/0,1\n1,0\n", "contains '1/0', which is no number"),
        ("1\n", r"has 1 rows of 1 numbers, but clients = 2 needs 2 rows"),
        ("0.5,0.5\n", "has 1 rows of 2 numbers"),
        ("", "has no numbers"),
    ],
)
def test_wrong_files_are_rejected(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "graph.csv"
    file.write_text(text)
    with one_sentence(words):
        Graph("file", 2, file=str(file))


@pytest.mark.parametrize(
    ("text", "nodes", "agree"),
    [
        ("0,1\n1,0\n", 2, False),
        ("0,1,0\n0,0,1\n1,0,0\n", 3, False),
        ("0,1,0\n1,0,0\n0,0,1\n1,0,0\n0,0,1\n0,1,0\n", 3, False),  # two permutations in turn
        ("0,1/2,1/2\n1/2,0,1/2\n1/2,1/2,0\n", 3, True),  # cycles of two and of three nodes
        ("0,1\n1,0\n1/2,1/2\n1/2,1/2\n", 2, True),
    ],
)
def test_nodes_of_a_file_must_agree_in_the_end(
    text: str, nodes: int, agree: bool, tmp_path: Path
) -> None:
    file = tmp_path / "graph.csv"
    file.write_text(text)
    matrices = np.array(
        [[float(Fraction(cell)) for cell in line.split(",")] for line in text.split()]
    )
    product = np.eye(nodes)
    for matrix in matrices.reshape(-1, nodes, nodes):
        product = matrix @ product
    assert np.allclose(np.linalg.matrix_power(product, 200), 1 / nodes) == agree
    if agree:
        Graph("file", nodes, file=str(file), varying=len(matrices) > nodes)
    else:
        with one_sentence("without averaging them, so the nodes never agree"):
            Graph("file", nodes, file=str(file), varying=len(matrices) > nodes)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "graph.csv"
    file.write_text("1/2,1/2\n1/2,1/2\n", encoding="utf-8-sig")
    assert (Graph("file", 2, file=str(file)).weights(0) == 0.5).all()


def test_only_regular_files_are_read() -> None:
    with pytest.raises(InputError, match="not a regular file"):
        Graph("file", 2, file="/dev/zero")


def test_graphs_without_a_path_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'random' is not connected.* Raise .* edge-share"):
        Graph("random", 20, 0.01)
    with pytest.raises(InputError, match=r"'torus' needs a grid .* clients = 7 is no product"):
        Graph("torus", 7)
    with pytest.raises(InputError, match=r"graph = 'file' needs a file\. Set graph-file"):
        Graph("file", 3)
    with pytest.raises(InputError, match=r"cannot be read \(No such file"):
        Graph("file", 3, file=str(tmp_path / "none.csv"))
    with pytest.raises(InputError, match=r"clients = 5001 is too large for a graph"):
        Graph("complete", 5001)
