"""Pinned versions and the hashes of their files: read, and made anew.

`constraints.txt` says the versions and is the only file here that is edited by hand. From it come
`requirements/*.txt`, with the hash of every file of each release, so that any platform and any
Python verifies what it downloads. Change a line of constraints.txt, or take it out to get the
newest release, then:

    PYTHONPATH=tests python -m packages.pins
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
FOLDER = ROOT / "requirements"
NAMES = ("build", "torch", "cuda", "dev", "bench", "docs")
# Builds for processors alone, which PyTorch publishes beside the registry: Linux on x86-64 for
# Python 3.11 (these bytes were tested), 3.12 and 3.13 (as others have published them).
BESIDE = {
    ("torch", "2.13.0"): (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
    )
}
# What builds wheels from sources: our own, and rouge-score, which has no wheel.
BACKENDS = "hatchling>=1.24\neditables>=0.5\nsetuptools>=77\n"
EARLIER = {"blazefl"}  # asks for Python 3.12, and runs under 3.11: `make bench` installs it there
CUDA = ("cuda-", "nvidia-", "triton")
ABOUT = {
    "torch": "Its builds: `make install` takes the one that the machine prefers.",
    "build": "What builds this package and the only dependency that comes as a source.",
    "dev": "What `make run`, `make test` and `make check` need.",
    "bench": "What `make bench` needs beside that.",
    "docs": "What `make docs` needs beside that.",
    "cuda": "What torch needs beside that where its build is one for CUDA.",
}


@dataclass(frozen=True)
class Pin:
    """One version of one package, where it is needed, and the hashes of its files."""

    name: str
    version: str
    marker: str = ""
    hashes: tuple[str, ...] = ()

    def __str__(self) -> str:
        first = f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")
        return " \\\n    ".join([first, *(f"--hash=sha256:{digest}" for digest in self.hashes)])


Pins = dict[str, Pin]


def parse(text: str) -> Pins:
    """Pins by their normalized names; a line that pins nothing, or a second time, is an error."""
    pins: Pins = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        seen = re.fullmatch(
            r"([\w.-]+)==([\w.]+)( *;[^#]*?)?((?: +--hash=sha256:[0-9a-f]{64})*) *", line
        )
        if not seen:
            raise ValueError(f"not a pin: {line[:80]}")
        name, version, marker, hashes = seen.groups()
        pin = Pin(
            normal(name), version, (marker or "").strip(" ;"), tuple(re.findall(r"\w{64}", hashes))
        )
        if pin.name in pins:
            raise ValueError(f"pinned twice: {name}")
        pins[pin.name] = pin
    return pins


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read(name: str) -> Pins:
    return parse((FOLDER / f"{name}.txt").read_text(encoding="utf-8"))


def flaws(constraints: Pins, files: dict[str, Pins]) -> list[str]:
    """What is wrong with the pins, in sentences: every one has a home, a version, and hashes."""
    found = []
    homes: dict[str, str] = {}
    for file, pins in files.items():
        for pin in pins.values():
            if pin.name in homes:
                found.append(f"{pin.name} is in {homes[pin.name]} and in {file}.")
            homes[pin.name] = file
            if not pin.hashes:
                found.append(f"{pin.name} in {file} has no hash.")
            if pin.name not in constraints:
                found.append(f"{pin.name} in {file} is not in constraints.txt.")
            elif constraints[pin.name].version != pin.version:
                found.append(f"{pin.name} in {file} has another version than in constraints.txt.")
    return found + [f"{name} has no hashes." for name in sorted(set(constraints) - set(homes))]


def resolve(*arguments: str, wanted: str = "") -> Pins:
    """The pins, for all platforms and Pythons, of `wanted` and what `arguments` name."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
    command += ["--python-version", "3.11", "--constraint", str(CONSTRAINTS), "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", *arguments, "-"]
    ended = subprocess.run(command, input=wanted, capture_output=True, text=True, cwd=ROOT)
    if ended.returncode:
        raise SystemExit(f"the pins of constraints.txt do not fit together: {ended.stderr}")
    return parse(ended.stdout)


def apart(dev: Pins, docs: Pins, everything: Pins, build: Pins) -> dict[str, list[Pin]]:
    """All pins, each in the one file that installs it; `docs` has those of dev, too."""
    homes: dict[str, list[Pin]] = {name: [] for name in NAMES}
    for name, pin in sorted((everything | build).items()):
        more = (*pin.hashes, *BESIDE.get((name, pin.version), ()))
        marker = "" if name in EARLIER else pin.marker
        full = replace(pin, marker=marker, hashes=tuple(sorted(set(more))))
        homes[_home(name, dev, docs, build)].append(full)
    return homes


def _home(name: str, dev: Pins, docs: Pins, build: Pins) -> str:
    if name == "torch":
        return "torch"
    if name.startswith(CUDA):
        return "cuda"
    if name in build:
        return "build"
    homes = {"dev": dev, "docs": docs}
    return next((home for home, pins in homes.items() if name in pins), "bench")


def write(homes: Mapping[str, Iterable[Pin]]) -> None:
    FOLDER.mkdir(exist_ok=True)
    how = "# Made from constraints.txt by `PYTHONPATH=tests python -m packages.pins`.\n"
    for name, pins in homes.items():
        text = f"# {ABOUT[name]}\n{how}" + "".join(f"{pin}\n" for pin in pins)
        (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
    head = "# Every version that the tests have passed with; requirements/ has the hashes.\n"
    pins = sorted((pin for pins in homes.values() for pin in pins), key=lambda pin: pin.name)
    lines = "".join(f"{pin.name}=={pin.version}\n" for pin in pins)
    CONSTRAINTS.write_text(head + lines, encoding="utf-8")


def main() -> None:
    project = "pyproject.toml"
    dev = resolve("--extra", "dev", project)
    docs = resolve("--extra", "dev", "--extra", "docs", project)
    extras = [word for extra in ("dev", "docs", "bench") for word in ("--extra", extra)]
    write(apart(dev, docs, resolve(*extras, project), resolve(wanted=BACKENDS)))


if __name__ == "__main__":
    main()
