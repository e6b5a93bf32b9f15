"""MLproject files: what MLflow would take is taken, everything else is one sentence with the file's name and the key in it."""

from __future__ import annotations

import shlex

import pytest

from mlflow_batchai.documents.command import translate
from mlflow_batchai.documents.mlproject import (
    EntryPoint,
    Parameter,
    bind,
    command_entry_point,
    find_entry_point,
    load_project,
    undeclared,
)
from mlflow_batchai.errors import BatchAIError, DocumentError, ParameterError, ProjectError

TYPES = {"lr": "float", "epochs": "int", "shuffle": "bool", "data": "path", "where": "uri", "note": "string"}
DEFAULTS = {"lr": None, "epochs": "10", "shuffle": "true", "data": "", "where": "s3://x/y", "note": "a note"}
MAIN = EntryPoint("main", "python train.py", {name: Parameter(name, kind, DEFAULTS[name]) for name, kind in TYPES.items()})


@pytest.fixture
def project(tmp_path):
    def make(text=None, name="MLproject", **files):
        if text is not None:
            (tmp_path / name).write_text(text, encoding="utf-8")
        for file, content in files.items():
            (tmp_path / file.replace("__", ".")).write_text(content, encoding="utf-8")
        return load_project(tmp_path)

    return make


def test_a_whole_file(project):
    made = project(
        """
name: Cifar
python_env: env.yaml
batchai: {cluster: local}
entry_points:
  main:
    parameters:
      lr: {type: float, default: 1e-3}
      epochs: int
      note: {default: 007}
      off: {type: boolean, default: no}
    command: "python train.py {lr}"
  2: {command: ls}
""",
        env__yaml="",
    )
    assert (made.name, made.batchai, made.python_env.name) == ("Cifar", {"cluster": "local"}, "env.yaml")
    main = find_entry_point(made, "main")
    found = {name: (parameter.type, parameter.default) for name, parameter in main.parameters.items()}
    assert found == {"lr": ("float", "1e-3"), "epochs": ("int", None), "note": ("string", "007"), "off": ("bool", "no")}
    assert find_entry_point(made, "2").command == "ls"


@pytest.mark.parametrize("name", ["mlproject", "MLPROJECT"])
def test_any_case_of_its_name_and_the_default_python_env(project, name):
    made = project("name: x", name=name, python_env__yaml="")
    assert (made.name, made.python_env.name) == ("x", "python_env.yaml")


def test_a_folder_without_one_has_its_scripts(project, tmp_path):
    made = project(train__py="")
    assert (made.name, made.entry_points, made.source) == (tmp_path.name, {}, str(tmp_path))
    entry = find_entry_point(made, "train.py")
    assert (entry.command, entry.declared) == ("python train.py", False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("entry_points: [1]", "entry_points should map"),
        *(
            (f"entry_points: {{main: {entry}}}", "entry_points.main has no command")
            for entry in ("{}", "{command: ' '}", "{command: [a]}", "ls")
        ),
        ("entry_points: {main: {command: ls, parameters: [a]}}", "entry_points.main.parameters should map"),
        ("entry_points: {main: {command: ls, parameters: {a: [1]}}}", "entry_points.main.parameters.a should be a type"),
        ("entry_points: {main: {command: ls, parameters: {a: }}}", "entry_points.main.parameters.a should be a type"),
        ("entry_points: {main: {command: ls, parameters: {a: flaot}}}", "parameters.a has the unknown type 'flaot'"),
        ("python_env: nope.yaml", "python_env names 'nope.yaml'"),
        ("conda_env: nope.yaml", "conda_env names 'nope.yaml'"),
        ("python_env: a\ndocker_env: {image: x}", "python_env and docker_env are given"),
        ("batchai: [1]", "batchai should be a mapping"),
        ("[1, 2]", ""),
        ("a: [", ""),
    ],
)
def test_refused(project, tmp_path, text, words):
    with pytest.raises(BatchAIError) as error:
        project(text)
    assert isinstance(error.value, (ProjectError, DocumentError))
    assert words in str(error.value)
    assert str(tmp_path / "MLproject") in str(error.value)
    assert "\n" not in str(error.value)


def test_entry_points_that_arent_there(project):
    made = project("entry_points: {train: {command: ls}, eval: {command: ls}}")
    with pytest.raises(ProjectError, match="there is no entry point 'main'; the project has: eval, train"):
        find_entry_point(made, "main")
    with pytest.raises(ProjectError, match=r"no entry point 'x\.py', and no script of that name"):
        find_entry_point(made, "x.py")


@pytest.mark.parametrize(
    ("text", "words"), [(None, "{} has no MLproject file"), ("name: x", "{}/MLproject has no entry_points")]
)
def test_a_folder_without_entry_points(tmp_path, text, words):
    """The wrong folder, most often."""
    if text:
        (tmp_path / "MLproject").write_text(text)
    with pytest.raises(ProjectError) as caught:
        find_entry_point(load_project(tmp_path), "main")
    assert str(caught.value).startswith(words.format(tmp_path))


@pytest.mark.parametrize("name", ["../outside.py", "sub/../../outside.py", "{root}/outside.py"])
def test_a_script_outside_of_the_project_is_none_of_it(tmp_path, name):
    (tmp_path / "project" / "sub").mkdir(parents=True)
    (tmp_path / "outside.py").write_text("", encoding="utf-8")
    with pytest.raises(ProjectError, match="no script of that name in the project"):
        find_entry_point(load_project(tmp_path / "project"), name.replace("{root}", str(tmp_path)))


@pytest.mark.parametrize("name", ["my script.py", "it's {x}.py", "a;b$(c).sh"])
def test_a_scripts_name_is_no_shell_text(tmp_path, name):
    (tmp_path / name).write_text("", encoding="utf-8")
    command = find_entry_point(load_project(tmp_path), name).command
    assert shlex.split(translate(command, {}, "s"))[1:] == [name]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("lr", ["1", "-1e-3", "inf", " 2 ", "1_0"], ["", "x", "1,5", "0x1", "1e"]),
        ("epochs", ["1", "-5", "+7"], ["", "1.0", "1e3", "x", "0x10"]),
        ("shuffle", ["true", "False", "YES", "off", "1", "0"], ["", "2", "wahr", "t"]),
        ("where", ["s3://x", "file:x"], ["x", ""]),
        ("note", ["", "x\ny", "'"], []),
        ("data", ["", "/x", "a b"], []),
    ],
)
def test_types(name, good, bad):
    for text in good:
        values = bind(MAIN, {"lr": "1", name: text}, "MLproject")
        assert next(value.text for value in values if value.parameter.name == name) == text
    for text in bad:
        with pytest.raises(ParameterError) as error:
            bind(MAIN, {"lr": "1", name: text}, "MLproject")
        assert f"MLproject: parameter '{name}' should be" in str(error.value)
        assert f"not '{text}'" in str(error.value)


def test_defaults_and_values_that_arent_text():
    values = {value.parameter.name: (value.text, value.given) for value in bind(MAIN, {"lr": 0.5, "shuffle": False}, "s")}
    defaults = {name: (DEFAULTS[name], False) for name in ("epochs", "data", "where", "note")}
    assert values == {"lr": ("0.5", True), "shuffle": ("False", True), **defaults}
    assert "a\udce9" in [value.text for value in bind(MAIN, {"lr": "1", "note": "a\udce9"}, "MLproject")]
    with pytest.raises(ParameterError, match="MLproject: parameter 'note' holds half a letter"):
        bind(MAIN, {"lr": "1", "note": "a\ud800"}, "MLproject")
    with pytest.raises(ParameterError, match="'n' should be a whole number, not 'ten'"):
        bind(EntryPoint("main", "ls", {"n": Parameter("n", "int", "ten")}), {}, "s")


def test_all_faults_at_once_a_line_each():
    with pytest.raises(ParameterError) as error:
        bind(MAIN, {"epocs": "1", "a;b": "1", "epochs": "many", "note": "a\0b"}, "MLproject")
    lines = str(error.value).splitlines()
    starts = [
        "MLproject: parameter 'lr' (float) has no default and was not given",
        "MLproject: parameter 'a;b' has a name that MLflow doesn't take",
        "MLproject: parameter 'epochs' should be a whole number",
        "MLproject: parameter 'note' holds a NUL byte",
    ]
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


def test_what_is_not_declared_is_passed_on_with_a_notice():
    """As MLflow's own backend has it, and no shell text for that."""
    values = bind(MAIN, {"lr": "1", "epocs": "1 2", "zzz": ""}, "s")
    assert [(value.parameter.name, value.text) for value in values if value.extra] == [("epocs", "1 2"), ("zzz", "")]
    first, second = undeclared(MAIN, values)
    assert first == "entry point 'main' declares no parameter 'epocs', so its command gets --epocs; did you mean 'epochs'?"
    assert second.endswith("it declares: lr, epochs, shuffle, data, where, note")
    line = translate("python t.py {lr}\n", {"lr": "L", "epocs": "E"}, "s", extras=["epocs"])
    assert line == 'python t.py "${L}" --epocs "${E}"'
    assert translate("echo '<> '", {"extra": "E"}, "s", extras=["extra"]) == "echo '<> ' --extra \"${E}\""
    for command in ("eval", "python t.py {{epocs}} # why", "bash -c", "echo 'a", "python t.py\n# end\n", "python t.py \\\n"):
        with pytest.raises(ProjectError, match="parameter 'epocs'"):
            translate(command, {"epocs": "E"}, "s", extras=["epocs"])


@pytest.mark.parametrize(
    "words", ["train.py", "python train.py", "python -u -B train.py", "/bin/bash -e train.sh", "python3.11 -u -m package.train"]
)
def test_of_a_command_that_was_typed_the_scripts_arguments_are_the_parameters(words):
    assert command_entry_point([*words.split(), "--lr", "0.1"]).arguments == {"lr": "0.1"}
