"""Simulated devices against an oracle with a heap of events, a schedule by hand, and runs."""

import heapq
import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.nursery import Nursery
from conftest import small
from cut_off import killed, same_runs

from fedmuon.config.load import Config, dump, parse
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.cli import main
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import certificates, finished_run, neighbours
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.clock import (
    Devices,
    Timetable,
    devices_of,
    hardware,
    round_of,
)
from fedmuon.federated.late_replies import LateRule, updates
from fedmuon.federated.rounds import run_rounds
from fedmuon.federated.timetables import timetable
from fedmuon.optim import links
from fedmuon.optim.chain import Chain
from fedmuon.optim.recipe import Recipe
from fedmuon.runs.directory import Record
from fedmuon.runs.loop import train
from fedmuon.runs.prepare import prepare

FLEET: dict[str, Any] = {
    "mode": "deadline", "select": 5, "speeds": "log-normal", "speed-spread": 1.0,
    "bandwidths": "pareto", "bandwidth-down": 3000.0, "bandwidth-up": 800.0, "latency": 0.05,
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"mode": "synchronous"},
    "first": {},
    "deadline": {"select": 0, "deadline": 2.0},
    "both": {"deadline": 1.8, "dropout": 0.3},
    "chance": {"availability": "bernoulli", "available": 0.6, "dropout": 0.2},
    "days": {"availability": "day-night", "available": 0.4, "day": 7.0, "deadline": 2.5},
}


def records(run: Path) -> list[Record]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


def fleet(**changes: Any) -> Config:
    table = {key: value for key, value in ({**FLEET, **changes}).items() if value is not None}
    if table["mode"] != "deadline":
        table.pop("select")
    return small(federation={"rounds": 30}, local={"steps": 2}, devices=table)


BUFFER_OF_1 = LateRule("fedbuff", 1, lambda late: (1 + late) ** -0.5)
STEPS, SAMPLES, SIZES = np.full(6, 2), np.array([5, 9, 14, 20, 30, 12]), (168, 336)


def by_heap(config: Config, latency: float) -> tuple[list[list[int]], list[float]]:
    """Whose replies count, and when each round ends: one event after the other."""
    table, seed, clients = config.devices, config.federation.seed, 6
    normal = generator(seed, Draw.DEVICE, block=0).standard_normal(clients)
    down, up = (1 - generator(seed, Draw.DEVICE, block=b).random(clients) for b in (1, 2))
    zones = generator(seed, Draw.DEVICE, block=3).random(clients)
    needed = []
    for i in range(clients):
        compute = 2 * SAMPLES[i] * 1.0 / (100.0 * math.exp(1.0 * normal[i]))
        moved = 168 / (3000.0 * down[i] ** 0.5) + 336 / (800.0 * up[i] ** 0.5)
        needed.append(latency + compute + moved)
    wanted = config.federation.per_round
    asked = table.select or wanted if table.mode == "deadline" else wanted
    limit = table.deadline or math.inf if table.mode == "deadline" else math.inf
    now, found, ends = 0.0, [], []
    attempts = ((r, a) for r in range(config.federation.rounds) for a in range(100))
    for r, attempt in attempts:
        if len(found) > r:
            continue
        there = list(range(clients))
        if table.availability == "bernoulli":
            chance = generator(seed, Draw.DEVICE, round=r, step=attempt, block=4).random(clients)
            there = [i for i in there if chance[i] < table.available]
        elif table.availability == "day-night":
            local = [(now / table.day + zone) % 1 for zone in zones]
            there = [i for i in there if local[i] < table.available]
            assert there  # six zones of 0.4 of a day: somebody is always there with this seed
        rng = generator(seed, Draw.SCHEDULE, round=r, step=attempt)
        chosen = [there[k] for k in rng.choice(len(there), min(asked, len(there)), replace=False)]
        events: list[tuple[float, int, str]] = [(limit, -1, "deadline")]
        for i in chosen:
            rng = generator(seed, Draw.DEVICE, round=r, client=i, step=attempt)
            chance, when = rng.random(2)
            if table.dropout and chance < table.dropout:
                events.append((when * needed[i], i, "lost"))
            else:
                events.append((needed[i], i, "reply"))
        heapq.heapify(events)
        replied, open_, at = [], len(chosen), 0.0
        while open_ and len(replied) < wanted:
            at, client, kind = heapq.heappop(events)
            if kind == "deadline":
                break
            open_ -= 1
            if kind == "reply":
                replied.append(client)
        now += at
        if replied:
            found.append(sorted(replied))
            ends.append(now)
    return found, ends


@pytest.mark.parametrize("mode", MODES)
def test_rounds_and_times_are_those_of_a_heap_of_events(mode: str) -> None:
    config = fleet(**MODES[mode])
    found = timetable(config, STEPS, SAMPLES, SIZES)
    replied, ends = by_heap(config, 0.05)
    assert [one.tolist() for one in found.answered] == replied
    assert found.seconds.tolist() == pytest.approx(ends, rel=1e-12)
    assert len({tuple(one) for one in replied}) > 3
    if mode not in ("days",):  # whose clients are there at other times
        late = by_heap(config, 0.06)[1]
        assert late[-1] != pytest.approx(ends[-1], rel=1e-6)  # the control
    assert found.uniform == (mode == "synchronous")


def updates_by_scan(
    config: Config,
    needed: np.ndarray,
    size: int,
    limit: Callable[[int], float] = lambda update: math.inf,
) -> list[list[tuple]]:
    """The updates [(time, client, staleness)] without a heap: each moment is looked for among all
    clients at work. Replies to update k = 1, 2, ... with a staleness of limit(k) are discarded."""
    federation, seed, table = config.federation, config.federation.seed, config.devices
    ends: dict[int, float] = {}
    began, lost = dict[int, int](), set[int]()
    updates: list[list[tuple]] = []
    waiting: dict[int, int] = {}
    now, event = 0.0, 0
    while True:
        free = [i for i in range(len(needed)) if i not in ends and i not in waiting]
        rng = generator(seed, Draw.SCHEDULE, round=event)
        slots = min(federation.per_round - len(ends), len(free))
        for i in sorted(free[k] for k in rng.choice(len(free), slots, replace=False)):
            chance, when = generator(seed, Draw.DEVICE, round=event, client=i).random(2)
            gone = chance < table.dropout
            ends[i] = now + float(when if gone else 1.0) * float(needed[i])
            began[i] = len(updates)
            lost |= {i} if gone else set()
        event += 1
        now = min(ends.values())
        for i in sorted(i for i, end in ends.items() if end == now):
            del ends[i]
            if i in lost:
                lost.discard(i)
                continue
            if len(updates) - began[i] >= limit(len(updates) + 1):
                continue
            waiting[i] = began[i]
            if len(waiting) == size:
                round = len(updates)
                updates.append([(now, j, round - waiting[j]) for j in sorted(waiting)])
                waiting = {}
                if len(updates) == federation.rounds:
                    return updates


def as_updates(clock: Timetable) -> list[list[tuple]]:
    """The updates of a timetable as [(time, client, staleness)]."""
    return [
        [
            (end, int(client), number - int(version))
            for client, version in zip(clients, versions, strict=True)
        ]
        for number, (end, clients, versions) in enumerate(
            zip(clock.seconds, clock.answered, clock.versions, strict=True)
        )
    ]


@pytest.mark.parametrize(("size", "dropout"), [(1, 0.0), (2, 0.0), (3, 0.0), (2, 0.3)])
def test_updates_of_fedbuff_are_those_of_a_scan(size: int, dropout: float) -> None:
    config = fleet(mode="fedbuff", buffer=size, dropout=dropout)
    found = timetable(config, STEPS, SAMPLES, SIZES)
    needed = devices_of(config, STEPS * SAMPLES, SIZES).needed
    told = as_updates(found)
    assert told == updates_by_scan(config, needed, size)
    assert told != updates_by_scan(config, needed * [1, 1, 1, 1, 1, 2], size)  # the control
    assert [weights.tolist() for weights in found.weights] == [
        [pytest.approx((1 + late) ** -0.5, rel=1e-15) for _, _, late in update] for update in told
    ]
    assert max(late for one in told for _, _, late in one) > 1
    assert [found.oldest(r) for r in range(30)] == [
        min(number - late for number in range(r, 30) for _, _, late in told[number])
        for r in range(30)
    ]


@pytest.mark.parametrize(
    ("threshold", "growth", "size", "dropout"),
    [(1, 0.0, 1, 0.0), (2, 0.0, 1, 0.3), (2, 0.0, 2, 0.0), (1, 0.5, 1, 0.0), (1, 0.3, 2, 0.2)],
)
def test_updates_with_a_threshold_are_those_of_a_scan(
    threshold: float, growth: float, size: int, dropout: float
) -> None:
    keys = {"threshold": threshold, "threshold-growth": growth, "buffer": size}
    config = fleet(mode="threshold", dropout=dropout, **keys)
    clock = timetable(config, STEPS, SAMPLES, SIZES)
    needed = devices_of(config, STEPS * SAMPLES, SIZES).needed

    def limit(update: int) -> float:
        return math.ceil(threshold * update**growth)

    told = as_updates(clock)
    assert told == updates_by_scan(config, needed, size, limit)
    assert told != updates_by_scan(config, needed, size, lambda update: 1 + limit(update))
    assert all(late < limit(k) for k, update in enumerate(told, 1) for _, _, late in update)
    assert {weight for weights in clock.weights for weight in weights} == {1.0}
    assert sum(clock.discarded) > 0


def test_a_high_threshold_is_fedbuff_with_full_weights() -> None:
    """Asynchronous Muon: no reply is discarded."""
    high = timetable(fleet(mode="threshold", threshold=1e6), STEPS, SAMPLES, SIZES)
    buffered = timetable(fleet(mode="fedbuff", buffer=1), STEPS, SAMPLES, SIZES)
    assert as_updates(high) == as_updates(buffered) and not high.discarded
    assert sum(map(sum, high.weights)) == 30 > sum(map(sum, buffered.weights))


def test_threshold_1_uses_only_replies_to_the_newest_model() -> None:
    """By hand, as for FedBuff below. Client 1 begins at 0, 3, 6 s and is always late."""
    rule = LateRule("threshold", 1, lambda late: 1.0, lambda updates: 1)
    clock = updates(Devices(0, np.array([2.0, 3.0])), 4, 2, rule)
    assert clock.seconds.tolist() == [2, 4, 6, 8]
    assert [int(*clients) for clients in clock.answered] == [0, 0, 0, 0]
    assert [int(*versions) for versions in clock.versions] == [0, 1, 2, 3]
    assert clock.discarded == (0, 1, 0, 1)  # at 3 and 6 s; the second after the update at 6 s


def test_weights_of_fedasync() -> None:
    config = fleet(mode="fedasync", mixing=0.5, **{"staleness-power": 2.0})
    clock = timetable(config, STEPS, SAMPLES, SIZES)
    assert clock.mixes and {len(clients) for clients in clock.answered} == {1}
    assert as_updates(clock) == as_updates(
        timetable(fleet(mode="fedbuff", buffer=1), STEPS, SAMPLES, SIZES)
    )
    for update, weights in zip(as_updates(clock), clock.weights, strict=True):
        assert weights.tolist() == [pytest.approx(0.5 / (1 + late) ** 2) for _, _, late in update]


def test_records_count_the_bytes_of_discarded_replies(tmp_path: Path) -> None:
    config = fleet(mode="threshold", threshold=1)
    execute(config, tmp_path)
    clock, lines = table_of(config), records(tmp_path)
    for number, line in enumerate(lines):
        assert line["discarded"] == clock.discarded[number]
        assert line["bytes_up"] == 336 * (1 + clock.discarded[number])
        assert line["bytes_down"] == 336 * (1 + clock.lost[number])
        assert line["staleness"] == [0]
    assert sum(clock.discarded) > 3


def test_two_clients_of_fedbuff_by_hand() -> None:
    """Client 0 needs 2 s and client 1 needs 3 s; each reply is an update. Client 0 replies at 2, 4
    and 6 s; client 1 at 3 and 6 s, with models of 0 and 2 updates."""
    found = updates(Devices(0, np.array([2.0, 3.0])), 5, 2, BUFFER_OF_1)
    assert found.seconds.tolist() == [2, 3, 4, 6, 6]
    assert [int(*one) for one in found.answered] == [0, 1, 0, 0, 1]
    assert [int(*one) for one in found.versions] == [0, 0, 1, 3, 2]


def test_attempts_of_fedbuff_count_from_the_last_update() -> None:
    """About 10 for an update, 2,000 in all; more than 1,000 for one are too many."""
    found = updates(Devices(0, np.ones(3), dropout=0.9), 200, 1, BUFFER_OF_1)
    assert len(found.answered) == 200 and sum(found.lost) > 1000
    with pytest.raises(
        InputError,
        match=r"round 1 of .*'fedbuff' has received too few replies after 1001 attempts to",
    ):
        updates(Devices(0, np.ones(3), dropout=1 - 1e-9), 200, 1, BUFFER_OF_1)


def test_records_of_fedbuff_have_its_times_and_count_lost_messages(tmp_path: Path) -> None:
    config = fleet(mode="fedbuff", buffer=2, dropout=0.3)
    execute(config, tmp_path)
    clock, lines = table_of(config), records(tmp_path)
    for number, line in enumerate(lines):
        assert line["participants"] == clock.answered[number].tolist()
        assert line["staleness"] == (number - clock.versions[number]).tolist()
        assert line["simulated_seconds"] == clock.seconds[number]
        assert line["bytes_up"] == 2 * 336
        assert line["bytes_down"] == 336 * (len(clock.selected[number]) + clock.lost[number])
    assert sum(clock.lost) > 0 and max(late for line in lines for late in line["staleness"]) > 1


UNFIT = {
    "adamw": ({"local": {"recipe": "adamw"}}, "average a second moment"),
    "rows": (
        {"local": {"recipe": "muon"}, "orthogonalizer": {"row-memory": 0.9}},
        "row-memory = 0.9 lets the server average",
    ),
    "ef21": (
        {"compression": {"uplink": "top-k", "feedback": "ef21"}},
        "\\[devices\\] mode = 'fedbuff' does not allow this, because late replies",
    ),
    "ef21-muon": (
        {"local": {"recipe": "ef21-muon"}},
        "recipe = 'ef21-muon' lets clients return directions",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_fedbuff_rejects_what_has_no_weighted_move(name: str) -> None:
    """Before anything is built; the deadline mode accepts the same tables."""
    tables, said = UNFIT[name]
    small(devices={"mode": "deadline", "deadline": 9.0}, **tables)
    with pytest.raises(InputError, match=said):
        small(devices={"mode": "fedbuff"}, **tables)


OWN_UNFIT = {
    "a second moment": (
        dict.fromkeys(("sent", "returned", "kept"), ("moments",)),
        "can make the state 'moments' of this recipe invalid",
    ),
    "directions": ({"direction": True}, "lets clients return directions"),
}


@pytest.mark.parametrize("name", OWN_UNFIT)
def test_fedbuff_rejects_own_recipes_without_weighted_moves(name: str, tmp_path: Path) -> None:
    """A custom recipe; the control is one whose server averages a momentum."""
    fields, said = OWN_UNFIT[name]
    moments = replace(links.momentum(0.9), name="moments")

    def rule(old: Any, mean: Any, states: Any) -> Any:
        return mean, states

    def run(link: Any, given: dict[str, Any]) -> None:
        chain = Chain((links.gradient(), link, links.descend(0.05)))
        recipe = Recipe(chain, rule, **given)
        tables = {"data": {"name": "synthetic", "train": 90, "test": 60, "minimum": 2},
                  "local": {"recipe": "given"}, "devices": {"mode": "fedbuff"}}  # fmt: skip
        config = parse(tables, own_recipe=True).with_objects(UserObjects(recipe=recipe))
        prepare(resolve(config), tmp_path / link.name)

    with pytest.raises(InputError, match=said):
        run(moments, fields)
    assert not (tmp_path / "moments").exists()
    run(links.momentum(0.9), dict.fromkeys(("sent", "returned", "kept"), ("momentum",)))


def test_traces_may_have_a_mark_of_their_encoding_and_blank_lines(tmp_path: Path) -> None:
    """As spreadsheets write them; another encoding is rejected with what to do."""
    lines = [f"{i},{10 + i},100,50" for i in range(6)]
    file = tmp_path / "t.csv"
    plain = hardware(with_trace(file, "trace", *lines), 6)
    text = "\r\n".join([HEADS["trace"], *lines, "   ", ""])
    file.write_bytes(text.encode("utf-8-sig"))
    config = small(devices={"mode": "synchronous", "trace": str(file), "speeds": "trace",
                            "bandwidths": "trace"})  # fmt: skip
    assert all(np.array_equal(*pair) for pair in zip(plain, hardware(config, 6), strict=True))
    file.write_bytes(text.encode("utf-16"))
    with pytest.raises(InputError, match=r"is not a CSV text file .* Save the file as UTF-8"):
        hardware(config, 6)


def test_attempts_without_a_reply_count_the_models_that_they_sent(tmp_path: Path) -> None:
    """Against a loop over attempts, of clients that are often lost."""
    config = small(
        federation={"rounds": 20, "per-round": 2},
        local={"recipe": "fedavg"},
        devices={"mode": "synchronous", "dropout": 0.6},
    )
    execute(config, tmp_path)
    seed, sent = config.federation.seed, []

    def replied(number: int, attempt: int) -> bool:
        rng = generator(seed, Draw.SCHEDULE, round=number, step=attempt)
        drawn = [
            generator(seed, Draw.DEVICE, round=number, client=int(i), step=attempt).random()
            for i in rng.choice(6, 2, replace=False)
        ]
        return max(drawn) >= 0.6

    for number in range(20):
        attempt = 0
        while not replied(number, attempt):
            attempt += 1
        sent.append(2 * (attempt + 1))
    assert [one["bytes_down"] for one in records(tmp_path)] == [168 * many for many in sent]
    assert len({*sent}) > 2


def test_times_and_bytes_follow_compression(tmp_path: Path) -> None:
    """A compressed reply takes less time; all who are asked receive bytes."""
    table = {"mode": "deadline", "select": 5, "latency": 0.0, "speed": 1e12, "bandwidth-up": 100.0}
    plain = small(local={"recipe": "fedavg"}, devices=table)
    less = small(local={"recipe": "fedavg"}, devices=table, compression={"uplink": "top-k"})
    ends = [execute(one, tmp_path / str(k)) for k, one in enumerate((plain, less))]
    assert ends[1]["simulated_seconds"] < 0.7 * ends[0]["simulated_seconds"]
    for place, end in enumerate(ends):
        lines = records(tmp_path / str(place))
        for record in lines:
            assert record["bytes_down"] == 5 * 168 and len(record["participants"]) == 5
        assert end["simulated_seconds"] == pytest.approx(
            8 * (168 / 1e6 + lines[-1]["bytes_up"] / 3 / 100), rel=1e-6
        )


def test_two_clients_by_hand() -> None:
    """Client 0 needs 0.5 + 100 / 50 + 10 · 3 / 6 + 40 / 20 = 9.5 s, and client 1 needs 4.5 s."""
    config = small(
        federation={"clients": 2, "per-round": 2, "rounds": 3},
        devices={"mode": "synchronous", "latency": 0.5, "cost": 3.0, "speed": 6.0,
                 "bandwidth-down": 50.0, "bandwidth-up": 20.0},
    )  # fmt: skip
    devices = devices_of(config, np.array([10.0, 0.0]), (100, 40))
    assert devices.needed.tolist() == [9.5, 4.5]
    both = np.array([0, 1])
    assert round_of(devices, both, (0, 0), 2, math.inf) == (9.5, pytest.approx([0, 1]))
    assert round_of(devices, both, (0, 0), 1, math.inf) == (4.5, pytest.approx([1]))
    assert round_of(devices, both, (0, 0), 2, 6.0) == (6.0, pytest.approx([1]))
    found = timetable(config, np.array([5, 0]), np.array([2, 0]), (100, 40))
    assert found.seconds.tolist() == [9.5, 19.0, 28.5]


def test_a_day_and_a_trace_by_hand() -> None:
    """Client 0 is there in [2, 3), client 1 in [5, 8), of 8 seconds that repeat."""
    spans = (np.array([[2.0, 3.0]]), np.array([[5.0, 8.0]]))
    traced = Devices(0, np.ones(2), day=8.0, spans=spans)
    cases = {0: [2, 5], 2: [0, 3], 3: [7, 2], 7.5: [2.5, 0], 8: [2, 5], 18.5: [0, 2.5], 31: [3, 0]}
    for now, waits in cases.items():
        assert traced.until_there(now, 0).tolist() == waits
    assert traced.choose(3.0, 0, 2)[0] == 5.0 and traced.choose(3.0, 0, 2)[1].tolist() == [1]
    days = Devices(0, np.ones(2), share=0.25, day=8.0, zones=np.array([0.0, 0.5]))
    assert days.until_there(1.0, 0).tolist() == [0, 3]
    assert days.until_there(2.0, 0).tolist() == [6, 2]


def test_laws_of_speeds() -> None:
    """Medians, spreads and the slowest, of 20,000 devices; another seed draws others."""
    many = 20_000
    speed, down, up = hardware(fleet(), many)
    assert np.log(speed).mean() == pytest.approx(math.log(100), abs=4 / math.sqrt(many))
    assert np.log(speed).std() == pytest.approx(1.0, abs=4 / math.sqrt(2 * many))
    slower = 3000.0 / down  # a Pareto number of shape 2, P(> x) = x^-2
    for x in (1.5, 3.0):
        error = 4 * math.sqrt(x**-2 * (1 - x**-2) / many)
        assert (slower > x).mean() == pytest.approx(x**-2, abs=error)
    assert abs(np.corrcoef(down, up)[0, 1]) < 4 / math.sqrt(many)
    other = small(federation={"seed": 4}, devices=FLEET)
    assert not np.isclose(hardware(other, 6)[0], speed[:6]).any()
    assert np.array_equal(hardware(fleet(), 6)[0], speed[:6])


def test_equal_devices_change_no_number_of_a_run(tmp_path: Path) -> None:
    """A clock alone, and one whose deadline mode asks no more clients than count."""
    execute(small(), tmp_path / "none")
    equal: dict[str, Any] = {"clock": {"mode": "synchronous"}}
    equal["first"] = {"mode": "deadline", "deadline": 1e6}
    equal["other"] = {"mode": "deadline", "select": 5, "speeds": "log-normal"}
    for name, table in equal.items():
        summary = execute(small(devices=table), tmp_path / name)
        lines = records(tmp_path / name)
        assert summary["simulated_seconds"] == lines[-1]["simulated_seconds"] > 0
        same = [
            (tmp_path / name / file).read_bytes() == (tmp_path / "none" / file).read_bytes()
            for file in ("model.safetensors", "momentum.safetensors")
        ]
        assert same == [name != "other"] * 2
        assert all("dropped" in one for one in lines) == (name == "other")
    assert "simulated_seconds" not in records(tmp_path / "none")[-1]


def test_an_interrupted_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = fleet(**MODES["both"])
    execute(config, tmp_path / "whole")
    run = prepare(resolve(config), tmp_path / "cut")

    def stop(record: Record) -> None:
        if record["round"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, run_rounds, stop)
    execute(config, tmp_path / "cut", resume=True)
    for file in ("model.safetensors", "momentum.safetensors", "clock.npz"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    times = [
        [
            [
                one.get(name)
                for name in ("participants", "dropped", "staleness", "simulated_seconds")
            ]
            for one in records(at)
        ]
        for at in (tmp_path / "cut", tmp_path / "whole")
    ]
    assert times[0] == times[1] and len(times[0]) == 30


LATE_RUNS: dict[str, dict[str, Any]] = {
    "fedbuff": {
        "local": {"recipe": "scaffold", "steps": 2, "batch": 4},
        "compression": {"uplink": "top-k", "share": 0.3, "feedback": "error"},
        "devices": {"mode": "fedbuff", "buffer": 2, "speeds": "log-normal", "dropout": 0.2},
    },
    "threshold": {
        "local": {
            "recipe": "ringmaster-free", "steps": 2, "batch": 4, "schedule": "power",
        },
        "devices": {
            "mode": "threshold", "threshold": 1, "threshold-growth": 0.5, "speeds": "log-normal",
            "dropout": 0.2,
        },
    },
    "fedasync": {
        "local": {"recipe": "scaffold", "steps": 2, "batch": 4},
        "devices": {"mode": "fedasync", "speeds": "log-normal", "dropout": 0.2},
    },
}  # fmt: skip


@pytest.mark.parametrize("mode", LATE_RUNS)
def test_late_runs_resume_bit_identically_after_20_kills(mode: str, tmp_path: Path) -> None:
    """One kill after each of 20 rounds, most of them between checkpoints."""
    config = small(**LATE_RUNS[mode], federation={"rounds": 21, "per-round": 4},
                   output={"evaluate-every": 7, "checkpoint-every": 3})  # fmt: skip
    killed(config, tmp_path / "run", range(1, 21))
    execute(config, tmp_path / "whole")
    same_runs(tmp_path / "run", tmp_path / "whole")
    assert (tmp_path / "run" / "clock.npz").exists()
    assert max(max(record["staleness"]) for record in records(tmp_path / "run")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fedbuff", "threshold"])
def test_late_replies_resume_bit_for_bit_after_20_kills(
    mode: str, forks: Nursery, tmp_path: Path
) -> None:
    """With client states and compression, or the states of a server, killed at random moments:
    model, all fields of records but wall times, and clock. A state that was wrong would change the
    records that follow."""
    tables = {
        **LATE_RUNS[mode],
        "federation": {"rounds": 600, "per-round": 4},
        "output": {"evaluate-every": 5, "checkpoint-every": 3},
    }
    file, cut, random = tmp_path / "config.toml", tmp_path / "cut", np.random.default_rng(0)
    file.write_text(dump(small(**tables)))
    whole = forks.run(["run", str(file), f"--out={tmp_path / 'whole'}"], 200)
    assert whole.code == 0, whole.err
    middle = 0
    for _ in range(20):
        resumed = ["--resume"] if (cut / "config.toml").exists() else []
        started = forks.start(["run", str(file), f"--out={cut}", *resumed])
        log = cut / "rounds.jsonl"
        before = log.read_bytes().count(b"\n") if log.exists() else 0
        end = time.monotonic() + 60
        while time.monotonic() < end:  # until it works
            lines = log.read_bytes() if log.exists() else b""
            if lines.count(b"\n") > before:
                break
            time.sleep(0.005)
        time.sleep(random.uniform(0.0, 0.1))
        started.send(signal.SIGKILL)
        assert started.wait().code == -signal.SIGKILL
        middle += not (cut / "summary.json").exists()
    assert middle == 20
    again = forks.run(["run", str(file), f"--out={cut}", "--resume"], 200)
    assert again.code == 0, again.err
    same_runs(cut, tmp_path / "whole")
    assert len(records(cut)) == 600


def table_of(config: Config) -> Timetable:
    found = build_experiment(resolve(config)).plan.timetable
    assert found is not None
    return found


def test_times_follow_the_bytes_of_messages() -> None:
    """FedMuon sends the model and a momentum both ways, FedAvg the model only; 21 float64 each."""
    slow = {"mode": "synchronous", "latency": 0.0, "speed": 1e12, "bandwidth-down": 21.0,
            "bandwidth-up": 42.0}  # fmt: skip
    for recipe, trees in (("fedmuon", 2), ("fedavg", 1)):
        found = table_of(small(local={"recipe": recipe}, devices=slow))
        assert found.seconds[0] == pytest.approx(trees * (8 + 4), rel=1e-9)


HEADS = {"trace": "client,speed,bandwidth-down,bandwidth-up",
         "availability-trace": "client,start,end"}  # fmt: skip


def with_trace(file: Path, key: str, *lines: str) -> Config:
    file.write_text("\n".join([HEADS[key], *lines]) + "\n")
    read = {"speeds": "trace", "bandwidths": "trace"}
    read = read if key == "trace" else {"availability": "trace"}
    return small(devices={"mode": "synchronous", key: str(file), **read})


def test_traces_are_read(tmp_path: Path) -> None:
    lines = [f"{i},{10 + i},{100 + i},{50 + i}" for i in reversed(range(6))]
    speed, down, up = hardware(with_trace(tmp_path / "t.csv", "trace", *lines), 6)
    assert speed.tolist() == [10, 11, 12, 13, 14, 15] and (down - up == 50).all()
    there = [f"{i},{2 * i},{2 * i + 2}" for i in range(6)]  # one after the other
    found = table_of(with_trace(tmp_path / "a.csv", "availability-trace", *there))
    assert (
        all(len(one) == 1 for one in found.answered)
        and len({int(*one) for one in found.answered}) > 1
    )


WRONG = [
    ("trace", ["0,1,1,1"], "has no line for client 1 (5 of 6 clients are missing)"),
    (
        "trace",
        [f"{i},{i - 3},1,1" for i in range(6)],
        "-3 is not a valid speed or bandwidth for client 0",
    ),
    (
        "trace",
        ["0,1,1"],
        "line 2: the line is '0,1,1', but it must contain a client number and 3 finite numbers",
    ),
    ("trace", ["0,1,1,nan"], "finite numbers"),
    ("trace", ["inf,1,1,1"], "the line is 'inf,1,1,1', but it must contain a client number"),
    ("trace", ["nan,1,1,1"], "the line is 'nan,1,1,1', but it must contain a client number"),
    ("trace", ["0,1,1,1", "x" * 200_000], "is not a CSV text file (field larger than field limit"),
    (
        "trace",
        [f"{i},{'1e-320' if i == 4 else '1'},1,1" for i in range(6)],
        "client 4 needs inf s for a round, but the maximum is 1e+15 s",
    ),
    ("trace", ["0,1,1,1", "0,2,2,2"], "line 3: client 0 already has an earlier line"),
    ("availability-trace", ["0,5,4"], "client 0 is available from 5 to 4 s"),
    ("availability-trace", ["0,1,2"], "has no line for client 1"),
    ("availability-trace", [f"{i},{s},{s + 2}" for i in range(6) for s in (0, 1)], "overlap"),
]


@pytest.mark.parametrize(("key", "lines", "said"), WRONG)
def test_wrong_traces_are_rejected(tmp_path: Path, key: str, lines: list[str], said: str) -> None:
    with pytest.raises(InputError) as told:
        prepare(resolve(with_trace(tmp_path / "t.csv", key, *lines)), tmp_path / "run")
    assert said in str(told.value) and not (tmp_path / "run").exists()


REFUSED = {
    "speed=-1": "[devices] speed = -1 is not valid: set a number above 0",
    "mode=deadline": "needs deadline or select, but both keys are 0. Set deadline",
    "mode=deadline select=2": "select = 2 is not valid, because it must lie between [federation]",
    "mode=deadline deadline=0.01": "s is too short for all 20 clients",
    "availability=trace": "availability-trace does not name a file",
    "speeds=trace trace=missing.csv": "cannot read",
    "mode=fedbuff buffer=6": "buffer = 6 exceeds [federation] per-round = 5",
    "select=7": "select = 7 has no effect",
    "availability=bernoulli available=1e-9": "round 1 has received no reply after 100 attempts",
    "mode=threshold threshold=0.5": "threshold = 0.5 discards every reply",
    "mode=fedbuff availability=bernoulli available=1e-9": "'fedbuff' has received too few",
    "dropout=0.9999": "round 1 has received no reply after 100 attempts",
    "mode=fedbuff dropout=0.99999": "has received too few replies after 5001 attempts",
    "speeds=pareto speed-spread=1e15": "needs inf s for a round, but the maximum is 1e+15 s",
    "speeds=log-normal speed-spread=1e3": "s for a round, but the maximum is 1e+15 s",
    "cost=1e15 speed=1e-3": "s for a round, but the maximum is 1e+15 s",
}


@pytest.mark.parametrize("sets", REFUSED)
def test_what_cannot_run_is_one_sentence_and_exit_code_2(
    sets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    one = [f"devices.{one}" for one in ("mode=synchronous", *sets.split())]
    command = ["run", "--data", "synthetic", *(word for each in one for word in ("--set", each))]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--out", str(tmp_path / "run")])
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and REFUSED[sets] in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_bounds_and_private_runs_are_rejected(tmp_path: Path) -> None:
    """Where devices select; a private run with a clock alone is accepted, with the same ε."""
    config = fleet(**MODES["both"])
    with pytest.raises(InputError, match="decide which clients take part"):
        neighbours.require_measurable(config)
    for other in ({"mode": "fedbuff"}, {"mode": "synchronous", "availability": "bernoulli"}):
        with pytest.raises(InputError, match="decide which clients take part"):
            neighbours.require_measurable(small(devices=other))
    execute(config, tmp_path / "a")
    verdict = certificates.certify(finished_run.from_directory(tmp_path / "a"))
    assert "decide which clients take part" in verdict.refusal and verdict.bound is None
    execute(small(devices={"mode": "synchronous"}), tmp_path / "b")
    assert not certificates.certify(finished_run.from_directory(tmp_path / "b")).refusal
    secret = {"local": {"recipe": "dp-sgd"}, "privacy": {"noise": 1.0, "lot": 6.0}}
    for table in (
        {"mode": "synchronous", "dropout": 0.1},
        {"mode": "synchronous", "availability": "bernoulli"},
        {"mode": "deadline", "deadline": 9.0},
        {"mode": "fedbuff"},
    ):
        with pytest.raises(InputError, match="the privacy guarantee assumes"):
            small(devices=table, **secret)
    with pytest.raises(InputError, match="times that depend on the numbers of samples"):
        small(devices={"mode": "synchronous"}, local={"recipe": "fedavg"},
              privacy={"level": "client", "noise": 1.0, "bound": 1.0})  # fmt: skip
    ends = [
        execute(small(devices={"mode": mode}, **secret), tmp_path / mode)
        for mode in ("none", "synchronous")
    ]
    assert ends[0]["privacy"]["epsilon"] == ends[1]["privacy"]["epsilon"]
