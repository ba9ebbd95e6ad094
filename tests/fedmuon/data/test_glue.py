"""Folders of GLUE, and classifiers on them: logits, clipped sums, private runs with LoRA."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small
from networks import replica, task_of
from safetensors.numpy import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.glue import FORMS, cut, glue
from fedmuon.experiments.run import execute
from fedmuon.federated.client_data import read_source
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.decoder import Form, decoder, gpt2_law, read_weights
from fedmuon.tasks.per_example.clipping import Clipping
from fedmuon.tasks.per_example.ghost import find_ghosts

END, WIDTH = 256, 16
# The first lines of the published files, with other words.
HEADS = {
    "sst-2": "sentence\tlabel",
    "mnli": "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
            "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
    "qnli": "index\tquestion\tsentence\tlabel",
    "qqp": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
}  # fmt: skip
LINES = {
    "sst-2": ['a "fine film \t1', "it drags \t0", "dull \t0", "lovely \t1", "bad \t0", "good \t1"],
    "mnli": ["0\t1\t2\tnews\t(a)\t(b)\tS\tS\tHe ran .\tHe moved .\tx\tentailment",
             "1\t1\t2\tnews\t(a)\t(b)\tS\tS\tHe ran .\tHe sat .\tx\tcontradiction",
             "2\t1\t2\tnews\t(a)\t(b)\tS\tS\tHe ran .\tOr did he ?\tx\t-",
             "3\t1\t2\tnews\t(a)\t(b)\tS\tS\tHe ran .\tTo work .\tx\tneutral"],
    "qnli": ["0\tWho ran ?\tBo ran .\tentailment", "1\tWho ran ?\tIt rained .\tnot_entailment"],
    "qqp": ["1\t2\t3\tWhat is AI?\tWhat's AI?\t1", "2\t4\t5\tAlone?", "3\t6\t7\tWhy?\tHow?\t0"],
}  # fmt: skip


def folder_of(name: str, place: Path, lines: list[str] | None = None) -> Path:
    """A task's folder as GLUE publishes it, with the lines as its training part and held out."""
    place.mkdir(exist_ok=True)
    text = "\n".join([HEADS[name], *(LINES[name] if lines is None else lines)]) + "\n"
    for file in ("train.tsv", FORMS[name].held_out):
        (place / file).write_text(text, encoding="utf-8")
    return place


def told(row: np.ndarray) -> str:
    return b"".join(b"|" if token == END else bytes([token]) for token in row).decode()


def test_folders_are_read_as_they_were_published(tmp_path: Path) -> None:
    """Quotes stay, undecided and incomplete lines are left out, and labels are in GLUE's order."""
    found = {name: glue(name, folder_of(name, tmp_path / name), 24) for name in FORMS}
    assert {name: one.labels.tolist() for name, one in found.items()} == {
        "sst-2": [1, 0, 0, 1, 0, 1] * 2, "mnli": [0, 2, 1] * 2, "qnli": [0, 1] * 2,
        "qqp": [1, 0] * 2,
    }  # fmt: skip
    assert [one.official_test for one in found.values()] == [6, 3, 2, 2]
    assert [one.classes for one in found.values()] == [2, 3, 2, 2]
    assert told(found["sst-2"].inputs[0]).startswith('a "fine film|||')
    assert told(found["mnli"].inputs[1]) == "He ran .|He sat .||||||||"
    assert all((one.inputs[:, -1] == END).all() for one in found.values())
    with pytest.raises(InputError, match=r"train\.tsv cannot be read .* Set \[data\] folder"):
        glue("sst-2", tmp_path, 24)
    with pytest.raises(InputError, match="has no column sentence, label in its first line"):
        glue("sst-2", folder_of("qqp", tmp_path / "other"), 24)
    for label in ("2", "-", ""):
        with pytest.raises(
            InputError, match=r"line 3 of .*: each line needs sentence, and a label .* 0, 1"
        ):
            glue("sst-2", folder_of("sst-2", tmp_path / "bad", ["a\t1", f"b\t{label}"]), 24)


def test_lines_end_as_on_any_system_and_nowhere_else(tmp_path: Path) -> None:
    """Windows' files have the same rows, and a carriage return inside a sentence stays there."""
    place = folder_of("sst-2", tmp_path)
    plain = glue("sst-2", place, 24)
    for file in ("train.tsv", "dev.tsv"):
        (place / file).write_bytes((place / file).read_bytes().replace(b"\n", b"\r\n"))
    np.testing.assert_array_equal(glue("sst-2", place, 24).inputs, plain.inputs)
    (place / "train.tsv").write_bytes(b"sentence\tlabel\na\rb\t1\n")
    assert told(glue("sst-2", place, 24).inputs[0]).startswith("a\rb|")


def test_long_sentences_are_cut_and_the_longer_one_first() -> None:
    one, other = list(range(9)), list(range(4))
    assert [len(found) for found in cut([one, other], 12)] == [6, 4]
    assert [len(found) for found in cut([one, other], 8)] == [3, 3]
    assert cut([one], 10) == [one] and cut([one], 9) == [one[:8]]
    with pytest.raises(InputError, match="is too short for the 2 sentences"):
        cut([one, other], 3)


def config_of(name: str, place: Path, **tables: dict) -> Config:
    rows = len(LINES[name])
    base: dict[str, dict] = {
        "data": {"name": name, "folder": str(folder_of(name, place)), "context": 24,
                 "train": min(rows, 4), "test": 2, "minimum": 1},
        "federation": {"clients": 1, "per-round": 1, "rounds": 2},
        "task": {"name": "network", "model": "gpt", "width": WIDTH, "depth": 2, "heads": 2},
        "local": {"recipe": "dp-adam", "lr": 0.05, "steps": 2},
        "privacy": {"noise": 1.0, "lot": 2.0, "clipping": "automatic-flat"},
    }  # fmt: skip
    return small(base, **tables)


def theirs(params: Params, rows: Tensor, classes: int) -> Tensor:
    """Logits [n, C] by transformers' own classifier, which looks at the last token that is not the
    one that fills up; each row is given alone, up to its last END."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    form = GPT2Config(
        vocab_size=257, n_positions=24, n_embd=WIDTH, n_layer=2, n_head=2,
        pad_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    form.num_labels = classes
    model = GPT2ForSequenceClassification(form)
    torch.nn.Module.double(model)
    assert not model.load_state_dict(params, strict=False).missing_keys
    return torch.cat([model(row[None]).logits for row in rows])


@pytest.mark.parametrize("name", ["sst-2", "mnli"])
def test_a_label_is_read_at_the_end_of_the_last_sentence(name: str, tmp_path: Path) -> None:
    """Logits, loss and accuracy of transformers' GPT2ForSequenceClassification."""
    config = config_of(name, tmp_path / name)
    task, source = task_of(config), read_source(config)
    drawn = task.initial(generator(0, Draw.INITIAL))
    params = {key: 20 * value for key, value in drawn.items()}
    inputs = torch.from_numpy(source.inputs[:3].astype(np.int64))
    labels = torch.from_numpy(source.labels[:3])
    sentences = len(FORMS[name].sentences)
    lengths = [int((row == END).nonzero()[sentences - 1]) + 1 for row in inputs]
    expected = torch.cat([
        theirs(replica(params), row[None, :length], source.classes)
        for row, length in zip(inputs, lengths, strict=True)
    ]).detach()  # fmt: skip
    losses, scores = task.losses(params, Batch(inputs.double(), labels))
    torch.testing.assert_close(losses[0], cross_entropy(expected, labels, reduction="none"))
    assert (scores["accuracy"][0] == (expected.argmax(1) == labels)).all()
    early = torch.cat([theirs(replica(params), row[None, :3], source.classes) for row in inputs])
    assert not torch.allclose(early, expected)


def weights_file(place: Path) -> Path:
    form = Form(257, 24, WIDTH, 2, 2)
    numbers = gpt2_law(decoder(form), np.random.default_rng(0))
    save_file({name: 20 * value for name, value in numbers.items()}, place / "base.safetensors")
    return place / "base.safetensors"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_clipped_sums_of_a_classifier_are_the_loop(rank: int, tmp_path: Path) -> None:
    """With and without adapters, against per-example gradients by autograd."""
    tables = {"weights": str(weights_file(tmp_path)), "lora-rank": rank}
    config = config_of("mnli", tmp_path / "mnli", task=tables)
    task, source = task_of(config), read_source(config)
    rng = torch.Generator().manual_seed(1)
    params = {
        name: value + 0.3 * torch.randn(value.shape, generator=rng).double()
        for name, value in task.initial(generator(0, Draw.INITIAL)).items()
    }
    names = {name.rpartition(".c_attn.")[2] for name in params}
    assert "score.weight" in names
    assert not rank or names == {"score.weight", "down.weight", "up.weight"}
    inputs = torch.from_numpy(source.inputs[:3].astype(np.float64))
    labels = torch.from_numpy(source.labels[:3])
    totals = {name: torch.zeros_like(value[0]) for name, value in params.items()}
    for row, label in zip(inputs, labels, strict=True):
        leaves = {name: value[0].clone().requires_grad_() for name, value in params.items()}
        logits = torch.func.functional_call(task.module, leaves, (row[None],))
        slopes = torch.autograd.grad(cross_entropy(logits, label[None]), list(leaves.values()))
        length = float(sum(one.square().sum() for one in slopes)) ** 0.5
        for name, slope in zip(leaves, slopes, strict=True):
            totals[name] += 0.1 / length * slope
    assert find_ghosts(task.module, task.shape) is not None
    clip = Clipping("automatic-flat", 0.1)
    found = task.clipped([(1.0, params)], [Batch(inputs, labels)], clip)[1]
    torch.testing.assert_close(replica(found), totals, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("recipe", [pytest.param("dp-adam", marks=pytest.mark.slow), "disk-adam"])
def test_private_runs_learn_adapters_and_the_last_layer_alone(recipe: str, tmp_path: Path) -> None:
    tables = {"weights": str(weights_file(tmp_path)), "lora-rank": 2}
    config = config_of("sst-2", tmp_path / "sst", task=tables, local={"recipe": recipe})
    summary = execute(config, tmp_path / "run")
    assert summary["privacy"]["blocks"] == 1 and 0 <= summary["accuracy"] <= 1
    found = read_weights(tmp_path / "run" / "model.safetensors")
    assert sum(value.size for value in found.values()) == 2 * 2 * 4 * WIDTH + 2 * WIDTH
    with pytest.raises(
        InputError, match=r"needs a decoder that predicts tokens, but .* classification task"
    ):
        config_of("sst-2", tmp_path / "sst", task={"head": "untied"})
