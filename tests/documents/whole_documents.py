"""A whole document of each kind, with every block that a test looks at; each secret in them is HIDDEN."""

from __future__ import annotations

from typing import Any

import yaml

HIDDEN = "hunter2hunter2"
JOB: dict[str, Any] = yaml.safe_load(f"""
properties:
  cluster: {{id: /subscriptions/s/resourceGroups/g/providers/p/workspaces/w/clusters/gpu}}
  nodeCount: 2
  schedulingPriority: high
  stdOutErrPathPrefix: $AZ_BATCHAI_JOB_MOUNT_ROOT/logs
  horovodSettings: {{pythonScriptFilePath: $AZ_BATCHAI_JOB_MOUNT_ROOT/t.py, commandLineArgs: --lr 0.1, processCount: 2}}
  mountVolumes:
    azureFileShares:
      - {{azureFileUrl: 'https://<AZURE_BATCHAI_STORAGE_ACCOUNT>.file.core.windows.net/logs', relativeMountPath: logs}}
      - accountName: acct
        azureFileUrl: https://acct.file.core.windows.net/share/folder
        relativeMountPath: folder
        credentials: {{accountKey: {HIDDEN}}}
        fileMode: '0700'
    azureBlobFileSystems:
      - {{accountName: a, containerName: c, relativeMountPath: data, mountOptions: '', credentials: {{accountKey: {HIDDEN}}}}}
    fileServers: [{{fileServer: {{id: /x/nfs1}}, relativeMountPath: nfs, sourceDirectory: d}}]
    unmanagedFileSystems: [{{mountCommand: 'mount -t nfs4 10.0.0.4:/v', relativeMountPath: gv}}]
  containerSettings:
    shmSize: 16gb
    imageSourceRegistry:
      serverUrl: registry.example.com
      image: registry.example.com/team/image:1
      credentials: {{username: $oauthtoken, password: {HIDDEN}}}
  jobPreparation: {{commandLine: pip install x}}
  inputDirectories: [{{id: DATA, path: $AZ_BATCHAI_JOB_MOUNT_ROOT/data}}]
  outputDirectories: [{{id: MODEL, pathPrefix: /logs, pathSuffix: models}}, {{id: LOGS, pathPrefix: /logs, pathSuffix: logs}}]
  environmentVariables: [{{name: HOROVOD_TIMELINE, value: $AZ_BATCHAI_OUTPUT_LOGS/t.json}}]
  secrets:
    - {{name: TOKEN, value: {HIDDEN}}}
    - {{name: OTHER, valueSecretReference: {{sourceVault: {{id: /v}}, secretUrl: 'https://v/s'}}}}
  constraints: {{maxWallClockTime: PT2H}}
""")
AZURE: dict[str, Any] = yaml.safe_load(f"""
vmSize: STANDARD_NC6
vmPriority: lowpriority
scaleSettings: {{manual: {{targetNodeCount: 4, nodeDeallocationOption: terminate}}}}
virtualMachineConfiguration: {{imageReference: {{publisher: p, offer: o, sku: 16.04-LTS}}}}
userAccountSettings: {{adminUserName: demo, adminUserSshPublicKey: ssh-rsa AAAA, adminUserPassword: {HIDDEN}}}
subnet: {{id: /subscriptions/s/subnets/default}}
nodeSetup:
  setupTask:
    commandLine: cd /tmp; pip install x
    stdOutErrPathPrefix: $AZ_BATCHAI_MOUNT_ROOT/afs
    environmentVariables: [{{name: A, value: '1'}}]
    secrets: [{{name: TOKEN, value: {HIDDEN}}}]
  mountVolumes: {{unmanagedFileSystems: [{{mountCommand: 'mount -t nfs 10.0.0.4:/v', relativeMountPath: v}}]}}
  performanceCountersSettings: {{appInsightsReference: {{component: {{id: /c}}, instrumentationKey: {HIDDEN}}}}}
""")
SSH: dict[str, Any] = yaml.safe_load("""
engine: ssh
hosts: [{host: 10.0.0.4}, {host: gpu2, user: me, port: 2222, keyFile: ~/.ssh/two, root: /scratch/batchai}]
user: azbatch
knownHosts: ~/.ssh/known_hosts
jumpHost: me@gateway
share: /mnt/share
shareOnNodes: /srv/share
""")
BATCHAI: dict[str, Any] = yaml.safe_load(r"""
cluster: gpu
experiment: Cifar ten (nightly)
workspace: team-a
name: run_1
retries: 2
wait: false
terminateGrace: PT10S
stage: [data, weights]
cachePreparation: [a.txt]
model: {path: $AZ_BATCHAI_OUTPUT_MODEL/model.h5, register: cifar}
metrics: [{name: f1, regex: 'step (?P<step>\d+): (\S+)', step: step}]
properties:
  horovodSettings: {processCount: 4}
  jobPreparation: {commandLine: pip list}
  constraints: {maxWallClockTime: '1:30:00'}
  environmentVariables: [{name: A, value: b}]
""")
PROJECT: dict[str, Any] = yaml.safe_load("""
name: p
docker_env: {image: i, volumes: ['/a:/b'], environment: [A, [B, c]]}
entry_points:
  main:
    parameters: {lr: {type: float, default: 0.1}, data: path, flag: {type: bool, default: true}}
    command: python train.py --lr {lr} --data {data}
""") | {"batchai": BATCHAI}
SETTINGS: dict[str, Any] = yaml.safe_load(f"""
defaults: {{resourceGroup: rg.1, workspace: w, experiment: e 1, cluster: c, output: table}}
shares: {{acct: {{accountKey: {HIDDEN}}}, two: {{fileEndpoint: 'https://ACCOUNT.file.example.org'}}}}
""")
