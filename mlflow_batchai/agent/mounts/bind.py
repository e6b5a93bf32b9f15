"""A file share that the node's administrator has mounted already: bound to its place in the job, or linked."""

import os
from typing import List, Mapping

from mlflow_batchai.agent.mounts.mount import CommandMount, Place
from mlflow_batchai.agent.plan import Volume


class BindMount(CommandMount):
    """``mount --bind`` of ``source`` where the agent may mount, else a symbolic link to it."""

    def __init__(self, place: Place, index: int, volume: Volume, credentials: Mapping[str, str]) -> None:
        super().__init__(place, index, volume, credentials)
        self._linked = False

    def start(self) -> None:
        source = self.volume.source
        if not os.path.isdir(source):
            raise self.failure("%s is not a directory there; mount the share at it, or correct the path" % source)
        if os.geteuid() == 0:
            super().start()
            return
        self.make_target()
        os.rmdir(self.target)
        os.symlink(source, self.target, target_is_directory=True)
        self._linked = True

    def command(self) -> List[str]:
        return ["mount", "--bind", "--", self.volume.source, self.target]

    def poll(self) -> bool:
        return self._linked or super().poll()

    def undo(self) -> str:
        # Not asked of the path: where the share behind it hangs, that would hang us.
        if self._linked:
            os.unlink(self.target)
            self._linked = False
            return ""
        return super().undo()

    def explain(self, said: str) -> str:
        if "permission denied" in said or "must be superuser" in said:
            return "the agent is root and may not mount all the same (a container without CAP_SYS_ADMIN?)"
        return ""
