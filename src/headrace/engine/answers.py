"""Answers in vLLM's shapes: the same keys, in the same order, with the same nulls. Whole answers first, route by route;
the stream of a chat at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from headrace.engine.requests import ChatRequest, CompletionRequest, OpenAIRequest
from headrace.engine.sequence import Candidates, EngineSequence
from headrace.engine.tokenizer import EngineTokenizer, length_before_tool_call, parse_tool_calls
from headrace.engine.worker import SequenceDelta

Json = dict[str, Any]


def usage(sequences: Seq[EngineSequence], n: int) -> Json:
    """Token counts; a prompt counts once, however many choices it has."""
    asked = sum(len(sequence.prompt) for sequence in sequences[::n])
    answered = sum(len(sequence.output) for sequence in sequences)
    return {"prompt_tokens": asked, "total_tokens": asked + answered, "completion_tokens": answered}


def _whole_usage(sequences: Seq[EngineSequence], n: int) -> Json:
    return {**usage(sequences, n), "prompt_tokens_details": None, "completion_tokens_details": None}


def now() -> int:
    """The time as Unix seconds."""
    return int(time.time())


# -- /v1/completions ---------------------------------------------------------------------------------------------------


def completion(
    head: Json, asked: CompletionRequest, sequences: Seq[EngineSequence], tokenizer: EngineTokenizer, fingerprint: str
) -> Json:
    """The whole answer of `/v1/completions`."""
    choices = []
    for sequence in sequences:
        ids = asked.return_token_ids
        choices.append(
            {
                "index": sequence.index,
                "text": sequence.text.value,
                "logprobs": _completion_logprobs(sequence, 0, len(sequence.output), asked, tokenizer, 0)[0],
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
                "token_ids": sequence.output if ids else None,
                "prompt_logprobs": prompt_logprobs(sequence, tokenizer),
                "prompt_token_ids": sequence.prompt if ids else None,
                "routed_experts": None,
            }
        )
    return {
        **head,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": fingerprint,
        "usage": _whole_usage(sequences, sequences[0].sampling.n),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def completion_choice(
    asked: CompletionRequest, delta: SequenceDelta, tokenizer: EngineTokenizer, offset: int
) -> tuple[Json, int]:
    """The choice of one chunk, and the offset at which the next chunk's text begins."""
    sequence = delta.sequence
    logprobs, offset = _completion_logprobs(sequence, delta.first, delta.last, asked, tokenizer, offset)
    choice = {
        "index": sequence.index,
        "text": delta.text,
        "logprobs": logprobs,
        "finish_reason": delta.finish_reason,
        "stop_reason": sequence.stop_reason if delta.finish_reason else None,
        "prompt_token_ids": sequence.prompt if asked.return_token_ids and delta.first == 0 else None,
        "token_ids": sequence.output[delta.first : delta.last] if asked.return_token_ids else None,
    }
    return choice, offset


def _completion_logprobs(
    sequence: EngineSequence, first: int, last: int, asked: CompletionRequest, tokenizer: EngineTokenizer, offset: int
) -> tuple[Json | None, int]:
    if sequence.sampling.logprobs is None:
        return None, offset
    tokens, top, offsets = [], [], []
    for found in sequence.candidates[first:last]:
        named: dict[str, float] = {}
        for token, value, _ in found[: 1 + (asked.logprobs or 0)]:
            # Two tokens may read alike; the sampled one comes first, and its log-prob is not to be lost.
            named.setdefault(_name(token, asked, tokenizer), value)
        top.append(named)
        tokens.append(_name(found[0][0], asked, tokenizer))
        offsets.append(offset)
        offset += len(tokens[-1])
    told = {
        "text_offset": offsets,
        "token_logprobs": sequence.logprobs[first:last],
        "tokens": tokens,
        "top_logprobs": top,
    }
    return told, offset


# -- /v1/chat/completions ----------------------------------------------------------------------------------------------


def chat_completion(
    head: Json, asked: ChatRequest, sequences: Seq[EngineSequence], tokenizer: EngineTokenizer, fingerprint: str
) -> Json:
    """The whole answer of `/v1/chat/completions`."""
    choices = []
    for sequence in sequences:
        message, reason = _message(sequence, asked)
        choices.append(
            {
                "index": sequence.index,
                "message": message,
                "logprobs": chat_logprobs(sequence, 0, len(sequence.output), asked, tokenizer),
                "finish_reason": reason,
                "stop_reason": sequence.stop_reason,
                "token_ids": sequence.output if asked.return_token_ids else None,
                "routed_experts": None,
            }
        )
    first = sequences[0]
    return {
        **head,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": fingerprint,
        "usage": _whole_usage(sequences, first.sampling.n),
        "prompt_logprobs": prompt_logprobs(first, tokenizer),
        "prompt_token_ids": first.prompt if asked.return_token_ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _message(sequence: EngineSequence, asked: ChatRequest) -> tuple[Json, str | None]:
    parse = bool(asked.tools) and asked.tool_choice != "none"
    content, calls = parse_tool_calls(sequence.text.value) if parse else (sequence.text.value, [])
    message: Json = {
        "role": asked.role,
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if calls:
        message["tool_calls"] = calls
    message["reasoning"] = None
    called = calls and sequence.finish_reason == "stop"
    return message, "tool_calls" if called else sequence.finish_reason


def chat_logprobs(
    sequence: EngineSequence, first: int, last: int, asked: OpenAIRequest, tokenizer: EngineTokenizer
) -> Json | None:
    """The `logprobs` of a chat's choice, for its tokens [first, last); None where they were not asked for."""
    most = sequence.sampling.logprobs
    if most is None:
        return None
    content = []
    for found in sequence.candidates[first:last]:
        entries = [_entry(token, value, asked, tokenizer) for token, value, _ in found[: max(1, most)]]
        content.append({**entries[0], "top_logprobs": entries if most else []})
    return {"content": content}


def _entry(token: int, value: float, asked: OpenAIRequest | None, tokenizer: EngineTokenizer) -> Json:
    told = list(tokenizer.text(token).encode("utf-8", "replace"))
    return {"token": _name(token, asked, tokenizer), "logprob": value, "bytes": told}


def _name(token: int, asked: OpenAIRequest | None, tokenizer: EngineTokenizer) -> str:
    return f"token_id:{token}" if asked and asked.return_tokens_as_token_ids else tokenizer.text(token)


def prompt_logprobs(sequence: EngineSequence, tokenizer: EngineTokenizer) -> list[Json | None] | None:
    """The prompt's own log-probs, an object for each token and None for the first; None where they were not asked
    for."""
    if sequence.sampling.prompt_logprobs is None:
        return None
    return [
        None
        if found is None
        else {
            str(token): {"logprob": value, "rank": rank, "decoded_token": tokenizer.text(token)}
            for token, value, rank in found
        }
        for found in sequence.prompt_candidates
    ]


# -- /inference/v1/generate --------------------------------------------------------------------------------------------


def generate_choice(
    sequence: EngineSequence, first: int, last: int, tokenizer: EngineTokenizer, *, end: bool, text: str | None
) -> Json:
    """One choice, or its newest part; with `output_mode` "text" log-probs are by string, not by id."""
    return {
        "index": sequence.index,
        "finish_reason": sequence.finish_reason if end else None,
        "stop_reason": sequence.stop_reason if end else None,
        "token_ids": sequence.output[first:last],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": sequence.versions() if end else None,
        **({} if text is None else {"text": text}),
        "logprobs": generate_logprobs(
            sequence.candidates[first:last], sequence.sampling.logprobs, None if text is None else tokenizer
        ),
    }


def generate_logprobs(
    candidates: Iterable[Candidates], most: int | None, tokenizer: EngineTokenizer | None
) -> Json | None:
    """The `logprobs` of `/inference/v1/generate`: by string where a tokenizer is given, else by id."""
    if most is None:
        return None
    content = []
    for found in candidates:
        entries = [
            {"token_id": token, "logprob": value, "rank": rank}
            if tokenizer is None
            else _entry(token, value, None, tokenizer)
            for token, value, rank in found[: max(1, most)]
        ]
        content.append({**entries[0], "top_logprobs": entries})
    return {"content": content}


def generated(
    asked_id: str, model: str, sequences: Seq[EngineSequence], tokenizer: EngineTokenizer, *, ids: bool, mode: str
) -> Json:
    """The whole answer of `/inference/v1/generate`."""
    first = sequences[0]
    return {
        "request_id": asked_id,
        "model": model,
        "created": now(),
        "usage": _whole_usage(sequences, first.sampling.n),
        "prompt_logprobs": prompt_logprobs(first, tokenizer),
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": first.prompt if ids else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": mode,
        "choices": [
            generate_choice(
                sequence,
                0,
                len(sequence.output),
                tokenizer,
                end=True,
                text=sequence.text.value if mode == "text" else None,
            )
            for sequence in sequences
        ],
    }


# -- /generate ---------------------------------------------------------------------------------------------------------


def atropos_generated(prompt: str, sequences: Seq[EngineSequence]) -> Json:
    """The answers to one prompt as Atropos' vLLM server sends them: parallel lists with one item for each answer. A
    token's log-probs are a list of one object, from ids (as strings, being JSON keys) to log-probs, the sampled token
    first. `prompt_logprobs`, where asked for, have such an object for each token, and null for the first."""
    first = sequences[0]
    told: Json = {
        "text": [sequence.text.value for sequence in sequences],
        "prompt": prompt,
        "finish_reasons": [sequence.finish_reason for sequence in sequences],
    }
    if first.sampling.logprobs is not None:
        told["logprobs"] = [[[_by_id(found)] for found in sequence.candidates] for sequence in sequences]
        told["prompt_token_ids"] = first.prompt
        told["token_ids"] = [sequence.output for sequence in sequences]
    if first.sampling.prompt_logprobs is not None:
        told["prompt_logprobs"] = [None if found is None else _by_id(found) for found in first.prompt_candidates]
    return told


def _by_id(candidates: Candidates) -> dict[str, float]:
    return {str(token): value for token, value, _ in candidates}


Chunk = dict[str, Any]


class ChatChunks:
    """A chat's stream: turns what is new of each choice into a chunk. The role comes first, then text as it is sampled,
    and tool calls once they are whole.
    """

    def __init__(self, head: Chunk, asked: ChatRequest, tokenizer: EngineTokenizer) -> None:
        self._head, self._asked, self._tokenizer = head, asked, tokenizer
        self._parse = bool(asked.tools) and asked.tool_choice != "none"
        #: Of each choice, the text so far and how much of it was sent.
        self._texts: dict[int, str] = {}
        self._sent: dict[int, int] = {}

    def opening(self, sequences: list[EngineSequence]) -> list[Chunk]:
        """The first chunk of each choice, with its role."""
        found: list[Chunk] = []
        for sequence in sequences:
            delta = {"role": self._asked.role, "content": ""}
            choice = {"index": sequence.index, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = sequence.prompt if self._asked.return_token_ids else None
            found.append({**self._head, "choices": [choice], "prompt_token_ids": ids, "prompt_text": None})
        return found

    def __call__(self, delta: SequenceDelta) -> Chunk:
        sequence, reason = delta.sequence, delta.finish_reason
        new, called = self._new(delta)
        choice: Chunk = {
            "index": sequence.index,
            "delta": new,
            "logprobs": chat_logprobs(sequence, delta.first, delta.last, self._asked, self._tokenizer),
            "finish_reason": "tool_calls" if called and reason == "stop" else reason,
        }
        if reason is not None:
            choice["stop_reason"] = sequence.stop_reason
        choice["token_ids"] = sequence.output[delta.first : delta.last] if self._asked.return_token_ids else None
        return {**self._head, "choices": [choice]}

    def _new(self, delta: SequenceDelta) -> tuple[Chunk, bool]:
        if not self._parse:
            return _said(delta.text), False
        at = delta.sequence.index
        text = self._texts[at] = self._texts.get(at, "") + delta.text
        sent = self._sent.get(at, 0)
        if delta.finish_reason is None:
            self._sent[at] = max(sent, length_before_tool_call(text))
            return _said(text[sent : self._sent[at]]), False
        content, calls = parse_tool_calls(text)
        if not calls:
            return _said(text[sent:]), False
        new: Chunk = {"tool_calls": [{**call, "index": place} for place, call in enumerate(calls)]}
        return _said((content or "")[sent:]) | new, True


def _said(text: str) -> Chunk:
    """A delta of text; empty where there is none."""
    return {"content": text} if text else {}
