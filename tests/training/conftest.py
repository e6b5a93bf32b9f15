"""Starts ranks of a script on this machine, as the agents do: Horovod's rendezvous server, one process a rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Ended:
    """How one rank ended."""

    def __init__(self, code, output):
        self.code = code
        self.output = output


def start_ranks(python, script, *arguments, ranks=2, path=(), env=None, timeout=200):
    """Run ``ranks`` processes of a script to their end and return how each ended, in rank order."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    slots = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
    server.init(slots)
    processes = []
    try:
        for slot in slots:
            variables = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)]),
                "HOROVOD_HOSTNAME": slot.hostname,
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_GLOO_IFACE": "lo",
                "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
                "OMP_NUM_THREADS": "1",
                "TF_NUM_INTRAOP_THREADS": "1",
                **(env or {}),
            }
            for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
                variables[f"HOROVOD_{name.upper()}"] = str(getattr(slot, name))
            command = [python, str(script), *map(str, arguments)]
            processes.append(
                subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        ended = []
        for process in processes:
            output, _ = process.communicate(timeout=timeout)
            ended.append(Ended(process.returncode, output))
        return ended
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        server.stop()
        server._httpd.server_close()


@pytest.fixture(scope="session")
def ranks():
    """The function that starts ranks; skips where Horovod for TensorFlow isn't installed."""
    pytest.importorskip("horovod.runner", reason="Horovod is not installed")
    if not list(Path(sys.modules["horovod"].__path__[0]).glob("tensorflow/mpi_lib*.so")):
        pytest.skip("the installed Horovod was built without TensorFlow")
    return start_ranks
