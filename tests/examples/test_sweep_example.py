"""examples/sweep, command by command as it stands there: a sweep, its table, and its best model served."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from example_text import commands

EXAMPLE = Path(__file__).parents[2] / "examples" / "sweep"


@pytest.mark.timeout(300)
def test_from_a_sweep_to_a_served_champion(world: Any) -> None:
    sweep, show, serve, ask = commands(EXAMPLE)
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    world.cwd = EXAMPLE.parents[1]

    done = world.call(["bash", "-c", sweep], timeout=120, **variables)
    assert done.returncode == 0, done.stderr
    rates = re.findall(r"^(1e-\d) +succeeded +([\d.]+) ", done.stdout, re.M)
    assert [rate for rate, _ in rates] == ["1e-2", "1e-3", "1e-4"] and float(rates[0][1]) > 0.9, done.stdout
    shown = world.call(["bash", "-c", show], timeout=60, **variables)
    assert (shown.returncode, shown.stdout) == (0, done.stdout)

    champion = world.client.get_model_version_by_alias("digits", "champion")
    assert world.client.get_run(champion.run_id).data.params["learning_rate"] == "1e-2"
    versions = world.client.search_model_versions("name = 'digits'")
    assert len(versions) == 3 and all("promoted to @champion" in one.description for one in versions)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    assert "5001" in serve and "5001" in ask
    server = world.start(["bash", "-c", f"exec {serve.replace('5001', port)}"], **variables)

    def answers() -> Any:
        assert server.poll() is None, server.communicate()
        said = world.call(["bash", "-c", ask.replace("5001", port)], **variables)
        return said.stdout if said.returncode == 0 else None

    answer = json.loads(world.wait(answers, what="an answer of the served model"))
    os.killpg(server.pid, signal.SIGTERM)
    server.wait(60)
    assert answer == json.loads(
        re.findall(r'^\{"predictions".*$', (EXAMPLE / "README.md").read_text(encoding="utf-8"), re.M)[0]
    )
