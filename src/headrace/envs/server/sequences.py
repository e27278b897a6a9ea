"""The sequences of a session, as a trainer learns from them, and the uids under which a gateway recorded them.

A sequence holds ids as a server consumed and sampled them. A call whose prompt begins, id for id, with a sequence
continues it; any other call begins one. Sampled ids are their own labels and carry their log-probs; everything else is
masked, with -100 and 1.0.

Steps behind a gateway and scored groups carry the same uids: rollouts of one item share a `prompt_uid`, which
`new_group` sets for everything that runs inside it, other tasks included, and a sequence's uids are looked up by its
ids, however an environment assembled its group.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from pydantic import BaseModel, PrivateAttr

#: The label, and the log-prob, of a token that is not trained on.
MASKED = -100
NO_LOG_PROB = 1.0
#: Sequences whose uids are remembered, of each gateway: a group is scored soon after it was sampled.
MAX_REMEMBERED_SEQUENCES = 65_536

_group: ContextVar[str | None] = ContextVar("headrace_env_group", default=None)


class SequenceNode(BaseModel):
    """One sequence, ready to be scored; `metadata` holds at least its finish_reason.

    `full_text` is the last prompt with its special tokens, and the answer without those that were sampled (`tokens`
    hold them): code that looks at the end of the text sees the answer's last words.
    """

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] | None = None
    #: The text of all tokens; a prompt that continues this sequence begins with it.
    _written: str = PrivateAttr("")

    @property
    def written(self) -> str:
        """The text of all tokens, special ones included."""
        return self._written


class SessionAnswer(msgspec.Struct, frozen=True):
    """One answer: its ids and log-probs, its text, and its text with special tokens (`written`)."""

    ids: list[int]
    log_probs: list[float]
    text: str
    written: str
    metadata: dict[str, Any]


class SessionSequences:
    """The sequences of one session. With `keep_all`, those that were continued stay beside their continuations."""

    def __init__(self, *, keep_all: bool = False) -> None:
        self.nodes: list[SequenceNode] = []
        self._keep_all = keep_all

    def continued_by(self, prompt: list[int]) -> SequenceNode | None:
        """The longest sequence that a prompt begins with."""
        fits = [node for node in self.nodes if prompt[: len(node.tokens)] == node.tokens]
        return max(fits, key=lambda node: len(node.tokens), default=None)

    def add(self, prompt: list[int], answers: list[SessionAnswer], written: str) -> list[SequenceNode]:
        """Records the answers to one prompt and returns their sequences; `written` is the whole prompt's text.

        The first of them takes the place of the sequence that the prompt continues.
        """
        before = self.continued_by(prompt)
        made = [_node(before, prompt, answer, written) for answer in answers]
        at = next((i for i, node in enumerate(self.nodes) if node is before), None)
        if at is not None and not self._keep_all:
            self.nodes[at : at + 1] = made[:1]
            self.nodes += made[1:]
        else:
            self.nodes += made
        return made

    def clear(self) -> None:
        """Forgets all sequences."""
        self.nodes.clear()


def _node(before: SequenceNode | None, prompt: list[int], answer: SessionAnswer, written: str) -> SequenceNode:
    known = 0 if before is None else len(before.tokens)
    new = len(prompt) - known
    node = SequenceNode.model_construct(
        full_text=written + answer.text,
        tokens=prompt + answer.ids,
        masked_tokens=([] if before is None else before.masked_tokens) + [MASKED] * new + answer.ids,
        logprobs=([] if before is None else before.logprobs) + [NO_LOG_PROB] * new + answer.log_probs,
        metadata=answer.metadata,
    )
    node._written = written + answer.written
    return node


@contextmanager
def new_group(prompt_uid: str | None = None) -> Iterator[str]:
    """Everything that is sampled inside belongs to one group; yields its `prompt_uid`."""
    uid = prompt_uid or uuid.uuid4().hex
    token = _group.set(uid)
    try:
        yield uid
    finally:
        _group.reset(token)


def current_group_uid() -> str:
    """The `prompt_uid` of the group that is being sampled; a new one outside of `new_group`."""
    return _group.get() or uuid.uuid4().hex


class Uids(msgspec.Struct, frozen=True):
    """Under which uids a gateway recorded a sequence."""

    trajectory_uid: str
    prompt_uid: str


class UidsBySequence:
    """The uids of recorded sequences, by their token ids; beyond `most`, the oldest are forgotten first."""

    def __init__(self, most: int = MAX_REMEMBERED_SEQUENCES) -> None:
        self._most = most
        self._known: OrderedDict[bytes, Uids] = OrderedDict()

    def add(self, tokens: Sequence[int], uids: Uids) -> None:
        """Remembers a sequence's uids; may forget the oldest one's."""
        self._known[_key(tokens)] = uids
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def get(self, tokens: Sequence[int]) -> Uids | None:
        """A sequence's uids; None where they are not known."""
        return self._known.get(_key(tokens))

    def with_uids(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The scored group, with each known sequence's uids in `overrides` and their group's in `group_overrides`."""

        made = dict(group)
        found = [self.get(tokens) for tokens in group.get("tokens") or ()] if self._known else []
        before = list(group.get("overrides") or []) or [None] * len(found)
        if not any(found) or len(before) != len(found):
            return made
        made["overrides"] = [
            {**(given or {}), **(msgspec.structs.asdict(uids) if uids else {})}
            for given, uids in zip(before, found, strict=True)
        ]
        prompts = {uids.prompt_uid for uids in found if uids}
        if len(prompts) == 1 and all(found):
            made["group_overrides"] = {**(group.get("group_overrides") or {}), "prompt_uid": prompts.pop()}
        return made


def _key(tokens: Sequence[int]) -> bytes:
    return blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()
