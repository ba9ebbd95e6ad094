"""What is said below a figure is of what was drawn in it."""

import re

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report.findings import CAPTIONS, OF_LABELS, of_drawn
from fedmuon.analysis.report.style import by_round, in_words
from fedmuon.experiments.studies.find import KINDS
from fedmuon.experiments.studies.stability_findings import gap_and_bound
from fedmuon.experiments.studies.training_findings import by_client


def of(**more: np.ndarray) -> Figure:
    """Two runs with a gap and a bound."""
    runs = {"gap": [0.0, 0.01], "gap_low": [-0.01, 0.0], "gap_high": [0.01, 0.02],
            "bound": [0.03, 0.04], "bound_one": [0.02, 0.03]}  # fmt: skip
    return gap_and_bound({name: np.array(one) for name, one in runs.items()} | more)


def test_marks_are_named_where_there_are_any() -> None:
    text = of_drawn("gap", of())
    assert "Diamonds" in text and "Squares" not in text and "logarithmic" not in text
    assert "Squares" in of_drawn("gap", of(bound_global=np.array([0.5, 0.6])))
    assert "logarithmic beyond" in of_drawn("gap", of(bound=np.array([3e2, 4e2])))


def test_every_sentence_is_said_of_its_label_alone() -> None:
    for name, sentences in OF_LABELS.items():
        for label, sentence in sentences.items():
            figure = Figure()
            axes = figure.subplots()
            axes.plot([], [], label=label)
            axes.plot([1], [np.nan], label=label)
            assert of_drawn(name, figure) == ""  # nothing was drawn
            if label == "symlog":
                axes.set_yscale("symlog")
            else:
                axes.plot([1], [1], label=f"{label} and more")
            assert of_drawn(name, figure) == sentence
    assert of_drawn("curves", Figure()) == ""


def rounds(*names: str) -> list[dict[str, float]]:
    return [{"round": n, **dict.fromkeys(names, 1.0 / n)} for n in (1, 2, 3)]


def test_curves_by_round_are_told_as_they_are() -> None:
    alone = by_round({"a": [rounds("train_loss")]})
    assert in_words(alone) == "By round: solid the train loss."
    both = by_round({"a": [rounds("train_loss", "test_loss", "client_loss")]})
    assert in_words(both) == (
        "By round: solid the train loss, dashed the test loss, thin the client loss."
    )
    two = [rounds("train_loss"), rounds("train_loss")]
    many = by_round({"a": two, "b": two[:1]})
    assert "a colour a row" in in_words(many) and "bands from the least" in in_words(many)
    assert "bands" not in in_words(by_round({"a": two[:1], "b": two[1:]}))


def accounts(target: float) -> Figure:
    """Two clients of two variants that spend alike."""
    rows = {"variant": ["a", "a", "b", "b"], "x": [np.nan] * 4, "seed": [0] * 4,
            "epsilon": [1.0, 2.0] * 2, "target": [target] * 4}  # fmt: skip
    return by_client({name: np.array(one) for name, one in rows.items()}, ["a", "b"])


def test_a_target_is_told_and_drawn_where_there_is_one() -> None:
    """Runs whose noise is given have none: 0 in their table."""
    held, given = accounts(4.0), accounts(0.0)
    assert "dashed" in of_drawn("clients", held) and of_drawn("clients", given) == ""
    assert [len(one.axes[0].lines) for one in (held, given)] == [2, 1]


SIDES = re.compile(r"Left(?! of)|Right(?! of)|[;,] right(?! of)|[Oo]n the (?:left|right)")


def test_captions_name_no_side_of_a_picture() -> None:
    """On a narrow page panels lie below each other."""
    pictures = [one for kind in KINDS.values() for one in getattr(kind, "pictures", ())]
    texts = [*CAPTIONS.values(), *(one.caption for one in pictures)]
    assert len(pictures) > 10 and SIDES.search("Left the bound, right the perturbation")
    assert not [text for text in texts if SIDES.search(text)]
