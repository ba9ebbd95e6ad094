"""What the README tells people to type does what it says."""

import re
import shlex
from pathlib import Path

import pytest

from experiments.cli import main

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
ELSEWHERE = (
    "--engine ray",  # tests/test_engines_agree.py
    "--engine deployment",  # tests/test_deployment.py
)


def commands() -> list[list[str]]:
    """Arguments of every `fedmuon` line of the README's shell blocks, in their order."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [
        shlex.split(line, comments=True)[1:]
        for line in lines
        if line.startswith("fedmuon ") and not any(other in line for other in ELSEWHERE)
    ]


@pytest.mark.timeout(400)
def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    controlled = next(block for block in re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
                      if "steps = 1" in block)  # fmt: skip
    Path("controlled.toml").write_text(controlled)
    assert len(commands()) >= 10
    for arguments in commands():
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0, arguments
    assert (tmp_path / "runs" / "report.html").exists()


def test_python_lines_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, {})
