"""The gateway as flows reach it: trajectories begun, ended and failed, ids sampled, steps handed in, rewards asked for.

What has no answer, or a 503, is asked again for `patience_s`: a gateway that is started anew finds its trajectories in
the pool, and every request here may be sent twice. The agent's key opens calls; what ends or pays a trajectory is sent
with the reward key, which no agent is given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from headrace.data.errors import HeadraceError
from headrace.flows.task import Task
from headrace.net.async_client import AsyncHttpClient
from headrace.net.http_answer import BadAddress, HttpAnswer, NoAnswer, split_address

T = TypeVar("T")

#: Seconds for which a gateway that does not answer is asked again: long enough for it to be started anew.
PATIENCE_S = 120.0
#: Seconds for one answer. A long generation of a large model takes minutes; control routes answer at once.
TOTAL_S = 3600.0
#: Seconds for a connection.
CONNECT_S = 10.0
#: Seconds between two tries, at first and at most.
RETRY_S, MAX_RETRY_S = 0.1, 2.0
#: Characters of a failure's reason that the pool keeps: a sentence, and the last line of a traceback.
MAX_REASON = 500

#: Trajectories that are listed at a time: some 200 bytes each.
PAGE_ROWS = 1000

#: Answers that mean: not now.
NOT_NOW = (503, 429)
#: Statuses of a gateway that will refuse everything: the keys are wrong.
WRONG_KEY = (401, 403)
#: Codes of a 503 that stays as it is, however often it is asked.
FINAL = frozenset({"no_reward_worker"})


class GatewayRefused(HeadraceError):
    """A gateway's answer that is not 200: its status, and the code that it has for what was wrong."""

    code = "refused_by_gateway"

    def __init__(self, message: str, status: int = 0, refusal: str = "") -> None:
        super().__init__(message)
        self.status, self.refusal = status, refusal


class TrajectoryEnded(GatewayRefused):
    """The trajectory is complete or failed already: nothing more can be added under its name."""

    code = "trajectory_ended"


class Handle(msgspec.Struct, frozen=True):
    """A trajectory as its gateway began it."""

    trajectory_uid: str
    prompt_uid: str
    base_url: str


class Ending(msgspec.Struct, frozen=True):
    """How a trajectory's end was taken: `ok`, `late` (handed out or ended before), `unknown`; and how many steps it
    had. `too_few`: it had fewer than asked for, and is still open."""

    status: str
    steps: int = 0


class Generation(msgspec.Struct, frozen=True):
    """What was sampled: one log-prob an id. `sampling` is what the rollout server was asked with, and `logprobs_mode`
    whether the log-probs are of that (`processed`) or of temperature 1 (`raw`), where the gateway knows."""

    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    response_text: str
    stop_reason: str | None = None
    policy_version: int = 0
    version_spans: list[tuple[int, int]] = []
    sampling: dict[str, Any] = {}
    logprobs_mode: str | None = None

    def step_fields(self) -> dict[str, Any]:
        """These tokens as a step's fields on the wire, all but which step of which trajectory it is."""
        return {
            "prompt_ids": self.prompt_ids,
            "response_ids": self.response_ids,
            "rollout_log_probs": self.log_probs,
            "policy_version": self.policy_version,
            "finish_reason": self.stop_reason,
            "sampling": self.sampling,
            "metadata": {"log_probs": self.logprobs_mode} if self.logprobs_mode else {},
            **({"version_spans": self.version_spans} if len(self.version_spans) > 1 else {}),
        }


class ComputedReward(msgspec.Struct, frozen=True):
    """What a reward worker behind the gateway gave an answer, with its named parts."""

    reward_score: float
    reward_extra_info: dict[str, Any] = {}


class _Version(msgspec.Struct, frozen=True):
    version: int


class _Page(msgspec.Struct, frozen=True):
    """Trajectories that a gateway lists; `next` is the cursor behind which there are more. `ready_groups`: of their
    channel, where it was asked for their states."""

    items: list[dict[str, Any]]
    next: str | None = None
    ready_groups: int = 0


class TrajectoryStates(msgspec.Struct, frozen=True):
    """Where trajectories stand, by uid: `state`, and `complete`, `steps` and `reward` of those that are there. A state
    is `queued`, `leased`, `consumed`, `failed`, `unknown`, or why the pool dropped it. `ready_groups`: how many groups
    of their channel are complete and wait for the trainer, whoever made them."""

    rows: dict[str, dict[str, Any]]
    ready_groups: int


class GatewayClient:
    """One gateway, for any number of trajectories at once. Raises `GatewayRefused` for what the gateway refuses and
    `NoAnswer` where there is none within `patience_s`.

    `key` opens calls and is what agents get; `reward_key` ends and rewards trajectories, and is `key` where none is
    given, for gateways that have no other.
    """

    def __init__(
        self,
        address: str,
        key: str | None = None,
        reward_key: str | None = None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.address = address.rstrip("/").removesuffix("/v1")
        split_address(self.address)
        self.key = key
        self._reward_key = reward_key or key
        self._patience_s = patience_s
        self._http = AsyncHttpClient(self.address, total_s=TOTAL_S, connect_s=CONNECT_S)

    async def ready(self) -> bool:
        """Whether it takes calls now; asked once."""
        try:
            return (await self._http.request("GET", "/ready")).status == 200
        except BadAddress:
            raise
        except NoAnswer:
            return False

    async def policy_version(self, *, patience_s: float | None = None) -> int:
        """The newest policy version that its servers sample with."""
        return (await self._asked(_Version, "GET", "/policy_version", patience_s=patience_s)).version

    async def check_keys(self) -> None:
        """Raises `GatewayRefused` where one of the keys is not the gateway's."""
        await self.policy_version()
        await self._asked(_Page, "GET", "/trajectories?limit=1", pays=True)

    async def init_trajectory(self, task: Task) -> Handle:
        """Begins a task's trajectory with its row's fields, or finds it begun. Raises `TrajectoryEnded` where it is
        complete or failed."""
        body = {
            "trajectory_uid": task.trajectory_uid,
            "prompt_uid": task.prompt_uid,
            "channel": task.channel,
            "n_rollouts": task.n_rollouts,
            "metadata": task.metadata,
            **({"sampling": task.sampling} if task.sampling else {}),
        }
        # The reward key where there is one: metadata that an agent's key set could be an agent's word.
        return await self._asked(Handle, "POST", "/init_trajectory", body, pays=True)

    async def register(self, handle: Handle, metadata: Mapping[str, Any]) -> None:
        """Adds to what is known of a trajectory."""
        path = f"{_path(handle)}/v1/register_trajectory"
        await self._asked(dict[str, Any], "POST", path, {"metadata": dict(metadata)}, pays=True)

    async def complete(self, handle: Handle, reward: float | None = None, *, min_steps: int = 0) -> Ending:
        """Ends a trajectory. One with fewer than `min_steps` steps stays open, and the answer says `too_few`."""
        body: dict[str, Any] = {} if reward is None else {"reward": reward}
        if min_steps:
            body["min_steps"] = min_steps
        path = f"/complete_trajectory/{quote(handle.trajectory_uid, safe='')}"
        return await self._asked(Ending, "POST", path, body, pays=True)

    async def fail(self, handle: Handle, reason: str, *, patience_s: float | None = None) -> Ending:
        """Ends a trajectory as failed: its steps are dropped, and its group waits for another in its place."""
        path = f"/fail_trajectory/{quote(handle.trajectory_uid, safe='')}"
        body = {"reason": reason[:MAX_REASON]}
        return await self._asked(Ending, "POST", path, body, pays=True, patience_s=patience_s)

    async def delete(self, trajectory_uid: str) -> None:
        """Removes a trajectory, complete or not, and all of its steps. One that is not there, or was handed out, stays
        as it is."""
        try:
            await self._asked(dict[str, Any], "DELETE", f"/trajectories/{quote(trajectory_uid, safe='')}", pays=True)
        except GatewayRefused as error:
            if error.status not in (404, 409):
                raise

    async def trajectories(self, channel: str) -> list[dict[str, Any]]:
        """The trajectories that a channel holds: `trajectory_uid`, `prompt_uid`, `state`, `complete`, `steps`,
        `reward`. What changes while they are listed may be missing."""
        found: list[dict[str, Any]] = []
        cursor = ""
        while True:
            path = f"/trajectories?channel={quote(channel, safe='')}&limit={PAGE_ROWS}&cursor={cursor}"
            page = await self._asked(_Page, "GET", path, pays=True)
            found += page.items
            if page.next is None:
                return found
            cursor = quote(page.next, safe="")

    async def states(
        self, channel: str, trajectory_uids: Sequence[str], *, patience_s: float | None = None
    ) -> TrajectoryStates:
        """Where trajectories of a channel stand."""
        found: dict[str, dict[str, Any]] = {}
        ready = 0
        for at in range(0, len(trajectory_uids), PAGE_ROWS):
            body = {"trajectory_uids": list(trajectory_uids[at : at + PAGE_ROWS]), "channel": channel}
            page = await self._asked(_Page, "POST", "/trajectories", body, pays=True, patience_s=patience_s)
            found |= {row["trajectory_uid"]: row for row in page.items}
            ready = page.ready_groups
        return TrajectoryStates(found, ready)

    async def generate(
        self,
        *,
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
        model: str | None = None,
        handle: Handle | None = None,
    ) -> Generation:
        """Samples an answer to ids, or to messages that the gateway renders; records nothing."""
        body = {
            "prompt_ids": list(prompt_ids) if prompt_ids is not None else None,
            "messages": list(messages) if messages is not None else None,
            "tools": list(tools) if tools else None,
            "sampling_params": dict(sampling) if sampling else None,
            "model": model,
            "trajectory_uid": handle.trajectory_uid if handle is not None else None,
        }
        return await self._asked(Generation, "POST", "/generate", {k: v for k, v in body.items() if v is not None})

    async def submit_steps(self, steps: Sequence[Mapping[str, Any]], channel: str = "train") -> dict[str, int]:
        """Hands steps in, all or none (`Step` on the wire); how many were `accepted`, and how many `duplicates`."""
        path = f"/submit_steps?channel={quote(channel, safe='')}"
        body = {"steps": [dict(step) for step in steps]}
        return await self._asked(dict[str, int], "POST", path, body, pays=True)

    async def compute_reward(self, **fields: Any) -> ComputedReward:
        """What the gateway's reward worker gives an answer: `prompt_ids`, `response_ids`, `dataset_fields`,
        `extra_fields`, `num_turns`; or `trajectory_uid`, `messages`, `dataset_fields`."""
        return await self._asked(ComputedReward, "POST", "/compute_reward", fields, pays=True)

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._http.close()

    async def _asked(
        self,
        kind: type[T],
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        pays: bool = False,
        patience_s: float | None = None,
    ) -> T:
        """The answer of one route, of its kind; a 200 that is nothing of the kind is no answer of the gateway."""
        where = f"{self.address}{path.partition('?')[0]}"
        key = self._reward_key if pays else self.key
        headers = {"authorization": f"Bearer {key}"} if key else None
        give_up = time.monotonic() + (self._patience_s if patience_s is None else patience_s)
        pause_s = RETRY_S
        while True:
            try:
                answer = await self._http.request(method, path, json=body, headers=headers)
                if answer.status == 200:
                    return _read(kind, where, answer)
            except BadAddress:
                raise
            except NoAnswer:
                if time.monotonic() + pause_s > give_up:
                    raise
            else:
                error = _refusal(where, answer)
                if answer.status not in NOT_NOW or error.refusal in FINAL or time.monotonic() + pause_s > give_up:
                    raise error
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_RETRY_S)


def _path(handle: Handle) -> str:
    return f"/{quote(handle.trajectory_uid, safe='')}/{quote(handle.prompt_uid, safe='')}"


def _read(kind: type[T], where: str, answer: HttpAnswer) -> T:
    """An answer's body; raises `NoAnswer` where it is none of the kind: a proxy in front of the gateway may say 200."""
    try:
        return msgspec.convert(answer.json(), kind)
    except (ValueError, msgspec.ValidationError) as error:
        raise NoAnswer(f"{where} answered what no gateway does: {error}") from None


def _refusal(where: str, answer: HttpAnswer) -> GatewayRefused:
    """A gateway's refusal: `{"detail", "code"}`, or OpenAI's error object."""
    try:
        found = answer.json()
        found = found.get("error", found) if isinstance(found, dict) else {}
        refusal = str(found.get("code") or "") if isinstance(found, dict) else ""
    except ValueError:
        refusal = ""
    kind = TrajectoryEnded if refusal in ("trajectory_complete", "trajectory_failed") else GatewayRefused
    return kind(f"{where} answered {answer.status}: {answer.error_text()}", answer.status, refusal)
