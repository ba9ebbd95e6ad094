"""Text, and tables with sentences: readers, the mask, what is written, how it is judged."""

import json
import math
from pathlib import Path

import networks
import numpy as np
import pytest
import torch
from conftest import small
from torch import Tensor
from torch.nn import functional

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.readers import read, read_mapped
from fedmuon.data.source import Source
from fedmuon.data.text import Pair, corpus, make_text, prompts, tokens_of, windows
from fedmuon.federated.client_data import read_source
from fedmuon.tasks.base import IGNORED, Batch
from fedmuon.tasks.decoder import Form, generate, sentence_tokens
from fedmuon.tasks.networks import NetworkTask

END = 256
E2E = """mr,ref
"name[Ivo], food[Thai]","Ivo serves
 Thai food."
"name[Ivo], food[Thai]",Thai food at Ivo.
name[Café Ö],"Café Ö, a ""place""."
"""
DART = [
    {
        "tripleset": [["Ada", "BORN_IN", "London"], ["Ada", "FIELD", "Mathematics"]],
        "subtree_was_extended": False,
        "annotations": [
            {"source": "WikiTableQuestions_mturk", "text": "Ada was born in London."},
            {"source": "WikiSQL_decl_sents", "text": "London is where Ada was born."},
        ],
    },
    {"tripleset": [["Bo", "HAS", "a cat"]], "annotations": [{"source": "e2e", "text": "Bo."}]},
]


def e2e(folder: Path, text: str = E2E, part: str = "trainset") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{part}.csv").write_text(text, encoding="utf-8")
    return folder


def dart(folder: Path, content: object = DART) -> Path:
    (folder / "dart-v1.1.1-full-train.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def told(row: np.ndarray) -> str:
    """A window as text, with | for END."""
    return b"".join(b"|" if token == END else bytes([token]) for token in row).decode()


def parts(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """The train and the test windows."""
    assert source.official_test
    return source.inputs[: source.official_test], source.inputs[source.official_test :]


def test_windows_are_cut_one_after_the_other() -> None:
    """Every token but the first is predicted once; what is left over at the end is not."""
    tokens = np.arange(20, dtype=np.uint8)
    assert windows(tokens, 6).tolist() == [list(range(a, a + 7)) for a in (0, 6, 12)]
    assert windows(tokens[:6], 6).shape == (0, 7) and windows(tokens[:0], 6).shape == (0, 7)
    assert windows(tokens, 6)[:, 1:].ravel().tolist() == list(range(1, 19))


def test_what_python_says_of_itself_is_a_source_with_labels_and_a_test_part() -> None:
    source = read("pydoc")
    before, after = parts(source)
    assert source.inputs.dtype == np.uint8 and source.inputs.shape[1] == 65
    assert source.vocabulary == 256 and source.classes == 10
    assert len(before) > 3000 and 0.2 < len(after) / len(before) < 0.3
    assert all(
        set(part.tolist()) == set(range(10)) for part in np.split(source.labels, [len(before)])
    )
    assert b"The following" in b"".join(row[:-1].tobytes() for row in before)
    assert read("pydoc", context=100).inputs.shape[1] == 101


def quoted(source: Source, length: int = 48) -> float:
    """The share of test strings of that length which the train text has too, spaces aside."""

    def text(rows: np.ndarray) -> bytes:
        return b" ".join(b"".join(row[:-1].tobytes() for row in rows).split())

    def strings(content: bytes) -> list[bytes]:
        return [content[a : a + length] for a in range(len(content) - length)]

    before, after = parts(source)
    known = set(strings(text(before)))
    found = [string in known for string in strings(text(after))]
    return sum(found) / len(found)


def test_test_windows_are_not_in_the_train_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics quote each other at length; where quotes are kept, much of the test text is known.

    The text is the documentation of the Python that runs: 0.9% from 3.11, 2.3% from 3.13.
    """
    assert quoted(read("pydoc")) < 0.03
    monkeypatch.setattr(
        "fedmuon.data.text._once",
        lambda topics: sorted(map(str.encode, topics.values()), key=len)[::-1],
    )
    assert quoted(read("pydoc")) > 0.1


def test_local_files_are_a_source(tmp_path: Path) -> None:
    one = tmp_path / "one.txt"
    one.write_bytes(bytes(range(256)) * 4)
    source = read("text", folder=one, context=7)
    assert source.classes == 10 and (len(source.labels), source.official_test) == (130, 110)
    assert source.inputs[0].tolist() == list(range(8))
    (tmp_path / "two.txt").write_bytes(b"abcdefgh" * 10)
    both = read("text", folder=tmp_path, context=7)
    assert both.classes == 2 and bytes(both.inputs[both.labels == 1][0]) == b"abcdefgh"
    with pytest.raises(InputError, match=r"too short for \[data\] context = 64"):
        read("text", folder=tmp_path)
    with pytest.raises(InputError, match="contains no text"):
        read("text", folder=tmp_path / "three")


def test_a_mapped_text_is_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 4)
    options = (("context", 7), ("folder", str(tmp_path / "a.txt")))
    first, again = read("text", **dict(options)), read_mapped("text", options)
    assert isinstance(again.inputs, np.memmap) and (first.inputs == again.inputs).all()
    assert (again.vocabulary, again.official_test) == (first.vocabulary, first.official_test)


# --- Readers of tables ----------------------------------------------------------------------------


def test_e2e_is_read_as_it_was_published(tmp_path: Path) -> None:
    found = corpus("e2e", e2e(tmp_path))["train"]
    assert found == [
        Pair("name[Ivo], food[Thai]", "Ivo serves Thai food.", 2),
        Pair("name[Ivo], food[Thai]", "Thai food at Ivo.", 2),
        Pair("name[Café Ö]", 'Café Ö, a "place".', 1),
    ]
    assert prompts(found)["name[Ivo], food[Thai]"] == ["Ivo serves Thai food.", "Thai food at Ivo."]


def test_dart_is_read_as_it_was_published(tmp_path: Path) -> None:
    found = corpus("dart", dart(tmp_path))["train"]
    table = "Ada : born_in : London | Ada : field : Mathematics"
    assert found == [
        Pair(table, "Ada was born in London.", 2),
        Pair(table, "London is where Ada was born.", 2),
        Pair("Bo : has : a cat", "Bo.", 1),
    ]


def test_windows_are_table_end_sentence_end(tmp_path: Path) -> None:
    """Held-out rows come from the test file, or from dev without one; what is too long is left
    out, and said to be."""
    e2e(e2e(tmp_path), "mr,ref\nname[B],Old.\n", "devset")
    assert told(read("e2e", folder=tmp_path, context=47).inputs[3]).startswith("name[B]| Old.||")
    e2e(tmp_path, 'mr,ref\n"name[B], food[C], x[y]",Z\n', "testset_w_refs")
    source = read("e2e", folder=tmp_path, context=47)
    assert source.inputs.shape == (4, 48) and source.official_test == 3
    assert told(source.inputs[1]) == "name[Ivo], food[Thai]| Thai food at Ivo.||||||||"
    assert told(source.inputs[3]).startswith("name[B], food[C], x[y]| Z|||")
    assert source.labels.tolist() == [1, 1, 0, 2] and source.vocabulary == 257
    short = read("e2e", folder=tmp_path, context=40)
    assert len(short.labels) == 3 and "1 longer pairs left out" in short.where
    with pytest.raises(InputError, match=r"fits into \[data\] context = 9"):
        read("e2e", folder=tmp_path, context=9)


@pytest.mark.parametrize(("text", "words"), [
    ("table,sentence\na,b\n", "no columns mr and ref"),
    ("", "no columns mr and ref"),
    ("mr,ref\nname[A],\n", "has an empty mr or ref: correct this line"),
    ("mr,ref\nname[A]\n", "has an empty mr or ref: correct this line"),
    ({"tripleset": []}, "contains no list"),
    ([{"tripleset": [["a", "b", "c"]]}], "is incomplete: it needs a tripleset"),
    ([*DART, {"tripleset": [["a", "b"]], "annotations": [{"text": "t"}]}], "entry 2"),
    ([{"tripleset": [["a", "b", 3]], "annotations": [{"text": "t"}]}], "entry 0"),
    ([{"tripleset": [["a", "b", "c"]], "annotations": [{"text": " "}]}], "entry 0"),
    (["a"], "entry 0"),
])  # fmt: skip
def test_files_of_another_kind_are_refused(tmp_path: Path, text: object, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        if isinstance(text, str):
            corpus("e2e", e2e(tmp_path, text))
        else:
            corpus("dart", dart(tmp_path, text))
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="create synthetic files with `fedmuon make-text`"):
        read("dart", folder=tmp_path)
    (tmp_path / "train.json").write_text("{")
    with pytest.raises(InputError, match="is not valid JSON"):
        read("dart", folder=tmp_path)
    (tmp_path / "train.csv").write_bytes(b"mr,ref\nname[\xff],a\n")
    with pytest.raises(InputError, match="cannot be read as UTF-8"):
        read("e2e", folder=tmp_path)


@pytest.mark.parametrize("form", ["e2e", "dart"])
def test_made_up_text_has_the_format(form: str, tmp_path: Path) -> None:
    files = make_text(tmp_path / "a", form, 60)
    assert all(file.name.startswith("made-up-") for file in files)
    parts = corpus(form, tmp_path / "a")
    every = [set(prompts(parts[part])) for part in ("train", "dev", "test")]
    assert [len(part) for part in every] == [48, 6, 6] and len(set.union(*every)) == 60
    again = make_text(tmp_path / "b", form, 60)
    other = make_text(tmp_path / "c", form, 60, seed=1)
    assert files[0].read_bytes() == again[0].read_bytes() != other[0].read_bytes()
    named = {pair.table.split(":")[0].strip("name[]") for pair in parts["test"]}
    assert all(any(name.split("]")[0] in pair.sentence for pair in parts["test"]) for name in named)
    with pytest.raises(InputError, match="tables = 5 is out of range"):
        make_text(tmp_path, form, 5)
    with pytest.raises(InputError, match="synthetic text with format xml"):
        make_text(tmp_path, "xml")


def test_a_tokenizer_of_a_folder(tmp_path: Path) -> None:
    """GPT-2's kind: pieces of bytes, and the last token ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    pieces.decoder = decoders.ByteLevel()  # type: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    pieces.train_from_iterator([E2E] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<|endoftext|>").save_pretrained(
        tmp_path / "own"
    )
    tokens = tokens_of(str(tmp_path / "own"))
    assert 257 < tokens.vocabulary <= 281
    text = "name[Café Ö], food[Thai]"
    assert tokens.decode([*tokens.encode(f" {text}"), tokens.end, 3]) == text
    assert len(tokens.encode(text)) < len(text.encode())
    source = read("e2e", folder=e2e(tmp_path / "e2e"), context=47, tokenizer=str(tmp_path / "own"))
    assert source.vocabulary == tokens.vocabulary
    assert tokens.decode(source.inputs[1][: 1 + np.argmax(source.inputs[1] == tokens.end)]) == (
        "name[Ivo], food[Thai]"
    )
    with pytest.raises(InputError, match="contains no tokenizer"):
        tokens_of(str(tmp_path / "e2e"))


# --- The mask -------------------------------------------------------------------------------------


def tiny(folder: Path) -> Config:
    data = {"name": "e2e", "folder": str(folder), "context": 47, "train": 2, "test": 1}
    return small(
        data={**data, "minimum": 1},
        federation={"clients": 1, "per-round": 1, "rounds": 1},
        task={"name": "network", "model": "gpt", "width": 16, "depth": 2, "heads": 2},
    )


def task_of(config: Config) -> tuple[NetworkTask, Tensor]:
    """The task, and all rows of the source."""
    rows = read_source(config).inputs
    return networks.task_of(config), torch.from_numpy(rows.astype(np.float64))


def test_only_the_sentence_and_its_end_are_targets() -> None:
    rows = torch.tensor([[7, 8, END, 1, 2, END, END], [9, END, 1, 2, 3, 4, END]])
    no, found = IGNORED, sentence_tokens(END, rows.double(), rows[:, 0])
    assert found.tolist() == [[no, no, 1, 2, END, no], [no, 1, 2, 3, 4, END]]


def test_the_loss_is_the_mean_over_the_sentence(tmp_path: Path) -> None:
    """Position by position by hand, from the module's logits; so is the share of right tokens."""
    task, rows = task_of(tiny(e2e(tmp_path)))
    params = task.initial(generator(2, Draw.INITIAL))
    one = {name: value[0] for name, value in params.items()}
    labels = torch.zeros(len(rows), dtype=torch.int64)
    losses, scores = task.losses(params, Batch(rows, labels))
    right = scores["accuracy"]
    for row, window in enumerate(rows.long()):
        first, second = (window == END).nonzero().flatten().tolist()[:2]
        logits = torch.func.functional_call(task.module, one, (window[None].double(),))[0]
        each = [-torch.log_softmax(logits[t], -1)[window[t + 1]] for t in range(first, second)]
        torch.testing.assert_close(losses[0, row], torch.stack(each).mean(), rtol=1e-12, atol=0)
        hits = [int(logits[t].argmax()) == int(window[t + 1]) for t in range(first, second)]
        assert float(right[0, row]) == pytest.approx(sum(hits) / len(hits))
        whole = functional.cross_entropy(logits, window[1:])
        assert abs(float(whole - losses[0, row])) > 1e-3


def test_a_table_matters_as_context_alone(tmp_path: Path) -> None:
    """Of logits that do not look back, the table's tokens change nothing; the sentence's do."""
    task, rows = task_of(tiny(e2e(tmp_path)))
    params = task.initial(generator(2, Draw.INITIAL))
    labels = torch.zeros(1, dtype=torch.int64)

    def losses(change: int, tied: bool) -> tuple[float, float]:
        window = rows[:1].clone()
        window[0, change] = 65
        own = params if tied else {n: torch.zeros_like(v) for n, v in params.items()}
        if not tied:  # a bias alone: logits are the same at all places, and tell tokens apart
            own["transformer.ln_f.bias"] = params["transformer.wte.weight"][:, 3]
            own["transformer.wte.weight"] = params["transformer.wte.weight"]
        return tuple(float(task.losses(own, Batch(w, labels))[0]) for w in (rows[:1], window))  # type: ignore

    place = int((rows[0] == END).nonzero()[0])
    assert rows[0, 2] != 65 and rows[0, place + 2] != 65
    for change, tied, same in ((2, False, True), (place + 2, False, False), (2, True, False)):
        before, after = losses(change, tied)
        assert (before == after) == same


# --- What is written ------------------------------------------------------------------------------


def test_the_greedy_sentence_is_the_loop_by_hand(tmp_path: Path) -> None:
    """Side by side with longer prompts or alone, with our own module one token after the other."""
    task, _ = task_of(tiny(e2e(tmp_path)))
    params = {n: 30 * v[0] for n, v in task.initial(generator(5, Draw.INITIAL)).items()}
    form, asked = Form(257, 47, 16, 2, 2), [[5, 6, 7, END], [70, END], [1, 2, 3, 4, 5, 6, END]]
    found = generate(form, params, asked, END)
    assert found[1] == generate(form, params, asked[1:2], END)[0][: len(found[1])]
    for prompt, written in zip(asked, found, strict=True):
        row = list(prompt)
        for token in written:
            window = torch.tensor([[*row, 0]], dtype=torch.float64)
            logits = torch.func.functional_call(task.module, params, (window,))[0, -1]
            if len(row) - len(prompt) < 5:
                logits[END] = -math.inf
            assert int(logits.argmax()) == token
            row.append(token)
        assert len(written) >= 5 and len(prompt) + len(written) <= 48
    assert len({tuple(row) for row in found}) > 1
    beamed = generate(form, params, asked, END, beams=3)
    assert len(beamed) == 3 and all(END not in row for row in beamed)
