"""The user's own texts: documents, prompts with answers, or labelled texts, as rows of tokens."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from fl_dist.common.errors import DataError
from fl_dist.common.paths import expand_path
from fl_dist.data import shared_arrays
from fl_dist.data.dataset import SPLITS, Dataset, dataset_from_arrays, datasets
from fl_dist.data.splits import ClassNames, Column, TestRows, describe_files, find_splits
from fl_dist.data.text_files import SUFFIXES, Document
from fl_dist.data.text_rows import TENSOR_NAMES, TextSettings, write_rows
from fl_dist.data.tokenizer import load_tokenizer, tokenizer_files


@datasets.register
def text(
    splits: Sequence[str] = SPLITS,
    *,
    path: Annotated[
        str, Field(min_length=1, description="training texts: a file, a pattern (DIR/*.jsonl) or a folder")
    ],
    tokenizer: Annotated[str, Field(min_length=1, description="folder with a tokenizer.json; nothing is downloaded")],
    test: TestRows = 0.1,
    length: Annotated[int, Field(ge=1, le=10**6, description="tokens per row")] = 512,
    pack: Annotated[
        bool | None, Field(description="join a client's texts and cut them into full rows; null: unless labels are set")
    ] = None,
    text: Annotated[Column, Field(description="column of the text, or a template with {columns}")] = "text",
    prompt: Annotated[
        Column | None, Field(description="what precedes an answer: a column, or a template; null: prompt")
    ] = None,
    answer: Annotated[
        Column | None, Field(description="answers: a column, or a template; then they alone are learnt")
    ] = None,
    label: Annotated[Column | None, Field(description="column of labels, for the task classification")] = None,
    client: Annotated[Column | None, Field(description="column of the client; file: each file is a client")] = None,
    classes: ClassNames = None,
    end: Annotated[
        Column | None, Field(description="token after each text; null: as the tokenizer's files say")
    ] = None,
    document: Annotated[Document, Field(description="what a text of a .txt file is")] = "line",
) -> Dataset:
    """Texts from .jsonl, .txt, .parquet, .arrow or .feather files, by a tokenizer from a local folder."""
    if label is not None and (pack or answer is not None):
        raise DataError("data.label gives each text one label; remove it, or data.pack and data.answer")
    if prompt is not None and answer is None:
        raise DataError("data.prompt precedes an answer; set data.answer to its column, or remove data.prompt")
    is_packed = label is None and pack is not False
    settings = TextSettings(length, is_packed, text, prompt or "prompt", answer, label, client, classes, document)
    files, folder = find_splits(path, test, splits, SUFFIXES), expand_path(tokenizer)
    sources = [*(file for own in files.values() for file in own), *tokenizer_files(folder)]

    def build(allocate: shared_arrays.Allocate) -> None:
        write_rows(allocate, files, test, load_tokenizer(folder, end), settings)

    arrays = shared_arrays.load_or_build("text", sources, (settings, end, describe_files(files), test), build)
    classes, vocabulary = (int(arrays[name]) for name in ("classes", "vocabulary"))
    return dataset_from_arrays(arrays, classes, () if is_packed else TENSOR_NAMES, vocabulary=vocabulary)
