"""A storm's log, made up: two tenants, two groups, three trajectories, everything as it should be; to be spoilt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from headrace.storm.checker import Report, check
from headrace.storm.log import Event

#: A trajectory of one tenant's group of one, and a group of two of the other's.
ALONE, FIRST, SECOND = "acme/g-0", "beta/g-0", "beta/g-1"


class Log:
    """Writes events as the storm's processes would, one after the other."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ids = 100

    def add(self, kind: str, /, **fields: Any) -> Event:
        event = {"t": 10 * (len(self.events) + 1), "who": "test", "e": kind, **fields}
        self.events.append(event)
        return event

    def begin(self, uid: str, prompt: str, size: int, worth: float) -> None:
        tenant = uid.split("/")[0]
        self.add(
            "trajectory", trajectory=uid, tenant=tenant, prompt_uid=prompt, size=size, channel="train", worth=worth
        )
        self.add("begin.sent", trajectory=uid, count=0, reward=None)
        self.add("begin.acked", trajectory=uid, count=0, status=None, steps=None)

    def call(self, call: str, uid: str, prompt: list[int], after: str | None = None) -> dict[str, Any]:
        """A call with a name that is answered at once; its step."""
        self._ids += 10
        response = [self._ids, self._ids + 1]
        answer = f"answer-{call}"
        tenant = uid.split("/")[0]
        said = {"dialect": "chat", "stream": False, "named": True, "after": after}
        self.add("call", call=call, trajectory=uid, tenant=tenant, **said)
        self.add("try", call=call, count=0)
        self.add("sampled", answer=answer, question=call, prompt=prompt, response=response, log_probs=[-0.5, -0.25])
        self.add("answered", call=call, trajectory=uid, answer=answer, text=f"{answer} and more")
        return {"prompt": prompt, "response": response, "log_probs": [-0.5, -0.25], "reward": None}

    def complete(self, uid: str, worth: float) -> None:
        self.add("complete.sent", trajectory=uid, count=0, reward=worth)
        self.add("complete.acked", trajectory=uid, count=0, status="ok", steps=1)

    def learn(self, lease: str, prompt: str, trajectories: dict[str, list[dict[str, Any]]]) -> None:
        uids = list(trajectories)
        self.add("fetch.sent", channel="train", request=f"r-{lease}", size=1)
        self.add("fetched", channel="train", request=f"r-{lease}", lease=lease, trajectories=uids)
        for uid, steps in trajectories.items():
            numbered = [{**step, "index": index} for index, step in enumerate(steps)]
            where = {"channel": "train", "trajectory": uid, "prompt_uid": prompt, "group": uids, "deliveries": 1}
            self.add("trained", lease=lease, **where, steps=numbered)
        self.add("ack.sent", lease=lease)
        self.add("acked", lease=lease, trajectories=uids)

    def ledger(self, submitted: int, consumed: int, queued: int) -> None:
        counts = {"submitted": submitted, "queued": queued, "leased": 0, "consumed": consumed, "quarantined": 0}
        self.add("ledger", when="restart", asked=self.events[-1]["t"], channels={"train": {**counts, "dropped": {}}})


def clean_log() -> list[Event]:
    """A log in which all is well; every test has one of its own."""
    log = Log()
    log.add("begin", seed=1, version="0", pool="embedded")
    log.ledger(0, 0, 0)
    log.add("version.sent", version=1)
    log.add("version.acked", version=1)
    log.begin(ALONE, "acme/g", 1, 0.25)
    one = {**log.call("q1", ALONE, [1, 2]), "version": 1}
    two = {**log.call("q2", ALONE, [1, 2, *one["response"], 3], after="q1"), "version": 1, "reward": 0.25}
    log.complete(ALONE, 0.25)
    log.learn("l1", "acme/g", {ALONE: [one, two]})
    log.add("fault", kind="kill", target="gateway", hold_s=0)
    log.ledger(2, 2, 0)
    log.add("version.sent", version=2)
    log.begin(FIRST, "beta/g", 2, -0.5)
    log.begin(SECOND, "beta/g", 2, 0.75)
    three = {**log.call("q3", FIRST, [1, 7]), "version": 2, "reward": -0.5}
    four = {**log.call("q4", SECOND, [1, 8]), "version": 1, "reward": 0.75}
    log.add("version.acked", version=2)
    log.complete(FIRST, -0.5)
    log.complete(SECOND, 0.75)
    log.learn("l2", "beta/g", {FIRST: [three], SECOND: [four]})
    log.add("peeked", by="beta", trajectory=ALONE, status=404)
    log.add("states", channel="train", states={ALONE: "consumed", FIRST: "consumed", SECOND: "consumed"})
    log.ledger(4, 4, 0)
    log.add("end")
    return log.events


def report_of(spoil: Callable[[list[Event]], object]) -> Report:
    """What the checker says of a clean log that was spoilt."""
    events = copy.deepcopy(clean_log())
    spoil(events)
    for at, event in enumerate(events):
        event.setdefault("t", 10 * at + 5)
    return check(events)


def find(events: list[Event], kind: str, /, **fields: Any) -> Event:
    """The first event of a kind with these fields."""
    return next(
        event for event in events if event["e"] == kind and all(event[name] == value for name, value in fields.items())
    )


def remove(events: list[Event], kind: str, /, **fields: Any) -> None:
    events.remove(find(events, kind, **fields))


def append(events: list[Event], kind: str, /, **fields: Any) -> None:
    events.append({"t": events[-1]["t"] + 10, "who": "test", "e": kind, **fields})
