"""Input and output tensors of a Keras model, from its configuration alone; what that does not tell is left out, not guessed.

A configuration is what Keras saves: ``{"class_name", "config", ...}``, of Keras 2, tf_keras or Keras 3.
"""

import re
from typing import Any, Dict, List, Optional, Tuple

Shape = List[Optional[int]]

KEEPS_SHAPE = re.compile(
    r"Activation|ActivityRegularization|(Alpha|Gaussian)?Dropout|SpatialDropout[123]D|GaussianNoise|Masking|Rescaling"
    r"|(Batch|Group|Layer|Unit)?Normalization|(Leaky|P)?ReLU|ELU|Softmax"
)
MODELS = ("Sequential", "Functional", "Model")


def inputs(model: Dict[str, Any]) -> List[Dict[str, Any]]:
    """The model's input tensors, empty when the configuration does not tell every one."""
    layers = _layers(model)
    ends = _ends(model, "input_layers")
    if ends:
        by_name = {_name(layer): layer for layer in layers}
        return _tensors([(key, by_name.get(name), _declared_shape(by_name.get(name))) for key, name in ends])
    if model.get("class_name") == "Sequential" and layers:
        first = layers[0]
        if first.get("class_name") in MODELS:
            return inputs(first)
        shape = _declared_shape(first) or _fixed(_config(model).get("build_input_shape")) or _built_shape(model)
        return _tensors([(None, first, shape or _built_shape(first))])
    return _tensors([(None, None, _built_shape(model))])


def outputs(model: Dict[str, Any]) -> List[Dict[str, Any]]:
    """The model's output tensors, empty when the configuration does not tell every one."""
    layers = _layers(model)
    ends = _ends(model, "output_layers")
    if ends:
        by_name = {_name(layer): layer for layer in layers}
        return _tensors([(key, by_name.get(name), _shape(by_name.get(name), by_name, None)) for key, name in ends])
    if model.get("class_name") != "Sequential" or not layers:
        return []
    # A layer of a Sequential model is fed by the one before it.
    shape = next((_fixed(tensor["shape"]) for tensor in inputs(model)), None)
    for layer in layers:
        shape = _shape(layer, {}, shape)
    return _tensors([(None, layers[-1], shape)])


def _shape(layer: Optional[Dict[str, Any]], by_name: Dict[str, Dict[str, Any]], fed: Optional[Shape]) -> Optional[Shape]:
    """The shape of a layer's output: None if it can't be told; a dimension that can't be told is None."""
    if layer is None:
        return None
    kind, config = str(layer.get("class_name")), _config(layer)
    if kind in MODELS:
        inner = outputs(layer)
        return _fixed(inner[0]["shape"]) if len(inner) == 1 else None
    if kind == "InputLayer":
        return _declared_shape(layer)
    before = _built_shape(layer) or fed or _inbound_shape(layer, by_name) or _declared_shape(layer)
    if not before:
        return None
    if KEEPS_SHAPE.fullmatch(kind):
        return before
    if kind == "Dense":
        return [*before[:-1], config.get("units")]
    if kind == "Embedding":
        return [*before, config.get("output_dim")]
    if kind == "Flatten":
        return [before[0], _product(before[1:])]
    if kind == "Reshape":
        return [before[0]] + [size if size != -1 else None for size in config.get("target_shape", [])]
    if kind.startswith("Global") and "Pooling" in kind and not config.get("keepdims"):
        return [before[0], before[1] if config.get("data_format") == "channels_first" else before[-1]]
    if kind in ("LSTM", "GRU", "SimpleRNN") and not config.get("return_state"):
        return [before[0], *(before[1:2] if config.get("return_sequences") else []), config.get("units")]
    if re.match(r"(Conv|SeparableConv)[123]D(Transpose)?$", kind) and config.get("data_format") != "channels_first":
        return [before[0]] + [None] * (len(before) - 2) + [config.get("filters")]
    if re.match(r"(Max|Average)Pooling[123]D$", kind) and config.get("data_format") != "channels_first":
        return [before[0]] + [None] * (len(before) - 2) + [before[-1]]
    return None


def _inbound_shape(layer: Dict[str, Any], by_name: Dict[str, Dict[str, Any]]) -> Optional[Shape]:
    """The shape of the one tensor that feeds a layer of a Functional model."""
    try:
        node = layer["inbound_nodes"][0]
        if isinstance(node, dict):  # Keras 3 keeps the tensor itself
            return _fixed(node["args"][0]["config"]["shape"])
        return _shape(by_name.get(node[0][0]), by_name, None) if len(node) == 1 else None
    except (KeyError, IndexError, TypeError):
        return None


def _ends(model: Dict[str, Any], key: str) -> List[Tuple[str, str]]:
    """(name of the tensor, name of the layer) of a Functional model's inputs or outputs.

    Keras writes ``["a", 0, 0]`` for one, a list of those, or a dictionary of them, whose keys name the
    tensors.
    """
    ends = _config(model).get(key)
    if isinstance(ends, dict):
        return [(name, str(end[0])) for name, end in ends.items()]
    if not isinstance(ends, list) or not ends:
        return []
    nested = ends if isinstance(ends[0], list) else [ends]
    return [(str(end[0]), str(end[0])) for end in nested]


def _tensors(
    found: List[Tuple[Optional[str], Optional[Dict[str, Any]], Optional[Shape]]],
) -> List[Dict[str, Any]]:
    tensors = []
    for name, layer, shape in found:
        if not shape:
            return []
        sizes = [-1 if size is None else size for size in shape]
        tensors.append({"name": name, "shape": sizes, "dtype": _dtype(layer)})
    return tensors


def _dtype(layer: Optional[Dict[str, Any]]) -> str:
    """What a layer computes in: of a mixed policy the smaller type."""
    dtype = _config(layer).get("dtype") if layer else None
    if isinstance(dtype, dict):
        dtype = dtype.get("config", {}).get("name")
    return str(dtype or "float32").replace("mixed_", "")


def _declared_shape(layer: Optional[Dict[str, Any]]) -> Optional[Shape]:
    config = _config(layer) if layer else {}
    return _fixed(config.get("batch_shape")) or _fixed(config.get("batch_input_shape"))  # the latter: Keras 2


def _built_shape(layer: Dict[str, Any]) -> Optional[Shape]:
    built = layer.get("build_config")
    return _fixed(built.get("input_shape")) if isinstance(built, dict) else None


def _fixed(shape: Any) -> Optional[Shape]:
    """``shape`` if it is one tensor's shape, with None for what is not fixed."""
    if not isinstance(shape, list) or not all(size is None or isinstance(size, int) for size in shape):
        return None
    return [None if size == -1 else size for size in shape]


def _product(sizes: Shape) -> Optional[int]:
    product = 1
    for size in sizes:
        if size is None:
            return None
        product *= size
    return product


def _layers(model: Dict[str, Any]) -> List[Dict[str, Any]]:
    config = model.get("config")
    layers = config if isinstance(config, list) else _config(model).get("layers")  # a list: Keras before 2.2
    return [layer for layer in layers or [] if isinstance(layer, dict)]


def _config(layer: Dict[str, Any]) -> Dict[str, Any]:
    config = layer.get("config")
    return config if isinstance(config, dict) else {}


def _name(layer: Dict[str, Any]) -> str:
    return str(layer.get("name") or _config(layer).get("name"))
