"""The page: one file with its style, its program, plotly.js and the data of the runs."""

import base64
import hashlib
import json
import re
import time
from collections import Counter
from importlib import resources
from typing import Any

from fl_dist import __version__
from fl_dist.common.words import counted
from fl_dist.report.figures import DARK
from fl_dist.report.gather import Source
from fl_dist.report.lines import Known
from fl_dist.report.sections import Report

Document = dict[str, Any]
_SAFE = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def document(source: Source, known: Known) -> Document:
    """Everything that the page shows, as it is now."""
    report = Report(source.groups(), known)
    names = [group.found.name for group in report.groups]
    states = Counter(run.state for run in report.runs)
    begun = {run.outcome.row for run in report.runs if run.rows}
    told = ", ".join(f"{number:,} {state}" for state, number in states.items())
    data = {
        "title": report.runs[0].name if len(report.runs) == 1 else ", ".join(names),
        "told": f"{counted(len(report.runs), 'run')}: {told}",
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "version": __version__,
        "styles": [look._asdict() for name, look in report.styles.items() if name in begun],
        "places": report.places,
        "dark": DARK,
        "sections": report.sections,
        "figures": report.figures,
    }
    known.turn()
    return data


def encoded(data: Any) -> str:
    """JSON that may stand in a script of HTML."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_SAFE)


def page(data: Document, live: bool = False) -> str:
    """The whole page; a live one asks its server for what is new."""
    scripts = [_plotly(), _file("page.js")]
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    parts = {
        "policy": f"{policy}; connect-src {SELF if live else NOTHING}; base-uri 'none'; form-action 'none'",
        "style": _file("page.css"),
        "data": encoded(data | {"live": live}),
        "plotly": scripts[0],
        "script": scripts[1],
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("page.html"))


SELF, NOTHING = "'self'", "'none'"


def check() -> None:
    """ValueError if pages cannot be made here."""
    _plotly()


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError("the report needs plotly: pip install 'fl_dist[report]'") from None
    return str(get_plotlyjs()).replace("\r\n", "\n")


def _file(name: str) -> str:
    return (resources.files("fl_dist.report") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
