"""Proxies that a node's variables name, as other programs on it heed them."""

import base64
import os
from typing import Dict, Optional
from urllib.parse import SplitResult, unquote, urlsplit


def proxy_for(scheme: str, host: str) -> Optional[SplitResult]:
    """The proxy that the node's variables name for a host, as other programs heed them."""
    named = os.environ.get(scheme + "_proxy") or os.environ.get(scheme.upper() + "_PROXY") or ""
    if scheme != "https" or not named:
        return None
    spared = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    for entry in (entry.strip().lstrip(".") for entry in spared.split(",")):
        if entry and (entry == "*" or host == entry or host.endswith("." + entry)):
            return None
    try:
        return urlsplit(named if "//" in named else "http://" + named)
    except ValueError:
        return None


def headers_for(proxy: SplitResult) -> Dict[str, str]:
    """What the proxy itself wants to know: who asks, if its address says so."""
    if not proxy.username:
        return {}
    pair = "%s:%s" % (unquote(proxy.username), unquote(proxy.password or ""))
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
