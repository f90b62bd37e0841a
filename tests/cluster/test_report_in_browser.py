"""The report in a real browser."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import timing
from tests.support.report_pages import (
    ALL_SECTIONS,
    HTML_INJECTION,
    render,
    serve_report,
    train_with_diagnostics,
    write_sweep,
)
from tests.support.requirements import skip_or_fail
from tests.support.sample_runs import append_records, round_record, write_run
from tests.support.waiting import TIMEOUT_SECONDS


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sweep(working_folder: Path) -> Path:
    return write_sweep(working_folder)


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_with_diagnostics(tmp_path_factory.mktemp("real") / "run")


CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
COUNT_DRAWN_PLOTS = (
    "return [...document.querySelectorAll('.plot')].filter(n => n.querySelector('svg.main-svg path, canvas')).length"
)
SLOW_DRAWING = """const react = Plotly.react;
Plotly.react = (...all) => {
  const end = performance.now() + 4000;
  while (performance.now() < end);
  Plotly.react = react;
  window.slowed = true;
  return react(...all);
}"""
"""Makes drawing take four seconds, once."""


def missing_browser_reason() -> str | None:
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    return None if os.path.exists(CHROMIUM) and os.path.exists(DRIVER) else f"{CHROMIUM} or {DRIVER} is missing"


class Browser:
    """Chromium with one page."""

    def __init__(self, folder: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))

    def open(self, address: str) -> None:
        self.set_width(1280)
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(address)

    def set_width(self, width: int) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def execute(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def wait(self, script: str, predicate: Callable[[Any], bool] = bool) -> Any:
        end = time.monotonic() + TIMEOUT_SECONDS
        while not predicate(value := self.execute(script)):
            assert time.monotonic() < end, f"{script} is still {value!r}; {self.errors()}"
            time.sleep(0.05)
        return value

    def scroll_through(self) -> None:
        """Scroll through the page, which draws only visible plots."""
        self.wait(
            "const all = [...document.querySelectorAll('.plot')];"
            "const next = all.find(n => !n.classList.contains('js-plotly-plot'));"
            "if (next) next.scrollIntoView(); return !next"
        )

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if reason := missing_browser_reason():
        skip_or_fail("browser", reason)
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.driver.quit()


@timing
class TestBrowser:
    def test_the_page_draws_without_network_requests(self, browser: Browser, sweep: Path) -> None:
        (sweep.parent / "out" / "Fed_A-IID-seed0" / "attempts.jsonl").write_text(
            json.dumps({"hosts": [HTML_INJECTION]}) + "\n"
        )
        render(sweep, "--only", "*seed0")
        browser.open(Path("deep/page.html").resolve().as_uri())
        browser.scroll_through()
        assert browser.execute("return document.querySelectorAll('section').length") == len(ALL_SECTIONS)
        assert (
            browser.execute(COUNT_DRAWN_PLOTS)
            == browser.execute("return document.querySelectorAll('.plot').length")
            > 30
        )
        for width in (1280, 400):
            browser.set_width(width)
            browser.wait(f"return innerWidth === {width}")
            browser.wait("const all = document.documentElement; return all.scrollWidth <= all.clientWidth")
            widest = "return Math.max(...[...document.querySelectorAll('.main-svg')].map(n => n.clientWidth))"
            browser.wait(widest, lambda value, width=width: value <= width)
        assert browser.execute("return document.querySelectorAll('main img').length") == 0
        assert browser.errors() == []
        assert [url for url in browser.requests() if not url.startswith(("file:", "data:", "blob:"))] == []

    def test_a_real_run_is_drawn(self, browser: Browser, real_run: Path, working_folder: Path) -> None:
        render(real_run)
        browser.open(Path("deep/page.html").resolve().as_uri())
        browser.scroll_through()
        assert (
            browser.execute(COUNT_DRAWN_PLOTS)
            == browser.execute("return document.querySelectorAll('.plot').length")
            > 20
        )
        browser.set_width(400)
        visible_headers = "const box = document.querySelector('#summary .box').getBoundingClientRect();"
        visible_headers += "return [...document.querySelectorAll('#summary th')].filter(n => "
        visible_headers += "n.getBoundingClientRect().right <= box.right).map(n => n.textContent)"
        browser.wait(visible_headers, lambda heads: {"run", "state", "rounds"} <= {*heads})
        assert browser.execute("const nav = document.querySelector('nav'); return nav.scrollWidth <= nav.clientWidth")
        assert browser.errors() == []

    def test_axes_rows_and_runs_can_be_selected(self, browser: Browser, sweep: Path) -> None:
        render(sweep)
        browser.open(Path("deep/page.html").resolve().as_uri())
        plot = "document.querySelector('[data-name=\"curves/0.0/test_accuracy\"] .plot')"
        browser.wait(f"return {plot}?.data?.length", lambda count: count == 4)
        browser.execute("document.querySelector('[data-axis=gigabytes]').click()")
        browser.wait(f"return {plot}.data[1].x", lambda x: x == pytest.approx([0.5 * k for k in range(1, 7)]))
        assert "GB" in browser.execute(f"return {plot}.layout.xaxis.title.text")
        browser.execute("document.querySelector('.legend button').click()")
        browser.wait(
            f"return {plot}.data.map(t => t.visible)", lambda visibility: visibility == [False, False, None, None]
        )
        browser.execute(
            "const s = document.querySelector('#times select'); s.scrollIntoView();"
            "s.selectedIndex = 3; s.dispatchEvent(new Event('change'))"
        )
        lane = "[...document.querySelectorAll('#times figure')].find(n => n.dataset.name == 'times/3')"
        browser.wait(f"return {lane}?.querySelector('.js-plotly-plot') != null")
        assert browser.errors() == []

    def test_a_served_page_follows_the_run(self, browser: Browser, working_folder: Path) -> None:
        folder = write_run(working_folder / "a", rounds=9, done=4)
        with serve_report(folder) as server:
            browser.open(server.address)
            plot = "document.querySelector('[data-name=\"curves/0.0/test_accuracy\"] .plot')"
            browser.wait(f"return {plot}?.data?.[0].x.length", lambda count: count == 4)
            browser.execute(f"return Plotly.relayout({plot}, {{'xaxis.range': [1, 3]}}).then(() => null)")
            browser.execute("document.querySelector('details').open = true; scrollTo(0, 300)")
            append_records(folder, round_record(5))
            browser.wait(f"return {plot}.data[0].x.length", lambda count: count == 5)
            assert browser.execute(f"return {plot}.layout.xaxis.range") == [1, 3]
            assert browser.execute("return [scrollY, document.querySelector('details').open]") == [300, True]
            assert "5 / 9" in browser.execute("return document.querySelector('#summary').textContent")
            browser.execute(SLOW_DRAWING)
            append_records(folder, round_record(6))
            browser.wait("return window.slowed")
            append_records(folder, round_record(7))  # it is requested soon, however long drawing took
            browser.wait(f"return {plot}.data[0].x.length", lambda count: count == 7)
            assert browser.errors() == []
            assert {url.split("/")[2] for url in browser.requests() if url.startswith("http")} == {
                server.address.split("/")[2]
            }
            browser.driver.get("about:blank")
