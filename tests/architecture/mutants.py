"""Whether the tests of a package notice a broken line in it.

    python -m tests.architecture.mutants              (in a temporary copy of HEAD)
    python -m tests.architecture.mutants --only 3 14

Each mutant changes one line. It is caught if the quick tests of its package's own folder fail. The
exit code is 0 if all are caught. `clients` and `server` share their tests: a message has two ends.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# (package, the code that is there once, what takes its place)
MUTANTS = (
    ("fedmuon/core", "key = (int(what), round, client, step", "key = (int(what), round, client, 0"),
    ("fedmuon/orthogonalize", "(15 / 8, -10 / 8, 3 / 8)", "(15 / 8, -10 / 8, 3.1 / 8)"),
    ("fedmuon/orthogonalize", "return math.sqrt(rank) * deviation", "return deviation"),
    ("fedmuon/data", "standard_gamma(alpha, clients)", "standard_gamma(1.0, clients)"),
    ("fedmuon/data", "normalize, replacement[changed])", "normalize, position[changed])"),
    ("fedmuon/tasks", "ratio.clamp(max=1.0)", "ratio.clamp(max=1.01)"),
    ("fedmuon/tasks", "(1 - 2 * low) * (1 + parts)", "(1 - 2 * low)"),
    ("fedmuon/config", "federation.clients * data.minimum > data.train", "False"),
    ("fedmuon/privacy", "math.log(delta * order) / (order - 1)", "math.log(delta) / (order - 1)"),
    ("fedmuon/privacy", "scale * (1 + slack(value.dtype)) * entries", "scale * entries"),
    ("fedmuon/optim", "per_replica(1 - ADAM_MEMORY**steps", "per_replica(1 - ADAM_MEMORY"),
    ("fedmuon/optim", "len(replies) - faulty - 2", "len(replies) - faulty - 1"),
    ("fedmuon/federated", "sorted(replies, key=lambda reply: reply.client), States()",
     "list(replies), States()"),
    ("fedmuon/runs", 'metadata.get("run") != self.mark', 'metadata.get("run") is None'),
    ("clients", "factor=lambda round: factor)", "factor=lambda round: 1.0)"),
    ("server", "!= (self.state.round, client)", '!= (self.state.round, who["partition"])'),
    ("analysis/theory", "2 * math.sqrt(beta * growth)", "math.sqrt(beta * growth)"),
    ("analysis/report", "(shares**2 / (counts - 1))", "(shares**2 / counts)"),
    ("experiments/stability", "radius * math.sqrt(run.sizes.max())", "radius"),
    ("experiments/studies", "2**order * gamma((1 + order) / 2)", "order * gamma((1 + order) / 2)"),
    # Rounds, cohorts, oracles and stages.
    ("fedmuon/federated", "for stage in reversed(recipe.stages):\n        read, states",
     "for stage in recipe.stages:\n        read, states"),
    ("fedmuon/federated", "for stage in reversed(recipe.stages):\n        trees = stage.open",
     "for stage in recipe.stages:\n        trees = stage.open"),
    ("fedmuon/federated", "(1 + late) ** -0.5", "1.0"),
    ("fedmuon/federated", "start.round == state.round and self.exact",
     "start.round == state.round"),
    ("fedmuon/federated", "if state.round >= oldest)", "if state.round > oldest)"),
    ("fedmuon/federated", "self._next = self._next or after", "self._next = after"),
    ("fedmuon/federated", ".clamp(-LARGE, LARGE)", ""),
    ("fedmuon/optim", '1 if self.feedback == "error" else -1', "1"),
    ("fedmuon/optim", "            if memory:\n                stored = memory[PERSONAL]",
     "            if False:\n                stored = memory[PERSONAL]"),
    ("fedmuon/optim", 'if self.level.trust == "central":', 'if self.level.trust != "local":'),
)  # fmt: skip
TESTS = {"clients": "server"}


def main() -> int:
    """Try the mutants one after the other and print which are caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture.mutants")
    parser.add_argument("--only", nargs="+", type=int, default=range(1, len(MUTANTS) + 1))
    parser.add_argument("--workers", default="2", help="of pytest: 2")
    asked = parser.parse_args()
    caught = 0
    with tempfile.TemporaryDirectory(prefix="fedmuon-mutants-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", ROOT, "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", tree, "HEAD"], check=True)
        try:
            for number in asked.only:
                package, old, new = MUTANTS[number - 1]
                start = time.perf_counter()
                noticed = _is_caught(tree, package, old, new, asked.workers)
                caught += noticed
                seconds = time.perf_counter() - start
                word = "caught" if noticed else "MISSED"
                print(f"{number:2} {word} {seconds:4.0f} s  {package}: {old} -> {new}", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)
    print(f"{caught} of {len(asked.only)} caught")
    return 0 if caught == len(asked.only) else 1


def _is_caught(tree: Path, package: str, old: str, new: str, workers: str) -> bool:
    """Whether the package's own quick tests fail while `new` stands for `old`."""
    hits = [file for file in sorted((tree / package).rglob("*.py")) if old in file.read_text()]
    if len(hits) != 1 or hits[0].read_text().count(old) != 1:
        sys.exit(f"{old!r} is not there exactly once in {package}: {list(map(str, hits))}")
    before = hits[0].read_text()
    hits[0].write_text(before.replace(old, new))
    try:
        tests = f"tests/{TESTS.get(package, package)}"
        found = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-n", workers, tests],
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        hits[0].write_text(before)
    failed = "\nFAILED " in found.stdout  # workers that stop at the first failure exit with 2
    if found.returncode != 0 and not failed:
        sys.exit(f"pytest did not run the tests of {package}:\n{found.stdout[-2000:]}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
