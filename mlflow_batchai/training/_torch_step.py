"""The train step of Keras on torch, recorded once as CUDA graphs and replayed.

Keras has torch do one operation after another, and a GPU waits for Python for most of a small network's step. A recording makes
the same operations on the same memory without Python, so it is exact. Horovod's exchange can't be recorded: a recording is
cut there, and each replay makes the exchange between the two graphs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from typing import Any, Callable, ClassVar

from mlflow_batchai.training import _hvd

# Steps that are run before one is recorded: libraries choose their algorithms in them, and metrics make their variables.
STEPS_BEFORE = 3
# Numbers of one constant that are filled in one by one.
CONSTANTS = 64


def on_gpu(model: Any) -> bool:
    """Say whether a model of Keras on torch trains on a GPU."""
    import torch

    return torch.cuda.is_available() and all(variable.value.is_cuda for variable in model.trainable_variables)


def is_keras_own(model: Any) -> bool:
    """Say whether all that a train step of this model runs is Keras' own code.

    Python code runs once in a recording, as with every compiler, and other code may be meant to run in each step.
    """
    import keras

    layers = list(model._flatten_layers())
    if any(isinstance(layer, (keras.layers.Lambda, keras.layers.TorchModuleWrapper)) for layer in layers):
        return False
    optimizer = _hvd.optimizer_core(model.optimizer)
    told = keras.tree.flatten([model._compile_config.config[key] for key in ("loss", "metrics", "weighted_metrics")])
    parts = [
        *layers,
        *told,
        *(getattr(one, name, None) for one in told for name in ("fn", "_fn")),
        model.train_step,
        optimizer,
        optimizer._learning_rate,
    ]
    for layer in layers:
        parts += getattr(layer, "operations", [])
        parts += [value for name, value in vars(layer).items() if name.endswith(("activation", "regularizer", "constraint"))]
    return all(getattr(part, "__module__", "keras").split(".")[0] == "keras" for part in parts)


class TrainStep:
    """A train step, recorded at its fourth batch of one form; batches of another form are run as they were.

    Once a step could not be recorded (it waits for the GPU, as that of a LossScaleOptimizer does) no other is tried.
    """

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self._step = step
        self._possible = True
        self.forget()

    def forget(self) -> None:
        """Record anew: with another ``fit`` something may be otherwise."""
        self._form: Any = None
        self._seen = 0
        self._recording: Recording | None = None

    def __call__(self, data: Any) -> Any:
        import keras

        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        form = [(leaf.shape, leaf.dtype) for leaf in leaves if hasattr(leaf, "data_ptr")]
        if self._recording is not None and form == self._form:
            return self._recording.replay(leaves)
        if self._recording is not None or not self._possible or len(form) < len(leaves):
            return self._step(data)
        self._seen = self._seen + 1 if form == self._form else 1
        self._form = form
        if self._seen > STEPS_BEFORE:
            self._record(data)
        return self._step(data) if self._recording is None else self._recording.replay(leaves)

    def _record(self, data: Any) -> None:
        try:
            if has_room():
                self._recording = Recording(self._step, data)
        except Exception:  # whatever is wrong with the step itself, the step as it is will say
            gc.collect()
        self._possible = self._recording is not None


def has_room() -> bool:
    """Say whether a step can be kept in memory beside one that is run, for batches of another form."""
    import torch

    return bool(2 * torch.cuda.max_memory_allocated() < torch.cuda.mem_get_info()[1])


class Recording:
    """A train step as CUDA graphs, and the exchanges between them.

    Raises what torch does about a step that can't be recorded; nothing has been computed then.
    """

    current: ClassVar[Recording | None] = None

    def __init__(self, step: Callable[[Any], Any], data: Any) -> None:
        import keras
        import torch

        device = torch.device("cuda", torch.cuda.current_device())
        data = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf.to(device, copy=True), data)
        self._inputs = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        self._parts: list[Callable[[], None]] = []
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        generator = torch.cuda.default_generators[device.index]
        random_state = generator.clone_state()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), constants_on_device():
            try:
                Recording.current = self
                self._begin()
                self._logs = step(data)
                self._end()
            except BaseException:
                self._break_off(device.index)
                generator.graphsafe_set_state(random_state)
                raise
            finally:
                Recording.current = None
        torch.cuda.current_stream().wait_stream(stream)

    def _break_off(self, device: int) -> None:
        """Give back what torch holds for a graph that never ended: its generator's state and its memory pool."""
        import torch

        try:
            self._graph.capture_end()
        except RuntimeError:  # before it comes to the pool, and PyTorch has no other way to it
            with contextlib.suppress(AttributeError, RuntimeError):
                torch._C._cuda_endAllocateToPool(device, self._pool)
                torch._C._cuda_releasePool(device, self._pool)
        self._parts.clear()

    def _begin(self) -> None:
        import torch

        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as Horovod's, go on calling CUDA.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        self._graph.capture_end()
        self._parts.append(self._graph.replay)

    def cut(self, exchange: Callable[[], None]) -> None:
        """End a graph here, make the exchange in each replay, and go on with another graph."""
        self._end()
        self._parts.append(exchange)
        self._begin()

    def replay(self, leaves: list[Any]) -> Any:
        """Make the step on a batch, whose tensors are given, and return its logs, in memory that the next replay writes to."""
        import torch

        torch._foreach_copy_(self._inputs, leaves)
        for part in self._parts:
            part()
        return self._logs


@functools.cache
def constants_on_device() -> Any:
    """Return a context in which numbers become tensors by filling memory of the GPU, and its own numbers stay there.

    A copy between the GPU and Python can't be recorded.
    """
    import numpy
    import torch

    class OnDevice(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is torch._foreach_add_ and isinstance(kwargs.get("alpha"), torch.Tensor):  # Keras' SGD
                return function(args[0], torch._foreach_mul(args[1], kwargs["alpha"]))
            if function not in (torch.as_tensor, torch.tensor) or isinstance(args[0], torch.Tensor):
                return function(*args, **kwargs)
            values = numpy.asarray(args[0])
            if values.size > CONSTANTS:
                return function(*args, **kwargs)
            options = {"dtype": torch.as_tensor(values).dtype, **kwargs}
            filled = [torch.full((), value, **options) for value in values.reshape(-1).tolist()]
            return torch.stack(filled).reshape(values.shape) if filled else torch.empty(values.shape, **options)

    return OnDevice()
