"""Each rank has its own device, however the launcher exposes it; invalid combinations are refused in one line."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fl_dist.config import Topology
from fl_dist.distributed import devices
from fl_dist.distributed.devices import (
    DeviceError,
    DeviceSlot,
    check_device_slots,
    describe_device_problems,
    device_slot,
    pick_device,
)

CPU = DeviceSlot("n1", "cpu", "")
A100 = SimpleNamespace(name="A100", multi_processor_count=108)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"u{device.index}", **vars(A100))
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpu(name: str, host: str = "n1") -> DeviceSlot:
    return DeviceSlot(host, "cuda", name)


def test_a_rank_takes_the_gpu_of_its_local_rank(two_gpus: None) -> None:
    assert [pick_device(Topology(), rank).index for rank in range(3)] == [0, 1, 0]
    assert pick_device(Topology(device="cpu"), 1) == torch.device("cpu")
    assert device_slot("n1", torch.device("cuda", 1))[:4] == gpu("u1")[:4]
    assert device_slot("n1", torch.device("cpu"))[:4] == CPU[:4]


def test_a_missing_gpu_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(DeviceError, match="topology.device is cuda, but no GPU is visible"):
        pick_device(Topology(device="cuda"), 0)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch sees no GPU, and nothing says that there is one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(devices, "FIRST_GPU", tmp_path / "nvidia0")
    for name in ("SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_a_gpu_job_does_not_train_on_the_cpu_unnoticed(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device(Topology(), 0) == torch.device("cpu")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    with pytest.raises(
        DeviceError, match=r"Slurm allocated GPUs, but torch \S+ sees none: install .* topology.device=cpu"
    ):
        pick_device(Topology(), 0)
    assert pick_device(Topology(device="cpu"), 0) == torch.device("cpu")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    assert pick_device(Topology(), 0) == torch.device("cpu")


def test_a_machine_with_a_gpu_does_not_train_on_the_cpu_unnoticed(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.FIRST_GPU.touch()
    with pytest.raises(DeviceError, match=r"this machine has a GPU, but torch \S+ sees none"):
        pick_device(Topology(), 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pick_device(Topology(), 0) == torch.device("cpu"), "GPUs are hidden on purpose"


def test_ranks_on_other_kinds_of_devices_are_reported(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [device_slot("n1", torch.device("cuda", 0))] * 2
    assert describe_device_problems(slots, oversubscribe=False) == []
    monkeypatch.setattr(A100, "multi_processor_count", 14)
    slots.append(device_slot("n2", torch.device("cuda", 1)))
    (problem,) = describe_device_problems(slots, oversubscribe=False)
    assert problem.startswith("rank 0 computes on A100 with 108 multiprocessors, torch ")
    assert "but rank 2 on n2 on A100 with 14 multiprocessors" in problem


@pytest.mark.parametrize(
    ("hosts", "visible", "parent", "oversubscribe", "is_reported"),
    [
        (["n1", "n1"], 1, "", False, True),
        (["n1", "n1"], 2, "", False, False),
        (["n1", "n2"], 1, "", False, False),
        (["n1", "n1"], 1, "u0", False, False),
        (["n1", "n1"], 1, "", True, False),
    ],
)
def test_ranks_that_do_not_see_their_neighbours_gpus_are_reported(
    hosts: list[str], visible: int, parent: str, oversubscribe: bool, is_reported: bool
) -> None:
    slots = [DeviceSlot(host, "cuda", f"u{k}", parent, "A100", visible) for k, host in enumerate(hosts)]
    problems = describe_device_problems(slots, oversubscribe)
    assert len(problems) == is_reported
    assert all("each rank sees only its own GPU" in problem for problem in problems)


def test_a_mig_slice_has_its_own_name(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert device_slot("n1", torch.device("cuda", 0))[:4] == ("n1", "cuda", "MIG-1", "u0")


def test_gpus_with_the_same_bus_number_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    slots = []
    for domain in (0, 1):
        slot = SimpleNamespace(uuid="u", pci_domain_id=domain, pci_bus_id=3, pci_device_id=0, **vars(A100))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, slot=slot: slot)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        slots.append(device_slot("n1", torch.device("cuda", 0)))
    assert slots[0].parent_gpu != slots[1].parent_gpu


def test_mig_slices_of_one_gpu_need_gloo() -> None:
    parts = [DeviceSlot("n1", "cuda", f"MIG-{k}", "u0") for k in (1, 2)]
    with pytest.raises(DeviceError, match="ranks 0 and 1 have parts of one GPU of n1, which NCCL cannot connect"):
        check_device_slots(parts, oversubscribe=False)
    check_device_slots(parts, oversubscribe=True)
    check_device_slots(
        [parts[0], DeviceSlot("n1", "cuda", "MIG-9", "u1"), DeviceSlot("n2", "cuda", "MIG-2", "u0")],
        oversubscribe=False,
    )


@pytest.mark.parametrize("slots", [[CPU] * 3, [gpu("a"), gpu("b")], [gpu("a"), gpu("a", "n2")], [gpu("a")]])
def test_valid_device_slots_are_accepted(slots: list[DeviceSlot]) -> None:
    check_device_slots(slots, oversubscribe=False)


def test_a_shared_gpu_is_refused_unless_oversubscribed() -> None:
    with pytest.raises(DeviceError, match=r"ranks 1 and 2 share one GPU of n1, which .*: start one rank per GPU"):
        check_device_slots([gpu("a"), gpu("b"), gpu("b")], oversubscribe=False)
    check_device_slots([gpu("a"), gpu("b"), gpu("b")], oversubscribe=True)


@pytest.mark.parametrize("slots", [[gpu("a"), DeviceSlot("n2", "cpu", "")], [DeviceSlot("n2", "cpu", ""), gpu("a")]])
def test_a_node_without_gpus_among_others_is_named(slots: list[DeviceSlot]) -> None:
    with pytest.raises(DeviceError, match=r"rank \d on n2 sees no GPU, but rank \d on n1 does"):
        check_device_slots(slots, oversubscribe=False)
