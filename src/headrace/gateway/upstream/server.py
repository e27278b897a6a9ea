"""One rollout server as it is known: where it is, whether it may be used, what it serves and under which version."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from yarl import URL

from headrace.data.errors import InvalidInput, shown
from headrace.tokens.servers import LogProbMode

#: `new` was never verified, `down` is probed until it is verified again, `unfit` must not be used, `leaving` takes no
#: new calls.
State = Literal["new", "up", "down", "unfit", "leaving"]


class Server:
    """Changed by its fleet's probes and by the calls that it takes."""

    def __init__(self, address: str, version: int) -> None:
        self.address = address
        self.version = version
        #: It said itself which version its weights have; one that cannot say so any more was started anew.
        self.numbered = False
        self.state: State = "new"
        self.reason: str | None = "not verified yet"
        self.model = ""
        self.max_model_len: int | None = None
        self.log_prob_mode: LogProbMode = "unknown"
        self.generate = False
        self.in_flight = 0
        self.calls = 0
        self.failures = 0
        self.completions_url = self.url("/v1/completions")
        self.generate_url = self.url("/inference/v1/generate")

    def url(self, path: str) -> URL:
        return URL(self.address + path, encoded=True)

    def told(self, version: int) -> None:
        """A version that an answer told. An answer that began before a sync does not take its version back."""
        if version > self.version:
            self.version = version

    def describe(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "state": self.state,
            "reason": self.reason,
            "version": self.version,
            "wire": "generate" if self.generate else "completions",
            "model": self.model,
            "max_model_len": self.max_model_len,
            "log_prob_mode": self.log_prob_mode,
            "in_flight": self.in_flight,
            "calls": self.calls,
            "failures": self.failures,
        }


def normal_address(given: str) -> str:
    """An address as servers are known by: scheme, host and port, without a slash or /v1 at its end."""
    text = given.strip()
    if text and "://" not in text:
        text = f"http://{text}"
    text = text.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(text)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and not parts.fragment
        right = right and (parts.port is None or parts.port > 0)
    except ValueError:
        right = False
    if not right:
        raise InvalidInput(f"{shown(given)} is no server's address; one looks like http://host:8001")
    return text
