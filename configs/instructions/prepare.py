"""Write the texts of the example: a corpus of statements, instructions of eight domains, and a tokenizer.

python configs/instructions/prepare.py [FOLDER]     default: data/instructions

The corpus states facts in plain sentences, and a base model learns it. The instructions ask for the same facts in other
words; those of the test set are about facts that no instruction of the training set is about.
"""

import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

CAPITALS = (
    "france paris italy rome spain madrid japan tokyo egypt cairo peru lima cuba havana kenya nairobi norway oslo "
    "greece athens poland warsaw austria vienna sweden stockholm finland helsinki denmark copenhagen ireland dublin "
    "portugal lisbon hungary budapest turkey ankara russia moscow china beijing india delhi iran tehran ghana accra"
)
PLURALS = (
    "mouse mice foot feet tooth teeth goose geese man men woman women child children ox oxen knife knives leaf leaves "
    "wolf wolves box boxes city cities baby babies dog dogs cat cats tree trees book books cup cups star stars "
    "fox foxes bus buses lady ladies life lives"
)
OPPOSITES = (
    "hot cold big small fast slow high low old new dark light wet dry rich poor early late full empty hard soft "
    "near far open shut good bad young aged loud quiet strong weak sweet sour wide narrow thick thin clean dirty deep "
    "shallow"
)
LETTERS = "abcdefghij"
CORPUS_SIZE, TRAIN_SIZE, TEST_SIZE = 12_000, 240, 40
"""Sentences; instructions of each domain."""


class Fact(NamedTuple):
    question: str
    answer: str
    statement: str


def pairs(words: str) -> list[tuple[str, str]]:
    both = words.split()
    return list(zip(both[::2], both[1::2], strict=True))


def draw_letters(rng: random.Random, length: int) -> list[str]:
    return rng.sample(LETTERS, length)


def reversed_letters(rng: random.Random) -> Fact:
    letters = draw_letters(rng, 3)
    given, result = " ".join(letters), " ".join(reversed(letters))
    return Fact(f"reverse {given}", result, f"{given} backwards is {result}")


def sorted_letters(rng: random.Random) -> Fact:
    letters = draw_letters(rng, 3)
    given, result = " ".join(letters), " ".join(sorted(letters))
    return Fact(f"sort {given}", result, f"{given} in order is {result}")


def counted_letters(rng: random.Random) -> Fact:
    letter, count = rng.choice(LETTERS), rng.randint(1, 9)
    given = " ".join([letter] * count)
    return Fact(f"count {given}", str(count), f"{given} is {count} times {letter}")


def sum_of_numbers(rng: random.Random) -> Fact:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return Fact(f"add {a} and {b}", str(a + b), f"{a} plus {b} is {a + b}")


def larger_number(rng: random.Random) -> Fact:
    a, b = rng.sample(range(20), 2)
    return Fact(f"larger of {a} and {b}", str(max(a, b)), f"{max(a, b)} is more than {min(a, b)}")


def chosen_from(facts: list[Fact]) -> Callable[[random.Random], Fact]:
    return lambda rng: rng.choice(facts)


DOMAINS: dict[str, Callable[[random.Random], Fact]] = {
    "arithmetic": sum_of_numbers,
    "reversing": reversed_letters,
    "sorting": sorted_letters,
    "counting": counted_letters,
    "comparing": larger_number,
    "capitals": chosen_from([Fact(f"capital of {a}", b, f"{b} is the capital of {a}") for a, b in pairs(CAPITALS)]),
    "plurals": chosen_from([Fact(f"plural of {a}", b, f"one {a} and two {b}") for a, b in pairs(PLURALS)]),
    "opposites": chosen_from([Fact(f"opposite of {a}", b, f"{a} is not {b}") for a, b in pairs(OPPOSITES)]),
}


def is_test(fact: Fact) -> bool:
    """A quarter of the facts, whatever the domain."""
    return random.Random(fact.question).random() < 0.25  # noqa: S311 (no secret)


def draw(rng: random.Random, domain: str, count: int, test: bool) -> Iterator[dict[str, str]]:
    while count:
        fact = DOMAINS[domain](rng)
        if is_test(fact) == test:
            yield {"domain": domain, "prompt": f"question : {fact.question} answer :", "answer": fact.answer}
            count -= 1


def write_lines(file: Path, rows: Iterable[dict[str, str]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """One id per word."""
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106 (no password)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)  # noqa: S311 (no secret)
    corpus = [{"text": DOMAINS[rng.choice(list(DOMAINS))](rng).statement} for _ in range(CORPUS_SIZE)]
    train, test = (
        [row for domain in DOMAINS for row in draw(rng, domain, count, is_for_test)]
        for count, is_for_test in ((TRAIN_SIZE, False), (TEST_SIZE, True))
    )
    for name, rows in (("corpus", corpus), ("train", train), ("test", test)):
        write_lines(folder / f"{name}.jsonl", rows)
    write_tokenizer(folder / "tokenizer", (text for row in [*corpus, *train, *test] for text in row.values()))
    print(f"{folder}: {len(corpus):,} sentences, {len(train):,} instructions to train on, {len(test):,} to test on")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/instructions"))
