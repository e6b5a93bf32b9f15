"""A directory of the node's as a volume: mounted as a symbolic link, which needs no right to mount."""

import contextlib
import os

from mlflow_batchai.agent.mounts.mount import Mount


class LinkMount(Mount):
    """A symbolic link to ``source``. One of the cluster's stays after the job, as its mounts did on Batch AI."""

    def start(self) -> None:
        source = self.volume.source
        if not os.path.isdir(source):
            raise self.failure("%s is not a directory there; create it or name another" % source)
        os.makedirs(os.path.dirname(self.target), exist_ok=True)
        if os.path.islink(self.target):
            if os.readlink(self.target) == source:
                return
            os.unlink(self.target)
        with contextlib.suppress(OSError):
            os.rmdir(self.target)  # what another kind of mount has left
        try:
            os.symlink(source, self.target, target_is_directory=True)
        except FileExistsError:
            raise self.failure("%s is taken by something that is not a mount of ours; move it away" % self.target) from None

    def poll(self) -> bool:
        return True

    def undo(self) -> str:
        if self.volume.scope == "job" and os.path.islink(self.target):
            os.unlink(self.target)
        return ""
