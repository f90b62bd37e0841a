"""A tiny tokenizer, texts of four clients, and tiny models in the format of transformers, made on the spot."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_dist.models.transformers_files import quiet_library
from tests.support.processes import NO_WANDB
from tests.support.user_guide import LANGUAGE_MODELS, guide_snippets

WORDS = ["the", "a", "cat", "dog", "rat", "sat", "ran", "lay", "on", "by", "mat", "log", "red", "big", "?"]
SPECIAL_TOKENS = ["<pad>", "</s>", "<unk>"]
VOCABULARY = len(SPECIAL_TOKENS) + len(WORDS)
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 24}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
}
LORA = {"r": 2, "targets": ["c_attn"]}
LENGTH = 8


def write_tokenizer(folder: Path) -> Path:
    """One id per word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({w: k for k, w in enumerate([*SPECIAL_TOKENS, *WORDS])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    return folder


def write_texts(file: Path, rows: int = 40) -> Path:
    """Prompts with answers and labels of four clients."""
    random = torch.Generator().manual_seed(0)
    with open(file, "w") as lines:
        for row in range(rows):
            words = [WORDS[int(k)] for k in torch.randint(len(WORDS) - 1, (3,), generator=random)]
            text = {"prompt": " ".join(words), "answer": words[row % 2], "label": row % 2, "who": row % 4}
            lines.write(json.dumps(text | {"text": " ".join([*words, words[0]])}) + "\n")
    return file


def write_model(folder: Path, settings: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A network with weights that are not those of any seed, as save_pretrained writes them."""
    vocabulary = {"vocab_size": VOCABULARY, "eos_token_id": 1, "bos_token_id": 1}
    with quiet_library() as library, torch.random.fork_rng():
        torch.manual_seed(1)
        config = library.AutoConfig.for_model(**(vocabulary | settings))
        network = library.AutoModelForCausalLM.from_config(config)
        for parameter in network.parameters():
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
        network.to(dtype).save_pretrained(folder, **options)
    return folder


def run_arguments(folder: Path, model: dict[str, Any], *more: str, **data: Any) -> list[str]:
    """A small run on prompts with answers, or on `data`."""
    settings = {"answer": "answer"} if not data else {} | data
    tokenizer, texts = folder / "tokenizer", folder / "texts.jsonl"
    if not tokenizer.exists():
        write_tokenizer(tokenizer)
        write_texts(texts)
    source = {"name": "text", "path": str(texts), "tokenizer": str(tokenizer), "length": LENGTH, "client": "who"}
    return [
        *NO_WANDB,
        "rounds=3",
        f"data={json.dumps(source | settings)}",
        f"task={'classification' if 'label' in settings else 'causal_lm'}",
        "partition=given",
        "clients={total: 4, per_round: 3}",
        "local={epochs: 1, batch_size: 4, lr: 0.1, momentum: 0}",
        f"model={json.dumps({'name': 'transformers'} | model)}",
        *more,
    ]


def own_model_arguments(folder: Path, *more: str) -> list[str]:
    """A small run of the documented model in the user's own file, on rows of ids that count upwards."""
    (own,) = [snippet.text for snippet in guide_snippets("python", LANGUAGE_MODELS) if "def gpt(" in snippet.text]
    (folder / "mine.py").write_text(own)
    rows = ((np.arange(60)[:, None] + np.arange(11)) % 12).astype(np.int32)
    np.savez(folder / "ids.npz", x_train=rows[:48], x_test=rows[48:])
    return [
        *NO_WANDB,
        "rounds=3",
        f"data={{name: npz, path: {folder / 'ids.npz'}}}",
        "task=next_token",
        "partition=iid",
        "clients={total: 4, per_round: 2}",
        "local={epochs: 2, batch_size: 4, lr: 0.3}",
        "model=mine:gpt",
        *more,
    ]
