"""Text as windows of tokens: Python's documentation, local files, and tables with sentences.

Tokens are bytes, or the tokens of a tokenizer in a local folder. A sample is a window of T + 1
consecutive tokens. For each of the first T tokens, the model predicts the token that follows.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.extras import installing
from fedmuon.core.files import read_bytes, read_text
from fedmuon.core.rng import Draw, generator
from fedmuon.data.source import Source

BYTES = 256  # vocabulary size if tokens are bytes
GROUPS = 10
HELD_OUT = 5  # one fifth of the bytes is held out for testing


def pydoc(context: int = 64) -> Source:
    """Read the help texts of Python's `help()` topics as windows of T + 1 tokens.

    The topics are divided into ten groups of about the same length, and the label is the number of
    the group. Topics quote each other, so repeated paragraphs are removed. Otherwise, training and
    test samples could contain the same text.
    """
    # Imported here: these are 500 kB of text, which only this source needs.
    from pydoc_data import topics

    buckets: list[list[bytes]] = [[] for _ in range(GROUPS)]
    for topic in _once(topics.topics):
        min(buckets, key=lambda bucket: sum(map(len, bucket))).append(topic)
    groups = [b"\n\n".join(bucket) for bucket in buckets]
    return _source("pydoc", groups, context, str(topics.__file__))


def text(folder: str | Path = "", context: int = 64) -> Source:
    """Read a text file or a folder of text files as windows of T + 1 bytes.

    In a folder, each file has its own label. A single file is cut into ten parts, and each part has
    its own label. With the tokens of a pretrained model, `corpora.documents` reads the files.
    """
    files = text_files(folder) if folder else []
    if not files:
        raise InputError(
            f"[data] folder = '{folder}' contains no text, but name = 'text' needs a text file, "
            "or a folder with text files"
        )
    groups = [read_bytes(file) for file in files]
    if len(groups) == 1:
        edges = np.linspace(0, len(groups[0]), GROUPS + 1).astype(int).tolist()
        groups = [groups[0][a:b] for a, b in pairwise(edges)]
    return _source("text", groups, context, str(folder))


def text_files(folder: str | Path) -> list[Path]:
    """Return the path itself if it is a file.

    For a folder, return its visible files, sorted by name.
    """
    place = Path(folder).expanduser()
    if place.is_file():
        return [place]
    paths = place.iterdir() if place.is_dir() else ()
    return sorted(path for path in paths if path.is_file() and path.name[0] != ".")


def windows(tokens: np.ndarray, context: int) -> np.ndarray:
    """Cut a text into consecutive windows of T + 1 tokens.

    The last token of a window is also the first token of the next window. A text of l tokens
    therefore has (l - 1) // T windows.
    """
    count = max(0, (len(tokens) - 1) // context)
    return tokens[np.arange(count)[:, None] * context + np.arange(context + 1)]


def _once(topics: Mapping[str, str]) -> Iterator[bytes]:
    """Yield topics from the longest to the shortest, without paragraphs of earlier topics."""
    earlier: set[str] = set()
    for _, topic in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        fresh = []
        for paragraph in topic.split("\n\n"):
            words = " ".join(paragraph.split())
            if words not in earlier:
                earlier.add(words)
                fresh.append(paragraph)
        yield "\n\n".join(fresh).encode()


def _source(name: str, groups: list[bytes], context: int, where: str) -> Source:
    """Cut each group of text into windows: the first 4/5 for training, the rest for testing.

    Train and test windows share no byte.
    """
    tokens = [np.frombuffer(group, np.uint8) for group in groups]
    cuts = [len(group) - len(group) // HELD_OUT for group in tokens]
    parts = [windows(group[:cut], context) for group, cut in zip(tokens, cuts, strict=True)]
    later = [windows(group[cut:], context) for group, cut in zip(tokens, cuts, strict=True)]
    sizes = np.array([len(part) for part in parts + later])
    if not sizes.all():
        raise InputError(
            f"{name} ({where}) is too short for [data] context = {context}, because each of its "
            f"{len(groups)} parts needs {HELD_OUT * (context + 1)} bytes. Lower context, or use "
            "more text."
        )
    labels = np.repeat(np.tile(np.arange(len(groups)), 2), sizes)
    official = int(sizes[: len(groups)].sum())
    return Source(name, np.concatenate(parts + later), labels, len(groups), official, where, BYTES)


@dataclass(frozen=True)
class Tokens:
    """A vocabulary whose last token is END, which occurs in no text.

    If the tokens are bytes, `pieces` is None.
    """

    vocabulary: int
    pieces: Any = None

    @property
    def end(self) -> int:
        """The number of the token END."""
        return self.vocabulary - 1

    @property
    def newlines(self) -> list[int]:
        """The numbers of all tokens whose text contains a line break."""
        if self.pieces is None:
            return [ord("\n"), ord("\r")]
        return [k for k in range(self.end) if {"\n", "\r"} & {*self.pieces.decode([k])}]

    def encode(self, text: str) -> list[int]:
        """Convert text to token numbers, without END."""
        if self.pieces is None:
            return list(text.encode())
        return self.pieces.encode(text, add_special_tokens=False)

    def prompt(self, table: str) -> list[int]:
        """Return the tokens of a table, followed by END.

        A model continues these tokens with a sentence about the table.
        """
        return [*self.encode(table), self.end]

    def window(self, pair: "Pair") -> list[int]:
        """Return the tokens of a table and of its sentence, each followed by END."""
        return [*self.prompt(pair.table), *self.encode(f" {pair.sentence}"), self.end]

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert the tokens before the first END to text, without [PAD].

        Bytes that are not valid UTF-8 become replacement characters.
        """
        valid = [token for token in tokens if token < self.vocabulary]
        valid = valid[: valid.index(self.end)] if self.end in valid else valid
        text = bytes(valid).decode(errors="replace") if self.pieces is None else (
            self.pieces.decode(valid)
        )  # fmt: skip
        return text.strip()


@lru_cache(maxsize=2)
def tokens_of(folder: str) -> Tokens:
    """Return the GPT-2 tokens of a tokenizer in a local folder, or bytes if `folder` is empty.

    Nothing is downloaded.
    """
    if not folder:
        return Tokens(BYTES + 1)
    try:
        # Imported here: transformers is optional, and takes seconds to load.
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError(
            "[data] tokenizer needs the package transformers, which is not installed. Run "
            f"{installing('text')}, or leave tokenizer out to use bytes."
        ) from None
    try:
        place = Path(folder).expanduser()
        pieces = AutoTokenizer.from_pretrained(str(place), local_files_only=True)
    except Exception as error:  # damaged files fail in any way, in several libraries
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            f"[data] tokenizer = '{folder}' contains no tokenizer ({reason}). Set tokenizer to a "
            "folder that contains tokenizer.json, or leave tokenizer out to use bytes."
        ) from None
    if pieces.eos_token_id != len(pieces) - 1:
        raise InputError(
            f"the end-of-text token of [data] tokenizer = '{folder}' must be the last token of "
            "the vocabulary, as in GPT-2, but another token comes last. Use the GPT-2 tokenizer, "
            "or leave tokenizer out to use bytes."
        )
    return Tokens(len(pieces), pieces)


# The files of E2E and DART contain tables and sentences about them. Each pair becomes a window.
#
# E2E is CSV with the columns mr and ref. DART is a JSON list of {"tripleset": [[subject, relation,
# object], ...], "annotations": [{"source": ..., "text": ...}, ...]}. The file names contain train,
# dev or test.
#
# A sample is `table END sentence END END ...`, T + 1 tokens long (DP-Muon, Appendix: `source <bos>
# target <eos>`). The model predicts the tokens after the first END, up to and including the second.

PARTS = ("train", "dev", "test")


@dataclass(frozen=True)
class Pair:
    """A table as text, one sentence about it, and the number of fields in the table."""

    table: str
    sentence: str
    fields: int


def table_text(
    name: str, folder: str | Path, context: int, tokenizer: str = "", pad_token: bool = False
) -> Source:
    """Read tables with sentences as windows of tokens: train samples, then test samples.

    Without a test file, the dev file is used. A table and its sentence that do not fit into a
    window are skipped, as in DP-Muon. Tables with the same number of fields have the same label.
    END is the last token of the tokenizer.

    Args:
        name: `e2e` or `dart`.
        folder: Folder with the files.
        context: The context length T. Each window has T + 1 tokens.
        tokenizer: Folder of a tokenizer. If empty, each byte is a token.
        pad_token: Whether to fill windows with an additional token [PAD] instead of END.
    """
    tokens, parts = tokens_of(tokenizer), corpus(name, folder)
    held_out = parts.get("test") or parts.get("dev") or []
    pairs, count = [*parts["train"], *held_out], len(parts["train"])
    rows, fit = pair_windows(pairs, tokens, context, pad_token)
    official = sum(fit[:count])
    if not official:
        shortest = min((len(tokens.window(pair)) - 1 for pair in pairs[:count]), default=0)
        raise InputError(
            f"{name} ({folder}) has no pair of a table and a sentence that fits into [data] "
            f"context = {context} tokens. The shortest pair has {shortest} tokens. Set context "
            f"to at least {shortest}."
        )
    kinds, labels = np.unique([pair.fields for pair in compress(pairs, fit)], return_inverse=True)
    omitted = len(pairs) - len(rows)
    where = f"{folder}; {omitted} longer pairs left out" if omitted else str(folder)
    test = official if official < len(rows) else None
    return Source(name, rows, labels, len(kinds), test, where, tokens.vocabulary + pad_token)


def pair_windows(
    pairs: Sequence[Pair], tokens: Tokens, context: int, pad_token: bool = False
) -> tuple[np.ndarray, list[bool]]:
    """Return the windows of all pairs that fit into T + 1 tokens, and a list of which pairs fit.

    A pair is a table and a sentence about it.
    """
    windows = [tokens.window(pair) for pair in pairs]
    fit = [len(window) <= context + 1 for window in windows]
    rows = np.full((sum(fit), context + 1), tokens.end + pad_token, np.uint32)
    for row, window in zip(rows, compress(windows, fit), strict=True):
        row[: len(window)] = window
    return rows, fit


def corpus(name: str, folder: str | Path) -> dict[str, list[Pair]]:
    """Read the tables and sentences of the train, dev and test files.

    The train file is required.
    """
    files = table_files(name, folder)
    if "train" not in files:
        raise InputError(
            f"[data] folder = '{folder}' has no file *train*{SUFFIXES[name]}, which is the "
            f"training part of {name}. Download the files of {name}, or create synthetic files "
            "with `fedmuon make-text`."
        )
    return {part: list(READERS[name](file)) for part, file in files.items()}


def table_files(name: str, folder: str | Path) -> dict[str, Path]:
    """Return the train, dev and test files that exist in a folder.

    If several files match, the first by name is used.
    """
    place = Path(folder).expanduser()
    paths = sorted(place.glob(f"*{SUFFIXES[name]}")) if place.is_dir() else []
    parts = {part: [path for path in paths if part in path.stem.lower()] for part in PARTS}
    return {part: files[0] for part, files in parts.items() if files}


def prompts(pairs: Sequence[Pair]) -> dict[str, list[str]]:
    """Return a dictionary from each table to its sentences, in the order of the file."""
    sentences: dict[str, list[str]] = {}
    for pair in pairs:
        sentences.setdefault(pair.table, []).append(pair.sentence)
    return sentences


def read_e2e(file: Path) -> Iterator[Pair]:
    """Yield a table and its sentence from each row of an E2E file (CSV).

    A table looks like `name[The Punter], food[Thai]`.
    """
    rows = csv.DictReader(io.StringIO(_text(file), newline=""))
    try:
        if not {"mr", "ref"} <= set(rows.fieldnames or ()):
            raise InputError(
                f"{file} has no columns mr and ref in its first line, so the file does not "
                "belong to E2E: check [data] folder"
            )
        for row in rows:
            table, sentence = (" ".join((row[key] or "").split()) for key in ("mr", "ref"))
            if not table or not sentence:
                raise InputError(
                    f"line {rows.line_num} of {file} has an empty mr or ref: correct this line"
                )
            yield Pair(table, sentence, table.count("["))
    except csv.Error as error:
        raise InputError(
            f"{file} is not valid CSV ({error}), so the file does not belong to E2E: check "
            "[data] folder"
        ) from None


def read_dart(file: Path) -> Iterator[Pair]:
    """Yield a table and its sentence for each annotation in a DART file (DP-Muon, Appendix).

    The table consists of the triples of the annotation's entry.
    """
    try:
        entries = json.loads(_text(file))
    except ValueError:
        raise InputError(
            f"{file} is not valid JSON, so the file does not belong to DART: check [data] folder"
        ) from None
    if not isinstance(entries, list):
        raise InputError(
            f"{file} contains no list, so the file does not belong to DART: check [data] folder"
        )
    for place, entry in enumerate(entries):
        try:
            triples = [
                " : ".join((subject.strip(), relation.strip().lower(), value.strip()))
                for subject, relation, value in entry["tripleset"]
            ]
            sentences = [
                " ".join(annotation["text"].split()) for annotation in entry["annotations"]
            ]
            if not all(sentences) or (sentences and not triples):
                raise ValueError
        except (AttributeError, TypeError, KeyError, ValueError):
            raise InputError(
                f"entry {place} of {file} is incomplete: it needs a tripleset of [subject, "
                "relation, object], and annotations with a text"
            ) from None
        for sentence in sentences:
            yield Pair(" | ".join(triples), sentence, len(triples))


def _text(file: Path) -> str:
    try:
        return read_text(file, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file} cannot be read as UTF-8 text ({error}): download the file again"
        ) from None


READERS: dict[str, Callable[[Path], Iterator[Pair]]] = {"e2e": read_e2e, "dart": read_dart}
SUFFIXES = {"e2e": ".csv", "dart": ".json"}


# Synthetic tables and sentences in the file formats of E2E and DART, for use without the corpora.
#
# They contain no text of the corpora. For example, `lodgings` can be the public data when a private
# run learns `restaurants`: it has other names and wordings.

SHARES = {"train": 0.8, "dev": 0.1, "test": 0.1}  # shares of the tables
LEAST_TABLES, MOST_TABLES = 10, 5000  # each part gets a table, and all tables can differ
SYLLABLES = ("ba", "do", "ka", "li", "mo", "na", "po", "ra", "su", "ti", "vel", "zan")
# For each domain and field: the possible values, and two wordings.
DOMAINS: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, str]]]] = {
    "restaurants": {
        "name": ((), ("{} serves", "At {} you eat")),
        "food": (("Thai", "Greek", "Indian", "Welsh"), (" {} food", " {} dishes")),
        "area": (("riverside", "centre", "harbour"), (" by the {}", " at the {}")),
        "price": (("cheap", "moderate", "high"), (" at {} prices", ", prices are {}")),
    },
    "lodgings": {
        "name": ((), ("{} offers rooms", "Guests sleep at {}")),
        "view": (("garden", "lake", "street", "castle"), (" facing the {}", " over the {}")),
        "area": (("old town", "hills", "station"), (" in the {}", " near the {}")),
        "rooms": (("small", "large", "quiet"), (", they are {}", " that are {}")),
    },
}


def make_text(
    folder: str | Path, form: str, tables: int = 500, domain: str = "restaurants", seed: int = 0
) -> list[Path]:
    """Write synthetic files of tables, with one or two sentences about each table.

    The names of the files begin with made-up-train, made-up-dev and made-up-test. No table is in
    two files.

    Args:
        folder: The output folder.
        form: The file format, `e2e` or `dart`.
        tables: Number of tables.
        domain: `restaurants` or `lodgings`.
        seed: Random seed.

    Returns:
        The paths of the files.

    Raises:
        InputError: If an option is out of range or the folder is not writable.
    """
    if form not in SUFFIXES or domain not in DOMAINS:
        raise InputError(
            f"synthetic text with format {form} and domain {domain} does not exist: choose the "
            f"format from {', '.join(SUFFIXES)}, and the domain from {', '.join(DOMAINS)}"
        )
    if not LEAST_TABLES <= tables <= MOST_TABLES:
        raise InputError(
            f"tables = {tables} is out of range: set a number from {LEAST_TABLES} to {MOST_TABLES}"
        )
    if seed < 0:
        raise InputError(f"seed = {seed} is negative: set 0 or more")
    place, entries = Path(folder).expanduser(), _entries(tables, domain, seed)
    edges = np.cumsum([0.0, *SHARES.values()]) * len(entries)
    contents = {}
    for part, low, high in zip(SHARES, edges, edges[1:], strict=False):
        file = place / f"made-up-{part}{SUFFIXES[form]}"
        contents[file] = _content(form, entries[round(low) : round(high)])
    try:
        place.mkdir(parents=True, exist_ok=True)
        for file, text in contents.items():
            file.write_text(text, encoding="utf-8", newline="")
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise InputError(
            f"cannot write to {place} ({getattr(error, 'strerror', error)}): choose a writable "
            "folder on a disk with free space"
        ) from None
    return list(contents)


Entry = tuple[dict[str, str], list[str]]  # the fields in order, starting with name; the sentences


def _entries(tables: int, domain: str, seed: int) -> list[Entry]:
    rng = generator(seed, Draw.SYNTHETIC, block=list(DOMAINS).index(domain))

    def pick(choices: Sequence[str]) -> str:
        return choices[int(rng.integers(len(choices)))]

    domain_fields, entries = DOMAINS[domain], dict[str, Entry]()
    while len(entries) < tables:
        # Draw a name, the first field, and each other field with probability 1/2.
        name = "".join(pick(SYLLABLES) for _ in range(2)).capitalize()
        _, first, *others = domain_fields
        drawn = [first, *(field for field in others if rng.random() < 0.5)]
        fields = {"name": name, **{field: pick(domain_fields[field][0]) for field in drawn}}
        sentences = set()
        for _ in range(2):
            words = (pick(domain_fields[field][1]).format(value) for field, value in fields.items())
            sentences.add("".join(words) + ".")
        entries.setdefault(str(fields), (fields, sorted(sentences)))
    return list(entries.values())


def _content(form: str, entries: list[Entry]) -> str:
    """Return the content of a file in this format."""
    if form == "e2e":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("mr", "ref"))
        for fields, sentences in entries:
            table = ", ".join(f"{field}[{value}]" for field, value in fields.items())
            writer.writerows((table, sentence) for sentence in sentences)
        return text.getvalue()
    records = []
    for fields, sentences in entries:
        name, *others = fields.items()
        triples = [[name[1], field.upper(), value] for field, value in others]
        annotations = [{"source": "made-up", "text": sentence} for sentence in sentences]
        records.append({"tripleset": triples, "annotations": annotations})
    return json.dumps(records, indent=1) + "\n"
