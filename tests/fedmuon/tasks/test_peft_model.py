"""A `PeftModel` that the user brings, against a plain loop of peft: losses, gradients, runs; where
its frozen weights are, and models that cannot be trained."""

import json
import pickle
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from language_models import END, save_model, save_texts, save_tokenizer
from safetensors.numpy import load_file
from test_causal_lm import LENGTH, batch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedmuon
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.pretrained import model_tokens
from fedmuon.runs import fingerprints
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.peft_model import BroughtAdapters, brought_adapters, peft_task
from fedmuon.tasks.per_example.clipping import Clipping

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),  # of GPT-2
]
RANK, ALPHA, CPU = 2, 6, torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path_factory.getbasetemp() / "models"))


@pytest.fixture(scope="module", params=("llama", "gpt2"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_model(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_model(tmp_path_factory.mktemp("llama-alone")))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_texts(tmp_path_factory.mktemp("base") / "texts")


def peft_model(folder: Path, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A model with random LoRA factors, as peft makes it."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
    layers = ["c_attn", "c_proj"] if hasattr(model, "transformer") else ["q_proj", "down_proj"]
    options = {"target_modules": layers, **options}
    torch.manual_seed(1)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **options)
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.copy_(0.3 * torch.randn(param.shape, dtype=param.dtype))
    return model


def task_of(model: Any, dtype: torch.dtype = torch.float64) -> NetworkTask:
    return peft_task(brought_adapters(model), (LENGTH + 1,), 0, dtype, CPU)


def started(task: NetworkTask, stack: int = 1) -> Params:
    return task.initial(generator(0, Draw.INITIAL), stack)


def plain_loss(model: Any, windows: Tensor) -> Tensor:
    """The mean of the windows' losses, in the way of a loop with peft."""
    windows, losses = windows.long(), []
    for window in windows:
        tokens = torch.where(window < 0, -1 - window, window)
        logits = model(input_ids=tokens[None, :-1]).logits[0]
        predicted = window[1:] >= 0
        losses.append(cross_entropy(logits[predicted], window[1:][predicted]))
    return torch.stack(losses).mean()


# --- The function and its gradients ---------------------------------------------------------------


def test_losses_and_gradients_are_those_of_a_plain_loop(folder: Path) -> None:
    model, samples = peft_model(folder).eval(), batch()
    task = task_of(model)
    params = started(task)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert list(params) == list(trained) and all(".lora_" in name for name in params)
    loss, slope = task.gradient(params, [samples])
    expected = plain_loss(model, samples.inputs)
    expected.backward()
    assert abs(float(loss[0] - expected.detach())) < 1e-10
    for name, param in trained.items():
        assert torch.equal(params[name][0], param.detach()) and param.grad is not None
        torch.testing.assert_close(slope[name][0], param.grad, rtol=1e-7, atol=1e-10)
    one = task.gradient(started(task, 3), [samples])[1]  # three replicas in one call
    assert task.vectorized is None
    for name, value in slope.items():
        torch.testing.assert_close(one[name][2], value[0], rtol=1e-9, atol=1e-12)
    scaled = started(task_of(peft_model(folder, use_rslora=True)))
    control = task_of(peft_model(folder, use_rslora=True)).gradient(scaled, [samples])[0]
    assert abs(float(control - loss)) > 1e-4  # α/√r instead of α/r


def test_clipped_sums_are_those_of_a_loop_over_examples(folder: Path) -> None:
    model, samples, clip = peft_model(folder).eval(), batch(), Clipping("flat", 0.01)
    task = task_of(model)
    sums = task.clipped([(1.0, started(task))], [samples], clip)[1]
    expected: dict[str, Tensor] = {}
    for window in samples.inputs:
        model.zero_grad()
        plain_loss(model, window[None]).backward()
        slopes = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.stack([slope.square().sum() for slope in slopes.values()]).sum().sqrt()
        factor = min(1.0, 0.01 / float(norm))
        assert factor < 1
        for name, value in slopes.items():
            expected[name] = expected.get(name, torch.zeros_like(value)) + factor * value
    for name, value in expected.items():
        torch.testing.assert_close(sums[name][0], value, rtol=1e-7, atol=1e-10)


def test_dropout_of_adapters_acts_in_steps_only(llama: Path) -> None:
    task = task_of(peft_model(llama, lora_dropout=0.5))
    params, samples = started(task), batch()
    assert task.keyed
    keys = [torch.arange(5), torch.arange(5), torch.arange(5) + 9]
    losses = [
        task.gradient(params, [Batch(samples.inputs, samples.labels, None, key)])[0] for key in keys
    ]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
    without = task_of(peft_model(llama)).losses(params, samples)[0]
    torch.testing.assert_close(task.losses(params, samples)[0], without)


def test_trained_heads_are_parameters_too(llama: Path) -> None:
    model = peft_model(llama, modules_to_save=["lm_head"])
    names = [name for name in started(task_of(model)) if "lora" not in name]
    assert names == ["base_model.model.lm_head.modules_to_save.default.weight"]


def test_bfloat16_weights_stay_bfloat16(llama: Path) -> None:
    model = peft_model(llama, torch.bfloat16)
    task = task_of(model, torch.float32)
    frozen = {name: b for name, b in task.module.named_buffers() if name.endswith("weight")}
    assert {value.dtype for value in frozen.values()} == {torch.bfloat16}
    name = "base_model.model.model.embed_tokens.weight"
    assert torch.equal(frozen[name], model.state_dict()[name])
    loss, slope = task.gradient(started(task), [Batch(batch().inputs.float(), batch().labels)])
    assert loss.dtype == torch.float32
    assert {value.dtype for value in slope.values()} == {torch.float32}


# --- Where the weights are ------------------------------------------------------------------------


def test_frozen_weights_are_not_copied(llama: Path) -> None:
    model = peft_model(llama)
    task = task_of(model)
    places = {p.data_ptr() for p in model.parameters() if not p.requires_grad}
    buffers = [b for name, b in task.module.named_buffers() if name.endswith("weight")]
    assert {buffer.data_ptr() for buffer in buffers} == places
    assert all(p.is_meta for p in task.module.parameters())
    assert len(list(model.parameters())) > len(places)  # the user's model is as before
    model(input_ids=torch.ones((1, 3), dtype=torch.long))


def test_pickled_models_hold_arrays_outside_of_the_stream(llama: Path) -> None:
    """Ray keeps these buffers in its object store, where the workers of a machine share them."""
    model = peft_model(llama)
    buffers: list[pickle.PickleBuffer] = []
    brought = brought_adapters(model)
    stream = pickle.dumps(brought, protocol=5, buffer_callback=buffers.append)
    outside = sum(memoryview(buffer).nbytes for buffer in buffers)
    frozen = {p.data_ptr(): p.nbytes for p in model.parameters() if not p.requires_grad}
    assert outside >= sum(frozen.values()) > 90_000
    again = pickle.loads(stream, buffers=buffers)
    assert isinstance(again, BroughtAdapters) and again.digest == brought.digest
    task = peft_task(again, (LENGTH + 1,), 0, torch.float64, CPU)
    expected = task_of(model)
    assert torch.equal(
        task.losses(started(task), batch())[0], expected.losses(started(task), batch())[0]
    )


def test_a_digest_says_which_model_it_is(llama: Path) -> None:
    first, second = (brought_adapters(peft_model(llama)) for _ in range(2))
    with_dropout = brought_adapters(peft_model(llama, lora_dropout=0.1))
    other = peft_model(llama)
    with torch.no_grad():
        other.get_base_model().lm_head.weight[0, 0] += 1
    changed = brought_adapters(other)
    assert first.digest == second.digest
    assert len({first.digest, with_dropout.digest, changed.digest}) == 3
    assert list(fingerprints.parts(first, {})) == list(fingerprints.parts(second, {}))
    assert list(fingerprints.parts(first, {})) != list(fingerprints.parts(changed, {}))


# --- Runs -----------------------------------------------------------------------------------------


def settings(texts: Path, **tables: dict) -> dict[str, dict]:
    base: dict[str, dict] = {
        "data": {"name": "text", "folder": str(texts), "context": LENGTH, "minimum": 5},
        "federation": {"partition": "column", "rounds": 2, "per-round": 2, "seed": 3},
        "local": {"recipe": "fedavg", "steps": 2, "batch": 4, "lr": 0.5},
        "engine": {"dtype": "float64", "device": "cpu"},
        "output": {"checkpoint-every": 1},
    }
    return {name: base.get(name, {}) | tables.get(name, {}) for name in {*base, *tables}}


@pytest.mark.parametrize(
    "setting",
    [{"checkpointing": True}, {"base-dtype": "bfloat16"}, {"lora-layers": "q_proj"},
     {"lora-alpha": 3.0}, {"label-smoothing": 0.1}],
)  # fmt: skip
def test_keys_of_models_by_name_are_rejected(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(InputError, match=rf"\[task\] {name} = .* has no effect"):
        parse({"task": {"name": "given", **setting}})


def test_a_passed_model_without_tokenizer_names_its_config(texts: Path, tmp_path: Path) -> None:
    model = peft_model(save_model(tmp_path / "bare"))
    with pytest.raises(InputError, match=r"base_model_name_or_path = .*bare'.* no tokenizer"):
        fedmuon.run(settings(texts), task=model)


def test_a_run_trains_the_adapters(llama: Path, texts: Path, tmp_path: Path) -> None:
    """The first round is that of a plain loop, and the trained adapters fit into the model."""
    model = peft_model(llama)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # only peft, above, uses the old name
        result = fedmuon.run(settings(texts), task=model, out=tmp_path / "run")
    assert result.summary["perplexity"] == pytest.approx(np.exp(result.summary["test_loss"]))
    assert result.summary["test_loss"] < result.summary["untrained"]["test_loss"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])  # the user's model is as before
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    first = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])
    assert first["bytes_up"] == first["bytes_down"] == 2 * 8 * adapters
    biggest = max(file.stat().st_size for file in (tmp_path / "run").rglob("*.safetensors"))
    assert biggest < 8 * adapters + 20_000
    trained = load_file(tmp_path / "run" / "model.safetensors")
    missing = model.load_state_dict({k: torch.from_numpy(v) for k, v in trained.items()}, False)
    assert not missing.unexpected_keys
    tokens = model_tokens(str(llama)).encode("the cat sat")
    assert torch.isfinite(model(input_ids=torch.tensor([[*tokens, END]])).logits).all()
    again = peft_model(llama)
    fedmuon.run(settings(texts), task=again, out=tmp_path / "run", resume=True)
    with torch.no_grad():
        again.get_base_model().lm_head.weight[0, 0] += 1
    with pytest.raises(InputError, match="task differs from the task"):
        fedmuon.run(settings(texts), task=again, out=tmp_path / "run", resume=True)


def test_a_function_can_return_the_model(
    llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With samples of the user, because the tokenizer is not known before the call."""
    windows = np.random.default_rng(0).integers(0, END, (90, LENGTH + 1))
    data = windows, np.zeros(90, np.int64)
    tables = settings(texts, data={"minimum": 5}, federation={"clients": 3})
    tables["data"] = {"minimum": 5}
    tables["federation"]["partition"] = "iid"
    results = [
        fedmuon.run(tables, data=data, task=task, out=tmp_path / name).model
        for name, task in (("model", peft_model(llama)), ("made", lambda: peft_model(llama)))
    ]
    for name, value in results[0].items():
        assert np.array_equal(value, results[1][name])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_equals_inline(llama: Path, texts: Path, tmp_path: Path) -> None:
    for engine in ("inline", "ray"):
        tables = settings(texts, local={"recipe": "fedmuon"})
        tables["engine"]["name"] = engine
        fedmuon.run(tables, task=peft_model(llama), out=tmp_path / engine)
    inline, ray = (load_file(tmp_path / name / "model.safetensors") for name in ("inline", "ray"))
    for name, value in inline.items():
        assert np.abs(value - ray[name]).max() < 1e-12
    start = load_file(tmp_path / "ray" / "initial.safetensors")
    assert max(np.abs(value - start[name]).max() for name, value in ray.items()) > 1e-3


# --- Bad input ------------------------------------------------------------------------------------


def test_models_that_cannot_be_trained_are_rejected(llama: Path, texts: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    merged = peft_model(llama)
    merged.merge_adapter()
    frozen = peft_model(llama).requires_grad_(False)
    base = AutoModelForCausalLM.from_pretrained(str(llama))
    prompt = peft.get_peft_model(
        base, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    for model, message in (
        (merged, "merged into its weights"),
        (frozen, "all parameters of the PeftModel .* are frozen"),
        (prompt, r"learns a prompt \(PROMPT_TUNING\)"),
        (peft_model(llama).to("meta"), "has no values"),
    ):
        with pytest.raises(InputError, match=message):
            fedmuon.run(settings(texts), task=model)


def test_data_that_do_not_fit_the_model_are_rejected(llama: Path, texts: Path) -> None:
    with pytest.raises(InputError, match="context = 40 is longer than the model that you passed"):
        fedmuon.run(settings(texts, data={"context": 40}), task=peft_model(llama))
    unknown = peft_model(llama)
    unknown.peft_config["default"].base_model_name_or_path = None
    with pytest.raises(InputError, match=r"its tokenizer is unknown\. Set base_model_name_or_path"):
        fedmuon.run(settings(texts), task=unknown)


def test_samples_must_be_windows_of_tokens_that_the_model_knows(llama: Path) -> None:
    rng, labels = np.random.default_rng(0), np.zeros(60, np.int64)
    tokens = rng.integers(0, END, (60, LENGTH + 1))
    tables = {"federation": {"clients": 2, "per-round": 1, "rounds": 1}, "local": {"lr": 0.01}}
    for windows, message in (
        (rng.random((60, 4, 4)), r"needs windows of tokens \[n, T \+ 1\], but .* shape \(4, 4\)\. "
         r"Pass data=fedmuon\.text_data"),
        (rng.random((60, LENGTH + 1)), "tokens must be integers, but the data has dtype float64"),
        (tokens + 1000, r"contains the token \d+, but the model knows the tokens 0 to 256"),
        (-1 - (tokens + 1000), "the data contains the token"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            fedmuon.run(tables, task=peft_model(llama), data=(windows, labels))
    byte_windows = tokens.astype(np.uint8)
    fedmuon.run(tables, task=peft_model(llama), data=(byte_windows, labels))


def test_tokens_outside_the_vocabulary_are_rejected_for_a_model_by_name(llama: Path) -> None:
    tables = {"task": {"name": "causal-lm", "weights": str(llama), "lora-rank": 2},
              "federation": {"clients": 2, "per-round": 1, "rounds": 1}}  # fmt: skip
    windows = np.random.default_rng(0).integers(0, END, (60, LENGTH + 1)) + 1000
    with pytest.raises(InputError, match="the data contains the token"):
        fedmuon.run(tables, data=(windows, np.zeros(60, np.int64)))


def test_other_models_of_transformers_are_told_what_to_pass(llama: Path) -> None:
    """A whole language model, and a `PeftModel` for classes."""
    import peft
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    rows = [{"prompt": "", "response": 40 * word, "client": word} for word in "abcd"]
    data = fedmuon.text_data(rows, str(llama), context=LENGTH, prompt="")
    whole = AutoModelForCausalLM.from_pretrained(str(llama))
    tables = {"federation": {"per-round": 1, "rounds": 1}}
    with pytest.raises(InputError, match=r"LlamaForCausalLM is a whole .* peft\.get_peft_model\("):
        fedmuon.run(tables, task=whole, data=data)
    classes = AutoModelForSequenceClassification.from_pretrained(str(llama))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
    classifier = peft.get_peft_model(classes, config)
    for samples in (data, (np.zeros((60, 4, 4), np.int64), np.zeros(60, np.int64))):
        with pytest.raises(InputError, match="task_type must be CAUSAL_LM"):
            fedmuon.run(tables, task=classifier, data=samples)
