"""What a node says of a saved model, checked value by value: a job wrote it, and some of it gets into files that pip reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlflow_batchai.agent import models
from mlflow_batchai.agent.describe import keras_module
from mlflow_batchai.errors import ModelError

REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,-]+\])?([<>=!~]=?=?[\w.*+!-]+(,[<>=!~]=?=?[\w.*+!-]+)*)?")

# What build_directory makes an MLflow model of.
FORMATS = (models.H5, models.KERAS, models.SAVED_MODEL)


@dataclass(frozen=True)
class TensorFacts:
    """One input or output: -1 in ``shape`` is a dimension that is not fixed; ``dtype`` is Keras' word."""

    name: str | None
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ModelFacts:
    """What the training side says of a saved model: its environment's versions, and its tensors if known.

    Attributes:
        keras: the version that wrote it; None for what is no Keras file.
        signature: the key of a SavedModel's signature that is served.
        example: a batch for it: nested lists, or a mapping of the inputs' names to such; None: zeros will do.
        check: how it was checked, for people; None: it wasn't.
    """

    keras: str | None
    backend: str
    python: str
    requirements: tuple[str, ...]
    format: str
    tensorflow: str | None = None
    inputs: tuple[TensorFacts, ...] = ()
    outputs: tuple[TensorFacts, ...] = ()
    signature: str | None = None
    example: Any = None
    check: str | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any], check: str | None = None) -> ModelFacts:
        """Facts from the record that ``training.report``, ``agent.describe`` or ``agent.trial`` made.

        A job wrote the record, so every value is checked before it gets into a file that pip reads.

        Args:
            check: how the model was checked.

        Raises:
            ModelError: the record is one of a failure, or a key is missing or has a value of the wrong kind.
        """
        if "error" in record:
            raise ModelError(str(record["error"]))
        model_format = _text(record, "format", "|".join(FORMATS))
        is_keras = model_format != models.SAVED_MODEL
        requirements = record.get("requirements", [])
        if not isinstance(requirements, list):
            raise _bad("requirements", requirements)
        for requirement in requirements:
            if not isinstance(requirement, str) or not REQUIREMENT.fullmatch(requirement):
                raise _bad("requirements", requirement)
        return cls(
            keras=_text(record, "keras", r"\d+\.[\w.+-]+") if is_keras else None,
            backend=_text(record, "backend", r"[a-z]+"),
            python=_text(record, "python", r"\d+\.\d+[\w.+]*"),
            requirements=tuple(requirements),
            format=model_format,
            tensorflow=_text(record, "tensorflow") if record.get("tensorflow") is not None else None,
            inputs=_tensors(record, "inputs"),
            outputs=_tensors(record, "outputs"),
            signature=None if is_keras else _text({"signature": models.SERVING, **record}, "signature", r"[\w.-]+"),
            example=record.get("example"),
            check=check,
        )

    @property
    def keras_module(self) -> str:
        """The module whose ``models.load_model`` reads it: keras, tf_keras or tensorflow.keras."""
        assert self.keras is not None, "a Keras file says which Keras wrote it"
        return keras_module(self.keras, self.requirements)


def project(requirement: str) -> str:
    """The normalized name of a requirement's project."""
    return re.split(r"[\[<>=!~]", requirement)[0].lower().replace("_", "-")


def _text(record: Mapping[str, Any], key: str, pattern: str = r"\d[\w.+-]*") -> str:
    value = record.get(key)
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise _bad(key, value)
    return value


def _tensors(record: Mapping[str, Any], key: str) -> tuple[TensorFacts, ...]:
    tensors = record.get(key) or []
    try:
        facts = tuple(TensorFacts(item["name"], tuple(item["shape"]), item["dtype"]) for item in tensors)
    except (TypeError, KeyError) as error:
        raise _bad(key, tensors) from error
    for tensor in facts:
        sizes_are_whole = all(type(size) is int and size >= -1 for size in tensor.shape)
        if not (isinstance(tensor.name, str | None) and sizes_are_whole and isinstance(tensor.dtype, str)):
            raise _bad(key, tensors)
    return facts


def _bad(key: str, value: object) -> ModelError:
    return ModelError(f"The description of the saved model has no usable {key!r}: {value!r}.")
