"""Check the archives with twine, and try the wheel in a clean environment of each Python.

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
TWINE = "twine==7.0.0"
# Folders of a user that have the names of our packages.
BESIDE = ("tests", "data", "fedmuon", "analysis", "server", "clients", "experiments")
GGUF = Path(__file__).with_name("read_gguf.py")
RUN = ("run", "--set", "federation.rounds=3", "--out", "runs/a")


def checked(*files: Path) -> tuple[bool, str]:
    """Whether a registry would accept the metadata and the README; what twine prints."""
    command = [*UV, "tool", "run", "--quiet", "--from", TWINE, "twine", "check", "--strict"]
    ended = subprocess.run([*command, *map(str, files)], capture_output=True, text=True,
                           env={**os.environ, "NO_COLOR": "1", "TERM": "dumb"})  # fmt: skip
    lines = (line.rpartition("/")[2] for line in (ended.stdout + ended.stderr).splitlines())
    return ended.returncode == 0, "\n".join(lines)


def attempt(python: str, wheel: Path, folder: Path) -> str:
    home = folder / python
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    bins = home / BINS
    elsewhere = folder_of_others(folder / f"run-{python}", BESIDE)
    version = "import platform; print(platform.python_version())"
    steps = {
        "is not installed": (*UV, "venv", "--quiet", "--no-python-downloads",
                             "--python", python, home),
        "cannot install": (*UV, "pip", "install", "--quiet", "--python", home,
                           "--constraint", CONSTRAINTS, wheel),
        "does not fit together": (*UV, "pip", "check", "--quiet", "--python", home),
        "fails `fedmuon doctor`": (bins / "fedmuon", "doctor"),
        "fails `fedmuon run`": (bins / "fedmuon", *RUN),
        "cannot install the extra llm": (*UV, "pip", "install", "--quiet", "--python", home,
                                         "--constraint", CONSTRAINTS, f"{wheel}[llm]"),
        "cannot read a GGUF file": (bins / "python", GGUF),
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
    """Print what twine says, and a line for each Python; 0 if nothing failed."""
    with tempfile.TemporaryDirectory(prefix="fedmuon-environments-") as place:
        folder = Path(place)
        sdist = archives.build(ROOT, folder, "sdist")
        wheel = archives.build(archives.unpack(sdist, folder), folder / "dist", "wheel")
        sound, told = checked(sdist, wheel)
        print(told, flush=True)
        seen = {python: attempt(python, wheel, folder) for python in pythons}
    for python, outcome in seen.items():
        print(f"Python {python}: {outcome}")
    good = [outcome for outcome in seen.values() if outcome.startswith("runs")]
    here = [outcome for outcome in seen.values() if not outcome.startswith("is not installed")]
    return int(not sound or not good or len(good) < len(here))


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or PYTHONS))
