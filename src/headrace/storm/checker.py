"""Holds a storm's log against what was promised. It knows the log alone: what agents and consumers asked and were
answered, what rollout servers said, and what the pool told of itself. Nothing of the inside.

Findings, by kind:

    lost       acknowledged, and neither learned from nor in the pool; or gone without anyone's doing
    twice      learned from twice: a trajectory, an answer, or a named call that became two steps
    after_ack  handed out again after its acknowledgement was answered
    tokens     a step that is not, id for id and log-prob for log-prob, what a server said to that prompt
    ledger     a ledger that does not balance, or that knows less than it did before
    order      steps, turns or groups out of order, or a group that is not whole
    versions   a step of a version that was not there, or older than one that was acknowledged before its call
    reward     a reward that is not its trajectory's
    tenant     a tenant that met what is another's
    shared     an answer that two calls were given, or one to a question that nobody asked there
    stuck      anything that took longer than the storm's patience
    refused    a right request that was refused for good
    unfinished a log that ends before its storm: what was not done is not checked
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import msgspec

from headrace.storm.log import Event
from headrace.storm.plan import COUNTS

Kind = Literal[
    "lost",
    "twice",
    "after_ack",
    "tokens",
    "ledger",
    "order",
    "versions",
    "reward",
    "tenant",
    "shared",
    "stuck",
    "refused",
    "unfinished",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

#: States of a trajectory in the pool in which nothing of it is lost.
IN_POOL = ("queued", "leased")


class BrokenPromise(msgspec.Struct, frozen=True):
    """A promise that was broken: which, what happened, and to whom."""

    kind: Kind
    what: str
    subject: str = ""


class Report(msgspec.Struct, frozen=True):
    """What a log says: how much happened, and what should not have."""

    figures: dict[str, int]
    findings: list[BrokenPromise]

    @property
    def counts(self) -> dict[str, int]:
        """How many findings there are, by kind; 0 for those that there are none of."""
        found = Counter(finding.kind for finding in self.findings)
        return {kind: found[kind] for kind in KINDS}

    @property
    def clean(self) -> bool:
        return not self.findings


def check(events: Sequence[Event]) -> Report:
    """The report of a whole log, its events in the order in which they happened; findings by kind, the worst first."""
    story = Story(events)
    findings = [
        *_stuck_or_refused(story),
        *_lost(story),
        *_twice(story),
        *_after_ack(story),
        *_tokens(story),
        *_ledgers(story),
        *_order(story),
        *_versions(story),
        *_rewards(story),
        *_tenants(story),
        *_shared(story),
        *_scored_groups(story),
        *_unfinished(story),
    ]
    return Report(story.figures(), sorted(findings, key=lambda finding: KINDS.index(finding.kind)))


class Story:
    """A log, put together by trajectory, call, answer and lease."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self._by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            self._by_kind[event["e"]].append(event)
        #: What servers sampled, by the ids that it consists of, and by the word that names it.
        self.sampled = {tuple(event["response"]): event for event in self.of("sampled")}
        self.by_answer = {event["answer"]: event for event in self.of("sampled")}
        self.calls = {event["call"]: event for event in self.of("call")}
        self.answered = {event["call"]: event for event in self.of("answered")}
        self.trajectories = {event["trajectory"]: event for event in self.of("trajectory")}
        self.acked = {
            what: {event["trajectory"]: event for event in self.of(f"{what}.acked")}
            for what in ("begin", "complete", "reward", "fail")
        }
        self.trained: dict[str, list[Event]] = defaultdict(list)
        for event in self.of("trained"):
            self.trained[event["trajectory"]].append(event)
        #: When each lease was asked for.
        sent = {event["request"]: int(event["t"]) for event in self.of("fetch.sent")}
        self._leased_at = {event["lease"]: sent[event["request"]] for event in self.of("fetched")}
        #: Where each trajectory stood in the end, as the pool told.
        self.states: dict[str, str] = {}
        for event in self.of("states"):
            self.states |= event["states"]

        #: From how many groups the trainer of a channel has learned, where it tells no more than that.
        self.learned: dict[str, int] = {event["channel"]: event["groups"] for event in self.of("learned")}

    def of(self, kind: str) -> list[Event]:
        """All events of a kind, in order."""
        return self._by_kind.get(kind, [])

    def sample_of(self, step: dict[str, Any]) -> Event | None:
        """What a server said that is this step."""
        return self.sampled.get(tuple(step["response"]))

    def steps(self) -> Iterable[tuple[Event, dict[str, Any]]]:
        """Every step that was learned from, with its trajectory's event."""
        for events in self.trained.values():
            for event in events:
                for step in event["steps"]:
                    yield event, step

    def consumed_groups(self, channel: str) -> set[str]:
        """The groups of a channel whose trajectories the pool says were consumed."""
        begun = (self.trajectories.get(uid) for uid, state in self.states.items() if state == "consumed")
        return {event["prompt_uid"] for event in begun if event is not None and event["channel"] == channel}

    def asked_for(self, uid: str) -> float:
        """When the lease was asked for under which a trajectory was learned from; infinity where it was not."""
        return min((self._leased_at[event["lease"]] for event in self.trained.get(uid, ())), default=math.inf)

    def figures(self) -> dict[str, int]:
        done = Counter(event["kind"] for event in self.of("fault"))
        return {
            **{name: done[kind] for kind, name in COUNTS.items()},
            "starts": len(self.of("ready")),
            "calls": len(self.answered),
            "tries": len(self.of("try")),
            "hang_ups": sum(1 for call in self.calls.values() if call.get("hung_up")),
            "trajectories": len(self.trained),
            "steps": sum(1 for _ in self.steps()),
            "unseen_steps": _unseen(self),
            "redelivered": len(self.of("skipped")),
            "learned_groups": sum(self.learned.values()),
            "ledgers": len(self.of("ledger")),
            "peeks": len(self.of("peeked")),
            "scored_groups": len(self.of("taken")),
        }


def _unseen(story: Story) -> int:
    """Steps of calls that were tried again without a name, or duplicated by the network: no agent saw them."""
    seen = {event["answer"] for event in story.answered.values()}
    samples = (story.sample_of(step) for _, step in story.steps())
    return sum(1 for sample in samples if sample is not None and sample["answer"] not in seen)


# -- what holds --------------------------------------------------------------------------------------------------------


def _stuck_or_refused(story: Story) -> Iterable[BrokenPromise]:
    for event in story.of("stuck"):
        yield BrokenPromise("stuck", f"{event['what']} took more than {event['waited_s']} s", str(event.get("target")))
    for event in story.of("refused"):
        if "status" in event:  # consumers log refusals too, which pass
            said = f"{event['what']} was refused: {event['status']} {event['said']}"
            yield BrokenPromise("refused", said, str(event.get("call") or event["trajectory"]))
    for event in story.of("died"):
        yield BrokenPromise("stuck", f"it ended by itself: {event['how']}", event["target"])
    for what in ("complete", "reward", "fail"):
        for uid, event in story.acked[what].items():
            # `late` of what a consumer had by then: the pool kept it and died before it said so, and was asked again.
            counted = event["status"] == "late" and story.asked_for(uid) < event["t"]
            if event["status"] != "ok" and event["count"] == 0 and not counted:
                yield BrokenPromise("refused", f"the first {what} was answered {event['status']}", uid)


def _unfinished(story: Story) -> Iterable[BrokenPromise]:
    if not story.of("end"):
        yield BrokenPromise("unfinished", "the log has no end: the storm was killed, or is still played", "storm")


def _lost(story: Story) -> Iterable[BrokenPromise]:
    learned = {
        uid: {sample["answer"] for event in events for step in event["steps"] if (sample := story.sample_of(step))}
        for uid, events in story.trained.items()
    }
    for call, event in story.answered.items():
        uid = event["trajectory"]
        if uid in learned and event["answer"] not in learned[uid]:
            yield BrokenPromise("lost", f"{uid} was learned from without the answer {event['answer']}", call)
    for uid in story.acked["begin"]:
        if uid in story.trained or uid in story.acked["fail"]:
            continue
        state = story.states.get(uid)
        if state is None:
            continue  # nobody asked: the storm was cut short
        counted = state == "consumed" and story.trajectories[uid]["channel"] in story.learned  # below
        if state not in IN_POOL and not counted and not _maybe_failed(story, uid):
            yield BrokenPromise("lost", f"it was begun and not learned from, and the pool says {state}", uid)
        elif state in IN_POOL and uid in story.acked["complete"]:
            yield BrokenPromise("stuck", f"it is complete, and still {state} at the end", uid)
    for channel, learned_from in story.learned.items():
        missing = len(story.consumed_groups(channel)) - learned_from
        if missing > 0:
            yield BrokenPromise(
                "lost", f"{missing} groups are consumed, and the trainer did not learn from them", channel
            )


def _maybe_failed(story: Story, uid: str) -> bool:
    return any(event["trajectory"] == uid for event in story.of("fail.sent"))


def _twice(story: Story) -> Iterable[BrokenPromise]:
    for uid, events in story.trained.items():
        if len(events) > 1:
            yield BrokenPromise("twice", f"it was learned from {len(events)} times", uid)
        if uid in story.acked["fail"] and story.acked["fail"][uid]["status"] == "ok":
            yield BrokenPromise("order", "it had failed, and was learned from", uid)
    for channel, learned_from in story.learned.items():
        again = learned_from - len(story.consumed_groups(channel))
        if again > 0:
            yield BrokenPromise("twice", f"the trainer has learned from {again} groups more than there were", channel)
    places: Counter[tuple[int, ...]] = Counter()
    steps_of: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for event, step in story.steps():
        places[tuple(step["response"])] += 1
        sample = story.sample_of(step)
        if sample is not None:
            steps_of[sample["question"]].add((event["trajectory"], step["index"]))
    for response, count in places.items():
        if count > 1 and response in story.sampled:
            yield BrokenPromise("twice", f"an answer is in {count} steps", story.sampled[response]["answer"])
    for call, steps in steps_of.items():
        if len(steps) > 1 and call in story.calls and story.calls[call]["named"]:
            yield BrokenPromise("twice", f"a named call is in {len(steps)} steps: {sorted(steps)}", call)


def _after_ack(story: Story) -> Iterable[BrokenPromise]:
    acked: dict[str, int] = {}
    sent: dict[str, int] = {}
    for event in story.events:
        match event["e"]:
            case "acked":
                for uid in event["trajectories"]:
                    acked.setdefault(uid, int(event["t"]))
            case "fetch.sent":
                sent[event["request"]] = int(event["t"])
            case "fetched":
                asked = sent.get(event["request"], int(event["t"]))
                for uid in event["trajectories"]:
                    if uid in acked and acked[uid] < asked:
                        yield BrokenPromise("after_ack", f"it was handed out again under {event['lease']}", uid)


def _tokens(story: Story) -> Iterable[BrokenPromise]:
    for event, step in story.steps():
        where = f"step {step['index']} of {event['trajectory']}"
        sample = story.sample_of(step)
        if sample is None:
            yield BrokenPromise("tokens", f"{where} has ids that no server sampled", event["trajectory"])
        elif step["prompt"] != sample["prompt"]:
            yield BrokenPromise("tokens", f"{where} has another prompt than its server consumed", sample["answer"])
        elif step["log_probs"] != sample["log_probs"]:
            yield BrokenPromise("tokens", f"{where} has other log-probs than its server said", sample["answer"])


def _ledgers(story: Story) -> Iterable[BrokenPromise]:
    before: dict[str, dict[str, Any]] = {}
    learned = _learned_by_time(story)
    for event in story.of("ledger"):
        for channel, ledger in event["channels"].items():
            dropped = sum(ledger["dropped"].values())
            parts = ledger["queued"] + ledger["leased"] + ledger["consumed"] + ledger["quarantined"] + dropped
            if parts != ledger["submitted"]:
                yield BrokenPromise(
                    "ledger", f"{ledger['submitted']} were submitted, and {parts} are accounted for", channel
                )
            known = before.get(channel)
            for name in ("submitted", "consumed"):
                if known is not None and ledger[name] < known[name]:
                    yield BrokenPromise("ledger", f"{name} went from {known[name]} to {ledger[name]}", channel)
            acknowledged = sum(count for at, of, count in learned if of == channel and at < event["asked"])
            if ledger["consumed"] < acknowledged:
                said = f"{ledger['consumed']} are consumed, of {acknowledged} that were acknowledged"
                yield BrokenPromise("ledger", said, channel)
            before[channel] = ledger


def _learned_by_time(story: Story) -> list[tuple[int, str, int]]:
    """When how many steps of which channel were acknowledged."""
    sizes = {uid: (events[0]["channel"], len(events[0]["steps"])) for uid, events in story.trained.items()}
    return [
        (int(event["t"]), *sizes[uid]) for event in story.of("acked") for uid in event["trajectories"] if uid in sizes
    ]


def _order(story: Story) -> Iterable[BrokenPromise]:
    index_of: dict[str, tuple[str, int]] = {}
    ids_of: dict[str, tuple[list[int], list[int]]] = {}
    for event, step in story.steps():
        sample = story.sample_of(step)
        if sample is not None:
            index_of[sample["answer"]] = event["trajectory"], step["index"]
            ids_of[sample["answer"]] = step["prompt"], step["response"]
    for uid, events in story.trained.items():
        indexes = [step["index"] for step in events[0]["steps"]]
        if indexes != list(range(len(indexes))):
            yield BrokenPromise("order", f"its steps are numbered {indexes}", uid)
        begun = story.trajectories.get(uid)
        if begun is not None and (
            len(events[0]["group"]) != begun["size"] or events[0]["prompt_uid"] != begun["prompt_uid"]
        ):
            group = f"{events[0]['prompt_uid']} with {events[0]['group']}"
            yield BrokenPromise("order", f"its group of {begun['size']} was handed out as {group}", uid)
    by_trajectory: dict[str, list[Event]] = defaultdict(list)
    for event in story.answered.values():
        by_trajectory[event["trajectory"]].append(event)
    for uid, answers in by_trajectory.items():
        for first, second in pairwise(sorted(answers, key=lambda event: int(event["t"]))):
            one, other = index_of.get(first["answer"]), index_of.get(second["answer"])
            if one is None or other is None or int(first["t"]) > int(story.calls[second["call"]]["t"]):
                continue  # one of them was lost, which is told above, or they were under way together
            if one[1] >= other[1]:
                yield BrokenPromise("order", f"step {other[1]} was asked after step {one[1]} was answered", uid)
    for call, event in story.answered.items():
        before = story.answered.get(story.calls[call]["after"] or "")
        here, there = ids_of.get(event["answer"]), ids_of.get(before["answer"]) if before is not None else None
        if here is not None and there is not None:
            whole = [*there[0], *there[1]]
            if here[0][: len(whole)] != whole:
                yield BrokenPromise("order", "its prompt does not begin with the turn that it continues", call)


def _versions(story: Story) -> Iterable[BrokenPromise]:
    """A step's version is at least the newest that was acknowledged before its call began, and at most the newest that
    was sent before its answer."""
    if story.learned:
        return  # a trainer sets them, and tells this log nothing of it
    told: list[tuple[int, int]] = [(int(event["t"]), event["version"]) for event in story.of("version.acked")]
    sent: list[tuple[int, int]] = [(int(event["t"]), event["version"]) for event in story.of("version.sent")]
    for event, step in story.steps():
        sample = story.sample_of(step)
        call = story.calls.get(sample["question"]) if sample is not None else None
        if sample is None or call is None:
            continue
        least = max((version for at, version in told if at < int(call["t"])), default=0)
        most = max((version for at, version in sent if at < int(event["t"])), default=0)
        if not least <= step["version"] <= most:
            said = f"it is of version {step['version']}, and {least} to {most} were there"
            yield BrokenPromise("versions", f"step {step['index']}: {said}", event["trajectory"])


def _rewards(story: Story) -> Iterable[BrokenPromise]:
    for uid, events in story.trained.items():
        begun = story.trajectories.get(uid)
        rewards = [step["reward"] for step in events[0]["steps"] if step["reward"] is not None]
        if begun is not None and rewards != [begun["worth"]]:
            yield BrokenPromise("reward", f"it is worth {begun['worth']}, and has {rewards}", uid)


def _tenants(story: Story) -> Iterable[BrokenPromise]:
    for event in story.of("peeked"):
        if event["status"] not in (401, 403, 404) and event["status"] < 500:
            yield BrokenPromise(
                "tenant", f"{event['by']} called it, and was answered {event['status']}", event["trajectory"]
            )
    for event, step in story.steps():
        sample = story.sample_of(step)
        call = story.calls.get(sample["question"]) if sample is not None else None
        if call is not None and call["trajectory"] != event["trajectory"]:
            kind: Kind = "shared" if event["trajectory"].startswith(f"{call['tenant']}/") else "tenant"
            yield BrokenPromise(kind, f"{event['trajectory']} has an answer to {call['call']}", call["trajectory"])


def _shared(story: Story) -> Iterable[BrokenPromise]:
    given: dict[str, str] = {}
    for call, event in story.answered.items():
        sample = story.by_answer.get(event["answer"])
        if sample is None:
            yield BrokenPromise("tokens", f"it was answered what no server said: {event['text'][:80]!r}", call)
            continue
        if sample["question"] != call:
            yield BrokenPromise("shared", f"it was given the answer to {sample['question']}", call)
        if event["answer"] in given:
            yield BrokenPromise("shared", f"{given[event['answer']]} was given the same answer", call)
        given[event["answer"]] = call


def _scored_groups(story: Story) -> Iterable[BrokenPromise]:
    """Groups of the Trajectory API: what was received is taken once, as it was posted."""
    sent = {event["group"]: event["body"] for event in story.of("post.sent")}
    taken = Counter(event["group"] for event in story.of("taken"))
    for event in story.of("post.acked"):
        if not taken[event["group"]]:
            yield BrokenPromise("lost", "it was received, and handed to no trainer", f"scored group {event['group']}")
    for group, count in taken.items():
        if count > 1:
            yield BrokenPromise("twice", f"it was handed to the trainer {count} times", f"scored group {group}")
    for event in story.of("taken"):
        if sent.get(event["group"]) != event["body"]:
            yield BrokenPromise("tokens", "it is not what was posted", f"scored group {event['group']}")
