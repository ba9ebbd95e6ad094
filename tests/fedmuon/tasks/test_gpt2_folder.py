"""Appendix D of DP-Muon (000) from a GPT-2 folder: logits, released blocks and steps."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small
from networks import by_hand, own_model, replica, task_of, trained
from safetensors.numpy import save_file
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.text import make_text, tokens_of
from fedmuon.experiments.studies.dp_text import TextCell
from fedmuon.experiments.studies.find import find
from fedmuon.federated.build import build_task
from fedmuon.federated.build_recipe import build_recipe
from fedmuon.federated.client_data import read_source
from fedmuon.federated.model_routes import matrix_counts
from fedmuon.orthogonalize import smoothed_polar
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.decoder import Form, decoder, generate, matching_weights, read_weights
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipping import Clipping
from fedmuon.tasks.per_example.ghost import find_ghosts

WIDTH, DEPTH, HEADS, POSITIONS = 16, 2, 2, 60
END, PAD = 256, 257
Arrays = dict[str, np.ndarray]


def gpt2_folder(folder: Path, vocabulary: int = 257, positions: int = POSITIONS) -> Arrays:
    """The files of a model in Hugging Face's layout, with the names of the published GPT-2, whose
    safetensors have neither the part `transformer.` nor a head, and also the masks."""
    rng, d = np.random.default_rng(0), WIDTH
    shapes = {"wte.weight": (vocabulary, d), "wpe.weight": (positions, d)}
    for k in range(DEPTH):
        shapes |= {
            f"h.{k}.ln_1.weight": (d,), f"h.{k}.ln_1.bias": (d,),
            f"h.{k}.attn.c_attn.weight": (d, 3 * d), f"h.{k}.attn.c_attn.bias": (3 * d,),
            f"h.{k}.attn.c_proj.weight": (d, d), f"h.{k}.attn.c_proj.bias": (d,),
            f"h.{k}.ln_2.weight": (d,), f"h.{k}.ln_2.bias": (d,),
            f"h.{k}.mlp.c_fc.weight": (d, 4 * d), f"h.{k}.mlp.c_fc.bias": (4 * d,),
            f"h.{k}.mlp.c_proj.weight": (4 * d, d), f"h.{k}.mlp.c_proj.bias": (d,),
        }  # fmt: skip
    shapes |= {"ln_f.weight": (d,), "ln_f.bias": (d,)}
    held = {name: 0.4 * rng.standard_normal(shape) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    masks = {f"h.{k}.attn.bias": np.tril(np.ones((1, 1, positions, positions))) for k in range(2)}
    save_file({**held, **masks}, folder / "model.safetensors")
    about = {"model_type": "gpt2", "n_embd": d, "n_layer": DEPTH, "n_head": HEADS,
             "n_positions": positions, "vocab_size": vocabulary}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(about))
    return held


def forward(held: Arrays, tokens: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Logits [T, V] of a sequence [T]: Radford et al. 2019, written from the equations."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-5)
        return scaled * held[f"{name}.weight"] + held[f"{name}.bias"]

    def affine(x: np.ndarray, name: str) -> np.ndarray:
        return x @ held[f"{name}.weight"] + held[f"{name}.bias"]

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x, size = held["wte.weight"][tokens] + held["wpe.weight"][: len(tokens)], WIDTH // HEADS
    for k in range(DEPTH):
        queries, keys, values = np.split(affine(norm(x, f"h.{k}.ln_1"), f"h.{k}.attn.c_attn"), 3, 1)
        mixed = np.zeros_like(x)
        for part in (slice(a * size, (a + 1) * size) for a in range(HEADS)):
            for t in range(len(tokens)):
                scores = keys[: t + 1, part] @ queries[t, part] / math.sqrt(size)
                shares = np.exp(scores - scores.max())
                mixed[t, part] = shares / shares.sum() @ values[: t + 1, part]
        x = x + affine(mixed, f"h.{k}.attn.c_proj")
        inner = gelu(affine(norm(x, f"h.{k}.ln_2"), f"h.{k}.mlp.c_fc"))
        x = x + affine(inner, f"h.{k}.mlp.c_proj")
    return norm(x, "ln_f") @ head.T


def padded(matrix: np.ndarray) -> np.ndarray:
    """A row more, the mean of the others."""
    return np.vstack([matrix, matrix.mean(0)])


def e2e(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    rows = ["mr,ref", '"name[Ivo], food[Thai]",Ivo serves.', "name[Bo],Thai food at Bo."]
    (folder / "trainset.csv").write_text("\n".join([*rows, "name[Café],A place."]))
    return folder


def appendix(tmp_path: Path, **tables: dict) -> Config:
    """Appendix D at a tiny size: untied head, [PAD], c_attn whole, Muon on all matrices."""
    base: dict[str, dict] = {
        "data": {"name": "e2e", "folder": str(e2e(tmp_path / "e2e")), "context": 45, "train": 2,
                 "test": 1, "minimum": 1, "pad-token": True},
        "federation": {"clients": 1, "per-round": 1, "rounds": 2},
        "task": {"name": "network", "model": "gpt", "width": WIDTH, "depth": DEPTH, "heads": HEADS,
                 "head": "untied", "positions": POSITIONS, "weights": str(tmp_path / "gpt2")},
        "local": {"recipe": "fedmuon", "route": "all-matrices", "qkv": "whole", "lr": 0.05,
                  "aux-lr": 0.3, "steps": 1},
    }  # fmt: skip
    return small(base, **tables)


def test_logits_are_those_of_a_forward_pass_in_numpy(tmp_path: Path) -> None:
    """With a head of its own and the row of [PAD]; moving the head alone moves the logits."""
    held = gpt2_folder(tmp_path / "gpt2")
    config = appendix(tmp_path)
    task, source = task_of(config), read_source(config)
    assert source.vocabulary == 258 and (source.inputs[:, -1] == PAD).all()
    params = replica(task.initial(generator(0, Draw.INITIAL)))
    tokens = source.inputs[1].astype(int)[:-1]
    whole = {**held, "wte.weight": padded(held["wte.weight"])}
    inputs = torch.from_numpy(source.inputs[1:2].astype(np.float64))
    found = functional_call(task.module, params, (inputs,))[0].numpy()
    np.testing.assert_allclose(found, forward(whole, tokens, whole["wte.weight"]), rtol=1e-9)
    other = np.random.default_rng(1).standard_normal((258, WIDTH))
    moved = {**params, "lm_head.weight": torch.from_numpy(other)}
    found = functional_call(task.module, moved, (inputs,))[0].numpy()
    np.testing.assert_allclose(found, forward(whole, tokens, other), rtol=1e-9, atol=1e-12)
    assert not np.allclose(found, forward(whole, tokens, whole["wte.weight"]))


def test_what_is_predicted_ends_with_end_and_never_pads(tmp_path: Path) -> None:
    gpt2_folder(tmp_path / "gpt2")
    config = appendix(tmp_path)
    task, source = task_of(config), read_source(config)
    inputs = torch.from_numpy(source.inputs.astype(np.int64))
    targets = task.targets(inputs.double(), inputs[:, 0])
    assert (targets == END).sum() == len(inputs) and not (targets == PAD).any()
    assert bytes(source.inputs[0][: source.inputs[0].tolist().index(END)].astype(np.uint8)) == (
        b"name[Ivo], food[Thai]"
    )
    tokens = tokens_of("")
    assert tokens.decode([72, PAD, 105, END, 72]) == "Hi"


def test_weights_may_have_their_own_head_and_row(tmp_path: Path) -> None:
    """Stored heads are taken as they are; without [PAD], a missing row is refused."""
    held = gpt2_folder(tmp_path / "gpt2")
    form = Form(258, POSITIONS, WIDTH, DEPTH, HEADS, tied=False, padded=True)
    own = np.random.default_rng(1).standard_normal((258, WIDTH))
    found = matching_weights({**held, "lm_head.weight": own}, decoder(form), True)
    assert (found["lm_head.weight"] == own).all()
    assert (found["transformer.wte.weight"][-1] == held["wte.weight"].mean(0)).all()
    with pytest.raises(InputError, match=r"wte.weight of shape \(258, 16\) has shape \(257, 16\)"):
        matching_weights(held, decoder(form), False)
    with pytest.raises(InputError, match="positions is 44, but a text window has 45 tokens"):
        task_of(appendix(tmp_path, task={"positions": 44}))


def test_a_step_releases_49_blocks_as_in_appendix_d(tmp_path: Path) -> None:
    """48 hidden matrices and all other parameters as one; by route alone there would be 52."""
    gpt2_folder(tmp_path / "gpt2")
    private = {"recipe": "dp-muon", "aux": "adamw"}
    deep = {"depth": 12, "weights": ""}

    def blocks(**privacy: str) -> int:
        config = appendix(tmp_path, task=deep, local=private, privacy={"noise": 1.0, **privacy})
        task = build_task(config, (46,), 2, 258)
        mechanism = build_recipe(config, task).mechanism
        assert isinstance(task, NetworkTask) and mechanism is not None
        names = [name for name, _ in task.module.named_parameters()]
        joint = mechanism.clipping.joint_block
        hidden = [name for name in names if name not in joint]
        assert len({name.split(".h.")[-1] for name in hidden}) == len(hidden)
        if privacy:
            parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            assert {*hidden} == {
                f"transformer.h.{k}.{part}.weight" for k in range(12) for part in parts
            }
        return mechanism.clipping.blocks(names)

    assert blocks(blocks="hidden") == 49 and blocks() == 52


def test_embeddings_and_whole_projections_take_muons_step(tmp_path: Path) -> None:
    """Two rounds against a loop through transformers' own model: every tensor with two axes is
    orthogonalized whole, and the head apart from the embeddings."""
    held = gpt2_folder(tmp_path / "gpt2")
    config = appendix(tmp_path)
    form = Form(258, POSITIONS, WIDTH, DEPTH, HEADS, tied=False)

    def step(X: Params, G: Params, M: Params) -> None:
        for name, value in X.items():
            M[name].mul_(0.9).add_(0.1 * G[name])
            value.sub_(0.05 * smoothed_polar(M[name], 0.1) if value.ndim == 2 else 0.3 * M[name])

    def loss_of(X: Params, windows: Tensor, labels: Tensor) -> Tensor:
        windows = windows.long()
        logits = functional_call(own_model(form), X, (windows[:, :-1],)).logits
        losses = []
        for row, window in zip(logits, windows, strict=True):
            first, second = (window == END).nonzero().flatten().tolist()
            losses.append(cross_entropy(row[first:second], window[first + 1 : second + 1]))
        return torch.stack(losses).mean()

    (expected, _), found = by_hand(config, step, loss_of), trained(config)[1].params
    torch.testing.assert_close(replica(found), expected, rtol=1e-7, atol=1e-10)
    head, rows = found["lm_head.weight"][0], found["transformer.wte.weight"][0]
    assert not torch.allclose(head, rows) and len(held["wpe.weight"]) == POSITIONS
    split = replica(trained(appendix(tmp_path, local={"qkv": "split"}))[1].params)
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.allclose(split[name], expected[name], rtol=1e-4)
    assert matrix_counts(decoder(form), "all-matrices", "whole")[name] == 1
    assert matrix_counts(decoder(form), "all-matrices")[name] == 3


def test_clipped_sums_with_an_untied_head_are_the_loop(tmp_path: Path) -> None:
    """Each example through transformers' own model and autograd, in blocks of Appendix D."""
    gpt2_folder(tmp_path / "gpt2")
    config = appendix(tmp_path)
    task = task_of(config)
    windows = torch.from_numpy(read_source(config).inputs[:3].astype(np.float64))
    params = task.initial(generator(0, Draw.INITIAL))
    form = Form(258, POSITIONS, WIDTH, DEPTH, HEADS, tied=False)
    hidden = {name for name, count in matrix_counts(task.module, "hidden").items() if count}
    joint = frozenset(params) - hidden
    assert {"lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"} < joint
    clip, model = Clipping("block", 0.05, joint), own_model(form)
    model.load_state_dict(replica(params))
    totals = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for window in windows.long():
        model.zero_grad()
        first, second = (window == END).nonzero().flatten().tolist()
        logits = model(window[None, :-1]).logits[0]
        cross_entropy(logits[first:second], window[first + 1 : second + 1]).backward()
        slopes = {name: value.grad for name, value in model.named_parameters()}
        rest = math.sqrt(sum(float(slopes[name].square().sum()) for name in joint))  # type: ignore
        for name, slope in slopes.items():
            assert slope is not None
            length = float(slope.norm()) if name in hidden else rest
            totals[name] += min(1.0, 0.05 / length) * slope
    assert find_ghosts(task.module, task.shape) is not None
    batch = Batch(windows, torch.zeros(3, dtype=torch.int64))
    _, found = task.clipped([(1.0, params)], [batch], clip)
    torch.testing.assert_close(replica(found), totals, rtol=1e-6, atol=1e-9)
    alone = task.clipped([(1.0, params)], [batch], Clipping("block", 0.05))[1]
    assert not torch.allclose(alone["lm_head.weight"][0], totals["lm_head.weight"])


def test_banned_tokens_are_never_written(tmp_path: Path) -> None:
    """Greedily and with beams; without the ban, the same decoder writes them."""
    held = gpt2_folder(tmp_path / "gpt2")
    form = Form(258, POSITIONS, WIDTH, DEPTH, HEADS, tied=False, padded=True)
    arrays = matching_weights(held, decoder(form), True)
    params = {name: torch.from_numpy(value) for name, value in arrays.items()}
    newlines = tokens_of("").newlines
    assert newlines == [10, 13]
    head = params["lm_head.weight"].clone()
    aim = params["transformer.ln_f.bias"]
    params["transformer.ln_f.weight"] = 0.01 * params["transformer.ln_f.weight"]
    head[10] = 9 * aim  # so that a line break is by far the likeliest
    params["lm_head.weight"] = head
    for beams in (1, 3):
        (free,) = generate(form, params, [[5, 6, END]], END, beams)
        assert free and {*free} == {10}
        (kept,) = generate(form, params, [[5, 6, END]], END, beams, newlines)
        assert kept and not {10, 13} & {*kept}


def tokenizer_folder(folder: Path) -> int:
    """A tokenizer of GPT-2's kind, with line breaks among its pieces; the number of its tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    pieces.decoder = decoders.ByteLevel()  # type: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    pieces.train_from_iterator(["name[Ivo], food[Thai]\n\n", "serves Thai food\n\n"] * 4, trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<|endoftext|>")
    whole.save_pretrained(folder)
    return len(whole)


@pytest.mark.slow
def test_the_suite_fine_tunes_files_that_are_given(tmp_path: Path) -> None:
    """At full scale with a model, a tokenizer and a corpus in folders: 9 blocks of 2 layers, the
    model with the best validation BLEU, and a head, which no file has, that starts at the rows."""
    vocabulary = tokenizer_folder(tmp_path / "tokens")
    held = gpt2_folder(tmp_path / "gpt2", vocabulary, 160)
    tokens = tokens_of(str(tmp_path / "tokens"))
    assert {tokens.decode([token]) for token in tokens.newlines} == {""} and tokens.newlines
    make_text(tmp_path / "e2e", "e2e", 20)
    changes = {
        "data": {"folder": str(tmp_path / "e2e"), "tokenizer": str(tmp_path / "tokens"),
                 "context": 150},
        "task": {"weights": str(tmp_path / "gpt2"), "width": WIDTH, "depth": DEPTH, "heads": HEADS,
                 "positions": 160},
        "federation": {"rounds": 2}, "local": {"steps": 1}, "privacy": {"lot": 4.0},
        "output": {"evaluate-every": 1},
    }  # fmt: skip
    (cell, *_) = find("dp-text-gpt2", "e2e", "full", changes, seed=0).within(tmp_path / "out")
    assert isinstance(cell, TextCell) and cell.folder is not None
    few = {"DP-MuonBC": cell.settings.variants["DP-MuonBC"]}
    given = {"variants": few, "prompts": 2, "beams": 2}
    record = replace(cell, settings=cell.settings.model_copy(update=given)).compute()
    (end,) = record["ends"]
    assert not record["made_up"] and end["blocks"] == 4 * DEPTH + 1
    assert 7.5 < end["epsilon"] <= 8 and end["delta"] == 8e-6 and end["pairs"] > 20
    assert len([*cell.folder.glob("method-0-models/*.safetensors")]) == 2
    start = read_weights(cell.folder / "method-0" / "initial.safetensors")
    rows = padded(held["wte.weight"]).astype(np.float32)
    np.testing.assert_allclose(start["lm_head.weight"], rows, rtol=1e-5, atol=1e-7)
    assert start["transformer.wpe.weight"].shape == (160, WIDTH)
    assert not [*cell.folder.glob("public*")]  # nothing was trained without privacy
