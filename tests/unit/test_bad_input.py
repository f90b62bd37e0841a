"""Promise: bad input is refused with one line and a nonzero exit code, without a hang or loss of data."""

import contextlib
import io
import json
import lzma
import os
import resource
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import yaml
from torch import nn

from fl_dist.common import yaml_reader
from fl_dist.common.errors import MAX_MESSAGE_LENGTH
from fl_dist.common.yaml_reader import MAX_DEPTH, YamlError, parse_yaml, read_yaml, to_yaml
from fl_dist.config import Config, load
from fl_dist.config.builder_sections import BUILDER_SECTIONS
from fl_dist.main import main
from fl_dist.metrics.file import DAMAGED, MetricsFile
from fl_dist.metrics.record import RoundRecord
from fl_dist.storage.folder_lock import LOCK, FolderInUseError, FolderLostError, is_locked
from fl_dist.storage.run_folder import RunFolder
from launch import local, sweep
from tests.support.data_files import npz_arguments, save_npz
from tests.support.marks import examples
from tests.support.processes import NO_WANDB

SMALL = (*NO_WANDB, "rounds=1", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")
Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.timeout(120)
"""Nothing here may hang."""


def read_error_line(capsys: Captured) -> str:
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error[:1000]
    assert len(error) < MAX_MESSAGE_LENGTH + 20
    return error


class TestText:
    BOMB = "\n".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}' if k else 'x'] * 10)}]" for k in range(9))
    BAD = {
        "deep": ("[" * 100_000, f"more than {MAX_DEPTH} levels"),
        "deep JSON": ('{"a": ' * 100_000 + "1" + "}" * 100_000, f"more than {MAX_DEPTH} levels"),
        "deep, but closed": ("[" * 400 + "]" * 400, f"more than {MAX_DEPTH} levels"),
        "objects": ("seed: !!python/object/apply:os.getpid []", "line 1, column 7: tags such as"),
        "unknown tag": ("seed: !foo 1", "tags such as !foo are not read; write the plain value"),
        "bomb": (BOMB, "line 2, column 10: aliases such as *a0 are not read; write the value out"),
        "twice": ("seed: 1\nrounds: 3\nseed: 2", "line 3, column 1: the key seed is given twice"),
        "twice within": ("local: {lr: 1, lr: 2}", "the key lr is given twice"),
        "twice in JSON": ('{"seed": 1, "seed": 2}', "the key seed is given twice"),
        "two documents": ("seed: 1\n---\nseed: 2", "a second document begins"),
        "list as key": ("? [1]\n: 2", "a key must be a single word or text"),
        "endless number": (f"seed: {'9' * 5000}", "99... is too long"),
        "control characters": ("seed: \x01", "is not valid YAML"),
        "unclosed": ("local: {", "is not valid YAML: line 2, column 1: "),
        "empty": ("", "is empty"),
        "comment": ("# nothing\n", "is empty"),
        "list": ("[1, 2]", "must hold a mapping of keys, not list"),
        "number": ("5", "must hold a mapping of keys, not int"),
        "long key": (f"{'k' * 1000}: 1", "kk... (set in "),
        "long text": (f"rounds: {'k' * 100_000}", "got 'kkk"),
        "long name": (f"algorithm: {{name: {'k' * 100_000}}}", "unknown algorithm 'kkk"),
        "line break in a key": ('"a\\nb": 1', "unknown key a?b"),
        "sexagesimal": ("rounds: 1:30", "rounds (set in"),
        "yes is text": ("topology: {oversubscribe: yes}", "input should be a valid boolean, got 'yes'"),
    }  # fmt: skip

    @pytest.mark.parametrize("case", BAD)
    def test_a_bad_file_is_named_in_one_line(self, case: str, tmp_path: Path, capsys: Captured) -> None:
        text, message = self.BAD[case]
        (tmp_path / "config.yaml").write_text(text)
        assert main([str(tmp_path / "config.yaml")]) == 2
        error = read_error_line(capsys)
        assert message in error and str(tmp_path / "config.yaml") in error

    @pytest.mark.parametrize("case", ["deep", "unknown tag", "bomb", "twice in JSON", "endless number", "unclosed"])
    def test_a_bad_value_of_the_command_line_is_named_in_one_line(self, case: str, capsys: Captured) -> None:
        assert main([f"local={self.BAD[case][0]}"]) == 2
        assert "override 'local=" in read_error_line(capsys)

    def test_files_that_are_not_text_are_refused(self, tmp_path: Path, capsys: Captured) -> None:
        (tmp_path / "latin.yaml").write_bytes(b"run: {dir: caf\xe9}\n")
        for path, message in [
            (tmp_path / "latin.yaml", "latin.yaml is not valid YAML: byte 14 is not UTF-8 text"),
            (tmp_path, "Is a directory"),
            (Path("/dev/zero"), "/dev/zero is not valid YAML: it is larger than 64 MB"),
        ]:
            assert main([str(path)]) == 2
            assert message in read_error_line(capsys)

    def test_a_byte_order_mark_is_ignored(self, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_bytes("\ufeffrounds: 3\n".encode())
        assert read_yaml(tmp_path / "config.yaml") == {"rounds": 3}

    VALUES = {
        "010": 10, "-7": -7, "+3": 3, "0o17": 15, "0x1F": 31, "1:30": "1:30", "1_000": "1_000", "1e-3": 1e-3,
        "1.": 1.0, ".5": 0.5, "5e3": 5e3, "-.inf": -np.inf, "yes": "yes", "off": "off", "True": True, "false": False,
        "~": None, "null": None, "": None, "2001-01-01": "2001-01-01", "'1'": "1", "0b1": "0b1", "NaN": "NaN",
        "{1: 2, true: [x, ~]}": {"1": 2, "true": ["x", None]}, '{"a": [1, 2.5, null]}': {"a": [1, 2.5, None]},
        "<<": "<<", "a: b": {"a": "b"}, "- - 1\n  - 2\n- []": [[1, 2], []], '"\\ud83d\\ude00"': "\U0001f600",
    }  # fmt: skip

    @pytest.mark.parametrize("loader", [yaml_reader._LOADER, yaml.SafeLoader])
    def test_values_are_those_of_yaml_1_2(self, loader: object, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(yaml_reader, "_LOADER", loader)
        for text, value in self.VALUES.items():
            assert parse_yaml(text) == value and type(parse_yaml(text)) is type(value), text
        assert np.isnan(parse_yaml(".nan"))
        for text, _ in [case for name, case in self.BAD.items() if name in ("deep", "bomb", "twice", "unclosed")]:
            with pytest.raises(YamlError, match="line"):
                parse_yaml(text)

    def test_written_values_are_read_back_unchanged(self) -> None:
        values = [*self.VALUES, *(v for v in self.VALUES.values() if v == v), "a\nb", "é", "-", 1e22, 1e-7]
        assert parse_yaml(to_yaml({"k": values, "again": values})) == {"k": values, "again": values}

    @pytest.mark.parametrize("style", examples(["json", "flow", "block"], ["json"]))
    def test_a_long_schedule_is_read_quickly(self, style: str, tmp_path: Path) -> None:
        rounds = [[k % 97, 100 + k % 89, 200 + k % 83] for k in range(70_000 if style != "block" else 50_000)]
        flow = "\n".join(f"- {r}" for r in rounds)
        block = "\n".join(f"- - {a}\n  - {b}\n  - {c}" for a, b, c in rounds)
        text = {"json": json.dumps(rounds), "flow": flow, "block": block}[style]
        assert len(text) > 10**6
        (tmp_path / "schedule").write_text(text)
        start_time = time.process_time()
        assert read_yaml(tmp_path / "schedule") == rounds
        assert time.process_time() - start_time < 20  # a loader in plain Python takes minutes

    def test_a_configuration_may_be_json(self, tmp_path: Path, capsys: Captured) -> None:
        (tmp_path / "config.json").write_text('{"rounds": 7, "local": {"lr": 0.5}}')
        assert load(str(tmp_path / "config.json"), []).local.lr == 0.5

    @pytest.mark.parametrize("value", [".inf", "1e400"])
    @pytest.mark.parametrize("key", ["server.lr", "local.lr", "comm.timeout", "checkpoint.grace", "clients.deadline"])
    def test_numbers_are_finite(self, key: str, value: str, capsys: Captured) -> None:
        assert main([f"{key}={value}"]) == 2
        assert f"{key} (set on the command line)" in read_error_line(capsys)

    def test_numbers_of_every_builder_are_finite(self) -> None:
        schemas = [registry.schema(name) for registry in BUILDER_SECTIONS.values() for name in registry]
        schemas += [f.annotation for f in Config.model_fields.values() if hasattr(f.annotation, "model_fields")]
        checked = 0
        for schema in schemas:
            for name in [n for n, field in schema.model_fields.items() if field.annotation is float]:
                errors = []
                with contextlib.suppress(ValueError):
                    errors = [schema.model_validate({name: float("inf")})]
                assert not errors, f"{schema.__name__}.{name}"
                checked += 1
        assert checked > 30


class TestSizes:
    BAD = [
        ("model={name: mlp, hidden: [1000000000000]}", "model.hidden.0 (set on the command line): input should be"),
        ("topology.threads=100000", "topology.threads (set on the command line): input should be less than or equal"),
        ("clients.per_round=1000000000", "clients.per_round (set on the command line): input should be less than"),
        ("clients.total=1000000000", "clients.total (set on the command line): input should be less than or equal to"),
        ("partition={name: shards, per_client: 1000000000}", "shards need 4000000000 rows, there are 1437; lower"),
        ("partition={name: dirichlet, variant: unbalanced, min_size: 1000000000}", "fewer than 1000000000 rows"),
        ("local.epochs=1000000000000000000", "local.epochs (set on the command line): input should be less than"),
        ("local.batch_size=1000000000000000000000", "local.batch_size must be full, or from 1 to 10,000,000"),
        ("evaluate.batch_size=1000000000000000000000", "evaluate.batch_size (set on the command line)"),
        ("clients.min_survivors=3", "clients.min_survivors is 3, but a round may have only 2 clients"),
        ("checkpoint.grace=1e300", "checkpoint.grace (set on the command line): input should be less than or equal"),
        ("comm.timeout=1e300", "comm.timeout (set on the command line): input should be less than or equal to"),
        ("augment={name: crop_flip, padding: 1000000000}", "augment.padding (set on the command line)"),
        ("a." * 60_000 + "b=1", "a key has no 60001 levels"),
    ]  # fmt: skip

    @pytest.mark.parametrize("check", [(), ("--check",)], ids=["run", "check"])
    @pytest.mark.parametrize(("override", "message"), BAD, ids=[o[:40] for o, _ in BAD])
    def test_impossible_sizes_are_refused(
        self, override: str, message: str, check: tuple[str, ...], tmp_path: Path, capsys: Captured
    ) -> None:
        assert main([*check, *SMALL, f"run.dir={tmp_path / 'run'}", override]) in (1, 2)
        assert message in read_error_line(capsys)

    @pytest.mark.parametrize("check", [(), ("--check",)], ids=["run", "check"])
    def test_insufficient_memory_is_reported(
        self, check: tuple[str, ...], tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """torch's message for an allocation that the system refuses."""
        refused = RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory")
        monkeypatch.setattr(nn, "Linear", mock.Mock(side_effect=refused))
        assert main([*check, *SMALL, f"run.dir={tmp_path / 'run'}"]) in (1, 2)
        assert "not enough memory (" in read_error_line(capsys)

    def test_a_schedule_has_enough_survivors(self, capsys: Captured) -> None:
        assert main(["--check", *SMALL, "clients.schedule=[[0, 1, 2]]", "clients.min_survivors=3"]) == 0
        assert main(["--check", *SMALL, "clients.schedule=[[0, 1]]", "clients.min_survivors=3"]) == 2
        assert "may have only 2 clients" in read_error_line(capsys)


class TestData:
    @pytest.mark.parametrize("name", ["x_train", "x_test"])
    def test_values_beyond_float32_are_refused(self, name: str, tmp_path: Path, capsys) -> None:
        rows = np.ones((40 if name == "x_train" else 8, 3))
        rows[5, 1] = -1e300
        data = npz_arguments(save_npz(tmp_path / "d.npz", **{name: rows}))
        assert main([*SMALL, *data, f"run.dir={tmp_path / 'run'}"]) == 1
        assert f"{name} holds values that are not finite in float32; scale" in read_error_line(capsys)
        assert main(["--check", *SMALL, *data, "local.precision=float64"]) == 0

    @staticmethod
    def _rewrite(path: Path, name: str, data: bytes, kind: int = zipfile.ZIP_STORED) -> None:
        with zipfile.ZipFile(path) as old:
            members = {n: old.read(n) for n in old.namelist()}
        with zipfile.ZipFile(path, "w", kind) as new:
            for member, content in members.items():
                new.writestr(member, data if member == f"{name}.npy" else content)

    def data_error(self, path: Path, capsys: Captured) -> str:
        assert main(["--check", *SMALL, *npz_arguments(path)]) == 2
        error = read_error_line(capsys)
        assert f"data file {path}" in error
        return error

    def test_a_damaged_array_is_reported(self, tmp_path: Path, capsys: Captured) -> None:
        path = save_npz(tmp_path / "d.npz")
        self._rewrite(path, "none", b"", zipfile.ZIP_LZMA)
        content = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            start = archive.getinfo("x_train.npy").header_offset + 60
        path.write_bytes(content[:start] + b"\xff" * 40 + content[start + 40 :])
        with pytest.raises((lzma.LZMAError, zipfile.BadZipFile)), np.load(path) as arrays:
            arrays["x_train"]
        assert "cannot be read" in self.data_error(path, capsys)

    @pytest.mark.parametrize("rows", [10**30, 10**18, 10**12, 10**9])
    def test_a_header_with_an_impossible_shape_is_reported(self, rows: int, tmp_path: Path, capsys: Captured) -> None:
        path, member = save_npz(tmp_path / "d.npz"), io.BytesIO()
        header = {"descr": "<f8", "fortran_order": False, "shape": (rows, 3)}
        np.lib.format.write_array_header_1_0(member, header)
        self._rewrite(path, "x_train", member.getvalue() + b"\0" * 240)
        self.data_error(path, capsys)

    def test_an_archive_larger_than_memory_is_reported(self, tmp_path: Path, capsys: Captured) -> None:
        path = save_npz(tmp_path / "d.npz")
        data = bytearray(path.read_bytes())
        # The sizes of the first member in the zip's central directory.
        entry = data.index(b"PK\x01\x02")
        data[entry + 24 : entry + 28] = (2**32 - 2).to_bytes(4, "little")
        path.write_bytes(data)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sysconf", lambda name: 1)
            assert "unpacks to 4.29 GB, but this machine has 1 B of memory" in self.data_error(path, capsys)
        assert memory > 1


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow, as on a full disk; Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestFolder:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (b"", "config.yaml is empty"),
            (b"[1, 2]", "config.yaml is not the configuration of a run; restore it"),
            (b"seed: 1", "config.yaml is not the configuration of a run; restore it"),
            (b"rounds: [", "config.yaml is not valid YAML: line"),
            (b"\xff\xfe\x00", "config.yaml is not valid YAML: byte 0 is not UTF-8"),
        ],
    )
    def test_an_invalid_config_of_a_run_folder_is_reported(
        self, text: bytes, message: str, tmp_path: Path, capsys: Captured
    ) -> None:
        (tmp_path / "config.yaml").write_bytes(text)
        (tmp_path / "model.safetensors").touch()
        assert main([*SMALL, f"run.dir={tmp_path}"]) == 2
        assert message in read_error_line(capsys)
        assert local.main([*SMALL, f"run.dir={tmp_path}"]) == 2
        assert message in read_error_line(capsys)
        assert (tmp_path / "config.yaml").read_bytes() == text

    RECORD = {
        "round": 1,
        "test_accuracy": 0.5,
        "bytes_down": 1,
        "bytes_up": 1,
        "dropped": [],
        "seconds": {"total": 1.0},
    }
    INVALID_LINES = [
        "5",
        "[]",
        "{}",
        '{"round": "x"}',
        json.dumps(RECORD | {"test_accuracy": float("nan")}),
        json.dumps(RECORD | {"seconds": {}}),
        "\x00",
        "[" * 100_000,
    ]

    @pytest.mark.parametrize("invalid", INVALID_LINES, ids=[line[:20] for line in INVALID_LINES])
    def test_an_invalid_record_affects_no_other(self, invalid: str, tmp_path: Path) -> None:
        rows = [self.RECORD | {"round": k} for k in (1, 2, 3)]
        lines = [json.dumps(record) for record in rows]
        file = MetricsFile(tmp_path / "metrics.jsonl")
        text = "".join(f"{line}\n" for line in [lines[0], invalid, *lines[1:]])
        file.path.write_text(text)
        records = [RoundRecord.from_json(record) for record in rows]
        assert file.resume(3) == records
        assert (tmp_path / DAMAGED).read_text() == text
        file.path.write_text("".join(f"{line}\n" for line in lines) + invalid)
        assert file.resume(2) == records[:2]

    def test_one_bad_run_does_not_hide_the_others(self, tmp_path: Path, capsys: Captured) -> None:
        (tmp_path / "s.yaml").write_text(f"dir: {tmp_path}/runs\nset: {{rounds: 3}}\ngrid: {{seed: [0, 1, 2, 3, 4]}}\n")
        for k in range(5):
            (tmp_path / "runs" / f"seed{k}").mkdir(parents=True)
            (tmp_path / "runs" / f"seed{k}" / "metrics.jsonl").write_text(json.dumps(self.RECORD) + "\n")
        (tmp_path / "runs/seed0/metrics.jsonl").write_text("5\n")
        (tmp_path / "runs/seed1/metrics.jsonl").write_text('{"round": 1}\n')
        (tmp_path / "runs/seed2/config.yaml").write_text("[")
        (tmp_path / "runs/seed2/model.safetensors").touch()
        (tmp_path / "runs/seed3/metrics.jsonl").unlink()
        (tmp_path / "runs/seed3/metrics.jsonl").mkdir()
        assert sweep.main([str(tmp_path / "s.yaml"), "--status"]) == 0
        lines = capsys.readouterr().out.splitlines()
        for line, message in zip(
            lines[1:5], ["not the record", "not the record", "not valid YAML", "Is a directory"], strict=True
        ):
            assert "unreadable" in line and message in line, lines
        assert lines[5].split() == ["seed4", "interrupted", "1/3", "50.00", "%"]

    def test_a_bad_list_of_jobs_is_reported(self, tmp_path: Path, capsys: Captured) -> None:
        (tmp_path / "s.yaml").write_text(f"dir: {tmp_path}\ngrid: {{seed: [0]}}\n")
        for text in ("[]", "{", '{"a": 1}', ""):
            (tmp_path / "jobs.json").write_text(text)
            assert sweep.main([str(tmp_path / "s.yaml"), "--status"]) == 2
            assert "jobs.json" in read_error_line(capsys)

    def test_a_full_disk_at_the_start_is_reported(self, tmp_path: Path, capsys: Captured) -> None:
        with full_disk():
            code = main([*SMALL, f"run.dir={tmp_path / 'run'}"])
        assert code == 2
        assert "cannot use the run folder" in read_error_line(capsys)
        assert main([*SMALL, f"run.dir={tmp_path / 'run'}"]) == 0


class TestCommandLine:
    LONG = "x" * 5000

    @pytest.mark.parametrize("word", [LONG, f"run.dir={LONG}", "a\0b", 'run.dir="a\\0b"'])
    def test_impossible_folder_names_are_refused(self, word: str, capsys: Captured) -> None:
        for program in (main, local.main):
            assert program([word]) in (1, 2)
            assert len(read_error_line(capsys)) < 400

    @pytest.mark.parametrize("key", ["model.init", "data={name: npz, path", "clients.schedule"])
    def test_impossible_file_names_are_refused(self, key: str, capsys: Captured) -> None:
        value = f"{key}: {self.LONG}}}" if "{" in key else f"{key}={self.LONG}"
        assert main(["--check", value]) == 2
        assert len(read_error_line(capsys)) < 400

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--max-restarts", "-1"], "argument --max-restarts: must be a whole number, at least 0, not '-1'"),
            (["-n", "0"], "argument -n/--ranks: must be a whole number, at least 1, not '0'"),
            (["-n", "many"], "argument -n/--ranks: must be a whole number, at least 1, not 'many'"),
            (["--nodes", "2", "--node-rank", "2", "--rendezvous", "a:1"], "--node-rank 2 must be below --nodes 2"),
            (["--node-rank", "-1"], "argument --node-rank: must be a whole number, at least 0"),
            (["--rendezvous", "node1"], "--rendezvous node1 is not HOST:PORT, such as node1:29500"),
            (["--rendezvous", "node1:http"], "--rendezvous node1:http is not HOST:PORT"),
            (["--rendezvous", "node1:99999"], "--rendezvous node1:99999 is not HOST:PORT"),
            (["--nodes", "2"], "2 nodes need a rendezvous: give --rendezvous HOST:PORT"),
            (["--what"], "unrecognized arguments: --what; see python -m launch.local --help"),
        ],
    )
    def test_bad_launcher_options_are_refused(self, options: list[str], message: str, capsys: Captured) -> None:
        with contextlib.suppress(SystemExit):
            assert local.main(options) == 2
        assert message in read_error_line(capsys)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("grid: {seed: {..: 1}}", "the name '..' cannot be a folder; give the values labels"),
            ("grid: {seed: {.: 1}}", "the name '.' cannot be a folder"),
            ("grid: {monitor.wandb.name: ['']}", "the name '' cannot be a folder"),
            ("list: [{label: jobs, seed: 1}]", "the name 'jobs' cannot be a folder"),
            (f"grid: {{monitor.wandb.group: [{LONG}]}}", "is too long for a folder; give the values labels"),
            (f"list: [{{label: {'é' * 150}, seed: 1}}]", "is too long for a folder"),
            (f"grid: {{seed: {list(range(1000))}, rounds: {list(range(1, 1001))}}}", "names 1,000,000 runs, more than"),
            ("grid: {seed: [1, 1]}", "several runs are named seed1"),
            ("grid: {seed: 1}", "grid.seed"),
            ("[]", "must be a mapping of keys"),
            ("", "s.yaml is empty"),
        ],
    )
    def test_bad_sweeps_are_refused(self, text: str, message: str, tmp_path: Path, capsys: Captured) -> None:
        (tmp_path / "s.yaml").write_text(text)
        assert sweep.main([str(tmp_path / "s.yaml"), "--dry-run"]) == 2
        assert message in read_error_line(capsys)

    def test_zero_parallel_jobs_are_refused(self, capsys: Captured) -> None:
        with pytest.raises(SystemExit) as end:
            sweep.main(["s.yaml", "--local", "-j", "0"])
        assert end.value.code == 2
        assert "argument -j/--jobs: must be a whole number, at least 1, not '0'" in read_error_line(capsys)


class TestLock:
    def config(self, path: Path) -> Config:
        return load(None, [*SMALL, f"run.dir={path}"])

    def test_reading_a_run_does_not_lock_it(self, tmp_path: Path) -> None:
        config, done = self.config(tmp_path), threading.Event()

        def read_status() -> None:
            while not done.is_set():
                is_locked(tmp_path)

        readers = [threading.Thread(target=read_status) for _ in range(3)]
        for reader in readers:
            reader.start()
        try:
            for _ in range(300):
                folder = RunFolder(tmp_path)
                folder.acquire(config)
                assert is_locked(tmp_path)
                folder.release()
        finally:
            done.set()
            for reader in readers:
                reader.join()

    def test_a_second_run_on_a_folder_is_refused_at_once(self, tmp_path: Path) -> None:
        first, second, config = RunFolder(tmp_path), RunFolder(tmp_path), self.config(tmp_path)
        first.acquire(config)
        for _ in range(2):
            with pytest.raises(FolderInUseError, match=f"in use by process {os.getpid()} on "):
                second.acquire(config)
        first.release()
        second.acquire(config)
        second.release()

    @pytest.mark.parametrize("replaced", [False, True])
    def test_a_lost_lock_is_detected(self, replaced: bool, tmp_path: Path) -> None:
        first, second, config = RunFolder(tmp_path), RunFolder(tmp_path), self.config(tmp_path)
        first.acquire(config)
        first.lock.check()
        (tmp_path / LOCK).unlink()
        if replaced:
            second.acquire(config)
            second.lock.check()
        with pytest.raises(FolderLostError, match="was removed or replaced, so another job may write there"):
            first.lock.check()
        first.release()
        second.release()
        first.lock.check()
