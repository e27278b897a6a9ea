"""What a call asks for, in no dialect, from its body to the parameters that it is sampled with.

A dialect turns its wire into a `CallRequest`, by the fields that it takes out of a body; everything behind it knows
only this. What a body becomes in memory is bounded before it is parsed: its text takes as much as it has bytes, but an
object of two bytes takes a hundred. Text that no context holds is refused later, by its length.

Every parameter that shapes the distribution is explicit, so that no server's default changes it behind our back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import orjson

from headrace.data.errors import InvalidInput, shown
from headrace.data.step import IntArray
from headrace.gateway.errors import Refusal
from headrace.gateway.settings import GatewaySettings, channel_values
from headrace.tokens import Conversation, Message


class References(msgspec.Struct, frozen=True, eq=False):
    """What a call names of earlier answers instead of sending it. `calls`: those that were answered so, in the order in
    which they are named. `read`: all the call's messages, from these answers by call; a `Refusal` names what is missing
    among them. `known`: answers that were found outside the call's own trajectory."""

    calls: tuple[str, ...]
    read: Callable[[Mapping[str, Message]], tuple[Message, ...]]
    known: Mapping[str, Message] = {}


class CallRequest(msgspec.Struct, kw_only=True):
    """What one call asks for: a conversation, or prompts of text or ids, and how to answer.

    extra               fields that are not known here, for the rollout server
    top_logprobs        alternatives that are shown of each token; None where no log-probs are wanted at all
    allow_tool_calls    the answer may hold tool calls: one at most with `single_tool_call`
    required_tools      it must call one of these
    thinking            whether to reason first; None where that is left to the template
    user                whom the agent says it works for
    previous            the call whose conversation this one goes on with
    opening             messages at its beginning that are for this call alone, and not for those that go on from it
    references          earlier answers that it names and does not send
    store               a later call may name this one
    tools_bytes         the size of its tools, where it was measured
    dialect_notes       what the dialect needs for its answer; nobody else reads it
    """

    model: str
    conversation: Conversation | None = None
    prompts: tuple[str | IntArray, ...] = ()
    sampling: dict[str, Any]
    extra: dict[str, Any] = {}
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    top_logprobs: int | None = None
    allow_tool_calls: bool = False
    single_tool_call: bool = False
    required_tools: tuple[str, ...] = ()
    thinking: bool | None = None
    return_token_ids: bool = False
    user: str | None = None
    opening: int = 0
    previous: str | None = None
    references: References | None = None
    store: bool = False
    tools_bytes: int | None = None
    dialect_notes: Any = None

    @property
    def named(self) -> str | None:
        """The earlier call that this one names last."""
        return self.references.calls[-1] if self.references is not None else self.previous


class BadField(InvalidInput):
    """A field of a request that cannot be taken, by its name."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


# -- reading bodies ----------------------------------------------------------------------------------------------------

#: Bytes from which on a body is read in a thread: as much as may take some 10 ms.
LARGE_BODY_BYTES = 256_000
#: Objects and lists that a large body may hold, about 0.1 GB of them. Braces in its texts count too: those of the code
#: in a prompt of a million tokens are some 100,000.
MAX_CONTAINERS = 300_000
#: Commas that it may hold, in its texts too, and so how many values: ids of prompts, mostly, 40 bytes each.
MAX_VALUES = 4_000_000
#: Bytes of a call's fields that each of its steps keeps: its parameters, the form of its answer, what is not known
#: here. A step keeps 1 MiB beside its tokens, and has more to say.
MAX_CALL_BYTES = 900_000
#: Bytes of tools: a thousand tools of two kilobytes each are more tokens than any context has.
MAX_TOOLS_BYTES = 2_000_000


class CallReader:
    """Reads the bodies of one gateway's calls: small ones on the spot, large ones in a thread, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "headrace-read")

    def close(self) -> None:
        """Ends its thread without waiting for what it reads."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(
        self, body: bytes, read: Callable[[bytes], CallRequest], digest: Callable[[bytes], str]
    ) -> tuple[CallRequest, str]:
        """What a body asks for, by the dialect's `read`, and its digest; `InvalidInput` where it cannot be read, or
        holds too much."""
        if len(body) < LARGE_BODY_BYTES:
            return read(body), digest(body)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _large, body, read, digest)


def _large(
    body: bytes, read: Callable[[bytes], CallRequest], digest: Callable[[bytes], str]
) -> tuple[CallRequest, str]:
    nested = body.count(b"{") + body.count(b"[")
    if nested > MAX_CONTAINERS:
        raise BadField(
            f"the body holds {nested} objects and lists; at most {MAX_CONTAINERS} are taken. Send fewer messages"
        )
    values = body.count(b",")
    if values > MAX_VALUES:
        raise BadField(f"the body holds {values} values; at most {MAX_VALUES} are taken. Send fewer")
    request = read(body)
    request.tools_bytes = tools_bytes(request.conversation)
    if request.tools_bytes > MAX_TOOLS_BYTES:
        raise BadField(
            f"tools have {request.tools_bytes} bytes; at most {MAX_TOOLS_BYTES} are taken. Offer fewer", "tools"
        )
    return request, digest(body)


def tools_bytes(conversation: Conversation | None) -> int:
    """The size of a conversation's tools as JSON."""
    return len(msgspec.json.encode(conversation.tools)) if conversation is not None and conversation.tools else 0


def read_fields(body: bytes) -> dict[str, Any]:
    """A request's fields; what is no JSON object is named."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadField(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadField(f"the body must be a JSON object, not {shown(fields)}")
    return fields


# -- taking fields -----------------------------------------------------------------------------------------------------

#: Answers to one prompt, and stop strings of one call.
MAX_N, MAX_STOPS = 128, 64

_KINDS: dict[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "repetition_penalty": (int, float),
    "seed": (int,),
    "min_tokens": (int,),
    "ignore_eos": (bool,),
    "include_stop_str_in_output": (bool,),
}
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 2**31),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 100),
    "seed": (-(2**63), 2**63 - 1),
    "min_tokens": (0, 2**31),
}


def take(fields: dict[str, Any], name: str, kind: type, default: Any, what: str) -> Any:
    """A field of one type; null is not given."""
    value = fields.pop(name, None)
    if value is None:
        return default
    if type(value) is not kind:
        raise BadField(f"{name} must be {what}, not {shown(value)}", name)
    return value


def take_n(fields: dict[str, Any]) -> int:
    """How many answers are asked for."""
    n: int = take(fields, "n", int, 1, "an integer")
    if not 1 <= n <= MAX_N:
        raise BadField(f"n is {n}; it must lie in 1..{MAX_N}", "n")
    return n


def take_max_tokens(fields: dict[str, Any], *names: str) -> int | None:
    """The first of the names that is given."""
    found: int | None = None
    for name in names:
        value = fields.pop(name, None)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise BadField(f"{name} must be an integer of at least 1, not {shown(value)}", name)
        found = value if found is None else found
    return found


def take_sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """Takes the sampling parameters out of a request's fields; null is not given. What is wrong is named."""
    found: dict[str, Any] = {}
    for name in _KINDS.keys() & fields.keys():
        kinds, value = _KINDS[name], fields.pop(name)
        if value is None:
            continue
        if type(value) not in kinds:
            kind = "true or false" if bool in kinds else "an integer" if float not in kinds else "a number"
            raise BadField(f"{name} must be {kind}, not {shown(value)}", name)
        low, high = _RANGES.get(name, (0, 1))
        if not low <= value <= high:
            raise BadField(f"{name} is {value}; it must lie in {low:g}..{high:g}", name)
        found[name] = value
    if found.get("top_p") == 0:
        raise BadField("top_p is 0; it must be above 0", "top_p")
    if found.get("repetition_penalty") == 0:
        raise BadField("repetition_penalty is 0; it must be above 0", "repetition_penalty")
    stop = _stop(fields.pop("stop", None))
    if stop:
        found["stop"] = stop
    ids = fields.pop("stop_token_ids", None)
    if ids:
        found["stop_token_ids"] = _ids(ids, "stop_token_ids")
    bias = fields.pop("logit_bias", None)
    if bias:
        found["logit_bias"] = _bias(bias)
    return found


def _stop(value: Any) -> list[str]:
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise BadField(f"stop must be a string or a list of strings, not {shown(value)}", "stop")
    if len(stops) > MAX_STOPS:
        raise BadField(f"stop has {len(stops)} strings; at most {MAX_STOPS} are taken", "stop")
    if not all(stops):
        raise BadField("stop holds an empty string, which every answer begins with", "stop")
    return stops


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise BadField(f"{name} must be a list of token ids, not {shown(value)}", name)
    return value


def _bias(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise BadField(f"logit_bias must be an object of token ids and numbers, not {shown(value)}", "logit_bias")
    for token, bias in value.items():
        if (
            not (str(token).isascii() and str(token).isdigit())
            or type(bias) not in (int, float)
            or not -100 <= bias <= 100
        ):
            raise BadField(
                f"logit_bias[{shown(token)}] is {shown(bias)}; keys are token ids, values lie in -100..100",
                "logit_bias",
            )
    return dict(value)


def checked_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that hold for many calls; raises `BadField` for what is wrong or unknown."""
    fields = dict(given)
    most = take_max_tokens(fields, "max_tokens")
    found = take_sampling(fields)
    if fields:
        raise BadField(f"sampling: {', '.join(map(shown, fields))} is no sampling parameter", "sampling")
    return found if most is None else {**found, "max_tokens": most}


# -- effective parameters ----------------------------------------------------------------------------------------------

#: What a server would otherwise decide by its own defaults, said in every request.
EXPLICIT_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}

#: Tokens that an answer may have where neither a flag nor the server says.
DEFAULT_MAX_TOKENS = 4096


class SamplingRules:
    """What one gateway's flags say of parameters: bounds of length, and what each channel forces or refuses."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._prompt_length = settings.prompt_length
        self._response_length = settings.response_length
        self._forced = _by_channel(settings.sampling)
        self._refused = _by_channel(settings.refuse)
        for values in self._forced.values():
            if "stop" in values:
                values["stop"] = _stop(values["stop"])  # a list, as agents' own are

    def effective(
        self,
        request: CallRequest,
        channel: str,
        prompt: int,
        context: int | None,
        stop_ids: Iterable[int] = (),
        forced: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The parameters for a prompt of `prompt` tokens in a model's `context`; `Refusal` where it is too long, or a
        value is not allowed. `forced`: those of its trajectory, which override the agent's; its channel's override
        both."""
        most = self._max_tokens(prompt, context)
        given = {**EXPLICIT_DEFAULTS, **request.sampling, **(forced or {})}
        for name, value in self._refused.get(channel, {}).items():
            if given.get(name) == value:
                raise Refusal(
                    f"channel {channel!r} does not take {name}={value}", 400, code="parameter_refused", param=name
                )
        given |= self._forced.get(channel, {})
        asked = given.get("max_tokens")
        given["max_tokens"] = min(asked, most) if asked is not None else most
        if request.n > 1:
            given["n"] = request.n
        ends = [*given.get("stop_token_ids", ()), *stop_ids] if not given.get("ignore_eos") else []
        if ends:
            given["stop_token_ids"] = sorted(set(ends))
        return given

    def check_length(self, prompt: int, context: int | None, *, at_least: bool = False) -> None:
        """Refuses a prompt of so many tokens, or of `at_least` so many, that is too long."""
        longest = self._prompt_length
        if context is not None:
            longest = min(longest, context - 1) if longest is not None else context - 1
        if longest is not None and prompt > longest:
            raise Refusal(
                f"the prompt has {'at least ' if at_least else ''}{prompt} tokens; at most {longest} are taken. "
                "Shorten the conversation: nothing is ever cut here",
                400,
                code="context_length_exceeded",
                param="messages",
            )

    def _max_tokens(self, prompt: int, context: int | None) -> int:
        """How many tokens an answer may have."""
        self.check_length(prompt, context)
        room = context - prompt if context is not None else None
        caps = [cap for cap in (self._response_length, room) if cap is not None]
        return min(caps) if caps else DEFAULT_MAX_TOKENS


def _by_channel(specs: Iterable[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for spec in specs:
        channel, values = channel_values(spec)
        found.setdefault(channel, {}).update(values)
    return found
