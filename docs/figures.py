"""Make every table and picture of the documents from the records in `docs/records`, without training.

python docs/figures.py

Runs each documented command that reads such records (`--from docs/records/...`). Pictures go beside the documents. A
table in Markdown replaces what stands between `<!-- NAME -->` and `<!-- end -->` in the same document, NAME being the
sweep's.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PICTURES = (".png", ".svg", ".pdf")
COMMAND = re.compile(r"^fl-dist ((?:results|report) .*--from docs/records/.*)$", re.MULTILINE)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for document in DOCUMENTS:
            text = document.read_text(encoding="utf-8")
            if (rendered := render(text, folder)) != text:
                document.write_text(rendered, encoding="utf-8")
                print(f"{document.relative_to(ROOT)}: new tables")
        for picture in sorted(file for file in folder.iterdir() if file.suffix in PICTURES):
            shutil.copyfile(picture, ROOT / "docs" / picture.name)
            print(f"docs/{picture.name}")


def render(text: str, folder: Path) -> str:
    """The document with new tables; what its commands write is left in the folder."""
    for name, output in run_commands(text, folder):
        table = re.compile(rf"(?<=<!-- {re.escape(name)} -->\n).*?(?=<!-- end -->)", re.DOTALL)
        text = table.sub(lambda _, output=output: output, text, count=1)
    return text


def run_commands(text: str, folder: Path) -> Iterator[tuple[str, str]]:
    """The name and the printed table of each command that prints Markdown."""
    for needed in ("configs", "docs"):
        if not (folder / needed).exists():
            (folder / needed).symlink_to(ROOT / needed)
    for match in COMMAND.finditer(text):
        words = shlex.split(match[1], comments=True)
        result = subprocess.run(
            [sys.executable, "-m", "fl_dist", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        if result.returncode or result.stderr:
            sys.exit(f"{match[1]}\n{result.stderr.strip()}")
        if "markdown" in words and "-o" not in words:
            yield Path(words[1]).stem, result.stdout


if __name__ == "__main__":
    main()
