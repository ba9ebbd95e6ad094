"""Audits and accounts under distributed trust: of a cohort's shares of noise, those that count."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_client_audits import ENTRIES, ONCE, audited, auditor, experiment, given
from test_client_level import clients
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.experiments.auditing import one_run
from fedmuon.experiments.auditing.clients import ClientAuditor
from fedmuon.experiments.run import execute
from fedmuon.federated import accountant
from fedmuon.federated.rounds import Reply, begin, broadcast, client_updates, joint
from fedmuon.privacy.mechanisms import distributed
from fedmuon.privacy.mechanisms.client_level import ClientLevel
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.per_example.clipping import Clipping

SHARED = {"cohorts": "fixed", "trust": "distributed", "honest": 0.5}


def seen_shares(seen: ClientAuditor, canaries: Any) -> Iterator[tuple[Tensor, int]]:
    """What colluders leave of a round of zeros in which these have canaries, and of how many."""
    level, zeros = seen.level, torch.zeros(1, 40_000)
    sent = [
        Reply(k, level.perturbed({"model": {"a": zeros}}, {"model": {"a": zeros}}, 0, k)["model"],
              {}, torch.zeros(1))
        for k in range(level.cohort)
    ]  # fmt: skip
    looked: list[tuple[Tensor, int]] = []
    seen._look = lambda moved, rates, share=1.0: looked.append(  # type: ignore[method-assign]
        (moved, round(share * level.cohort))
    )
    seen._look_behind(sent, np.isin(seen.clients, canaries).astype(float))
    yield from looked


@pytest.mark.parametrize(("canaries", "shares"), [([1, 5], 4), ([0, 1, 2, 4, 5, 7], 6)])
def test_colluders_leave_the_noise_of_the_shares_that_count(
    canaries: list[int], shares: int
) -> None:
    """n / K of (sigma C)^2, n = max(H, canaries in the cohort); 3% is 4 deviations. That of the
    release, a control, is K / n times as large."""
    level = ClientLevel(0.5, 0.7, 8, 20, "distributed", False, seed=3, honest=0.5)
    there = np.array(canaries)
    seen = ClientAuditor(level, there, there > 0, 7 * there, np.ones(len(there)))
    ((moved, counted),) = seen_shares(seen, canaries)
    assert counted == shares == seen.shares_seen and level.shares == 4
    assert float(moved.var()) == pytest.approx((0.7 * 0.5) ** 2 * shares / 8, rel=0.03)


def test_what_colluders_leave_is_the_sum_of_canaries_and_of_others_up_to_the_honest() -> None:
    """By a loop, behind noise of 1e-5; with one client more the sum is another, a control."""
    made, open_ = (experiment(given({**SHARED, "noise": 1e-5} if shared else {"cohorts": "fixed"}))
                   for shared in (True, False))  # fmt: skip
    start, level = begin(made.recipe, made.task, 0), made.recipe.client_level
    assert level is not None and open_.recipe.client_level is not None
    seen = auditor(made, [*range(9)], [True, False] * 4 + [True])
    next(seen.rounds(made, start))
    chosen = made.plan.participants(0).tolist()
    own, rest = ([one for one in chosen if (one < 9) == there] for there in (True, False))
    sent, ((y, s, rates),) = broadcast(made.recipe, start), seen.seen
    assert 0 < len(own) < 9 and rates.tolist() == [one in own for one in range(9)]

    def total(count: int) -> np.ndarray:
        found = np.zeros(ENTRIES)
        others = [(one, made.shards[one]) for one in rest[: count - len(own)]]
        for reply in client_updates(open_.recipe, made.task, made.plan, others, sent):
            each, held = (joint(made.recipe, one.params, one.states) for one in (reply, sent))
            found += level.clipped(held, each)["model"]["weight"].numpy().ravel()
        for i in own:
            found[seen.entries[i]] += level.bound * seen.signs[i] * seen.included[i]
        return found

    exact = [total(count) for count in (level.shares, level.shares + 1)]
    near = [float(np.abs(y / s * level.bound - one[seen.entries] * seen.signs).max())
            for one in exact]  # fmt: skip
    assert seen.shares_seen == level.shares == 10 and near[0] < 1e-4 < near[1]
    assert s == pytest.approx(level.bound**2 / np.mean(exact[0] ** 2), rel=1e-3)


@pytest.mark.parametrize("sees", [pytest.param("releases", marks=pytest.mark.slow), "model"])
def test_an_audit_says_how_many_shares_of_noise_it_sees(
    sees: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as count, where canaries are no more; of the model all. Other runs have no words. The
    sigma that it refutes is that of all shares, of whose variance it sees a part."""
    judged, least = one_run.judged, list[float]()
    monkeypatch.setattr(one_run, "judged", lambda *given: (
        least.append(judged(*given[:4])["noise_at_most"]) or judged(*given)))  # fmt: skip
    record = audited(given(SHARED, **ONCE), tmp_path / "run", sees=sees)
    seen = 40 if sees == "releases" else 80
    assert (record["honest"], record["shares"], record["shares_seen"]) == (40, 80, seen)
    assert record["below"] and record["adjacency"] == "zero-out"
    most = least[0] and pytest.approx(least[0] * math.sqrt(80 / seen), rel=1e-12)
    assert record["noise_at_most"] == most and (least[0] or sees == "model")  # of which any may be
    assert record == json.loads((tmp_path / "run" / one_run.AUDIT).read_text())
    caption = one_run._caption(record)
    assert f"up to {seen} of 80 shares of noise" in caption
    assert ("epsilon counts 40 alone" in caption) == (sees == "model")
    plain = audited(given({"cohorts": "fixed"}, **ONCE), tmp_path / "plain")
    assert "shares" not in plain and "shares of noise" not in one_run._caption(plain)


@pytest.mark.parametrize("quiet", [1, 20])
def test_shares_with_too_little_noise_are_caught(
    quiet: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = distributed.gaussian
    monkeypatch.setattr(distributed, "gaussian", lambda *rest: true(*rest) // quiet)
    found = audited(given({**SHARED, "noise": 4.0, "delta": 1e-5}, **ONCE), tmp_path / "run", 40)
    assert found["below"] == (quiet == 1)
    assert (found["right"] == found["guesses"] == 40) == (quiet == 20)


def test_noise_too_little_for_the_account_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """One share of three counts: sigma / sqrt(3) is below what accountants compute; of all three,
    or with the noise that is named, it is not, and under central trust neither."""
    few = {**SHARED, "honest": 0.34}
    of_shares = (
        r"noise = 1e-06 is too little, as only 1 of 3 shares of it count \(honest = 0\.34\): set "
        r"noise = 1\.74e-06 or more, or honest = 1$"
    )
    with pytest.raises(InputError, match=of_shares):
        execute(clients("fedavg", noise=1e-6, **few), tmp_path / "a")
    assert not list(tmp_path.iterdir())
    kinds = {"all": {**SHARED, "honest": 1.0}, "central": {"cohorts": "fixed"},
             "louder": {**few, "noise": 1.74e-6}}  # fmt: skip
    for name, more in kinds.items():
        execute(clients("fedavg", **{"noise": 1e-6, "rounds": 1, **more}), tmp_path / name)


@pytest.mark.parametrize(
    ("noise", "honest", "cohort"),
    [(1e-6, 0.1, 40), (3e-6, 0.01, 200), (1e-7, 0.5, 40), (1e-7, 1.0, 3)],
)
def test_too_little_noise_names_the_least_that_is_enough(
    noise: float, honest: float, cohort: int
) -> None:
    """What is named passes, and a hundredth less noise does not; honest is named where it helps."""

    def require(noise: float, **more: Any) -> None:
        level = ClientLevel(1.0, 1.0, cohort, cohort, "distributed", False)
        held = replace(level, **{"honest": honest, **more})
        object.__setattr__(held, "noise", noise)  # less than its sums can be made of
        accountant.require_counted(held, {1.0}, 1, 1, 1e-5, [])

    with pytest.raises(InputError, match=rf"noise = {noise:g} is too little.* or more") as error:
        require(noise)
    assert ("shares of it count" in str(error.value)) == (honest < 1)
    mend = str(error.value).partition(": ")[2]
    named = {key: float(value) for key, value in re.findall(r"(\w+) = (\S+)", mend)}
    assert named["noise"] > noise and ("honest" in named) == (noise >= 1e-6)
    require(named["noise"])
    if "honest" in named:
        require(noise, honest=named["honest"])
    with pytest.raises(InputError, match="too little"):
        require(0.99 * named["noise"])


def test_too_little_noise_of_samples_names_the_key() -> None:
    mechanism = Mechanism(Clipping("block", 1.0), 1e-7, 8.0)
    with pytest.raises(InputError, match=r"\[privacy\] noise = 1e-07 .* set noise = 1e-06 or more"):
        accountant.require_counted(mechanism, {0.1}, 1, 1, 1e-5, [])
    accountant.require_counted(
        replace(mechanism, noise=1e-6), {0.1}, 1, 1, 1e-5, [torch.ones(1, 2)]
    )


def test_sums_that_would_wrap_around_name_the_noise_that_is_enough() -> None:
    cohort = 10**6
    with pytest.raises(InputError, match="would wrap around: set noise = ") as error:
        distributed.reach(1.0, cohort)
    least = float(re.findall(r"set noise = (\S+)", str(error.value))[0])
    distributed.reach(least, cohort)
    with pytest.raises(InputError, match="would wrap around"):
        distributed.reach(0.99 * least, cohort)


@pytest.mark.parametrize(("count", "noise"), [(10, 0.7), (40, 4.0)])
def test_an_audit_that_cannot_test_its_claim_says_so_before_the_run(
    count: int, noise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where nothing is hidden, so that all guesses are right, is such a claim refuted; one
    of which nothing is said is."""
    true, told = distributed.gaussian, list[tuple[str, bool]]()
    monkeypatch.setattr(distributed, "gaussian", lambda *rest: true(*rest) // 20)
    out, settings = tmp_path / "run", given({**SHARED, "noise": noise, "delta": 1e-5}, **ONCE)
    record = audited(settings, out, count, say=lambda note: told.append(
        (note, (out / "summary.json").exists())))  # fmt: skip
    few = count == 10
    assert told == [(record["note"], False)] and bool(record["note"]) == few
    assert record["below"] == few and record["right"] == record["guesses"]
    assert record["epsilon_at_least"] == pytest.approx(record["most_by_counts"], abs=1e-3)
    assert (record["note"] in one_run._caption(record)) and (
        f"{record['most_by_counts']:.4g} at most" in record["note"]) == few  # fmt: skip
    assert not few or f"the {record['epsilon']:.4g} that is claimed" in record["note"]
