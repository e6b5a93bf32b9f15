"""State that the listeners of one storage endpoint share: access, injected failures, the record of requests."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from azure_answers import Answer, Call, Refusal
from azure_signing import authorize

Handler = Callable[[Call], Answer]


@dataclass
class Faults:
    """Which requests fail: a share ``rate`` of those whose path holds ``path`` (and that are of ``comp``), each in one of the ways
    ``kinds``."""

    rate: float = 0.0
    kinds: tuple[str, ...] = ()
    path: str = ""
    methods: tuple[str, ...] = ()
    comp: str = ""
    retry_after: float = 1.0
    limit: int | None = None  # how many requests fail before the faults end by themselves
    chance: random.Random = field(default_factory=random.Random)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def draw(self, call: Call) -> str:
        """The fault of this request, or ""."""
        if not self.rate or self.path not in call.logical or (self.methods and call.method not in self.methods):
            return ""
        if self.comp and call.query.get("comp") != self.comp:
            return ""
        with self.lock:
            if self.limit == 0 or self.chance.random() >= self.rate:
                return ""
            if self.limit is not None:
                self.limit -= 1
            kind = self.chance.choice(self.kinds)
            return self.chance.choice(("cut-before", "cut-after", "cut-middle")) if kind == "cut" else kind


@dataclass
class Site:
    """What all listeners of one endpoint share."""

    account: str
    key: str
    handlers: dict[str, Handler]
    needs: dict[str, Callable[[Call], tuple[str, str]]]
    newest: str  # the last x-ms-version that it knows
    faults: Faults = field(default_factory=Faults)
    latency: float = 0.0
    record: list[dict[str, object]] = field(default_factory=list)

    def serve(self, call: Call) -> Answer:
        """Check and answer one request."""
        version = call.headers.get("x-ms-version", call.query.get("sv", ""))
        if version > self.newest:
            raise Refusal("InvalidHeaderValue", HeaderName="x-ms-version", HeaderValue=version)
        if call.account != self.account:
            raise Refusal("ResourceNotFound")
        authorize(call, self.account, self.key, self.needs[call.service](call))
        if not version:
            raise Refusal("MissingRequiredHeader", HeaderName="x-ms-version")
        return self.handlers[call.service](call)
