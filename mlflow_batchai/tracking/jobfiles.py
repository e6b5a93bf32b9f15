"""Upload what a job runs into the artifacts ``job/``: document, plan, code, changes since the commit, packages."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mlflow_batchai.agent import protocol, records
from mlflow_batchai.agent.plan import plain
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.errors import JobError, ShareError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.tracking import kept_code

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

ARTIFACT = "job"
MOST_NAMES_SHOWN = 20
_GIT = ("commit", "differs", "changed", "deleted", "untracked", "withheld", "note")
_CHANGES: records.Shape = {"diff": records.or_none(records.is_text), "withheld": records.list_of(records.is_text)}


class JobFiles:
    """The files of a job that say what it is, on their way to its run. Sent again they are the same.

    Args:
        environment: packages that were told and not sent yet by the relay before.
    """

    def __init__(self, client: MlflowClient, job: Job, environment: str | None = None) -> None:
        self._client = client
        self._job = job
        self._environment = environment
        self._sent = False
        self._notes: list[str] = []

    def take(self, record: Record) -> None:
        """Take an ``environment`` event."""
        lines = [f"# Python {record['python']}", *record["packages"]]
        self._environment = "".join(line + "\n" for line in lines)

    def remember(self) -> str | None:
        """The packages that are still to be sent."""
        return self._environment

    def send(self) -> list[str]:
        """Send what is there and was not sent; sentences on what stays out of it. Raises ShareError: it can't be read."""
        files: dict[str, str | bytes] = {}
        if not self._sent:
            files = self._files()
        if self._environment is not None:
            files["environment.txt"] = self._environment
        if files:
            with TemporaryDirectory(prefix="batchai-") as scratch:
                for name, text in files.items():
                    Path(scratch, name).write_bytes(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)
                self._client.log_artifacts(self._job.plan.run_id, scratch, ARTIFACT)
        self._sent, self._environment = True, None
        return list(self._notes)

    def _files(self) -> dict[str, str | bytes]:
        plan = self._job.plan
        self._look()
        files: dict[str, str | bytes] = {"plan.json": _readable(self._job.signed_plan())}
        notes = []
        if document := self._job.document():
            files["document.json"] = _readable(document)
        if plan.rerun and not plan.rerun.lacks:
            try:
                files[kept_code.NAME] = kept_code.pack(self._job.share, plan.code, plan.rerun.size)
            except JobError as error:
                notes.append(f"{ARTIFACT}/{kept_code.NAME} is not kept: {error}")
        if code := plan.code:
            changes = self._job.changes()
            files["code.json"] = _readable(
                {
                    "sha256": hashlib.sha256(protocol.encode(plain(code))).hexdigest(),
                    "files": len(code),
                    "git": {key: changes.get(key) for key in _GIT} if changes else None,
                }
            )
            if records.has(changes, _CHANGES):
                if changes["diff"]:
                    files["changes.diff"] = changes["diff"]
                if changes["withheld"]:
                    notes.append(f"{ARTIFACT}/changes.diff lacks {_listed(changes['withheld'])}")
        self._look()  # of a share that was away in between nothing can be said
        self._notes = notes
        return files

    def _look(self) -> None:
        """Raise ShareError if nothing of the job is there: an empty mount point is waited for, a lost file is not."""
        if not self._job.share.list(self._job.folder):
            raise ShareError(f"nothing of job {self._job.name} is on {self._job.share.url}; is the share mounted there?")


def _readable(record: Record) -> str:
    # What is no UTF-8 (in the name of a file) stays an escape, which JSON has for it.
    text = json.dumps(record, indent=2, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode() + "\n"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES_SHOWN} more" if len(names) > MOST_NAMES_SHOWN else ""
    those = "it holds a secret" if len(names) == 1 else "they hold a secret"
    return f"{', '.join(names[:MOST_NAMES_SHOWN])}{more}: {those}, or did when committed"
