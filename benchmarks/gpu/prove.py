"""What jobs on GPUs are worth, in one call: Horovod is built, CIFAR-10 and ResNet-50 are trained, a rank is killed.

    python benchmarks/gpu/prove.py --out FOLDER [--parts build,exact,cifar,speed,scaling,kill] [--smoke] [--cpu]

It uses all GPUs of the machine, with 1, 2, 4, ... ranks, one GPU each. What one GPU can't show is said not to have been run;
there two ranks share it with a second Horovod whose exchange goes through the main memory, which is a weaker check. Each part
that has ended is kept in FOLDER/results.json, and a later call goes on with the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import ROOT, Done, Environment, Failure, computing, gpus, memory_in_use, must
from tables import markdown

CIFAR = ROOT / "projects" / "cifar_horovod"
RANKS = Path(__file__).parent / "ranks"
PARTS = ("build", "exact", "cifar", "speed", "scaling", "kill")

# The tutorial's training on four ranks: batches of 4 x 32 images, 25 epochs of four passes. So many ranks more or less make the
# same 39,000 steps on as many images.
JOINED_BATCH, JOINED_RATE, PASSES = 128, 4e-4, 100
KILL_LIMIT = 60.0  # seconds
NETWORKS = {  # of the speed part: images of so many pixels each way, and steps
    "resnet50": {"pixels": 224, "steps": 60, "precision": "mixed_bfloat16"},
    "cifar10": {"pixels": 32, "steps": 1000, "precision": "float32"},
}
WAYS = {"torch": "keras,horovod,exchange", "jax": "keras,horovod,exchange", "none": "pytorch"}
RATE = re.compile(r"images_per_second: ([\d.]+(?:e[+-]\d+)?)")

# NVLink multicast can take the GPUs of a host that others share out of service.
CAREFUL = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class Bench:
    """Where things lie, how long there is left, and how jobs are run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.smoke, self.cpu = options.smoke, options.cpu
        self.cards = [] if options.cpu else gpus()
        self.most = 2 if options.cpu else len(self.cards)
        self.ends = time.monotonic() + options.seconds
        self.work, self.out = options.work.absolute(), options.out.absolute()
        self.logs = self.work / "logs"
        self.store = self.work / ("store-smoke" if options.smoke else "store")
        for folder in (self.out, self.logs, self.store, self.work / "home" / "clusters"):
            folder.mkdir(parents=True, exist_ok=True)
        self.nccl = Environment(self.work / "venv", options.python)
        self.gloo = Environment(self.work / "venv-gloo", options.python, self.nccl.folder)
        # As many nodes as GPUs, each with one: they behave as so many machines. And one node whose ranks share a GPU.
        share = {"share": str(self.work / "share")}
        self._cluster("many", {"nodes": max(1, self.most), **share})
        self._cluster("shared", {"nodes": 1, "oversubscribe": True, "share": str(self.work / "share-shared")})

    def _cluster(self, name: str, document: dict[str, Any]) -> None:
        Path(document["share"]).mkdir(exist_ok=True)
        (self.work / "home" / "clusters" / f"{name}.yaml").write_text(json.dumps(document) + "\n")

    @property
    def left(self) -> float:
        """Seconds until everything has to be over."""
        return self.ends - time.monotonic()

    @property
    def shares(self) -> bool:
        """Whether two ranks can share a GPU."""
        return (self.gloo.folder / "horovod").exists()

    def counts(self) -> list[int]:
        """1, 2, 4, ... ranks, and as many as there are GPUs."""
        return sorted({*(2**k for k in range(8) if 2**k <= self.most), max(1, self.most)})

    def environment(self, python: Environment, backend: str = "") -> dict[str, str]:
        """The variables of a command on this machine."""
        path = f"{python.folder / 'bin'}:{self.nccl.folder / 'bin'}:{os.environ['PATH']}"
        found = {**os.environ, **CAREFUL, "PATH": path, "BATCHAI_HOME": str(self.work / "home"), "PYTHONUNBUFFERED": "1"}
        return found | {
            "MLFLOW_TRACKING_URI": f"sqlite:///{self.store}/mlflow.db",
            "KERAS_BACKEND": backend or self.options.backend,
        }

    def command(
        self,
        project: Path,
        ranks: int,
        parameters: dict[str, Any],
        *,
        entry: str = "main",
        shared: bool = False,
        backend: str = "",
        **more: Any,
    ) -> list[str]:
        """``mlflow run`` of a project with so many ranks: a node each, or all on one node and one GPU."""
        variables = {"KERAS_BACKEND": backend or self.options.backend, **CAREFUL}
        variables |= {"CUDA_VISIBLE_DEVICES": ""} if self.cpu else {}
        properties = {
            "nodeCount": 1 if shared else ranks,
            "horovodSettings": {"processCount": ranks},
            "environmentVariables": [{"name": name, "value": value} for name, value in variables.items()],
            "stdOutErrPathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share",
        }
        config = {"cluster": "shared" if shared else "many", "properties": properties, **more}
        python = self.gloo if shared else self.nccl  # ranks train with the interpreter that runs mlflow
        start = [python.python, "-m", "mlflow", "run", str(project), "--backend", "batchai", "-e", entry]
        start += ["--backend-config", json.dumps(config), "--experiment-name", "gpu"]
        return [*start, *(f"-P{name}={value}" for name, value in parameters.items())]

    def cifar(self, ranks: int, passes: int, **more: Any) -> dict[str, Any]:
        """The parameters of the CIFAR project for so many ranks and passes over the images."""
        rate, batch = JOINED_RATE / ranks, max(1, JOINED_BATCH // ranks)
        data = self.options.images or "digits"
        if self.options.images and self.options.images.endswith(".npz"):
            data = str(Path(self.options.images).absolute())
        return {"epochs": passes, "batch_size": batch, "learning_rate": f"{rate:g}", "data": data, **more}


def build(bench: Bench) -> dict[str, Any]:
    """Horovod's wheels, for NCCL and (where ranks have to share one GPU) for an exchange through the main memory."""
    bench.nccl.make(None if bench.options.wheels is None else bench.options.wheels.absolute(), bench.logs)
    found: dict[str, Any] = {"seconds": {}, "wheels": {}}
    wheel(bench, "nccl", bench.nccl, {}, found)
    if bench.most == 1 and not bench.cpu:
        bench.gloo.make(None, bench.logs)
        try:
            wheel(bench, "gloo", bench.gloo, {"HOROVOD_GPU": "CUDA"}, found)
        except Failure as error:  # only the weaker checks need it
            found["without_gloo"] = str(error)
            print(f"no second Horovod: {error}", file=sys.stderr, flush=True)
        else:
            (bench.gloo.folder / "horovod").touch()
    with tarfile.open(bench.out / "wheels.tar", "w") as archive:
        for folder in sorted(bench.work.glob("wheel-*")):
            archive.add(folder, arcname=folder.name)
    if not (bench.store / "mlflow.db").exists():  # files beside the database, and not where this script happens to be run
        create = [
            bench.nccl.python,
            "-m",
            "mlflow",
            "experiments",
            "create",
            "-n",
            "gpu",
            "-l",
            f"file://{bench.store}/artifacts",
        ]
        must(create, bench.environment(bench.nccl), bench.logs / "experiment.log", 180)
    check = "import horovod.torch as h; print('NCCL', h.nccl_built())"  # as nccl.h counts versions
    done = must([bench.nccl.python, "-c", check], bench.environment(bench.nccl), bench.logs / "import.log", 120)
    found["nccl"] = done.text.split("NCCL ")[-1].strip()
    return found


def wheel(bench: Bench, name: str, python: Environment, variables: dict[str, str], found: dict[str, Any]) -> None:
    """Build a wheel, or take the one of an earlier call, and install it."""
    folder = bench.work / f"wheel-{name}"
    if bench.options.horovod and not folder.exists():
        with tarfile.open(bench.options.horovod) as archive:
            archive.extractall(bench.work, filter="data")
    begun = time.monotonic()
    if not list(folder.glob("*.whl")):
        command = [bench.nccl.program("batchai"), "horovod", "build", "--framework", "torch", "--python", python.python]
        command += ["--source", str(bench.options.source)] if bench.options.source else []
        environment = {**bench.environment(python), **variables}
        must([*command, "--out", str(folder)], environment, bench.logs / f"build-{name}.log", bench.left)
    made = sorted(folder.glob("*.whl"))[-1]
    python.install([str(made)], bench.logs)
    found["seconds"][name] = round(time.monotonic() - begun, 1)
    found["wheels"][name] = {"name": made.name, "bytes": made.stat().st_size}


def cifar(bench: Bench) -> dict[str, Any]:
    """The CIFAR project through the backend; the last run's model is registered."""
    runs: list[dict[str, Any]] = []
    passes = 2 if bench.smoke else bench.options.passes
    counts = [(ranks, False, passes) for ranks in bench.counts()]
    if bench.shares:
        counts.insert(0, (2, True, min(passes, 4)))  # weights of two ranks, compared every epoch
    for ranks, shared, many in counts:
        model = {"register": "cifar-gpu", "alias": "champion"}
        parameters = bench.cifar(ranks, many * (ranks if bench.smoke else 1), precision=bench.options.precision)
        python = bench.gloo if shared else bench.nccl
        command = bench.command(CIFAR, ranks, parameters, shared=shared, **({} if shared else {"model": model}))
        log = bench.logs / f"cifar-{ranks}{'-shared' if shared else ''}.log"
        done = must(command, bench.environment(python), log, bench.left)
        text = re.sub(r"\s+", " ", done.text)
        accuracies = re.findall(r"val_accuracy: ([\d.]+)", text)
        test = re.search(r"Test accuracy: ([\d.]+)", text)
        runs.append(
            {
                "ranks": ranks,
                "exchange": "none" if ranks == 1 else "gloo" if shared or bench.cpu else "NCCL",
                "epochs": len(accuracies),
                "passes": parameters["epochs"],
                "batch_size": parameters["batch_size"],
                "val_accuracy": float(accuracies[-1]) if accuracies else None,
                "test_accuracy": float(test[1]) if test else None,
                "seconds": round(done.seconds, 1),
                "images_per_second": round(statistics.median(rates(done.text)[1:] or rates(done.text)), 1),
                # Every epoch the ranks compare all weights; a difference ends the job.
                "weights_equal": None if ranks == 1 else True,
            }
        )
    pack_store(bench)
    return {"images": bench.options.images or "digits", "precision": bench.options.precision, "runs": runs}


def rates(text: str) -> list[float]:
    """The images a second of every epoch, as rank 0 said them."""
    found = [float(value) for value in RATE.findall(text)]
    if not found:
        raise Failure(f"the training named no images_per_second:\n{text[-3000:]}")
    return found


def exact(bench: Bench) -> dict[str, Any]:
    """The weights after recorded steps over those after plain ones, on one rank and on all GPUs."""
    runs = []
    for ranks in sorted({1, max(1, bench.most)}):
        command = bench.command(RANKS, ranks, {}, entry="exact", backend="torch")
        runs.append(result_of(must(command, bench.environment(bench.nccl), bench.logs / f"exact-{ranks}.log", bench.left)))
    return {"runs": runs}


def speed(bench: Bench) -> dict[str, Any]:
    """Images a second of one rank by each way, bare and through the backend, in turn."""
    rows = []
    for network, fixed in NETWORKS.items():
        small = {"steps": 12, **({"pixels": 32, "precision": "float32"} if bench.cpu else {})} if bench.smoke else {}
        given = {"batch_size": 2 if bench.cpu else bench.options.batch, **fixed, **small}
        for backend, ways in WAYS.items():
            keras = "torch" if backend == "none" else backend
            parameters = {"network": network, "ways": ways, **given, "megabytes": 0}
            order = ("network", "ways", "batch_size", "pixels", "steps", "precision", "megabytes")
            bare = [bench.nccl.python, str(RANKS / "speed.py"), *(str(parameters[name]) for name in order)]
            job = bench.command(RANKS, 1, parameters, entry="speed", backend=keras)
            environment = bench.environment(bench.nccl, keras) | ({"CUDA_VISIBLE_DEVICES": ""} if bench.cpu else {})
            found = {}
            for how, command in (("bare", bare), ("backend", job)):
                log = bench.logs / f"speed-{network}-{backend}-{how}.log"
                found[how] = result_of(must(command, environment, log, bench.left))["images_per_second"]
            rows += [
                {
                    "network": network,
                    "keras_on": backend,
                    "way": way,
                    "bare": found["bare"][way],
                    "backend": found["backend"][way],
                }
                for way in ways.split(",")
            ]
    return {"batch_size": given["batch_size"], "rows": rows}


def result_of(done: Done) -> dict[str, Any]:
    """What rank 0 said."""
    said = re.search(r"RESULT (\{.*\})", done.text)
    if said is None:
        raise Failure(f"rank 0 gave no result:\n{done.text[-3000:]}")
    found: dict[str, Any] = json.loads(said[1])
    return found


def scaling(bench: Bench) -> dict[str, Any]:
    """ResNet-50 with 1, 2, 4, ... ranks, and an allreduce of 1 GiB."""
    small = bench.smoke or bench.cpu
    parameters = {"batch_size": 2 if bench.cpu else bench.options.batch, "pixels": 64 if bench.cpu else 224}
    parameters |= {"steps": 3 if bench.cpu else 12 if small else 60, "megabytes": 16 if bench.cpu else 1024}
    parameters["precision"] = "float32" if bench.cpu else "mixed_bfloat16"
    runs = []
    for ranks in bench.counts():
        command = bench.command(RANKS, ranks, parameters, entry="speed")
        one = result_of(must(command, bench.environment(bench.nccl), bench.logs / f"resnet-{ranks}.log", bench.left))
        runs.append({**one, "images_per_second": one["images_per_second"]["horovod"]})
    for one in runs:
        one["efficiency"] = one["images_per_second"] / one["ranks"] / runs[0]["images_per_second"]
    return {**parameters, "runs": runs}


def kill(bench: Bench) -> dict[str, Any]:
    """kill -9 of one rank: the job fails on all of them soon, and gives the GPUs back."""
    runs = []
    if bench.most >= 2:
        runs.append((bench.most, False))
    else:
        runs += [(1, False), *([(2, True)] if bench.shares else [])]
    return {"runs": [killed(bench, ranks, shared) for ranks, shared in runs]}


def killed(bench: Bench, ranks: int, shared: bool) -> dict[str, Any]:
    """Start ranks that exchange tensors for ever, kill the last one, and see what is left."""
    before = memory_in_use()
    command = bench.command(RANKS, ranks, {"seconds": 90}, entry="steady", shared=shared)
    log = bench.logs / f"kill-{ranks}{'-shared' if shared else ''}.log"
    with log.open("wb") as file:
        environment = bench.environment(bench.gloo if shared else bench.nccl)
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        pids: dict[int, int] = {}
        while len(pids) < ranks and process.poll() is None and bench.left > 0:
            time.sleep(0.2)
            pids = {int(rank): int(pid) for rank, pid in re.findall(r"PID (\d+) (\d+)", log.read_text(errors="replace"))}
        try:
            if len(pids) < ranks:
                raise Failure(f"the ranks did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(2)
            during = memory_in_use()
            begun = time.monotonic()
            os.kill(pids[ranks - 1], signal.SIGKILL)
            gone = ended = None
            while time.monotonic() - begun < KILL_LIMIT + 30 and (gone is None or ended is None):
                time.sleep(0.1)
                if gone is None and not any(Path(f"/proc/{pid}").exists() for pid in pids.values()):
                    gone = time.monotonic() - begun
                if ended is None and process.poll() is not None:
                    ended = time.monotonic() - begun
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(timeout=60)
    time.sleep(2)
    after, apps = memory_in_use(), computing()
    return {
        "ranks": ranks,
        "exchange": "none" if ranks == 1 else "gloo" if shared or bench.cpu else "NCCL",
        "all_ranks_gone_after": gone and round(gone, 1),
        "job_failed_after": ended and round(ended, 1),
        "exit_code": process.returncode,
        "memory_before": before,
        "memory_during": during,
        "memory_after": after,
        "computing_after": [pid for pid in apps if pid.isdigit() and int(pid) in pids.values()],
        "within_limit": gone is not None and ended is not None and max(gone, ended) <= KILL_LIMIT and process.returncode != 0,
        "nothing_left": all(b - a <= 8 for a, b in zip(before, after, strict=True)),
    }


def pack_store(bench: Bench) -> None:
    """The MLflow store, in files of at most 15 MB: `cat store.tar.gz.* | tar -xz -C /` lays it where it was."""
    whole = bench.work / "store.tar.gz"
    seen: dict[int, Path] = {}

    def wanted(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if "/checkpoints" in item.name else item

    for path in sorted(bench.store.rglob("*")):
        if path.is_file() and path.stat().st_size > 1_000_000:  # the same file twice: stored once, as a link
            digest = hash(path.read_bytes())
            if digest in seen and seen[digest].read_bytes() == path.read_bytes():
                path.unlink()
                os.link(seen[digest], path)
            seen.setdefault(digest, path)
    with tarfile.open(whole, "w:gz") as archive:
        archive.add(bench.store, arcname=str(bench.store).lstrip("/"), filter=wanted)
    for old in bench.out.glob("store.tar.gz.*"):
        old.unlink()
    data = whole.read_bytes()
    for number, start in enumerate(range(0, len(data), 15_000_000)):
        (bench.out / f"store.tar.gz.{number}").write_bytes(data[start : start + 15_000_000])


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, the store and the wheels")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    parser.add_argument("--smoke", action="store_true", help="every part at toy size")
    parser.add_argument("--cpu", action="store_true", help="two ranks on CPUs: tries the script itself")
    parser.add_argument("--again", action="store_true", help="do parts that have their results as well")
    parser.add_argument("--work", type=Path, default=Path("/tmp/batchai-gpu"), help="environments, shares and the store")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has PyTorch")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that it lacks (mlflow-skinny, keras, ...)")
    parser.add_argument("--source", type=Path, help="Horovod's source archive; else it is fetched")
    parser.add_argument("--horovod", type=Path, help="wheels.tar of an earlier call: nothing is built then")
    parser.add_argument("--images", help="an .npz like Keras' CIFAR-10, or a word that the project's --data takes")
    parser.add_argument("--backend", choices=["torch", "jax"], default="torch", help="of Keras; Horovod is torch's in any case")
    parser.add_argument("--precision", default="float32", help="of the CIFAR project")
    parser.add_argument("--passes", type=int, default=PASSES, help="over the images, in the CIFAR part")
    parser.add_argument("--batch", type=int, default=128, help="images a rank and step, in the speed and scaling parts")
    parser.add_argument("--seconds", type=float, default=560.0, help="until what runs is ended")
    found = parser.parse_args(argv)
    found.parts = [part for part in found.parts.split(",") if part]
    unknown = [part for part in found.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}: give some of {','.join(PARTS)}")
    return found


def main(argv: list[str] | None = None) -> int:
    """Do the parts; returns 1 if one failed."""
    options = arguments(argv)
    bench = Bench(options)
    if bench.most == 0:
        print("nvidia-smi shows no GPU: give --cpu to try the script without", file=sys.stderr)
        return 1
    path, failed = bench.out / "results.json", False
    machine = {"gpus": bench.cards, "cores": os.cpu_count(), "smoke": bench.smoke, "cpu": bench.cpu}
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if results.get("machine") != machine:  # none, or another machine's
        results = {"machine": machine}
    steps: dict[str, Callable[[Bench], dict[str, Any]]] = dict(
        zip(PARTS, (build, exact, cifar, speed, scaling, kill), strict=True)
    )
    ready = (bench.work / "venv" / "horovod").exists() and (bench.store / "mlflow.db").exists()
    for part in [*(["build"] if not ready and "build" not in options.parts else []), *options.parts]:
        if part in results and not options.again and "error" not in results[part] and not (part == "build" and not ready):
            continue
        begun = time.monotonic()
        print(f"{part} ...", file=sys.stderr, flush=True)
        try:
            results[part] = steps[part](bench)
            if part == "build":
                (bench.work / "venv" / "horovod").touch()
        except (Failure, OSError, subprocess.SubprocessError, ValueError) as error:
            failed = True
            results[part] = {"error": str(error)}
            print(f"{part} failed: {error}", file=sys.stderr, flush=True)
        results[part]["took"] = round(time.monotonic() - begun, 1)
        path.write_text(json.dumps(results, indent=1) + "\n")
        (bench.out / "results.md").write_text(markdown(results))
        if part == "build" and failed:
            break
    with tarfile.open(bench.out / "logs.tar.gz", "w:gz") as archive:
        archive.add(bench.logs, arcname="logs")
    print(markdown(results), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
