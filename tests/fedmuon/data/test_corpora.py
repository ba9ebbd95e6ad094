"""Documents of clients: packing, prompts, the packaged corpora, and what is too short."""

import csv
import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from language_models import VOCABULARY, save_model, save_texts, save_tokenizer

import fedmuon
from fedmuon.config.load import parse
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.errors import InputError
from fedmuon.data import corpora
from fedmuon.data.corpora import Owned, bible_text, expanded, packed, text_data
from fedmuon.data.pretrained import model_tokens
from fedmuon.data.readers import available, read, read_mapped
from fedmuon.federated.build import ResolvedConfig, resolve
from fedmuon.federated.client_data import build_data

END = 256
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<reply>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tokenizer(save_model(tmp_path_factory.mktemp("llama"))))


def compressed(text: bytes) -> bytes:
    """LZW codes of `compress`, from a dictionary of texts, in groups of eight codes of one length.

    The table never fills: texts are short.
    """
    codes: dict[bytes, int] = {bytes([k]): k for k in range(256)}
    output, group, width, free, word = bytearray(), list[int](), 9, 257, b""

    def emit(code: int) -> None:
        group.append(code)
        if len(group) == 8:
            flush()

    def flush() -> None:
        number = sum(code << (width * place) for place, code in enumerate(group))
        output.extend(number.to_bytes(width, "little"))
        group.clear()

    for letter in text:
        longer = word + bytes([letter])
        if longer in codes:
            word = longer
            continue
        emit(codes[word])
        if free > (1 << width) - 1 and width < 16:  # the decoder's table is one entry behind
            if group:
                flush()
            width += 1
        codes[longer], free, word = free, free + 1, bytes([letter])
    emit(codes[word])
    count = (len(group) * width + 7) // 8
    number = sum(code << (width * place) for place, code in enumerate(group))
    return bytes(output) + number.to_bytes(count, "little")


@pytest.mark.skipif(not shutil.which("gzip"), reason="needs gzip")
@pytest.mark.parametrize("size", [1, 7, 300, 4000, 30_000])
def test_blocks_expand_as_gzip_expands_them(size: int) -> None:
    rng = np.random.default_rng(size)
    words = [b"the ", b"light ", b"day ", b"night\n", b"evening ", b"waters "]
    text = b"".join(words[k] for k in rng.integers(0, 6, size))[:size]
    codes = compressed(text)
    theirs = subprocess.run(
        ["gzip", "-dc"], input=b"\x1f\x9d\x90" + codes, capture_output=True, check=True
    )
    assert theirs.stdout == expanded(codes) == text


def test_damaged_blocks_are_rejected() -> None:
    with pytest.raises(ValueError, match="damaged"):
        expanded((300 << 9 | 65).to_bytes(4, "little"))


def bible_file(folder: Path, books: int = 66, verses: int = 4) -> Path:
    lines = ["Holy Bible"]
    for book in range(books):
        name = f"{book % 3 + 1}" * (book % 2) + "".join(chr(65 + int(c)) for c in str(book))
        lines += [f"{name}1:{k + 1} And {book} was verse {k}." for k in range(verses)]
    text = ("\n".join(lines) + "\n").encode()
    blocks = [compressed(text[k : k + 900]) for k in range(0, len(text), 900)]
    header = corpora.MAGIC.ljust(corpora.TABLE, b"\0") + struct.pack(">I", len(blocks))
    places = len(header) + 4 * len(blocks) + np.cumsum([0, *map(len, blocks)])[:-1]
    path = folder / "bible.data"
    path.write_bytes(header + places.astype(">u4").tobytes() + b"".join(blocks))
    return path


def test_each_book_is_a_client(tmp_path: Path) -> None:
    path = bible_file(tmp_path)
    assert bible_text(path).startswith("Holy Bible\nA1:1 And 0 was verse 0.\n")
    source = read("bible-kjv", folder=str(tmp_path), context=12)
    assert source.classes == 66 and len(source.owner_names) == 66 and source.vocabulary == 257
    assert source.owner is not None and source.owner_names[:2] == ("A", "2B")
    first = source.inputs[source.owner == 1][0]
    assert bytes(first.astype(np.uint8)) == b"And 1 was ver"
    few = read("bible-kjv", folder=str(tmp_path), context=12, clients="A, *B")
    assert few.owner_names[:2] == ("A", "2B") and 2 <= len(few.owner_names) < 20
    with pytest.raises(InputError, match="no client of bible-kjv is named 'Tobit'"):
        read("bible-kjv", folder=str(tmp_path), context=12, clients="A, Tobit")
    path.write_bytes(b"EC01" + path.read_bytes()[4:])
    with pytest.raises(InputError, match=r"not the text of bible-kjv-text .*another header"):
        read("bible-kjv", folder=str(path), context=12)
    bible_file(tmp_path, books=5)
    with pytest.raises(InputError, match="5 books instead of 66"):
        read("bible-kjv", folder=str(path), context=12)


def test_a_missing_package_names_the_command(tmp_path: Path) -> None:
    for name, package in (("bible-kjv", "bible-kjv-text"), ("fortunes", "fortunes")):
        with pytest.raises(InputError, match=f"apt-get install {package}, or set"):
            read(name, folder=str(tmp_path))
    rows = {name: (present, place) for name, present, place in available()}
    for name in ("bible-kjv", "fortunes"):
        present, place = rows[name]
        assert present == Path(place).exists() or place.startswith("apt-get install")


@pytest.mark.skipif(not corpora.BIBLE.is_file(), reason="needs bible-kjv-text")
@pytest.mark.slow
def test_the_bible_of_debian_is_read() -> None:
    text = bible_text(corpora.BIBLE)
    assert "Ge1:1 In the beginning God created the heaven and the earth.\n" in text
    assert text.count("\n") in (31102, 31103)  # 31,102 verses and a title
    source = read("bible-kjv", folder=str(corpora.BIBLE), context=128)
    assert source.owner_names[0] == "Ge" and source.owner_names[-1] == "Rev"


@pytest.mark.skipif(not corpora.FORTUNES.is_dir(), reason="needs fortunes")
def test_the_fortunes_of_debian_are_read() -> None:
    source = read("fortunes", folder=str(corpora.FORTUNES), context=128)
    assert {"wisdom", "science"} <= {*source.owner_names}
    assert not {"wisdom.dat", "wisdom.u8"} & {*source.owner_names}


def test_each_file_of_fortunes_is_a_client(tmp_path: Path) -> None:
    (tmp_path / "wise").write_text("One.\n%\nTwo\nlines.\n%\n" * 5)
    (tmp_path / "wise.dat").write_bytes(b"\0\1")
    (tmp_path / "wise.u8").symlink_to("wise")
    (tmp_path / "short").write_text("x\n")
    source = read("fortunes", folder=str(tmp_path), context=8)
    assert source.owner_names == ("wise",)
    text = "".join("|" if token == END else chr(token) for token in source.inputs[0])
    assert text == "One.|Two\n"
    with pytest.raises(InputError, match=r"no client of fortunes .* 401 tokens"):
        read("fortunes", folder=str(tmp_path), context=400)


def test_windows_follow_each_other_and_share_no_predicted_token() -> None:
    parts = [Owned("a", list(range(10)), list(range(20, 26))), Owned("b", list(range(50, 57)), [])]
    source = packed("made", parts, 3, 100, "here")
    assert source.inputs.tolist() == [
        [0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [50, 51, 52, 53], [53, 54, 55, 56],
        [20, 21, 22, 23],
    ]  # fmt: skip
    assert source.owner is not None and source.owner.tolist() == [0, 0, 0, 1, 1, 0]
    assert source.official_test == 5 and source.owner_names == ("a", "b")


def test_a_client_with_too_few_tokens_is_named() -> None:
    parts = [Owned("long", list(range(10)), []), Owned("brief", [1, 2, 3], [])]
    with pytest.raises(InputError, match=r"'brief' of made \(here\) has 3 tokens .* needs 4 tok"):
        packed("made", parts, 3, 100, "here")
    assert packed("made", parts, 2, 100, "here").official_test is None
    only_prompts = [Owned("silent", [-1, -2, -3, -4, -5], [])]
    with pytest.raises(InputError, match="silent"):
        packed("made", only_prompts, 2, 100, "here")


def test_text_files_have_the_tokens_of_the_model(model: str, tmp_path: Path) -> None:
    folder = save_texts(tmp_path / "texts")
    source = read("text", folder=str(folder), context=8, tokenizer=model)
    assert source.owner_names == ("one", "three", "two") and source.vocabulary == VOCABULARY
    tokens = model_tokens(model)
    assert tokens.pieces.decode(source.inputs[0]) == "the cat s"
    assert tokens.end == END
    assert read("text", folder=str(folder), context=8).owner is None  # bytes, as before
    mapped = read_mapped("text", (("context", 8), ("folder", str(folder)), ("tokenizer", model)))
    assert mapped.owner is not None


def lines(*objects: object) -> str:
    return "\n".join(json.dumps(line) for line in objects)


def test_prompts_are_read_and_responses_predicted(model: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    turns = [{"prompt": f"q{k}?", "response": f"a{k}!", "client": k % 2} for k in range(10)]
    path.write_text("\n" + lines(*turns) + "\n\n")
    source = read("jsonl", folder=str(path), context=6, tokenizer=model)
    assert source.owner_names == ("0", "1") and source.official_test == 8
    first = source.inputs[0].tolist()
    tokens = model_tokens(model)
    assert first == [*(-1 - token for token in tokens.encode("q0?")), *tokens.encode("a0!"), END]
    named = [{"q": line["prompt"], "a": line["response"]} for line in turns]
    path.write_text(lines(*named))
    renamed = read("jsonl", folder=str(path), context=6, tokenizer=model, prompt="q", response="a",
                   client="")  # fmt: skip
    assert renamed.owner_names == ("",) and renamed.classes == 1


def test_rows_in_python_are_read_as_lines(model: str, tmp_path: Path) -> None:
    turns = [{"prompt": f"q{k}?", "response": f"a{k}!", "client": k % 2} for k in range(10)]
    (path := tmp_path / "chat.jsonl").write_text(lines(*turns))
    from_file = read("jsonl", folder=str(path), context=6, tokenizer=model)
    rows = text_data(iter(turns), model, context=6)
    assert np.array_equal(rows.inputs, from_file.inputs)
    assert rows.owner_names == from_file.owner_names
    task = {"name": "causal-lm", "weights": model, "lora-rank": 2}
    federation = {"partition": "column", "rounds": 1, "per-round": 2}
    result = fedmuon.run({"task": task, "federation": federation,
                          "local": {"recipe": "local-adamw", "lr": 0.01}}, data=rows,
                         out=tmp_path / "run")  # fmt: skip
    assert result.summary["test_loss"] < result.summary["untrained"]["test_loss"]


@pytest.mark.parametrize("name", ["given", "jsonl"])
def test_rows_that_name_their_clients_are_divided_by_them(
    model: str, tmp_path: Path, name: str
) -> None:
    turns = [{"prompt": "q?", "response": f"a{k}!", "client": "ab"[k % 2]} for k in range(200)]
    (path := tmp_path / "chat.jsonl").write_text(lines(*turns))

    def resolved(client: str = "client", **federation: str) -> ResolvedConfig:
        data: dict[str, Any] = {"name": name}
        if name == "jsonl":
            data |= {"folder": str(path), "context": 6, "options": {"client": client}}
        task = {"name": "causal-lm", "weights": model, "lora-rank": 2}
        rows = text_data(turns, model, context=6, client=client) if name == "given" else None
        config = parse({"task": task, "data": data, "federation": federation})
        return resolve(config.with_objects(UserObjects(data=rows)))

    config = resolved()
    assert config.federation.partition == "column" and config.federation.clients == 2
    assert build_data(config).client_names == ("a", "b")
    for partition in ("dirichlet", "shards"):
        with pytest.raises(InputError, match=rf"rows name their .* '{partition}' would mix them"):
            resolved(partition=partition)
    assert resolved(partition="iid").federation.clients == 20  # mixed on purpose
    assert resolved(client="").federation.partition == "dirichlet"  # one client owns all rows


@pytest.mark.parametrize("rows, said", [
    ([], "rows is empty"), (["q"], "row 0 is a str"),
    ([{"prompt": "q"}], "row 0 has no 'response'"),
    ([{"prompt": "q", "response": 4, "client": 1}],
     "'response' in row 0 is not text, but 4: write it as a text, such as '4'"),
    ([{"prompt": float("nan"), "response": "a", "client": 1}], "'prompt' in row 0 is not text"),
    ([{"prompt": "q", "response": ["a"], "client": 1}], "'response' in row 0 is not text, but a"),
])  # fmt: skip
def test_rows_without_texts_are_rejected(model: str, rows: list[Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        text_data(rows, model)


def test_prompts_use_the_chat_template(tmp_path: Path) -> None:
    model = str(save_tokenizer(save_model(tmp_path / "chat"), TEMPLATE))
    tokens = model_tokens(model)
    assert tokens.pieces.decode(tokens.question("Hi")) == "<user>Hi<reply>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("[1]", "line 1 of .* is not a JSON object"),
        ("{", "line 1 of .* is not a JSON object"),
        (lines({"prompt": "a", "response": "b"}), "has no 'client'.* keys prompt, response"),
        (lines({"prompt": "a", "response": "", "client": 1}), "has no 'response'"),
        (
            lines({"prompt": ["a"], "response": "b", "client": 1}),
            "'prompt' in line 1 .* but a list",
        ),
        (lines({"prompt": "a", "response": {"b": 1}, "client": 1}), "but a JSON object"),
        (
            lines({"prompt": "a", "response": 4, "client": 1}),
            "'response' in line 1 .* but 4: write",
        ),
        (lines({"prompt": "a", "response": "\ud800", "client": 1}), "ud800', which is half"),
        (lines({"prompt": "a", "response": "b", "client": "\ud800"}), "'client' in line 1 .* half"),
        ("[" * 100_000, "line 1 of .* is not a JSON object"),
    ],
)
def test_lines_that_do_not_fit_are_rejected(
    content: str, message: str, model: str, tmp_path: Path
) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read("jsonl", folder=str(path), tokenizer=model)
    with pytest.raises(InputError, match="is not a file"):
        read("jsonl", folder=str(tmp_path), tokenizer=model)
    with pytest.raises(InputError, match=r"Set \[task\] name = 'causal-lm'"):
        read("jsonl", folder=str(path))


def test_texts_may_contain_any_line_separator(model: str, tmp_path: Path) -> None:
    turns = [{"prompt": "a\u2028\x85b\u2029", "response": f"c\u2028{k}\x85", "client": "a"}
             for k in range(10)]  # fmt: skip
    sources = []
    for ascii_only in (True, False):
        path = tmp_path / f"{ascii_only}.jsonl"
        content = [json.dumps(turn, ensure_ascii=ascii_only) for turn in turns]
        path.write_bytes("\r\n".join(content).encode())
        sources.append(read("jsonl", folder=str(path), context=6, tokenizer=model))
    assert np.array_equal(sources[0].inputs, sources[1].inputs)


def test_a_table_may_contain_long_texts(model: str, tmp_path: Path) -> None:
    limit, path = csv.field_size_limit(), tmp_path / "chat.csv"
    path.write_text(f"prompt,response,client\na,{'b' * (limit + 1)},c\n")
    source = read("jsonl", folder=str(path), context=6, tokenizer=model)
    assert int((source.inputs[:, 1:] >= 0).sum()) > limit - 6
    assert csv.field_size_limit() == limit


def test_options_must_be_texts_and_name_a_response(model: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(lines({"prompt": "a", "response": "b", "client": "c"}))
    for value in (3, True, ["prompt"]):
        with pytest.raises(InputError, match=r"prompt = .* is not valid .* set a text"):
            read("jsonl", folder=str(path), tokenizer=model, prompt=value)
    with pytest.raises(InputError, match=r"response is empty, but .* Set response to the key"):
        read("jsonl", folder=str(path), tokenizer=model, response="")


@pytest.mark.parametrize("template", ["{% raise %}", "{{ messages[0].odd.odder }}"])
def test_a_damaged_chat_template_is_rejected(template: str, tmp_path: Path) -> None:
    folder = str(save_tokenizer(save_model(tmp_path / "llama"), template))
    with pytest.raises(
        InputError, match=r"the chat template .* cannot write a prompt .* remove it"
    ):
        model_tokens(folder).question("Why?")


def test_a_table_is_read_as_lines_with_the_same_keys(model: str, tmp_path: Path) -> None:
    turns = [
        {"prompt": f'say "{k}",\nplease', "response": f"a, b {k}", "client": f"c{k % 2}"}
        for k in range(10)
    ]
    (tmp_path / "chat.jsonl").write_text(lines(*turns))
    with (tmp_path / "chat.csv").open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.DictWriter(file, ["client", "prompt", "response"])
        table.writeheader()
        table.writerows(turns)
    sources = [
        read("jsonl", folder=str(tmp_path / f"chat.{kind}"), context=6, tokenizer=model)
        for kind in ("jsonl", "csv")
    ]
    assert sources[0].owner_names == sources[1].owner_names == ("c0", "c1")
    assert np.array_equal(sources[0].inputs, sources[1].inputs)
    owners = [source.owner for source in sources]
    assert owners[0] is not None and owners[1] is not None
    assert np.array_equal(owners[0], owners[1])


def test_text_without_prompts_is_predicted(model: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("who,text\n" + "".join(f"w{k % 2},note number {k}\n" for k in range(10)))
    source = read("jsonl", folder=str(path), context=6, tokenizer=model, prompt="",
                  response="text", client="who")  # fmt: skip
    assert source.owner_names == ("w0", "w1") and (source.inputs >= 0).all()
    assert model_tokens(model).pieces.decode(source.inputs[0]) == "note nu"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty: write a line of column names"),
        ("prompt,response\na,b\n", "line 2 of .* has no 'client'.* keys prompt, response"),
        ("prompt,response,client\na,,c\n", "line 2 of .* has no 'response'"),
        ("prompt,response,client\na,b\n", "line 2 of .* has no 'client'"),
        ("prompt,response,client\na,b,c,d\n", "line 2 of .* more values than the 3 columns"),
        ('prompt,response,client\n"a"b,b,c\n', "line 2 of .* is not a row of a CSV file .* quotes"),
    ],
)
def test_tables_that_do_not_fit_are_rejected(
    content: str, message: str, model: str, tmp_path: Path
) -> None:
    path = tmp_path / "chat.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read("jsonl", folder=str(path), tokenizer=model)
