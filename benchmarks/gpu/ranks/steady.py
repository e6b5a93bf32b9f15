"""Exchanges tensors on the device until somebody ends it: what the kill part kills.

steady.py SECONDS      each rank prints `PID <rank> <process id>` once it has exchanged something
"""

import os
import sys
import time

import keras
import torch

import mlflow_batchai.training.horovod as hvd

hvd.init()
gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
buffer = keras.ops.ones(((1 if not gpu else 64) * 1024 * 1024,))
end, said = time.monotonic() + int(sys.argv[1]), False
while time.monotonic() < end:
    buffer = hvd.allreduce(buffer * 1.0, name="steady")
    if not said:
        said = True
        print(f"PID {hvd.rank()} {os.getpid()}", flush=True)
