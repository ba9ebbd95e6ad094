"""FedMuon as a float64 NumPy loop: the oracle with which the other peers must agree.

    python reference.py WORK.npz OUT.npz              run the work, write final X and the time
    python reference.py --compare A.npz B.npz         print the relative distance of two results
    python reference.py --make WORK.npz [--seed S]    write a synthetic work file

The code is simple rather than fast: one client at a time, with a full SVD per step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from work import Work, load_work, report

Matrix = NDArray[np.float64]


def gradient(x: Matrix, inputs: Matrix, labels: NDArray[np.int64]) -> Matrix:
    """Return the gradient [d, c] of the mean of 1 - p_y with p = softmax(Xᵀu).

    The gradient of one sample with respect to the logits is -p_y (e_y - p).
    """
    logits = inputs @ x
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    every = np.arange(len(labels))
    p_true = p[every, labels]
    in_logits = p_true[:, None] * p
    in_logits[every, labels] -= p_true
    return inputs.T @ in_logits / len(labels)


def smoothed_polar(m: Matrix, lam: float) -> Matrix:
    """Return U diag(σ / √(σ² + λ)) Vᵀ for m = U diag(σ) Vᵀ of shape [d, c]."""
    u, sigma, vt = np.linalg.svd(m, full_matrices=False)
    return (u * (sigma / np.sqrt(sigma**2 + lam))) @ vt


def trajectory(work: Work) -> tuple[Matrix, list[float]]:
    """Return the final X [d, c], and the clock readings at the start and after every round."""
    data = [work.rows(i) for i in range(work.clients)]
    data = [(inputs.astype(np.float64), labels) for inputs, labels in data]
    x = work.x0.astype(np.float64)
    m = np.zeros_like(x)
    stamps = [perf_counter()]
    for chosen in work.schedule:
        xs, ms = [], []
        for client in chosen:
            g = gradient(x, *data[client])
            m_client = work.beta * m + (1 - work.beta) * g
            xs.append(x - work.lr * smoothed_polar(m_client, work.lam))
            ms.append(m_client)
        x, m = np.mean(xs, axis=0), np.mean(ms, axis=0)
        stamps.append(perf_counter())
    return x, stamps


def synthetic_rows(
    rng: np.random.Generator, n: int, d: int, c: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return unit-norm rows [n, d] around one nonnegative centre per class, and labels [n]."""
    labels = rng.integers(c, size=n)
    centres = rng.random((c, d))
    rows = np.maximum(centres[labels] + rng.standard_normal((n, d)), 0)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels


def dirichlet_clients(
    rng: np.random.Generator, labels: NDArray[np.int64], clients: int, alpha: float
) -> NDArray[np.int64]:
    """Return the client of each row [n], with Dirichlet(alpha) shares of each class.

    Every client gets at least one row.
    """
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        shares = rng.dirichlet(np.full(clients, alpha))
        owner[mine] = rng.choice(clients, size=len(mine), p=shares)
    owner[rng.choice(len(labels), size=clients, replace=False)] = np.arange(clients)
    return owner


def make_work(path: str, seed: int, n: int, rounds: int) -> None:
    """Write a synthetic work file: N = 20 clients, K = 5 per round, d = 784, c = 10.

    The norm of the initial model is close to the length of the whole trajectory. A larger initial
    model would hide errors: even the effect of a wrong β would be below 1e-4 of its norm.
    """
    rng = np.random.default_rng(seed)
    inputs, labels = synthetic_rows(rng, n, 784, 10)
    np.savez(
        path,
        inputs=inputs,
        labels=labels,
        client=dirichlet_clients(rng, labels, clients=20, alpha=0.5),
        schedule=np.array([rng.choice(20, size=5, replace=False) for _ in range(rounds)]),
        x0=(1e-4 * rng.standard_normal((784, 10))).astype(np.float32),
        lr=0.01,
        lam=0.1,
        beta=0.9,
    )


def relative_distance(ours: str | Path, theirs: str | Path) -> float:
    """Return ‖X_theirs - X_ours‖_F / ‖X_ours‖_F for two result files."""
    with np.load(ours) as a, np.load(theirs) as b:
        return float(np.linalg.norm(b["x"] - a["x"]) / np.linalg.norm(a["x"]))


def main() -> None:
    """Run a work file, compare two results, or make a work file."""
    parser = argparse.ArgumentParser(description="FedMuon as a float64 NumPy loop.")
    parser.add_argument("work", nargs="?", help="work file to run")
    parser.add_argument("out", nargs="?", help="result file to write")
    parser.add_argument("--make", metavar="WORK", help="write a synthetic work file")
    parser.add_argument("--compare", nargs=2, metavar=("ORACLE", "PEER"), help="two result files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=50)
    asked = parser.parse_args()
    if asked.make:
        make_work(asked.make, asked.seed, asked.samples, asked.rounds)
    elif asked.compare:
        print(f"{relative_distance(*asked.compare):.3e}")
    elif asked.work and asked.out:
        report("reference", asked.out, *trajectory(load_work(asked.work)))
    else:
        parser.error("give WORK.npz OUT.npz, --make or --compare")


if __name__ == "__main__":
    main()
