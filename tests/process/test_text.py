"""Promise: rows of several tensors and rows of tokens give the same bits on any layout, and exact numbers."""

import json
import math
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax

import fl_dist
from fl_dist.common.errors import DataError
from fl_dist.diagnose import main as diagnose
from fl_dist.main import main
from tests.support import tokenizers
from tests.support.marks import examples
from tests.support.processes import ROOT, run_ranks
from tests.support.run_folder import assert_same_run, read_records
from tests.support.snippets import run_command
from tests.support.tokenizers import WORDS
from tests.support.user_guide import TEXT, guide_snippets, write_files

MODELS = """
import torch
from torch import Tensor, nn


class Net(nn.Module):
    '''The label of a text, from the mean of its tokens' vectors without the padding.'''

    def __init__(self, outputs: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(vocabulary, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].to(self.head.weight.dtype)
        mean = (self.embed(input_ids) * mask).sum(1) / mask.sum(1)
        return self.head(torch.tanh(self.hidden(mean)))


class Reader(nn.Module):
    '''The next token, from those before it.'''

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(outputs, 6), nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.read(self.embed(input_ids))[0])
"""
CLIENTS, LENGTH = 4, 6
KINDS = ["bad", "fine", "good"]
DIAGNOSTICS = {
    "sharpness": {"every": 2},
    "spectrum": {"every": 2, "rows": 20, "products": 6},
    "clients": {"every": 2},
    "flatness_distance": {"every": 2},
}
DIAGNOSTICS_OF_CLIENTS = {"clients": {"every": 2}, "flatness_distance": {"every": 2}}
"""Whose batches never mix clients: equal to the last bit wherever rows are."""
Rows = list[dict[str, Any]]


def write_jsonl(file: Path, rows: Rows) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of four clients of several sizes in one file and in one of each client, a tokenizer and models."""
    folder, rng = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    (folder / "mine.py").write_text(MODELS)
    tokenizers.save(tokenizers.word_level(), folder / "words")

    def random_row(client: int) -> dict[str, Any]:
        words = [str(word) for word in rng.choice(WORDS, rng.integers(1, 12))]
        kind = KINDS[len(words) % 3]
        return {"text": " ".join(words), "kind": kind, "question": words[0], "client": client}

    silos: dict[int, Rows] = {c: [random_row(c) for _ in range(10 + 3 * c)] for c in range(CLIENTS)}
    write_jsonl(folder / "all.jsonl", [row for rows in silos.values() for row in rows])
    for client, rows in silos.items():
        write_jsonl(folder / "silos" / f"{client}.jsonl", rows)
    write_jsonl(folder / "test.jsonl", [random_row(0) for _ in range(11)])
    return folder


def config(folder: Path, kind: str, algorithm: str, **changes: Any) -> dict[str, Any]:
    data = {"name": "text", "path": str(folder / "all.jsonl"), "test": str(folder / "test.jsonl"), "client": "client"}
    data |= {"tokenizer": str(folder / "words"), "length": LENGTH}
    own: dict[str, dict[str, Any]] = {
        "labels": {"data": {**data, "label": "kind", "classes": KINDS}, "model": "mine:Net"},
        "packed": {"data": data, "model": "mine:Reader", "task": "causal_lm"},
        "answers": {
            "data": {**data, "prompt": "the {question}", "answer": "text", "pack": False},
            "model": "mine:Reader",
            "task": "causal_lm",
        },
    }
    return {
        "rounds": 2,
        "partition": "given",
        "clients": {"total": CLIENTS, "per_round": 3, "validation": 0.2},
        "algorithm": algorithm,
        "local": {"epochs": 1, "batch_size": 4, "lr": 0.1},
        "evaluate": {"batch_size": 3},
        "diagnostics": DIAGNOSTICS if kind == "labels" else DIAGNOSTICS_OF_CLIENTS,
        "monitor": {"wandb": {"mode": "disabled"}},
        **own[kind],
        **changes,
    }


def arguments(folder: Path, run: Path, kind: str, algorithm: str, *more: str, **changes: Any) -> list[str]:
    """The command line; the configuration lies beside the models, which are imported from there."""
    file = folder / f"{run.parent.name}-{run.name}.json"
    file.write_text(json.dumps(config(folder, kind, algorithm, **changes)))
    return [str(file), f"run.dir={run}", *more]


RUNS = [("labels", name) for name in ("fedavg", "fedsam", "fedgmt", "scaffold")]
RUNS += [("packed", "fedavg"), ("packed", "fedgmt"), ("answers", "scaffold")]


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of one process."""
    runs = tmp_path_factory.mktemp("alone")
    codes, outputs = run_ranks(1, *(arguments(folder, runs / "-".join(own), *own) for own in RUNS))
    assert not any(codes), outputs
    return runs


@pytest.mark.parametrize("data_memory", examples(["null", 0], [0]))
def test_three_ranks_give_the_bits_of_one_process(
    folder: Path, alone: Path, tmp_path: Path, data_memory: int | str
) -> None:
    """The evaluation is by all ranks, whose shares end in batches of other sizes; all diagnostics are equal too."""
    more = ["evaluate.where=workers", f"topology.data_memory={data_memory}"]
    commands = [arguments(folder, tmp_path / "-".join(own), *own, *more) for own in RUNS]
    codes, outputs = run_ranks(3, *commands)
    assert not any(codes), outputs
    for own in RUNS:
        assert_same_run(tmp_path / "-".join(own), alone / "-".join(own))
    records = read_records(tmp_path / "labels-fedgmt")
    assert records[-1]["diagnostics"].keys() == DIAGNOSTICS.keys()


def test_rows_on_their_own_workers_give_the_same_bits(folder: Path, alone: Path, tmp_path: Path) -> None:
    """Of one data set, or of files that only the worker of the client reads."""
    kinds, commands, expected = ("labels", "packed"), [], []
    for kind in kinds:
        data = config(folder, kind, "scaffold")["data"]
        path = str(folder / "silos" / "{client}.jsonl")
        local = {"data": {k: v for k, v in data.items() if k != "client"} | {"path": path, "local": True}}
        placed = {"clients": {"total": CLIENTS, "per_round": 3, "validation": 0.2, "placement": "process"}}
        measured = {"diagnostics": DIAGNOSTICS_OF_CLIENTS}
        commands += [
            arguments(folder, tmp_path / f"{kind}-{name}", kind, "scaffold", **placed | measured | more)
            for name, more in (("placed", {}), ("local", local))
        ]
        expected.append(arguments(folder, tmp_path / kind, kind, "scaffold", **measured))
    codes, outputs = run_ranks(1, *expected)
    assert not any(codes), outputs
    codes, outputs = run_ranks(1 + CLIENTS, *commands)
    assert not any(codes), outputs
    for kind in kinds:
        assert_same_run(tmp_path / f"{kind}-placed", tmp_path / kind)
        assert_same_run(tmp_path / f"{kind}-local", tmp_path / kind)


@pytest.fixture
def user_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, from which the user's models are imported."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


@pytest.mark.parametrize("kind", ["packed", "answers"])
def test_perplexity_is_that_of_a_plain_loop_over_tokens(kind: str, user_folder: Path, tmp_path: Path) -> None:
    """Of the test texts, one token after another in float64."""
    local = {"epochs": 1, "batch_size": 4, "lr": 0.1, "precision": "float64"}
    assert main(arguments(user_folder, tmp_path / "run", kind, "fedavg", local=local)) == 0
    run, losses, hits = fl_dist.load(tmp_path / "run"), [], []
    model = run.model()
    for stream, learnt in plain_streams(user_folder / "test.jsonl", kind):
        for first in range(0, len(stream) - 1, LENGTH):
            inputs, targets = stream[first : first + LENGTH], stream[first + 1 : first + LENGTH + 1]
            with torch.no_grad():
                scores = log_softmax(model(torch.tensor([inputs[: len(targets)]])), -1)[0].double()
            for place, target in enumerate(targets):
                if learnt[first + 1 + place]:
                    losses.append(-float(scores[place, target]))
                    hits.append(int(scores[place].argmax()) == target)
            if kind == "answers":
                break  # what is longer than a row is cut off
    record, mean = read_records(tmp_path / "run")[-1], sum(losses) / len(losses)
    assert math.isclose(record["test_loss"], mean, rel_tol=1e-10)
    assert math.isclose(record["test_perplexity"], math.exp(mean), rel_tol=1e-10)
    assert math.isclose(record["test_accuracy"], sum(hits) / len(hits), rel_tol=1e-10)


def plain_streams(file: Path, kind: str) -> list[tuple[list[int], list[bool]]]:
    """Tokens, and whether they are learnt: all texts as one, or each answer behind its prompt."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if kind == "packed":
        stream = [token for row in rows for token in [*ids_of(row["text"]), 1]]
        return [(stream, [True] * len(stream))]
    pairs = [(ids_of(f"the {row['question']}"), [*ids_of(row["text"]), 1]) for row in rows]
    return [(prompt + answer, [False] * len(prompt) + [True] * len(answer)) for prompt, answer in pairs]


def ids_of(text: str) -> list[int]:
    return [4 + WORDS.index(word) for word in text.split()]


def test_a_run_is_read_with_rows_of_several_tensors(
    user_folder: Path, alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fl_dist.load(alone / "labels-fedavg")
    own = run.evaluate()
    assert own["accuracy"] == read_records(run.path)[-1]["test_accuracy"]
    texts = [json.loads(line) for line in (user_folder / "test.jsonl").read_text().splitlines()]
    ids, labels = [ids_of(row["text"])[:LENGTH] for row in texts], [KINDS.index(row["kind"]) for row in texts]
    x = {
        "input_ids": np.array([row + [0] * (LENGTH - len(row)) for row in ids]),
        "attention_mask": np.array([[1] * len(row) + [0] * (LENGTH - len(row)) for row in ids]),
    }
    assert run.evaluate(x, np.array(labels)) == own
    with torch.no_grad():
        predicted = run.model()(**{name: torch.from_numpy(rows) for name, rows in x.items()}).argmax(1)
    assert float((predicted == torch.tensor(labels)).double().mean()) == own["accuracy"]
    assert run.clients.sizes == [8, 10, 13, 15]
    with pytest.raises(DataError, match="the tensors of x_train need equal numbers of rows"):
        run.evaluate(x | {"attention_mask": x["attention_mask"][:3]}, np.array(labels))
    assert diagnose([str(run.path), "sharpness"]) == 0
    assert "sharpness" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["augment=crop_flip"], "augment crop_flip changes inputs of one tensor, and the data text holds several"),
        (["model=mlp"], "model mlp"),
        (["model=mine:Reader"], "model mine:Reader cannot take rows of shape [6] (input_ids, attention_mask)"),
        (["task=causal_lm"], "task causal_lm needs rows of ids and as many targets"),
        (["task=next_token"], "task next_token needs rows of at least two ids"),
        (["data.tokenizer=none"], "data.tokenizer none does not exist"),
        (["data.pack=true"], "data.label gives each text one label"),
        (["clients.total=3"], "client"),
    ],
)
def test_what_does_not_fit_is_one_line(
    changes: Sequence[str], expected: str, user_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(user_folder, tmp_path / "run", "labels", "fedavg", *changes)
    assert main(["--check", *command]) == 2
    error = capsys.readouterr().err
    assert expected in error and len(error.strip().splitlines()) == 1 and "Traceback" not in error


def test_each_task_names_the_one_that_fits(
    user_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(user_folder, tmp_path / "run", "packed", "fedavg")
    for task, expected in (("next_token", "has its own; set task=causal_lm"), ("classification", "set task=causal_lm")):
        assert main(["--check", *command, f"task={task}"]) == 2
        assert expected in capsys.readouterr().err


def test_local_files_of_other_kinds_are_refused(folder: Path, tmp_path: Path) -> None:
    """Without data.classes each client would number the names that it has."""
    data = config(folder, "labels", "fedavg")["data"] | {
        "path": str(folder / "silos" / "{client}.jsonl"),
        "local": True,
    }
    placed = {"total": CLIENTS, "per_round": 3, "placement": "process"}
    command = arguments(folder, tmp_path / "run", "labels", "fedavg", clients=placed, data=data | {"classes": None})
    codes, outputs = run_ranks(1 + CLIENTS, command)
    assert all(codes) and "data.classes has to list all of them" in outputs[0], outputs


def test_the_guide_works_from_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for command in [c for snippet in guide_snippets("sh", TEXT) for c in snippet.commands()]:
        if command == "python make_texts.py":
            runpy.run_path("make_texts.py")
        else:
            run_command(command)
    for name in ("plays", "pairs"):
        first, *_, last = read_records(tmp_path / "runs" / name)
        assert 1 < last["test_perplexity"] < first["test_perplexity"]
    assert read_records(tmp_path / "runs" / "reviews")[-1]["test_accuracy"] > 0.5
