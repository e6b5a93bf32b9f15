"""Train with DistributedDataParallel: nothing here knows of mlflow-batchai, and torchrun starts it as well."""

from __future__ import annotations

import os

import mlflow
import torch
import torch.distributed as dist
from cifar import arguments, digest, images
from resnet import ResNet18
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    args = arguments()
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    model = DistributedDataParallel(ResNet18().to(device))
    optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)
    dataset = images(args.data, args.images)
    sampler = DistributedSampler(dataset)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)  # of the loss, and of the batches
        for x, y in DataLoader(dataset, args.batch_size, sampler=sampler):
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            mlflow.log_metric("loss", float(total[0] / total[1]), step=epoch)
    print("weights", digest(model), flush=True)
    if dist.get_rank() == 0:
        mlflow.pytorch.log_model(
            model.module.cpu(), name="resnet18", code_paths=["resnet.py"], pip_requirements=["torch"], serialization_format="pickle"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
