"""Requests and responses of the routes that speak no dialect: their bodies by field, JSON answers, and refusals."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.json import to_json
from headrace.gateway.errors import Refusal, refusal, too_deep

log = logging.getLogger("headrace.gateway")

#: The path of a trajectory's base URL.
BASE_PATH = "/{trajectory_uid}/{prompt_uid}"

Handler = Callable[[Request], Awaitable[Any]]
T = TypeVar("T")


class InitTrajectoryBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/init_trajectory`: all of it may be left out. `sampling` overrides what the trajectory's calls ask for."""

    prompt_uid: str | None = None
    channel: str | None = None
    metadata: dict[str, Any] | None = None
    n_rollouts: int | None = None
    trajectory_uid: str | None = None
    sampling: dict[str, Any] | None = None


class RegisterTrajectoryBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/register_trajectory`: where a trajectory belongs, and what is known of it."""

    channel: str | None = None
    metadata: dict[str, Any] | None = None
    n_rollouts: int | None = None


class RewardBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/reward`: for one step, or for the trajectory's last."""

    reward: float
    step_index: int | None = None


class FeedbackBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/v1/feedback`: what an answer was worth, by its response id."""

    response_id: str
    reward: float
    comment: str | None = None


class CompleteTrajectoryBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/complete_trajectory`: `channel` must be the trajectory's own, where it is given."""

    reward: float | None = None
    channel: str | None = None


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """Ids, or messages; the parameters either in `sampling_params` or beside the messages."""

    prompt_ids: list[int] | None = None
    sampling_params: dict[str, Any] | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    trajectory_uid: str | None = None
    prompt_uid: str | None = None
    model: str | None = None


class StepBody(msgspec.Struct, forbid_unknown_fields=True):
    """A step as white-box flows send it."""

    prompt_ids: list[int]
    response_ids: list[int]
    trajectory_uid: str
    prompt_uid: str | None = None
    step_index: int | None = None
    reward: float | None = None
    rollout_log_probs: list[float] | None = None
    policy_version: int | None = None
    is_last: bool | None = None
    metadata: dict[str, Any] | None = None
    multi_modal_data: dict[str, Any] | None = None
    routed_experts: Any = None
    finish_reason: str | None = None
    sampling: dict[str, Any] | None = None
    created_at: float | None = None
    call_id: str | None = None
    version_spans: list[tuple[int, int]] | None = None


class SubmitStepsBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/submit_steps`: all are taken, or none."""

    steps: list[StepBody]


class ComputeRewardBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/compute_reward`, as reward workers would take it."""

    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    dataset_fields: dict[str, Any] | None = None
    extra_fields: dict[str, Any] | None = None
    num_turns: int | None = None
    trajectory_uid: str | None = None
    messages: list[Any] | None = None


class PolicyVersionBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/policy_version`: of all servers, or of one; of the default model, or of a named one."""

    version: int
    server: str | None = None
    model: str | None = None


class DropSessionBody(msgspec.Struct, forbid_unknown_fields=True):
    """What workers tell each other: a trajectory that they must read from the pool again."""

    trajectory_uid: str


class ServerBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/servers`: a rollout server to add or to take out."""

    address: str
    model: str | None = None


def path_uid(request: Request, name: str) -> str:
    """A uid of the path, percent-decoded; `InvalidInput` where it is no UTF-8."""
    try:
        return unquote(request.path_params[name], errors="strict")
    except UnicodeDecodeError:
        raise InvalidInput(f"{name} in the path is no UTF-8: {request.path_params[name]!r}") from None


def catch_refusals(handler: Handler) -> Handler:
    """A handler that answers errors as `{"detail": ...}`, each with its status; unexpected ones are logged, and 500."""

    async def guarded(request: Request) -> Response:
        try:
            found: Response = await handler(request)
            return found
        except ClientDisconnect:
            return Response(status_code=499)
        except HeadraceError as error:
            return refusal_response(refusal(error))
        except RecursionError:
            return refusal_response(too_deep())
        except Exception as error:
            log.exception("a request failed")
            return refusal_response(
                Refusal(f"the gateway failed at this ({type(error).__name__}); its log says where", 500)
            )

    guarded.__name__ = handler.__name__
    guarded.__doc__ = handler.__doc__
    return guarded


def decode_body(data: bytes, kind: type[T], *, empty: bool = False) -> T:
    """A body as the struct that a route takes; `Refusal` where it is none. With `empty`, no body is an object without
    fields."""
    if empty and not data.strip():
        data = b"{}"
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise Refusal(f"the body is not what this route takes: {error}", 400, code="invalid_request") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"the body is no JSON: {error}", 400, code="invalid_json") from None
    except RecursionError:
        raise too_deep() from None


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response in JSON, numpy's values among it."""
    return Response(to_json(value), status, headers, "application/json")


def retry_header(refusal: Refusal) -> dict[str, str]:
    """`Retry-After`, where it is worth another try."""
    return {} if refusal.retry_after is None else {"retry-after": str(max(1, math.ceil(refusal.retry_after)))}


def refusal_response(refusal: Refusal) -> Response:
    """The answer to a request that is refused, on a route that speaks no dialect."""
    said: dict[str, Any] = {"detail": str(refusal)}
    if refusal.reason is not None:
        said["code"] = refusal.reason
    return json_response(said, refusal.status, retry_header(refusal))
