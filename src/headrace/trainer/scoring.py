"""Rewards for trajectories that brought none, asked of the gateway's `/compute_reward` before they are learned from."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson

from headrace.data.errors import HeadraceError
from headrace.data.trajectory import Trajectory

TIMEOUT_S = 120.0
#: The code with which a gateway says that it has no reward worker.
NO_WORKER = b"no_reward_worker"
#: What is sent to find that out.
_TRIED = {"prompt_ids": [0], "response_ids": [0]}


class NotScored(HeadraceError):
    """A reward that was asked for did not come."""

    code = "not_scored"


class GatewayScorer:
    def __init__(self, gateway: str, key: str | None = None) -> None:
        self._url = gateway.rstrip("/") + "/compute_reward"
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def check(self) -> None:
        """Raises `NotScored` where the gateway says that nobody scores there: a run would wait for rewards in vain."""
        request = urllib.request.Request(self._url, orjson.dumps(_TRIED), self._headers)
        try:
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            said = error.read(2000)
            if NO_WORKER in said:
                raise NotScored(
                    f"score_unrewarded needs a gateway with a reward worker, and {self._url} has none: leave it out, "
                    "and set rewards before trajectories are completed"
                ) from error
        except OSError:
            pass  # it may come up before there is anything to score

    def scores(self, trajectories: Iterable[Trajectory]) -> dict[str, float]:
        """By trajectory uid, the rewards of those that have none and have something to score."""
        found = {}
        for trajectory in trajectories:
            if trajectory.reward is None:
                body = _body(trajectory)
                if body is not None:
                    found[trajectory.uid] = self._score(trajectory.uid, body)
        return found

    def _score(self, uid: str, body: dict[str, Any]) -> float:
        request = urllib.request.Request(self._url, orjson.dumps(body), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return float(orjson.loads(answer.read())["reward_score"])
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise NotScored(f"{self._url} answered {error.code} for trajectory {uid}: {said}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NotScored(f"{self._url} gave no reward for trajectory {uid}: {error}") from error


def _body(trajectory: Trajectory) -> dict[str, Any] | None:
    """The trajectory's last path: what came before the first sampled token, and all after it."""
    sequences = trajectory.sequences()
    if not sequences:
        return None
    last = sequences[-1]
    begin = min(span.start for span in last.spans)
    return {
        "prompt_ids": np.asarray(last.tokens[:begin]).tolist(),
        "response_ids": np.asarray(last.tokens[begin:]).tolist(),
        "dataset_fields": trajectory.metadata,
        "num_turns": len(last.spans),
    }
