"""The bytes that a run records, against those of Flower's messages of the same round."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small
from flwr.app import ArrayRecord, Message
from test_messages import CLIENT, answer, request, strategy

from fedmuon.core.errors import InputError
from fedmuon.experiments.inspect.listing import comparison
from fedmuon.experiments.inspect.status import RunStatus
from fedmuon.experiments.run import execute
from fedmuon.federated.wire import pack
from fedmuon.runs.directory import traffic_of
from fedmuon.server.ray.flower_internals import identify
from fedmuon.server.strategy import FedMuonStrategy

HEADER = 128  # bytes of an .npy file before the numbers
CASES: list[dict[str, Any]] = [
    {"local": {"recipe": "fedavg"}},
    {"local": {"recipe": "fedmuon"}},
    {"local": {"recipe": "fedmuon-svd", "rank": 1}, "data": {"classes": 4}},
    {"local": {"recipe": "scaffold"}, "engine": {"dtype": "float32"}},
    {"compression": {"uplink": "top-k", "share": 0.2, "feedback": "ef21"}},
    {"compression": {"uplink": "random-k", "downlink": "sign"}, "local": {"recipe": "scaffold"}},
    {"compression": {"uplink": "qsgd", "downlink": "low-rank", "rank": 1}},
    {"compression": {"uplink": "power", "rank": 1, "feedback": "error"}, "data": {"classes": 4}},
    {"compression": {"uplink": "rows", "feedback": "error"}, "local": {"recipe": "fedavg"}},
]


def carried(message: Message) -> tuple[int, int]:
    """Bytes of the arrays in a message, as Flower serializes them, and how many there are."""
    arrays = message.content.array_records["arrays"]
    return sum(len(array.data) for array in arrays.values()), len(arrays)


def served(case: dict[str, Any]) -> tuple[FedMuonStrategy, Message, Message]:
    """A strategy, a message of its first round, and a client's reply."""
    identify()
    server = strategy(**case)
    server.keeps_states = True
    message = request(server)
    return server, message, answer(message)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_records_have_the_bytes_of_flowers_messages(case: dict[str, Any], tmp_path: Path) -> None:
    execute(small(**case), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    server, message, reply = served(case)
    for name, one in (("bytes_down", message), ("bytes_up", reply)):
        size, arrays = carried(one)
        for line in lines:
            each = line[name] / len(line["participants"])
            assert each == size - HEADER * arrays, name
        assert size > HEADER * arrays
    assert server._read(reply, CLIENT).client == CLIENT


def test_show_and_compare_tell_the_bytes(tmp_path: Path) -> None:
    """Runs with different bytes have columns of them; others have none."""
    for recipe in ("fedavg", "fedmuon"):
        execute(small(local={"recipe": recipe}), tmp_path / recipe)
    rounds = RunStatus(tmp_path / "fedmuon").rounds
    down, up = traffic_of(rounds) or (0, 0)
    assert down == up == 2 * sum(one["bytes_up"] for one in RunStatus(tmp_path / "fedavg").rounds)
    assert dict(RunStatus(tmp_path / "fedmuon").card())["traffic"].endswith("kB to the server")
    rows = comparison({"": [tmp_path / "fedavg", tmp_path / "fedmuon"]}).rows
    assert [row["MB up"] for row in rows] == [up / 2e6, up / 1e6]
    assert "MB up" not in comparison({"": [tmp_path / "fedavg"]}).rows[0]
    assert traffic_of([{"round": 1}, *rounds[1:]]) is None  # an earlier version began it


def test_a_reply_with_wrong_positions_is_a_fault_of_its_client() -> None:
    server, _, reply = served(CASES[4])
    sound = server._read(reply, CLIENT)
    indices = sound.params["weight:indices"]
    assert indices.dtype == torch.int16 and indices.numel() == 4
    odd = {**sound.params, "weight:indices": torch.full_like(indices, 21)}
    reply.content["arrays"] = ArrayRecord(pack(odd, sound.states))
    with pytest.raises(InputError, match="outside the range 0 to 20"):
        server._read(reply, CLIENT)
