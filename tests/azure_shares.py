"""Shares of the file service themselves, and the service's properties."""

from __future__ import annotations

import os
import shutil

from azure_answers import Answer, Call, Refusal, http_date, xml
from azure_store import SHARE_NAME, Store, metadata, refusals


def share(store: Store, call: Call) -> Answer:
    """Answer what is asked of a share itself."""
    path = store.top(call.share)
    if not SHARE_NAME.fullmatch(call.share):
        raise Refusal("InvalidResourceName")
    if call.method == "PUT" and not call.comp:
        try:
            os.mkdir(path)
        except FileExistsError:
            raise Refusal("ShareAlreadyExists") from None
        extras = store.touch(path)
        extras.metadata = metadata(call)
        set_quota(store, call)
        return Answer(201, share_headers(store, path))
    with refusals("ShareNotFound"):
        headers = share_headers(store, path)
        extras = store.known(path)
        match call.method, call.comp:
            case "DELETE", "":
                shutil.rmtree(path)
                store.forget_below(path)
                return Answer(202)
            case (("GET" | "HEAD"), ("" | "metadata")):
                quota = store.quotas.get(call.share)
                headers["x-ms-share-quota"] = str(5120 if quota is None else max(1, quota >> 30))
                headers["x-ms-access-tier"] = "TransactionOptimized"
                return Answer(200, headers | {f"x-ms-meta-{name}": value for name, value in extras.metadata.items()})
            case "GET", "stats":
                used = sum(os.lstat(f"{folder}/{name}").st_size for folder, _, names in os.walk(path) for name in names)
                return Answer(
                    200,
                    headers | {"Content-Type": "application/xml"},
                    xml(f"<ShareStats><ShareUsageBytes>{used}</ShareUsageBytes></ShareStats>"),
                )
            case "GET", "acl":
                return Answer(200, headers | {"Content-Type": "application/xml"}, xml("<SignedIdentifiers />"))
            case "PUT", "metadata":
                store.touch(path).metadata = metadata(call)
                return Answer(200, headers)
            case "PUT", "properties":
                set_quota(store, call)
                return Answer(200, headers)
    raise Refusal("UnsupportedHttpVerb")


def share_headers(store: Store, path: str) -> dict[str, str]:
    status = os.stat(path)
    return {"ETag": store.etag(path, status), "Last-Modified": http_date(status.st_ctime)}


def set_quota(store: Store, call: Call) -> None:
    if "x-ms-share-quota" in call.headers:
        store.quotas[call.share] = int(call.headers["x-ms-share-quota"]) << 30


def service_properties(call: Call) -> Answer:
    if call.method == "PUT":
        return Answer(202)
    metrics = "<Version>1.0</Version><Enabled>false</Enabled><RetentionPolicy><Enabled>false</Enabled></RetentionPolicy>"
    body = f"<HourMetrics>{metrics}</HourMetrics><MinuteMetrics>{metrics}</MinuteMetrics><Cors />"
    return Answer(200, {"Content-Type": "application/xml"}, xml(f"<StorageServiceProperties>{body}</StorageServiceProperties>"))
