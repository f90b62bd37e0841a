"""Reports of made-up runs, and what their pages hold."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fl_dist.report.__main__ import main
from fl_dist.report.gather import Source
from fl_dist.report.serve import Server, Watch
from tests.support.fake_runs import pretend
from tests.support.processes import QUIET, run_ranks
from tests.support.programs import asker

ALL = ["summary", "curves", "compared", "times", "clients", "values", "diagnostics", "settings", "attempts"]
EVIL = "</script><img src=x onerror=alert(1)>"
SWEEP = """
rows:
  Fed A: {algorithm: {name: fedavg}}
  Fed <B>: {algorithm: {name: fedsam}}
  Later: {algorithm: {name: feddyn}}
columns: {IID: {partition: iid}}
grid: {seed: [0, 1]}
set: {model: mlp, rounds: 6, evaluate.last: 3}
dir: out
table: {targets: [0.5]}
"""
PUBLISHED = "sweep,row,column,measure,value,std\nsweep,Fed A,IID,mean,71.5,0.4\nsweep,Later,IID,mean,90,\n"
asked = asker(main)


def write_sweep(here: Path) -> Path:
    """Four runs of six, one of them half done."""
    (here / "sweep.yaml").write_text(SWEEP)
    (here / "published.csv").write_text(PUBLISHED)
    for name, level in (("Fed_A", 0.6), ("Fed__B_", 0.8)):
        for seed in range(2):
            done = 3 if (name, seed) == ("Fed__B_", 1) else 6
            pretend(here / "out" / f"{name}-IID-seed{seed}", done=done, level=level + 0.05 * seed, seed=seed)
    return here / "sweep.yaml"


def train_with_diagnostics(folder: Path) -> Path:
    """A run of a server and two workers."""
    small = ["model=mlp", "rounds=2", "clients={total: 4, per_round: 2}", "local.epochs=1", "partition=iid"]
    measured = "diagnostics={clients: {every: 2}, surface: {every: 2, points: 3}, plane: {every: 2, points: 3}}"
    codes, outputs = run_ranks(3, [*small, measured, *QUIET, f"run.dir={folder}"])
    assert codes == [0, 0, 0], outputs
    return folder


def made(*words: str | Path) -> str:
    """The page."""
    said = asked(*words, "-o", "deep/page.html")
    assert (said.code, said.err) == (0, ""), said.err
    return Path("deep/page.html").read_text()


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1], parse_constant=pytest.fail)


def data(*words: str | Path) -> dict[str, Any]:
    return data_of(made(*words))


def traces(shown: dict[str, Any], figure: str) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in shown["figures"][figure]["data"] if "name" in trace}


@contextmanager
def served(*words: str | Path) -> Iterator[Server]:
    server = Server(Watch(Source([str(word) for word in words])))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
