"""Scores of sentences, against their libraries, the E2E challenge's scripts and hand counts."""

import math
from pathlib import Path

import pytest

from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import main
from fedmuon.experiments.text_scores import (
    SCORES,
    bleu,
    cider,
    meteor,
    nist,
    rouge_l,
    scores_of_files,
)

WRITTEN = ["Ivo serves Thai food by the river .", "At the centre, Bo has cheap Greek dishes.",
           "Zan is a very cheap place to eat, with high prices."]  # fmt: skip
REFERENCES = [
    ["Ivo serves Thai food at the riverside.", "Thai food is served by Ivo by the river."],
    ["Bo has Greek dishes in the centre, and they are cheap.", "Cheap Greek food at Bo.",
     "Bo serves Greek food."],
    ["Zan has high prices."],
]  # fmt: skip


def test_metrics_are_those_of_their_libraries() -> None:
    """BLEU by hand for a sentence of known counts; ROUGE-L's best reference."""
    written = ["the cat sat on the mat", "a dog barks"]
    references = [["the cat sat on a mat", "the cat sat on the mat"], ["dogs bark loudly"]]
    import sacrebleu

    padded = [["the cat sat on a mat", "dogs bark loudly"], ["the cat sat on the mat", None]]
    theirs = sacrebleu.corpus_bleu(written, padded, use_effective_order=True).score  # type: ignore
    assert bleu(written, references) == pytest.approx(theirs) and 0 < theirs < 100
    assert bleu(written[:1], references[:1]) == pytest.approx(100)
    # No four words match: sacrebleu counts half of one among the two.
    by_hand = 100 * math.exp(1 - 6 / 5) * (5 / 5 * 3 / 4 * 1 / 3 * (1 / 2) / 2) ** 0.25
    assert bleu(["a b c d e"], [["a b x c d e"]]) == pytest.approx(by_hand)
    assert rouge_l(["a dog barks"], [["dogs bark loudly"]]) == pytest.approx(200 / 3)
    assert rouge_l(["a b c"], [["x y z", "a b c d"]]) == pytest.approx(100 * 2 * 3 / 7)
    assert rouge_l(["a b"], [["x y"]]) == 0


def test_nist_is_that_of_the_e2e_challenge() -> None:
    """Printed by metrics/pymteval.py of github.com/tuetschek/e2e-metrics for these sentences."""
    assert nist(WRITTEN, REFERENCES) == pytest.approx(3.5662551066607158, rel=1e-12)
    assert nist([one.upper() for one in WRITTEN], REFERENCES) == nist(WRITTEN, REFERENCES)
    assert nist(WRITTEN[::-1], REFERENCES[::-1]) == pytest.approx(nist(WRITTEN, REFERENCES))
    assert nist(WRITTEN[1:] + WRITTEN[:1], REFERENCES) < 1.5


def test_nist_by_hand() -> None:
    """Of `a b` and `a c` two words in four are a: log2(4/2) bits, and of b log2(4/1). The pair
    `a b` is one of two pairs that begin with a: one bit."""
    references = [["a b"], ["a c"]]
    assert nist(["a b", "a c"], references) == pytest.approx((1 + 2 + 1 + 2) / 4 + (1 + 1) / 2)
    # At half the length of the references the factor is (1/2)^((ln(1/2) / ln(2/3))^2).
    factor = math.exp(math.log(0.5) * (math.log(0.5) / math.log(2 / 3)) ** 2)
    assert nist(["a", "a"], references) == pytest.approx(factor * 1)
    assert nist(["d e", "f g"], references) == 0 and nist(["", ""], references) == 0


def test_cider_is_that_of_the_e2e_challenge() -> None:
    """Printed by pycocoevalcap/cider/cider_scorer.py of the same repository."""
    assert cider(WRITTEN, REFERENCES) == pytest.approx(2.2371076562129324, rel=1e-12)
    assert cider(WRITTEN[1:] + WRITTEN[:1], REFERENCES) < 0.7


def test_cider_by_hand() -> None:
    """A sentence that is its only reference has four cosines of 1, if all n-grams are rare."""
    alone = [["a b c d"], ["e f g h"]]
    assert cider(["a b c d", "e f g h"], alone) == pytest.approx(10)
    assert cider(["a b c d", "a b c d"], alone) == pytest.approx(5)
    # Words in all references weigh nothing, nor do marks; of two sentences alike, no word is rare.
    assert cider(["a b c d!", "a b c d"], [["a b c d"], ["a b c d"]]) == 0
    # A word of two, one pair fewer: cosine 1/sqrt(2), three lengths without a match.
    shorter = 10 * math.exp(-1 / 72) * math.sqrt(0.5) / 4
    assert cider(["a", "e f"], [["a b"], ["e f"]]) == pytest.approx((shorter + 5) / 2)


def test_repeated_words_and_references_of_different_lengths() -> None:
    """By separate loops over lists of n-grams: repeated words count as often as one reference has
    them, and NIST compares the length with the mean of the references."""
    written = ["the the the cat sat", "a dog barked"]
    references = [
        ["the cat sat on the mat .", "the cat is on the mat"], ["a dog barked loudly"],
    ]  # fmt: skip
    assert nist(written, references) == pytest.approx(2.588030744824033, rel=1e-12)
    assert cider(written, references) == pytest.approx(4.18414343605887, rel=1e-12)


def test_meteor_by_hand() -> None:
    """All words match, one by its stem, in one chunk; then in two; then without a match."""
    assert meteor(["the cats sat"], [["the cat sat"]]) == pytest.approx(1 - 0.5 * (1 / 3) ** 3)
    assert meteor(["sat the cat"], [["the cat sat"]]) == pytest.approx(1 - 0.5 * (2 / 3) ** 3)
    assert meteor(["the feline sat"], [["the cat sat"]]) == pytest.approx(
        2 / 3 * (1 - 0.5 * (2 / 2) ** 3)
    )  # no synonyms: precision and recall are 2/3, in two chunks
    long = 4 / 4 * (4 / 8) / (0.9 * 4 / 4 + 0.1 * 4 / 8)  # recall weighs nine times as much
    assert meteor(["a b c d"], [["a b c d e f g h"]]) == pytest.approx(long * (1 - 0.5 / 4**3))
    assert meteor(["a b"], [["x y", "a b"]]) == pytest.approx(1 - 0.5 / 2**3)
    assert meteor(["a b", "x"], [["a b"], ["y"]]) == pytest.approx((1 - 0.5 / 2**3) / 2)


def files(folder: Path, written: str, references: str) -> tuple[Path, Path]:
    found = folder / "written.txt", folder / "references.txt"
    for file, text in zip(found, (written, references), strict=True):
        file.write_text(text, encoding="utf-8")
    return found


def test_files_are_scored_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = "\n\n".join("\n".join(several) for several in REFERENCES)
    one, other = files(tmp_path, "\n".join(WRITTEN) + "\n", groups + "\n\n")
    assert scores_of_files(one, other) == {
        name: score(WRITTEN, REFERENCES) for name, score in SCORES.items()
    }
    with pytest.raises(SystemExit, match="0"):
        main(["score-text", str(one), str(other)])
    said = capsys.readouterr().out
    assert "3.5663" in said and "2.2371" in said and "METEOR" in said


@pytest.mark.parametrize("references", ["", "a\nb\n", "a\n\nb\n\nc"])
def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, references: str) -> None:
    one, other = files(tmp_path, "a\nb\n", references)
    with pytest.raises(InputError, match="Write one line per sentence"):
        scores_of_files(one, other)
    with pytest.raises(InputError, match="cannot be read as UTF-8"):
        scores_of_files(tmp_path / "none.txt", other)
