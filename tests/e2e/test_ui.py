"""What a person sees: the run's page of a real MLflow server, in a real Chromium."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

TRAIN = """
    from mlflow_batchai.training import report
    for epoch in range(3):
        report.log(step=epoch, loss=1.0 / (epoch + 1), val_accuracy=0.25 * epoch)
    print("trained")
"""


@pytest.mark.browser
@pytest.mark.timeout(300)
def test_run_page(world: Any) -> None:
    """Relayed to a real server over HTTP, the run shows its state, metrics, parameters and logs in MLflow's UI."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium on this machine; .ci/run installs Debian's")
    from playwright.sync_api import expect, sync_playwright

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--backend-store-uri", world.uri]
    server = world.start(
        [sys.executable, "-m", "mlflow", *command, "--artifacts-destination", str(world.root / "artifacts")],
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
    )
    try:
        world.wait(lambda: _healthy(url), 120, "MLflow's server")
        project = world.project(
            TRAIN,
            "name: toy\nentry_points:\n  main:\n    parameters: {note: string}\n    command: python train.py\n",
            "properties: {nodeCount: 2, horovodSettings: {}}",
        )
        result = world.run(project, "-P", "note=it's 5 o'clock", "--run-name", "seen", MLFLOW_TRACKING_URI=url)
        assert result.returncode == 0, result.stderr
        assert f"{url}/#/experiments/0/runs/" in result.stderr
        page_url = re.search(rf"{re.escape(url)}/#\S+", result.stderr).group(0)  # type: ignore[union-attr]
        with sync_playwright() as playwright:
            options = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
            browser = playwright.chromium.launch(
                executable_path=chromium, args=[*options.split(), "--disable-component-update"]
            )
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.goto(page_url)
            for text in ("seen", "Finished", "val_accuracy", "it's 5 o'clock"):
                expect(page.get_by_text(text, exact=True).first).to_be_visible(timeout=60_000)
            page.goto(page_url + "/artifacts/stdouterr/stdout.txt")
            expect(page.get_by_text("[0] trained").first).to_be_visible(timeout=60_000)
            browser.close()
    finally:
        os.killpg(server.pid, 9)
        server.communicate()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_server_is_down_at_submit(world: Any) -> None:
    """No server there: one sentence, nothing started."""
    process = subprocess.run(
        world.command(world.project()),
        cwd=world.cwd,
        env={**world.environment, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 1 and "127.0.0.1" in process.stderr and "Traceback" not in process.stderr, process.stderr
    assert not (world.home / "nodes").exists()
