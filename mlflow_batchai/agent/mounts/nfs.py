"""A file server as a volume: mount(8) with type nfs."""

from typing import List

from mlflow_batchai.agent.mounts.mount import COMMAND_SECONDS, NEEDS_ROOT, CommandMount, as_root, needs_root


class NfsMount(CommandMount):
    """``mount -t nfs HOST:/DIRECTORY TARGET``, with the document's mountOptions as one word."""

    seconds = COMMAND_SECONDS

    def command(self) -> List[str]:
        options = self.volume.options
        return as_root(["mount", "-t", "nfs", *(["-o", options] if options else []), "--", self.volume.source, self.target])

    def explain(self, said: str) -> str:
        host = self.volume.source.partition(":")[0]
        if needs_root(said):
            return NEEDS_ROOT
        if "bad option" in said or "need a /sbin/mount" in said:
            return "mount.nfs is not installed there; install it (Debian: nfs-common)"
        if "unknown filesystem type" in said or "not supported by the system" in said or "No such device" in said:
            return "the kernel there knows no NFS"
        if "access denied" in said:
            return "%s does not export the directory to this node" % host
        if "No such file" in said:
            return "%s exports no such directory" % host
        if "resolve" in said or "Name or service not known" in said:
            return "the name %s is not known there; correct it, or mend the node's name service" % host
        if "timed out" in said or "refused" in said or "No route" in said or "unreachable" in said:
            return "%s can't be reached from there (port 2049)" % host
        return ""
