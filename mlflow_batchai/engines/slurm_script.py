"""What Slurm is given for a job: sbatch's options, the batch script, the program of a task."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from mlflow_batchai.documents.cluster import ClusterDocument
from mlflow_batchai.engines.base import Terms

# The longest limit that Batch AI had, and what a job has that names none: the partition's own holds then.
WEEK_SECONDS = 7 * 86400.0

# First program of a task. The archive lies on the share, where others may write: what it holds is checked before it is run.
BOOT = """
import hashlib, io, socket, sys, zipfile
try:
    data = open(sys.argv[1], "rb").read()
except OSError as error:
    said = "%s: %s can't be read: %s; is share (or shareOnNodes) mounted there?"
    sys.exit(said % (socket.gethostname(), sys.argv[1], error.strerror))
if hashlib.sha256(data).hexdigest() != sys.argv[2]:
    sys.exit(sys.argv[1] + " is not the agent that was submitted")
boot = {"__name__": "boot"}
exec(zipfile.ZipFile(io.BytesIO(data)).read("mlflow_batchai/agent/boot.py"), boot)
boot["in_slurm"](data, *sys.argv[3:])
"""
# --no-kill and --kill-on-bad-exit=0: node 0's agent has to outlive the others, to give the verdict.
_STEP = ("srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--mpi=none", "--cpu-bind=none")
# Nothing of the submitter's environment, which may hold secrets. With --export=NONE slurmd would ask su for the user's own
# before it starts the script: that takes a second, and a job for which it fails is held for ever.
_NO_ENVIRONMENT = ("--export=ALL", "--export-file=/dev/null")


def gpus_of(document: ClusterDocument) -> list[str]:
    """The option that asks for ``gpusPerNode``, unless ``gres`` does."""
    return [f"--gres=gpu:{document.gpus_per_node}"] if document.gpus_per_node and not document.gres else []


def options_of(document: ClusterDocument, node_count: int, terms: Terms) -> list[str]:
    """Options of sbatch: the cluster's, then the job's, which win, then those that a job can't do without."""
    words = [*["--exclusive"] * document.exclusive, *gpus_of(document)]
    if 0 < terms.seconds < WEEK_SECONDS:
        words.append(f"--time={math.ceil((terms.seconds + document.time_margin.total_seconds()) / 60)}")
    return [
        *words,
        *document.words,
        *terms.options,
        f"--nodes={node_count}",
        "--ntasks-per-node=1",
        "--no-requeue",
        "--no-kill",
        *_NO_ENVIRONMENT,
    ]


def script_of(agent: Sequence[str], root: str, python: str, secrets: str, output: str) -> str:
    """The batch script, which sbatch reads from its standard input; its options are in ``options_of``.

    Args:
        agent: the command of every task.
        root: folder of our jobs on each node.
        secrets: the file that agents read. It is closed and removed before any of them runs; NFS would keep an open one.
        output: the file for what all print. Slurm itself would follow a link that somebody else has put there.
    """
    step, hidden, printed = shlex.join(_STEP), shlex.quote(secrets), shlex.quote(output)
    return f"""#!/bin/bash
# It runs twice: the second time in bash's login shell on this node, whatever the user's own shell is.
if ! shopt -q login_shell; then
rm -f {printed}
set -C
exec > {printed} 2>&1 || exit 1
echo 'the login shell (bash -l) has said nothing: does ~/.bash_profile end it?'
HOME=~ USER=$(id -un) LOGNAME=$(id -un) SHELL=$BASH exec bash -l "$0"
fi
# A profile may have set them: by -a agents would have the secrets in their environment, and -e would end this at a failed step.
set +aeux
exec < {hidden} || exit 1
[ -O /dev/stdin ] || {{ echo "the file of secrets is another user's"; exit 1; }}
told=$(cat)
exec < /dev/null
rm -f {hidden}
echo 'its agents have said nothing'
printf %s "$told" | {step} {shlex.join(agent)}
code=$?
timeout 60 {step} --input=none {shlex.join(tidy_of(root, python))}
# Without ~/.bash_logout, which could change it.
exec sh -c "exit $code"
"""


def tidy_of(root: str, python: str) -> list[str]:
    """The command that removes a job's folder on its node."""
    base = f'"$HOME"{shlex.quote(root[1:])}' if root.startswith("~/") else shlex.quote(root)
    tidy = f'root={base}/$SLURM_JOB_ID/$SLURM_NODEID; exec {shlex.quote(python)} -I -S "$root/agent.pyz" remove "$root"'
    return ["/bin/sh", "-c", tidy]
