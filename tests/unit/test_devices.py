"""Each rank has a device of its own, however a launcher shows it; what does not go together is refused in one line."""

from types import SimpleNamespace

import pytest
import torch

from fl_dist.config import Topology
from fl_dist.machine.devices import Seat, compare, pick_device, seat

CPU = Seat("n1", "cpu", "")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"u{device.index}"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpu(name: str, host: str = "n1") -> Seat:
    return Seat(host, "cuda", name)


def test_a_rank_takes_the_gpu_of_its_number(two_gpus: None) -> None:
    assert [pick_device(Topology(), rank).index for rank in range(3)] == [0, 1, 0]
    assert pick_device(Topology(device="cpu"), 1) == torch.device("cpu")
    assert seat("n1", torch.device("cuda", 1)) == gpu("u1")
    assert seat("n1", torch.device("cpu")) == CPU


def test_no_gpu_where_one_was_asked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(ValueError, match="topology.device is cuda, but no GPU is visible"):
        pick_device(Topology(device="cuda"), 0)


def test_a_part_of_a_gpu_has_a_name_of_its_own(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert seat("n1", torch.device("cuda", 0)) == Seat("n1", "cuda", "MIG-1", "u0")


def test_gpus_of_one_bus_number_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    seats = []
    for domain in (0, 1):
        slot = SimpleNamespace(uuid="u", pci_domain_id=domain, pci_bus_id=3, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, slot=slot: slot)
        seats.append(seat("n1", torch.device("cuda", 0)))
    assert seats[0].whole != seats[1].whole


def test_parts_of_one_gpu_need_gloo() -> None:
    parts = [Seat("n1", "cuda", f"MIG-{k}", "u0") for k in (1, 2)]
    with pytest.raises(ValueError, match="ranks 0 and 1 have parts of one GPU of n1, which NCCL cannot connect"):
        compare(parts, oversubscribe=False)
    compare(parts, oversubscribe=True)
    compare([parts[0], Seat("n1", "cuda", "MIG-9", "u1"), Seat("n2", "cuda", "MIG-2", "u0")], oversubscribe=False)


@pytest.mark.parametrize("seats", [[CPU] * 3, [gpu("a"), gpu("b")], [gpu("a"), gpu("a", "n2")], [gpu("a")]])
def test_what_goes_together(seats: list[Seat]) -> None:
    compare(seats, oversubscribe=False)


def test_only_real_sharing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks 1 and 2 share one GPU of n1, which .*: start one rank a GPU"):
        compare([gpu("a"), gpu("b"), gpu("b")], oversubscribe=False)
    compare([gpu("a"), gpu("b"), gpu("b")], oversubscribe=True)


@pytest.mark.parametrize("seats", [[gpu("a"), Seat("n2", "cpu", "")], [Seat("n2", "cpu", ""), gpu("a")]])
def test_a_node_without_gpus_among_others_is_named(seats: list[Seat]) -> None:
    with pytest.raises(ValueError, match=r"rank \d on n2 sees no GPU, but rank \d on n1 does"):
        compare(seats, oversubscribe=False)
