"""A missing requirement is a skip with its reason, or a failure if FL_DIST_REQUIRE names it."""

from pathlib import Path

import pytest

from tests.support.requirements import published_path, required_names, skip_or_fail


def test_a_missing_optional_requirement_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_DIST_REQUIRE", "browser,data")
    with pytest.raises(pytest.skip.Exception, match="no Slurm here"):
        skip_or_fail("slurm", "no Slurm here")


def test_a_missing_required_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_DIST_REQUIRE", "slurm,browser")
    with pytest.raises(pytest.fail.Exception, match="FL_DIST_REQUIRE names slurm, but no Slurm here"):
        skip_or_fail("slurm", "no Slurm here")


def test_ci_requires_nothing_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FL_DIST_REQUIRE", raising=False)
    monkeypatch.setenv("CI", "true")
    assert required_names() == []


def test_an_unknown_requirement_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_DIST_REQUIRE", "slurm,gpu")
    with pytest.raises(pytest.UsageError, match="names gpu; known are slurm, browser, root, data"):
        required_names()


def test_files_missing_from_the_data_folder_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FL_DIST_DATA", raising=False)
    monkeypatch.delenv("FL_DIST_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="FL_DIST_DATA does not say where"):
        published_path("cifar")
    monkeypatch.setenv("FL_DIST_DATA", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="cifar is not in FL_DIST_DATA"):
        published_path("cifar")
    (tmp_path / "cifar").touch()
    assert published_path("cifar") == tmp_path / "cifar"
