"""Which rows a rank holds, and what it measures of them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_dist.algorithms.core import Batch
from fl_dist.common.errors import ConfigError, DataError
from fl_dist.config import Topology, load
from fl_dist.data import datasets
from fl_dist.data.dataset import SPLITS
from fl_dist.distributed.process_group import ProcessGroup
from fl_dist.distributed.rank_info import RankInfo
from fl_dist.federation.client_rows import build_data, check_workers
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.experiment_description import client_class_counts, content_hashes
from fl_dist.federation.measurement_share import MeasurementShare
from tests.support.processes import NO_WANDB

CPU = torch.device("cpu")
CLIENTS = 3
SETTINGS = (
    *NO_WANDB,
    "model=mlp",
    "partition={name: pathological, classes: 2}",  # rows repeat, also within a client
    f"clients={{total: {CLIENTS}, per_round: 2, placement: process, validation: 0.1}}",
)
LOCAL = (*SETTINGS, "data=npz", "data.path=silo-{client}.npz", "data.local=true", "partition=given")


def rank_of(rank: int, server: str = "dedicated") -> ProcessGroup:
    """What one rank of a job with a worker per client knows of it."""
    size = CLIENTS + (server == "dedicated")
    return ProcessGroup(Topology(server=server), CPU, rank_info=RankInfo(rank, size, rank, size, "127.0.0.1", 0))


@pytest.fixture(scope="module")
def everything() -> Experiment:
    return Experiment(load(None, list(SETTINGS)), CPU)


@pytest.fixture(scope="module")
def ranks() -> list[Experiment]:
    return [Experiment(load(None, list(SETTINGS)), CPU, rank_of(rank)) for rank in range(CLIENTS + 1)]


def _load(experiment: Experiment, rows: Tensor) -> Batch:
    return next(experiment.client_data.data.load([rows]))


class TestSharedData:
    def test_a_worker_has_the_rows_of_its_client_in_their_order(
        self, everything: Experiment, ranks: list[Experiment]
    ) -> None:
        for client, rank in enumerate(ranks[1:]):
            for name in ("rows", "validation"):
                own, whole = (_load(e, getattr(e.client_data, name)[client]) for e in (rank, everything))
                assert all(map(torch.equal, own, whole))

    def test_no_other_rows_can_be_read(self, ranks: list[Experiment]) -> None:
        for rank, experiment in enumerate(ranks):
            for client, rows in enumerate(experiment.client_data.rows):
                if client != rank - 1:
                    with pytest.raises((IndexError, RuntimeError)):
                        _load(experiment, rows)
        rows = [torch.cat([e.client_data.rows[c], e.client_data.validation[c]]) for c, e in enumerate(ranks[1:])]
        assert [len(e.dataset.x_train) for e in ranks] == [0, *(len(own.unique()) for own in rows)]

    def test_all_ranks_know_sizes_classes_and_contents(self, everything: Experiment, ranks: list[Experiment]) -> None:
        for experiment in ranks:
            assert client_class_counts(experiment) == client_class_counts(everything)
            assert content_hashes(experiment) == content_hashes(everything)

    def test_client_0_is_on_a_shared_server(self) -> None:
        experiment = Experiment(load(None, list(SETTINGS)), CPU, rank_of(0, "shared"))
        assert experiment.client_rows.workers == range(CLIENTS)
        assert len(_load(experiment, experiment.client_data.rows[0])[0]) == experiment.client_data.counts[0]

    @pytest.mark.parametrize("clients", [2, 4])
    def test_another_number_of_workers_is_refused(self, clients: int) -> None:
        config = load(None, [*SETTINGS, f"clients.total={clients}"])
        with pytest.raises(ConfigError, match=rf"{clients} clients need as many workers, but there are 3; start"):
            check_workers(config, rank_of(1))


class TestMeasurementShare:
    def test_every_row_and_client_is_measured_once(self, everything: Experiment, ranks: list[Experiment]) -> None:
        groups = [rank_of(rank) for rank in range(len(ranks))]
        for experiments in (ranks, [everything] * len(ranks)):
            shares = [MeasurementShare(e, group) for e, group in zip(experiments, groups, strict=True)]
            rows = torch.cat(experiments[0].client_data.rows)
            pieces = [piece for share in shares for piece in share.training_pieces(rows, 7)]
            assert torch.equal(torch.cat(pieces).sort().values, rows.sort().values)
            assert sorted(place for share in shares for place in share.clients(range(CLIENTS))) == [0, 1, 2]
            assert sorted(k for share in shares for k in range(9)[share.test_pieces]) == list(range(9))

    def test_a_rank_measures_only_what_it_holds(self, ranks: list[Experiment]) -> None:
        rows = torch.cat(ranks[0].client_data.rows)
        for rank, experiment in enumerate(ranks):
            share = MeasurementShare(experiment, rank_of(rank))
            assert list(share.clients([2, 0])) == [place for place, client in enumerate([2, 0]) if client == rank - 1]
            for piece in share.training_pieces(rows, 50):
                _load(experiment, piece)

    def test_validation_rows_are_evaluated_by_the_workers(
        self, everything: Experiment, ranks: list[Experiment]
    ) -> None:
        assert MeasurementShare(ranks[0], rank_of(0)).evaluator("auto") == "workers"
        assert MeasurementShare(everything, rank_of(0)).evaluator("auto") == "auto"


class TestLocalData:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        x = np.arange(24.0).reshape(8, 3)
        np.savez(tmp_path / "silo-server.npz", x_test=x, y_test=np.arange(8) % 4)
        np.savez(tmp_path / "silo-1.npz", x_train=x, y_train=np.arange(8) % 2, client=np.full(8, 7))
        np.savez(tmp_path / "silo-2.npz", x_test=x, y_test=np.arange(8) % 4)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    def test_a_rank_reads_its_own_file(self, folder: Path) -> None:
        config = load(None, list(LOCAL))
        server, worker = build_data(config, rank_of(0)), build_data(config, rank_of(2))
        assert (len(server.x_train), len(server.x_test), server.classes) == (0, 8, 4)
        assert (len(worker.x_train), len(worker.x_test), worker.classes) == (8, 0, 2)
        assert build_data(load(None, [*LOCAL, "data.classes=4"]), rank_of(2)).classes == 4

    @pytest.mark.parametrize(
        ("rank", "message"),
        [(1, "silo-0.npz does not exist"), (3, "silo-2.npz: lacks x_train; it needs x_train, y_train")],
    )
    def test_a_missing_file_or_array_is_named(self, folder: Path, rank: int, message: str) -> None:
        with pytest.raises(DataError, match=message):
            build_data(load(None, list(LOCAL)), rank_of(rank))

    def test_rows_that_the_rank_does_not_need_are_dropped(self, folder: Path) -> None:
        """Also of data sets that read both splits."""
        data = build_data(load(None, [*LOCAL, "data={name: digits, local: true}"]), rank_of(1))
        assert (len(data.x_train), len(data.x_test), data.shape) == (1437, 0, (1, 8, 8))

    def test_other_processes_cannot_divide_the_rows(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="on its own worker"):
            Experiment(load(None, list(LOCAL)), CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["clients.placement=balanced"], "data.local is true, which needs clients.placement=process"),
        (["partition=iid"], "set partition=given"),
        (["evaluate.where=server"], "only workers have validation rows"),
        (["clients.validation=0", "evaluate.where=workers"], "only rank 0 has test rows"),
        (["diagnostics={plane: {}}"], "diagnostics.plane trains a client on rank 0"),
        (["data.local=1"], "data.local"),
    ],
)
def test_what_the_placement_does_not_allow_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, [*LOCAL, *settings])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": 2}, "data.classes is 2, but the data has a label 3"),
        ({"normalise": "auto"}, "data.normalise=auto needs the training rows of all clients"),
    ],
)
def test_npz_settings_of_one_split(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    np.savez(tmp_path / "data.npz", x_test=np.ones((4, 2)), y_test=np.arange(4))
    with pytest.raises(DataError, match=message):
        datasets.build("npz", {"path": str(tmp_path / "data.npz"), **settings}, splits=("test",))


def test_npz_has_as_many_ids_as_it_says(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x_train=np.ones((4, 2), np.int32), x_test=np.ones((4, 2), np.int32))
    path = str(tmp_path / "data.npz")
    assert datasets.build("npz", {"path": path, "vocabulary": 9}, splits=SPLITS).vocabulary_size == 9
    with pytest.raises(DataError, match="data.vocabulary is 1, but the data has ids up to 1"):
        datasets.build("npz", {"path": path, "vocabulary": 1}, splits=SPLITS)
