"""Compare the weights of ranks that train by stock ``horovod.torch``: each keeps its own if nobody has broadcast them."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Sequence
from typing import Any

from mlflow_batchai.training import _tensors, constants

_ADVICE = (
    "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before training, and change weights on all ranks or on"
    " none."
)


def watch(hvd: Any) -> None:
    """Have the optimizers of ``horovod.torch.DistributedOptimizer`` compare weights after their steps 1, 2, 4, 8, ..."""
    original = getattr(hvd, "DistributedOptimizer", None)
    if original is None:  # a Horovod that was built without PyTorch can be imported all the same
        return

    @functools.wraps(original)
    def distributed(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        everybody = getattr(optimizer, "process_set", hvd.global_process_set) is hvd.global_process_set
        if everybody and hvd.size() > 1 and constants.tolerance() is not None:
            # A bound method: learning rate schedules wrap the function below it.
            optimizer.step = types.MethodType(_checked(hvd, optimizer.step), optimizer)
        return optimizer

    hvd.DistributedOptimizer = distributed


def _checked(hvd: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    steps = 0

    @functools.wraps(step)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        result = step(*args, **kwargs)
        steps += 1
        if steps & (steps - 1) == 0:
            weights = [weight for group in self.param_groups for weight in group["params"]]
            names = getattr(self, "_parameter_names", {})
            _compare(hvd, weights, [names.get(weight, "an unnamed parameter") for weight in weights], f"after step {steps}")
        return result

    return checked


def _compare(hvd: Any, weights: Sequence[Any], names: Sequence[str], when: str) -> None:
    """Raise RanksDivergedError on all ranks if weights differ by more than is allowed.

    The sums of all ranks are put together by an allreduce, to which ranks that have called ``hvd.join()`` give zeros.
    """
    import torch

    own = hashlib.blake2b(_tensors.checksums(_tensors.of(weights)), digest_size=8).digest()
    table = torch.zeros(hvd.size(), dtype=torch.int64)
    table[hvd.rank()] = int.from_bytes(own, "big", signed=True) or 1
    sums = hvd.allreduce(table, op=hvd.Sum, name="batchai.checksums").tolist()
    if len(set(sums)) == 1 or 0 in sums:
        return
    differences = torch.zeros(1, len(weights), dtype=torch.float64)
    for number, weight in enumerate(weights):
        mine = weight.detach()
        root = hvd.broadcast(mine, 0, name=f"batchai.compare.{number}")
        if mine.numel() and not torch.equal(mine, root):
            differences[0, number] = ((mine - root).abs().max() / root.abs().max().clamp(min=1e-12)).nan_to_num(torch.inf)
    worst, place = hvd.allgather(differences, name="batchai.differences").max(dim=0).values.max(dim=0)
    if float(worst) > (constants.tolerance() or 0.0):
        shown = [value.to_bytes(8, "big", signed=True).hex() for value in sums]
        raise constants.diverged(when, shown, names[int(place)], float(worst), _ADVICE)
