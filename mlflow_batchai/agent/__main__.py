"""Entry point of ``agent.pyz``: ``python agent.pyz VERB ...``."""

from __future__ import annotations

import json
import signal
import sys


def main(arguments: list[str]) -> int:
    """Run a verb; 2 for an unknown one."""
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb == "agent":
        # One that comes before the agent can act on it waits until it can (``Agent.run``).
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        from mlflow_batchai.agent import agent

        return agent.main(rest)
    if verb == "serve":
        from mlflow_batchai.agent.api import host

        return host.serve()
    if verb == "sweep":
        from mlflow_batchai.agent.processes import proc

        return proc.main(rest)
    if verb == "rendezvous":
        from mlflow_batchai.agent.attempt import rendezvous

        return rendezvous.main(rest)
    if verb == "try-model":
        from mlflow_batchai.training import model_trial

        return model_trial.main(rest)
    if verb == "packages":
        from mlflow_batchai.agent.environments import inventory

        return inventory.main(rest)
    if verb == "install":
        from mlflow_batchai.agent.environments import installing

        return installing.main(rest)
    if verb == "overlay":
        from mlflow_batchai.agent.environments import overlay

        return overlay.main(rest)
    if verb == "horovod-build":
        from mlflow_batchai.horovod_wheel import builder

        return builder.main(rest)
    if verb == "remove":
        from mlflow_batchai.agent import staging

        return staging.main(rest)
    sys.stderr.write(f"agent.pyz: unknown verb {json.dumps(verb)}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
