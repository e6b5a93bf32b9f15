"""MLflow's pages in a real Chromium, as somebody who trains models has set them up."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WIDTH, HEIGHT = 1440, 900
OPTIONS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
    " --disable-component-update"
)
# What MLflow's pages remember of a person: he trains models, and has closed the assistant.
REMEMBERED = {
    "mlflow.workflowType_v1": "machine_learning",
    "mlflow.assistant.panelOpen_v1": False,
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True,
}
# A page looks for new points every 30 s.
REFRESH_MS = 31_000
PATIENCE_MS = 60_000
LARGEST_PICTURE = 200_000


class Browser:
    """One page, which is opened again and again.

    Args:
        url: of MLflow's server.
        pictures: the folder where pictures of the pages are kept; None: nowhere.
    """

    def __init__(self, page: Any, url: str, pictures: Path | None) -> None:
        self.page = page
        self._url = url
        self._pictures = pictures
        self.remember(REMEMBERED)

    def remember(self, entries: dict[str, Any]) -> None:
        """Put entries into what pages remember."""
        lines = [f"localStorage.setItem({json.dumps(key)}, {json.dumps(json.dumps(value))});" for key, value in entries.items()]
        self.page.add_init_script("\n".join(lines))

    def table(self, experiment_id: str, columns: Sequence[str], expanded: Sequence[str]) -> None:
        """Set up an experiment's table: its columns (``params.`epochs` ``, say), and whose children it shows, by run ids."""
        page = f'MLflowLocalStorage-1.1-ExperimentPage-["{experiment_id}"]-ReactComponentState'
        self.remember({page: {"selectedColumns": columns, "runsExpanded": dict.fromkeys(expanded, True)}})

    def row(self, name: str) -> Any:
        """The cells of a run in the table."""
        index = self.page.locator("[row-index]", has=self.page.get_by_text(name, exact=True)).first.get_attribute("row-index")
        return self.page.locator(f"[row-index='{index}']")

    def open(self, route: str) -> None:
        """Open a page by what follows ``#`` in its address, anew."""
        self.page.goto("about:blank")
        self.page.goto(f"{self._url}/#{route}")

    def see(self, *texts: str | re.Pattern[str]) -> None:
        """Wait until the page shows each of these texts: exactly so, or what a pattern finds."""
        from playwright.sync_api import expect

        for text in texts:
            expect(self.page.get_by_text(text, exact=isinstance(text, str)).first).to_be_visible(timeout=PATIENCE_MS)

    def see_code(self, text: str) -> None:
        """Wait until the page shows a file that has this text."""
        from playwright.sync_api import expect

        expect(self.page.locator("code").first).to_contain_text(text, timeout=PATIENCE_MS)

    def pass_time(self) -> None:
        """So much time passes for the page that it looks for new points by itself."""
        self.page.clock.fast_forward(REFRESH_MS)

    def picture(self, name: str, height: int = HEIGHT) -> None:
        """Keep a picture of the page as it is, if pictures are kept."""
        if self._pictures is None:
            return
        from PIL import Image

        self.page.set_viewport_size({"width": WIDTH, "height": height})
        self.page.mouse.move(0, 0)
        # Charts draw themselves anew, and fade in.
        self.page.wait_for_timeout(2000)
        self._pictures.mkdir(parents=True, exist_ok=True)
        path = self._pictures / f"{name}.png"
        self.page.screenshot(path=path)
        Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        assert path.stat().st_size < LARGEST_PICTURE, path


@contextmanager
def chromium(url: str, pictures: Path | None) -> Iterator[Browser]:
    """A Chromium with an empty page; the test is skipped on a machine that has none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no Chromium on this machine; .ci/run installs Debian's")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=OPTIONS.split())
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.clock.install()
        yield Browser(page, url, pictures)
        browser.close()
