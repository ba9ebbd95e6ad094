"""Documents that clients own: books of a bible, fortunes, text files, JSONL, CSV, or your rows.

Each client's documents become a sequence of tokens, which is cut into windows of T + 1 tokens. The
model predicts each token of a window except the first. A token that the model reads but does not
predict, such as a token of a prompt, is stored as the negative number -1 - token.
"""

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.files import read_bytes, read_text
from fedmuon.data.pretrained import ModelTokens, model_tokens
from fedmuon.data.source import Source
from fedmuon.data.text import BYTES, HELD_OUT, Tokens, text_files, windows
from fedmuon.data.words import listed

BIBLE = Path("/usr/lib/bible.data")
FORTUNES = Path("/usr/share/games/fortunes")
BOOKS = 66
VERSE = re.compile(r"(\d?[A-Za-z]+)\d+:\d+ (.*)")  # such as "Ge1:1 In the beginning"


def installed(path: Path) -> Path:
    """Return where a package installs a file. FEDMUON_SYSTEM_DATA replaces its folder."""
    folder = os.environ.get("FEDMUON_SYSTEM_DATA")
    return Path(folder) / path.name if folder else path


class Vocabulary(Protocol):
    """Tokens of text: their number, the token END if there is one, and a function for text."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...


class Owned(NamedTuple):
    """The tokens of one client: for training, and held out."""

    client: str
    train: Sequence[int]
    held_out: Sequence[int]


def tokens_for(tokenizer: str) -> Vocabulary:
    """Return the tokens of a pretrained model, or bytes if `tokenizer` is empty."""
    return model_tokens(tokenizer) if tokenizer else Tokens(BYTES + 1)


def bible(
    folder: str | Path = "", context: int = 64, tokenizer: str = "", clients: str = "",
    windows: int = 0,
) -> Source:  # fmt: skip
    """Read the King James Bible of Debian's package bible-kjv-text. Each book is a client.

    Args:
        folder: The file bible.data, or its folder. By default, /usr/lib.
        context: The context length T. Each window has T + 1 tokens.
        tokenizer: The pretrained model whose tokens are used. If empty, each byte is a token.
        clients: Name patterns of the clients to read, separated by commas, such as `Ruth, *Jn`. If
            empty, all clients.
        windows: Maximum number of training windows of each client, spread evenly over its text.
            0 means all windows.
    """
    path = Path(folder).expanduser() if folder else installed(BIBLE)
    path = path / BIBLE.name if path.is_dir() else path
    _require_installed(path.is_file(), "bible-kjv", path, "bible-kjv-text")
    books: dict[str, list[str]] = {}
    for line in bible_text(path).splitlines()[1:]:  # the first line is a title
        if verse := VERSE.fullmatch(line):
            books.setdefault(verse[1], []).append(verse[2])
    if len(books) != BOOKS:
        raise InputError(
            f"{path} contains {len(books)} books instead of {BOOKS}, so the file is damaged. "
            "Reinstall it: apt-get install --reinstall bible-kjv-text"
        )
    books = _chosen(books, clients, "bible-kjv")
    texts = {book: ["\n".join(verses)] for book, verses in books.items()}
    return _source("bible-kjv", texts, context, tokenizer, str(path), most=windows)


def fortunes(
    folder: str | Path = "", context: int = 64, tokenizer: str = "", clients: str = "",
    windows: int = 0,
) -> Source:  # fmt: skip
    """Read the fortunes of Debian's package fortunes. Each file is a client.

    Files that are too short for one window are left out. For the arguments, see `bible`.
    """
    place = Path(folder).expanduser() if folder else installed(FORTUNES)
    files = [file for file in text_files(place) if not file.suffix and not file.is_symlink()]
    _require_installed(files, "fortunes", place, "fortunes")
    texts = {}
    for file in _chosen({file.name: file for file in files}, clients, "fortunes").values():
        sayings = re.split(r"^%\n", read_text(file, errors="replace") + "\n", flags=re.MULTILINE)
        texts[file.name] = [saying.strip("\n") for saying in sayings if saying.strip()]
    return _source("fortunes", texts, context, tokenizer, str(place), shorter=True, most=windows)


def _chosen(owned: dict[str, Any], clients: str, name: str) -> dict[str, Any]:
    """Return the entries of the clients whose names match one of the patterns."""
    patterns = [pattern.strip() for pattern in clients.split(",") if pattern.strip()]
    for pattern in patterns:
        if not any(fnmatchcase(client, pattern) for client in owned):
            raise InputError(
                f"[data.options] clients: no client of {name} is named '{pattern}'. The clients "
                f"are {', '.join(owned)}."
            )
    return {
        client: entry
        for client, entry in owned.items()
        if not patterns or any(fnmatchcase(client, pattern) for pattern in patterns)
    }


def documents(folder: str | Path, context: int, tokenizer: str) -> Source:
    """Read a folder of text files with the tokens of a pretrained model. Each file is a client."""
    files = text_files(folder) if folder else []
    if not files:
        raise InputError(
            f"[data] folder = '{folder}' contains no text, but name = 'text' needs a text file, "
            "or a folder with text files"
        )
    texts = {file.name: [read_text(file, errors="replace")] for file in files}
    return _source("text", texts, context, tokenizer, str(folder))


def jsonl(
    folder: str | Path = "", context: int = 64, tokenizer: str = "", prompt: str = "prompt",
    response: str = "response", client: str = "client",
) -> Source:  # fmt: skip
    """Read prompts and responses of clients from a JSONL or CSV file.

    A JSONL file has one JSON object in each line. A file whose name ends with .csv is read as a
    table: its first line names the columns, which have the same meaning as keys.

    The model learns to predict the responses. It reads the prompts, but does not learn to predict
    them. The last fifth of each client's lines is held out.

    Args:
        folder: Path of the file.
        context: The context length T. Each window has T + 1 tokens.
        tokenizer: The pretrained model whose tokens and chat template are used.
        prompt: The key of the prompt in a line. If empty, the model learns to predict all text.
        response: The key of the response.
        client: The key of the client that owns the line. If empty, one client owns all lines.
    """
    path = Path(folder).expanduser()
    if not folder or not path.is_file():
        raise InputError(
            f"[data] folder = '{folder}' is not a file, but name = 'jsonl' needs the path of a "
            ".jsonl or .csv file"
        )
    tokens = tokens_for(tokenizer)
    if not isinstance(tokens, ModelTokens):
        raise InputError(
            "[data] name = 'jsonl' needs the tokens of a pretrained model. Set [task] name = "
            "'causal-lm'."
        )
    lines = _lines(path, [key for key in (prompt, response, client) if key], client)
    return _dialogues("jsonl", lines, tokens, context, (prompt, response, client), str(path))


def text_data(
    rows: Iterable[Mapping[str, Any]],
    weights: str,
    context: int = 64,
    prompt: str = "prompt",
    response: str = "response",
    client: str = "client",
) -> Source:
    """Return prompts and responses of clients as data for the task causal-lm.

    Pass the result to `fedmuon.run` as `data`. The last fifth of each client's rows is held out.

    Args:
        rows: The rows, such as a `datasets.Dataset`, or a list of dicts.
        weights: The pretrained model whose tokens and chat template are used: the value of `[task]
            weights`.
        context: The context length T. Each window has T + 1 tokens.
        prompt: The key of the prompt in a row. If empty, the model learns to predict all text.
        response: The key of the response.
        client: The key of the client that owns the row. If empty, one client owns all rows.

    Returns:
        The windows of tokens, with the clients that own them.

    Raises:
        InputError: If a row has no such text, or the model has no tokenizer.

    Example:
        >>> import fedmuon
        >>> rows = [{"prompt": "2 + 2?", "response": "4", "client": "a"}]
        >>> data = fedmuon.text_data(rows, "smollm2", client="owner")
        Traceback (most recent call last):
            ...
        fedmuon.core.errors.InputError: row 0 has no 'owner': add it, or pass prompt, ...
    """
    keys = [key for key in (prompt, response, client) if key]
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InputError(
                f"row {number} is a {type(row).__name__}, but each row must be a mapping from keys "
                "to texts, as in a datasets.Dataset"
            )
        for key in keys:
            if row.get(key) in (None, ""):
                raise InputError(
                    f"row {number} has no {key!r}: add it, or pass prompt, response and client "
                    f"with the names of the keys. This row has the keys {listed(row)}."
                )
            _require_text(row[key], f"{key!r} in row {number}", number_allowed=key == client)
        lines.append(row)
    if not lines:
        raise InputError("rows is empty. Pass at least one row with a text.")
    tokens, place = model_tokens(weights), "the rows that you passed"
    return _dialogues("text_data", lines, tokens, context, (prompt, response, client), place)


def _dialogues(
    name: str,
    lines: Sequence[Mapping[str, Any]],
    tokens: ModelTokens,
    context: int,
    keys: tuple[str, str, str],
    place: str,
) -> Source:
    """Return windows of prompts, which are only read, and responses, which are predicted."""
    prompt, response, client = keys
    if not response:
        raise InputError(
            "[data.options] response is empty, but the model learns to predict the responses. Set "
            "response to the key of the text to predict."
        )
    owned: dict[str, list[list[int]]] = {}
    for line in lines:
        question = tokens.question(str(line[prompt])) if prompt else []
        read = [-1 - token for token in question]
        written = tokens.encode(str(line[response]))
        end = [] if tokens.end is None else [tokens.end]
        owned.setdefault(str(line[client]) if client else "", []).append([*read, *written, *end])
    parts = []
    for owner, dialogues in owned.items():
        cut = len(dialogues) - len(dialogues) // HELD_OUT
        parts.append(Owned(owner, _joined(dialogues[:cut]), _joined(dialogues[cut:])))
    return packed(name, parts, context, tokens.vocabulary, place)


def _lines(path: Path, keys: Iterable[str], client: str) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file, or the rows of a CSV file. Each must have these keys.

    The values are texts. That of the key `client` may also be a number.
    """
    try:
        text = read_text(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read as UTF-8 text ({error}): check [data] folder"
        ) from None
    is_table = path.suffix.lower() == ".csv"
    lines = _table_lines(path, text) if is_table else _json_lines(path, text)
    for number, line in lines.items():
        for key in keys:
            if key not in line or line[key] in (None, ""):
                raise InputError(
                    f"line {number} of {path} has no {key!r}: add it, or set [data.options] to "
                    f"the keys of the file. This line has the keys {listed(line)}."
                )
            named = f"{key!r} in line {number} of {path}"
            _require_text(line[key], named, number_allowed=key == client)
    if not lines:
        content = "a line of column names, and rows" if is_table else "one JSON object in each line"
        raise InputError(f"{path} is empty: write {content}")
    return list(lines.values())


def _require_text(value: object, named: str, number_allowed: bool) -> None:
    """Raise an error if a value is not text, or contains half of a character."""
    if isinstance(value, list | dict):
        raise InputError(
            f"{named} is not text, but a {'list' if isinstance(value, list) else 'JSON object'}: "
            "write one text"
        )
    if not isinstance(value, str) and not number_allowed:
        raise InputError(
            f"{named} is not text, but {value!r}: write it as a text, such as '{value}'"
        )
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{named} contains {error.object[error.start]!a}, which is half of a character: write "
            "the whole character, or remove it"
        ) from None


def _json_lines(path: Path, text: str) -> dict[int, dict[str, Any]]:
    """Return the object of each line, by line number."""
    lines = {}
    # Texts may contain other line separators, such as U+2028, at which `splitlines` would cut.
    for number, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            line = json.loads(content)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            raise InputError(
                f"line {number} of {path} is not a JSON object: write one object in each line, "
                'such as {"prompt": "...", "response": "...", "client": "..."}'
            )
        lines[number] = line
    return lines


def _table_lines(path: Path, text: str) -> dict[int, dict[str, Any]]:
    """Return the row that ends in each line, by line number. A quoted text may have many lines."""
    rows, lines = csv.DictReader(io.StringIO(text, newline=""), strict=True), {}
    while True:
        start = rows.line_num + 1
        longest = csv.field_size_limit(len(text))  # a text may be longer than csv's own limit
        try:
            row = next(rows)
            if None in row:
                raise csv.Error(f"it has more values than the {len(row) - 1} columns")
        except StopIteration:
            return lines
        except csv.Error as error:
            raise InputError(
                f"line {max(2, start)} of {path} is not a row of a CSV file ({error}). Put text "
                'that contains commas or quotes in quotes, and write " in such a text as "".'
            ) from None
        finally:
            csv.field_size_limit(longest)
        lines[rows.line_num] = row


def packaged() -> list[tuple[str, Path | None, str]]:
    """Return the name of each packaged corpus, its path if it is installed, and how to get it."""
    book, cookies = installed(BIBLE), installed(FORTUNES)
    return [
        ("bible-kjv", book if book.is_file() else None, "apt-get install bible-kjv-text"),
        ("fortunes", cookies if cookies.is_dir() else None, "apt-get install fortunes"),
    ]


def _require_installed(present: object, name: str, path: Path, package: str) -> None:
    if not present:
        raise InputError(
            f"[data] name = '{name}' needs the files of Debian's package {package}, but {path} "
            f"does not contain them. Run apt-get install {package}, or set [data] folder to their "
            "folder."
        )


def _source(
    name: str,
    texts: dict[str, list[str]],
    context: int,
    tokenizer: str,
    where: str,
    shorter: bool = False,
    most: int = 0,
) -> Source:
    """Cut each client's texts into windows: the first 4/5 for training, the rest for testing."""
    if most < 0:
        raise InputError(
            f"[data.options] windows = {most} is negative. Set it to the maximum number of "
            "training windows of each client, or to 0 for all windows."
        )
    tokens = tokens_for(tokenizer)
    end = [] if tokens.end is None else [tokens.end]
    parts = []
    for client, documents in texts.items():
        encoded = _joined([*tokens.encode(text), *end] for text in documents)
        cut = len(encoded) - len(encoded) // HELD_OUT
        if shorter and cut <= context:
            continue
        parts.append(Owned(client, encoded[:cut], encoded[cut:]))
    return packed(name, parts, context, tokens.vocabulary, where, most)


def packed(
    name: str, parts: Sequence[Owned], context: int, vocabulary: int, where: str, most: int = 0
) -> Source:
    """Cut the tokens of each client into windows of T + 1 tokens.

    Windows without a token to predict are left out. If `most` is positive, a client trains on at
    most so many windows, which are spread evenly over its text.

    Raises:
        InputError: If a client has no window to train on.
    """
    train = [_predicting(windows(np.array(part.train, np.int64), context)) for part in parts]
    test = [_predicting(windows(np.array(part.held_out, np.int64), context)) for part in parts]
    for part, rows in zip(parts, train, strict=True):
        if not len(rows):
            raise InputError(
                f"the client '{part.client}' of {name} ({where}) has {len(part.train)} tokens to "
                f"train on, but a sequence of [data] context = {context} tokens needs "
                f"{context + 1} tokens, some of them to predict. Lower context, or give this "
                "client more text."
            )
    if most:
        train = [rows[spread_evenly(len(rows), most)] for rows in train]
    if not parts:
        raise InputError(
            f"no client of {name} ({where}) has {context + 1} tokens, which a sequence of [data] "
            f"context = {context} tokens needs. Lower context, or use more text."
        )
    sizes = np.array([len(rows) for rows in (*train, *test)])
    owner = np.repeat(np.tile(np.arange(len(parts)), 2), sizes)
    official = int(sizes[: len(parts)].sum())
    rows = np.concatenate([*train, *test])
    return Source(
        name, rows, owner, len(parts), official if official < len(rows) else None, where,
        vocabulary, owner=owner, owner_names=tuple(part.client for part in parts),
    )  # fmt: skip


def spread_evenly(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the numbers 0 to `count` - 1, at equal distances."""
    return np.linspace(0, count, min(count, most), endpoint=False).astype(np.int64)


def _predicting(rows: np.ndarray) -> np.ndarray:
    return rows[(rows[:, 1:] >= 0).any(1)]


def _joined(lists: Iterable[Sequence[int]]) -> list[int]:
    return [token for tokens in lists for token in tokens]


# The file of the package bible-kjv-text: a header, and blocks that the Unix program `compress`
# compressed with the algorithm LZW. Each block but the last expands to 65,536 bytes. The header
# ends with the number of blocks and the place of each block in the file, as big-endian integers.

MAGIC, TABLE = b"EC02Compressed Data File", 0x58
CLEAR, FIRST_BITS, MOST_BITS = 256, 9, 16


def bible_text(path: Path) -> str:
    """Return the text in a file of bible-kjv-text: a title, then one verse in each line."""
    content = read_bytes(path)
    try:
        if not content.startswith(MAGIC):
            raise ValueError("it has another header")
        count = int.from_bytes(content[TABLE : TABLE + 4], "big")
        places = np.frombuffer(content, ">u4", count, TABLE + 4).tolist()
        ends = [*places[1:], len(content)]
        blocks = [expanded(content[a:b]) for a, b in zip(places, ends, strict=True)]
        return b"".join(blocks).decode("ascii")
    except ValueError as error:
        raise InputError(
            f"{path} is not the text of bible-kjv-text ({error}). Reinstall it: apt-get install "
            "--reinstall bible-kjv-text"
        ) from None


def expanded(data: bytes) -> bytes:
    """Expand a block of LZW codes, as the program `uncompress` does.

    Codes have 9 to 16 bits, and the number of bits grows with the table. The codes of one length
    fill groups of eight, so the rest of a group is skipped when the length changes.
    """
    fresh = [bytes([number]) for number in range(256)] + [b""]
    table, before, bits, position, group = fresh[:], b"", FIRST_BITS, 0, 0
    output = bytearray()

    def next_group() -> int:
        return position + (group - position) % (8 * bits)

    while True:
        if len(table) >= 1 << bits and bits < MOST_BITS:
            position = group = next_group()
            bits += 1
        if position + bits > 8 * len(data):
            return bytes(output)
        first = position >> 3
        code = int.from_bytes(data[first : first + 4], "little") >> (position & 7)
        code &= (1 << bits) - 1
        position += bits
        if code == CLEAR:
            position = group = next_group()
            table, before, bits = fresh[:], b"", FIRST_BITS
            continue
        if code > len(table) or (code == len(table) and not before):
            raise ValueError("it is damaged")
        entry = table[code] if code < len(table) else before + before[:1]
        output += entry
        if before and len(table) < 1 << MOST_BITS:
            table.append(before + entry[:1])
        before = entry


READERS: dict[str, Callable[..., Source]] = {
    "bible-kjv": bible,
    "fortunes": fortunes,
    "jsonl": jsonl,
}
