"""The storm's trainer: takes groups under a lease, writes down what it learned from, acknowledges; killed at any time.

    python -m headrace.storm.consumer POOL_ADDRESS LOG_FOLDER CHANNEL

Its log is its checkpoint. It is written before the acknowledgement is sent, and read again at the start: what is in it
is not learned from again, and the lease that it names last is ended first. That is what `headrace train` does.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from headrace.data.errors import HeadraceError
from headrace.data.trajectory import Group, Trajectory
from headrace.pool import KEY_VARIABLE
from headrace.pool.connect import connect
from headrace.pool.errors import LeaseLost, PoolUnreachable, UnreadableAnswer
from headrace.storm.log import EventLog, read_log

#: Seconds of a lease. Longer than any freeze: a consumer that is only slow keeps what it has.
LEASE_S = 60.0
#: Groups that are asked for at once; where there are fewer, one at a time.
SIZES = (4, 1)
#: Seconds that a fetch waits for groups.
WAIT_S = 0.5
#: Seconds that one call tries to reach the pool, before it is logged that it could not.
RETRY_S = 5.0


class Consumer:
    """One consumer of one channel, over restarts of its own."""

    def __init__(self, address: str, log: EventLog, channel: str) -> None:
        self._pool = connect(address, key=os.environ.get(KEY_VARIABLE), retry_s=RETRY_S)
        self._log, self._channel = log, channel
        self._learned: set[str] = set()
        self._open_request: tuple[str, int] | None = None
        for event in read_log(log.path):
            match event["e"]:
                case "fetch.sent":
                    self._open_request = event["request"], event["size"]
                case "trained":
                    self._learned.add(event["trajectory"])
                case "acked" | "ack.lost" | "nothing":
                    self._open_request = None

    def run(self) -> None:
        """Takes groups for ever."""
        if self._open_request is not None:
            self._finish(*self._open_request)
        while True:
            for size in SIZES:
                request = f"{self._channel}/{uuid.uuid4().hex}"
                self._log.write("fetch.sent", durable=True, channel=self._channel, request=request, size=size)
                self._finish(request, size)

    def _finish(self, request: str, size: int) -> None:
        """Fetches under a request's id, which gives the same batch however often it is asked, and learns from it."""
        batch = self._patiently(
            lambda: self._pool.fetch_batch(
                size, channel=self._channel, lease_s=LEASE_S, timeout=WAIT_S, request_id=request
            )
        )
        if batch is None:
            self._log.write("nothing", request=request)
            return
        lease = str(batch.lease_id)
        uids = [trajectory.uid for group in batch.groups for trajectory in group.trajectories]
        self._log.write("fetched", channel=self._channel, request=request, lease=lease, trajectories=uids)
        for group in batch.groups:
            for trajectory in group.trajectories:
                if trajectory.uid in self._learned:
                    self._log.write("skipped", trajectory=trajectory.uid, lease=lease)
                    continue
                self._log.write("trained", durable=True, lease=lease, **_record(group, trajectory))
                self._learned.add(trajectory.uid)
        self._log.write("ack.sent", lease=lease)
        try:
            self._patiently(lambda: self._pool.ack(lease, channel=self._channel))
        except LeaseLost as error:
            self._log.write("ack.lost", lease=lease, why=str(error))
            return
        self._log.write("acked", durable=True, lease=lease, trajectories=uids)

    def _patiently(self, call: Any) -> Any:
        """Makes a call until the pool answers: any of them may be made again."""
        while True:
            try:
                return call()
            except (PoolUnreachable, UnreadableAnswer) as error:
                self._log.write("unreachable", why=str(error)[:300])
            except LeaseLost:
                raise
            except HeadraceError as error:  # a full disk, a pool that is closing: it is told, and passes
                self._log.write("refused", why=f"{error.code}: {error}"[:300])
                time.sleep(WAIT_S)


def _record(group: Group, trajectory: Trajectory) -> dict[str, Any]:
    """What was learned from one trajectory, whole: the checker compares every token."""
    return {
        "channel": trajectory.channel,
        "trajectory": trajectory.uid,
        "prompt_uid": group.prompt_uid,
        "group": [one.uid for one in group.trajectories],
        "deliveries": group.deliveries,
        "steps": [
            {
                "index": step.step_index,
                "prompt": step.prompt_ids.tolist(),
                "response": step.response_ids.tolist(),
                "log_probs": step.rollout_log_probs.tolist() if step.rollout_log_probs is not None else None,
                "version": step.policy_version,
                "reward": step.reward,
            }
            for step in trajectory.steps
        ],
    }


def main(address: str, logs: str, channel: str) -> None:
    log = EventLog(Path(logs), f"consumer-{channel}")
    consumer = Consumer(address, log, channel)
    print(f"consumer ready on {address}", flush=True)
    consumer.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
