"""What a machine lacks is a skip with its reason, and a failure where FL_DIST_REQUIRE names it."""

from pathlib import Path

import pytest

from tests.support.requirements import lacking, published, required


def test_what_is_not_required_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_DIST_REQUIRE", "browser,data")
    with pytest.raises(pytest.skip.Exception, match="no Slurm here"):
        lacking("slurm", "no Slurm here")


def test_what_is_required_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_DIST_REQUIRE", "slurm,browser")
    with pytest.raises(pytest.fail.Exception, match="FL_DIST_REQUIRE names slurm, but no Slurm here"):
        lacking("slurm", "no Slurm here")


def test_a_hosted_runner_requires_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FL_DIST_REQUIRE", raising=False)
    monkeypatch.setenv("CI", "true")
    assert required() == []


def test_an_unknown_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_DIST_REQUIRE", "slurm,gpu")
    with pytest.raises(pytest.UsageError, match="names gpu; known are slurm, browser, root, data"):
        required()


def test_published_files_that_are_promised_have_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FL_DIST_DATA", raising=False)
    monkeypatch.delenv("FL_DIST_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="FL_DIST_DATA does not say where"):
        published("cifar")
    monkeypatch.setenv("FL_DIST_DATA", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="cifar is not in FL_DIST_DATA"):
        published("cifar")
    (tmp_path / "cifar").touch()
    assert published("cifar") == tmp_path / "cifar"
