"""The reason of a reply to whom an error happened: its first line goes to the strategy alone."""

import pytest
from flwr.app import Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedmuon.server.messaging import WIDTH, raised


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)  # as if Flower ran us


def first_line(error: Exception) -> str:
    """Of the reason that a worker gives after it has caught the error."""
    message = Message(RecordDict(), dst_node_id=4, message_type="train")
    try:
        raise error
    except Exception as caught:
        line, *below = raised(message, caught).split("\n")
    assert below[0] == "train" and len(below) > 2
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("no disk", ": no disk"),
        ("no disk\nand no room\n", ": no disk"),
        ("\n \n  no disk", ": no disk"),
        ("no \x1b[31mdisk", ": no \\x1b[31mdisk"),
        ("", ""),
        ("\n", ""),
    ],
)
def test_the_first_line_of_an_error_has_its_first_words_and_its_place(
    words: str, said: str
) -> None:
    head, _, place = first_line(RuntimeError(words)).partition(" (")
    assert head == f"RuntimeError{said}"
    assert f"{__file__}:" in place and place.endswith(" in first_line)")


def test_a_long_error_is_cut_and_keeps_its_place() -> None:
    line = first_line(RuntimeError("x" * 5000))
    head, _, place = line.partition("... (")
    assert len(head) == WIDTH and place.endswith(" in first_line)")
