"""Gradients on several ranks: their sum, and the empty gradients of a rank that has no rows."""

from __future__ import annotations

from typing import Any

# Gradients are sent times rows / (ROWS * ranks), so that they keep about their size, which matters for halves only.
ROWS = 32


def reduce(hvd: Any, settings: Any, grads: list[Any], rows: Any) -> tuple[list[Any], Any]:
    """Return the mean over all ranks' rows of each gradient (None where it is None), and a number.

    ``rows`` are those behind this rank's gradients; the number is above 0 as long as any rank has some. It travels
    with the gradients, in the same exchange. With ``rows=None`` (not known, outside ``fit``) ranks count alike, and
    the number is None. With ``op=hvd.Sum`` the gradients are added up.

    Names are made of counts only, so that they are the same on a rank that has built other models as well.
    """
    weighted = settings.op != hvd.Sum
    unit = None if rows is None else rows / (ROWS * hvd.size())
    weight = (1.0 / hvd.size() if unit is None else unit) if weighted else None
    dense = {i: g for i, g in enumerate(grads) if g is not None and not is_sparse(g)}
    packed = dict(zip(dense, map(settings.compression.compress, _scaled(list(dense.values()), weight))))
    tensors = {i: tensor for i, (tensor, _) in packed.items()}
    if unit is not None:
        tensors[-1] = _as_tensor(hvd, unit, next(iter(dense.values()), None))
    sums = _sums(hvd, tensors)
    total = sums.pop(-1, None)
    divisor = total if weighted else None
    result = list(grads)
    means = _divided([settings.compression.decompress(value, packed[i][1]) for i, value in sums.items()], divisor)
    for i, value in zip(sums, means):
        result[i] = value
    for i, value in _gathered(hvd, {i: g for i, g in enumerate(grads) if is_sparse(g)}, weight, divisor).items():
        result[i] = value
    return result, total


def _sums(hvd: Any, tensors: dict[int, Any]) -> dict[int, Any]:
    """Return the sums over the ranks; one group of tensors for each type, all under way at once."""
    groups: dict[str, list[int]] = {}
    for i, tensor in tensors.items():
        kind = getattr(tensor.dtype, "name", None) or str(tensor.dtype).split(".")[-1]
        groups.setdefault(kind, []).append(i)
    result = {}
    for kind, members in sorted(groups.items()):
        values = [tensors[i] for i in members]
        name = f"batchai_{kind}_{len(members)}_{sum(_elements(value) for value in values)}"
        if hvd.__name__ == "horovod.torch":
            # Horovod reads memory in its order, and looks at the first tensor of a group only; convolutions' may lie otherwise.
            values = [value.contiguous() for value in values]
            result[tuple(members)] = hvd.grouped_allreduce_async(values, op=hvd.Sum, name=name)
        else:
            result[tuple(members)] = hvd.grouped_allreduce(values, op=hvd.Sum, name=name, ignore_name_scope=True)
    if hvd.__name__ == "horovod.torch":
        result = {members: hvd.synchronize(handle) for members, handle in result.items()}
    return {i: value for members, values in result.items() for i, value in zip(members, values)}


def _gathered(hvd: Any, slices: dict[int, Any], weight: Any, divisor: Any) -> dict[int, Any]:
    """Return all ranks' rows of each table, as one process would have them."""
    if not slices:
        return {}
    import tensorflow as tf

    name = f"batchai_slices_{len(slices)}"
    sent = _scaled([part.values for part in slices.values()], weight)
    values = hvd.grouped_allgather(sent, name=name, ignore_name_scope=True)
    indices = hvd.grouped_allgather([part.indices for part in slices.values()], name=name + "_at", ignore_name_scope=True)
    means = _divided(values, divisor)
    return {
        i: tf.IndexedSlices(mean, index, dense_shape=part.dense_shape)
        for (i, part), mean, index in zip(slices.items(), means, indices)
    }


def _scaled(tensors: list[Any], factor: Any) -> list[Any]:
    """Return new tensors, each times ``factor``; one call for all of them with torch, where each call would take its time."""
    if factor is None or not tensors:
        return tensors
    if hasattr(tensors[0], "data_ptr"):
        import torch

        return list(torch._foreach_mul(tensors, factor))
    return [tensor * (factor if isinstance(factor, float) else _cast(factor, tensor.dtype)) for tensor in tensors]


def _divided(tensors: list[Any], divisor: Any) -> list[Any]:
    """Return the tensors, each over ``divisor``."""
    if divisor is None or not tensors:
        return tensors
    if hasattr(tensors[0], "data_ptr"):
        import torch

        # By a tensor, which stays on the GPU: a number would have to be waited for.
        try:
            return list(torch._foreach_div(tensors, divisor))
        except TypeError:  # torch 2.1 takes no tensor there
            return [tensor / divisor for tensor in tensors]
    return [tensor / _cast(divisor, tensor.dtype) for tensor in tensors]


def _cast(number: Any, dtype: Any) -> Any:
    import tensorflow as tf

    return tf.cast(number, dtype)


def _as_tensor(hvd: Any, number: Any, like: Any) -> Any:
    """Return a number as a tensor that can go into one group with ``like``."""
    if hvd.__name__ != "horovod.torch":
        return number
    import torch

    # Filled there: a number that is copied to a GPU would make it wait.
    return torch.full((), number, dtype=torch.float32, device=None if like is None else like.device)


def is_sparse(gradient: Any) -> bool:
    """Say whether a gradient is TensorFlow's IndexedSlices, some rows of a table."""
    return hasattr(gradient, "indices") and hasattr(gradient, "values") and hasattr(gradient, "dense_shape")


def densify(gradient: Any) -> Any:
    """Return IndexedSlices as a tensor."""
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def _elements(gradient: Any) -> int:
    count = 1
    for length in gradient.shape:
        count *= int(length or 1)
    return count


def spec(gradient: Any) -> Any:
    """Return what is needed to make an empty gradient of the same kind: None, or (kind, row shape, dtypes)."""
    if gradient is None:
        return None
    if is_sparse(gradient):
        return ("rows", list(gradient.values.shape[1:]), gradient.values.dtype, gradient.indices.dtype)
    return ("dense", list(gradient.shape), gradient.dtype, None)


def empty(spec: Any, variable: Any) -> Any:
    """Return a gradient of zeros, or of no rows, as ``spec`` describes it."""
    if spec is None:
        return None
    kind, shape, dtype, index_dtype = spec
    import keras

    if keras.backend.backend() == "torch":
        import torch

        return torch.zeros(shape, dtype=dtype, device=variable.value.device)
    import tensorflow as tf

    zero = none()
    if kind == "dense":
        return tf.fill(shape, tf.cast(zero, dtype))
    return tf.IndexedSlices(
        tf.fill(tf.stack([zero, *shape]), tf.cast(zero, dtype)),
        tf.fill(tf.stack([zero]), tf.cast(zero, index_dtype)),
        dense_shape=tf.constant(list(variable.shape), index_dtype),
    )


class _Zero:
    """The variable that ``none`` reads, made when it is first needed."""

    variable: Any = None


def none() -> Any:
    """Return a TensorFlow zero that is read from a variable.

    Horovod's operations look free of side effects to TensorFlow, which would run one of constants once, while it
    optimises the graph, and never again.
    """
    import tensorflow as tf

    if _Zero.variable is None:
        with tf.init_scope(), tf.device("/CPU:0"):
            _Zero.variable = tf.Variable(0, dtype=tf.int32, trainable=False)
    return _Zero.variable.read_value()
