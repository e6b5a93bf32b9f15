"""Check what a node says of a saved model, value by value: a job wrote it, and pip reads some of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictStr, ValidationError

from mlflow_batchai.errors import ModelError
from mlflow_batchai.training.saved_models import SAVED_MODEL, SERVING, keras_module

Requirement = Annotated[
    str,
    Field(strict=True, pattern=r"^[A-Za-z0-9][\w.-]*(\[[\w,-]+\])?([<>=!~]=?=?[\w.*+!-]+(,[<>=!~]=?=?[\w.*+!-]+)*)?$"),
]
Size = Annotated[int, Field(strict=True, ge=-1)]


class TensorFacts(BaseModel):
    """One input or output: -1 in ``shape`` is a dimension that is not fixed; ``dtype`` is Keras' word."""

    model_config = ConfigDict(frozen=True)

    name: StrictStr | None
    shape: tuple[Size, ...]
    dtype: StrictStr


Tensors = Annotated[tuple[TensorFacts, ...], BeforeValidator(lambda value: value or ())]


class ModelFacts(BaseModel):
    """Facts about a saved model from the training side: versions of its environment, its tensors if known.

    Attributes:
        keras: the version that wrote it; None for what is no Keras file.
        signature: the key of a SavedModel's signature that is served.
        example: a batch for it: nested lists, or a mapping of the inputs' names to such; None: zeros will do.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["h5", "keras", "saved_model"]
    keras: Annotated[str, Field(strict=True, pattern=r"^\d+\.[\w.+-]+$")] | None = None
    backend: Annotated[str, Field(strict=True, pattern=r"^[a-z]+$")]
    python: Annotated[str, Field(strict=True, pattern=r"^\d+\.\d+[\w.+]*$")]
    requirements: tuple[Requirement, ...] = ()
    tensorflow: Annotated[str, Field(strict=True, pattern=r"^\d[\w.+-]*$")] | None = None
    inputs: Tensors = ()
    outputs: Tensors = ()
    signature: Annotated[str, Field(strict=True, pattern=r"^[\w.-]+$")] = SERVING
    example: Any = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ModelFacts:
        """Facts from the record that ``training.report`` or ``training.model_trial`` made.

        Raises:
            ModelError: the record is one of a failure, or a key is missing or has a value of the wrong kind.
        """
        if "error" in record:
            raise ModelError(str(record["error"]))
        try:
            facts = cls.model_validate(dict(record))
        except ValidationError as error:
            raise _bad(str(error.errors()[0]["loc"][0]), record) from error
        if facts.keras is None and facts.format != SAVED_MODEL:
            raise _bad("keras", record)
        return facts

    @property
    def keras_module(self) -> str:
        """The module whose ``models.load_model`` reads it: keras, tf_keras or tensorflow.keras."""
        assert self.keras is not None, "a Keras file says which Keras wrote it"
        return keras_module(self.keras, self.requirements)


def project(requirement: str) -> str:
    """The normalized name of a requirement's project."""
    return re.split(r"[\[<>=!~]", requirement)[0].lower().replace("_", "-")


def _bad(key: str, record: Mapping[str, Any]) -> ModelError:
    return ModelError(f"The description of the saved model has no usable {key!r}: {record.get(key)!r}.")
