"""A closed file is read whole or not at all, whatever text its records hold and wherever it was cut."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.protocol import JobPaths, TornFileError, decode, decode_one, encode

NASTY = [
    {"k": "log", "x": "a\nb\r\n\x00\u2028\u2029\x85 für 🚂 \\ \" ' \ufffe"},
    {"k": "log", "x": "lone \udc80 and \\\udcff at the end \ud800"},
    {"end": 2, "crc32": "00000000"},
    {},
    {"n": [1, 1.5, None, True, math.inf, {"ü": "}\n"}]},
]
TEXT = st.text(st.characters(codec=None))  # surrogates too


@given(st.lists(st.dictionaries(TEXT, st.one_of(TEXT, st.integers(), st.none())), max_size=4))
def test_any_record_comes_back_but_for_split_pairs(records: list[dict[str, object]]) -> None:
    """Two lone surrogates that stand side by side make one character: Python's JSON reads them so."""
    assert decode(encode(records)) == json.loads(json.dumps(records))


def test_what_was_cut_damaged_or_is_still_being_written_is_no_file() -> None:
    """A resize before the write shows zeros; a writer that began anew leaves an older end behind."""
    data = encode(NASTY)
    small = encode([{"k": "a"}, {"k": "b"}])
    flipped = ((at, byte) for at in range(len(small)) for byte in (0, small[at] ^ 1))
    for torn in (
        *(data[:cut] for cut in range(len(data))),
        *(data[:cut] + bytes(len(data) - cut) for cut in range(len(data))),
        *(small[:at] + bytes([byte]) + small[at + 1 :] for at, byte in flipped),
        *(data + b"\0", data + b"\n", data + data, data[1:], encode([{}]) + b"}\n"),
        *(b"}\n", b"[]\n", b"3}\n", b"\xff}\n"),
    ):
        with pytest.raises(TornFileError):
            decode(torn)
    assert (decode(data), decode(encode([])), decode_one(encode([{"a": 1}]))) == (NASTY, [], {"a": 1})
    for records in ([], [{}, {}]):
        with pytest.raises(TornFileError):
            decode_one(encode(records))


def test_paths_have_one_place_each() -> None:
    paths = JobPaths("/ws/job/", 3)
    assert paths.announce(2) == "ws/job/batchai/attempts/3/nodes/2/announce.json"
    assert paths.exit(0) == "ws/job/batchai/attempts/3/nodes/0/exit.json"
    assert paths.segment("agent-1", 2999) == "ws/job/batchai/attempts/3/events/0002/agent-1-00002999.jsonl"
    assert paths.verdict_file.startswith(paths.verdict + "/")
    assert paths.cursor(4).startswith(paths.lease(4) + "/")
    assert protocol.object_path("ab" * 32) == ".batchai/objects/ab/" + "ab" * 32


def test_every_error_code_has_its_message() -> None:
    codes = {
        value for name, value in vars(protocol).items() if name.isupper() and isinstance(value, str) and value[0].isupper()
    }
    assert codes - {protocol.MARK_VARIABLE, protocol.NODE_VARIABLE, protocol.AGENT_VARIABLE} == set(protocol.MESSAGES)
