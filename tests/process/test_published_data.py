"""A text classifier learns, with the same bits on several ranks."""

from pathlib import Path

import numpy as np

from fl_dist.main import main
from tests.support.processes import NO_WANDB, run_ranks
from tests.support.run_folder import model_hash, read_records


def test_a_text_classifier_learns(tmp_path: Path) -> None:
    """fasttext on four classes of text, in one process and on three ranks."""
    words = [f"w{k}" for k in range(40)]
    rng = np.random.default_rng(0)
    for name, rows in (("train.csv", 200), ("test.csv", 40)):
        labels = rng.integers(0, 4, rows)
        lines = [f'"{k + 1}","{" ".join(rng.choice(words[10 * k : 10 * k + 10], 5))}",""' for k in labels]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    settings = [f"data={{name: ag_news, root: {tmp_path}, length: 8}}", "model=fasttext", "partition=iid", "rounds=8"]
    settings += [*NO_WANDB, "clients={total: 5, per_round: 3}", "algorithm=fedgmt"]
    settings += ["local={lr: 0.2, batch_size: 10, momentum: 0.5}"]
    assert main([*settings, f"run.dir={tmp_path / 'one'}"]) == 0
    assert read_records(tmp_path / "one")[-1]["test_accuracy"] > 0.9
    codes, outputs = run_ranks(3, [*settings, f"run.dir={tmp_path / 'three'}"])
    assert codes == [0, 0, 0], outputs
    assert model_hash(tmp_path / "one") == model_hash(tmp_path / "three")
