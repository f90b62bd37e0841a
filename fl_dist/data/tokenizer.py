"""A tokenizer from a local folder in Hugging Face's format."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fl_dist.common.errors import DataError, error_message

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")
"""Either may name the special tokens; the last one decides."""
MAX_VOCABULARY = 2**24
"""A larger id is damage, and would size the model's first and last layer."""
Ids = list[list[int]]


class TextTokenizer(NamedTuple):
    """What makes token ids of texts."""

    tokenizer: "Tokenizer"
    vocabulary: int
    """The largest id, plus one."""
    end: int | None
    """The id after each document."""
    padding: int
    """The id that fills rows; where it is, nothing is learnt, and the attention mask is 0."""

    def truncate(self, length: int) -> None:
        """Cut texts to `length` tokens, and keep the special tokens at both ends."""
        special = self.tokenizer.num_special_tokens_to_add(is_pair=False)
        if special >= length:
            raise DataError(f"data.length={length} has no room for text: the tokenizer adds {special} special tokens")
        self.tokenizer.enable_truncation(length)

    def encode(self, texts: Sequence[str], file: Path, special: bool = True) -> Ids:
        """The ids of each text, with the special tokens that the tokenizer adds."""
        try:
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        except Exception as e:  # the library raises nothing more special
            raise DataError(f"the tokenizer cannot take a text of {file} ({error_message(e)})") from None
        return [encoding.ids for encoding in encodings]

    def encode_texts(self, texts: Sequence[str], file: Path, is_answer: bool) -> Ids:
        """With the end token. An answer has no special token at its start."""
        return [
            ids if ids[-1:] == [self.end] else [*ids, self.end]  # type: ignore[list-item]
            for ids in self.encode(texts, file, special=not is_answer)
        ]

    def encode_prompts(self, texts: Sequence[str], file: Path) -> Ids:
        """Without the end token, for an answer follows."""
        return [ids[:-1] if ids[-1:] == [self.end] else ids for ids in self.encode(texts, file)]


def tokenizer_files(folder: Path) -> list[Path]:
    """The files that decide what the tokenizer does."""
    if not (folder / FILE).is_file():
        what = f"has no {FILE}" if folder.is_dir() else "does not exist"
        raise DataError(f"data.tokenizer {folder} {what}; it has to be a folder with the {FILE} of a model")
    return [folder / name for name in (FILE, *SETTINGS_FILES) if (folder / name).is_file()]


def load_tokenizer(folder: Path, end: str | None) -> TextTokenizer:
    """`end`: the end token, if the folder's files do not name it."""
    tokenizer = _read(folder / FILE)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    vocabulary = 1 + max(ids.values(), default=-1)
    if not 0 < vocabulary <= MAX_VOCABULARY:
        raise DataError(f"{folder / FILE} is damaged: it has {len(ids):,} tokens with ids up to {vocabulary - 1:,}")
    special = _read_special_tokens(folder)
    end_token = end or special.get("eos_token") or special.get("sep_token")
    if end_token is not None and end_token not in ids:
        raise DataError(
            f"the end token {end_token!r} is not in the vocabulary of {folder}; set data.end to one that is"
        )
    end_id = None if end_token is None else ids[end_token]
    padding = ids.get(special.get("pad_token", ""), end_id or 0)
    return TextTokenizer(tokenizer, vocabulary, end_id, padding)


def _read(file: Path) -> "Tokenizer":
    # Set, so that the library prints no warning in processes that are forked later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError("data text needs the package tokenizers: pip install 'fl_dist[llm]'") from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises nothing more special
        raise DataError(f"{file} cannot be read as a tokenizer ({error_message(e)})") from None


def _read_special_tokens(folder: Path) -> dict[str, str]:
    """Their texts by name, such as eos_token."""
    tokens: dict[str, str] = {}
    for name in SETTINGS_FILES:
        if (folder / name).is_file():
            tokens |= {key: text for key, value in _read_json(folder / name).items() if (text := _token_text(value))}
    return tokens


def _token_text(value: Any) -> str | None:
    """A token is written as its text, or as an object with its text and flags."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise DataError(f"{file} cannot be read ({error_message(e)})") from None
    return content if isinstance(content, dict) else {}
