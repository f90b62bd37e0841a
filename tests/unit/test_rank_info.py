"""A process reads its rank from the variables of torchrun or srun, and refuses invalid ones."""

import pytest

from fl_dist.distributed.rank_info import RankInfo, RankInfoError, find_rank, rendezvous_port

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "gpu[03-04,9],login1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


def test_a_single_process_has_no_rank_info() -> None:
    assert find_rank({}) is None
    # A batch script and a shell with one task are not ranks.
    assert find_rank({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    assert find_rank({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_rank_info_is_read_from_torchrun() -> None:
    assert find_rank(TORCHRUN | {"MASTER_ADDR": "n1"}) == RankInfo(2, 4, 0, 2, "n1", 29500)


def test_rank_info_is_read_from_srun() -> None:
    assert find_rank(SRUN) == RankInfo(3, 5, 1, 2, "gpu03", 20000 + (1234567 + 2 * 3571) % 10000)
    last = find_rank(SRUN | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"})
    assert last is not None and last.local_size == 1 and not last.is_single_node


def test_neighbouring_jobs_and_steps_have_distinct_ports() -> None:
    assert len({rendezvous_port(job, step) for job in range(4_567_000, 4_567_200) for step in range(5)}) == 1000


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("a1,b2", "a1"), ("n[1-2]", "n1"), ("r[02-03]n[7,9]-ib", "r02n7-ib")]
)
def test_the_rendezvous_host_is_the_first_node(nodes: str, first: str) -> None:
    info = find_rank(SRUN | {"SLURM_STEP_NODELIST": nodes})
    assert info is not None and info.host == first


def test_torchrun_within_srun_takes_precedence() -> None:
    info = find_rank(SRUN | TORCHRUN)
    assert info is not None and (info.rank, info.size) == (2, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "RANK is '4', not a number from 0 to 3"),
        ({"RANK": "-1"}, "RANK is '-1', not a number"),
        ({"RANK": "first"}, "RANK is 'first', not a number"),
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', not a number of at least 1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is '2', not a number from 0 to 1"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999', not a number from 1 to 65535"),
    ],
)
def test_invalid_variables_are_named(change: dict[str, str | None], message: str) -> None:
    environ = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
    with pytest.raises(RankInfoError, match=message) as caught:
        find_rank(environ)
    assert "start ranks with torchrun, launch.local or srun" in str(caught.value)


def test_restarts_on_several_nodes_need_a_store_per_attempt() -> None:
    restarts = TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(RankInfoError, match="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node"):
        find_rank(restarts)
    for change in ({"TORCHELASTIC_MAX_RESTARTS": "0"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}):
        assert find_rank(restarts | change) is not None
    assert find_rank(restarts | {"LOCAL_WORLD_SIZE": "4"}) is not None, "one node counts its attempts"
