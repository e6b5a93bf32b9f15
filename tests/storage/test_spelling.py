"""Names that Azure Files doesn't take, as rclone 1.75 spelled them on a share."""

from __future__ import annotations

from mlflow_batchai.storage.spelling import on_mount, on_share

SPELLED = {
    "a:b.h5": "a\uff1ab.h5",
    "back\\slash": "back\uff3cslash",
    "ctl\x01": "ctl\u2401",
    "del\x7f": "del\u2421",
    "dot.": "dot\uff0e",
    'dq"x': "dq\uff02x",
    "fw\uff1ax": "fw\u201b\uff1ax",
    "lt<gt>": "lt\uff1cgt\uff1e",
    "pi|pe": "pi\uff5cpe",
    "q?/st*r": "q\uff1f/st\uff0ar",
    "\u201bq": "\u201b\u201bq",
    "plain-\u9577.txt": "plain-\u9577.txt",
}


def test_both_ways() -> None:
    for name, spelled in SPELLED.items():
        assert (on_share(name), on_mount(spelled)) == (spelled, name)


def test_what_is_no_spelling_stays() -> None:
    for name in ("bad\u201bFF.txt", "\u201b", "a/\uff0e/b"):
        assert on_mount(name) == name
    assert ".." not in on_mount("a/\uff0e\uff0e/b").split("/")
