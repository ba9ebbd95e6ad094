"""What the README tells people to type does what it says."""

import re
import shlex
from pathlib import Path

import pytest

from fedmuon.experiments.cli import main

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
ELSEWHERE = (
    "--engine ray",  # tests/test_engines_agree.py
    "--engine deployment",  # tests/test_deployment.py
)


def commands() -> list[str]:
    """Every `fedmuon` line of the README's shell blocks, in their order."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    plain = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    return [
        line
        for line in plain
        if line.startswith("fedmuon ") and not any(other in line for other in ELSEWHERE)
    ]


def written(command: str) -> str | None:
    """The folder that a command makes."""
    words = shlex.split(command)
    return words[words.index("--out") + 1] if "--out" in words and "--resume" not in words else None


def read(command: str) -> list[str]:
    """The folders, made by other commands, that a command goes on with or reads."""
    own = written(command)
    known = [out for other in commands() if (out := written(other))]
    return [out for out in known if out in shlex.split(command) and out != own]


class Reader:
    """Types the commands in a folder of its own, and before each what it needs, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: set[str] = set()
        controlled = next(block for block in re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
                          if "steps = 1" in block)  # fmt: skip
        (folder / "controlled.toml").write_text(controlled)

    def types(self, command: str) -> None:
        """Run a command, unless it already ran for the sake of another."""
        if command in self._done:
            return
        for other in commands():
            if written(other) in read(command):
                self.types(other)
        if "report runs" in command:
            self.types(commands()[1])  # it makes a page of whatever is there
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command)[1:])
        assert ended.value.code == 0, command
        self._done.add(command)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """One folder for all commands, as a reader has."""
    return Reader(tmp_path_factory.mktemp("readme"))


@pytest.mark.parametrize("command", commands(), ids=lambda one: one[8:88])
def test_a_command_runs(command: str, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader.folder)
    reader.types(command)
    if "report runs" in command:
        assert (reader.folder / "runs" / "report.html").exists()


def test_the_commands_are_found() -> None:
    assert len(commands()) >= 20 and len(set(commands())) == len(commands())
    resumed = next(one for one in commands() if "--resume" in one)
    assert read(resumed) == ["runs/a"] and read(commands()[1]) == []
    assert read(next(one for one in commands() if "bound runs/s" in one)) == ["runs/s"]


def test_python_lines_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(block, {})
