"""The tutorial about language models: its config and commands, on a tiny model and tiny texts."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from small_suites import save_language_model
from suite_files import command

from fedmuon.config.load import parse

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "language-model.md"


def blocks(language: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the page with a tiny model, short windows and one text for each client."""
    task = {"weights": "tiny-model", "lora-rank": 2, "lora-layers": "*layers.1.*"}
    data = {"name": "text", "folder": "tiny-texts", "context": 12, "test": 16}
    short = {"task": {**config["task"], **task}, "data": {**config["data"], **data}}
    del short["data"]["options"]  # `windows` is an option of the packaged texts
    return {**config, **short}


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_language_model(tmp_path, texts=14)
    (toml,) = blocks("toml")
    assert toml.startswith("# books.toml\n")
    parse(tomllib.loads(toml))
    config = tiny(tomllib.loads(toml))
    assert config["federation"]["per-round"] <= 14 - config["data"]["unseen-clients"]
    (tmp_path / "books.toml").write_text(tomli_w.dumps(config))
    typed = [line for block in blocks("sh") for line in block.splitlines()]
    assert [shlex.split(line)[:2] for line in typed] == [
        ["fedmuon", "run"], ["fedmuon", "report"],
    ]  # fmt: skip
    for line in typed:
        command(*shlex.split(line)[1:])
    out = tmp_path / "runs" / "books"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rounds"] == config["federation"]["rounds"]
    assert {"unseen_loss", "unseen_perplexity", "client_text_loss_worst_decile"} <= {*summary}
    texts = json.loads((out / "continuations.json").read_text())
    page = (out / "report.html").read_text(encoding="utf-8")
    for text in texts:
        assert text["prompt"] in page and text["prompt"] in PAGE.read_text(encoding="utf-8")
