#!/bin/sh
# Batch AI's Horovod tutorial from first to last, with `batchai` in place of `az batchai`. README.md explains each step.
set -eu
here=$(dirname "$0")
export AZURE_BATCHAI_STORAGE_ACCOUNT="${AZURE_BATCHAI_STORAGE_ACCOUNT:-mystorage}"

step() { printf '\n# %s\n' "$*"; }

step 1 workspace
batchai workspace create -n myworkspace -g batchai.horovod -l eastus

step 2 experiment
batchai experiment create -n cifar -w myworkspace -g batchai.horovod

step 3 cluster
batchai cluster create -n nc6cluster -w myworkspace -g batchai.horovod -s STANDARD_NC6 -t 4 --vm-priority lowpriority

step 4 its nodes
batchai cluster show -n nc6cluster -w myworkspace -g batchai.horovod --output table

step 5 file share
batchai storage share create -n myshare
batchai storage directory create -s myshare -n cifar

step 6 script
batchai storage file upload -s myshare --source "$here/cifar_cnn_distributed.py" --path cifar

step 7 job
batchai job create -n cifar_distributed -c nc6cluster -e cifar -w myworkspace -g batchai.horovod --config-file "$here/job.json"

step 8 it runs
while [ "$(batchai job show -n cifar_distributed -e cifar -w myworkspace --query executionState -o tsv)" = queued ]; do sleep 1; done
batchai job show -n cifar_distributed -e cifar -w myworkspace --query executionState
batchai cluster show -n nc6cluster -w myworkspace --query nodeStateCounts

step 9 its output as it comes
batchai job file stream -j cifar_distributed -e cifar -w myworkspace -f stdout.txt

step 10 its end and its files
batchai job wait -n cifar_distributed -e cifar -w myworkspace
batchai job file list -j cifar_distributed -e cifar -w myworkspace --output table
batchai job file list -j cifar_distributed -e cifar -w myworkspace -d MODEL --output table

step 11 the trained network
segment=$(batchai job show -n cifar_distributed -e cifar -w myworkspace --query jobOutputDirectoryPathSegment -o tsv)
batchai storage file download -s myshare --path "$segment/outputs/Models/cifar_cnn.h5" --dest cifar_cnn.h5

step 12 resize
batchai cluster resize -n nc6cluster -w myworkspace --target 0

step 13 delete
batchai job delete -n cifar_distributed -e cifar -w myworkspace -y
batchai storage share delete -n myshare -y
batchai workspace delete -n myworkspace -y
