"""`make figures`: the documents' tables and pictures are those of the kept records."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.image import imread

from tests.support.processes import ROOT


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rendered(figures: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[Path, str], Path]:
    """The documents with new tables, and the folder of their pictures."""
    folder = tmp_path_factory.mktemp("figures")
    return {document: figures.render(document.read_text(), folder) for document in figures.DOCUMENTS}, folder


def test_tables_are_those_of_the_records(rendered: tuple[dict[Path, str], Path]) -> None:
    for document, text in rendered[0].items():
        assert text == document.read_text(), f"run `make figures`: {document.name} has another table"


def test_pictures_are_those_of_the_records(rendered: tuple[dict[Path, str], Path]) -> None:
    """To the eye: another version of a library may move the edge of a letter."""
    shown = set(re.findall(r"!\[[^\]]*\]\((\S+\.png)\)", (ROOT / "docs" / "results.md").read_text()))
    drawn = {file.name for file in rendered[1].glob("*.png")}
    assert shown == drawn
    for name in drawn:
        kept, again = imread(ROOT / "docs" / name), imread(rendered[1] / name)
        assert kept.shape == again.shape, f"run `make figures`: {name} has another size"
        assert abs(kept - again).mean() < 1e-4, f"run `make figures`: {name} has changed"


def test_every_archive_is_used(figures: ModuleType) -> None:
    texts = [document.read_text() for document in figures.DOCUMENTS]
    used = {name for text in texts for name in re.findall(r"--from docs/records/(\S+)", text)}
    assert used == {file.name for file in (ROOT / "docs" / "records").iterdir()}


def test_a_changed_table_is_replaced(figures: ModuleType, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (table,) = re.findall(r"<!-- lenet -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert figures.render(text.replace(table, "an old table\n"), tmp_path) == text


def test_a_command_that_fails_is_named(figures: ModuleType, tmp_path: Path) -> None:
    command = "fl-dist results configs/results/lenet.yaml --from docs/records/none.tar.xz"
    with pytest.raises(SystemExit, match=r"none\.tar\.xz"):
        figures.render(f"```sh\n{command}\n```\n", tmp_path)
