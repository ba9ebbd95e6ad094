"""What a command prints can be read on any terminal: of any encoding, of any size."""

import contextlib
import io
import itertools
import os
import sys
from pathlib import Path

import pytest
from conftest import quick, small

from fedmuon.__main__ import main
from fedmuon.core.start import print_anywhere, require_room
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import neighbours

COMMANDS = {
    "run": ["run", "--out", "{}/plain", "--resume"],
    "stability": ["stability", "--out", "{}/near", "--resume"],
    "show": ["show", "{}/plain"],
    "show a stability run": ["show", "{}/near"],
    "show a private run": ["show", "{}/private"],
    "ls": ["ls", "{}"],
    "compare": ["compare", "{}/plain", "{}/near", "{}/private"],
    "bound": ["bound", "{}/near"],
    "flops": ["flops", "--model", "cnn"],
    "privacy epsilon": ["privacy", "epsilon", "--noise=1", "--lot=8", "--population=64",
                        "--steps=4", "--delta=1e-3"],
    "privacy spent": ["privacy", "spent", "{}/private"],
    "config explain": ["config", "explain", "local.lr"],
    "list": ["list", "recipes"],
    "an error": ["show", "{}/ε"],
    "help": ["--help"],
    "help of bound": ["bound", "--help"],
    "help of audit": ["privacy", "audit", "--help"],
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("terminal")
    short = {"federation": {"rounds": 3}, "output": {"evaluate-every": 1}}
    execute(small(short), root / "plain")
    neighbours.execute(small(short, stability={"trials": 2}), root / "near")
    private = {"local": {"recipe": "dp-muon"}, "privacy": {"lot": 5.0, "noise": 1.0}}
    execute(small(short, **private), root / "private")
    return root


def output(encoding: str, patch: pytest.MonkeyPatch) -> io.TextIOWrapper:
    """A stdout and stderr that can hold no more than this encoding."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding, errors="strict", write_through=True)
    for name in ("stdout", "stderr"):
        patch.setattr(sys, name, stream)
    return stream


def received(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


EACH = [*itertools.product(COMMANDS, ("ascii", "latin-1", "cp437"))]
LARGEST = ("run", "utf-8")  # which has all characters, as everywhere else in the tests


@pytest.mark.parametrize(
    ("command", "encoding"), quick([*EACH, LARGEST], [*EACH[::3], *EACH[1:3], LARGEST])
)
def test_every_command_prints_in_any_encoding(
    command: str, encoding: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [one.format(runs) for one in COMMANDS[command]]
    monkeypatch.setattr(sys, "argv", ["fedmuon", *words])
    stream = output(encoding, monkeypatch)
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    said = received(stream)
    assert code in (0, None) or (command, code) == ("an error", 2), said
    assert said.strip() and "Traceback" not in said and "UnicodeEncodeError" not in said


def test_what_an_encoding_lacks_is_spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = output("ascii", monkeypatch)
    print_anywhere()
    print("η = 10⁻⁵, |x| ≤ 2², a – b, x₀, λ, Δ, ±1")
    print("▁█┤⠁⠀└─")
    print("données \udcff")
    assert received(stream).splitlines() == [
        "eta = 10^-5, |x| <= 2^2, a - b, x0, lambda, Delta, +-1",
        "_#|* +-",
        r"donn\xe9es \udcff",
    ]


@pytest.mark.parametrize(("said", "columns", "lines"), [
    *((one, None, None) for one in ("0", "-5", "wide", "²", "", "9" * 5000)),
    ("1", None, "1"), ("100000", "1000", "1000"), ("20", "20", "20"), ("120", "120", "120"),
])  # fmt: skip
def test_no_size_of_a_terminal_hides_what_is_printed(
    said: str, columns: str | None, lines: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Impossible values of COLUMNS and LINES count as not set."""
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, said)
    require_room()
    assert (os.environ.get("COLUMNS"), os.environ.get("LINES")) == (columns, lines)


def test_a_command_looks_at_the_size_before_it_prints(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedmuon", "show", str(runs / "plain")])
    shown = set()
    for size in ("80", "0", "1", "-1", "x"):
        monkeypatch.setenv("COLUMNS", size)
        with contextlib.suppress(SystemExit):
            main()
        shown.add(capsys.readouterr().out)
    assert len(shown) == 1 and "train loss" in shown.pop()
