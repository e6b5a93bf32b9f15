"""A build's log becomes a few words of progress, or the lines that say why it failed."""

from mlflow_batchai.horovod_wheel.pip import error_lines, progress_texts


def test_percentages_only_rise_and_nothing_is_said_twice():
    lines = [
        "  Running CMake in build/temp.linux-x86_64-cpython-311/RelWithDebInfo:",
        "  [ 1%] Building CXX object third_party/gloo/gloo/CMakeFiles/gloo.dir/allgather.cc.o",
        "[ 1%] b",
        "  copying horovod/runner/launch.py -> build/lib/horovod/runner",
        "  Downloading x-1.0.tar.gz [50% done]",
        "",
        "[ 7%] c",
        "[ 6%] d",
        "[100%] e",
        "installing to build/bdist.x",
    ]
    assert list(progress_texts(lines)) == [
        "configuring",
        "compiling 1 %",
        "compiling 7 %",
        "compiling 100 %",
        "packing the wheel",
    ]


def test_the_lines_with_errors_are_picked():
    log = """
  copying horovod/error.py -> build/lib/horovod/error.py
  [ 10%] Building CXX object gloo/CMakeFiles/gloo.dir/common/error.cc.o
  /usr/bin/c++ -Werror -o x
  /src/a.cc:23:10: fatal error: highwayhash/arch_specific.h: No such file or directory
  compilation terminated.
  make[2]: *** [a.o] Error 1
"""
    assert error_lines(log) == [
        "/src/a.cc:23:10: fatal error: highwayhash/arch_specific.h: No such file or directory",
        "make[2]: *** [a.o] Error 1",
    ]


def test_cmakes_message_follows_its_error():
    log = """
  CMake Error at FindPackageHandleStandardArgs.cmake:230 (message):
    Could NOT find CUDA (missing: CUDA_TOOLKIT_ROOT_DIR)

  Call Stack (most recent call first):
  -- Configuring incomplete
  error: subprocess-exited-with-error
  note: This error originates from a subprocess, and is likely not a problem with pip.
  ERROR: Failed building wheel for horovod
"""
    assert error_lines(log) == [
        "CMake Error at FindPackageHandleStandardArgs.cmake:230 (message):",
        "Could NOT find CUDA (missing: CUDA_TOOLKIT_ROOT_DIR)",
        "Call Stack (most recent call first):",
    ]


def test_without_such_lines_the_end_of_the_log_is_picked():
    assert error_lines("\n".join(f"line {n}" for n in range(40)), 3) == ["line 37", "line 38", "line 39"]
