"""Runs a command, such as pytest, for which this machine's Slurm is that of another Debian: ``other_slurm.py trixie COMMAND``.

Its programs and plugins lie over those of this machine, in a mount namespace that ends with the command: jobs find them, too, by the
PATH of a login shell. Debian's bookworm has Slurm 22.05, trixie 24.11, sid the newest. As root.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from debian_packages import LIBRARIES, tie, unpacked

PROGRAMS = ["slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin"]
# Those whose version matters, and one that this machine may lack.
NEEDED = ["libhttp-parser2.9", "libhwloc15", "liblz4-1", "libreadline8t64", "libtinfo6"]
PLUGINS = f"{LIBRARIES}/slurm-wlm"
# Words: the folder, the plugins' in it, the command. What this machine has not got stays away.
MOUNTS = """folder=$1 plugins=$2
shift 2
mount --bind "$folder/$plugins" "/$plugins" || exit
for file in "$folder"/usr/bin/s* "$folder"/usr/sbin/s*; do
    place=$(readlink -f "${file#"$folder"}")
    [ ! -e "$place" ] || mount --bind "$file" "$place" || exit
done
slurmctld -V >&2
exec "$@"
"""


def finish(made: Path, kept: Path) -> None:
    for pattern in ("usr/bin/s*", "usr/sbin/s*", f"{PLUGINS}/*.so*"):
        for file in made.glob(pattern):
            if not file.is_symlink():
                tie(file, kept, PLUGINS)


if __name__ == "__main__":
    suite, *command = sys.argv[1:]
    try:
        folder = unpacked(f"slurm-{suite}", suite, [*PROGRAMS, *NEEDED], finish)
    except LookupError as error:
        sys.exit(f"{error}")
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", MOUNTS, "sh", str(folder), PLUGINS, *command])
