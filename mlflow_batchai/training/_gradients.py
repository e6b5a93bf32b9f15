"""Gradients on several ranks: their sum, and the empty gradients of a rank that has no rows."""

from __future__ import annotations

from typing import Any


def reduce(hvd: Any, settings: Any, grads: list[Any], share: Any) -> list[Any]:
    """Return the sum over the ranks of ``share`` times each gradient, None where the gradient is None.

    The name is made of counts only, so that it is the same on a rank that has built other models as well.
    """
    result = list(grads)
    scoped = {} if hvd.__name__ == "horovod.torch" else {"ignore_name_scope": True}
    dense = [i for i, g in enumerate(grads) if g is not None and not is_sparse(g)]
    sparse = [i for i, g in enumerate(grads) if g is not None and is_sparse(g)]
    if dense:
        packed = [settings.compression.compress(_scaled(grads[i], share)) for i in dense]
        name = f"batchai_grads_{len(dense)}_{sum(_elements(grads[i]) for i in dense)}"
        sums = hvd.grouped_allreduce([tensor for tensor, _ in packed], op=hvd.Sum, name=name, **scoped)
        for i, total, (_, context) in zip(dense, sums, packed):
            result[i] = settings.compression.decompress(total, context)
    if sparse:
        import tensorflow as tf

        name = f"batchai_rows_{len(sparse)}"
        rows = [_scaled(grads[i].values, share) for i in sparse]
        values = hvd.grouped_allgather(rows, name=name, **scoped)
        indices = hvd.grouped_allgather([grads[i].indices for i in sparse], name=name + "_at", **scoped)
        for i, value, index in zip(sparse, values, indices):
            result[i] = tf.IndexedSlices(value, index, dense_shape=grads[i].dense_shape)
    return result


def _scaled(tensor: Any, share: Any) -> Any:
    if share is None:
        return tensor
    if isinstance(share, float):
        return tensor * share
    import tensorflow as tf

    return tensor * tf.cast(share, tensor.dtype)


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
