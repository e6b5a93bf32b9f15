"""Train with stock horovod.torch: nothing here knows of mlflow-batchai, and horovodrun starts it as well."""

from __future__ import annotations

import horovod.torch as hvd
import mlflow
import torch
from cifar import arguments, digest, images
from resnet import ResNet18
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    args = arguments()
    hvd.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a rank sees its own GPU only
    model = ResNet18().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    dataset = images(args.data, args.images)
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for x, y in DataLoader(dataset, args.batch_size, sampler=sampler):
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = hvd.allreduce(torch.stack(losses).mean(), name="loss")
        if hvd.rank() == 0:
            mlflow.log_metric("loss", float(mean), step=epoch)
    print("weights", digest(model), flush=True)
    if hvd.rank() == 0:
        torch.save(model.state_dict(), "resnet18.pt")
        mlflow.log_artifact("resnet18.pt")


if __name__ == "__main__":
    main()
