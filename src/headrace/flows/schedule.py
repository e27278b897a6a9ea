"""Which rollout begins next: a pure state machine of a dataset, the trainer's version and a clock that is handed in.

It owns no tasks, clients or files. Told what happened (`version_is`, `accepted`, `failed`), it says what to start
(`next`). A prompt is admitted as a *group* of `n_rollouts` rollouts, a rollout is played in *attempts*, and a group is
accepted once all of its rollouts are.

**Staleness.** A trainer learns from `batch_size` groups a version. Groups are admitted while

    capacity = (max_staleness + version + 1) * batch_size - accepted - running  >  0

with versions counted from the first one, and `version` that of the oldest group that still runs, not today's: quick
groups must not overtake a slow one by more than the bound. While a group of version v runs, no more than
(max_staleness + v + 1) * batch_size groups exist, so it is among these when it ends, and is trained on at version
v + max_staleness at the latest.

A trainer that died has spent versions on groups that it has to learn from again, and that wait in the pool once more.
The pool tells how many wait there: groups that the versions allowed for, and that are not used after all, are taken off
the capacity until they are.

**Retries.** A rollout that failed waits a while and is played again, under another attempt, before younger groups; each
rollout has the same number of retries, whatever happened to others. What was not its agent's doing (a gateway that
died, a rollouter that was killed) is not charged.

**Validation.** With the first version, and whenever `validate_every` more have passed, all rows of the validation data
are played once. Their rollouts go first, and wait for no capacity.

**Drops.** A pool may drop an accepted group before the trainer has used it: it grew stale, or there were too many.
Where that matters (`RolloutRules.follows_pool`) accepted groups are *held* until the pool says that they are used
(`taken`) or dropped (`dropped`). A dropped one no longer counts as accepted, so that another is admitted in its place.
The bound of staleness stands: it counts the groups that the trainer may come to use, and a dropped one is none.

What must outlive the process is in `ScheduleState`. It is saved before a group that was just admitted begins, and
before what is left of a lost one is removed; all later news of a group can be asked for again, by the names of its
trajectories, which follow from it.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush

from headrace.data.errors import InvalidInput
from headrace.flows.schedule_state import (
    TRAIN,
    VAL,
    AdmittedGroup,
    HeldGroup,
    LostGroup,
    RolloutRules,
    RolloutStart,
    ScheduleState,
    ValidationRound,
)

#: The longest wait of a rollout that failed again and again, in units of the first wait.
MOST_BACKOFF = 32


class RolloutSchedule:
    """The state machine. A rollout waits, runs, and then is done, or failed and waits again; those that a state from
    before has as open run, for all that is known: whoever holds the gateway's word says `accepted`, `failed` or
    `resumed` of each (`in_doubt`).
    """

    def __init__(self, rules: RolloutRules, state: ScheduleState) -> None:
        """Raises `InvalidInput` where the state is of other data."""
        for name in ("rows", "val_rows"):
            if getattr(rules, name) != getattr(state, name):
                raise InvalidInput(
                    f"the state is of data with {getattr(state, name)} {name.replace('_', ' ')}, and there are "
                    f"{getattr(rules, name)} now; give another file as rollout.state, or the data from before"
                )
        self.rules, self.state = rules, state
        #: Whether a group was admitted, lost or dropped since the state was saved last; whoever saves it clears this.
        self.changed = False
        #: Whether a group was accepted since then: to be saved too, but nothing waits for it.
        self.behind = False
        self.held = False
        self._order: tuple[int, list[int]] | None = None
        #: Rollouts that may begin: the validation's first, then by age.
        self._waiting: list[tuple[bool, int, int]] = []
        #: Rollouts that failed, by when they may begin again.
        self._later: list[tuple[float, int, int]] = []
        self._running: set[tuple[int, int]] = set()
        #: Open training groups by version: (version, number), for the oldest; those that ended are passed over.
        self._oldest: list[tuple[int, int]] = []
        self._open_train = 0
        #: Of the groups that are held, those that the trainer has, for all that is known.
        self._with_trainer: set[int] = set()
        #: Groups that the versions so far stand for and that the trainer has not used.
        self._owed = 0
        for number, group in sorted(state.open.items()):
            self._running.update((number, at) for at, done in enumerate(group.outcomes) if not done)
            if group.channel == TRAIN:
                self._open_train += 1
                heappush(self._oldest, (group.version, number))

    # -- what it is told -----------------------------------------------------------------------------------------------

    def version_is(self, version: int) -> None:
        """The trainer's version, as the gateway has it."""
        state = self.state
        if state.base_version is None:
            state.base_version = version
        state.version = version

    def waiting_is(self, groups: int) -> None:
        """How many complete groups wait in the pool for the trainer, at this version or later; another's may be among
        them."""
        state = self.state
        own = min(groups, len(state.held) - len(self._with_trainer))
        versions = state.version - (state.base_version or 0)
        self._owed = max(0, versions * self.rules.batch_size - (state.accepted - own))

    def accepted(self, start: RolloutStart) -> None:
        """The rollout's trajectory is complete in the pool."""
        self._running.discard((start.group, start.rollout))
        group = self.state.open.get(start.group)
        if group is None or group.outcomes[start.rollout]:
            return
        group.outcomes[start.rollout] = "accepted"
        self.state.retried += start.attempt - group.attempts[start.rollout]
        group.attempts[start.rollout] = start.attempt  # of a rollout in doubt, a later one than the state has
        self._count(group, 1)
        self._end_if_over(start.group)

    def failed(self, start: RolloutStart, reason: str, now: float, *, charged: bool = True) -> LostGroup | None:
        """The attempt failed, and the gateway knows it; one that is not `charged` is repeated at once. Returns what is
        left of a group that is lost with it; its rollouts that run are told as `failed` too, once they ended."""
        state = self.state
        self._running.discard((start.group, start.rollout))
        state.failed[reason] = state.failed.get(reason, 0) + 1
        group = state.open.get(start.group)
        if group is None:
            return None
        if group.outcomes[start.rollout] == "accepted":  # its reward failed
            self._count(group, -1)
        group.outcomes[start.rollout] = ""
        group.failures[start.rollout] += charged
        failures = group.failures[start.rollout]
        if failures > self.rules.retries:
            return self._give_up(start, group)
        group.attempts[start.rollout] = start.attempt + 1
        state.retried += 1
        if charged:
            pause_s = self.rules.retry_s * min(2 ** (failures - 1), MOST_BACKOFF)
            heappush(self._later, (now + pause_s, start.group, start.rollout))
        else:
            self._wait(start.group, start.rollout)
        return None

    def resumed(self, start: RolloutStart, attempt: int) -> None:
        """A rollout in doubt has no attempt of that number or a later one: it begins with it."""
        self._running.discard((start.group, start.rollout))
        group = self.state.open.get(start.group)
        if group is not None:
            self.state.retried += attempt - group.attempts[start.rollout]
            group.attempts[start.rollout] = attempt
            self.changed = True
            self._wait(start.group, start.rollout)

    def scored(self, number: int) -> None:
        """All trajectories of a group that `awaits_scores` have their reward, or the pool does not hold it any more."""
        group = self.state.open.get(number)
        if group is not None and group.over:
            self._end(number, kept=True)

    def leased(self, number: int, leased: bool) -> None:
        """Whether the trainer has a group that is held, and will use it unless it dies."""
        if leased and number in self.state.held:
            self._with_trainer.add(number)
        else:
            self._with_trainer.discard(number)

    def taken(self, number: int) -> None:
        """The trainer has used a group that is held."""
        self._with_trainer.discard(number)
        if self.state.held.pop(number, None) is not None:
            self.behind = True

    def dropped(self, number: int, reason: str) -> None:
        """The pool dropped a group that is `in_pool`, before the trainer used it."""
        state = self.state
        self._with_trainer.discard(number)
        if (group := state.open.get(number)) is not None and group.over:
            del state.open[number]
            self._open_train -= 1
            state.rollouts -= group.outcomes.count("accepted")
        elif (held := state.held.pop(number, None)) is not None:
            state.accepted -= 1
            state.rollouts -= sum(attempt >= 0 for attempt in held.attempts)
        else:
            return
        state.dropped[reason] = state.dropped.get(reason, 0) + 1
        self.changed = True

    # -- what it says --------------------------------------------------------------------------------------------------

    def next(self, now: float) -> list[RolloutStart]:
        """The rollouts that begin now; none while `held`. Where `changed` is set afterwards, the state must be saved
        before they do."""
        found: list[RolloutStart] = []
        while self._later and self._later[0][0] <= now:
            _, number, rollout = heappop(self._later)
            self._wait(number, rollout)
        while not self.held and len(self._running) < self.rules.concurrency:
            first = self._waiting[0] if self._waiting else None
            if (first is None or first[0]) and not self._admit_validation() and first is None and not self._admit():
                break
            _, number, rollout = heappop(self._waiting)
            if number in self.state.open:  # a group that was given up has rollouts that still wait
                self._running.add((number, rollout))
                found.append(self._start(number, rollout))
        return found

    @property
    def capacity(self) -> int:
        """How many groups may be admitted."""
        rules, state = self.rules, self.state
        version = state.version
        while self._oldest and self._oldest[0][1] not in state.open:
            heappop(self._oldest)
        if self._oldest:
            version = min(version, self._oldest[0][0])
        ahead = rules.max_staleness + version - (state.base_version or 0) + 1
        return min(ahead * rules.batch_size - self._owed, rules.groups) - state.accepted - self._open_train

    @property
    def wakes_at(self) -> float | None:
        """When a rollout that failed may begin again; None where none waits for that."""
        return self._later[0][0] if self._later else None

    @property
    def finished(self) -> bool:
        """Whether all was played that was asked for."""
        used = not (self.rules.until_trained and self.state.held)
        return not self.state.open and used and self._train_over() and self._validation_over()

    @property
    def hopeless(self) -> bool:
        """Whether so many groups failed, one after the other, that the next ones will too."""
        return self.state.lost_in_a_row >= self.rules.max_failed_groups

    @property
    def running(self) -> int:
        """How many rollouts run."""
        return len(self._running)

    def in_doubt(self) -> list[RolloutStart]:
        """The rollouts that run: in a schedule that was just made, those that a process before this one left."""
        return [self._start(number, rollout) for number, rollout in sorted(self._running)]

    def awaits_scores(self) -> dict[int, list[RolloutStart]]:
        """The groups, by number, that are complete and run only until they are scored."""
        return {
            number: [self._start(number, at) for at, outcome in enumerate(group.outcomes) if outcome == "accepted"]
            for number, group in self.state.open.items()
            if self._needs_scores(group) and group.over
        }

    def in_pool(self) -> dict[int, list[RolloutStart]]:
        """The groups, by number, of which the pool has news to come: that await scores, or are held."""
        held = {
            number: [
                RolloutStart(number, at, attempt, TRAIN, group.row, len(group.attempts), self._prompt(TRAIN, group))
                for at, attempt in enumerate(group.attempts)
                if attempt >= 0
            ]
            for number, group in self.state.held.items()
        }
        return self.awaits_scores() | held

    # -- within --------------------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Admits the next prompt, where there is one and room for it."""
        rules, state = self.rules, self.state
        if state.base_version is None or (rules.prompts is not None and state.position >= rules.prompts):
            return False
        if self.capacity <= 0:
            return False
        epoch, place = divmod(state.position, rules.rows)
        state.position += 1
        number = self._open(TRAIN, epoch, self._row(epoch, place), rules.n_rollouts)
        self._open_train += 1
        heappush(self._oldest, (state.version, number))
        return True

    def _admit_validation(self) -> bool:
        """Admits the next row of a validation; begins one that is due."""
        rules, state = self.rules, self.state
        if not rules.validate_every or state.base_version is None:
            return False
        if state.validation is None:
            if not self._validation_due(state.version):
                return False
            state.validation = ValidationRound(state.version)
        if state.validation.admitted >= rules.val_rows:
            return False
        self._open(VAL, state.validation.version, state.validation.admitted, rules.val_rollouts)
        state.validation.admitted += 1
        return True

    def _validation_due(self, version: int) -> bool:
        state, every = self.state, self.rules.validate_every
        base = state.base_version or 0
        due = base + (version - base) // every * every
        return version >= base and (not state.validated or state.validated[-1] < due)

    def _validation_over(self) -> bool:
        rules, state = self.rules, self.state
        if not rules.validate_every:
            return True
        last = state.version if rules.steps is None else (state.base_version or 0) + rules.steps
        return state.validation is None and not self._validation_due(max(last, state.version))

    def _train_over(self) -> bool:
        rules, state = self.rules, self.state
        return state.accepted >= rules.groups or (rules.prompts is not None and state.position >= rules.prompts)

    def _open(self, channel: str, epoch: int, row: int, rollouts: int) -> int:
        state, number = self.state, self.state.admitted
        state.admitted += 1
        state.open[number] = AdmittedGroup(
            channel, epoch, row, state.version, [0] * rollouts, [0] * rollouts, [""] * rollouts
        )
        for rollout in range(rollouts):
            self._wait(number, rollout)
        self.changed = True
        return number

    def _give_up(self, start: RolloutStart, group: AdmittedGroup) -> LostGroup | None:
        """A rollout has failed for good."""
        group.outcomes[start.rollout] = "failed"
        if group.channel == TRAIN and self.rules.failed_groups == "replace":
            starts = [self._start(start.group, at) for at in range(len(group.outcomes))]
            running = [other for other in starts if (other.group, other.rollout) in self._running]
            complete = [other for other in starts if group.outcomes[other.rollout] == "accepted"]
            self._count(group, -len(complete))
            self._end(start.group, kept=False)
            return LostGroup(running, complete)
        self._end_if_over(start.group)
        return None

    def _count(self, group: AdmittedGroup, rollouts: int) -> None:
        """Counts rollouts that are complete, or are so no longer."""
        if group.channel == TRAIN:
            self.state.rollouts += rollouts
        else:
            self.state.val_rollouts += rollouts

    def _end_if_over(self, number: int) -> None:
        """Closes a group of which nothing is to be played, unless it has to wait for its rewards."""
        group = self.state.open[number]
        kept = "accepted" in group.outcomes
        if group.over and not (kept and self._needs_scores(group)):
            self._end(number, kept=kept)

    def _needs_scores(self, group: AdmittedGroup) -> bool:
        return self.rules.scored and group.channel == TRAIN

    def _end(self, number: int, *, kept: bool) -> None:
        """Closes a group: accepted where it is `kept`, else lost."""
        state = self.state
        group = state.open.pop(number)
        self.behind = True
        if group.channel == TRAIN:
            self._open_train -= 1
            self.changed |= not kept
            if kept and self.rules.follows_pool:
                complete = zip(group.attempts, group.outcomes, strict=True)
                attempts = [attempt if outcome == "accepted" else -1 for attempt, outcome in complete]
                state.held[number] = HeldGroup(group.epoch, group.row, attempts)
            state.accepted += kept
            state.lost += not kept
            state.lost_in_a_row = 0 if kept else state.lost_in_a_row + 1
        elif self._round_ended():
            assert state.validation is not None
            state.validated.append(state.validation.version)
            state.validation = None

    def _round_ended(self) -> bool:
        under_way = self.state.validation
        return (
            under_way is not None
            and under_way.admitted >= self.rules.val_rows
            and not any(group.channel == VAL for group in self.state.open.values())
        )

    def _wait(self, number: int, rollout: int) -> None:
        group = self.state.open.get(number)
        if group is not None:
            heappush(self._waiting, (group.channel == TRAIN, number, rollout))

    def _start(self, number: int, rollout: int) -> RolloutStart:
        group = self.state.open[number]
        prompt = self._prompt(group.channel, group)
        attempt = group.attempts[rollout]
        return RolloutStart(number, rollout, attempt, group.channel, group.row, len(group.outcomes), prompt)

    def _prompt(self, channel: str, group: AdmittedGroup | HeldGroup) -> str:
        return f"{self.state.run}-{channel}-{group.epoch}-{group.row}"

    def _row(self, epoch: int, place: int) -> int:
        """Which row stands at a place of a pass over the data."""
        if not self.rules.shuffle:
            return place
        if self._order is None or self._order[0] != epoch:
            order = list(range(self.rules.rows))
            random.Random(f"{self.rules.seed}-{epoch}").shuffle(order)
            self._order = epoch, order
        return self._order[1][place]
