"""Leases on files (infinite) and shares (15 to 60 seconds, or infinite)."""

from __future__ import annotations

import time
import uuid

from azure_answers import Answer, Call, Refusal
from azure_store import Store


def check_lease(store: Store, call: Call, path: str, header: str = "x-ms-lease-id") -> None:
    """Refuse a change of a file that is leased to someone else."""
    lease = store.known(path).lease
    given = call.headers.get(header, "").lower()
    if lease and not given:
        raise Refusal("LeaseIdMissing")
    if given and not lease:
        raise Refusal("LeaseNotPresentWithFileOperation")
    if given != lease:
        raise Refusal("LeaseIdMismatchWithFileOperation")


def file_lease(store: Store, call: Call, path: str, headers: dict[str, str]) -> Answer:
    return lease(store, call, path, headers, float("inf"))


def share_lease(store: Store, call: Call, path: str, headers: dict[str, str]) -> Answer:
    duration = float(call.headers.get("x-ms-lease-duration", "-1"))
    if duration != -1 and not 15 <= duration <= 60:
        raise Refusal("InvalidHeaderValue", HeaderName="x-ms-lease-duration", HeaderValue=f"{duration:g}")
    return lease(store, call, path, headers, float("inf") if duration == -1 else duration)


def lease(store: Store, call: Call, path: str, headers: dict[str, str], seconds: float) -> Answer:
    """Acquire, renew, change, release, break."""
    action = call.headers.get("x-ms-lease-action", "").lower()
    proposed = call.headers.get("x-ms-proposed-lease-id", "").lower()
    given = call.headers.get("x-ms-lease-id", "").lower()
    with store.lock:
        extras = store.touch(path)
        if extras.lease and time.monotonic() >= extras.until:
            extras.lease = ""
        if action == "acquire":
            if extras.lease and extras.lease != proposed:
                raise Refusal("LeaseAlreadyPresent")
            extras.lease, extras.broken = proposed or str(uuid.uuid4()), False
            extras.until = time.monotonic() + seconds
            return Answer(201, headers | {"x-ms-lease-id": extras.lease})
        if action == "break":
            if not extras.lease:
                raise Refusal("LeaseNotPresentWithLeaseOperation")
            extras.lease, extras.broken = "", True
            return Answer(202, headers | {"x-ms-lease-time": "0"})
        if action not in ("change", "release", "renew"):
            raise Refusal("InvalidHeaderValue", HeaderName="x-ms-lease-action", HeaderValue=action)
        if not extras.lease:
            raise Refusal("LeaseNotPresentWithLeaseOperation")
        if given != extras.lease and not (action == "change" and proposed == extras.lease):
            raise Refusal("LeaseIdMismatchWithLeaseOperation")
        if action == "release":
            extras.lease = ""
            return Answer(200, headers)
        if action == "change":
            extras.lease = proposed
        return Answer(200, headers | {"x-ms-lease-id": extras.lease})
