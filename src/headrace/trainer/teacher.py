"""A teacher's server: asked what it thinks of sampled tokens, before they are learned from.

It speaks vLLM's `/v1/completions` with `prompt_logprobs`: a sequence's tokens go there as ids, and their log-probs come
back, to stand in the sequence as its reference's (`Guidance.ref_log_probs`). So ids must mean the same to both models,
which is checked before the first batch. A server that does not answer is waited for; one that refuses ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headrace.data.errors import HeadraceError, InvalidInput, shown
from headrace.data.guidance import Guidance
from headrace.data.sequence import Sequence
from headrace.data.step import FloatArray
from headrace.trainer.config import TeacherConfig
from headrace.trainer.stopping import Outage, StopSignal
from headrace.trainer.sync.http import PASSING, ServerFailed, ServerHttp, ask_again

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Tokens by which two vocabularies are compared, spread evenly over the policy's.
COMPARED_TOKENS = 64
#: Share of these that may be other texts: releases of one tokenizer differ in a few special tokens, two tokenizers in
#: nearly all.
MAX_OTHER_TEXTS = 0.1
#: The least log-prob that is learned from: servers write numbers such as -9999 for a token that they exclude, which as
#: an advantage would drown all others.
LEAST_LOG_PROB = -50.0


class TeacherFailed(HeadraceError):
    """A teacher did not answer for too long, or refused."""

    code = "teacher_failed"


class Teacher:
    """One teacher's server, asked by several threads at once."""

    def __init__(self, config: TeacherConfig, policy: Path, outage: Outage, stop: StopSignal) -> None:
        """`policy` is the folder or hub name of the model that learns. Raises `ServerFailed` for no address."""
        assert config.address is not None
        self._config, self._policy, self._outage, self._stop = config, policy, outage, stop
        self._http = ServerHttp(config.address.rstrip("/"), key=config.key, timeout_s=config.timeout_s, cut=stop)
        self._model = config.model
        self._checked = False

    def check(self) -> str:
        """Finds out the model's name and compares vocabularies. Returns why the server does not answer, where it does
        not: it may come up later. Raises `InvalidInput` where tokens are others there, `TeacherFailed` where it
        refuses."""
        try:
            self._check()
        except ServerFailed as error:
            if error.status not in PASSING:
                raise self._refused(error) from error
            return error.reason
        return ""

    def labelled(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences with the teacher's log-probs as their reference's; those that brought some keep them. Raises
        `Stopped` where the run is stopped first, `TeacherFailed` after `patience_s` without an answer or where the
        server refuses, and `InvalidInput` for another vocabulary."""
        if not sequences:
            return []
        self._again(self._check)
        with ThreadPoolExecutor(self._config.concurrency, "headrace-teacher") as threads:
            return list(threads.map(self._labelled, sequences))

    def _labelled(self, sequence: Sequence) -> Sequence:
        guidance = sequence.guidance or Guidance()
        if guidance.ref_log_probs is not None:
            return sequence
        found = self._again(lambda: self._log_probs(sequence.tokens.tolist()))
        row = np.concatenate([np.zeros(1, np.float32), found])  # nothing comes before the first token
        return replace(sequence, guidance=replace(guidance, ref_log_probs=row))

    def _again(self, ask: Callable[[], T]) -> T:
        """What `ask` returns, asked again while the server does not answer."""
        try:
            return ask_again(ask, self._stop, self._outage, self._config.patience_s)
        except ServerFailed as error:
            if error.status not in PASSING:
                raise self._refused(error) from error
            raise TeacherFailed(
                f"{self._outage.what} did not answer for longer than {self._config.patience_s:g} s "
                f"(algorithm.teacher.patience_s): {error.reason}"
            ) from error

    def _log_probs(self, ids: list[int]) -> FloatArray:
        """The log-prob of each token but the first, at temperature 1."""
        rows = self._rows(ids)
        try:
            found = [float(row[str(token)]["logprob"]) for token, row in zip(ids[1:], rows, strict=True)]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._odd(rows) from error
        return np.maximum(np.array(found, np.float32), np.float32(LEAST_LOG_PROB))

    def _rows(self, ids: list[int]) -> list[Any]:
        """What the server says of each token but the first: an object by ids."""
        asked = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        found = self._http.post("/v1/completions", asked)
        try:
            rows: list[Any] = found["choices"][0]["prompt_logprobs"][1:]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise self._odd(found) from error
        if len(rows) != len(ids) - 1:
            raise self._odd(found)
        return rows

    def _odd(self, found: Any) -> TeacherFailed:
        return TeacherFailed(
            f"the teacher {self._http.address} gave no prompt_logprobs for a prompt of ids as vLLM does: {shown(found)}"
        )

    def _refused(self, error: ServerFailed) -> HeadraceError:
        """What a refusal means, and what to do about it."""
        where = f"the teacher {self._http.address} answered {error.status}: {error.reason}"
        if "vocabulary" in error.reason:
            return InvalidInput(f"{where}; a teacher must have the vocabulary of the model that learns, {self._policy}")
        if error.status == 404:
            return TeacherFailed(f"{where}; name one of its models in algorithm.teacher.model, or none for its first")
        if error.status in (401, 403):
            return TeacherFailed(f"{where}; set algorithm.teacher.key")
        return TeacherFailed(f"{where}; where a sequence is too long for it, set max_length to what it takes, less 1")

    # -- before the first batch ----------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._checked:
            return
        http = self._http
        if self._model is None:
            found = http.get("/v1/models")
            try:
                self._model = str(found["data"][0]["id"])
            except (IndexError, KeyError, TypeError) as error:
                raise TeacherFailed(
                    f"the teacher {http.address} names no model in /v1/models: {shown(found)}"
                ) from error
        texts = _texts(self._policy)
        if texts:
            self._compare(texts)
        self._checked = True

    def _compare(self, texts: dict[int, str]) -> None:
        """Raises `InvalidInput` where tokens have other texts at the teacher."""
        ids = list(texts)
        other = []
        for token, row in zip(ids[1:], self._rows(ids), strict=True):
            said = row.get(str(token), {}).get("decoded_token") if isinstance(row, dict) else None
            if isinstance(said, str) and "\ufffd" not in said and said.strip() != texts[token].strip():
                other.append((token, said))
        if len(other) > MAX_OTHER_TEXTS * len(ids):
            token, said = other[0]
            raise InvalidInput(
                f"the teacher {self._http.address} has another vocabulary than {self._policy}: token {token} is "
                f"{said!r} there and {texts[token]!r} here; use a teacher with the same tokenizer"
            )
        if other:
            log.warning("the teacher %s has other texts for tokens %s", self._http.address, [t for t, _ in other])


def _texts(model: Path) -> dict[int, str]:
    """The texts of some tokens of a model, by their ids; none where it has no tokenizer. Parts of a character, which no
    text has alone, are left out."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return {}
    ids = np.unique(np.linspace(0, len(tokenizer) - 1, COMPARED_TOKENS).astype(int)).tolist()
    found = {token: str(tokenizer.decode([token], skip_special_tokens=False)) for token in ids}
    return {token: text for token, text in found.items() if text.strip() and "\ufffd" not in text}
