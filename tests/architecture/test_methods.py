"""Every method has a page, and what the pages say in words is about methods that exist."""

from pathlib import Path

import pytest

from docs.making import methods
from fedmuon.config.methods import BUILT_IN, PRIVATE

NAMED = [*BUILT_IN]


def test_every_method_has_words_a_group_and_a_page() -> None:
    assert {*methods.WORDS} <= {*NAMED}
    assert sorted(name for names in methods.GROUPS.values() for name in names) == sorted(NAMED)
    assert {one.stem for one in methods.FOLDER.glob("*.md")} == {*NAMED}


@pytest.mark.parametrize("name", NAMED)
def test_a_page_is_uniform(name: str) -> None:
    file = Path(methods.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert file == methods.page(name), "run: python -m docs.making.methods"
    text = methods.method(name)
    for heading in ("## Update", "## When to use it", "## Facts", "## Keys"):
        assert f"\n{heading}\n" in text or (heading[3:7] == "When" and name not in methods.WORDS)
    for row in (
        "Certificate",
        "Private use",
        "Reference",
        "Bytes per round",
        "Stored by each client",
    ):
        assert f"| {row} | " in text
    assert "| `local.lr` | " in text


@pytest.mark.parametrize("name", [name for name in NAMED if name not in PRIVATE])
def test_a_docstring_has_the_words_of_a_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a method without words in methods.toml has a page, too."""
    monkeypatch.setattr(methods, "WORDS", {})
    words = methods.words_of(name)
    assert words["title"] == {"fedprox": "FedProx", "muloco": "MuLoCo"}.get(name, words["title"])
    assert words["what"].endswith(".") and "Args:" not in words["update"]
    text = methods.method(name)
    assert words["update"] in text and f"| Reference | {words['source']} |" in text
    assert methods.page(name).startswith(f"# {words['title']}\n")


def test_the_overview_links_every_page() -> None:
    text = methods.methods()
    assert all(f"](methods/{name}.md)" in text for name in NAMED)
