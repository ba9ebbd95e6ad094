"""Attacks and robust aggregators: formulas, limits, and errors for wrong numbers of clients."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compared import built, ended, normalized_perceptron, perceptron, with_module
from conftest import small
from scipy.optimize import minimize
from test_aggregators import replies

from fedmuon import aggregators
from fedmuon.config.hostile import hostile_clients
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.rounds import begin, run_round
from fedmuon.optim.attacks import Attack, changes_of, hidden_deviations, mimicked, with_changes
from fedmuon.optim.stage import Broadcast, Reply, ServerState, Stage
from fedmuon.tasks.base import Batch, is_statistic

pytestmark = pytest.mark.usefixtures("runs_apart")


def rows(given: list[Reply], replica: int) -> np.ndarray:
    """Each reply of one replica as a vector."""
    return np.stack([flat(reply.params, replica) for reply in given])


def flat(tree: Any, replica: int) -> np.ndarray:
    return np.concatenate([value[replica].numpy().ravel() for value in tree.values()])


# Aggregators


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("radius", [0.0, 1.5])
def test_centered_clipping_is_the_loop(count: int, radius: float) -> None:
    rule = aggregators.centered_clipping(radius, iterations=3)
    given, later = replies(count), replies(count + 1)[:count]
    state = given[0].params
    for round in (given, later):  # the second round starts from the result of the first
        combined, state_after = rule.combine(round, state)
        for s in range(2):
            center = flat(state, s)
            for _ in range(3):
                distances = [float(np.linalg.norm(row - center)) for row in rows(round, s)]
                limit = radius or float(np.median(distances))
                total = np.zeros_like(center)
                for row, distance in zip(rows(round, s), distances, strict=True):
                    total += (row - center) * min(1.0, limit / distance if distance else 1.0)
                center = center + total / count
            np.testing.assert_allclose(flat(combined, s), center, rtol=1e-12)
            unclipped = rows(round, s).mean(0)  # the negative control
            assert np.abs(flat(combined, s) - unclipped).max() > 1e-3
        state = state_after
        assert all(torch.equal(state[name], combined[name]) for name in combined)


@pytest.mark.parametrize("count", [3, 4, 7])
def test_geometric_median_has_the_smallest_sum_of_distances(count: int) -> None:
    given = replies(count)
    found = aggregators.geometric_median(iterations=300, smoothing=1e-12).combine(given)[0]
    for s in range(2):
        points = rows(given, s)

        def total(center: np.ndarray, points: np.ndarray = points) -> float:
            return float(np.linalg.norm(points - center, axis=1).sum())

        best = minimize(total, points.mean(0), tol=1e-14)
        assert total(flat(found, s)) <= best.fun * (1 + 1e-10)
        assert total(points.mean(0)) > best.fun * (1 + 1e-4)  # the negative control


@pytest.mark.parametrize("count", [3, 4, 7])
def test_weiszfeld_steps_are_the_loop(count: int) -> None:
    given = replies(count)
    found = aggregators.geometric_median(iterations=4, smoothing=0.1).combine(given)[0]
    fewer = aggregators.geometric_median(iterations=3, smoothing=0.1).combine(given)[0]
    for s in range(2):
        points = rows(given, s)
        center = np.median(points, 0)
        for _ in range(4):
            weights = [1 / max(0.1, float(np.linalg.norm(point - center))) for point in points]
            center = sum(w * p for w, p in zip(weights, points, strict=True)) / sum(weights)
        np.testing.assert_allclose(flat(found, s), center, rtol=1e-12)
        assert np.abs(flat(fewer, s) - center).max() > 1e-6  # the negative control


@pytest.mark.parametrize("make", [aggregators.centered_clipping, aggregators.geometric_median,
                                  aggregators.median])  # fmt: skip
def test_a_minority_of_huge_replies_moves_robust_aggregates_little(make: Any) -> None:
    given = replies(5)
    huge = [Reply(k, {name: value * 1e9 for name, value in reply.params.items()}, {}, reply.loss)
            for k, reply in enumerate(given[:2])]  # fmt: skip
    rule = make()
    state = {name: torch.zeros_like(value) for name, value in given[0].params.items()}
    arguments = (state,) if rule.init else ()
    combined = rule.combine([*huge, *given[2:]], *arguments)[0]
    largest = max(float(np.linalg.norm(row)) for row in rows(given, 0))
    assert np.linalg.norm(flat(combined, 0)) < 3 * largest
    mean = aggregators.mean().combine([*huge, *given[2:]])[0]  # the negative control
    assert np.linalg.norm(flat(mean, 0)) > 1e6 * largest


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: aggregators.centered_clipping(-1.0), "Use a number above 0"),
        (lambda: aggregators.centered_clipping(math.nan), "Use a number above 0"),
        (lambda: aggregators.centered_clipping(1.0, iterations=0), "integer of 1 or more"),
        (lambda: aggregators.geometric_median(iterations=0), "integer of 1 or more"),
        (lambda: aggregators.geometric_median(smoothing=0.0), "Use a number above 0"),
    ],
)
def test_options_out_of_range_are_rejected(make: Callable[[], Any], fix: str) -> None:
    with pytest.raises(InputError, match=fix):
        make()


@pytest.mark.parametrize(
    ("rule", "limits"),
    [
        (aggregators.median(), {1: 0, 2: 0, 3: 1, 10: 4}),
        (aggregators.centered_clipping(), {3: 1, 4: 1}),
        (aggregators.geometric_median(), {3: 1, 4: 1}),
        (aggregators.trimmed_mean(0.2), {4: 0, 5: 1, 10: 2}),
        (aggregators.krum(2), {4: 0, 5: 1, 7: 2, 20: 2}),
    ],
)
def test_limits_of_aggregators(rule: aggregators.Aggregator, limits: dict[int, int]) -> None:
    assert rule.tolerates is not None
    assert {count: rule.tolerates(count) for count in limits} == limits


# Attacks


def test_published_numbers_of_alie() -> None:
    """Baruch et al. 2019, section 4: 50 clients of which 24 are hostile."""
    # s = 50 // 2 + 1 - 24 = 2 supporters, (50 - 24 - 2) / 26 = 24 / 26
    assert hidden_deviations(50, 24) == pytest.approx(1.4260768722, abs=1e-9)
    assert hidden_deviations(10, 2) == 0.0  # half of the honest clients: no deviation hides
    assert hidden_deviations(3, 2) == 0.0 and math.isfinite(hidden_deviations(2, 1))


def test_each_replica_mimics_its_own_client() -> None:
    changes = [
        {"model": {"w": torch.tensor([[0.1, 0.0], [0.0, 5.0]])}},
        {"model": {"w": torch.tensor([[4.0, 0.0], [0.1, 0.0]])}},
        {"model": {"w": torch.tensor([[0.0, 0.1], [0.0, 0.1]])}},
    ]
    sent = mimicked(changes)["model"]["w"]
    assert torch.equal(sent[0], changes[1]["model"]["w"][0])
    assert torch.equal(sent[1], changes[0]["model"]["w"][1])


@pytest.mark.parametrize("kind", ["alie", "inner-product", "mimic"])
def test_an_honest_reply_that_is_not_finite_ends_the_run(kind: str) -> None:
    """The median of the replies would hide it, and the eigensolver of `mimic` fails."""
    received = Broadcast(3, {"w": torch.zeros(1, 2)}, {})
    params = [torch.ones(1, 2), torch.ones(1, 2), torch.tensor([[1.0, math.nan]])]
    sent = [Reply(client, {"w": w}, {}, torch.zeros(1)) for client, w in enumerate(params)]
    attack = Attack(kind, (0,), classes=2)
    server = ServerState(3, received.params, {})
    with pytest.raises(NonFinite, match=r"client 2 is not finite \(round 3\)"):
        attack.read(sent, lambda: received, server)
    finite, _ = attack.read(sent[:2], lambda: received, server)
    assert all(reply.params["w"].isfinite().all() for reply in finite)


def test_changes_leave_statistics_integers_and_personal_parameters_as_they_are() -> None:
    params = {
        "w": torch.ones(1, 2),
        "norm.running_var": torch.ones(1, 2),
        "count": torch.ones(1, dtype=torch.int64),
        "own": torch.ones(1, 3),
    }
    received = Broadcast(
        0, {name: value * 0 for name, value in params.items() if name != "own"}, {}
    )
    reply = Reply(0, params, {"m": {"w": torch.full((1, 2), 2.0)}}, torch.zeros(1))
    changes = changes_of(reply, received)
    assert changes["model"].keys() == {"w"} and changes["m"].keys() == {"w"}
    doubled = {tree: {name: 2 * value for name, value in tensors.items()}
               for tree, tensors in changes.items()}  # fmt: skip
    attacked = with_changes(reply, received, doubled)
    assert attacked.params["w"].tolist() == [[2.0, 2.0]]
    assert attacked.states["m"]["w"].tolist() == [[4.0, 4.0]]
    for name in ("norm.running_var", "count", "own"):
        assert torch.equal(attacked.params[name], params[name])
    # A client that returns a direction sends it as a whole.
    assert changes_of(reply, received, direction=True)["model"]["w"].tolist() == [[1.0, 1.0]]


def test_labels_are_flipped_for_hostile_clients_only() -> None:
    attack = Attack("label-flip", (1,), from_round=2, classes=10)
    batch = Batch(torch.zeros(3, 2), torch.tensor([0, 3, 9]))
    assert attack.samples(batch, 1, 2).labels.tolist() == [9, 6, 0]
    assert attack.samples(batch, 1, 1) is batch and attack.samples(batch, 0, 2) is batch
    assert Attack("sign-flip", (1,), classes=10).samples(batch, 1, 2) is batch


@pytest.mark.parametrize("module", [perceptron, normalized_perceptron])
def test_label_flip_knows_the_classes_of_a_network(module: Any) -> None:
    config = with_module(
        small(task={"name": "given"}, local={"recipe": "fedavg", "lr": 0.5},
              attacks={"kind": "label-flip", "share": 0.5}), module(),
    )  # fmt: skip
    attack = built(config).recipe.stages[0]
    assert isinstance(attack, Attack) and attack.classes == 3
    honest = built(with_module(small(task={"name": "given"}, local={"recipe": "fedavg", "lr": 0.5}),
                               module()))  # fmt: skip
    moved = [float((ended(built(config)).params[name] - value).abs().max())
             for name, value in ended(honest).params.items() if not is_statistic(name)]  # fmt: skip
    assert max(moved) > 1e-3


def test_noise_has_the_size_of_the_change_and_is_equal_for_replicas() -> None:
    drawn = torch.Generator().manual_seed(1)
    change = torch.randn(2, 40, 50, generator=drawn, dtype=torch.float64) * torch.tensor(
        [1.0, 7.0]).view(2, 1, 1)  # fmt: skip
    reply = Reply(3, {"w": change}, {}, torch.zeros(2))
    received = Broadcast(5, {"w": torch.zeros_like(change)}, {})
    sent = Attack("gaussian", (3,), 2.0, seed=4).reply(reply, received, {}).params["w"]
    sizes = change.flatten(1).norm(dim=1)
    torch.testing.assert_close(sent[0] / sizes[0], sent[1] / sizes[1])
    assert sent.flatten(1).norm(dim=1) / sizes == pytest.approx(2.0, rel=0.1)
    again = Attack("gaussian", (3,), 2.0, seed=4).reply(reply, received, {}).params["w"]
    other = Attack("gaussian", (3,), 2.0, seed=5).reply(reply, received, {}).params["w"]
    assert torch.equal(sent, again) and not torch.equal(sent, other)


def test_attacks_begin_with_their_round() -> None:
    federation = {"clients": 4, "per-round": 4, "rounds": 3}
    attacked = built(small(federation=federation, attacks={"kind": "scaled", "clients": "2",
                                                           "from-round": 2}))  # fmt: skip
    honest = built(small(federation=federation))
    state = begin(attacked.recipe, attacked.task, 3)
    for number in range(3):
        clients = [attacked.client(client) for client in range(4)]
        after, sent, _ = run_round(attacked, state, clients)
        _, expected, _ = run_round(honest, state, clients)
        equal = [torch.equal(a.params["weight"], b.params["weight"])
                 for a, b in zip(sent, expected, strict=True)]  # fmt: skip
        assert equal == [True, True, number < 2, True]
        state = after


# Which clients are hostile


def test_a_share_of_clients_is_drawn_by_the_seed() -> None:
    def drawn(seed: int, share: float = 0.4) -> tuple[int, ...]:
        federation = {"clients": 10, "per-round": 5, "seed": seed}
        return hostile_clients(small(federation=federation,
                                     attacks={"kind": "scaled", "share": share}))  # fmt: skip

    assert len(drawn(1)) == 4 and drawn(1) == drawn(1) and len({drawn(s) for s in range(9)}) > 5
    assert {*drawn(1, 0.2)} < {*drawn(1)}  # more hostile clients include the fewer ones
    assert hostile_clients(small()) == ()


ATTACK = {"kind": "sign-flip"}


def test_one_client_needs_no_quotation_marks() -> None:
    assert hostile_clients(small(attacks={**ATTACK, "clients": 3})) == (3,)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"attacks": ATTACK}, "has no hostile clients. Set share"),
        ({"attacks": {**ATTACK, "share": 0.2, "clients": "1"}}, "both choose the hostile clients"),
        ({"attacks": {**ATTACK, "share": 0.01}}, "Set share to 0.167 or more"),
        ({"attacks": {**ATTACK, "clients": "6"}}, "have the numbers 0 to 5"),
        ({"attacks": {**ATTACK, "clients": "0,1,2,3,4,5"}}, "no client is honest"),
        ({"attacks": {**ATTACK, "clients": "one"}}, "'one' is no number of a client"),
        ({"attacks": {**ATTACK, "clients": "-1"}}, "'-1' is no number of a client"),
        ({"attacks": {**ATTACK, "clients": 6}}, "have the numbers 0 to 5"),
        ({"attacks": {**ATTACK, "clients": True}}, "should be a valid string"),
        ({"attacks": {**ATTACK, "clients": "1", "from-round": 99}}, "is after the last round"),
        ({"attacks": {"share": 0.2}}, "share = 0.2 has no effect"),
        ({"attacks": {"kind": "mimic", "share": 0.2, "strength": 2.0}}, "strength = 2.0 has no"),
        (
            {"attacks": {**ATTACK, "share": 0.2}, "local": {"recipe": "fedmuon"},
             "privacy": {"level": "client", "noise": 1.0}},
            "the account assumes that every client clips its update",
        ),
        (
            {"attacks": {**ATTACK, "share": 0.2}, "compression": {
                "uplink": "top-k", "feedback": "ef21"}},
            "adds up estimates",
        ),
        ({"attacks": {**ATTACK, "share": 0.2}, "local": {"recipe": "adamw"}}, "negative"),
        *(
            ({"attacks": {**ATTACK, "share": 0.2}, "local": {"recipe": recipe},
              "privacy": {"noise": 1.0, "lot": 6.0}}, "negative")
            for recipe in ("dp-adam", "disk-sgd", "disk-muon")
        ),
        (
            {"attacks": {**ATTACK, "share": 0.2}, "local": {"recipe": "dp-muon"},
             "privacy": {"noise": 1.0, "lot": 6.0}, "orthogonalizer": {"row-memory": 0.9}},
            "negative",
        ),
    ],
)  # fmt: skip
def test_wrong_settings_are_rejected(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words.replace(".", "\\.")):
        small(**tables)


@pytest.mark.parametrize(
    ("aggregate", "options", "limit"),
    [("median", {}, 1), ("geometric-median", {}, 1), ("centered-clipping", {}, 1),
     ("trimmed-mean", {"trim": 0.2}, 0), ("krum", {"faulty": 1}, 0)],
)  # fmt: skip
def test_more_hostile_clients_than_tolerated_are_rejected(
    aggregate: str, options: dict[str, Any], limit: int
) -> None:
    federation = {"clients": 4, "per-round": 4, "aggregate": aggregate, "options": options}
    with pytest.raises(InputError, match=rf"2 hostile clients among its 4 .* at most {limit}\."):
        built(small(federation=federation, attacks={**ATTACK, "clients": "0, 2"}))
    if limit:
        built(small(federation=federation, attacks={**ATTACK, "clients": "0"}))


def hostile_in_each_round(plan: RandomnessPlan, hostile: set[int]) -> list[tuple[int, int]]:
    """The number of hostile replies and of all replies that a round uses."""
    replies = [plan.participants(round).tolist() for round in range(plan.rounds)]
    return [(sum(client in hostile for client in clients), len(clients)) for clients in replies]


@pytest.mark.parametrize(
    "devices",
    [
        {},
        {"mode": "synchronous", "dropout": 0.3},
        {"mode": "deadline", "select": 5, "speeds": "log-normal"},
        {"mode": "fedbuff", "buffer": 3, "speeds": "log-normal"},
        {"mode": "threshold"},
    ],
)
def test_the_replies_of_each_round_decide_what_is_tolerated(devices: dict[str, Any]) -> None:
    """Simulated devices lose replies, and an asynchronous update uses only some."""
    federation = {"clients": 6, "per-round": 4, "rounds": 8}
    attacked = {**ATTACK, "clients": "0, 1"}
    plan = built(small(federation=federation, attacks=attacked, devices=devices)).plan
    counts = hostile_in_each_round(plan, {0, 1})
    wrong = [place for place, (bad, all_of) in enumerate(counts) if bad > (all_of - 1) // 2]
    assert wrong
    robust = {**federation, "aggregate": "median"}
    bad, all_of = counts[wrong[0]]
    words = f"round {wrong[0]} has {bad} hostile clients among its {all_of} participants"
    with pytest.raises(InputError, match=words):
        built(small(federation=robust, attacks=attacked, devices=devices))
    last = {**attacked, "from-round": wrong[-1] + 1}
    if wrong[-1] + 1 < plan.rounds:
        built(small(federation=robust, attacks=last, devices=devices))


def test_a_larger_buffer_makes_an_asynchronous_median_possible() -> None:
    federation = {"clients": 5, "per-round": 5, "aggregate": "median"}
    attacked = {**ATTACK, "clients": "0"}
    with pytest.raises(InputError, match=r"1 hostile .* its 1 .* at most 0.* raise \[devices\]"):
        built(small(federation=federation, attacks=attacked, devices={"mode": "threshold"}))
    built(small(federation=federation, attacks=attacked,
                devices={"mode": "threshold", "buffer": 5}))  # fmt: skip


def test_private_recipes_allow_attacks_that_follow_their_account() -> None:
    """The ledger of DP-SGD counts releases. A hostile client changes what it sends afterwards."""
    settings: dict[str, Any] = {"local": {"recipe": "dp-sgd", "lr": 0.1, "steps": 2},
                                "privacy": {"lot": 6.0, "bound": 0.2, "noise": 1.0,
                                            "insecure-reproducible-noise": True}}  # fmt: skip
    honest = built(small(**settings))
    hostile = built(small(**settings, attacks={**ATTACK, "share": 0.5}))
    assert honest.recipe.mechanism == hostile.recipe.mechanism
    assert not torch.equal(ended(honest).params["weight"], ended(hostile).params["weight"])


def test_a_stage_of_your_own_can_change_samples() -> None:
    class Zeros(Stage):
        changes_samples = True

        def samples(self, batch: Batch, client: int, round: int) -> Batch:
            return Batch(batch.inputs, batch.labels * 0)

    from dataclasses import replace

    made = built(small(local={"recipe": "fedavg", "lr": 0.5}))
    other = replace(made, recipe=replace(made.recipe, stages=(Zeros(),)))
    assert float((ended(made).params["weight"] - ended(other).params["weight"]).abs().max()) > 1e-3
