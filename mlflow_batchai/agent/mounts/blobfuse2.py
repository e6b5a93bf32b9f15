"""A blob container by blobfuse2, which is told all but the container by its environment.

Its variables: Microsoft's documentation "Configure settings for BlobFuse" (environment variables).
"""

import os
import shlex
from typing import Dict, List
from urllib.parse import urlsplit

from mlflow_batchai.agent.mounts import azure, table
from mlflow_batchai.agent.mounts.mount import COMMAND_SECONDS, CommandMount


class BlobfuseMount(CommandMount):
    """blobfuse2 in the foreground, as a helper of the agent: one in the background would escape it."""

    seconds = COMMAND_SECONDS

    def command(self) -> List[str]:
        argv = ["blobfuse2", "mount", self.target, "--container-name=" + self.volume.container, "--foreground=true"]
        if self.volume.folder:
            argv += ["--virtual-directory=true", "--subdirectory=" + self.volume.folder]
        try:
            options = shlex.split(self.volume.options)
        except ValueError as error:
            raise self.failure("its mountOptions are no words of a command line (%s); correct them" % error) from None
        return [*argv, "--tmp-path=" + os.path.join(self.folder, "cache"), *options]

    def variables(self) -> Dict[str, str]:
        found = {"AZURE_STORAGE_ACCOUNT": self.volume.account, "AZURE_STORAGE_BLOB_ENDPOINT": self.volume.endpoint}
        if "key" in self.credentials:
            found.update(AZURE_STORAGE_AUTH_TYPE="key", AZURE_STORAGE_ACCESS_KEY=self.credentials["key"])
        else:
            found.update(AZURE_STORAGE_AUTH_TYPE="sas", AZURE_STORAGE_SAS_TOKEN=self.credentials.get("sas", ""))
        return found

    def poll(self) -> bool:
        if self.task is not None and self.task.status is None and table.at(self.target) is not None:
            return True
        return super().poll()

    def explain(self, said: str) -> str:
        parts = urlsplit(self.volume.endpoint)
        host = "%s:%d" % (parts.hostname, parts.port or 443)
        return azure.explain(said, "container", host, self.credentials.get("sas", ""), self.volume.folder)
