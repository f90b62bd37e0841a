"""Each rank has its own device, however the launcher exposes it; invalid combinations are refused in one line."""

from types import SimpleNamespace

import pytest
import torch

from fl_dist.config import Topology
from fl_dist.distributed.devices import DeviceError, DeviceSlot, check_device_slots, device_slot, pick_device

CPU = DeviceSlot("n1", "cpu", "")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"u{device.index}"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpu(name: str, host: str = "n1") -> DeviceSlot:
    return DeviceSlot(host, "cuda", name)


def test_a_rank_takes_the_gpu_of_its_local_rank(two_gpus: None) -> None:
    assert [pick_device(Topology(), rank).index for rank in range(3)] == [0, 1, 0]
    assert pick_device(Topology(device="cpu"), 1) == torch.device("cpu")
    assert device_slot("n1", torch.device("cuda", 1)) == gpu("u1")
    assert device_slot("n1", torch.device("cpu")) == CPU


def test_a_missing_gpu_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(DeviceError, match="topology.device is cuda, but no GPU is visible"):
        pick_device(Topology(device="cuda"), 0)


def test_a_mig_slice_has_its_own_name(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert device_slot("n1", torch.device("cuda", 0)) == DeviceSlot("n1", "cuda", "MIG-1", "u0")


def test_gpus_with_the_same_bus_number_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    slots = []
    for domain in (0, 1):
        slot = SimpleNamespace(uuid="u", pci_domain_id=domain, pci_bus_id=3, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, slot=slot: slot)
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
