"""A sampled answer's text into content, reasoning and tool calls, as it arrives.

There is one parser, and it streams: a whole answer is parsed by feeding it at once. So what a streaming agent puts
together from the deltas is what the others get. Nothing sampled disappears: a text that is no call after all is
content, as it was written. Once a call's name was read and its arguments begun it stays a call, and its arguments go
out as they come; where they then leave JSON, or the answer ends inside, the call keeps what was valid of them. Both are
named in `malformed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from headrace.tokens.answer import AnswerDelta, AnswerSoFar, CallDelta, NewId, Parsed
from headrace.tokens.bodies import MORE, NO, BodyReader, Words, held_back, match_words
from headrace.tokens.forms import CallForm, Channels, Grammar, JsonObject, Reasoning
from headrace.tokens.jsontext import is_portable_json
from headrace.tokens.values import parameter_types, reader_of

__all__ = ["AnswerDelta", "AnswerParser", "CallDelta", "Grammar", "NewId", "Parsed", "is_portable_json"]

Tools = Sequence[Mapping[str, Any]]
#: Separators that a model may put between bare calls although its template writes one call only.
BARE_SEPARATORS: tuple[Words, ...] = ((";",), (",",))


class AnswerParser:
    """Text in, deltas out; `finish` gives the last delta, then `parsed` is the whole.

    `thinking`: the prompt already opened the reasoning. Without `tools` nothing is a call: an answer in JSON to an
    agent that offered no tools is its content. Where the tools themselves are given, their schemas say which arguments
    are strings, in a form that does not.
    """

    def __init__(self, grammar: Grammar, *, tools: bool | Tools, thinking: bool = False, new_id: NewId) -> None:
        form = grammar.calls if tools else None
        self._answer = AnswerSoFar(new_id)
        self._answer.thought = thinking
        reasoning = grammar.reasoning or Reasoning("", "")
        self._thought_open, self._thought_close = reasoning.open.strip(), reasoning.close.strip()
        self._wrappers = tuple(text.strip() for text in (grammar.content_open, grammar.content_close) if text.strip())
        self._buffer = ""
        self._trim = "\n" if thinking else ""  # what is dropped before the next visible character
        self._space = ""  # white space that only counts if text follows
        self._raw: list[str] = []  # the call being read, from its opener on
        self._seen = 0  # characters of held reasoning in which its end was looked for
        self._set_form(form)
        self._state = "reasoning" if thinking else "start" if grammar.reasoning is not None else "first"
        if isinstance(form, CallForm) and isinstance(form.body, Channels):
            raise ValueError("an answer in channels is read by a ChannelParser")
        self._make = reader_of(form, parameter_types(tools) if not isinstance(tools, bool) else {}) if form else None

    def _set_form(self, form: CallForm | None) -> None:
        begin, end = (form.begin.strip(), form.end.strip()) if form is not None else ("", "")
        # A list of one call may stand there without its brackets.
        self._listed = form is not None and isinstance(form.body, JsonObject) and begin.endswith("[")
        if self._listed:
            begin, end = begin[:-1], end.removeprefix("]")
        self._begin: Words = tuple(begin.split())
        self._end: Words = tuple(end.split())
        self._open: Words = tuple(form.open.split()) if form is not None else ()
        self._close: Words = tuple(form.close.split()) if form is not None else ()
        self._lead: Words = tuple(form.lead.split()) if form is not None else ()
        self._bare = form is not None and form.bare
        between = tuple(form.between.split()) if form is not None else ()
        self._separators = [between] if between else list(BARE_SEPARATORS) if self._bare else []
        if self._listed and not between:
            self._separators = [(",",)]
        self._openers: Words = ()
        if form is not None and not self._bare:
            words = self._begin[:1] + (self._open[:1] if not self._begin or is_marker(self._open) else ())
            self._openers = words
        self._closers = tuple(words[0] for words in (self._close, self._end) if words)
        self._goes_on = bool(self._begin or self._bare or self._separators)
        self._marks = (*self._openers, *self._wrappers)
        self._thought_marks = (self._thought_close, *self._openers)

    def feed(self, text: str) -> AnswerDelta:
        """Takes the next text; what is new of the answer. A text that may still become a marker is held back."""
        self._advance(text)
        return self._answer.delta()

    def feed_parts(self, text: str) -> list[AnswerDelta]:
        """Like `feed`, in the order in which it was written, each part of one kind; empty where nothing is new."""
        self._advance(text)
        return self._answer.parts()

    def _advance(self, text: str) -> None:
        self._buffer += text
        while self._STATES[self._state](self, False):
            pass

    def finish(self) -> AnswerDelta:
        """Ends the answer; what was held back of it, and what was left open."""
        while self._STATES[self._state](self, True):
            pass
        if self._space:
            self._answer.say(self._space)
            self._space = ""
        return self._answer.delta()

    @property
    def parsed(self) -> Parsed:
        """The answer as far as it was read; whole after `finish`."""
        return self._answer.parsed()

    # Each state takes a step; False where it needs more text, or at the `last` is done.

    def _in_start(self, last: bool) -> bool:
        """Before the first visible character: only here may reasoning begin."""
        begun, opener = self._buffer.lstrip(), self._thought_open
        if begun.startswith(opener):
            self._buffer, self._state, self._trim = begun[len(opener) :], "reasoning", "\n"
            self._answer.thought = True
            return True
        if opener.startswith(begun) and not last:
            return False
        self._state = "first"
        return True

    def _in_reasoning(self, last: bool) -> bool:
        close, buffer = self._thought_close, self._buffer
        end = buffer.find(close, max(0, self._seen - len(close)) if self._seen else 0)
        if end >= 0:
            self._think(self._buffer[:end])
            self._buffer, self._seen = self._buffer[end + len(close) :], 0
            self._state, self._trim, self._space = "first", "\n", ""
            return True
        # A call that begins while reasoning is open ends it, but only if nothing else does.
        at = 0 if self._seen else _first(buffer, self._openers)
        if at >= 0:
            self._think(buffer[:at])
            self._buffer = buffer[at:]
            self._seen = len(self._buffer)
            if last:
                self._state, self._trim, self._space, self._seen = "content", "", "", 0
            return last
        keep = 0 if last else held_back(buffer, self._thought_marks)
        self._think(buffer[: len(buffer) - keep] if keep else buffer)
        self._buffer = buffer[len(buffer) - keep :] if keep else ""
        if last:
            self._answer.cut, self._state, self._space = "reasoning", "done", ""
        return last

    def _think(self, text: str) -> None:
        text = self._trimmed(text)
        body = text.rstrip("\n")
        if body:
            self._answer.think(self._space + body)
            self._space = ""
        self._space += text[len(body) :]

    def _in_first(self, last: bool) -> bool:
        """The content's beginning: only here may a bare call stand."""
        if self._bare:
            led = match_words(self._lead, self._buffer, 0) if self._lead else 0
            if led == MORE and not last:
                return False
            if not self._buffer.strip():
                self._state = "content" if last else "first"
                return last
            self._raw = []
            self._pass(led if led > 0 else 0)
            self._stage, self._state = "begin", "opening"
        else:
            self._state = "content"
        return True

    def _in_content(self, last: bool) -> bool:
        buffer = self._buffer
        if _first(buffer, self._marks) >= 0:
            at, mark = min((at, mark) for mark in self._marks if (at := buffer.find(mark)) >= 0)
            self._say(buffer[:at])
            self._buffer = self._buffer[at:]
            if mark in self._wrappers:
                self._buffer, self._trim = self._buffer[len(mark) :], " \t\r\n"
            else:
                self._raw = []
                self._stage = "begin" if self._begin and mark == self._begin[0] else "open"
                self._state = "opening"
            return True
        keep = 0 if last else held_back(buffer, self._marks)
        self._say(buffer[: len(buffer) - keep] if keep else buffer)
        self._buffer = buffer[len(buffer) - keep :] if keep else ""
        if last:
            self._state = "done"
        return last

    def _say(self, text: str) -> None:
        text = self._trimmed(text)
        # White space before a call is layout; whether a call follows is not known yet.
        body = text.rstrip() if self._marks else text
        if body:
            self._answer.say(self._space + body)
            self._space = ""
        self._space += text[len(body) :]

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip(self._trim)
            if text:
                self._trim = ""
        return text

    def _pass(self, count: int) -> None:
        """Moves text from the buffer to the call that is being read."""
        if count:
            self._raw.append(self._buffer[:count])
            self._buffer = self._buffer[count:]

    def _in_opening(self, last: bool) -> bool:
        """What stands before a call's body: `begin`, the bracket of a list, `open`."""
        if self._stage == "list":
            visible = self._buffer.lstrip()
            if not visible and not last:
                return False
            if visible.startswith("["):
                self._pass(len(self._buffer) - len(visible) + 1)
            self._stage = "open"
        end = match_words(self._begin if self._stage == "begin" else self._open, self._buffer, 0)
        if end == MORE and not last:
            return False
        if end < 0:
            self._give_up()
            return True
        self._pass(end)
        if self._stage == "begin":
            self._stage = "list" if self._listed else "open"
        else:
            self._start_body()
        return True

    def _start_body(self) -> None:
        assert self._make is not None
        self._reader: BodyReader = self._make()
        self._opened = False
        self._state = "body"

    def _in_body(self, last: bool) -> bool:
        reader = self._reader
        self._pass(reader.feed(self._buffer))
        if last and not reader.done and not reader.failed:
            reader.finish()
        if reader.begun and not self._opened:
            self._opened = True
            self._answer.open_call(reader.name, reader.id)
        if self._opened and reader.pieces:
            self._answer.add_arguments(reader.pieces)
            reader.pieces.clear()
        if reader.done:
            self._answer.close_call(whole=True)
            self._state = "closing"
        elif reader.failed or last:
            if self._opened:
                self._answer.close_call(whole=False)
                self._state = "junk"
            else:
                self._give_up()
        else:
            return False
        return True

    def _in_closing(self, last: bool) -> bool:
        end = match_words(self._close, self._buffer, 0)
        if end == MORE:
            if not last:
                return False
            self._buffer, end = "", 0  # the answer's end closes a call as well
        if end < 0:
            # So does what can only come after it.
            visible = self._buffer.lstrip()
            after = [words for words in (*((word,) for word in self._openers), self._end) if words]
            ends = [match_words(words, visible, 0) for words in after]
            if MORE in ends and max(ends) < 0 and not last:
                return False
            if max(ends, default=NO) >= 0:
                self._end_call()
            else:
                self._state = "junk"
            return True
        self._pass(end)
        self._end_call()
        return True

    def _end_call(self) -> None:
        self._raw = []
        self._space, self._trim = "", " \t\r\n"
        self._state = "between" if self._goes_on else "content"

    def _in_between(self, last: bool) -> bool:
        """After a call of several: another, or the end of all."""
        visible = self._buffer.lstrip()
        if not visible and not last:
            return False
        end = match_words(self._end, visible, 0) if self._end else NO
        opened = match_words(self._open, visible, 0) if self._open else NO
        parts = [match_words(words, visible, 0) for words in self._separators]
        if self._listed and visible.startswith("]"):
            self._buffer, self._state = visible[1:], "ending"
        elif end >= 0:
            self._state = "ending"
        elif opened >= 0:
            self._stage, self._state = "open", "opening"
        elif max(parts, default=NO) >= 0:
            self._pass(len(self._buffer) - len(visible) + max(parts))
            self._stage, self._state = "open", "opening"
        elif MORE in (end, opened, *parts) and not last:
            return False
        elif visible.startswith("{") and not self._open and not self._listed:
            self._stage, self._state = "open", "opening"
        else:
            self._state = "content"
        return True

    def _in_ending(self, last: bool) -> bool:
        """What stands after all calls."""
        end = match_words(self._end, self._buffer, 0)
        if end == MORE and not last:
            return False
        if end == MORE:
            self._buffer = ""
        self._buffer, self._state = self._buffer[max(end, 0) :], "content"
        return True

    def _give_up(self) -> None:
        """A text that is no call after all is content, as it was written."""
        text = "".join(self._raw)
        if self._bare and not (self._lead and match_words(self._lead, text, 0) >= 0):
            self._say(text)  # an answer in JSON that is no call
            self._state = "content"
            return
        if self._state == "opening" and not is_marker(self._openers) and not self._bare:
            # A word that means a call only with what the form writes after it.
            self._pass(0 if text else len(self._openers[0]))
            self._say("".join(self._raw))
            self._state = "content"
            return
        self._opened = False
        self._answer.say(self._space + text)
        self._space = ""
        self._state = "junk"

    def _in_junk(self, last: bool) -> bool:
        """The rest of a call that does not follow its form, up to what would close it, or else to the next."""
        places = [(at, mark) for mark in self._closers if (at := self._buffer.find(mark)) >= 0]
        if not self._closers:  # the opener of the junk itself is in the buffer still where nothing of it was read
            places = [(at, "") for mark in self._openers if (at := self._buffer.find(mark, not self._raw)) >= 0]
        if places:
            at, mark = min(places)
            self._drop(at + len(mark))
            self._answer.malformed.append("".join(self._raw))
            if self._opened:
                self._end_call()
            else:
                self._raw, self._state = [], "content"
            return True
        marks = self._closers or self._openers
        keep = 0 if last else held_back(self._buffer, marks)
        self._drop(len(self._buffer) - keep)
        if last:
            self._answer.malformed.append("".join(self._raw))
            whole = self._opened and self._answer.calls[-1].whole
            self._answer.cut = self._answer.cut if whole else "tool_call"
            self._state = "done"
        return last

    def _drop(self, count: int) -> None:
        """Text of a call that cannot be read: content too, unless the call was handed out."""
        if count and not self._opened:
            self._answer.say(self._buffer[:count])
        self._pass(count)

    def _in_done(self, last: bool) -> bool:
        return False

    #: By name, and not by bound methods of each parser: those would be a circle that only the garbage collector ends.
    _STATES: ClassVar[dict[str, Callable[[AnswerParser, bool], bool]]] = {
        "start": _in_start,
        "reasoning": _in_reasoning,
        "first": _in_first,
        "content": _in_content,
        "opening": _in_opening,
        "body": _in_body,
        "closing": _in_closing,
        "between": _in_between,
        "ending": _in_ending,
        "junk": _in_junk,
        "done": _in_done,
    }


def _first(text: str, marks: Words) -> int:
    """Where the first of some marks stands in a text; -1 where none does."""
    found = -1
    for mark in marks:
        at = text.find(mark)
        if at >= 0 and (found < 0 or at < found):
            found = at
    return found


def is_marker(words: Words) -> bool:
    """Whether a text is unlikely to stand in an answer for any other reason."""
    return bool(words) and len(words[0]) >= 4 and words[0][0] in "<[" and any(char.isalpha() for char in words[0])
