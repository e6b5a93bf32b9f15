"""A build keeps its wheel, tells progress, cleans up after failures, and waits for one already under way."""

import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from waiting import wait_for

from mlflow_batchai import errors
from mlflow_batchai.cli import horovod as command
from mlflow_batchai.client import signals
from mlflow_batchai.horovod_wheel import HorovodBuildError, build, builder, source
from mlflow_batchai.horovod_wheel.interpreter import probe
from mlflow_batchai.horovod_wheel.source import PATCHES

WHEEL = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"

# Stands for an interpreter: it answers our question from a file, and its pip does as `orders` beside it says.
FAKE_PYTHON = """\
#!{python}
import json, os, pathlib, shutil, sys, time, zipfile
home = pathlib.Path(__file__).parent.parent
arguments = sys.argv[1:]
orders = json.loads((home / "orders.json").read_text())
if arguments[0] == "-c" and len(arguments) == 2:
    print((home / "answer.json").read_text())
    sys.exit()
if arguments[0] == "-c":
    (home / "tools").write_text(arguments[7])
    (home / "tried.json").write_text(json.dumps([*arguments[3:5], os.listdir(arguments[2]), dict(os.environ)]))
    said = orders.get("trial", dict(built=["gloo"]))
    if isinstance(said, str):
        sys.exit(said)
    print("a warning" + chr(10) + arguments[6] + json.dumps(said))
    sys.exit()
verb = next(word for word in arguments if word in ("install", "download", "wheel"))
with (home / "calls").open("a") as calls:
    calls.write(" ".join(arguments) + chr(10))
folder = dict(zip(arguments, arguments[1:]))
if verb == "download":
    shutil.copy(home / "horovod-0.28.1.tar.gz", folder["--dest"])
if verb == "wheel":
    source = pathlib.Path(arguments[-1])
    (home / "built.cc").write_text((source / "horovod/common/gloo/gloo_context.cc").read_text())
    (home / "environment.json").write_text(json.dumps(dict(os.environ)))
    (home / "pid").write_text(str(os.getpid()))
    orders.get("sleep") == "mute" or print("  Running CMake in x:\\n  [ 42%] Building CXX object a.cc.o", flush=True)
    if orders.get("sleep"):
        time.sleep(600)
if verb == orders.get("fail"):
    sys.exit("  a.cc:1:1: error: no such thing\\n  make: *** Error 2")
if verb == "wheel":
    pathlib.Path(folder["--wheel-dir"]).mkdir()
    with zipfile.ZipFile(pathlib.Path(folder["--wheel-dir"], "{wheel}"), "w") as archive:
        archive.writestr("made", "the wheel")
"""


class World:
    """A made-up interpreter with its pip, a compiler, CMake and make, and an empty cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache"
        self.tools = root / "bin"
        self.python = root / "venv with space" / "bin" / "python"
        self.home = self.python.parent.parent
        self.answer = {
            "version": [3, 11],
            "tag": "cp311-linux_x86_64",
            "libc": "glibc-2.36",
            "tensorflow": "2.21.0",
            "torch": None,
            "cuda": None,
            "nvidia": [],
            "tools": dict.fromkeys(
                ("setuptools", "wheel", "cloudpickle", "psutil", "PyYAML", "packaging", "cffi", "pycparser")
            ),
            "headers": False,
        }
        self.answer["tools"].update(pip="26.0", psutil="7.0", setuptools="65.5.0")
        self.said: list[str] = []
        for name in ("c++", "make"):
            self.script(self.tools / name, "#!/bin/sh\n")
        self.script(self.tools / "cmake", "#!/bin/sh\necho cmake version 3.25.1\n")
        self.script(self.python, FAKE_PYTHON.format(python=sys.executable, wheel=WHEEL))
        self.write_answer()
        self.order()
        with tarfile.open(self.home / "horovod-0.28.1.tar.gz", "w:gz") as sdist:
            texts: dict[str, str] = {}
            for patch in {*PATCHES["tensorflow"], *PATCHES["torch"]}:
                texts[patch.file] = texts.get(patch.file, "") + patch.old
            for name, text in texts.items():
                member = tarfile.TarInfo("horovod-0.28.1/" + name)
                member.size = len(text)
                sdist.addfile(member, io.BytesIO(text.encode()))

    @staticmethod
    def script(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def write_answer(self) -> None:
        (self.home / "answer.json").write_text(json.dumps(self.answer))

    def order(self, **orders: object) -> None:
        (self.home / "orders.json").write_text(json.dumps(orders))

    def build(self, **options: object) -> str:
        options = {"progress": self.said.append, **options}
        return build(str(self.python), **options)

    def calls(self) -> list[str]:
        calls = self.home / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def wheels(self) -> list[str]:
        return [path.name for path in self.cache.rglob("*.whl")]


def text_of(wheel: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read("made").decode()


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path)
    digest = source.hashlib.sha256((world.home / "horovod-0.28.1.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setattr(source, "SDIST_SHA256", digest)
    monkeypatch.setenv("PATH", str(world.tools))
    monkeypatch.setenv("BATCHAI_HOROVOD_CACHE", str(world.cache))
    for name in ("CXX", "HOROVOD_CMAKE"):
        monkeypatch.delenv(name, raising=False)
    return world


def test_a_wheel_is_built_once_and_then_found(world):
    path = world.build()
    assert Path(path).name == WHEEL
    assert Path(path).parent.name.startswith("cp311-linux_x86_64-tensorflow-2.21.0-")
    assert text_of(path) == "the wheel"
    assert "gloo_iface_ = global_context.gloo_iface_;" in (world.home / "built.cc").read_text()
    os.utime(path, (0, 0))
    assert world.build() == path
    assert Path(path).stat().st_mtime > 0  # it was used, for `batchai gc`
    assert sum(" wheel -v " in call for call in world.calls()) == 1
    assert world.said == [
        "fetching build tools",
        "fetching Horovod 0.28.1",
        "configuring",
        "compiling 42 %",
        "trying the wheel",
        "built with gloo",
    ]
    assert [entry.suffix for entry in world.cache.iterdir() if entry.is_file()] == [".lock"]


def test_only_missing_tools_are_fetched_and_none_into_the_interpreter(world):
    world.build()
    install, download, wheel = world.calls()
    assert install.endswith("tools setuptools>=68 wheel cloudpickle PyYAML packaging")
    assert "--target" in install
    assert "--no-binary horovod --no-deps --no-build-isolation" in download
    environment = json.loads((world.home / "environment.json").read_text())
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == install.split(" --target ")[1].split(" ")[0]
    assert " -v --no-build-isolation --no-deps " in wheel
    assert (world.home / "tools").read_text() == install.split(" --target ")[1].split(" ")[0]


def test_a_wheel_is_tried_with_what_the_interpreter_lacks(world, tmp_path):
    """``pip install`` of the wheel brings that, so a bare interpreter is no reason to refuse the wheel."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "lacking.py").touch()
    (tmp_path / "tools" / "json.py").write_text("raise SystemExit('tools stand before the interpreter')")
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as archive:
        built = "".join(f"def {name}_built(): return {name == 'gloo'}\n" for name in ("gloo", "mpi", "nccl", "cuda", "rocm"))
        archive.writestr("horovod/__init__.py", "")
        archive.writestr("horovod/tensorflow.py", built + "import lacking\ndef init(): pass\ndef shutdown(): pass\n")
    interpreter = probe(str(world.python), "tensorflow")._replace(path=sys.executable)
    said = builder.try_wheel(tmp_path / WHEEL, interpreter, os.environ, False, tmp_path / "log", tmp_path / "tools")
    assert said == "built with gloo"
    with pytest.raises(HorovodBuildError, match="No module named 'lacking'"):
        builder.try_wheel(tmp_path / WHEEL, interpreter, os.environ, False, tmp_path / "log", tmp_path / "none")


def test_out_gets_a_copy(world, tmp_path):
    path = world.build(out=str(tmp_path / "new" / "folder"))
    assert path == str(tmp_path / "new" / "folder" / WHEEL)
    assert text_of(path) == "the wheel"
    assert [entry.name for entry in (tmp_path / "new" / "folder").iterdir()] == [WHEEL]
    assert world.wheels() == [WHEEL]


@pytest.mark.parametrize(
    "verb, what",
    [
        ("install", "Fetching the build tools failed"),
        ("download", "Fetching Horovod 0.28.1 failed"),
        ("wheel", "Compiling Horovod 0.28.1 for .* failed"),
    ],
)
def test_a_failure_keeps_the_log_and_no_wheel(world, verb, what):
    world.order(fail=verb)
    with pytest.raises(HorovodBuildError, match=what) as failure:
        world.build()
    (log,) = world.cache.glob("*.log")
    assert str(log) in str(failure.value)
    assert str(failure.value).endswith("\n  a.cc:1:1: error: no such thing\n  make: *** Error 2")
    assert "error: no such thing" in log.read_text()
    assert world.wheels() == []
    world.order()
    assert Path(world.build()).name == WHEEL
    assert list(world.cache.glob("*.log")) == []


@pytest.mark.parametrize(
    "said, message",
    [
        (
            "undefined symbol: _ZN3c10",
            r"does not work in .*, which exits with 1 and says: undefined symbol: _ZN3c10 \(the build",
        ),
        ({"built": []}, None),
    ],
)
def test_a_wheel_is_tried_before_it_is_kept(world, monkeypatch, said, message):
    monkeypatch.setenv("HOROVOD_RANK", "3")
    world.order(trial=said)
    if message:
        with pytest.raises(HorovodBuildError, match=message):
            world.build()
        assert world.wheels() == [] and list(world.cache.glob("*.log"))
    else:
        assert text_of(world.build()) == "the wheel"
    framework, kind, files, environment = json.loads((world.home / "tried.json").read_text())
    assert (framework, kind, files) == ("tensorflow", "cpu", ["made"])
    assert "HOROVOD_RANK" not in environment


def test_from_a_file_nothing_is_fetched(world):
    archive = world.home / "horovod-0.28.1.tar.gz"
    with pytest.raises(HorovodBuildError, match=r"lacks setuptools>=68, wheel, cloudpickle, PyYAML, packaging: install what"):
        world.build(source=str(archive))
    assert world.calls() == []
    with pytest.raises(HorovodBuildError, match="can't be read: No such file or directory"):
        world.answer["tools"] = dict.fromkeys(world.answer["tools"], "70")
        world.write_answer()
        world.build(source="/no/such/file")
    assert text_of(world.build(source=str(archive))) == "the wheel"
    assert ["install" in call or "download" in call for call in world.calls()] == [False]
    assert json.loads((world.home / "environment.json").read_text())["PIP_NO_INDEX"] == "1"
    assert "fetching" not in " ".join(world.said)


def test_an_interrupted_build_leaves_no_process_and_no_wheel(world):
    world.order(sleep=True)

    def interrupt(text):
        if text.startswith("compiling"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.build(progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((world.home / "pid").read_text()), 0)
    assert world.wheels() == []


@pytest.mark.parametrize(
    "number, command",
    [
        (signal.SIGTERM, "from mlflow_batchai.cli.horovod import build; build()"),
        (signal.SIGHUP, "from mlflow_batchai.cli.horovod import build; build()"),
        (signal.SIGHUP, "import sys; from mlflow_batchai.horovod_wheel.builder import main; main(sys.argv[1:])"),
        # In the moment in which nobody knows the process yet.
        (
            signal.SIGTERM,
            """
import os, signal, subprocess
from mlflow_batchai.cli.horovod import build
forks = subprocess._fork_exec
def forked(argv, *rest):
    pid = forks(argv, *rest)
    if b"wheel" in map(os.fsencode, argv):
        os.kill(os.getpid(), signal.SIGTERM)
    return pid
subprocess._fork_exec = forked
build()
""",
        ),
    ],
)
def test_a_command_that_is_ended_leaves_no_process_and_no_wheel(world, tmp_path, number, command):
    world.order(sleep="mute")  # one that writes would notice that nobody reads
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    # A hangup is ignored, and stays so, where the tests themselves run under nohup.
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    code += f"from mlflow_batchai.horovod_wheel import source; source.SDIST_SHA256 = {source.SDIST_SHA256!r}\n"
    code += command
    process = subprocess.Popen([sys.executable, "-c", code, "--python", str(world.python)], env=environment)
    try:
        pid = world.home / "pid"
        wait_for(lambda: process.poll() is not None or (pid.exists() and pid.read_text()))
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
        process.wait()
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(world.python) in (one.info["cmdline"] or ())]
    assert world.wheels() == [] and list((tmp_path / "temporary").iterdir()) == []


def test_a_hangup_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.raised():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(SystemExit):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_of_two_builds_takes_the_wheel_of_the_first(world):
    folder = Path(world.build()).parent
    shutil.rmtree(folder)
    (world.home / "calls").unlink()
    first = (world.cache / (folder.name + ".lock")).open("a")
    fcntl.flock(first, fcntl.LOCK_EX)
    said = []

    def first_ends(text):
        said.append(text)
        folder.mkdir()
        (folder / WHEEL).write_text("the first one's")
        first.close()

    assert Path(world.build(progress=first_ends)).read_text() == "the first one's"
    assert said == ["waiting for another build of the same wheel"]
    assert world.calls() == []


@pytest.mark.parametrize(
    "missing, message",
    [
        (
            ["c++", "cmake", "make"],
            r"a C\+\+ compiler .*, CMake 3.13 or newer and make: run `apt-get install g\+\+ cmake make`",
        ),
        (["make"], r"needs make: run `apt-get install make`\.$"),
        (
            ["cmake"],
            r"needs CMake 3.13 or newer: run `apt-get install cmake` \(CMake also by `.*pip install cmake`\)",
        ),
    ],
)
def test_missing_programs_are_named_before_anything_is_fetched(world, missing, message):
    for name in missing:
        (world.tools / name).unlink()
    with pytest.raises(HorovodBuildError, match=message):
        world.build()
    assert world.calls() == []


def test_a_cmake_beside_the_interpreter_is_found(world):
    shutil.move(world.tools / "cmake", world.python.parent / "cmake")
    assert Path(world.build()).name == WHEEL


def test_pytorch_needs_the_headers_of_python(world):
    world.answer["torch"] = "2.13.0+cpu"
    world.write_answer()
    with pytest.raises(HorovodBuildError, match=r"needs Python\.h: run `apt-get install python3-dev`"):
        world.build(framework="torch")
    world.answer["headers"] = True
    world.write_answer()
    assert "-torch-2.13.0+cpu-" in world.build(framework="torch")


def test_without_its_own_pip_ours_is_used(world):
    world.answer["tools"]["pip"] = None
    world.write_answer()
    # Our pip runs itself under the made-up interpreter, which doesn't know how: so it counts as unusable.
    with pytest.raises(HorovodBuildError, match=r"needs pip, which .* lacks: run `.* -m ensurepip`"):
        world.build()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tensorflow": None}, r"TensorFlow is not installed in .*: run `.* -m pip install tensorflow-cpu`"),
        ({"version": [3, 6]}, r"is Python 3\.6: Horovod is built here for 3\.9 or newer"),
    ],
)
def test_an_unfit_interpreter_is_refused(world, change, message):
    world.answer.update(change)
    world.write_answer()
    with pytest.raises(HorovodBuildError, match=message):
        world.build()
    assert not world.cache.exists()


def test_a_program_that_is_no_python_is_refused(tmp_path):
    with pytest.raises(HorovodBuildError, match="is not an executable"):
        build(str(tmp_path / "python"))
    with pytest.raises(HorovodBuildError, match="is no Python interpreter"):
        build("/bin/false")
    with pytest.raises(HorovodBuildError, match="'mxnet' is not a framework"):
        build(framework="mxnet")


def test_the_command_prints_the_path_only_and_progress_apart(world):
    result = CliRunner().invoke(command.build, ["--python", str(world.python)], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == world.build() + "\n"
    assert "Horovod: compiling" in result.stderr.splitlines(), "without percentages"


def test_the_command_turns_the_error_into_ours(world):
    with pytest.raises(errors.HorovodBuildError, match="is no Python interpreter") as failure:
        CliRunner().invoke(command.build, ["--python", "/bin/false"], catch_exceptions=False)
    assert isinstance(failure.value.__cause__, HorovodBuildError)


@pytest.mark.timeout(1200)
def test_real_wheel(tmp_path):
    """Builds for minutes if the user's cache has no wheel for this interpreter."""
    path = build()
    assert Path(path).stat().st_size < 3_000_000
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "site")
    code = """
        import horovod.tensorflow as hvd
        hvd.init()
        print(hvd.__file__, hvd.gloo_built(), hvd.size())
    """
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[-1] == f"{tmp_path}/site/horovod/tensorflow/__init__.py True 1"
    (library,) = (tmp_path / "site/horovod/tensorflow").glob("mpi_lib*.so")
    dynamic = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "NEEDED" in dynamic
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
