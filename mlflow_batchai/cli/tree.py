"""Every noun and verb of ``batchai``, with its line of help: Batch AI's first, then ours."""

from __future__ import annotations

from mlflow_batchai.cli.nouns import Noun, Verb

_CLI = "mlflow_batchai.cli"

TREE = Noun(
    "Batch AI jobs on machines of your own.",
    {
        "workspace": Noun(
            "A name that clusters, experiments and jobs stand under.",
            {
                "create": Verb(f"{_CLI}.workspace:create", "Make a workspace."),
                "show": Verb(f"{_CLI}.workspace:show", "A workspace."),
                "list": Verb(f"{_CLI}.workspace:list_workspaces", "All workspaces."),
                "delete": Verb(f"{_CLI}.workspace:delete", "Delete a workspace and its clusters."),
            },
        ),
        "experiment": Noun(
            "MLflow experiments, which jobs are runs of.",
            {
                "create": Verb(f"{_CLI}.experiment:create", "Make an experiment."),
                "show": Verb(f"{_CLI}.experiment:show", "An experiment."),
                "list": Verb(f"{_CLI}.experiment:list_experiments", "All experiments."),
                "delete": Verb(f"{_CLI}.experiment:delete", "Delete an experiment (MLflow can restore it)."),
            },
        ),
        "cluster": Noun(
            "Named sets of nodes.",
            {
                "create": Verb(f"{_CLI}.cluster_create:create", "Make a cluster, from a document or from options."),
                "show": Verb(f"{_CLI}.cluster:show", "A cluster, and what its nodes do."),
                "list": Verb(f"{_CLI}.cluster:list_clusters", "All clusters."),
                "delete": Verb(f"{_CLI}.cluster:delete", "Delete a cluster."),
                "resize": Verb(f"{_CLI}.cluster:resize", "Give a cluster another number of nodes."),
                "auto-scale": Verb(f"{_CLI}.cluster:auto_scale", "Have a cluster's size follow its queue."),
                "node": Noun(
                    "A cluster's nodes.",
                    {
                        "list": Verb(f"{_CLI}.cluster_node:list_nodes", "Nodes, with address and port."),
                        "exec": Verb(f"{_CLI}.cluster_node:execute", "Run a command on a node, or forward ports."),
                    },
                ),
                "file": Noun(
                    "What the setup task of a cluster wrote.",
                    {"list": Verb(f"{_CLI}.cluster_file:list_files", "Logs of the setup task.")},
                ),
            },
        ),
        "job": Noun(
            "Jobs: see, follow and steer them.",
            {
                "create": Verb(f"{_CLI}.job_create:create", "Submit a Batch AI job document."),
                "show": Verb(f"{_CLI}.job:show", "A job: its state, errors, nodes, and where its files lie."),
                "list": Verb(f"{_CLI}.job:list_jobs", "Jobs, the newest first."),
                "wait": Verb(f"{_CLI}.job:wait", "Wait for a job's end; the exit code is the job's."),
                "attach": Verb(f"{_CLI}.job_attach:attach", "Show a job until it has ended, or see to all jobs of yours."),
                "logs": Verb(f"{_CLI}.job_logs:logs", "A job's output, of all ranks or of one."),
                "terminate": Verb(f"{_CLI}.job:terminate", "End a job."),
                "retry": Verb(f"{_CLI}.job_retry:retry", "Run a job that has not succeeded once more."),
                "delete": Verb(f"{_CLI}.job:delete", "End a job and delete its run (MLflow can restore it)."),
                "file": Noun(
                    "A job's files.",
                    {
                        "list": Verb(f"{_CLI}.job_file:list_files", "Logs, or what lies in an output directory."),
                        "stream": Verb(f"{_CLI}.job_file:stream", "Print a file as it grows, until the job has ended."),
                    },
                ),
                "node": Noun(
                    "The nodes that a job runs on.",
                    {
                        "list": Verb(f"{_CLI}.job_node:list_nodes", "Nodes, with address and port."),
                        "exec": Verb(f"{_CLI}.job_node:execute", "Run a command on a node, or forward ports."),
                    },
                ),
            },
        ),
        "sweep": Noun(
            "One project run with many sets of parameters (`sweep run` may be written `sweep`).",
            {
                "run": Verb(f"{_CLI}.sweep:run", "Run a project once for each combination of values."),
                "attach": Verb(f"{_CLI}.sweep:attach", "Go on with a sweep, and stay until it has ended."),
                "show": Verb(f"{_CLI}.sweep:show", "A sweep's jobs and results, the best first."),
                "list": Verb(f"{_CLI}.sweep:list_sweeps", "Sweeps, the newest first."),
                "terminate": Verb(f"{_CLI}.sweep:terminate", "End a sweep and all of its jobs."),
            },
            usual="run",
        ),
        "storage": Noun(
            "File shares: Azure's, or directories that stand for them.",
            {
                "share": Noun(
                    "File shares of an account.",
                    {
                        "create": Verb(f"{_CLI}.storage_share:create", "Make a file share."),
                        "list": Verb(f"{_CLI}.storage_share:list_shares", "All file shares of an account."),
                        "delete": Verb(f"{_CLI}.storage_share:delete", "Delete a file share and all that is on it."),
                    },
                ),
                "directory": Noun(
                    "Directories of a file share.",
                    {"create": Verb(f"{_CLI}.storage_directory:create", "Make a directory.")},
                ),
                "file": Noun(
                    "Files of a file share.",
                    {
                        "upload": Verb(f"{_CLI}.storage_file:upload", "Copy a file to a file share."),
                        "download": Verb(f"{_CLI}.storage_file:download", "Copy a file from a file share."),
                        "list": Verb(f"{_CLI}.storage_file:list_files", "What lies in a directory."),
                        "delete": Verb(f"{_CLI}.storage_file:delete", "Delete a file."),
                    },
                ),
            },
        ),
        "doctor": Verb(f"{_CLI}.doctor:doctor", "Whether a cluster is ready: what each node has, and what it lacks."),
        "gc": Verb(f"{_CLI}.gc:gc", "Free what ended jobs have left: folders, staged files, environments, wheels."),
        "horovod": Noun(
            "Horovod for today's TensorFlow or PyTorch.",
            {"build": Verb(f"{_CLI}.horovod:build", "Build a Horovod wheel and print its path.")},
        ),
        "key": Noun(
            "The key that signs your jobs.",
            {
                "export": Verb(f"{_CLI}.key:export", "Print your key, for another machine of yours."),
                "import": Verb(f"{_CLI}.key:import_", "Take over a key from standard input."),
            },
        ),
        "completion": Verb(f"{_CLI}.completion:completion", "Completion of commands and options for your shell."),
    },
)
