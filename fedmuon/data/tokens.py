"""Text as tokens and back: bytes, or the pieces of a tokenizer kept in a local folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedmuon.data.text import BYTES
from fedmuon.errors import InputError


@dataclass(frozen=True)
class Tokens:
    """A vocabulary whose last token, END, is in no text; `pieces` is None for bytes."""

    vocabulary: int
    pieces: Any = None

    @property
    def end(self) -> int:
        """END."""
        return self.vocabulary - 1

    def encode(self, text: str) -> list[int]:
        """Text -> tokens, none of them END."""
        if self.pieces is None:
            return list(text.encode())
        return self.pieces.encode(text, add_special_tokens=False)

    def prompt(self, table: str) -> list[int]:
        """What a sentence about the table is to go on from."""
        return [*self.encode(table), self.end]

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens up to the first END -> text; bytes that are no UTF-8 are marked."""
        kept = list(tokens)
        kept = kept[: kept.index(self.end)] if self.end in kept else kept
        text = bytes(kept).decode(errors="replace") if self.pieces is None else (
            self.pieces.decode(kept)
        )  # fmt: skip
        return text.strip()


@lru_cache(maxsize=2)
def tokens_of(folder: str) -> Tokens:
    """Bytes, or GPT-2's pieces from the files of its tokenizer in a folder; nothing is fetched."""
    if not folder:
        return Tokens(BYTES + 1)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError(
            "[data] tokenizer needs transformers: pip install 'fedmuon[text]', or leave it out"
        ) from None
    try:
        place = Path(folder).expanduser()
        pieces = AutoTokenizer.from_pretrained(str(place), local_files_only=True)
    except Exception as error:  # damaged files fail in any way, in several libraries
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            f"[data] tokenizer = '{folder}' holds no tokenizer ({why}): "
            "name a folder with tokenizer.json, or leave it out for bytes"
        ) from None
    if pieces.eos_token_id != len(pieces) - 1:
        raise InputError(
            f"[data] tokenizer = '{folder}' does not end its vocabulary with the token that ends "
            "a text, as GPT-2's does: take that one, or leave it out for bytes"
        )
    return Tokens(len(pieces), pieces)
