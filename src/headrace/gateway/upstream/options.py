"""How rollout servers are talked to. A value that could not work is refused when it is given, by its field."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import msgspec

from headrace.data.errors import InvalidInput, shown

Balancing = Literal["round-robin", "sticky", "least-busy"]
WireAsked = Literal["auto", "completions", "generate"]
LogProbModeAsked = Literal["auto", "processed", "raw"]


class UpstreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How all servers are talked to.

    balance         which server takes a request
    wire            `auto` uses /inference/v1/generate where a server has it and it can do what is asked
    log_prob_mode   the log-probs that the trainer expects; a server that gives others is unfit
    version         a server's policy version until it or the trainer tells another
    connect_s       to open a connection
    idle_s          the longest silence; a whole answer is silent until its last token was sampled
    call_s          a request in all, from its first byte sent; time spent paused does not count
    probe_s         between two probes of a server that is down or unfit
    verify_s        one probe in all; the first completion of a server that has just started can be slow
    control_s       a pause or a resume
    foreign_pause_s a pause that this gateway did not ask for: one may be of a gateway or a trainer that died
    abort_grace_s   an abort may come before the pause that asked for it: from another worker, or another gateway
    api_key         the servers' own (`Authorization: Bearer`)
    max_answer_mb   the most that one answer may have
    model           the name that the servers know the model by; None: the first that they list
    """

    balance: Balancing = "round-robin"
    wire: WireAsked = "auto"
    log_prob_mode: LogProbModeAsked = "auto"
    version: int = 0
    connect_s: float = 5.0
    idle_s: float = 600.0
    call_s: float = 3600.0
    probe_s: float = 2.0
    verify_s: float = 60.0
    control_s: float = 120.0
    foreign_pause_s: float = 900.0
    abort_grace_s: float = 2.0
    api_key: str | None = None
    max_answer_mb: float = 256.0
    model: str | None = None

    def __post_init__(self) -> None:
        _choice(self.balance, Balancing, "balance")
        _choice(self.wire, WireAsked, "wire")
        _choice(self.log_prob_mode, LogProbModeAsked, "log_prob_mode")
        for name in (
            "connect_s",
            "idle_s",
            "call_s",
            "probe_s",
            "verify_s",
            "control_s",
            "foreign_pause_s",
            "abort_grace_s",
            "max_answer_mb",
        ):
            value = getattr(self, name)
            right = isinstance(value, int | float) and not isinstance(value, bool)
            if not right or not 0 < value < math.inf:
                raise InvalidInput(f"{name} is {shown(value)}; it must be a number above 0")
        if type(self.version) is not int or self.version < 0:
            raise InvalidInput(f"version is {shown(self.version)}; it must be an integer of at least 0")


def _choice(value: Any, options: Any, name: str) -> None:
    if value not in get_args(options):
        raise InvalidInput(f"{name} is {shown(value)}; it must be one of {', '.join(get_args(options))}")
