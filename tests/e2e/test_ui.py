"""The pages of a real MLflow server, in a real Chromium.

``--screenshots docs/images`` keeps pictures of the pages, of jobs that train the CIFAR project.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import PATIENCE_MS, REMEMBERED, WIDTH, Browser, chromium
from command_line import Cli
from mlflow_server import MlflowServer
from ui_world import ALIAS, MODEL, RATES, Jobs

pytestmark = pytest.mark.timeout(900)

SHOWN = ("attributes.`Models`", "metrics.`val_accuracy`", "metrics.`loss`", "params.`learning_rate`")


@pytest.fixture(scope="module")
def browser(server: MlflowServer, pytestconfig: pytest.Config) -> Iterator[Browser]:
    """One for all tests here."""
    folder = pytestconfig.getoption("screenshots")
    with chromium(server.url, Path(folder).absolute() if folder else None) as made:
        yield made


@pytest.fixture(scope="module")
def jobs(browser: Browser, server: MlflowServer, shared_cli: Cli, pytestconfig: pytest.Config) -> Jobs:
    """A world whose tracking store is that server."""
    world = shared_cli.world
    world.uri = world.environment["MLFLOW_TRACKING_URI"] = server.url
    world.environment["LOGNAME"] = "ada"
    return Jobs(world, real=bool(pytestconfig.getoption("screenshots")))


@pytest.fixture(scope="module")
def sweep(jobs: Jobs) -> list[Any]:
    """Three runs that differ in their learning rate."""
    return jobs.sweep()


def test_a_job_while_it_runs_and_after(jobs: Jobs, browser: Browser) -> None:
    """A page left open shows more points by itself; then the run's page, its nodes' system metrics, and its log."""
    run_id = jobs.live().info.run_id
    browser.open(f"/experiments/{jobs.experiment_id}/runs/{run_id}/model-metrics")
    points = browser.page.locator("path.point")
    points.first.wait_for(timeout=PATIENCE_MS)
    before = points.count()

    def more() -> bool:
        browser.pass_time()
        browser.page.wait_for_timeout(500)
        return bool(points.count() > before)

    jobs.world.wait(more, what="more points on the page")
    assert jobs.world.client.get_run(run_id).info.status == "RUNNING"
    if jobs.real:
        jobs.world.wait(lambda: more() and points.count() >= 60, 200, "curves worth a picture")
    browser.picture("curves")

    said = jobs.end()
    url = re.search(r"http://\S+/#((\S+)\?\S+)", said)
    assert url, said
    # As a fresh browser would show it, but for the end of the address.
    browser.remember({"mlflow.workflowType_v1": "genai"})
    browser.open(url[1])
    browser.see("Model registry")
    browser.remember(REMEMBERED)
    browser.see("baseline", "Finished", "val_accuracy", "learning_rate", "2e-4")
    # Of the description, as Markdown is shown.
    browser.page.locator("strong", has_text="succeeded").wait_for(timeout=PATIENCE_MS)
    browser.open(f"{url[2]}/system-metrics")
    for node in ("node-0", "node-1"):
        browser.see(f"system/{node}")
    browser.page.locator("path.js-line").nth(5).wait_for(timeout=PATIENCE_MS)
    browser.picture("system-metrics")
    browser.open(f"{url[2]}/artifacts/logs/stdout.txt")
    browser.see_code("[0] ")
    browser.picture("log")


def test_three_runs_of_a_sweep(jobs: Jobs, sweep: list[Any], browser: Browser) -> None:
    """Their curves in one chart, then their parameters and metrics side by side."""
    browser.table(jobs.experiment_id, SHOWN, [sweep[0].data.tags["mlflow.parentRunId"]])
    browser.open(f"/experiments/{jobs.experiment_id}/runs?compareRunsMode=CHART")
    browser.page.get_by_placeholder("Search metric charts").fill("accuracy|loss")
    browser.see("rates-1", "rates-2", "rates-3", "val_accuracy")
    browser.picture("charts")
    ids = ",".join(f'"{run.info.run_id}"' for run in sweep)
    browser.open(f'/compare-runs?runs=[{ids}]&experiments=["{jobs.experiment_id}"]')
    browser.see("Comparing 3 Runs from 1 Experiment")
    browser.see(*(str(round(run.data.metrics[name], 3)) for run in sweep for name in ("loss", "accuracy")))
    learning_rates = browser.page.get_by_role("row", name=re.compile("^learning_rate ")).get_by_role("cell")
    assert learning_rates.all_inner_texts() == list(RATES)
    browser.page.get_by_role("switch", name="Parameters - Show diff only").click()
    browser.page.get_by_role("row", name=re.compile("^epochs ")).wait_for(state="detached", timeout=PATIENCE_MS)
    assert learning_rates.count() == 3
    chosen = browser.page.get_by_role("combobox").nth(1)
    chosen.press("Backspace")
    chosen.fill("val_accuracy")
    chosen.press("Enter")
    chosen.press("Escape")
    browser.page.get_by_role("switch", name="Metrics - Show diff only").click()
    browser.page.get_by_role("heading").first.scroll_into_view_if_needed()
    browser.picture("compare", height=1300)


def test_the_table_of_runs(jobs: Jobs, sweep: list[Any], browser: Browser) -> None:
    """Those of a sweep below it, with what they were given and what came of it; one that failed shows that, and says why."""
    failed = jobs.failure()
    browser.table(jobs.experiment_id, SHOWN, [sweep[0].data.tags["mlflow.parentRunId"]])
    browser.open(f"/experiments/{jobs.experiment_id}/runs")
    browser.see("rates", "typo", *(run.info.run_name for run in sweep))
    icons = []
    for run, rate in zip(sweep, RATES, strict=True):
        row = browser.row(run.info.run_name)
        icons.append(row.locator("[col-id=runDateAndNestInfo] svg").inner_html())
        assert row.locator("[col-id='params.`learning_rate`']").inner_text() == rate
        shown = row.locator("[col-id='metrics.`val_accuracy`']").inner_text()
        assert float(shown.rstrip("….")) == pytest.approx(run.data.metrics["val_accuracy"], abs=1e-4)
    assert len(set(icons)) == 1 and browser.row("typo").locator("[col-id=runDateAndNestInfo] svg").inner_html() not in icons
    browser.picture("runs")
    browser.open(f"/experiments/{jobs.experiment_id}/runs/{failed.info.run_id}")
    browser.see("typo", "Failed", re.compile("--data digitz is not a file"))
    # A wide line of the description would push this out of the page.
    beside = browser.page.get_by_text("About this run").bounding_box()
    assert beside and beside["x"] + beside["width"] <= WIDTH
    browser.picture("failed")


def test_the_registered_model(jobs: Jobs, sweep: list[Any], browser: Browser) -> None:
    """Each run of the sweep made a version; the best one has the alias, and says why."""
    browser.open(f"/models/{MODEL}")
    browser.see("Version 1", "Version 2", "Version 3")
    best = max(sweep, key=lambda run: run.data.metrics["val_accuracy"])
    version = best.data.tags["batchai.modelVersion"].rpartition("/")[2]
    champion = browser.page.get_by_role("row", name=re.compile(rf"^Version {version} "))
    champion.get_by_text(f"@ {ALIAS}", exact=True).wait_for(timeout=PATIENCE_MS)
    assert browser.page.get_by_text(f"@ {ALIAS}", exact=True).count() == 1
    # MLflow shows the first 29 characters of a version's description.
    reason = jobs.world.client.get_model_version(MODEL, version).description[:25]
    champion.get_by_text(reason).first.wait_for(timeout=PATIENCE_MS)
    browser.picture("model")
    # Without system metrics, which would be the first that it shows.
    browser.open(f"/experiments/{jobs.experiment_id}/runs/{best.info.run_id}")
    browser.see(best.info.run_name, "Finished", f"v{version}")
    browser.picture("run", height=1100)
