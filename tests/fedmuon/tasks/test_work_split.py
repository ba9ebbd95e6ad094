"""Pieces of work cover each sample once, and let two threads end together."""

import pytest
import torch

from fedmuon.tasks.base import Params
from fedmuon.tasks.work_split import FEW, WORK, Samples, split_samples


def numbered(replicas: int, rows: int, shared: bool = False) -> tuple[Params, Samples]:
    """Return replicas and samples whose values are their numbers."""
    place = torch.arange(replicas * rows).view(replicas, rows)
    place = place[:1] if shared else place
    params = {"w": torch.arange(replicas)[:, None]}
    return params, Samples(place[..., None], place, place, place[:1])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [1, FEW - 1, FEW, 50, 2 * FEW, 200])
@pytest.mark.parametrize("replicas", range(1, 9))
@pytest.mark.parametrize("pieces_per_replica", [0.01, 0.5, 1, 4])
def test_each_sample_of_each_replica_is_in_one_piece(
    replicas: int, rows: int, pieces_per_replica: float, shared: bool
) -> None:
    params, samples = numbered(replicas, rows, shared)
    pieces = split_samples(params, samples, max(1, int(pieces_per_replica * WORK / rows)))
    seen = []
    for of_stack in pieces:
        together = torch.cat([part.labels for _, part in of_stack], 1)
        assert all(torch.equal(part.inputs[..., 0], part.labels) for _, part in of_stack)
        stack = of_stack[0][0]["w"][:, 0]
        assert all(torch.equal(given["w"][:, 0], stack) for given, _ in of_stack)
        seen.append((stack, together.expand(len(stack), -1)))
    assert torch.equal(torch.cat([stack for stack, _ in seen]), params["w"][:, 0])
    assert torch.equal(torch.cat([part for _, part in seen]), samples.labels.expand(replicas, -1))


@pytest.mark.parametrize("replicas", range(1, 9))
def test_the_last_of_few_uneven_pieces_is_halved(replicas: int) -> None:
    params, samples = numbered(replicas, 50)
    counts = [len(of_stack) for of_stack in split_samples(params, samples, WORK // 25)]
    halved = replicas in (3, 5, 7)
    assert counts == [1] * (replicas - 1) + [2 if halved else 1]
    # Two threads that take pieces in turn now differ by half a piece at most.
    finish = [0.0, 0.0]
    for count in counts:
        for _ in range(count):
            finish[finish.index(min(finish))] += 1 / count
    assert max(finish) - min(finish) <= (0.5 if halved else replicas % 2)
    # A batch that is too small for good products remains whole.
    few = numbered(replicas, FEW - 1)
    assert [len(of_stack) for of_stack in split_samples(*few, WORK)] == [1] * replicas
