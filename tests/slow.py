"""Tests that `make test` leaves to `make test-all`, by their place below this folder; the marker ``slow``.

It trains, builds, looks at pages in a browser, follows the documentation, makes machines of namespaces, or waits for the paces and
losses of real jobs: each takes tens of seconds.
"""

from __future__ import annotations

SLOW = (
    "agent/attempt/test_meeting.py::test_horovod_over_the_network_that_was_found",
    "e2e/test_azure_share.py",
    "e2e/test_big_logs.py",
    "e2e/test_cifar_attempts.py",
    "e2e/test_main_job.py",
    "e2e/test_pytorch_jobs.py",
    "e2e/test_scripts_with_mlflow.py::test_autolog",
    "e2e/test_scripts_with_mlflow.py::test_pytorch",
    "e2e/test_slurm_job.py",
    "e2e/test_ssh_bad_input.py",
    "e2e/test_ssh_machines.py",
    "e2e/test_sweep_job.py",
    "e2e/test_ui.py",
    "examples/",
    "faults/",
    "horovod_wheel/test_horovod_build.py::test_real_wheel",
    "projects/test_cifar_on_gpu.py::test_torch_in_an_interpreter_that_has_it",
    "test_benchmarks.py",
    "test_docs.py::test_commands_run",
    "test_docs.py::test_python_example",
    "test_docs.py::test_script_example",
    "tracking/models/test_logged.py::test_all_formats_load_from_every_uri_and_predict_the_same",
    "training/test_guard.py::test_stock_horovod_on_keras_3_fails_with_both_checksums",
    "training/test_horovod_exact.py::test_four_ranks_equal_one_process_on_jax",
    "training/test_model_trial.py",
    "training/test_report.py::test_the_keras_callback",
    "training/test_resume.py",
    "training/test_stock_torch.py",
    "training/test_tensors.py",
)
