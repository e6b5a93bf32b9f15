"""Node and client choose the same model of those that a job has saved."""

from pathlib import Path

from mlflow_batchai.agent.model_check.choice import choose, found_in


def paths(folder: Path, *arguments) -> list[str]:
    return [Path(path).relative_to(folder).as_posix() for path in found_in([str(folder)], *arguments)]


def test_what_is_found(tmp_path: Path) -> None:
    for name in (
        *("a.h5", "b.weights.h5", "c.keras", "d.txt", "checkpoints/e.h5", "sub/f.h5", "net.pt"),
        *("exported/saved_model.pb", "exported/assets/x.h5", "whole/MLmodel", "whole/data/model.keras"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert paths(tmp_path, None) == ["a.h5", "c.keras", "net.pt", "exported", "sub/f.h5", "whole"]
    assert paths(tmp_path, "checkpoints/e.h5") == ["checkpoints/e.h5"]
    assert paths(tmp_path, "exported") == ["exported"]
    assert paths(tmp_path, "none.h5") == []


def test_which_is_chosen() -> None:
    def record(path, **more):
        return {"type": "model", "path": path, "meta": {}, **more}

    found = [record("/o/a.h5", found=True), record("/o/exported", found=True), record("/o/z.pt", found=True)]
    assert choose([], None) is None
    assert choose(found, None) == found[1], "what only PyTorch can load comes last"
    assert choose(found[2:], None) == found[2]
    reported = [record("/o/b.h5"), record("/o/c.h5")]
    assert choose(reported + found, None) == reported[1]
    assert choose(reported + found, "a.h5") == found[0]
    assert choose(reported + found, "exported/") == found[1]
    assert choose(reported + found, "d.h5") is None
    said = record("/o/b.h5", chosen=True)
    assert choose([*reported, said, *found], None) == said
