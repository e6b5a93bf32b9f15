"""Files that a training script writes into its own job folder direct no client: real jobs whose ranks try it.

On the local cluster a rank is the submitter's own user and could read the key as well; these ranks don't, as on nodes where
they are another user.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from plans import toy_plan

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.attempt import overrides
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.share import mountfiles
from mlflow_batchai.client import lookup
from mlflow_batchai.errors import JobChangedError
from mlflow_batchai.tracking import runs

# Changes a record of the job folder as somebody without the key can, then has the client read all of it anew.
FORGE = """
import json, os, sys, time, zlib
from pathlib import Path

job = Path(os.environ["AZ_BATCHAI_STDOUTERR_DIR"]).resolve().parent / "batchai"

def closed(record):
    body = (json.dumps(record) + "\\n").encode()
    return body + json.dumps({"end": 1, "crc32": "%08x" % zlib.crc32(body)}, separators=(",", ":")).encode() + b"\\n"

def change(name, **fields):
    path = job / name
    record = json.loads(path.read_text().splitlines()[0])
    path.write_bytes(closed({**record, **fields}))

def reread():
    '''Have the test end the follower, and wait until another one has come.'''
    number = max(int(path.name) for path in (job / "relay").iterdir())
    (job / "forged").touch()
    until = time.monotonic() + 60
    while not (job / "relay" / str(number + 1)).exists() and time.monotonic() < until:
        time.sleep(0.1)

while not list((job / "relay").glob("*/cursor.json")) or not (job / "attempts/1/submitted.json").exists():
    time.sleep(0.1)
print("forging", flush=True)
"""
PRIVATE = "the private key of the submitter"


def forging(world: Any, code: str, batchai: str = "properties: {nodeCount: 1, horovodSettings: {}}") -> Path:
    """A project whose rank forges."""
    return world.project(FORGE + code, batchai=batchai)


def struck(world: Any, project: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """``mlflow run`` of a project that forges; its follower is killed then, so that the next one reads all of the job anew."""
    process = world.start(world.command(project), **environment)
    world.wait(lambda: [run for run in world.runs() if "batchai.job" in run.data.tags])
    (run,) = [run for run in world.runs() if "batchai.job" in run.data.tags]
    world.wait(lambda: (world.folder(run) / "batchai" / "forged").exists(), what="it forges")
    world.lose_followers()
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def sent(world: Any) -> str:
    """All that lies among the artifacts of any run, as one text."""
    return "\n".join(path.read_text(errors="replace") for path in (world.root / "mlruns").rglob("*") if path.is_file())


def ended_by_its_mark(world: Any, run: Any, what: str) -> None:
    """The job was ended with the sentence, and nothing of it was obeyed."""
    run = world.client.get_run(run.info.run_id)
    assert run.info.status == "FAILED"
    assert f"the {what} of job {run.data.tags['batchai.job']} was changed on the share" in run.data.tags["batchai.reason"]
    world.wait(lambda: not world.job_processes() and not world.agents(), what="processes of the job are left")


def test_a_plan_of_the_ranks_own_directs_nobody(world: Any) -> None:
    """It sends no file of the submitter's, gives no attempt his password, and writes no other run, though that has FINISHED."""
    home, trap = world.root / "ada", world.root / "trap"
    home.mkdir(mode=0o700)
    (home / "id_rsa").write_text(PRIVATE)
    victim = world.client.create_run("0", tags={"who": "somebody else"})
    world.client.set_terminated(victim.info.run_id, "FINISHED")
    project = forging(
        world,
        f"""
print("has", os.environ.get("MLFLOW_TRACKING_PASSWORD"), flush=True)
if not (job / "attempts/2").exists():
    plan = json.loads((job / "plan.json").read_text().splitlines()[0])
    trap = Path({str(trap)!r})
    trap.mkdir()
    (trap / "outputs").symlink_to({str(home)!r})
    volume = {{**plan["volumes"][0], "scope": "job", "path": "x", "share": "file:///"}}
    change(
        "plan.json", segment="", volumes=[*plan["volumes"], volume], runId={victim.info.run_id!r},
        secretVariables=["MLFLOW_TRACKING_PASSWORD"],
        outputDirectories=[{{"id": "EVIL", "pathPrefix": "$AZ_BATCHAI_JOB_MOUNT_ROOT/x" + str(trap), "pathSuffix": ""}}],
    )
    reread()
    sys.exit(3)
""",
        "retries: 1\nproperties: {nodeCount: 1, horovodSettings: {}}",
    )
    result = struck(world, project, MLFLOW_TRACKING_PASSWORD="canary-of-the-client")
    assert result.returncode == 1, result.stdout
    (run,) = [run for run in world.runs() if "batchai.job" in run.data.tags]
    ended_by_its_mark(world, run, "plan")
    assert PRIVATE not in sent(world)
    shared = b"".join(path.read_bytes() for path in (world.home / "share").rglob("*") if path.is_file())
    assert "canary-of-the-client" not in result.stdout and b"canary-of-the-client" not in shared
    found = world.client.get_run(victim.info.run_id)
    assert found.info.status == "FINISHED" and not found.data.params and not found.data.metrics
    assert not [tag for tag in found.data.tags if tag.startswith("batchai.")]


def test_a_forged_handle_ends_no_other_process(world: Any) -> None:
    """A folder of the rank's as a node's, whose reservation names a process of the submitter's; nobody can claim the verdict."""
    victim = subprocess.Popen(["sleep", "300"])
    try:
        trap = world.root / "trap"
        (trap / "tickets").mkdir(parents=True)
        agent = {"pid": victim.pid, "started": proc.start_time(victim.pid), "boot": proc.boot_id(), "root": str(trap)}
        (trap / "tickets" / "1.agent").write_text(json.dumps({**agent, "log": "/dev/null"}))
        project = forging(
            world,
            f"""
(job / "attempts/1/verdict").mkdir()
change("attempts/1/submitted.json", ticket=1, nodes=[{{"name": "0", "id": "", "root": {str(trap)!r}}}])
reread()
time.sleep(300)
""",
        )
        result = struck(world, project)
        assert result.returncode == 1, result.stdout
        assert victim.poll() is None, "a process that is none of the job's was killed"
        ended_by_its_mark(world, world.last, "record of the agents")
    finally:
        victim.kill()
        victim.wait()


def test_a_forged_lease_makes_no_follower_leave(world: Any) -> None:
    """Folders of leases, then cursors that say that all is done; nobody waits for this job, who could start another follower."""
    project = forging(
        world,
        """
from mlflow_batchai.training import report
for number in range(2, 6):
    (job / "relay" / str(number)).mkdir()
time.sleep(2)
report.log({"loss": 0.5}, step=7)
time.sleep(1)
cursor = {"counter": 1, "attempt": 1, "finished": True, "released": True, "holder": {}, "memory": {"notes": ["forged"]}}
for number in ("6", "1000000"):
    (job / "relay" / number).mkdir()
    (job / "relay" / number / "cursor.json").write_bytes(closed(cursor))
time.sleep(2)
""",
        "wait: false\nproperties: {nodeCount: 1, horovodSettings: {}}",
    )
    assert world.run(project).returncode == 0
    world.wait(lambda: world.last.info.status == "FINISHED", what="its run ends")
    assert world.last.data.metrics["loss"] == 0.5 and "forged" not in world.last.data.tags.get("batchai.notes", "")
    world.wait_gone()


def test_a_forged_retry_starts_nothing(world: Any) -> None:
    """A verdict that a rank wrote has the job start again, which its document doesn't."""
    project = forging(
        world,
        """
verdict = {"executionState": "queued", "exitCode": 3, "errors": [{"code": "JobFailed"}], "reason": "again", "terminated": False,
           "by": "agent-0", "endTime": 1, "retry": True, "retriesLeft": 1000000, "next": 2}
(job / "attempts/1/verdict").mkdir()
(job / "attempts/1/verdict/verdict.json").write_bytes(closed(verdict))
time.sleep(300)
""",
    )
    result = world.run(project)
    assert result.returncode == 1
    assert "no retries left" in world.last.data.tags["batchai.reason"]
    assert not (world.folder() / "batchai" / "attempts" / "2" / "submitted.json").exists()
    world.wait_gone()


@pytest.mark.parametrize("record", ["plan", "record of the attempt"])
@pytest.mark.parametrize("told", ["the digest of another", "none"])
def test_an_agent_runs_no_other_plan_than_its_submitters(tmp_path: Path, record: str, told: str) -> None:
    """Whoever can write the share changes the plan, or what an attempt has of its own, before a node reads it."""
    plan = toy_plan(tmp_path, command=f"touch {tmp_path}/pwned")
    own = overrides.record(0, overrides.MANUAL, "")
    paths = protocol.JobPaths(plan["folder"], 2)
    mountfiles.write_closed(str(tmp_path), paths.plan, [plan])
    mountfiles.write_closed(str(tmp_path), paths.overrides, [own])
    digests = {"plan": protocol.digest(plan), "attempt": protocol.digest(own)}
    key = "plan" if record == "plan" else "attempt"
    digests |= {key: protocol.digest({**plan, "command": "true"}) if told != "none" else None}
    options = ["--attempt=2", "--node=0", "--granted", f"--share={tmp_path}", f"--root={tmp_path}/r"]
    code = "import sys; from mlflow_batchai.agent import agent; sys.exit(agent.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *options, f"--folder={plan['folder']}"],
        input=json.dumps(digests),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"the {record} at {tmp_path}/workspaces/") and "not what its submitter wrote" in done.stderr
    assert not (tmp_path / "pwned").exists() and not (tmp_path / "r").exists()


@pytest.fixture
def asleep(world: Any) -> Any:
    """A job that runs, followed by nobody."""
    result = world.run(
        world.project("import time; print('up', flush=True); time.sleep(300)", batchai="wait: false\nretries: 1")
    )
    assert result.returncode == 0, result.stderr
    world.wait(lambda: world.job_processes(), what="the job trains")
    world.lose_followers()
    return world


def variations(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What somebody without the key can make of a signed record."""
    mac = str(record["mac"])
    other = {key: value for key, value in record.items() if key != "mac"}
    fingerprint, _, code = mac.partition(":")
    return {
        "another value": {**record, "nodeCount": 1 + record["nodeCount"]},
        "one more key": {**record, "more": 1},
        "one key fewer": {key: value for key, value in record.items() if key != "ranks"},
        "no signature": other,
        "an empty one": {**record, "mac": ""},
        "none of text": {**record, "mac": [mac]},
        "another fingerprint": {**record, "mac": f"{'0' * 16}:{code}", "ranks": 7},
        "a shorter one": {**record, "mac": mac[:-1]},
        "in capitals": {**record, "mac": f"{fingerprint}:{code.upper()}"},
        "letters of no alphabet": {**record, "mac": mac + "\u00e9"},
        "huge": {**record, "mac": mac + "0" * 100_000},
        "of another file": {**other, "mac": "SUBMITTED"},
        "nothing": {},
        "next to nothing": {"nodeCount": 1},
        "more nodes than there are": {**other, "nodeCount": 2**62},
    }


def test_no_variation_of_a_signed_plan_is_obeyed(asleep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor that of another job of the same user, or none; a command says so in a sentence; the job can be terminated all the same."""
    run, folder, cli = asleep.last, asleep.folder() / "batchai", Cli(asleep)
    path = folder / "plan.json"
    plan = protocol.decode_one(path.read_bytes())
    cases = variations(plan)
    cases["of another file"]["mac"] = protocol.decode_one((folder / "attempts/1/submitted.json").read_bytes())["mac"]
    assert asleep.run(asleep.project("print(1)", name="other")).returncode == 0
    cases["of another job"] = protocol.decode_one((asleep.folder() / "batchai" / "plan.json").read_bytes())
    monkeypatch.setenv("BATCHAI_HOME", str(asleep.home))
    store = runs.absolute(asleep.uri, Path("/"))
    for name, record in {**cases, "none at all": None}.items():
        path.unlink() if record is None else path.write_bytes(protocol.encode([record]))
        try:
            lookup.find(run.info.run_id, store)
            raise AssertionError(f"{name} was obeyed")
        except JobChangedError:
            pass

    path.write_bytes(protocol.encode([{**plan, "runId": "f" * 32}]))
    for verb in ("show", "logs", "attach", "retry", "wait"):
        said = cli("job", verb, "-n", run.info.run_id)
        assert said.code == 1 and said.err.count("\n") <= 2, verb
        assert f"the plan of job {run.data.tags['batchai.job']} was changed on the share; nothing was read" in said.err
    # Attempts that nobody has begun keep none from ending the job.
    (folder / "attempts" / "2").mkdir()
    (folder / "attempts" / "1000000").mkdir()
    ended = cli("job", "terminate", "-y", run.info.run_id)
    assert ended.code == 0, ended.err
    assert asleep.client.get_run(run.info.run_id).info.status == "KILLED"
    asleep.wait_gone()

    # The key was made at first use, closed to others, and is never on the share, in a run or on a node.
    key = asleep.home / "key"
    assert key.stat().st_mode & 0o777 == 0o600 and key.stat().st_uid == os.geteuid()
    text, places = key.read_text().strip().encode(), (asleep.home / "share", asleep.root / "mlruns", asleep.home / "nodes")
    files = [file for place in places for file in place.rglob("*") if file.is_file()]
    assert not [file for file in (*files, asleep.root / "mlflow.db") if text in file.read_bytes()]


@pytest.mark.parametrize("spoil", ["no signature", "none at all"])
def test_a_follower_ends_a_job_whose_plan_is_not_its_submitters(asleep: Any, spoil: str) -> None:
    """Also where it can't be told from that of another key, or is gone: the run of the submitter says whose it is."""
    path = asleep.folder() / "batchai" / "plan.json"
    plan = protocol.decode_one(path.read_bytes())
    del plan["mac"]
    path.write_bytes(protocol.encode([plan]))
    if spoil == "none at all":
        path.unlink()
    run = asleep.last
    tags = runs.tags_of(run)
    order = {
        "share": tags["batchai.share"],
        "folder": tags["batchai.folder"],
        "run": run.info.run_id,
        "job": "forged",
        "told": {},
    }
    code = "import os; from mlflow_batchai.follower import service_client; service_client.follow({}, dict(os.environ))"
    assert asleep.call([sys.executable, "-c", code.format(order)]).returncode == 0
    asleep.wait(lambda: asleep.last.info.status == "FAILED")
    assert "the job is ended" in (asleep.home / "followers" / "forged.log").read_text()
    asleep.wait_gone()
