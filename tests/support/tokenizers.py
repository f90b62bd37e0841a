"""Small tokenizers of each kind, in the files of the transformers library."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

PAD, END, UNKNOWN, START = "<pad>", "</s>", "<unk>", "<s>"
SPECIAL = [PAD, END, UNKNOWN, START]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "dog", "log", "rat", "ran", "and", "in", "red", "hat"]
NAMES = {"eos_token": END, "pad_token": {"content": PAD, "lstrip": False}}


def word_level(words: Sequence[str] = WORDS) -> Tokenizer:
    vocabulary = {word: k for k, word in enumerate([*SPECIAL, *words])}
    return _split_at_spaces(Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN)))


def bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    letters = [(letter, -5.0) for letter in sorted(set("".join(WORDS)))]
    pieces = [(token, 0.0) for token in SPECIAL] + letters + [(word, -2.0 - len(word) / 10) for word in WORDS[:6]]
    unique = list(dict(reversed(pieces)).items())[::-1]
    return _split_at_spaces(Tokenizer(models.Unigram(unique, unk_id=2)))


KINDS = {"BPE": bpe, "WordLevel": word_level, "Unigram": unigram}


def add_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A start and an end around each text."""
    ids = [(token, tokenizer.token_to_id(token)) for token in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ids)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, names: dict[str, object] | None = None) -> Path:
    """The folder, with the names of the special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "special_tokens_map.json").write_text(json.dumps(NAMES if names is None else names))
    return folder


def _split_at_spaces(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer
