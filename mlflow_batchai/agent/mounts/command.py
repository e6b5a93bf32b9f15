"""An unmanaged file system: mounted by the document's own command, to which the mount path is appended."""

from typing import List

from mlflow_batchai.agent.mounts.mount import COMMAND_SECONDS, NEEDS_ROOT, CommandMount, needs_root


class ShellMount(CommandMount):
    """``mountCommand`` is shell text, as on Batch AI; the path is an argument and never becomes any."""

    seconds = COMMAND_SECONDS

    def command(self) -> List[str]:
        # YAML's block texts end with a newline, which would end the command before its path.
        return ["bash", "-c", self.volume.command.rstrip() + ' "$1"', "mount", self.target]

    def explain(self, said: str) -> str:
        return NEEDS_ROOT if needs_root(said) else ""
