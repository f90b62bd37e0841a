"""Callbacks: their calls, their state, their isolation from training, and reports of their failures."""

import builtins
import json
import os
import random
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import fl_dist
from fl_dist import Callback
from fl_dist.callbacks.base import CallbackList, ListedCallback, Measurements, RunContext
from fl_dist.callbacks.early_stopping import EarlyStopping
from fl_dist.config import load
from fl_dist.federation.train import TrainingLoop
from fl_dist.main import main
from fl_dist.metrics.record import RoundRecord
from fl_dist.tasks.classification import Classification
from tests.support.run_folder import assert_same_run, model_hash, read_records
from tests.support.waiting import TIMEOUT_SECONDS

SMALL = (
    *("rounds=5", "data=digits", "model={name: mlp, hidden: [8]}", "clients={total: 6, per_round: 3}", "seed=2"),
    *("local={epochs: 1, lr: 0.1}", "monitor.wandb.mode=disabled", "algorithm=fedavg"),
)

Train = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    def run(name: str, *overrides: str, expect: int = 0) -> Path:
        assert main([*SMALL, *overrides, f"run.dir={tmp_path / name}"]) == expect
        return tmp_path / name

    return run


class Recorder(Callback):
    """Records every call, and modifies its arguments although it should not."""

    calls: list[tuple[str, Any]] = []

    def __init__(self, *, fail_in: str = "", round: int = 0) -> None:
        self.fail_in, self.round, self.seen = fail_in, round, 0

    def _record(self, hook: str, value: Any) -> None:
        self.calls.append((hook, value))
        if self.fail_in == hook and (hook != "on_round_end" or value == self.round):
            raise KeyError("no such channel")

    def on_run_begin(self, context: RunContext) -> None:
        self._record("on_run_begin", (context.rounds_done, self.seen))

    def on_round_end(self, record: RoundRecord, context: RunContext) -> None:
        torch.manual_seed(0)
        torch.rand(3)
        torch.set_num_threads(2)
        for weights in context.state_dict().values():
            weights.fill_(7.0)
        record.dropped.append(99)
        record.test["accuracy"] = 1.0  # type: ignore[index]
        self.seen += 1
        self._record("on_round_end", record.round)

    def on_run_end(self, summary: dict[str, Any], context: RunContext) -> None:
        self._record("on_run_end", (summary["finished"], self.seen))
        summary["finished"] = "modified"

    def state_dict(self) -> dict[str, Any]:
        self._record("state_dict", None)
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


class Meddler(Callback):
    """Changes all that it can reach, wherever it can."""

    def __init__(self) -> None:
        self._meddle()

    def _meddle(self) -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_float32_matmul_precision("medium")
        torch.set_autocast_enabled("cpu", True)
        torch.set_deterministic_debug_mode("default")
        torch.backends.mkldnn.enabled = False
        os.chdir("/")

    def check(self, measurements: Measurements) -> None:
        self._meddle()

    def on_run_begin(self, context: RunContext) -> None:
        self._meddle()
        context.config.clients.schedule[:] = [[0]] * 5
        context.config.algorithm["name"] = "fedsam"

    def on_round_end(self, record: RoundRecord, context: RunContext) -> None:
        self._meddle()

    def state_dict(self) -> dict[str, Any]:
        self._meddle()
        return {}

    def load_state_dict(self, state: Any) -> None:
        self._meddle()


class Closing(Callback):
    """Raises an error in a hook, and records that it was closed."""

    def __init__(self, *, error: str = "KeyError", hook: str = "on_round_end") -> None:
        self.error, self.hook = getattr(builtins, error), hook

    def on_round_end(self, record: RoundRecord, context: RunContext) -> None:
        self._fail("on_round_end")

    def close(self) -> None:
        Recorder.calls.append(("close", None))
        self._fail("close")

    def _fail(self, hook: str) -> None:
        if hook == self.hook:
            raise self.error("no such channel" if self.error is KeyError else 0)


class FolderRemover(Callback):
    def on_run_begin(self, context: RunContext) -> None:
        Path.cwd().rmdir()


class Misspelt(Callback):
    def on_roundend(self, record: RoundRecord, context: RunContext) -> None: ...


RECORDER, CLOSING = "tests.unit.test_callbacks:Recorder", "tests.unit.test_callbacks:Closing"


def test_a_misspelt_hook_is_refused(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train("run", "callbacks=[tests.unit.test_callbacks:Misspelt]", expect=1)
    expected = "callback tests.unit.test_callbacks:Misspelt has a method 'on_roundend', which is not a hook; did you"
    assert f"error: {expected} mean 'on_round_end'?" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def calls() -> list[tuple[str, Any]]:
    Recorder.calls.clear()
    return Recorder.calls


def test_hooks_are_called_once_per_round_in_order(train: Train, calls: list[tuple[str, Any]]) -> None:
    train("run", f"callbacks=['{RECORDER}']")
    hooks = [call for call in calls if call[0] != "state_dict"]
    assert hooks[0] == ("on_run_begin", (0, 0))
    assert hooks[1:-1] == [("on_round_end", k) for k in range(1, 6)]
    assert hooks[-1] == ("on_run_end", (True, 5))


def test_no_callback_changes_a_bit_of_the_training(train: Train) -> None:
    plain, with_callbacks = train("plain"), train("with_callbacks", f"callbacks=['{RECORDER}', '{RECORDER}']")
    assert_same_run(plain, with_callbacks)
    # The callbacks spoil their records and summary: neither what is summed up nor what others see may show it.
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in (plain, with_callbacks))
    assert second["finished"] is True and second["dropped"] == 0
    assert {k: v for k, v in first.items() if "seconds" not in k} == {
        k: v for k, v in second.items() if "seconds" not in k
    }


def test_global_state_that_a_callback_changes_does_not_reach_the_training(train: Train) -> None:
    schedule = "clients.schedule=[[0, 1], [2, 3], [4, 5], [0, 2], [1, 3]]"
    model = "model=cnn"
    plain = train("plain", schedule, model)
    assert_same_run(plain, train("meddled", schedule, model, "callbacks=['tests.unit.test_callbacks:Meddler']"))


@pytest.mark.parametrize("error", ["KeyError", "SystemExit"])
def test_callbacks_are_closed_after_a_failure(
    error: str, train: Train, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    train("run", f"callbacks=[{{'{CLOSING}': {{error: {error}}}}}, tensorboard]", expect=1)
    assert calls == [("close", None)]
    what = "it called sys.exit(0)" if error == "SystemExit" else "KeyError: 'no such channel'"
    assert f"callback {CLOSING} failed in on_round_end: {what}" in capsys.readouterr().err
    assert not [thread for thread in threading.enumerate() if "EventLogger" in type(thread).__name__]


@pytest.mark.parametrize("error", ["KeyError", "SystemExit", "KeyboardInterrupt"])
def test_a_callback_that_fails_in_close_fails_no_finished_run(
    error: str, train: Train, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    failing = f"{{'{CLOSING}': {{error: {error}, hook: close}}}}"
    train("run", f"callbacks=[{failing}, {failing}]")
    assert calls == [("close", None)] * 2
    assert f"warning: callback {CLOSING} #2 failed in close" in capsys.readouterr().err


def test_a_callback_that_was_left_out_is_closed(train: Train, calls: list[tuple[str, Any]]) -> None:
    train("run", f"callbacks=[{{'{CLOSING}': {{optional: true}}}}]")
    assert calls == [("close", None)]


def test_callbacks_of_a_run_that_is_refused_are_not_closed(train: Train, calls: list[tuple[str, Any]]) -> None:
    """They have not begun."""
    train("run")
    train("run", f"callbacks=['{CLOSING}']", expect=2)
    assert calls == []


def test_callbacks_are_closed_if_something_else_fails(train: Train, calls: list[tuple[str, Any]]) -> None:
    with mock.patch.object(TrainingLoop, "run_round", mock.Mock(side_effect=MemoryError)):
        train("run", f"callbacks=['{CLOSING}']", expect=1)
    assert calls == [("close", None)]


def test_callbacks_work_after_the_working_folder_was_removed(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a scratch folder that is cleaned while a job runs."""
    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    train("run", f"callbacks=['tests.unit.test_callbacks:FolderRemover', '{RECORDER}']")


def test_a_callback_that_was_left_out_changes_no_state_of_others(train: Train, calls: list[tuple[str, Any]]) -> None:
    left_out = f"{{'{RECORDER}': {{fail_in: on_round_end, round: 2, optional: true}}}}"
    train("run", f"callbacks=[{left_out}, '{RECORDER}']")
    calls.clear()
    train("run", f"callbacks=['{RECORDER}', '{RECORDER}']", "rounds=6")
    assert calls[:2] == [("on_run_begin", (5, 0)), ("on_run_begin", (5, 4))]


def test_the_mirror_of_a_failed_run_ends_by_itself(train: Train) -> None:
    start, started = subprocess.Popen, []

    def record_start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(start(*arguments, **options))
        return started[-1]

    with mock.patch.object(subprocess, "Popen", record_start):
        train("run", "monitor.wandb.mode=offline", f"callbacks=['{CLOSING}']", expect=1)
    (mirror,) = started
    mirror.wait(TIMEOUT_SECONDS)


def test_torch_is_as_it_was_after_a_callback() -> None:
    context = RunContext(None, Path(), Classification.primary_metric, 0, dict, lambda reason: None)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        CallbackList([ListedCallback("recorder", Recorder())]).on_round_end(evaluation_record(1, 0.5), context)
        assert torch.get_num_threads() == 1 and torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads)


def test_state_is_restored_when_rounds_are_added(train: Train, calls: list[tuple[str, Any]]) -> None:
    train("run", f"callbacks=['{RECORDER}']")
    calls.clear()
    folder = train("run", f"callbacks=['{RECORDER}']", "rounds=7")
    begin, *_ = calls
    # The checkpoint holds the last round's record, which callbacks receive again, and their state before it.
    assert begin == ("on_run_begin", (5, 4))
    assert [value for hook, value in calls if hook == "on_round_end"] == [5, 6, 7]
    assert calls[-1] == ("on_run_end", (True, 7))
    assert [record["round"] for record in read_records(folder)] == list(range(1, 8))


@pytest.mark.parametrize("hook", ["on_run_begin", "on_round_end", "on_run_end", "state_dict"])
def test_a_callback_that_raises_is_named_in_one_line_and_ends_the_run(
    hook: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train("run", f"callbacks=[{{'{RECORDER}': {{fail_in: {hook}, round: 2}}}}]", expect=1)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"callback {RECORDER} failed in {hook}: KeyError: 'no such channel' (test_callbacks.py, line " in line
    assert f"the traceback is in {folder}/logs/rank0.log" in line
    assert (folder / "model.safetensors").exists() == (hook == "on_run_end")


@pytest.mark.parametrize("hook", ["on_run_begin", "on_round_end", "on_run_end", "state_dict"])
def test_an_optional_callback_that_raises_is_disabled(
    hook: str, train: Train, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = f"callbacks=[{{'{RECORDER}': {{fail_in: {hook}, round: 2, optional: true}}}}, best_model]"
    folder = train("run", settings)
    assert f"warning: callback {RECORDER} failed in {hook}: KeyError" in capsys.readouterr().err
    assert calls[-1][0] == hook and (folder / "best.safetensors").exists()
    assert model_hash(folder) == model_hash(train("plain"))


def test_a_callback_that_fails_at_the_end_keeps_no_other_from_ending(
    train: Train, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train("run", f"callbacks=[{{'{RECORDER}': {{fail_in: on_run_end}}}}, '{RECORDER}']", expect=1)
    assert [hook for hook, _ in calls[-2:]] == ["on_run_end", "on_run_end"]
    assert "final accuracy" in capsys.readouterr().out and (folder / "model.safetensors").exists()


def test_a_callback_that_fails_in_the_last_round_loses_no_model(train: Train) -> None:
    settings = f"callbacks=[{{'{RECORDER}': {{fail_in: on_round_end, round: 5}}}}]"
    folder = train("run", settings, "checkpoint.every=0", expect=1)
    assert model_hash(folder) == model_hash(train("plain"))


def test_what_is_wrong_with_callbacks_is_found_without_a_run(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check", *SMALL, "callbacks=[early_stopping]"]) == 2
    assert "give a target, a patience or a limit" in capsys.readouterr().err
    train("run", "callbacks=[early_stopping]", expect=2)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_failed_run_resumes_without_the_callback(train: Train) -> None:
    train("run", f"callbacks=[{{'{RECORDER}': {{fail_in: on_round_end, round: 3}}}}]", expect=1)
    assert model_hash(train("run")) == model_hash(train("plain"))


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (
            "[nonsense]",
            "unknown callback 'nonsense'; valid: best_model, early_stopping, tensorboard",
        ),
        ("[{best_model: {}, tensorboard: {}}]", "callbacks.0 must be one callback with its settings"),
        ("[{early_stopping: 3}]", "callbacks.0 must be one callback with its settings"),
        ("[{early_stopping: {patienc: 3}}]", "unknown key callbacks.0.early_stopping.patienc"),
        ("[{early_stopping: {patience: 0}}]", "callbacks.0.early_stopping.patience"),
        ("[early_stopping]", "callback early_stopping: give a target, a patience or a limit"),
        ("[{early_stopping: {target: 1, metric: loss}}]", "say whether max or min of loss is best"),
        ("[{best_model: {optional: maybe}}]", "callbacks.0.best_model.optional"),
        ("[json:loads]", "callback"),
        ("5", "callbacks (set on the command line): input should be a list such as [a, b], got 5"),
    ],
)
def test_invalid_callback_lists_are_refused_before_training(
    callbacks: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, f"callbacks={callbacks}", f"run.dir={tmp_path / 'run'}"]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_single_callback_may_be_given_by_its_name() -> None:
    assert load(None, ["callbacks=tensorboard"]).callbacks == load(None, ["callbacks=[tensorboard]"]).callbacks != []


def test_help_lists_callbacks_and_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for word in ("early_stopping", "best_model", "tensorboard", "patience", "min_delta", "optional"):
        assert word in text
    with pytest.raises(SystemExit):
        main(["--help", "callbacks=[early_stopping]"])
    text = capsys.readouterr().out
    assert "callback early_stopping   Stop at a target" in text and "model.name" not in text


class TestEarlyStopping:
    def test_a_target_ends_the_run_after_the_current_round(
        self, train: Train, capsys: pytest.CaptureFixture[str]
    ) -> None:
        full_run = read_records(train("full"))
        target = full_run[1]["test_accuracy"]
        reached = next(record["round"] for record in full_run if record["test_accuracy"] >= target)
        folder = train("run", f"callbacks=[{{early_stopping: {{target: {target}}}}}]")
        assert [record["round"] for record in read_records(folder)] == list(range(1, reached + 2))
        assert model_hash(folder) == model_hash(train("shorter", f"rounds={reached + 1}"))
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["finished"] and summary["rounds"] == reached + 1
        value = full_run[reached - 1]["test_accuracy"]
        assert f"accuracy {value:.6g} in round {reached} reached the target" in summary["stopped"]
        assert f"stopped         after round {reached + 1}: accuracy" in capsys.readouterr().out

    def test_the_last_model_of_a_stopped_run_is_evaluated(self, train: Train) -> None:
        folder = train("run", "evaluate.every=2", "callbacks=[{early_stopping: {target: 0}}]")
        assert [row["test_accuracy"] is None for row in read_records(folder)] == [True, False, False]

    def test_a_target_that_the_last_round_reaches_stops_nothing(self, train: Train) -> None:
        folder = train("run", "rounds=2", "evaluate.every=2", "callbacks=[{early_stopping: {target: 0}}]")
        assert "stopped" not in json.loads((folder / "summary.json").read_text())

    def test_a_stopped_run_continues_with_more_rounds_and_other_settings(
        self, train: Train, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = train("run", "callbacks=[{early_stopping: {target: 0}}]")
        assert fl_dist.load(folder).summary["stopped"] and len(read_records(folder)) == 2
        train("run", "rounds=6", "callbacks=[{early_stopping: {target: 0}}]", expect=2)
        assert "ended the run in" in (error := capsys.readouterr().err) and "change its settings" in error
        assert fl_dist.load(folder).summary["stopped"] and fl_dist.load(folder).config.rounds < 6
        train("run", "rounds=7", "callbacks=[{early_stopping: {target: 1}}]")
        assert len(read_records(folder)) == 7 and "stopped" not in fl_dist.load(folder).summary
        assert model_hash(folder) == model_hash(train("plain", "rounds=7"))
        assert sorted(path.name for path in folder.glob("model*")) == ["model-2.safetensors", "model.safetensors"]

    def test_another_metric_is_judged_by_its_own_values(self, train: Train) -> None:
        folder = train("run", "callbacks=[{early_stopping: {patience: 30}}]")
        train("run", "rounds=8", "callbacks=[{early_stopping: {patience: 2, metric: loss, best: min}}]")
        assert len(read_records(folder)) == 8 and "stopped" not in fl_dist.load(folder).summary

    def test_of_several_the_state_is_never_that_of_another(
        self, train: Train, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first, second = "{early_stopping: {limit: 100, metric: loss}}", "{early_stopping: {patience: 30}}"
        train("run", f"callbacks=[{first}, {second}]")
        train("run", "rounds=6", f"callbacks=[{first}, {second}]")
        assert "starts anew" not in capsys.readouterr().err
        train("run", "rounds=7", f"callbacks=[{second}]")
        assert (
            "callback early_stopping starts anew: the list has another number of them than before"
            in capsys.readouterr().err
        )

    def test_a_target_in_percent_is_refused(self, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
        train("run", "callbacks=[{early_stopping: {target: 90}}]", expect=2)
        assert "accuracy is at most 1; write 0.9 for 90 %" in capsys.readouterr().err
        assert main(["--check", *SMALL, "callbacks=[{early_stopping: {target: 90}}]"]) == 2
        expected = (
            "error: callback early_stopping: target 90 is out of reach: accuracy is at most 1; write 0.9 for 90 %"
        )
        assert capsys.readouterr().err == f"{expected}\n"

    def test_a_stopped_run_is_finished(self, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
        settings = "callbacks=[{early_stopping: {target: 0}}]"
        train("run", settings)
        train("run", settings, expect=2)
        assert "is finished" in capsys.readouterr().err

    @pytest.mark.parametrize(("best", "values", "patience", "stop"), [
        ("max", [0.1, 0.3, 0.2, 0.3, 0.1, 0.9], 3, 5),
        ("min", [3.0, 2.0, 2.0, 1.0, 1.5, 1.5], 2, 6),
        ("max", [0.5, float("nan"), float("nan"), 0.6], 2, 3),
        ("max", [0.1, 0.2, 0.3, 0.4], 1, None),
        ("max", [0.5, None, None, 0.5, 0.5], 3, 4),
    ])  # fmt: skip
    def test_patience_counts_rounds_since_the_best(
        self, best: str, values: list[float | None], patience: int, stop: int | None
    ) -> None:
        stops: list[str] = []
        context = RunContext(None, Path(), Classification.primary_metric._replace(best=best), 0, dict, stops.append)
        callback = EarlyStopping(patience=patience)
        callback.on_run_begin(context)
        for k, value in enumerate(values, 1):
            callback = restore(callback, context, patience)
            callback.on_round_end(evaluation_record(k, value), context)
            assert bool(stops) == (stop is not None and k >= stop), k

    def test_the_reason_names_the_rounds_without_improvement(self) -> None:
        stops: list[str] = []
        context = RunContext(None, Path(), Classification.primary_metric, 0, dict, stops.append)
        callback = EarlyStopping(patience=2)
        callback.on_run_begin(context)
        for k, value in enumerate([0.1, 0.3, 0.2, 0.3], 1):
            callback.on_round_end(evaluation_record(k, value), context)
        assert stops == ["accuracy did not improve from round 2 to 4, and round 5 was already in training"]

    @pytest.mark.parametrize("task", ["classification", "regression"])
    def test_a_metric_that_the_task_does_not_have_is_named(
        self, task: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        x = np.random.default_rng(0).normal(size=(40, 3))
        np.savez(tmp_path / "d.npz", x_train=x, y_train=x[:, 0], x_test=x[:8], y_test=x[:8, 0])
        data = (f"data={{name: npz, path: {tmp_path / 'd.npz'}}}", "task=regression", "partition=iid")
        settings = {"classification": ("f1",), "regression": ("accuracy", *data)}[task]
        train(
            "run",
            f"callbacks=[{{early_stopping: {{target: 1, metric: {settings[0]}, best: max}}}}]",
            *settings[1:],
            expect=2,
        )
        known = {"classification": "loss, accuracy", "regression": "loss, rmse, mae"}[task]
        assert f"the task does not measure '{settings[0]}'; it measures {known}" in capsys.readouterr().err


def restore(callback: EarlyStopping, context: RunContext, patience: int) -> EarlyStopping:
    """Restore a callback's state from JSON, as after an interruption."""
    other = EarlyStopping(patience=patience)
    other.load_state_dict(json.loads(json.dumps(callback.state_dict())))
    other.on_run_begin(context)
    return other


def evaluation_record(round_: int, accuracy: float | None) -> RoundRecord:
    values = {"round": round_, "bytes_down": 1, "bytes_up": 1, "dropped": [], "seconds": {"total": 1.0}}
    record = RoundRecord.from_json(values)
    test = {"loss": None if accuracy is None else 1.0, "accuracy": accuracy}
    return record.model_copy(update={"test": test})


def test_the_best_model_is_saved(train: Train) -> None:
    folder = train("run", "callbacks=[best_model]", "local.lr=1.0")
    scores = {record["round"]: record["test_accuracy"] for record in read_records(folder)}
    with safe_open(folder / "best.safetensors", "pt") as file:
        about = json.loads(file.metadata()["best"])
    best = about["round"]
    assert scores[best] == max(scores.values()) == about["value"] and about["metric"] == "accuracy"
    until = train("until", f"rounds={best}", "local.lr=1.0")
    kept, wanted = load_file(folder / "best.safetensors"), load_file(until / "model.safetensors")
    assert kept.keys() == wanted.keys() and all(torch.equal(kept[name], wanted[name]) for name in kept)


def test_tensorboard_holds_every_scalar_of_every_record(train: Train) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train("run", "callbacks=[tensorboard]", "rounds=3")
    folder = train("run", "callbacks=[tensorboard]", "diagnostics={sharpness: {every: 1}}")
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    records = [RoundRecord.from_json(record) for record in read_records(folder)]
    assert len(records) == 5
    for record in records:
        for name, value in record.scalars().items():
            (logged,) = [e.value for e in events.Scalars(name) if e.step == record.round]
            assert logged == pytest.approx(value, rel=1e-6), (name, record.round)
    assert "3_diagnostics/sharpness/sharpness" in events.Tags()["scalars"]
