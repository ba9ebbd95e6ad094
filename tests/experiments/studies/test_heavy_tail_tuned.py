"""Muon's step size in suite heavy-tail is not its best, so its comparison with SGD is unfair."""

from dataclasses import replace

import numpy as np
import pytest

from fedmuon.experiments.studies import heavy_tail

SETTINGS = heavy_tail.Settings(
    alphas=[1.4, 2.0], steps=[1024, 2048], seeds=16, noise=0.05, margin=0.1, sigma1=0.04,
    distance=0.5, factors=[0.25, 0.5, 1.0, 2.0, 4.0],
)  # fmt: skip


def gradients(method: str, factors: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> dict:
    """alpha -> the smallest mean gradient norm, over schedules and factors of their step sizes."""
    usual = heavy_tail.groups(SETTINGS, method, 1024)

    def scaled(*_: object) -> list[heavy_tail.Group]:
        return [replace(one, rate=c * one.rate, factor=c) for one in usual for c in factors]

    if method != "sgd":
        monkeypatch.setattr(heavy_tail, "groups", scaled)
    rows = heavy_tail.measure(SETTINGS, method, 1024)["rows"]
    monkeypatch.undo()
    means: dict[tuple, list[float]] = {}
    for row in rows:
        named = row["alpha"], row["schedule"], row["factor"]
        means.setdefault(named, []).append(row["mean_gradient"])
    return {
        alpha: min(float(np.mean(each)) for named, each in means.items() if named[0] == alpha)
        for alpha in SETTINGS.alphas
    }


@pytest.mark.slow
def test_half_the_step_size_is_better_for_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    sgd = gradients("sgd", (), monkeypatch)
    half = gradients("muon-exact", (0.5,), monkeypatch)
    usual = gradients("muon-exact", (1.0,), monkeypatch)
    assert sgd[1.4] > 1.3 * half[1.4] and sgd[2.0] < 0.7 * half[2.0]
    assert all(half[alpha] < 0.96 * usual[alpha] for alpha in SETTINGS.alphas)
