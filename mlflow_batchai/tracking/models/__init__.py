"""Turn a job's model into an MLflow model that loads, serves and registers, without TensorFlow here.

``job_model`` begins: it takes what node 0 has chosen and tried; ``facts`` is what that node says of it, ``directory`` the
MLflow model directory, ``logged`` its place in the tracking store and the registry, ``promotion`` the aliases.

A model trained on another Keras backend (torch) is treated the same way: Keras stores weights in one layout for all
backends, so TensorFlow loads it. ``mlflow.tensorflow`` needs TensorFlow to load anything, so a requirement for it is added,
and the backend's own stays, for those who set ``KERAS_BACKEND``. Convolutions in ``channels_first`` order are the
exception: TensorFlow computes them on a GPU only.
"""
