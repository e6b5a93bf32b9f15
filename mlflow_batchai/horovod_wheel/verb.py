"""``agent.pyz horovod-build``: the builder on a node, where there is no command line of ours."""

import argparse
import sys
from typing import List

from .builder import build
from .errors import HorovodBuildError


def main(arguments: List[str]) -> int:
    """``--python PATH [--framework F] [--out DIR]``: print the wheel's path; a failure is one sentence and exit code 1.

    It is built for GPUs where PyTorch is one for CUDA and the node has some.
    """
    parser = argparse.ArgumentParser(prog="horovod-build")
    parser.add_argument("--python", required=True)
    parser.add_argument("--framework", choices=["tensorflow", "torch"], default="tensorflow")
    parser.add_argument("--out")
    options = parser.parse_args(arguments)
    try:
        path = build(options.python, options.framework, out=options.out, progress=_tell)
    except HorovodBuildError as error:
        sys.stderr.write("%s\n" % error)
        return 1
    sys.stdout.write(path + "\n")
    return 0


def _tell(step: str) -> None:
    sys.stderr.write("Horovod: %s\n" % step)
    sys.stderr.flush()
