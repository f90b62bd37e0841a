"""Each check of `fl-dist doctor` finds the fault that is planted in what it measures."""

import fcntl
import http.server
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_dist.common.files import write_atomically
from fl_dist.config import Config, validate
from fl_dist.distributed.collectives import LocalCollectives
from fl_dist.distributed.torch_settings import torch_settings
from fl_dist.doctor import data, devices, disk, memory, network, slurm, steps, trials, versions, wandb
from fl_dist.doctor.checks import Check, Report, Status, find_error
from fl_dist.doctor.jobs import Outcome, rank_in_job
from fl_dist.doctor.ranks import Ranks
from fl_dist.doctor.render import exit_code, table_lines, to_json
from fl_dist.federation.experiment import Experiment
from fl_dist.storage.folder_lock import LOCK
from tests.support import simulated_gpu

GPU = {"type": "cuda", "model": "A100", "processors": 108, "memory": 80 * 10**9, "capability": "8.0"}
CPU = {"type": "cpu", "model": "CPU", "capability": "AVX2", "cores": 4}
VERSIONS = {
    **{"fl_dist": "1", "python": "3.11", "torch": "2.6", "cuda": "12.4", "cudnn": "9", "nccl": "2.21", "slurm": ""},
    **{"driver": "550", "has_gpus": True, "visible_gpus": 8},
}
CPU_DEVICE = torch.device("cpu")


def reports(*values: dict[str, Any]) -> list[Report]:
    """One rank per node."""
    return [Report(rank, f"n{rank + 1}", each) for rank, each in enumerate(values)]


def small_config(**changes: Any) -> Config:
    base: dict[str, Any] = {"clients": {"total": 4, "per_round": 2}, "model": {"name": "cnn"}, "rounds": 2}
    return validate(base | changes)


class TestVersions:
    def test_they_are_those_of_this_process(self) -> None:
        check = versions.check_versions(reports(versions.measure_versions()), uses_gpus=False)
        assert check.status is Status.OK and f"torch {torch.__version__}" in check.measured

    def test_another_torch_on_one_node(self) -> None:
        check = versions.check_versions(reports(VERSIONS, VERSIONS | {"torch": "2.7"}), uses_gpus=True)
        assert check[1:3] == (Status.FAILED, "torch is 2.7 for rank 1 on n2, but 2.6 for rank 0 on n1")

    def test_a_torch_for_cpus_where_there_are_gpus(self) -> None:
        cpu_only = VERSIONS | {"cuda": "", "visible_gpus": 0}
        check = versions.check_versions(reports(cpu_only), uses_gpus=True)
        assert check.status is Status.FAILED and "torch 2.6 is the build for CPUs" in check.measured
        assert versions.check_versions(reports(cpu_only), uses_gpus=False).status is Status.OK

    def test_a_driver_that_torch_cannot_use(self) -> None:
        check = versions.check_versions(reports(VERSIONS | {"visible_gpus": 0}), uses_gpus=True)
        assert check.status is Status.FAILED and "(CUDA 12.4) sees none; driver 550" in check.measured

    def test_a_driver_older_than_cuda_needs(self) -> None:
        check = versions.check_versions(reports(VERSIONS, VERSIONS | {"driver": "470.82.01"}), uses_gpus=True)
        assert check.status is Status.WARNING
        assert "on n2, driver 470.82.01 is older than 525, which CUDA 12.4 needs" in check.measured

    def test_gpus_of_a_slurm_job_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
        assert versions.measure_versions()["has_gpus"]


class TestDevices:
    def test_gpus_of_one_kind(self) -> None:
        check = devices.check_devices(reports(GPU, GPU), 1, has_dedicated_server=True)
        assert check[1:3] == (Status.OK, "2 ranks on 2 nodes, each on A100, 108 SMs, 80 GB")

    @pytest.mark.parametrize("other", [{"model": "H100"}, {"processors": 98}, {"memory": 40}, {"type": "cpu"}])
    def test_another_gpu_on_one_node(self, other: dict[str, Any]) -> None:
        check = devices.check_devices(reports(GPU, GPU | other), 1, has_dedicated_server=True)
        assert check.status is Status.FAILED and "rank 1 on n2" in check.measured

    def test_another_cpu_is_a_warning(self) -> None:
        check = devices.check_devices(reports(CPU, CPU | {"capability": "AVX512"}), 1, has_dedicated_server=True)
        assert check.status is Status.WARNING

    @pytest.mark.parametrize(("workers", "status"), [(4, Status.OK), (5, Status.SLOW)])
    def test_more_workers_than_cores(self, workers: int, status: Status) -> None:
        ranks = [Report(rank, "n1", CPU) for rank in range(workers + 1)]
        assert devices.check_devices(ranks, 1, has_dedicated_server=True).status is status

    def test_links_between_gpus(self) -> None:
        matrix = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tNV12\tSYS\nGPU1\tNV12\t X \tPIX\nNIC0\tSYS\tPIX\t X\n"
        assert devices.parse_links(matrix) == ["NV12"]
        (check,) = devices.check_links(reports(GPU | {"links": ["NV12", "SYS"]}, GPU))
        assert check.measured == "n1: NVLink (NV12), PCIe (SYS)"
        assert devices.check_links(reports(CPU)) == []

    @pytest.mark.parametrize(("pinned", "status"), [(20.0, Status.OK), (1.0, Status.SLOW)])
    def test_slow_copies(self, pinned: float, status: Status) -> None:
        fast, slow = ({"copies": {"pinned": speed, "pageable": 1.0}} for speed in (25.0, pinned))
        (check,) = devices.check_copies(reports(fast, slow))
        assert check.status is status and "rank 1 on n2" in check.measured

    def test_on_the_simulated_gpu(self) -> None:
        with simulated_gpu.simulate_gpu():
            values = devices.measure_device(torch.device("cuda", 0))
        assert devices.check_devices(reports(values), 1, has_dedicated_server=False).status is Status.OK
        assert values["copies"]["pinned"] > 0 and len(devices.check_copies(reports(values))) == 1


class WrongReduce(LocalCollectives):
    def reduce(self, tensor: Tensor) -> None:
        tensor[-1] += 1


class WrongBroadcast(LocalCollectives):
    def broadcast(self, tensor: Tensor) -> None:
        tensor[3] ^= 1 << 62


class TestNetwork:
    @pytest.mark.parametrize(
        ("collectives", "wrong"),
        [(LocalCollectives(), ""), (WrongReduce(), network.REDUCE), (WrongBroadcast(), network.BROADCAST)],
    )
    def test_a_wrong_bit_is_found(self, collectives: LocalCollectives, wrong: str) -> None:
        values = network.measure_collectives(collectives, 0, 1, CPU_DEVICE, entries=1000)
        checks = network.check_collectives(reports(values))
        assert [check.name for check in checks if check.status is Status.FAILED] == ([wrong] if wrong else [])

    def test_a_rank_that_receives_something_else(self) -> None:
        values = network.measure_collectives(LocalCollectives(), 1, 2, CPU_DEVICE, entries=1000)  # nothing arrives
        broadcast, _ = network.check_collectives(reports(values, values))
        assert broadcast[1:3] == (Status.FAILED, "wrong numbers on rank 0 on n1, rank 1 on n2")

    @pytest.mark.parametrize(("gigabytes", "status"), [(5.0, Status.OK), (0.1, Status.SLOW)])
    def test_a_slow_link_between_nodes(self, gigabytes: float, status: Status) -> None:
        speeds = dict.fromkeys((network.BROADCAST, network.REDUCE), gigabytes)
        right = dict.fromkeys(speeds, True)
        values = {"is_right": right, "gigabytes": speeds, "links": {"ib0": 12.5, "eth0": 0.125}}
        for check in network.check_collectives(reports(values, values)):
            assert check.status is status and "ib0 12.5 GB/s" in check.measured

    def test_ranks_that_cannot_connect(self) -> None:
        (check,) = network.check_collectives(reports({"error": "rank 1 did not connect"}))
        assert check.status is Status.FAILED and "rank 1 did not connect" in check.measured

    def test_speeds_of_links_are_the_kernels(self, tmp_path: Path) -> None:
        for name, speed, state in (("eth0", "10000", "up"), ("eth1", "10000", "down"), ("lo", "", "unknown")):
            (tmp_path / "net" / name).mkdir(parents=True)
            (tmp_path / "net" / name / "speed").write_text(f"{speed}\n")
            (tmp_path / "net" / name / "operstate").write_text(f"{state}\n")
        port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
        assert network.link_speeds(tmp_path) == {"eth0": 1.25, "mlx5_0": 25.0}

    def test_a_name_that_does_not_resolve(self) -> None:
        check = network.check_address(reports(network.resolve("127.0.0.1"), network.resolve("no-such-node.invalid")))
        assert check.status is Status.FAILED
        assert check.measured.startswith("rank 1 on n2: 'no-such-node.invalid' does not resolve")

    def test_a_name_that_leads_to_loopback(self) -> None:
        values = {"host": "n1", "addresses": ["10.0.0.1"], "own": "10.0.0.1"}
        assert network.check_address(reports(values, values)).status is Status.OK
        check = network.check_address(reports(values, values | {"own": "127.0.1.1"}))
        assert check.status is Status.WARNING and "rank 1 on n2" in check.measured


class TestData:
    def test_it_is_read(self) -> None:
        check = data.check_data(reports(data.measure_data(small_config())), "digits")
        assert check.status is Status.OK and check.measured.startswith("digits: 1,437 + 360 rows, 115 kB, read at ")

    def test_a_missing_file(self) -> None:
        check = data.check_data(reports({"error": "data file /none.npz does not exist"}), "npz")
        assert check[1:3] == (Status.FAILED, "rank 0 on n1: data file /none.npz does not exist")

    def test_other_files_on_one_node(self) -> None:
        first, other = ({"rows": [rows, 10], "bytes": 8, "seconds": 1.0, "megabytes": 90.0} for rows in (50, 49))
        check = data.check_data(reports(first, other), "npz")
        assert check.status is Status.FAILED and check.measured.startswith("rows is [49, 10] for rank 1 on n2")

    @pytest.mark.parametrize(("seconds", "status"), [(1.0, Status.OK), (60.0, Status.SLOW)])
    def test_a_slow_disk(self, seconds: float, status: Status) -> None:
        values = {"rows": [50, 10], "bytes": 8, "seconds": seconds, "megabytes": 2.0}
        assert data.check_data(reports(values), "npz").status is status


class TestDisk:
    def test_it_is_measured(self, tmp_path: Path) -> None:
        values = disk.measure_disk(tmp_path)
        assert values["seconds"] > 0
        assert disk.check_disk(values | {"seconds": 0.01}, tmp_path).status is Status.OK

    def test_a_slow_sync(self, tmp_path: Path) -> None:
        check = disk.check_disk({"seconds": 0.8, "free": 10**12}, tmp_path)
        assert check.status is Status.SLOW and "takes 800.0 ms" in check.measured

    def test_a_full_disk(self, tmp_path: Path) -> None:
        assert disk.check_disk({"seconds": 0.01, "free": 10**6}, tmp_path).status is Status.WARNING

    def test_a_rename_that_is_lost(self, tmp_path: Path) -> None:
        def write_once(path: Path, content: bytes) -> None:
            if not path.exists():
                write_atomically(path, content)

        check = disk.check_disk(disk.measure_disk(tmp_path, write_once), tmp_path)
        assert check.status is Status.FAILED and "does not hold what was written" in check.measured

    def test_a_lock_that_others_do_not_see(self, tmp_path: Path) -> None:
        (tmp_path / disk.MARKER).write_text("token")
        with open(tmp_path / LOCK, "wb") as lock:
            without = disk.measure_folder(tmp_path, "token")
            fcntl.flock(lock, fcntl.LOCK_EX)
            seen = disk.measure_folder(tmp_path, "token")
        assert disk.check_lock(reports(seen, seen), tmp_path).status is Status.OK
        check = disk.check_lock(reports(seen, without), tmp_path)
        assert check.status is Status.WARNING and "not seen by rank 1 on n2" in check.measured

    def test_a_folder_that_one_node_does_not_see(self, tmp_path: Path) -> None:
        unseen = disk.measure_folder(tmp_path / "elsewhere", "token")
        check = disk.check_lock(reports(unseen), tmp_path)
        assert check.status is Status.FAILED and "rank 0 on n1 cannot see" in check.measured


class TestMemory:
    NEEDS = {"needed": 4 * 10**9, "vectors": 10**9, "available": 10**10, "is_gpu": False}

    def test_it_is_measured(self) -> None:
        config = small_config()
        experiment = Experiment(config, CPU_DEVICE)
        worker, server = (memory.measure_memory(experiment, is_worker) for is_worker in (True, False))
        assert worker["vectors"] > server["vectors"] > experiment.model.size
        assert memory.check_memory(reports(worker), has_dedicated_server=False).status is Status.OK

    def test_ranks_of_a_node_share_its_memory(self) -> None:
        ranks = [Report(rank, "n1", self.NEEDS) for rank in range(3)]
        statuses = [memory.check_memory(ranks[:count], has_dedicated_server=False).status for count in (1, 2, 3)]
        assert statuses == [Status.OK, Status.OK, Status.FAILED]
        assert memory.check_memory(reports(*[self.NEEDS] * 3), has_dedicated_server=True).status is Status.OK

    def test_each_gpu_has_its_own(self) -> None:
        on_gpu = self.NEEDS | {"is_gpu": True}
        ranks = [Report(rank, "n1", on_gpu) for rank in range(3)]
        assert memory.check_memory(ranks, has_dedicated_server=True).status is Status.OK
        tight = memory.check_memory(reports(on_gpu, on_gpu | {"needed": 9.5e9}), has_dedicated_server=True)
        assert tight.status is Status.WARNING and "the GPU of rank 1 on n2" in tight.measured

    def test_this_machine_has_some(self) -> None:
        assert 10**8 < memory.host_memory() < 10**14


class TestSteps:
    def test_precisions_and_memory_formats_are_measured(self) -> None:
        config = small_config()
        with torch_settings(config):
            experiment = Experiment(config, CPU_DEVICE)
            values = steps.measure_variants(experiment, ["float32"])
            assert steps.check_step(reports(steps.measure_step(experiment))).status is Status.OK
        assert list(values["milliseconds"]) == ["float32", "float32 contiguous"]
        assert "float32 contiguous" in steps.check_variants(reports(values)[0], "float32").measured

    def test_rows_without_channels_have_one_format(self, tmp_path: Path) -> None:
        x, y = np.zeros((40, 3), np.float32), np.arange(40) % 4
        np.savez(tmp_path / "rows.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        rows = {"name": "npz", "path": str(tmp_path / "rows.npz")}
        experiment = Experiment(small_config(data=rows, model={"name": "mlp"}), CPU_DEVICE)
        assert list(steps.measure_variants(experiment, ["float32"])["milliseconds"]) == ["float32"]

    def test_on_the_simulated_gpu(self) -> None:
        config = small_config()
        with simulated_gpu.simulate_gpu(), torch_settings(config):
            device = torch.device("cuda", 0)
            experiment = Experiment(config, device)
            assert steps.supported_precisions(config, device) == ["float32", "tf32", "bf16"]
            values = steps.measure_variants(experiment, ["float32", "tf32"])
            needs = memory.measure_memory(experiment, is_worker=True)
        assert len(values["milliseconds"]) == 4
        assert needs["is_gpu"] and needs["vectors"] < needs["needed"] < needs["available"] == simulated_gpu.TOTAL_MEMORY

    def test_measuring_leaves_the_model_as_it_was(self) -> None:
        experiment = Experiment(small_config(), CPU_DEVICE)
        before = experiment.model.vector.clone()
        steps.measure_variants(experiment, ["float32"])
        assert torch.equal(experiment.model.vector, before)

    def test_a_slow_worker(self) -> None:
        fast, slow = ({"milliseconds": time, "precision": "float32"} for time in (10.0, 30.0))
        assert steps.check_step(reports(fast, fast, fast)).status is Status.OK
        check = steps.check_step(reports(fast, fast, slow))
        assert check.status is Status.SLOW and "rank 2 on n3 needs 30 ms" in check.measured

    def test_a_faster_precision_is_named(self) -> None:
        values = {"milliseconds": {"float32": 10.0, "tf32": 6.0, "bf16": 3.0}}
        assert "local.precision=bf16" in steps.check_variants(reports(values)[0], "float32").advice
        assert steps.check_variants(reports(values)[0], "bf16").advice == ""
        values = {"milliseconds": {"float32": 10.0, "float32 contiguous": 5.0}}
        advice = steps.check_variants(reports(values)[0], "float32").advice
        assert advice == "local.memory_format=contiguous would be faster"

    def test_variants_that_fail_are_a_warning(self) -> None:
        assert steps.check_variants(reports({"error": "no kernel"})[0], "float32").status is Status.WARNING
        assert steps.check_compiled(reports({"error": "no compiler"})[0]).status is Status.WARNING

    def test_what_compiling_brings(self) -> None:
        check = steps.check_compiled(reports({"plain": 10.0, "compiled": 7.0})[0])
        assert check.measured == "7 ms, 0.70 × the plain 10 ms"


class TestTrials:
    def test_words_make_a_short_run(self, tmp_path: Path) -> None:
        config = small_config(local={"steps": 3}, rounds=1)
        words = trials.trial_words(["my.yaml"], config, tmp_path)
        assert words[:3] == ["my.yaml", "rounds=1", "local.steps=3"] and f"run.dir={tmp_path}" in words

    @pytest.mark.parametrize(("size", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 3, 8])])
    def test_sizes(self, size: int, sizes: list[int]) -> None:
        assert trials.trial_sizes(size) == sizes

    def test_other_bits_on_some_ranks(self) -> None:
        same, other = trials.Trial(1, ["aa", "aa"]), trials.Trial(3, ["bb", "bb"])
        assert trials.check_bits([same, trials.Trial(2, ["aa", "aa"])]).status is Status.OK
        check = trials.check_bits([same, other])
        assert check[1:3] == (Status.FAILED, "models differ: one process: aa, aa; 3 ranks: bb, bb")
        assert "ranks compute differently" in check.advice

    def test_a_run_that_does_not_repeat_itself(self) -> None:
        check = trials.check_bits([trials.Trial(1, ["aa", "ab"])])
        assert check.status is Status.FAILED and "does not repeat itself" in check.advice

    def test_a_run_that_fails(self) -> None:
        check = trials.check_bits([trials.Trial(2, ["", ""], "rank 1: not enough memory")])
        assert check[1:3] == (Status.FAILED, "on 2 ranks the run failed: rank 1: not enough memory")

    LOST = [Outcome(1, 5.0, "error: rank 1 on n2 was lost", {}), Outcome(-9, 2.0, "", {})]
    RESUMED = [Outcome(0, 3.0, "", {})] * 2

    def test_a_killed_worker(self) -> None:
        check = trials.check_killed(self.LOST, self.RESUMED, "aa", "aa")
        assert check[1:3] == (Status.OK, "rank 1 was named, all ended 3.0 s later, the run resumed with the same bits")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"resumed": [Outcome(1, 3.0, "error: no checkpoint", {})]}, "did not resume: rank 0: no checkpoint"),
            ({"sha256": "bb"}, "another model"),
            ({"outcomes": [Outcome(1, 5.0, "error: lost", {}), LOST[1]]}, "did not name the lost rank 1"),
            ({"outcomes": [Outcome(None, 5.0, "", {}), LOST[1]]}, "rank 0 did not end"),
            ({"outcomes": [LOST[0], Outcome(0, 5.0, "", {})]}, "rank 1 was not killed: it finished"),
        ],
    )
    def test_what_may_go_wrong_after_it(self, changes: dict[str, Any], message: str) -> None:
        arguments = {"outcomes": self.LOST, "resumed": self.RESUMED, "sha256": "aa", "expected": "aa"} | changes
        check = trials.check_killed(**arguments)
        assert check.status is Status.FAILED and message in check.measured

    def test_how_a_child_ended_is_one_line(self) -> None:
        ends = [Outcome(0, 1.0, "", {}), Outcome(None, 9.0, "", {}), Outcome(-11, 1.0, "", {}), Outcome(3, 1.0, "", {})]
        ends.append(Outcome(2, 1.0, "warning: x\nerror: bad key\nmore", {}))
        assert [outcome.problem for outcome in ends] == [
            *("", "it did not end within 9 s", "the process was ended by SIGSEGV", "exit code 3", "bad key")
        ]

    def test_ranks_of_a_trial_are_numbered_by_node(self) -> None:
        infos = [rank_in_job(rank, ["a", "b", "a", "b"], "a", 7) for rank in range(4)]
        assert [info.local_rank for info in infos] == [0, 0, 1, 1]
        assert {info.local_size for info in infos} == {2}


class NotFound(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


class TestWandb:
    KEY = "secret-key-of-a-user"

    @pytest.fixture(autouse=True)
    def _account(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_API_KEY", self.KEY)
        monkeypatch.setattr(wandb, "TIMEOUT_SECONDS", 0.5)

    @pytest.fixture
    def server(self) -> Iterator[str]:
        with http.server.HTTPServer(("127.0.0.1", 0), NotFound) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join()

    def test_one_that_answers(self, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_BASE_URL", server)
        check = wandb.check_wandb("auto")
        assert check.status is Status.OK and check.measured.startswith("online: 127.0.0.1 answers in ")

    def test_one_that_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://user:{self.KEY}@127.0.0.1:9")
        check = wandb.check_wandb("online")
        assert check.status is Status.WARNING and "127.0.0.1 cannot be reached" in check.measured
        assert self.KEY not in to_json([check], 1.0)

    def test_one_that_never_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
            check = wandb.check_wandb("online")
        assert check.status is Status.WARNING and "timed out" in check.measured

    def test_an_address_that_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_BASE_URL", "file:///etc/passwd")
        assert wandb.check_wandb("online").status is Status.WARNING

    @pytest.mark.parametrize("mode", ["offline", "disabled"])
    def test_without_a_network(self, mode: str) -> None:
        check = wandb.check_wandb(mode)
        assert check.status is Status.OK and check.measured.startswith(mode)


class TestSlurm:
    def test_only_ranks_of_srun_get_its_signals(self) -> None:
        srun = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
        assert slurm.receives_signals(srun)
        assert not slurm.receives_signals(srun | {"TORCHELASTIC_RUN_ID": "1"})
        assert not slurm.receives_signals({"SLURM_JOB_ID": "1"})

    def test_signals_that_arrive_or_not(self) -> None:
        assert slurm.check_arrivals([True, True], "").status is Status.OK
        check = slurm.check_arrivals([True, False, None], "")
        assert check[1:3] == (Status.FAILED, "SIGUSR1 did not reach rank 1, 2")
        assert slurm.check_arrivals([False], "scancel: no permission").status is Status.WARNING

    def test_a_signal_of_a_stand_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.put_on_path(tmp_path, monkeypatch, "scancel", f"kill -USR1 {os.getpid()}")
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"):
            monkeypatch.setenv(name, "1")
        assert [check.status for check in slurm.check_signals(Ranks(None))] == [Status.OK]

    def test_a_job_that_is_not_requeued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slurm, "REQUEUE_TIMEOUT_SECONDS", 0.0)
        self.put_on_path(tmp_path, monkeypatch, "scontrol", "echo 'Requested operation is disabled' >&2; exit 1")
        (refused,) = slurm.check_requeue(Ranks(None), {"SLURM_JOB_ID": "7"})
        assert refused[1:3] == (Status.FAILED, "Requested operation is disabled")
        (outside,) = slurm.check_requeue(Ranks(None), {})
        assert outside[1:3] == (Status.FAILED, "this is no job of Slurm")
        self.put_on_path(tmp_path, monkeypatch, "scontrol", "exit 0")
        (ignored,) = slurm.check_requeue(Ranks(None), {"SLURM_JOB_ID": "7"})
        assert "was not ended" in ignored.measured

    def test_a_job_that_came_back(self) -> None:
        (check,) = slurm.check_requeue(Ranks(None), {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"})
        assert check.status is Status.OK

    @staticmethod
    def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


class TestTable:
    CHECKS = [Check("data", Status.OK, "found"), Check("W&B", Status.WARNING, "no answer", "work offline")]

    def test_rows_and_advice(self) -> None:
        assert table_lines(self.CHECKS, 12.34, 100) == [
            "ok       data  found",
            "warning  W&B   no answer",
            "               -> work offline",
            "",
            "2 checks: 1 ok, 1 warning; 12.3 s",
        ]

    def test_long_texts_fit_the_terminal(self) -> None:
        lines = table_lines([Check("data", Status.OK, "word " * 60)], 1.0, 80)
        assert max(map(len, lines)) <= 80 and len(lines) > 4

    def test_json_has_the_same(self) -> None:
        content = json.loads(to_json(self.CHECKS, 12.34))
        assert content["checks"][1] == {
            **{"name": "W&B", "status": "warning", "measured": "no answer", "advice": "work offline"}
        }

    def test_only_a_failed_check_fails_the_command(self) -> None:
        assert exit_code(self.CHECKS) == 0
        assert exit_code([*self.CHECKS, Check("reduce", Status.FAILED, "wrong")]) == 1

    def test_the_first_rank_that_failed_is_named(self) -> None:
        check = find_error("data", reports({}, {"error": "no file"}, {"error": "no file"}), "copy it")
        assert check == Check("data", Status.FAILED, "rank 1 on n2: no file (and 1 more)", "copy it")
