"""Prompts back into messages: where a chat template writes each role, found by trying, and a text cut there.

The way back is not exact: a system turn may hold the tools that a template wrote into it, and contents come as the
template wrote them (trimmed, or as JSON). It is for whoever reads a recorded conversation, such as a judge; whoever
needs a prompt again has its ids.

Nothing is guessed: turns are told apart by tokens that no content has (`<|im_start|>`), and a text that does not follow
the pattern to its end is not cut at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.tokens.messages import Message, ToolCall, Unrenderable
from headrace.tokens.renderer import Renderer

#: What stands for a content in the conversations that are tried. No template writes it by itself.
_MARKS = tuple(f"headracemark{letter}" for letter in "abcde")
#: Of a vocabulary that cannot write those, so many of its words are looked at for others.
_MAX_WORDS = 10_000
_CALL_ID = "abcdef123"


class PromptSplitter:
    """Cuts what a renderer wrote into messages; `split` gives None where that cannot be done.

    `starts` is what the template writes before a conversation's first content, by that message's role; `joints` what
    stands between two contents, by both roles.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._vocabulary = renderer.vocabulary
        self._marks = _MARKS
        self.starts: dict[str, str] = {}
        self.joints: dict[str, set[tuple[str, str]]] = {}
        self._try(renderer)
        special = [token for token in map(self._vocabulary.added.get, self._vocabulary.special) if token]
        written = "".join([*self.starts.values(), *(joint for those in self.joints.values() for _, joint in those)])
        self._structure = [token for token in special if token in written]

    def split(self, ids: Sequence[int], after: str | None = None) -> list[Message] | None:
        """The messages of a prompt that ends where an answer begins; None where its text is not what the template
        writes. With `after`, the ids go on in the middle of a message of that role, of which the rest is left out."""
        text = self._vocabulary.decode(ids)
        found: list[Message] = []
        if after is None:
            begun = [(role, start) for role, start in self.starts.items() if text.startswith(start)]
            if not begun:
                return None
            role, start = max(begun, key=lambda item: len(item[1]))
            at = len(start)
        else:
            role, at = after, 0
        skipped = after is not None
        while (joint := self._next(text, at, role)) is not None:
            end, following, length = joint
            if self._structural(text[at:end]) and not skipped:
                return None
            if not skipped:
                found.append(Message(role, text[at:end]))
            role, at, skipped = following, end + length, False
        # What is left is the answer's own turn: empty, or the beginning that the template gave it.
        return found if role == "assistant" and not skipped and not self._structural(text[at:]) else None

    def _structural(self, text: str) -> bool:
        """Whether a text has a token that ends or begins turns: then it is no content, but a turn that was missed."""
        return any(token in text for token in self._structure)

    def _next(self, text: str, at: int, role: str) -> tuple[int, str, int] | None:
        """Where the message of `role` that stands at `at` ends: there, whose turn follows, and the joint's length."""
        places = [
            (end, -len(joint), following)
            for following, joint in self.joints.get(role, ())
            if (end := text.find(joint, at)) >= 0
        ]
        if not places:
            return None
        end, negative, following = min(places)
        return end, following, -negative

    # -- the trials ----------------------------------------------------------------------------------------------------

    def _try(self, renderer: Renderer) -> None:
        call = ToolCall("look_up", {"q": "x"}, _CALL_ID)
        self._marks = self._writable_marks(renderer)
        for roles in (
            ("user",),
            ("system", "user"),
            ("user", "assistant", "user"),
            ("user", "user"),
            ("user", "call", "tool"),
            ("user", "call", "tool", "tool"),
            ("user", "call", "tool", "assistant", "user"),
            ("user", "call", "tool", "user"),
            ("user", "assistant", "tool", "assistant", "user"),  # where a template writes no calls
        ):
            messages = [_marked(role, mark, call) for role, mark in zip(roles, self._marks, strict=False)]
            try:
                text = self._vocabulary.decode(renderer.render(messages))
            except Unrenderable:
                continue
            self._learn(text, roles)

    def _learn(self, text: str, roles: tuple[str, ...]) -> None:
        """Takes what stands around the marks of a rendered conversation."""
        pieces: list[str] = []
        marks = self._marks[: len(roles)]
        if any(text.count(mark) > 1 for mark in marks):
            return  # the template writes such a word by itself
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found:
                return  # the template writes this content in a way of its own
            pieces.append(before)
        pieces.append(text)
        names = ["assistant" if role == "call" else role for role in roles]
        if self._special(pieces[0]):
            self.starts.setdefault(names[0], pieces[0])
        for at, joint in enumerate(pieces[1:]):
            if roles[at + 1 : at + 2] == ("call",):
                continue  # it holds the beginning of the call, which the model wrote
            if roles[at] == "call":
                joint = self._from_special(joint)  # and the end of it
            if self._special(joint):
                self.joints.setdefault(names[at], set()).add(([*names, "assistant"][at + 1], joint))

    def _writable_marks(self, renderer: Renderer) -> tuple[str, ...]:
        """The marks, where the vocabulary can write them; else as many words of its own, of which none is part of
        another and none is the template's. Where it has too few, the marks, which are then not found again."""
        if all(self._round_trips(mark) for mark in _MARKS):
            return _MARKS
        words: list[str] = []
        for word in self._words():
            if not any(word in other or other in word for other in words):
                words.append(word)
            if len(words) == 2 * len(_MARKS):
                break
        if len(words) < len(_MARKS):
            return _MARKS
        try:
            written = [
                self._vocabulary.decode(renderer.render([Message("user", word), Message("assistant", word)]))
                for word in words[:2]
            ]
        except Unrenderable:
            return _MARKS
        own = [word for word in words if not all(word in text for text in written)]
        return tuple(own[: len(_MARKS)]) if len(own) >= len(_MARKS) else _MARKS

    def _words(self) -> Iterator[str]:
        """Words of the vocabulary that come back as they were written, the longest first."""
        known = sorted(self._vocabulary.hf.get_vocab(), key=lambda word: (-len(word), word))
        for word in known[:_MAX_WORDS]:
            if word.isalnum() and word.isascii() and self._round_trips(word):
                yield word

    def _round_trips(self, text: str) -> bool:
        ids = self._vocabulary.encode(text)
        # A SentencePiece model may put a space before it.
        return self._vocabulary.special.isdisjoint(ids) and self._vocabulary.decode(ids).strip() == text

    def _special(self, text: str) -> bool:
        return any(token in text for token in self._vocabulary.added.values() if token)

    def _from_special(self, text: str) -> str:
        """A text from its first special token on: what a vocabulary marks as special ends and begins turns."""
        known = (self._vocabulary.added[i] for i in self._vocabulary.special)
        at = min((place for token in known if token and (place := text.find(token)) >= 0), default=len(text))
        return text[at:]


def _marked(role: str, mark: str, call: ToolCall) -> Message:
    if role == "call":
        marked = ToolCall(call.name, {"q": mark}, call.id)
        return Message("assistant", "", None, (marked,))
    if role == "tool":
        return Message("tool", mark, None, (), call.id, call.name)
    return Message(role, mark)
