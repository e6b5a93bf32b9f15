"""A saved Keras file becomes an MLflow model that loads, serves and registers, without TensorFlow here.

``facts`` is what the node that trained says of the file, ``directory`` the MLflow model directory, ``logged`` its place in the
tracking store and the registry.

A model trained on another Keras backend (torch) is treated the same way: Keras stores weights in one layout for all
backends, so TensorFlow loads it. ``mlflow.tensorflow`` needs TensorFlow to load anything, so a requirement for it is added,
and the backend's own stays, for those who set ``KERAS_BACKEND``. Convolutions in ``channels_first`` order are the
exception: TensorFlow computes them on a GPU only.
"""
