"""The page: one file with its style, its script, plotly.js and the data of the runs."""

import base64
import hashlib
import json
import re
import time
from collections import Counter
from importlib import resources
from typing import Any

from fl_dist import __version__
from fl_dist.common.errors import UserError
from fl_dist.common.formatting import pluralize
from fl_dist.metrics.costs import COSTS
from fl_dist.report.builder import ReportBuilder
from fl_dist.report.figures import DARK_COLOURS
from fl_dist.report.run_source import RunSource
from fl_dist.report.sections import build_sections
from fl_dist.report.series import SeriesCache

Document = dict[str, Any]
_ESCAPES = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def build_document(source: RunSource, cache: SeriesCache) -> Document:
    """Everything that the page shows, as it is now."""
    builder = ReportBuilder(source.groups(), cache)
    sections = build_sections(builder)
    names = [group.collection.name for group in builder.groups]
    states = Counter(run.state for run in builder.runs)
    rows = {run.result.row for run in builder.runs if run.records}
    counts = ", ".join(f"{number:,} {state}" for state, number in states.items())
    document = {
        "title": builder.runs[0].name if len(builder.runs) == 1 else ", ".join(names),
        "runCounts": f"{pluralize(len(builder.runs), 'run')}: {counts}",
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "version": __version__,
        "styles": [style._asdict() for row, style in builder.styles.items() if row in rows],
        "axes": builder.axes,
        "axisLabels": {name: cost.label for name, cost in COSTS.items()},
        "darkColours": DARK_COLOURS,
        "sections": sections,
        "figures": builder.figures,
    }
    cache.evict()
    return document


def to_script_json(data: Any) -> str:
    """JSON that may stand in a script element of HTML."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def render_page(document: Document, live: bool = False) -> str:
    """The whole page; a live one asks its server for updates."""
    scripts = [load_plotly(), _read("page.js")]
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    connect = "'self'" if live else "'none'"
    parts = {
        "policy": f"{policy}; connect-src {connect}; base-uri 'none'; form-action 'none'",
        "style": _read("page.css"),
        "data": to_script_json(document | {"live": live}),
        "plotly": scripts[0],
        "script": scripts[1],
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html"))


def load_plotly() -> str:
    """The script; UserError if it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the report needs plotly: pip install 'fl_dist[report]'") from None
    return str(get_plotlyjs()).replace("\r\n", "\n")


def _read(name: str) -> str:
    return (resources.files("fl_dist.report") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
