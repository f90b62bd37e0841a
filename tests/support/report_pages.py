"""Reports of sample runs, and the contents of their pages."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fl_dist.report.__main__ import main
from fl_dist.report.run_source import RunSource
from fl_dist.report.serve import LiveDocument, Server
from tests.support.cli import make_invoker
from tests.support.processes import NO_WANDB, run_ranks
from tests.support.sample_runs import write_run

ALL_SECTIONS = ["summary", "curves", "compared", "times", "clients", "values", "diagnostics", "settings", "attempts"]
HTML_INJECTION = "</script><img src=x onerror=alert(1)>"
SWEEP = """
rows:
  Fed A: {algorithm: {name: fedavg}}
  Fed <B>: {algorithm: {name: fedsam}}
  Later: {algorithm: {name: feddyn}}
columns: {IID: {partition: iid}}
grid: {seed: [0, 1]}
set: {model: mlp, rounds: 6, evaluate.final_window: 3}
dir: out
table: {targets: [0.5]}
"""
PUBLISHED = "sweep,row,column,measure,value,std\nsweep,Fed A,IID,mean,71.5,0.4\nsweep,Later,IID,mean,90,\n"
invoke = make_invoker(main)


def write_sweep(folder: Path) -> Path:
    """Write a sweep with four of its six runs, one of them half finished."""
    (folder / "sweep.yaml").write_text(SWEEP)
    (folder / "published.csv").write_text(PUBLISHED)
    for name, level in (("Fed_A", 0.6), ("Fed__B_", 0.8)):
        for seed in range(2):
            done = 3 if (name, seed) == ("Fed__B_", 1) else 6
            write_run(folder / "out" / f"{name}-IID-seed{seed}", done=done, level=level + 0.05 * seed, seed=seed)
    return folder / "sweep.yaml"


def train_with_diagnostics(folder: Path) -> Path:
    """A run of a server and two workers."""
    small_run = ["model=mlp", "rounds=2", "clients={total: 4, per_round: 2}", "local.epochs=1", "partition=iid"]
    diagnostics = "diagnostics={clients: {every: 2}, surface: {every: 2, points: 3}, plane: {every: 2, points: 3}}"
    codes, outputs = run_ranks(3, [*small_run, diagnostics, *NO_WANDB, f"run.dir={folder}"])
    assert codes == [0, 0, 0], outputs
    return folder


def render(*arguments: str | Path) -> str:
    """The report page of these runs."""
    result = invoke(*arguments, "-o", "deep/page.html")
    assert (result.code, result.err) == (0, ""), result.err
    return Path("deep/page.html").read_text()


def parse_data(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1], parse_constant=pytest.fail)


def render_data(*arguments: str | Path) -> dict[str, Any]:
    return parse_data(render(*arguments))


def traces(data: dict[str, Any], figure: str) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in data["figures"][figure]["data"] if "name" in trace}


@contextmanager
def serve_report(*arguments: str | Path) -> Iterator[Server]:
    server = Server(LiveDocument(RunSource([str(argument) for argument in arguments])))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
