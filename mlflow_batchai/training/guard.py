"""Watch Keras 3 and PyTorch training on several Horovod ranks, also in scripts that don't import our wrapper.

Stock ``hvd.DistributedOptimizer`` on a Keras 3 optimizer trains every rank on its own and says nothing. The
launcher puts a ``sitecustomize.py`` (the text ``SITECUSTOMIZE``) first on the ranks' PYTHONPATH; it calls
``install``, which waits for the import of Keras and then adds the check of ``_watch`` to ``Model.fit``, and for
that of ``horovod.torch`` and then adds the check of ``_stock_torch`` to its optimizer.
Standard library only; it imports neither Keras nor a framework, and a ``fit`` without Horovod, with one rank,
or of a model that isn't meant to be trained together goes through untouched.

Environment:
    BATCHAI_WEIGHT_CHECK: ``0`` or ``off`` switches the comparison off (ranks that are meant to differ); a
    number such
        as ``1e-3`` is the difference allowed, relative to each variable's largest weight (default 1e-5:
        rounding only).
"""

from __future__ import annotations

import importlib.machinery
import os
import sys

TYPE_CHECKING = False  # every Python process of a job runs this at its start: typing and inspect would cost 15 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

STOCK = "Horovod's own Keras callbacks don't support Keras 3: import mlflow_batchai.training.horovod as hvd"
SITECUSTOMIZE = '''\
"""Put here by mlflow-batchai: watches Keras training on several ranks, then runs this environment's own sitecustomize."""

import os
import sys
from importlib.machinery import PathFinder

try:
    from mlflow_batchai.training import guard

    guard.install()
except Exception as error:
    print("mlflow-batchai: the check of the ranks' weights is off: {!r}".format(error), file=sys.stderr)


def _run_the_one_we_hide():
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p) != here])
    if spec is not None and spec.loader is not None:
        module = type(sys)("sitecustomize")
        module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_run_the_one_we_hide()
'''


def install() -> None:
    """Watch ``keras.Model.fit`` from now on, or as soon as Keras is imported; calling it again changes nothing."""
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "Model"):
        patch_fit(keras)
    elif not any(isinstance(finder, _After) for finder in sys.meta_path):
        sys.meta_path[:0] = [_After("keras", _keras_is_there), _After("horovod.torch", _torch_is_there)]


def _keras_is_there(keras: Any) -> None:
    patch_fit(keras)
    if "BATCHAI_SPOOL" in os.environ:
        from mlflow_batchai.training import model_trial

        model_trial.stand_by()


def _torch_is_there(hvd: Any) -> None:
    from mlflow_batchai.training import _stock_torch

    _stock_torch.watch(hvd)


class _After:
    """A finder that finds nothing but one module, once, and has something done when it has been executed."""

    def __init__(self, module: str, then: Callable[[Any], None]) -> None:
        self.module = module
        self.then = then

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        for finder in sys.meta_path:
            if spec is None and finder is not self:
                spec = finder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec.loader, self)
            spec.loader = loader
        return spec


class _Loader:
    """The real loader of the module, which it gives back to the module's spec after use."""

    def __init__(self, loader: Any, finder: _After) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._loader.exec_module(module)
        self._finder.then(module)


def _is_of_stock_callbacks(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith(("horovod._keras", "horovod.tensorflow.keras")):
            return True
        trace = trace.tb_next
    return False


def patch_fit(keras: Any) -> None:
    """Make ``keras.Model.fit`` add the callbacks of ``_watch`` where a model trains on several ranks together, and say what to
    import where one of Horovod's own callbacks fails.

    Does nothing for Keras 2, where stock Horovod is right, and nothing the second time.
    """
    original = getattr(getattr(keras, "Model", None), "fit", None)
    if original is None or getattr(original, "batchai", False) or not str(keras.__version__).startswith("3."):
        return
    import functools
    import inspect
    import traceback

    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(name in sys.modules for name in ("horovod.tensorflow", "horovod.torch")):
            return original(self, *args, **kwargs)
        from mlflow_batchai.training import _watch

        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            return original(self, *args, **kwargs)
        bound.arguments["callbacks"] = _watch.with_watch(self, bound.arguments.get("callbacks"))
        try:
            return original(*bound.args, **bound.kwargs)
        except (AttributeError, TypeError) as error:
            if not _is_of_stock_callbacks(error):
                raise
            caller = traceback.extract_stack(sys._getframe(1), limit=1)[0]
            raise RuntimeError(f"{caller.filename}:{caller.lineno}: {caller.line}\n{STOCK}") from error

    fit.batchai = True  # type: ignore[attr-defined]
    keras.Model.fit = fit
