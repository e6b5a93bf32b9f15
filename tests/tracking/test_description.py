"""The run's description: what it says of a job, that nothing breaks out of it, and that what a person writes beside it stays."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_folder import line
from mlflow.exceptions import MlflowException
from plans import bare_plan

from mlflow_batchai.job.metrics import Pace
from mlflow_batchai.job.states import JobState
from mlflow_batchai.tracking.description import BEGIN, END, TAG, Description, Facts, block, code, commands, markdown, merged
from mlflow_batchai.tracking.runs import LONGEST_TAG

PLAN = bare_plan(name="digits-3f2a1c", cluster="gpus", experiment="it's mine", node_count=2, ranks=4, retries_left=2)
RUNNING = JobState("running")
FAILED = JobState("failed", 3, ({"code": "JobFailed"},), "rank 1 on node-1 exited with code 3\nTraceback\nValueError: x")


def test_a_job_that_runs():
    assert markdown(Facts(PLAN, 1, RUNNING, ["b", "a"], "", Pace(3, 12, 1_800_000_000_000), 2)).splitlines() == [
        "**running**, attempt 1 of at most 3",
        "",
        "- job `digits-3f2a1c`, cluster `gpus`",
        "- 2 nodes on `a`, `b`, 4 ranks",
        "- epoch 3 of 12, expected end 2027-01-15 08:00 UTC",
        "",
        "```sh",
        """batchai job attach digits-3f2a1c -w default -e 'it'"'"'s mine'""",
        """batchai job logs -f digits-3f2a1c -w default -e 'it'"'"'s mine'""",
        """batchai job terminate digits-3f2a1c -w default -e 'it'"'"'s mine'""",
        "```",
    ]


def test_a_job_that_has_ended():
    said = markdown(Facts(replace(PLAN, retries_left=0), 3, FAILED, [], "", Pace(3, 12, 1), None, notes=["a `note`"]))
    assert said.startswith(
        "**failed**, attempt 3, `JobFailed`, exit code 3: `ValueError: x`\n\n"
        "```\nrank 1 on node-1 exited with code 3\nTraceback\nValueError: x\n```\n\n- job `digits-3f2a1c`"
    )
    assert "- 2 nodes, 4 ranks\n- epoch 3 of 12\n\n- `` a `note` ``\n" in said
    terminated = JobState("failed", None, ({"code": "JobTerminate"},), "terminated by ada", terminated=True)
    said = markdown(Facts(PLAN, 1, terminated, last_step=41))
    assert said.startswith("**terminated**, attempt 1 of at most 3, `JobTerminate`\n") and "- last step 41\n" in said
    assert [words.split()[2] for words in commands(PLAN, FAILED)] == ["logs", "file", "retry"]
    assert [words.split()[2] for words in commands(PLAN, JobState("succeeded", 0))] == ["logs", "file"]


def test_no_line_is_so_wide_that_the_page_breaks():
    reason = "rank 0 on node-0 exited with code 1\n" + "  indented  and wide " * 12 + "\n" + "x" * 200
    said = markdown(Facts(replace(PLAN, name="n" * 40), 1, JobState("failed", 1, (), reason)))
    blocks = re.findall("```(.*?)```", said, re.DOTALL)
    assert max(len(line) for each in blocks for line in each.splitlines()) <= 70
    assert "".join(blocks[0].split()) == "".join(reason.split())
    assert f"batchai job logs {'n' * 40} \\\n  -w default -e 'it'" in blocks[1]


def test_what_waits_many_nodes_and_a_clock_of_its_own():
    assert markdown(Facts(PLAN, 1, JobState("queued"), waits="no node answers")).count("\n```\nno node answers\n```\n") == 1
    many = markdown(Facts(replace(PLAN, node_count=20), 1, RUNNING, [f"h{number:02}" for number in range(20)]))
    assert "`h07`, ...," in many and "h08" not in many
    assert "expected end unknown" in markdown(Facts(PLAN, 1, RUNNING, pace=Pace(1, 2, 10**18)))


@pytest.mark.parametrize("experiment", ["a b", "$(touch x)", "-e", "x\ny", '"; rm -rf /', "größe"])
def test_commands_are_one_word_a_value(experiment):
    for text in commands(replace(PLAN, experiment=experiment), RUNNING):
        words = shlex.split(text)
        assert (words[:2], words[words.index("-e") + 1 :]) == (["batchai", "job"], [experiment])


def is_one_block(text):
    """Whether a fenced block ends at its last line, as CommonMark and MLflow's converter have it."""
    fence = re.match("`+", text)[0]
    *inside, last = text.split("\n")[1:]
    return last == fence and not any(fence in each for each in inside)


@given(st.lists(st.sampled_from([*"`~\n\r a\x1b[m<!->", "<!--", "```"]), max_size=60).map("".join))
def test_no_text_breaks_out(text):
    assert is_one_block(block(text))
    assert not re.search("<!--|\x1b", block(text) + code(text)) and "\n" not in code(text)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 20), st.integers(1000, LONGEST_TAG))
def test_it_fits(lines, width, notes, room):
    state = JobState("failed", 1, (), "why\n" + "\n".join(["x" * width] * lines) + "\nthe last")
    said = markdown(Facts(PLAN, 1, state, notes=["n" * 300] * notes), room)
    assert len(said) <= room and "```\nwhy\n" in said and "\nthe last\n```" in said


MINE = f"{BEGIN}\nours\n{END}"


@pytest.mark.parametrize(
    ("present", "after"),
    [
        ("", MINE),
        ("mine", f"mine\n\n{MINE}"),
        (f"before\n{BEGIN}\nold\n{END}\nafter", f"before\n{MINE}\nafter"),
        (MINE, MINE),
        # A person has removed a part of it: what is left is his.
        (f"{BEGIN}\nold", f"{BEGIN}\nold\n\n{MINE}"),
        (f"{BEGIN}\nold\nmine\n\n{BEGIN}\nold\n{END}", f"{BEGIN}\nold\nmine\n\n{MINE}"),
        (f"old\n{END}\nmine", f"old\n{END}\nmine\n\n{MINE}"),
    ],
)
def test_what_a_person_wrote_stays(present, after):
    assert merged(present, lambda room: "ours") == after
    # Nothing is added again and again.
    again = merged(after, lambda room: "newer")
    if present != f"old\n{END}\nmine":
        assert again == after.replace("ours", "newer")


def test_a_note_that_leaves_no_room_stays_as_it_is():
    note = "x" * (LONGEST_TAG - 100)
    assert merged(note, lambda room: markdown(Facts(PLAN, 1, RUNNING), room)) == note


def test_it_is_sent_when_it_has_changed_and_not_too_often(relayed):
    made, client, _ = relayed
    run_id, now = made.plan["runId"], [0.0]
    description = Description(client, run_id, lambda: now[0])

    def sent(facts):
        client.calls.clear()
        description.show(facts)
        return client.calls

    first = Facts(PLAN, 1, JobState("queued"))
    assert sent(first) == ["get_run", "set_tag"]
    # Another state is told at once, other news after a while, no news never.
    assert sent(Facts(PLAN, 1, RUNNING)) == ["get_run", "set_tag"]
    now[0] = 9.0
    assert sent(Facts(PLAN, 1, RUNNING, pace=Pace(1, 2, None))) == []
    client.set_tag(run_id, TAG, "mine\n\n" + client.get_run(run_id).data.tags[TAG])
    now[0] = 10.0
    client.before["get_run"] = [MlflowException("down")]
    with pytest.raises(MlflowException):
        sent(Facts(PLAN, 1, RUNNING, pace=Pace(1, 2, None)))
    assert sent(Facts(PLAN, 1, RUNNING, pace=Pace(1, 2, None))) == ["get_run", "set_tag"]
    now[0] = 100.0
    assert sent(Facts(PLAN, 1, RUNNING, pace=Pace(1, 2, None))) == []
    note = client.get_run(run_id).data.tags[TAG]
    assert note.startswith(f"mine\n\n{BEGIN}\n**running**") and "- epoch 1 of 2\n" in note and note.count(BEGIN) == 1
    # Who comes after us finds it as it should be.
    client.calls.clear()
    Description(client, run_id).show(Facts(PLAN, 1, RUNNING, pace=Pace(1, 2, None)))
    assert client.calls == ["get_run"]


def test_a_relay_says_how_it_goes_and_how_it_ended(relayed):
    made, client, relay = relayed
    ours, run_id = relay(), made.plan["runId"]
    made.announce(0)
    made.segment(0, line("Epoch 1/3", t=1_000_000), line("Epoch 2/3", t=1_060_000))
    job = ours._job
    ours.step()
    ours.describe(job.state())
    note = client.get_run(run_id).data.tags[TAG]
    assert "- 1 node on `h`, 1 rank\n- epoch 2 of 3, expected end 1970-01-01 00:19 UTC\n" in note
    client.set_tag(run_id, TAG, note + "\n\nmine")
    made.verdict("failed", reason="rank 0 failed\n```\n<b>", errors=[{"code": "JobFailed"}], exitCode=3)
    ours.finish(job.state())
    note = client.get_run(run_id).data.tags[TAG]
    assert "**failed**" in note and "- epoch 2 of 3\n" in note and note.endswith(f"{END}\n\nmine")
