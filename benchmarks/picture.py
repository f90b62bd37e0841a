"""The picture of the README: test accuracy of some algorithms on the digits, strongly heterogeneous clients, 3 seeds.

python -m benchmarks.picture [--out docs/digits.png]
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from fl_dist.main import main as train

ALGORITHMS = ("fedavg", "fedsam", "scaffold", "feddyn", "fedlesam_d", "fedgmt")
SEEDS = (0, 1, 2)
ROUNDS = 60
SETTINGS = (
    f"rounds={ROUNDS}",
    "partition={name: dirichlet, alpha: 0.05}",
    "model={name: mlp, hidden: [64]}",
    "clients={total: 50, per_round: 5}",
    "local={epochs: 2, batch_size: 16, lr: 0.05, momentum: 0.0}",
    "checkpoint.every=0",
    "monitor.wandb.mode=disabled",
)


def accuracies(algorithm: str, seed: int, folder: Path) -> list[float]:
    run = folder / f"{algorithm}-{seed}"
    arguments = [*SETTINGS, f"algorithm.name={algorithm}", f"seed={seed}", f"run.dir={run}"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert train(arguments) == 0
    return [json.loads(line)["test_accuracy"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(curves: dict[str, list[list[float]]], out: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), dpi=130)
    rounds = range(1, ROUNDS + 1)
    for algorithm, runs in curves.items():
        by_round = list(zip(*runs, strict=True))
        middle = [100 * statistics.fmean(v) for v in by_round]
        (line,) = axes.plot(rounds, middle, label=f"{algorithm}  {statistics.fmean(middle[-10:]):.1f} %")
        low, high = ([100 * pick(v) for v in by_round] for pick in (min, max))
        axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xlabel="round", ylabel="test accuracy (%)", xlim=(1, ROUNDS), ylim=(0, 100))
    axes.set_title("digits, Dirichlet(0.05), 5 of 50 clients a round", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8, title="mean of the last 10 rounds", title_fontsize=8)
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/digits.png"))
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        curves = {a: [accuracies(a, seed, Path(folder)) for seed in SEEDS] for a in ALGORITHMS}
    draw(curves, out)
    for algorithm, runs in curves.items():
        print(f"{algorithm:12} {100 * statistics.fmean(statistics.fmean(r[-10:]) for r in runs):.2f} %")


if __name__ == "__main__":
    main()
