"""Answers in channels (Harmony, gpt-oss): messages with headers, of which some are reasoning and some are calls."""

from __future__ import annotations

import re

from headrace.tokens.answer import AnswerDelta, AnswerSoFar, NewId, Parsed
from headrace.tokens.bodies import held_back
from headrace.tokens.forms import Channels, Grammar
from headrace.tokens.jsontext import JsonScanner
from headrace.tokens.parse import AnswerParser, Tools

RECIPIENT = re.compile(r"to=([^\s<]+)")
#: Characters of the longest header; a text that goes on without its end is content.
MAX_HEADER_CHARS = 512


def parser_of(grammar: Grammar, *, tools: bool | Tools, thinking: bool, new_id: NewId) -> AnswerParser | ChannelParser:
    """The parser for a family's answers."""
    if grammar.calls is not None and isinstance(grammar.calls.body, Channels):
        return ChannelParser(grammar.calls.body, tools=bool(tools), new_id=new_id)
    return AnswerParser(grammar, tools=tools, thinking=thinking, new_id=new_id)


class ChannelParser:
    """Text in, deltas out, as `AnswerParser`. Without `tools` a message to a tool is content."""

    def __init__(self, form: Channels, *, tools: bool, new_id: NewId) -> None:
        self._form = form
        self._tools = tools
        self._answer = AnswerSoFar(new_id)
        self._buffer = ""
        self._state = "header"  # or "reasoning", "content", "call", "skipped", "text"
        self._header = ""
        self._raw: list[str] = []
        self._scanner = JsonScanner()
        self._name = ""
        self._opened = False
        self._ends = (form.end, form.call, form.last, form.start, form.channel)

    def feed(self, text: str) -> AnswerDelta:
        """Takes the next text; what is new of the answer."""
        self._take_text(text)
        return self._answer.delta()

    def feed_parts(self, text: str) -> list[AnswerDelta]:
        """Like `feed`, in the order in which it was written, each part of one kind; empty where nothing is new."""
        self._take_text(text)
        return self._answer.parts()

    def _take_text(self, text: str) -> None:
        self._buffer += text
        while self._advance(last=False):
            pass

    def finish(self) -> AnswerDelta:
        """Ends the answer; what was held back of it, and what was left open."""
        while self._advance(last=True):
            pass
        if self._state == "reasoning":
            self._answer.cut = "reasoning"
        elif self._state in ("call", "skipped"):
            self._end_call(last=True)
        return self._answer.delta()

    @property
    def parsed(self) -> Parsed:
        """The answer as far as it was read; whole after `finish`."""
        return self._answer.parsed()

    def _advance(self, *, last: bool) -> bool:
        if self._state == "header":
            return self._in_header(last)
        if not self._buffer:
            return False
        places = [(at, mark) for mark in self._ends if (at := self._buffer.find(mark)) >= 0]
        at, mark = min(places, default=(len(self._buffer) - (0 if last else held_back(self._buffer, self._ends)), ""))
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        if text:
            self._take(text)
        if mark:
            if mark not in (self._form.start, self._form.channel):  # these begin the next header
                self._buffer = self._buffer[len(mark) :]
            if self._state in ("call", "skipped"):
                self._end_call(last=False)
            self._state = "header"
        return bool(mark)

    def _in_header(self, last: bool) -> bool:
        """Reads up to the mark that ends a header; a text that cannot be one is content."""
        form, known = self._form, self._buffer.lstrip()
        starts = (form.channel, form.start, "to=", form.end)
        begun = next((start for start in starts if known.startswith(start)), "")
        if not begun:
            if any(start.startswith(known) for start in starts) and not last:
                return False
            self._state = "text"
            return bool(known)
        longest = MAX_HEADER_CHARS + len(form.message)
        end = self._buffer.find(form.message, 0, longest)
        if end >= 0:
            header, self._buffer = self._buffer[:end], self._buffer[end + len(form.message) :]
            self._begin(header)
            return True
        if len(self._buffer) < longest and not last:
            return False
        # No header after all: its first mark is text, and so is what follows up to the next.
        count = len(self._buffer) - len(known) + len(begun)
        self._state = "text"
        self._take(self._buffer[:count])
        self._buffer = self._buffer[count:]
        return True

    def _begin(self, header: str) -> None:
        form = self._form
        _, _, after = header.partition(form.channel)
        words = after.split(form.constrain)[0].split()
        channel = words[0] if words else ""
        recipient = RECIPIENT.search(header)
        self._header = header
        if recipient is not None and self._tools:
            self._state, self._raw = "call", [header, form.message]
            self._scanner, self._opened = JsonScanner(), False
            self._name = recipient[1].removeprefix(form.recipient)
        elif channel == form.reasoning and recipient is None:
            self._state = "reasoning"
            if self._answer.thought and self._answer.reasoning:
                self._answer.think("\n")
            self._answer.thought = True
        else:
            self._state = "content"
            if self._answer.content:
                self._answer.say("\n")

    def _take(self, text: str) -> None:
        if self._state == "reasoning":
            self._answer.think(text)
        elif self._state not in ("call", "skipped"):
            self._answer.say(text)
        else:
            self._raw.append(text)
            if self._state == "call":
                self._take_arguments(text)

    def _take_arguments(self, text: str) -> None:
        scanner = self._scanner
        end = scanner.feed(text)
        if scanner.pieces:
            if not self._opened and (begun := "".join(scanner.pieces).lstrip()):
                self._opened = True
                self._answer.open_call(self._name, "")
                scanner.pieces[:] = [begun]
            if self._opened:
                self._answer.add_arguments(scanner.pieces)
            scanner.pieces.clear()
        if scanner.broken or text[end:].strip():
            self._state = "skipped"

    def _end_call(self, *, last: bool) -> None:
        """The end of a message to a tool. One of which nothing could be read is content."""
        if self._state == "call":
            self._take_arguments("")
            self._scanner.finish()
        if not last and not self._opened and not "".join(self._raw[2:]).strip():
            self._opened = True
            self._answer.open_call(self._name, "")
            self._answer.add_arguments(["{}"])
            self._answer.close_call(whole=True)
            return
        whole = self._scanner.done
        if self._opened:
            self._answer.close_call(whole=whole)
        else:
            self._answer.say("".join(self._raw))
        if not whole or self._state == "skipped":
            self._answer.malformed.append("".join(self._raw))
            if last and self._state == "call":
                self._answer.cut = "tool_call"
