"""The data set `text`: documents, prompts with answers and labelled texts, against plain lists of tokens."""

import builtins
import json
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from fl_dist.common.errors import DataError
from fl_dist.data import Dataset, datasets, shared_arrays
from fl_dist.data import text as text_module
from fl_dist.data.dataset import IGNORE_INDEX
from fl_dist.data.tokenizer import TextTokenizer
from fl_dist.tasks import tasks
from tests.support import tokenizers
from tests.support.tokenizers import END, PAD, START, WORDS

Row = dict[str, Any]
TEXTS = ["the cat sat on the mat", "a red hat", "the dog ran", "rat", "in the log and on a mat the rat sat in the hat"]
PAD_ID, END_ID, START_ID = 0, 1, 3
FORMATS = ("jsonl", "parquet", "arrow", "stream", "feather")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a tokenizer of words."""
    monkeypatch.setenv(shared_arrays.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tokenizers.save(tokenizers.word_level(), tmp_path / "words")
    return tmp_path


def write_rows(rows: Sequence[Row], name: str = "rows", form: str = "jsonl") -> str:
    """A file in the working folder."""
    file = Path(f"{name}.{'arrow' if form == 'stream' else form}")
    file.parent.mkdir(parents=True, exist_ok=True)
    if form == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)
    table = pa.Table.from_pylist(list(rows))
    if form == "parquet":
        pq.write_table(table, file, row_group_size=2)
    elif form == "feather":
        pyarrow.feather.write_feather(table, str(file))
    else:
        create = pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream
        with create(str(file), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return str(file)


def write_texts(texts: Sequence[str] = TEXTS, name: str = "rows", form: str = "jsonl", **columns: Sequence[Any]) -> str:
    rows = [{"text": text} | {key: own[k] for key, own in columns.items()} for k, text in enumerate(texts)]
    return write_rows(rows, name, form)


def build(**settings: Any) -> Dataset:
    return datasets.build("text", {"tokenizer": "words", "length": 4} | settings, splits=("train", "test"))


def error_of(**settings: Any) -> str:
    with pytest.raises(DataError) as error:
        build(**settings)
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    return message


def ids_of(text: str) -> list[int]:
    """By the tokenizer of words."""
    return [4 + WORDS.index(word) for word in text.split()]


def plain_rows(streams: Sequence[Sequence[int]], length: int, padding: int = PAD_ID) -> tuple[list[Any], list[Any]]:
    """Each stream cut into rows of inputs and targets."""
    x, y = [], []
    for stream in streams:
        inputs, targets = list(stream[:-1]), list(stream[1:])
        for first in range(0, len(inputs), length):
            fill = length - len(inputs[first : first + length])
            x.append(inputs[first : first + length] + [padding] * fill)
            y.append(targets[first : first + length] + [IGNORE_INDEX] * fill)
    return x, y


def stream_of(texts: Sequence[str]) -> list[int]:
    return [token for text in texts for token in [*ids_of(text), END_ID]]


def tokens_of(data: Dataset, split: str) -> Tensor:
    rows = getattr(data, f"x_{split}")
    assert isinstance(rows, Tensor)
    return rows


class TestPacking:
    @pytest.mark.parametrize("length", [1, 2, 4, 5, 30, 100])
    def test_rows_are_one_text_cut_into_pieces(self, length: int) -> None:
        data = build(path=write_texts(), test=write_texts(TEXTS[:2], "test"), length=length)
        x, y = plain_rows([stream_of(TEXTS)], length)
        assert tokens_of(data, "train").tolist() == x and data.y_train.tolist() == y
        x, y = plain_rows([stream_of(TEXTS[:2])], length)
        assert tokens_of(data, "test").tolist() == x and data.y_test.tolist() == y
        assert data.vocabulary == 4 + len(WORDS) and data.client is None and data.classes == 0
        assert data.y_train.dtype == torch.int64 and tokens_of(data, "train").dtype == torch.int32

    @pytest.mark.parametrize("names", [["b", "a", "b", "c", "a"], [7, 3, 7, 11, 3]])
    def test_no_row_holds_the_texts_of_two_clients(self, names: list[Any]) -> None:
        data = build(path=write_texts(who=names), test=write_texts(name="test"), client="who")
        order = sorted(set(names))
        streams = [stream_of([text for text, own in zip(TEXTS, names, strict=True) if own == name]) for name in order]
        x, y = plain_rows(streams, 4)
        assert tokens_of(data, "train").tolist() == x and data.y_train.tolist() == y
        rows = [len(plain_rows([stream], 4)[0]) for stream in streams]
        assert data.client is not None and data.client.tolist() == np.repeat(range(len(order)), rows).tolist()

    def test_each_token_but_the_first_of_a_client_is_a_target_once(self) -> None:
        rng = np.random.default_rng(0)
        texts = [" ".join(rng.choice(WORDS, rng.integers(1, 20))) for _ in range(60)]
        clients = rng.integers(0, 9, 60).tolist()
        data = build(path=write_texts(texts, who=clients), test=write_texts(name="test"), client="who", length=7)
        assert data.client is not None
        for k, name in enumerate(sorted(set(clients))):
            stream = stream_of([text for text, own in zip(texts, clients, strict=True) if own == name])
            x, y = tokens_of(data, "train")[data.client == k].flatten(), data.y_train[data.client == k].flatten()
            learnt = y != IGNORE_INDEX
            assert y[learnt].tolist() == stream[1:] and x[learnt].tolist() == stream[:-1]
            assert set(x[~learnt].tolist()) <= {PAD_ID}

    def test_empty_texts_are_left_out(self) -> None:
        with_empty = [TEXTS[0], "", " \n", *TEXTS[1:], ""]
        clients = ["a", "only empty", "a", "a", "b", "b", "b", "b"]
        data = build(path=write_texts(with_empty, who=clients), test=write_texts(name="test"), client="who")
        assert (
            data.y_train[data.y_train != IGNORE_INDEX].tolist() == stream_of(TEXTS[:2])[1:] + stream_of(TEXTS[2:])[1:]
        )
        assert data.client is not None and set(data.client.tolist()) == {0, 1}
        assert "has no text: each of its rows is empty" in error_of(path=write_texts(["", " "], "none"))


class TestTestRows:
    def test_a_share_of_the_texts_is_held_out_and_stays_the_same(self) -> None:
        texts = [f"{' '.join(WORDS[k % 14] for k in range(n, 2 * n + 1))}" for n in range(1, 31)]
        path = write_texts(texts)
        first, second = build(path=path, test=0.2, length=5), build(path=path, test=0.2, length=6)
        held_out = [self.texts_of(data.y_test, tokens_of(data, "test")) for data in (first, second)]
        assert held_out[0] == held_out[1] and len(held_out[0]) == 6
        trained = self.texts_of(first.y_train, tokens_of(first, "train"))
        assert sorted([*trained, *held_out[0]]) == sorted(ids_of(text) for text in texts)

    @staticmethod
    def texts_of(y: Tensor, x: Tensor) -> list[list[int]]:
        tokens = [int(x[0, 0]), *y[y != IGNORE_INDEX].tolist()]
        ends = [k for k, token in enumerate(tokens) if token == END_ID]
        return [tokens[first:end] for first, end in zip([0, *(k + 1 for k in ends)], ends, strict=False)]

    def test_at_least_one_text_and_not_all(self) -> None:
        data = build(path=write_texts(["cat cat", "mat mat"]), test=0.99)
        assert len(tokens_of(data, "train")) == len(tokens_of(data, "test")) == 1
        assert "cannot hold out rows: there is only 1 row" in error_of(path=write_texts(["the cat"], "one"))

    def test_files_are_not_both_trained_and_tested_on(self) -> None:
        file = write_texts(name="all/a")
        assert "a.jsonl belongs to data.path and to data.test" in error_of(path="all", test=file)
        assert "belongs to" in error_of(path="all/*.jsonl", test="all/../all/a.jsonl")


class TestPadding:
    def test_a_row_for_each_text(self) -> None:
        data = build(path=write_texts(), test=write_texts(TEXTS[:1], "test"), pack=False, length=5)
        assert isinstance(data.x_train, dict) and list(data.x_train) == ["input_ids", "attention_mask"]
        for row, text in enumerate(TEXTS):
            tokens = [*ids_of(text), END_ID]
            used = min(len(tokens) - 1, 5)
            assert data.x_train["input_ids"][row].tolist() == tokens[:used] + [PAD_ID] * (5 - used)
            assert data.x_train["attention_mask"][row].tolist() == [True] * used + [False] * (5 - used)
            assert data.y_train[row].tolist() == tokens[1 : used + 1] + [IGNORE_INDEX] * (5 - used)

    def test_clients_keep_their_rows(self) -> None:
        data = build(path=write_texts(who=list("babca")), test=write_texts(name="test"), pack=False, client="who")
        assert data.client is not None and data.client.tolist() == [1, 0, 1, 2, 0]


class TestAnswers:
    ROWS = (
        {"prompt": "the cat", "answer": "sat on a mat"},
        {"prompt": "", "answer": "rat"},
        {"prompt": "a red hat in the log", "answer": ""},
        {"prompt": "dog", "answer": "ran"},
    )

    @pytest.mark.parametrize("length", [6, 8])
    def test_only_answers_are_learnt(self, length: int) -> None:
        data = build(
            path=write_rows(self.ROWS), test=write_texts_of_answers(), answer="answer", pack=False, length=length
        )
        assert isinstance(data.x_train, dict)
        for row, pair in enumerate(self.ROWS):
            start, tokens = ids_of(pair["prompt"]), ids_of(pair["prompt"]) + [*ids_of(pair["answer"]), END_ID]
            x, y, mask = [], [], []
            for k in range(length):
                is_used = k < len(tokens) - 1
                x.append(tokens[k] if is_used else PAD_ID)
                mask.append(is_used)
                y.append(tokens[k + 1] if is_used and k + 1 >= len(start) else IGNORE_INDEX)
            assert data.x_train["input_ids"][row].tolist() == x
            assert data.x_train["attention_mask"][row].tolist() == mask
            assert data.y_train[row].tolist() == y

    def test_packed(self) -> None:
        data = build(path=write_rows(self.ROWS), test=write_texts_of_answers(), answer="answer", length=5)
        tokens, learnt = [], []
        for pair in self.ROWS:
            prompt, answer = ids_of(pair["prompt"]), [*ids_of(pair["answer"]), END_ID]
            tokens += prompt + answer
            learnt += [False] * len(prompt) + [True] * len(answer)
        x, _ = plain_rows([tokens], 5)
        targets = [token if is_learnt else IGNORE_INDEX for token, is_learnt in zip(tokens, learnt, strict=True)]
        _, y = plain_rows([targets], 5)
        assert tokens_of(data, "train").tolist() == x and data.y_train.tolist() == y

    def test_templates_name_columns(self) -> None:
        rows = [{"question": "the cat", "hint": "mat", "reply": "sat", "n": 3}]
        settings = {"prompt": "the {question} {hint} a", "answer": "{reply} on {hint}", "pack": False, "length": 9}
        data = build(path=write_rows(rows), test=write_rows(rows, "test"), **settings)
        assert isinstance(data.x_train, dict)
        used = ids_of("the the cat mat a sat on mat")
        assert data.x_train["input_ids"][0].tolist() == [*used, PAD_ID]
        assert data.y_train[0].tolist() == [IGNORE_INDEX] * 4 + used[5:] + [END_ID, IGNORE_INDEX]

    def test_a_prompt_that_leaves_no_room_is_named(self) -> None:
        rows = [{"prompt": "cat", "answer": "sat"}] * 1200 + [{"prompt": "the " * 9, "answer": "sat"}]
        message = error_of(path=write_rows(rows), answer="answer", pack=False, length=8)
        assert "rows.jsonl, row 1201: the prompt has 9 tokens, which leaves none of 8" in message

    def test_settings_that_exclude_each_other(self) -> None:
        path = write_rows(self.ROWS)
        assert "set data.answer to its column" in error_of(path=path, prompt="prompt")
        for more in ({"answer": "answer"}, {"pack": True}):
            assert "data.label gives each text one label" in error_of(path=path, label="prompt", **more)


def write_texts_of_answers() -> str:
    return write_rows(TestAnswers.ROWS, "answers")


class TestLabels:
    @pytest.mark.parametrize(
        ("labels", "numbers"), [(list("babca"), [1, 0, 1, 2, 0]), ([2, 0, 2, 3, 0], [2, 0, 2, 3, 0])]
    )
    def test_texts_are_padded_and_cut(self, labels: list[Any], numbers: list[int]) -> None:
        path, test = write_texts(kind=labels), write_texts(TEXTS[:1], "test", kind=labels[:1])
        data = build(path=path, test=test, label="kind", length=5)
        assert isinstance(data.x_train, dict)
        assert data.y_train.tolist() == numbers and data.classes == max(numbers) + 1
        for row, text in enumerate(TEXTS):
            tokens = ids_of(text)[:5]
            assert data.x_train["input_ids"][row].tolist() == tokens + [PAD_ID] * (5 - len(tokens))
            assert data.x_train["attention_mask"][row].sum() == len(tokens)

    def test_special_tokens_at_both_ends_survive_the_cut(self) -> None:
        tokenizers.save(tokenizers.add_special_tokens(tokenizers.word_level()), Path("special"))
        data = build(path=write_texts(kind=[0, 1, 0, 1, 0]), label="kind", tokenizer="special", length=4, test=0.2)
        assert isinstance(data.x_train, dict)
        for row, mask in zip(data.x_train["input_ids"], data.x_train["attention_mask"], strict=True):
            used = row[mask].tolist()
            assert used[0] == START_ID and used[-1] == END_ID
        assert "no room for text: the tokenizer adds 2" in error_of(
            path="rows.jsonl", label="kind", tokenizer="special", length=2
        )

    def test_names_have_the_order_of_data_classes(self) -> None:
        path = write_texts(kind=["good", "bad", "good", "bad", "fine"])
        data = build(path=path, label="kind", classes=["bad", "good", "fine", "never"], test=0.2)
        assert data.classes == 4 and sorted([*data.y_train.tolist(), *data.y_test.tolist()]) == [0, 0, 1, 1, 2]
        assert build(path=path, label="kind", classes=7).classes == 7
        message = error_of(path=path, label="kind", classes=["bad", "good", "fin"])
        assert "a label 'fine' outside data.classes; did you mean 'fin'?" in message
        assert "a label '' outside" in error_of(
            path=write_texts(["cat", "mat"], "empty", kind=["", "a"]), label="kind", classes=["a"]
        )
        assert "has 3 different labels" in error_of(path=path, label="kind", classes=2)

    @pytest.mark.parametrize(
        ("labels", "expected"),
        [
            ([0, 1, None, 1, None], "the column 'kind' is empty in 2 rows"),
            ([0, 1, "a", 1, 1], "holds labels of type int, str; it needs all text or all whole numbers"),
            ([0.5, 1.0, 1.0, 2.0, 2.0], "of type float"),
            ([True, False, True, True, True], "of type bool"),
            ([0, -1, 2, 1, 1], "has a label -1; number labels from 0 on"),
            ([0, 2**40, 2, 1, 1], "has a label 1099511627776; number labels from 0 on"),
            ([["a"], ["b"], ["a"], ["a"], ["a"]], "of type list"),
        ],
    )
    def test_labels_that_are_none(self, labels: list[Any], expected: str) -> None:
        assert expected in error_of(path=write_texts(kind=labels), label="kind")

    def test_a_text_without_tokens_is_named(self) -> None:
        path = write_texts(["the cat", "", "mat"], kind=[0, 1, 0])
        assert "rows.jsonl, row 2: the text has no token" in error_of(path=path, label="kind")


class TestTokenizers:
    @pytest.mark.parametrize("kind", tokenizers.KINDS)
    def test_ids_are_those_of_the_tokenizer(self, kind: str) -> None:
        tokenizer = tokenizers.KINDS[kind]()
        tokenizers.save(tokenizer, Path("own"))
        texts = [*TEXTS, "unknown wörds\tand 象 \N{PILE OF POO}", "e\u0301 \x00 é"]
        data = build(path=write_texts(texts), test=write_texts(name="test"), tokenizer="own", length=6)
        stream = [token for text in texts for token in [*tokenizer.encode(text).ids, tokenizer.token_to_id(END)]]
        x, y = plain_rows([stream], 6)
        assert tokens_of(data, "train").tolist() == x and data.y_train.tolist() == y
        assert data.vocabulary == 1 + max(tokenizer.get_vocab().values())

    def test_special_tokens_are_not_doubled(self) -> None:
        tokenizers.save(tokenizers.add_special_tokens(tokenizers.word_level()), Path("special"))
        data = build(path=write_texts(), test=write_texts(name="test"), tokenizer="special", length=8)
        stream = [token for text in TEXTS for token in [START_ID, *ids_of(text), END_ID]]
        assert tokens_of(data, "train").tolist() == plain_rows([stream], 8)[0]
        rows = [{"prompt": "the cat", "answer": "sat"}]
        settings = {"answer": "answer", "pack": False, "tokenizer": "special", "length": 6}
        data = build(path=write_rows(rows, "pair"), test=write_rows(rows, "pair_test"), **settings)
        assert isinstance(data.x_train, dict)
        assert data.x_train["input_ids"][0].tolist() == [START_ID, *ids_of("the cat sat"), PAD_ID, PAD_ID]
        assert data.y_train[0].tolist() == [IGNORE_INDEX] * 2 + [*ids_of("sat"), END_ID] + [IGNORE_INDEX] * 2

    @pytest.mark.parametrize(
        ("names", "end", "expected"),
        [
            ({"eos_token": END}, None, (END_ID, END_ID)),
            ({"sep_token": {"content": START}, "pad_token": PAD}, None, (START_ID, PAD_ID)),
            ({}, "mat", (4 + WORDS.index("mat"), 4 + WORDS.index("mat"))),
            ({"eos_token": END, "pad_token": PAD}, "mat", (4 + WORDS.index("mat"), PAD_ID)),
            ({"eos_token": END, "pad_token": None}, None, (END_ID, END_ID)),
        ],
    )
    def test_end_and_padding(self, names: dict[str, Any], end: str | None, expected: tuple[int, int]) -> None:
        tokenizers.save(tokenizers.word_level(), Path("own"), names)
        path = write_texts(["the cat", "a dog"])
        data = build(path=path, test=write_texts(["dog"], "test"), tokenizer="own", end=end, length=9)
        assert tokens_of(data, "train")[0].tolist() == [
            *ids_of("the cat"), expected[0], *ids_of("a dog"), *[expected[1]] * 4
        ]  # fmt: skip
        assert data.y_train[0].tolist() == [
            *ids_of("cat"), expected[0], *ids_of("a dog"), expected[0], *[IGNORE_INDEX] * 4
        ]  # fmt: skip

    def test_the_last_file_decides(self) -> None:
        tokenizers.save(tokenizers.word_level(), Path("own"), {"eos_token": START})
        Path("own/tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
        data = build(path=write_texts(["cat"]), test=write_texts(["cat"], "test"), tokenizer="own")
        assert data.y_train[0].tolist() == [END_ID] + [IGNORE_INDEX] * 3

    def test_truncation_and_padding_in_its_file_are_not_used(self) -> None:
        tokenizer = tokenizers.word_level()
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=50)
        tokenizers.save(tokenizer, Path("own"))
        data = build(path=write_texts(), test=write_texts(name="test"), tokenizer="own", length=4)
        assert tokens_of(data, "train").tolist() == plain_rows([stream_of(TEXTS)], 4)[0]


class TestFiles:
    @pytest.mark.parametrize("form", FORMATS)
    def test_all_formats_give_the_same_rows(self, form: str) -> None:
        texts = [*TEXTS, "e\u0301 \N{PILE OF POO}"]
        path = write_texts(texts, form=form, other=[1.5] * 6, who=list("abcabc"))
        data = build(path=path, test=write_texts(name="test"), client="who", pack=False)
        expected = build(
            path=write_texts(texts, "plain", who=list("abcabc")), test="test.jsonl", client="who", pack=False
        )
        assert isinstance(data.x_train, dict) and isinstance(expected.x_train, dict)
        assert data.x_train["input_ids"].equal(expected.x_train["input_ids"])
        assert data.client is not None and data.client.tolist() == [0, 1, 2, 0, 1, 2]

    def test_lines_of_a_text_file(self) -> None:
        Path("a.txt").write_bytes(b"\xef\xbb\xbfthe cat\r\n\r\n  \nsat on\n\na mat")
        Path("test.txt").write_text("dog")
        data = build(path="a.txt", test="test.txt", tokenizer="words")
        assert tokens_of(data, "train").tolist() == plain_rows([stream_of(["the cat", "sat on", "a mat"])], 4)[0]

    def test_each_file_is_a_document_of_its_own_client(self) -> None:
        Path("own").mkdir()
        for name, text in (("zoe", "the cat\nsat on a mat\n"), ("adam", "rat\n\nran in")):
            Path(f"own/{name}.txt").write_text(text)
        Path("own/README.md").write_text("of another format, and no data")
        Path("test.txt").write_text("dog")
        tokenizer = tokenizers.bpe()
        tokenizers.save(tokenizer, Path("bpe"))
        settings = {"path": "own", "test": "test.txt", "tokenizer": "bpe", "document": "file", "client": "file"}
        data = build(**settings, length=200)
        streams = [[*tokenizer.encode(text).ids, END_ID] for text in ("rat\n\nran in", "the cat\nsat on a mat\n")]
        assert tokens_of(data, "train").tolist() == plain_rows(streams, 200)[0]
        assert data.client is not None and data.client.tolist() == [0, 1]

    def test_files_are_read_in_the_order_of_their_names(self) -> None:
        for name in ("b", "a", "c"):
            write_texts([f"{name} cat"], f"own/{name}")
        data = build(path="own/*.jsonl", test=write_texts(name="test"), client="file")
        assert data.client is not None and data.client.tolist() == [0, 1, 2]

    def test_long_texts_are_tokenized_in_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = build(path=write_texts(), test=write_texts(name="test"), length=4)
        shared_arrays.clear_cache()
        monkeypatch.setattr("fl_dist.data.text_rows.MAX_CHARACTERS", 20)
        sizes: list[int] = []
        encode = TextTokenizer.encode
        monkeypatch.setattr(
            TextTokenizer,
            "encode",
            lambda own, texts, *more, **named: sizes.append(len(texts)) or encode(own, texts, *more, **named),
        )
        in_groups = build(path="rows.jsonl", test="test.jsonl", length=4)
        assert sizes == [1, 2, 1, 1] * 2
        assert tokens_of(in_groups, "train").equal(tokens_of(whole, "train"))
        assert in_groups.y_train.equal(whole.y_train)

    def test_numbers_are_text(self) -> None:
        tokenizers.save(tokenizers.word_level(["3", "0.5"]), Path("numbers"))
        rows = [{"text": 3}, {"text": 0.5}]
        data = build(path=write_rows(rows), test=write_rows(rows, "test"), tokenizer="numbers")
        assert tokens_of(data, "train").tolist() == [[4, END_ID, 5, PAD_ID]]


class TestErrors:
    def test_missing_files(self) -> None:
        assert "data.path none.jsonl does not exist; name a file" in error_of(path="none.jsonl")
        assert "data.test none does not exist" in error_of(path=write_texts(), test="none")
        Path("folder").mkdir()
        assert "data.path folder has no file of a known format (.jsonl" in error_of(path="folder")
        Path("rows.csv").write_text("text\ncat\n")
        assert "is of another format (.csv): .jsonl, .txt, .parquet, .arrow or .feather" in error_of(path="rows.csv")
        Path("folder/a.txt").write_text("cat")
        write_texts(name="folder/b")
        assert "files of several formats (.jsonl, .txt); name one pattern" in error_of(path="folder")

    def test_tokenizers(self) -> None:
        path = write_texts()
        assert "data.tokenizer none does not exist" in error_of(path=path, tokenizer="none")
        Path("empty").mkdir()
        assert "data.tokenizer empty has no tokenizer.json" in error_of(path=path, tokenizer="empty")
        for content in ("{", '{"model": {"type": "pickle"}}', "[]", "\x00"):
            Path("empty/tokenizer.json").write_text(content)
            assert "tokenizer.json cannot be read as a tokenizer" in error_of(path=path, tokenizer="empty")
        tokenizers.save(tokenizers.word_level(), Path("own"), {})
        assert "name no end token; set data.end" in error_of(path=path, tokenizer="own")
        assert "the end token 'nothing' is not in the vocabulary" in error_of(path=path, tokenizer="own", end="nothing")
        Path("own/special_tokens_map.json").write_text("{")
        assert "special_tokens_map.json cannot be read" in error_of(path=path, tokenizer="own")
        far = Tokenizer(models.WordLevel({"a": 0, "b": 2**25}, unk_token="a"))
        tokenizers.save(far, Path("far"))
        assert "tokenizer.json is damaged: it has 2 tokens with ids up to 33,554,432" in error_of(
            path=path, tokenizer="far"
        )
        tokenizers.save(Tokenizer(models.WordLevel({}, unk_token="a")), Path("none"))
        assert "is damaged: it has 0 tokens" in error_of(path=path, tokenizer="none")

    def test_a_text_that_the_tokenizer_refuses(self) -> None:
        own = Tokenizer(models.WordLevel({"cat": 0}, unk_token="missing"))
        own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizers.save(own, Path("own"))
        assert "the tokenizer cannot take a text of rows.jsonl (" in error_of(
            path=write_texts(), tokenizer="own", end="cat"
        )

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("{", "line 2: this is no JSON ("),
            ("[1]", "line 2: this is no JSON object"),
            ('{"txet": "a"}', "line 2: there is no column 'text'; did you mean 'txet'?"),
            ('{"text": null}', "row 2: the column 'text' is None, which is no text; remove the row"),
            ('{"text": ["a"]}', "row 2: the column 'text' is ['a']"),
            ('{"text": "\\ud800"}', "row 2: the column 'text' is no Unicode text"),
            ("[" * 100_000, "line 2: this is no JSON ("),
        ],
    )
    def test_a_bad_line_is_named(self, line: str, expected: str) -> None:
        Path("bad.jsonl").write_text(f'{{"text": "cat"}}\n{line}\n')
        assert f"bad.jsonl, {expected}" in error_of(path="bad.jsonl")

    def test_columns(self) -> None:
        path = write_texts(form="parquet", label=[0] * 5)
        assert "rows.parquet has no column 'txt'; did you mean 'text'?" in error_of(path=path, text="txt")
        assert "rows.parquet has no column 'who'" in error_of(path=path, client="who")
        Path("a.txt").write_text("cat\ndog")
        assert "a.txt has no column 'who'; a .txt file has 'text' and 'file'" in error_of(path="a.txt", client="who")
        mixed = write_texts(["cat", "dog"], "mixed", who=["a", 1])
        assert "holds clients of type int, str" in error_of(path=mixed, client="who", test=write_texts(name="test"))

    @pytest.mark.parametrize("form", FORMATS)
    def test_damaged_files(self, form: str) -> None:
        texts = [" ".join(WORDS[(k + j) % 14] for j in range(12)) for k in range(500)]
        path = Path(write_texts(texts, form=form))
        content = path.read_bytes()
        for damaged in (b"", content[:10], content[: len(content) // 2], b"x" * len(content)):
            path.write_bytes(damaged)
            message = error_of(path=str(path))
            assert path.name in message
            assert any(words in message for words in ("cannot be read", "is damaged", "is empty", "is no JSON"))

    def test_other_encodings(self) -> None:
        Path("a.txt").write_bytes("für\n".encode("latin-1"))
        assert "a.txt cannot be read (" in (message := error_of(path="a.txt")) and "write it as UTF-8" in message
        Path("empty.txt").write_text("\n \n")
        assert "empty.txt is empty" in error_of(path="empty.txt")

    @pytest.mark.parametrize(("package", "extra"), [("pyarrow", "fl_dist[parquet]"), ("tokenizers", "fl_dist[llm]")])
    def test_missing_packages(self, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
        path, real = write_texts(form="parquet"), builtins.__import__

        def block(name: str, *arguments: Any, **more: Any) -> Any:
            if name.partition(".")[0] == package:
                raise ImportError(f"No module named {name!r}")
            return real(name, *arguments, **more)

        monkeypatch.setattr(builtins, "__import__", block)
        message = error_of(path=path)
        assert package in message and f"pip install '{extra}'" in message


class TestCache:
    def test_whatever_changes_the_rows_builds_them_again(self) -> None:
        path, test = write_texts(kind=[0, 1, 0, 1, 0]), write_texts(name="test", kind=[0] * 5)
        base: dict[str, Any] = {"path": path, "test": test}
        variants: list[dict[str, Any]] = [
            {},
            {"length": 5},
            {"pack": False},
            {"end": "mat"},
            {"test": 0.2},
            {"label": "kind"},
        ]
        variants += [{"text": "{text} cat"}, {"client": "kind"}, {"label": "kind", "classes": 3}, {"test": 0.4}]
        for variant in variants:
            build(**base | variant)
        assert len(shared_arrays.list_cache()) == len(variants)
        tokenizers.save(tokenizers.word_level([*WORDS[::-1], "new"]), Path("words"))
        data = build(**base)
        assert data.vocabulary == 5 + len(WORDS) and len(shared_arrays.list_cache()) == len(variants) + 1
        Path("words/tokenizer_config.json").write_text(json.dumps({"eos_token": START}))
        assert START_ID in build(**base).y_train and len(shared_arrays.list_cache()) == len(variants) + 2

    def test_without_a_cache_each_process_builds_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("file").write_text("no folder")
        expected = build(path=write_texts(), pack=False)
        monkeypatch.setenv(shared_arrays.CACHE_VARIABLE, "file/cache")
        own = build(path="rows.jsonl", pack=False)
        assert isinstance(own.x_train, dict) and isinstance(expected.x_train, dict)
        assert all(own.x_train[name].equal(x) for name, x in expected.x_train.items())

    def test_rows_are_built_once_for_several_readers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path, calls = write_texts(), []
        load: Callable[..., Any] = text_module.load_tokenizer
        monkeypatch.setattr(text_module, "load_tokenizer", lambda *own: calls.append(own) or load(*own))
        readers = [threading.Thread(target=build, kwargs={"path": path}) for _ in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert len(calls) == 1


class TestSplits:
    """Of local data, each rank reads one split."""

    def test_only_the_files_of_the_split_are_read(self) -> None:
        settings = {"path": write_texts(), "test": "none.jsonl", "tokenizer": "words", "length": 4}
        train = datasets.build("text", settings, splits=("train",))
        assert len(train.y_train) and not len(train.y_test)
        settings = {"path": "none.jsonl", "test": write_texts(), "tokenizer": "words", "length": 4, "pack": False}
        test = datasets.build("text", settings, splits=("test",))
        assert isinstance(test.x_train, dict) and not len(test.y_train) and len(test.y_test) == len(TEXTS)

    def test_what_needs_all_rows_is_refused(self) -> None:
        settings = {"path": write_texts(kind=list("ababa")), "tokenizer": "words"}
        with pytest.raises(DataError, match=r"data\.test is a share of all rows; with data\.local"):
            datasets.build("text", settings, splits=("train",))
        settings |= {"test": "none", "label": "kind"}
        with pytest.raises(DataError, match=r"with data\.local, data\.classes has to list all of them"):
            datasets.build("text", settings, splits=("train",))
        data = datasets.build("text", settings | {"classes": ["b", "a"]}, splits=("train",))
        assert data.y_train.tolist() == [1, 0, 1, 0, 1]


class TestCausalLM:
    def test_what_is_measured_is_a_plain_loop_over_tokens(self) -> None:
        task = tasks.build("causal_lm", {})
        rng = torch.Generator().manual_seed(0)
        outputs = torch.randn(3, 5, 7, generator=rng, dtype=torch.float64)
        y = torch.randint(0, 7, (3, 5), generator=rng)
        y[0, 2:] = y[2, :] = IGNORE_INDEX
        losses, hits = [], []
        for row in range(3):
            for place in range(5):
                if (target := int(y[row, place])) != IGNORE_INDEX:
                    scores = outputs[row, place].tolist()
                    losses.append(math.log(sum(math.exp(score) for score in scores)) - scores[target])
                    hits.append(max(range(7), key=scores.__getitem__) == target)
        values = task.measure(*task.align(outputs, y))
        assert torch.allclose(values["loss"], torch.tensor(losses, dtype=torch.float64), rtol=0, atol=1e-12)
        assert values["accuracy"].tolist() == hits
        mean = sum(losses) / len(losses)
        assert abs(float(task.loss(*task.align(outputs, y))) - mean) < 1e-12
        assert task.metrics({"loss": mean})["perplexity"] == math.exp(mean)
        assert math.isfinite(task.metrics({"loss": 1e4})["perplexity"])

    def test_a_batch_with_nothing_to_learn_has_loss_0(self) -> None:
        task, outputs = tasks.build("causal_lm", {}), torch.randn(2, 3, 4, requires_grad=True)
        loss = task.loss(*task.align(outputs, torch.full((2, 3), IGNORE_INDEX)))
        loss.backward()
        assert loss.item() == 0 and outputs.grad is not None and not outputs.grad.any()

    @pytest.mark.parametrize(
        ("x", "y", "vocabulary", "expected"),
        [
            (torch.ones(2, 3).long(), torch.ones(2), 0, "needs rows of ids and as many targets"),
            (torch.ones(2, 3), torch.ones(2, 3).long(), 0, "needs rows of ids"),
            (torch.ones(2, 3).long(), torch.ones(2, 2).long(), 0, "x_train has type int64 and shape [2, 3]"),
            (torch.ones(2, 3).long(), torch.full((2, 3), IGNORE_INDEX), 0, "y_train has no token to learn, only -100"),
            (torch.ones(2, 3).long(), torch.full((2, 3), -1), 0, "has a target -1; number ids from 0 on"),
            (torch.ones(2, 3).long(), torch.full((2, 3), 9), 9, "vocabulary of the data is 9, but it has ids up to 9"),
        ],
    )
    def test_data_that_does_not_fit(self, x: Tensor, y: Tensor, vocabulary: int, expected: str) -> None:
        with pytest.raises(DataError) as error:
            tasks.build("causal_lm", {}).check(Dataset(x, y, x, y, vocabulary=vocabulary))
        assert expected in str(error.value)
