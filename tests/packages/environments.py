"""The wheel in a clean environment of every Python that is here, and a run in another folder.

PYTHONPATH=tests python -m packages.environments 3.11 3.12 3.13
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import archives
from .archives import BINS, UV, folder_of_others
from .pins import CONSTRAINTS, ROOT

PYTHONS = ("3.11", "3.12", "3.13")
# Folders that a user may well have beside the runs, named as ours are.
BESIDE = ("tests", "data", "fedmuon", "analysis", "server", "clients", "experiments")
RUN = ("run", "--set", "federation.rounds=3", "--out", "runs/a")


def attempt(python: str, wheel: Path, folder: Path) -> str:
    home = folder / python
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    bins = home / BINS
    elsewhere = folder_of_others(folder / f"run-{python}", BESIDE)
    version = "import platform; print(platform.python_version())"
    steps = {
        "is not here": (*UV, "venv", "--quiet", "--no-python-downloads", "--python", python, home),
        "cannot install": (*UV, "pip", "install", "--quiet", "--python", home,
                           "--constraint", CONSTRAINTS, wheel),
        "does not fit together": (*UV, "pip", "check", "--quiet", "--python", home),
        "fails `fedmuon doctor`": (bins / "fedmuon", "doctor"),
        "fails `fedmuon run`": (bins / "fedmuon", *RUN),
        "has no version": (bins / "python", "-c", version),
    }  # fmt: skip
    said = ""
    for failure, command in steps.items():
        ended = subprocess.run(list(map(str, command)), cwd=elsewhere, env=environment,
                               capture_output=True, text=True)  # fmt: skip
        if ended.returncode:
            return f"{failure}: {(ended.stderr or ended.stdout).strip()[-300:]}"
        said = ended.stdout.strip()
    return f"runs ({said})"


def main(pythons: tuple[str, ...]) -> int:
    """Print a line for each Python; 0 if it runs in all that are here."""
    with tempfile.TemporaryDirectory(prefix="fedmuon-environments-") as place:
        folder = Path(place)
        tree = archives.unpack(archives.build(ROOT, folder, "sdist"), folder)
        wheel = archives.build(tree, folder / "dist", "wheel")
        seen = {python: attempt(python, wheel, folder) for python in pythons}
    for python, outcome in seen.items():
        print(f"Python {python}: {outcome}")
    good = [outcome for outcome in seen.values() if outcome.startswith("runs")]
    here = [outcome for outcome in seen.values() if not outcome.startswith("is not here")]
    return int(not good or len(good) < len(here))


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or PYTHONS))
