"""Wait in place of an agent, in half a megabyte: the agent becomes a small bash program, which becomes the agent again.

An agent that has others before it on its node does nothing for minutes or days, and a Python takes 14 MB. ``become`` replaces
it, by exec, with ``PROGRAM``. Pid, session, environment and log stay; the file of the reservation stays locked; the agent's
command line stands among the program's words. So whatever finds, polls, stops or ends agents finds this one.

The program blocks on the lock of the reservation before its own, in a ``flock`` that dies with it, and looks around every
``LOOK_SECONDS``, after some looks every ``SELDOM_SECONDS``. It runs the agent's command line again, by exec, when

* what stood in its way has ended, or the node takes jobs again,
* a node of the job is taken, or the attempt has its verdict (``nodes`` or ``verdict`` in the attempt's folder),
* there is one more request than node 0 had read, or
* it got a SIGTERM. Agents block that until they can act on it, and a signal that waits for that survives an exec. Some bashes
  let it through while they read: they send it to themselves once more.

With every look it makes the file of its heartbeats a byte longer, which was opened before: it writes to no path of the
share. What the agent was told on its standard input is kept in the program's memory, in no file, word or environment, and is
the standard input of the next agent. All that comes from users is data to the program: it stands in its words.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

from mlflow_batchai.agent import permissions
from mlflow_batchai.agent.processes import proc

# A person who ends a job waits for that; hundreds may wait for days.
LOOK_SECONDS, SELDOM_SECONDS = 5.0, 15.0
# A flock that ends within this time has nothing to wait for, or can't.
SETTLE_SECONDS = 0.1
OPTION = "--resumed="

# Its words: the attempt's folder, the folder of requests or nothing, how many of these are known, ``Obstacle.path``,
# descriptors of the flock's pipe and of the heartbeats, seconds between two looks at first and later, pid of the flock,
# the agent's command line.
# More than 128 is what read says of a time that is over. The folder of requests comes with the first: it is looked for in
# its own folder, as in ``safeopen.freshen``.
PROGRAM = r"""
IFS= read -r told
shopt -s nullglob
attempt=$1 requests=$2 known=$3 stands=$4 gone=$5 beats=$6 seconds=$7 seldom=$8 flock=$9 ended=
shift 9
trap ended=yes TERM
looks=0
while [[ -e $stands ]]; do
    signs=("$attempt"/[nv]*)
    seen=(${requests:+"${requests%/*}"/*})
    asked=(${requests:+"$requests"/*.json})
    (( ${#signs[@]} || ${#asked[@]} > known )) && break
    mapfile status </proc/self/status
    [[ $ended || ${status[*]} == *ShdPnd:$'\t'????????????[4567cdef]???* ]] && break
    { printf . >>"/proc/self/fd/$beats"; } 2>/dev/null
    (( ++looks > 6 )) && seconds=$seldom
    read -t "$seconds" -u "$gone"
    (( $? > 128 )) || { flock=; break; }
done
[[ $flock ]] && kill -KILL "$flock"
[[ $ended ]] && kill -TERM $$
exec {gone}<&- {beats}<&-
exec {in}< <(printf '%s\n' "$told")
exec "$@" <&"$in" {in}<&-
"""


class Obstacle(NamedTuple):
    """What an agent waits for.

    Attributes:
        path: is there as long as it stands.
        locked: a file whose lock is held as long.
    """

    path: str
    locked: str


def become(
    obstacle: Obstacle,
    attempt: str,
    requests: str,
    known: int,
    told: Mapping[str, Any],
    keep: Sequence[int],
    heartbeats: Callable[[], int],
    leave: Callable[[], Mapping[str, Any]],
) -> None:
    """Replace this process by one that waits; return where that can't be done.

    Args:
        attempt: the attempt's folder, on this node.
        requests: the folder of requests, of which ``known`` have been read; empty: they are nothing to this agent.
        told: what the agent was told.
        keep: descriptors that the next agent needs.
        heartbeats: opens the file of our heartbeats.
        leave: ends what this process does, and says what the next agent goes on with; called when nothing can fail any more.
    """
    bash, flock = shutil.which("bash"), shutil.which("flock")
    if bash is None or flock is None:
        return
    with contextlib.ExitStack() as undo:

        def ours(descriptor: int) -> int:
            undo.callback(os.close, descriptor)
            return descriptor

        try:
            gone, ending = map(ours, os.pipe())
            telling, tell = map(ours, os.pipe())
            os.set_blocking(tell, False)
            data = json.dumps(told).encode("ascii") + b"\n"
            if os.write(tell, data) < len(data):
                return  # nobody reads it yet, and a pipe takes so much
            lock = ours(os.open(obstacle.locked, os.O_RDONLY | os.O_CLOEXEC))
            beats = ours(heartbeats())
            child = subprocess.Popen(
                [flock, "-s", str(lock)],
                stdin=subprocess.DEVNULL,
                stdout=ending,
                stderr=subprocess.DEVNULL,
                pass_fds=[lock],
                preexec_fn=proc.as_child(permissions.PRIVATE),
            )
        except OSError:
            return
        undo.callback(child.wait)
        undo.callback(child.kill)
        time.sleep(SETTLE_SECONDS)
        if child.poll() is not None:
            return
        again = [word for word in proc.command_line(os.getpid())[1:] if not word.startswith(OPTION)]
        left = OPTION + json.dumps(leave())
        for descriptor in (gone, beats, *keep):
            os.set_inheritable(descriptor, True)
        os.dup2(telling, 0)
        numbers = [gone, beats, LOOK_SECONDS, SELDOM_SECONDS, child.pid]
        words = [attempt, requests, str(known), obstacle.path, *map(str, numbers), sys.executable, *again, left]
        os.execv(bash, [bash, "-p", "-c", PROGRAM, "agent", *words])
