"""Entry point of ``agent.pyz``: ``python agent.pyz VERB ...``."""

from __future__ import annotations

import importlib
import json
import signal
import sys

# Verb -> the module that does it, imported for it alone.
MODULES = {
    "agent": "agent.agent",
    "serve": "agent.api.host",
    "sweep": "agent.processes.proc",
    "rendezvous": "agent.attempt.rendezvous",
    "try-model": "training.model_trial",
    "packages": "agent.environments.inventory",
    "install": "agent.environments.installing",
    "overlay": "agent.environments.overlay",
    "horovod-build": "horovod_wheel.builder",
    "remove": "agent.staging",
}


def main(arguments: list[str]) -> int:
    """Run a verb; 2 for an unknown one."""
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb not in MODULES:
        sys.stderr.write(f"agent.pyz: unknown verb {json.dumps(verb)}\n")
        return 2
    if verb == "agent":
        # One that comes before the agent can act on it waits until it can (``Agent.run``).
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    module = importlib.import_module(f"mlflow_batchai.{MODULES[verb]}")
    return int(module.serve() if verb == "serve" else module.main(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
