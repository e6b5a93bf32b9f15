"""GPU builds: architectures, CUDA's toolkit and NCCL, the build's settings; each missing part is a sentence."""

import os
import sys
from pathlib import Path

import pytest

from mlflow_batchai.horovod_wheel import HorovodBuildError, gpus
from mlflow_batchai.horovod_wheel.environment import cache_key, flags
from mlflow_batchai.horovod_wheel.gpus import Target, choose
from mlflow_batchai.horovod_wheel.interpreter import Interpreter, probe

NVCC = """\
#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
-v) echo "#$ _SPACE_= " >&2; echo "#$ TOP={root}/bin/.." >&2; echo "nvcc fatal: no such file" >&2; exit 1 ;;
--list-gpu-code) printf 'sm_75\\nsm_80\\nsm_90\\n' ;;
esac
"""
TARGET = Target("13.0", ("90",))


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Machine:
    """A machine by the folders that stand for /usr, PATH and the interpreter's NVIDIA packages; all are empty."""

    def __init__(self, root: Path) -> None:
        self.system, self.tools, self.nvidia = root / "usr", root / "bin", root / "site packages" / "nvidia"
        self.environ = {"PATH": str(self.tools)}
        self.interpreter = Interpreter(
            path="/opt/venv/bin/python",
            tag="cp312-linux_x86_64",
            libc="glibc-2.39",
            framework="torch",
            framework_version="2.11.0+cu130",
            tools={},
            headers=True,
            cuda="13.0",
            nvidia=(str(self.nvidia),),
        )

    def cards(self, *said: str, code: int = 0) -> None:
        lines = "".join(f"echo '{line}'\n" for line in said)
        script(self.tools / "nvidia-smi", f'#!/bin/sh\n[ "$1" = --query-gpu=compute_cap ] || exit 9\n{lines}exit {code}\n')

    def toolkit(self, root: Path, version: str = "13.0") -> Path:
        return script(root / "bin" / "nvcc", NVCC.format(version=version, root=root))

    def pips_toolkit(self) -> Path:
        root = self.nvidia / "cu13"
        self.toolkit(root)
        for name in ("nvvm/bin/cicc", "include/cuda_runtime.h", "include/crt/host_config.h", "lib/libcudart.so.13"):
            script(root / name, "")
        return root

    def nccl(self, prefix: Path, library: str = "lib/libnccl.so.2") -> gpus.Nccl:
        for name in ("include/nccl.h", "include/nccl_device/core.h", "include/other.h", library):
            script(prefix / name, "")
        return gpus.Nccl(str(prefix / "include"), str(prefix / library))

    def choose(self, gpu: "bool | None" = None, *architectures: str) -> "Target | None":
        return choose(self.interpreter, gpu, architectures, self.environ)

    def find(self, target: Target = TARGET) -> gpus.Parts:
        return gpus.find(target, self.interpreter, self.environ)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path)
    monkeypatch.setattr(gpus, "_SYSTEM", made.system)
    return made


def test_the_cards_say_for_which_gpus(machine):
    machine.cards("9.0", "8.0", "9.0", "12.0")
    assert machine.choose() == Target("13.0", ("80", "90", "120"))
    assert machine.choose(True, "8.6", "75") == Target("13.0", ("75", "86"))
    assert machine.choose(False) is None
    machine.environ["HOROVOD_BUILD_CUDA_CC_LIST"] = "90,75"
    assert machine.choose() == Target("13.0", ("75", "90"))


@pytest.mark.parametrize(
    "said, code, why",
    [
        (["NVIDIA-SMI has failed because it could not talk to the driver."], 9, "nvidia-smi: NVIDIA-SMI has failed because"),
        (["No devices were found"], 6, "nvidia-smi: No devices were found"),
        ([], 0, "nvidia-smi: nothing"),
        (None, 0, "no nvidia-smi on PATH"),
    ],
)
def test_without_cards_it_is_for_cpus_unless_gpus_are_asked_for(machine, said, code, why):
    if said is not None:
        machine.cards(*said, code=code)
    assert machine.choose() is None
    assert gpus.installed(machine.environ)[1].startswith(why)
    with pytest.raises(HorovodBuildError, match=rf"no GPU here to build for \({why}.*--cuda-arch \(90 for an H100\)"):
        machine.choose(True)
    assert machine.choose(None, "9.0") == TARGET


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"cuda": None, "framework_version": "2.11.0+cpu"}, r"PyTorch 2\.11\.0\+cpu of .*/python is one without CUDA"),
        ({"framework": "tensorflow", "cuda": None}, "TensorFlow is built here without GPUs: use --framework torch"),
    ],
)
def test_what_can_not_use_gpus_is_for_cpus_unless_gpus_are_asked_for(machine, change, problem):
    machine.cards("9.0")
    machine.interpreter = machine.interpreter._replace(**change)
    assert machine.choose() is machine.choose(False) is None
    for asked in ((True,), (None, "90")):
        with pytest.raises(HorovodBuildError, match=problem):
            machine.choose(*asked)
    with pytest.raises(HorovodBuildError, match=r"--cuda-arch names GPUs to build for, and --no-gpu"):
        machine.choose(False, "90")


def test_toolkits_are_found_where_they_are_named_first(machine, tmp_path):
    system = machine.toolkit(machine.system / "local" / "cuda")
    machine.nccl(machine.system)
    assert machine.find().toolkit == gpus.Toolkit(str(machine.system / "local" / "cuda"), "13.0", False)
    # A script on PATH that starts the true one.
    script(machine.tools / "nvcc", f'#!/bin/sh\nexec "{machine.toolkit(tmp_path / "cuda-13.0")}" "$@"\n')
    assert machine.find().toolkit.root == str(tmp_path / "cuda-13.0")
    machine.toolkit(tmp_path / "named", "13.2")
    machine.environ["CUDA_HOME"] = str(tmp_path / "named")
    assert machine.find().toolkit == gpus.Toolkit(str(tmp_path / "named"), "13.2", False)
    # One of another CUDA is passed over.
    machine.toolkit(tmp_path / "named", "12.9")
    (machine.tools / "nvcc").unlink()
    assert machine.find().toolkit.root == str(system.parent.parent)


def test_each_missing_part_is_a_sentence_that_says_how_to_get_it(machine, tmp_path):
    with pytest.raises(HorovodBuildError) as neither:
        machine.find()
    toolkit, nccl = str(neither.value).splitlines()
    assert "needs the toolkit of CUDA 13.0, which PyTorch 2.11.0+cu130 is made for: install it" in toolkit
    assert "`apt-get install cuda-toolkit-13-0`" in toolkit and '"cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==13.0.*"' in toolkit
    assert "needs NCCL: install it (`/opt/venv/bin/python -m pip install nvidia-nccl-cu13`" in nccl
    assert all(sentence.endswith("or build without GPUs (--no-gpu).") for sentence in (toolkit, nccl))
    machine.toolkit(machine.system / "local" / "cuda", "12.4")
    with pytest.raises(HorovodBuildError, match=rf"made for \({machine.system}/local/cuda is CUDA 12\.4\): install it"):
        machine.find()
    machine.toolkit(machine.system / "local" / "cuda-13.0")
    with pytest.raises(HorovodBuildError, match=r"^Building Horovod for GPUs needs NCCL"):
        machine.find()
    machine.nccl(machine.system)
    machine.find()
    with pytest.raises(
        HorovodBuildError, match=r"no code for GPUs of compute capability 70, 121, but for 75, 80, 90: use another"
    ):
        machine.find(Target("13.0", ("70", "90", "121")))


def test_nccl_is_the_named_one_then_pips_then_the_systems(machine, tmp_path):
    machine.toolkit(machine.system / "local" / "cuda")
    system = machine.nccl(machine.system, "lib/x86_64-linux-gnu/libnccl.so")
    assert machine.find().nccl == system
    pips = machine.nccl(machine.nvidia / "nccl")
    assert machine.find().nccl == pips
    named = machine.nccl(tmp_path / "named", "lib64/libnccl.so.2")
    machine.environ["NCCL_HOME"] = str(tmp_path / "named")
    assert machine.find().nccl == named
    machine.environ["HOROVOD_NCCL_HOME"] = str(tmp_path / "nowhere")
    with pytest.raises(HorovodBuildError, match=r"\$HOROVOD_NCCL_HOME is .*/nowhere, where there is no include/nccl\.h with"):
        machine.find()
    machine.environ.update(HOROVOD_NCCL_INCLUDE="/a", HOROVOD_NCCL_LIB="/b")
    assert machine.find().nccl is None


def test_the_build_finds_both_by_names_without_numbers(machine, tmp_path):
    root = machine.pips_toolkit()
    nccl = machine.nccl(machine.nvidia / "nccl")
    parts = machine.find()
    assert parts == gpus.Parts(gpus.Toolkit(str(root), "13.0", True), nccl)
    variables = gpus.arrange(parts, tmp_path / "work")
    home = Path(variables["HOROVOD_NCCL_HOME"])
    assert os.path.realpath(home / "lib" / "libnccl.so") == nccl.library
    assert sorted(path.name for path in (home / "include").iterdir()) == ["nccl.h", "nccl_device"]
    toolkit = Path(variables["HOROVOD_CUDA_HOME"])
    assert toolkit.is_relative_to(tmp_path / "work") and variables["CUDACXX"] == str(toolkit / "bin" / "nvcc")
    for name in ("bin/../lib64/libcudart.so", "lib64/libcudart.so", "lib/libcudart.so", "lib64/libcudart.so.13"):
        assert os.path.realpath(toolkit / name) == str(root / "lib" / "libcudart.so.13")
    assert (toolkit / "include" / "cuda_runtime.h").is_file() and (toolkit / "nvvm" / "bin" / "cicc").is_file()
    # A compiler without the packages that it needs is none.
    (root / "nvvm" / "bin" / "cicc").unlink()
    with pytest.raises(HorovodBuildError, match=r"needs the toolkit of CUDA 13\.0"):
        machine.find()


def test_what_horovod_is_told_for_gpus(machine):
    target = Target("13.0", ("80", "90"))
    told = flags("torch", {}, target)
    assert told["HOROVOD_GPU_OPERATIONS"] == "NCCL" and told["HOROVOD_NCCL_LINK"] == "SHARED"
    assert told["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90" and told["HOROVOD_LOCAL_VERSION"] == "cu130"
    assert "-include cstdint" in told["CXXFLAGS"] and told["HOROVOD_WITH_GLOO"] == "1"
    assert flags("torch", {"HOROVOD_GPU_ALLREDUCE": "MPI"}, target).keys() - told.keys() == {"HOROVOD_GPU_ALLREDUCE"}
    assert "HOROVOD_GPU_OPERATIONS" not in flags("torch", {"HOROVOD_GPU_ALLREDUCE": "MPI"}, target)
    assert not {"HOROVOD_GPU_OPERATIONS", "HOROVOD_BUILD_CUDA_CC_LIST"} & flags("torch", {}).keys()


def test_the_key_tells_gpus_apart(machine):
    keys = {
        cache_key(machine.interpreter._replace(framework_version=version), {}, target)
        for version in ("2.11.0+cu130", "2.11.0+cu126", "2.11.0+cpu")
        for target in (None, TARGET, Target("12.6", ("90",)), Target("13.0", ("80",)), Target("13.0", ("80", "90")))
    }
    assert len(keys) == 15
    assert cache_key(machine.interpreter, {}, TARGET).startswith("cp312-linux_x86_64-torch-2.11.0+cu130_cuda13.0_sm90-")


def test_an_interpreter_says_which_cuda_its_pytorch_is_for(tmp_path):
    version = "from typing import Optional\n__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n"
    for name, text in {
        "torch/__init__.py": "raise SystemExit('it must not be imported')\n",
        "torch/version.py": version,
        "nvidia/nccl/include/nccl.h": "",
    }.items():
        script(tmp_path / "site" / name, text)
    python = script(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH="{tmp_path}/site" exec "{sys.executable}" "$@"\n')
    found = probe(str(python), "torch")
    assert (found.framework_version, found.cuda) == ("2.11.0+cu130", "13.0")
    assert str(tmp_path / "site" / "nvidia") in found.nvidia
