"""The two routes that sample, as bytes: `/v1/completions` and `/inference/v1/generate`, ids in and ids out.

A prompt is encoded once; one that comes back as it was sent is recognised by its bytes and not parsed. Completions are
what every server has; generate tells the versions that sampled each token, takes images, and carries no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import orjson

from headrace.data.errors import shown
from headrace.data.step import INT32_MAX, IntArray
from headrace.gateway.upstream.errors import ErrorBody, MalformedAnswer, ServerFault
from headrace.gateway.upstream.experts import decode_experts
from headrace.gateway.upstream.types import SampledChoice, UpstreamRequest, VersionSpans
from headrace.tokens.vision import fold_images

TokenId = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
NOT_TOLD = msgspec.Raw(b"null")
#: The field that tells a prompt, and what stands for one that needs no reading.
PROMPT_FIELD = b'"prompt_token_ids":'
AS_SENT = b'"as sent"'
#: Bytes from which it is cheaper to look for a prompt in an answer than to parse it there.
LONG_PROMPT_BYTES = 2048


class EncodedRequest(msgspec.Struct, frozen=True, eq=False):
    """A request with its prompt as JSON: written once, sent as it is, and compared with what comes back."""

    request: UpstreamRequest
    choices: int
    prompt: bytes

    @classmethod
    def of(cls, request: UpstreamRequest) -> EncodedRequest:
        """A request with its prompt encoded."""
        n = request.sampling.get("n")
        return cls(
            request, n if isinstance(n, int) else 1, orjson.dumps(request.prompt, option=orjson.OPT_SERIALIZE_NUMPY)
        )

    def without_prompt(self, data: bytes) -> bytes:
        """The answer with every long prompt that came back as it was sent replaced by the short mark `AS_SENT`.

        JSON escapes a quote inside a string, so what reads like the field's name and the whole prompt is that.
        """
        if len(self.prompt) < LONG_PROMPT_BYTES or len(data) < len(self.prompt):
            return data
        kept, done = [], 0
        at = data.find(PROMPT_FIELD)
        while at >= 0:
            begin = at + len(PROMPT_FIELD)
            if data.startswith(self.prompt, begin):
                kept += [data[done:begin], AS_SENT]
                done = begin + len(self.prompt)
                begin = done
            at = data.find(PROMPT_FIELD, begin)
        return b"".join([*kept, data[done:]]) if kept else data

    def consumed(self, told: msgspec.Raw) -> IntArray | None:
        """The prompt as the server told it: the request's own array where it is that, None where it told none."""
        said = bytes(told)
        if said == self.prompt or said == AS_SENT:
            return self.request.prompt
        if said == b"null":
            return None
        found = np.array(msgspec.json.decode(said, type=list[TokenId]), dtype=np.int32)
        return self.request.prompt if np.array_equal(found, self.request.prompt) else found

    def prompt_to_send(self) -> bytes:
        """The prompt with one placeholder an image: the server unfolds images itself."""
        if not self.request.images:
            return self.prompt
        return orjson.dumps(fold_images(self.request.prompt, self.request.images), option=orjson.OPT_SERIALIZE_NUMPY)


class SamplingWire(Protocol):
    """A route that samples: how a request is written, and how its answer is read."""

    def body(self, encoded: EncodedRequest, model: str, *, stream: bool) -> bytes:
        """A request's body; `model` is the name that the server knows the model by."""
        ...

    def whole(self, encoded: EncodedRequest, data: bytes, version: int) -> list[SampledChoice]:
        """The choices of a whole answer; `spans` only where the server told versions. `version` was known before."""
        ...

    def piece(self, encoded: EncodedRequest, data: bytes, version: int) -> list[SampledChoice]:
        """The pieces that one event of a stream holds; raises `ServerFault` where it is an error."""
        ...

    def pieces(self, encoded: EncodedRequest, events: Sequence[bytes], version: int) -> list[SampledChoice]:
        """What several events that came together hold: the pieces of a choice that follow each other are one. Raises
        like `piece`."""
        ...


def log_prob_values(given: Sequence[float | None]) -> list[float]:
    """The log-probs, with NaN for a missing one, which the step's check then refuses."""
    if None in given:
        return [math.nan if value is None else value for value in given]
    return given  # type: ignore[return-value]


def no_token_ids() -> MalformedAnswer:
    """The error for an answer without ids."""
    return MalformedAnswer("there are no token_ids; a server that returns them is needed (vLLM 0.11 or later)")


def join_pieces(pieces: Sequence[SampledChoice]) -> list[SampledChoice]:
    """Pieces of a stream of which those of one choice are one, in the order of their first; one that comes after a
    choice's end stands alone."""
    if len(pieces) < 2:
        return list(pieces)
    found: list[SampledChoice] = []
    growing: dict[int, SampledChoice] = {}
    for piece in pieces:
        whole = growing.get(piece.index)
        if whole is None or whole.finish_reason is not None:
            growing[piece.index] = piece
            found.append(piece)
        else:
            join_piece(whole, piece)
    return found


def join_piece(whole: SampledChoice, piece: SampledChoice) -> None:
    """Adds to a piece of a stream the one that follows it, as if both had come in one."""
    whole.ids += piece.ids
    if whole.log_probs is None or piece.log_probs is None:
        whole.log_probs = None
    else:
        whole.log_probs += piece.log_probs
    whole.text = None if whole.text is None or piece.text is None else whole.text + piece.text
    whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
    if piece.consumed is not None:
        whole.consumed = piece.consumed
    whole.spans = piece.spans or whole.spans
    if piece.tokens is not None:
        whole.tokens = (whole.tokens or []) + piece.tokens
    if piece.top is not None:
        whole.top = (whole.top or []) + piece.top
    whole.routed_experts = piece.routed_experts


class VersionRange(msgspec.Struct):
    """One of a server's `weight_versions`: its tokens `[start, end)` are of this version."""

    version: str
    start: int
    end: int


def extend_spans(spans: VersionSpans, first: int, version: int) -> VersionSpans:
    """The spans, with the tokens from `first` on under `version`."""
    if spans and spans[-1][1] == version:
        return spans
    return (*spans, (first, version))


def spans_of(told: Sequence[VersionRange] | None, known: int) -> VersionSpans:
    """A server's `weight_versions` as spans; empty where none of them is a number, or they leave a gap.

    A version that is no number, beside one that is, counts as `known`, the version known when the call began.
    """
    if not told or all(version_number(span.version) is None for span in told):
        return ()
    spans: VersionSpans = ()
    at = 0
    for span in told:
        if span.start != at or span.end < span.start:
            return ()
        if span.end > span.start:
            number = version_number(span.version)
            spans = extend_spans(spans, span.start, known if number is None else number)
        at = span.end
    return spans


def version_number(told: str) -> int | None:
    """A server's version as a number; None for "default" (weights nobody numbered) and names such as "step-7"."""
    if not (told.isascii() and told.isdigit() and len(told) <= 10):
        return None
    return number if (number := int(told)) <= INT32_MAX else None


class _CompletionLogProbs(msgspec.Struct):
    token_logprobs: list[float | None]


class _CompletionTopLogProbs(_CompletionLogProbs):
    """With the tokens' texts and alternatives, for an agent that asked for log-probs."""

    tokens: list[str] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: _CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: msgspec.Raw = NOT_TOLD
    routed_experts: str | None = None


class _CompletionTopChoice(_CompletionChoice):
    logprobs: _CompletionTopLogProbs | None = None


class _CompletionBody(msgspec.Struct):
    choices: list[_CompletionChoice]


class _CompletionTopBody(msgspec.Struct):
    choices: list[_CompletionTopChoice]


class _CompletionChunk(msgspec.Struct):
    choices: list[_CompletionChoice] = []
    error: ErrorBody | None = None


class _CompletionTopChunk(msgspec.Struct):
    choices: list[_CompletionTopChoice] = []
    error: ErrorBody | None = None


class CompletionsWire:
    """`POST /v1/completions`, which every server has."""

    def __init__(self) -> None:
        self._whole = msgspec.json.Decoder(_CompletionBody)
        self._shown_whole = msgspec.json.Decoder(_CompletionTopBody)
        self._piece = msgspec.json.Decoder(_CompletionChunk)
        self._shown_piece = msgspec.json.Decoder(_CompletionTopChunk)
        self._pieces = msgspec.json.Decoder(list[_CompletionChunk])

    def body(self, encoded: EncodedRequest, model: str, *, stream: bool) -> bytes:
        request = encoded.request
        given: dict[str, Any] = {
            **request.extra,
            **{name: value for name, value in request.sampling.items() if value is not None},
            "model": model,
            "prompt": orjson.Fragment(encoded.prompt),
            "logprobs": request.top_logprobs or 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        if request.call_id:
            given["request_id"] = request.call_id
        if stream:
            given["stream"] = True
            given["stream_options"] = {"include_usage": True}
        return orjson.dumps(given, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)

    def whole(self, encoded: EncodedRequest, data: bytes, version: int) -> list[SampledChoice]:
        found = (self._shown_whole if encoded.request.top_logprobs else self._whole).decode(
            encoded.without_prompt(data)
        )
        return [_from_completion(choice, encoded) for choice in found.choices]

    def piece(self, encoded: EncodedRequest, data: bytes, version: int) -> list[SampledChoice]:
        found = (self._shown_piece if encoded.request.top_logprobs else self._piece).decode(
            encoded.without_prompt(data)
        )
        if found.error is not None:
            raise ServerFault.of(found.error)
        return [_from_completion(choice, encoded) for choice in found.choices]

    def pieces(self, encoded: EncodedRequest, events: Sequence[bytes], version: int) -> list[SampledChoice]:
        if len(events) > 1 and not encoded.request.top_logprobs:
            try:
                chunks = self._pieces.decode(encoded.without_prompt(b"[%b]" % b",".join(events)))
            except (msgspec.MsgspecError, ValueError, RecursionError):
                chunks = []  # one of them is not as it should be: read one by one, it is told which way
            if len(chunks) == len(events):
                return _joined_completions(chunks, encoded)
        return join_pieces([piece for data in events for piece in self.piece(encoded, data, version)])


def _joined_completions(chunks: Sequence[_CompletionChunk], encoded: EncodedRequest) -> list[SampledChoice]:
    """What `join_pieces` would make of the chunks' pieces, without a piece for each."""
    found: list[SampledChoice] = []
    growing: dict[int, SampledChoice] = {}
    for chunk in chunks:
        if chunk.error is not None:
            raise ServerFault.of(chunk.error)
        for choice in chunk.choices:
            whole = growing.get(choice.index)
            if whole is None or whole.finish_reason is not None or choice.routed_experts is not None:
                piece = _from_completion(choice, encoded)
                if whole is not None and whole.finish_reason is None:
                    join_piece(whole, piece)
                else:
                    growing[choice.index] = piece
                    found.append(piece)
                continue
            if choice.token_ids is None:
                raise no_token_ids()
            whole.ids += choice.token_ids
            if choice.logprobs is None or whole.log_probs is None:
                whole.log_probs = None
            else:
                whole.log_probs += log_prob_values(choice.logprobs.token_logprobs)
            if whole.text is not None:
                whole.text += choice.text
            whole.finish_reason, whole.stop_reason = choice.finish_reason, choice.stop_reason
            whole.routed_experts = None
            if choice.prompt_token_ids is not NOT_TOLD:
                told = encoded.consumed(choice.prompt_token_ids)
                whole.consumed = whole.consumed if told is None else told
    return found


def _from_completion(choice: _CompletionChoice, encoded: EncodedRequest) -> SampledChoice:
    if choice.token_ids is None:
        raise no_token_ids()
    given = choice.logprobs
    found = SampledChoice(
        choice.index,
        choice.token_ids,
        None if given is None else log_prob_values(given.token_logprobs),
        choice.text,
        choice.finish_reason,
        choice.stop_reason,
        encoded.consumed(choice.prompt_token_ids),
        routed_experts=decode_experts(choice.routed_experts),
    )
    if isinstance(given, _CompletionTopLogProbs):
        found.tokens = given.tokens
        found.top = None if given.top_logprobs is None else [shown or {} for shown in given.top_logprobs]
    return found


#: Parameters that mean the same in `generate` as in a completion. Everything else (stop strings, grammars, alternatives
#: by their text, fields that nobody here knows) needs what only a completion does.
GENERATE_PARAMS = frozenset(
    {
        "n",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stop_token_ids",
        "ignore_eos",
        "allowed_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
    }
)


class _GenerateLogProb(msgspec.Struct):
    logprob: float | None = None


class _GenerateLogProbs(msgspec.Struct):
    content: list[_GenerateLogProb] | None = None


class _GenerateChoice(msgspec.Struct):
    index: int
    logprobs: _GenerateLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[TokenId] | None = None
    weight_versions: list[VersionRange] | None = None
    routed_experts: str | None = None


class _ImageSpan(msgspec.Struct):
    """The ids of one image in the prompt, as the server reports them."""

    offset: int
    length: int


_ImageSpans = dict[str, list[_ImageSpan]] | None


class _GenerateBody(msgspec.Struct):
    choices: list[_GenerateChoice]
    prompt_token_ids: msgspec.Raw = NOT_TOLD
    mm_placeholders: _ImageSpans = None


class _GenerateChunk(msgspec.Struct):
    choices: list[_GenerateChoice] = []
    prompt_token_ids: msgspec.Raw = NOT_TOLD
    mm_placeholders: _ImageSpans = None
    error: ErrorBody | None = None


class GenerateWire:
    """`POST /inference/v1/generate`, for servers that tell versions."""

    def __init__(self) -> None:
        self._whole = msgspec.json.Decoder(_GenerateBody)
        self._piece = msgspec.json.Decoder(_GenerateChunk)

    @staticmethod
    def can_serve(request: UpstreamRequest) -> bool:
        """Whether this route answers a request as a completion would."""
        return not GenerateWire.missing(request)

    @staticmethod
    def missing(request: UpstreamRequest) -> list[str]:
        """The parameters of a request that this route does not have; empty where it has all."""
        given = {name for name, value in request.sampling.items() if value is not None and value != [] and value != {}}
        return [
            *(["logprobs"] if request.top_logprobs else []),
            *sorted(request.extra),
            *sorted(given - GENERATE_PARAMS),
        ]

    def body(self, encoded: EncodedRequest, model: str, *, stream: bool) -> bytes:
        request = encoded.request
        sampling = {
            name: value for name, value in request.sampling.items() if name in GENERATE_PARAMS and value is not None
        }
        given: dict[str, Any] = {
            "model": model,
            "token_ids": orjson.Fragment(encoded.prompt_to_send()),
            "sampling_params": {**sampling, "logprobs": 1, "skip_special_tokens": False},
            "return_token_ids": True,
        }
        if request.images:
            given["content_parts"] = [{"type": "image_url", "url": placed.image.url} for placed in request.images]
        if request.call_id:
            given["request_id"] = request.call_id
        if stream:
            given["stream"] = True
        return orjson.dumps(given, option=orjson.OPT_SERIALIZE_NUMPY)

    def whole(self, encoded: EncodedRequest, data: bytes, version: int) -> list[SampledChoice]:
        found = self._whole.decode(encoded.without_prompt(data))
        return _from_generate(
            found.choices, encoded, _consumed_prompt(encoded, found.prompt_token_ids, found.mm_placeholders), version
        )

    def piece(self, encoded: EncodedRequest, data: bytes, version: int) -> list[SampledChoice]:
        found = self._piece.decode(encoded.without_prompt(data))
        if found.error is not None:
            raise ServerFault.of(found.error)
        return _from_generate(
            found.choices, encoded, _consumed_prompt(encoded, found.prompt_token_ids, found.mm_placeholders), version
        )

    def pieces(self, encoded: EncodedRequest, events: Sequence[bytes], version: int) -> list[SampledChoice]:
        return join_pieces([piece for data in events for piece in self.piece(encoded, data, version)])


def _consumed_prompt(encoded: EncodedRequest, prompt: msgspec.Raw, runs: _ImageSpans) -> IntArray | None:
    """The prompt as the server reports it, None where it does not. `MalformedAnswer` where images are in it and stand
    elsewhere than planned: a server may well answer without having looked at one."""
    consumed, images = encoded.consumed(prompt), encoded.request.images
    if not images or consumed is None:
        return consumed
    stand = [(run.offset, run.length) for run in (runs or {}).get("image", ())]
    planned = [(placed.offset, placed.length) for placed in images]
    if consumed is not encoded.request.prompt or stand != planned:
        raise MalformedAnswer(
            f"it did not read the prompt's images as its model's processor does here: they stand at {shown(stand)} in "
            f"{len(consumed)} ids, and belong at {shown(planned)} in {len(encoded.request.prompt)} (offset, length)"
        )
    return consumed


def _from_generate(
    choices: list[_GenerateChoice], encoded: EncodedRequest, consumed: IntArray | None, version: int
) -> list[SampledChoice]:
    found = []
    for choice in choices:
        if choice.token_ids is None:
            raise no_token_ids()
        given = None if choice.logprobs is None else choice.logprobs.content
        found.append(
            SampledChoice(
                choice.index,
                choice.token_ids,
                None if given is None else log_prob_values([entry.logprob for entry in given]),
                None,
                choice.finish_reason,
                choice.stop_reason,
                consumed,
                spans_of(choice.weight_versions, version),
                routed_experts=decode_experts(choice.routed_experts),
            )
        )
    return found
