"""Facts of a node on a saved model are checked value by value."""

import pytest
from saved_models import facts

from mlflow_batchai.errors import ModelError
from mlflow_batchai.tracking.models.facts import ModelFacts


@pytest.mark.parametrize(
    ("keras", "requirements", "expected"),
    [
        ("3.15.1", ["keras==3.15.1"], "keras"),
        ("2.15.0", ["tensorflow==2.15.1", "keras==2.15.0"], "tensorflow.keras"),
        ("2.19.0", ["tensorflow==2.19.0", "tf_keras==2.19.0"], "tf_keras"),
        ("2.19.0", ["tensorflow==2.19.0", "tf-keras==2.19.0"], "tf_keras"),
        ("2.4.0-tf", ["keras==3.15.1"], "keras"),  # an old file, loaded and trained on by a newer Keras
        ("2.4.0-tf", [], "tensorflow.keras"),
    ],
)
def test_keras_module(keras, requirements, expected):
    assert facts(keras=keras, requirements=requirements).keras_module == expected


@pytest.mark.parametrize(
    "change",
    [
        {"keras": None},
        {"keras": "3.15.1\n--index-url=http://evil"},
        {"python": "3"},
        {"format": "onnx"},
        {"requirements": ["keras==3\n-r /etc/passwd"]},
        {"requirements": ["--index-url=http://evil"]},
        {"requirements": ["keras @ http://evil"]},
        {"requirements": "keras"},
        {"inputs": [{"name": "a", "shape": [None, 3], "dtype": "float32"}]},
        {"inputs": [{"shape": [3]}]},
        {"inputs": 3},
        {"outputs": [{"name": 3, "shape": [3], "dtype": "float32"}]},
    ],
    ids=str,
)
def test_a_bad_record_is_refused_by_its_key(change):
    (key,) = change
    with pytest.raises(ModelError, match=f"has no usable '{key}'"):
        facts(**change)


def test_a_record_of_an_error_is_that_error():
    with pytest.raises(ModelError, match="holds weights without a model"):
        ModelFacts.from_record({"file": "a.h5", "error": "a.h5 holds weights without a model"})
