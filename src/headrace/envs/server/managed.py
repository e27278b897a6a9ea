"""`ManagedServer`: a conversation whose tokens, masks and log-probs are kept while it goes on.

An environment speaks messages or text, as to any server. What the server consumes and samples are ids: a turn that
continues an earlier one gets its ids as they were, and only what is new is tokenised behind them. Which it continues
is known by its messages, or, with a tokenizer whose template is not known here, by the text that it writes.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import orjson

from headrace.data.errors import InvalidInput
from headrace.envs.server.answers import (
    ChatCompletion,
    ChatCompletionMessage,
    Choice,
    Completion,
    CompletionChoice,
    Tokens,
    ToolCall,
    plain,
)
from headrace.envs.server.config import APIServerConfig
from headrace.envs.server.sequences import Sampled, SequenceNode, Sequences
from headrace.envs.server.tokenizing import PlainVocabulary, Tokenizing
from headrace.tokens import (
    Cause,
    History,
    Message,
    NodeRecord,
    PromptPlan,
    Request,
    Vocabulary,
    plan_prompt,
    read_messages,
    text_of,
)
from headrace.tokens import ToolCall as Call
from headrace.tokens.messages import to_dict
from headrace.tokens.parse import CALL_OPENERS
from headrace.tokens.renderer import PROMPT_TAIL_TOKENS


class Sampler(Protocol):
    """What a session needs of a server, or of several."""

    config: APIServerConfig
    tokenizing: Tokenizing

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Tokens: ...

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]: ...


class Session:
    """The state that every kind of session shows to its environment."""

    def __init__(self, track_tree: bool) -> None:
        self.track_tree = track_tree
        self.kept = Sequences(keep_all=track_tree)

    @property
    def current_nodes(self) -> list[SequenceNode]:
        return self.kept.nodes

    @property
    def sequences(self) -> dict[str, SequenceNode]:
        return {node.full_text: node for node in self.kept.nodes}

    def get_state(self) -> dict[str, Any]:
        """`nodes`, the sequences as they are now; with track_tree, every one that ever was, by its text."""
        if self.track_tree:
            return {"sequences": self.sequences, "tree": self.sequences}
        return {"nodes": list(self.kept.nodes)}

    def reset(self) -> None:
        self.kept.clear()


class ManagedServer(Session):
    """`tool_parser` is the name of how a model writes calls, which is known from its template: with one, and tools, the
    special tokens of an answer stay in `full_text`, since calls may be written with them."""

    def __init__(
        self,
        server: Sampler,
        tokenizer: Any = None,
        track_tree: bool = False,
        tool_parser: str | None = None,
        preserve_think_blocks: bool = False,
    ) -> None:
        super().__init__(track_tree)
        self.server = server
        self.tokenizer = tokenizer if tokenizer is not None else server.tokenizing.tokenizer
        self._tokenizing = server.tokenizing
        self._vocabulary = self._tokenizing.vocabulary(self.tokenizer)
        self._parses_tools = tool_parser is not None
        self._by_template = preserve_think_blocks
        self._history = History()
        self._shown: list[tuple[str, SequenceNode]] = []

    def reset(self) -> None:
        super().reset()
        self._history = History()
        self._shown.clear()

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        given = dict(kwargs)
        messages = plain(given.pop("messages", None))
        tools, tool_choice = plain(given.pop("tools", None)) or [], given.pop("tool_choice", None)
        given |= given.pop("extra_body", None) or {}
        request = Request(read_messages(messages), tools, given.pop("chat_template_kwargs", None))
        vocabulary = self._vocabulary
        if isinstance(vocabulary, PlainVocabulary):
            return await self._chat_as_text(vocabulary, request, given)
        plan = self._plan(vocabulary, request)
        ids = plan.ids.tolist()
        written = self._written(ids)
        prompt, *answers = await self._sample(ids, written, given)
        choices, sampled = [], []
        for at, (ids, log_probs, reason) in enumerate(zip(*answers, strict=True)):
            message, text = self._said(vocabulary, plan, ids, tools=bool(tools) and tool_choice != "none")
            sampled.append(self._answer(ids, log_probs, reason, special=bool(tools) and self._parses_tools))
            self._remember(request, message, plan, ids)
            ended = "tool_calls" if message.tool_calls and reason == "stop" else reason
            choices.append(Choice(index=at, message=_shown_message(message, text), finish_reason=ended))
        self.kept.add(prompt, sampled, written)
        return ChatCompletion(model=self.server.config.model_name, choices=choices)

    async def completion(self, **kwargs: Any) -> Completion:
        given = dict(kwargs)
        prompt = given.pop("prompt", None)
        if not prompt:
            raise InvalidInput("prompt is missing: say what is to be completed")
        if isinstance(prompt, str):
            sampled = await self._continue(prompt, given)
        else:
            ids = [int(token) for token in prompt]
            sampled, _ = await self._sampled(ids, self._written(ids), given)
        choices = [
            CompletionChoice(index=at, text=answer.text, finish_reason=answer.metadata["finish_reason"])
            for at, answer in enumerate(sampled)
        ]
        return Completion(model=self.server.config.model_name, choices=choices)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        given = dict(kwargs)
        messages = given.pop("messages", None)
        if messages is not None:
            given["prompt"] = self._convert_messages_to_prompt(messages)
            if not isinstance(self._vocabulary, PlainVocabulary):
                given["input_ids"] = self._plan(self._vocabulary, Request(read_messages(plain(messages)))).ids.tolist()
        return await self.server.get_logprobs(**given)

    def _convert_messages_to_prompt(self, messages: Any) -> str:
        """The text of a conversation's prompt, under the name by which tests of Atropos' kind ask for it."""
        request = Request(read_messages(plain(messages)))
        if isinstance(self._vocabulary, PlainVocabulary):
            return self._vocabulary.written(_dicts(request))
        return self._written(self._plan(self._vocabulary, request).ids.tolist())

    # -- by text -------------------------------------------------------------------------------------------------------

    async def _chat_as_text(
        self, vocabulary: PlainVocabulary, request: Request, given: dict[str, Any]
    ) -> ChatCompletion:
        """A turn whose prompt is what the tokenizer itself writes; where it begins with a sequence, that goes on."""
        if request.tools or request.options:
            raise InvalidInput(
                f"tools and chat_template_kwargs need a fast tokenizer of transformers', whose template is known; "
                f"{type(self.tokenizer).__name__} is none"
            )
        choices = [
            Choice(
                index=at,
                message=ChatCompletionMessage(content=answer.text),
                finish_reason=answer.metadata["finish_reason"],
            )
            for at, answer in enumerate(await self._continue(vocabulary.written(_dicts(request)), given))
        ]
        return ChatCompletion(model=self.server.config.model_name, choices=choices)

    async def _continue(self, prompt: str, given: dict[str, Any]) -> list[Sampled]:
        """The answers to a text, and from now on to what continues it with either of their texts."""
        sampled, nodes = await self._sampled(self._ids_of(prompt), prompt, given)
        for answer, node in zip(sampled, nodes, strict=True):
            self._shown += [(prompt + answer.text, node), (prompt + answer.written, node)]
        return sampled

    def _ids_of(self, prompt: str) -> list[int]:
        """A text's ids: those of the sequence that it continues, and behind them only the new text's."""
        fits = [(text, node) for text, node in self._shown if prompt.startswith(text) and self._is_kept(node)]
        if not fits:
            return self._tokenizing.prompt_ids(prompt, self.tokenizer)
        text, node = max(fits, key=lambda fit: len(fit[0]))
        return node.tokens + self._vocabulary.encode(prompt[len(text) :])

    def _is_kept(self, node: SequenceNode) -> bool:
        return any(kept is node for kept in self.kept.nodes)

    # -- ids -----------------------------------------------------------------------------------------------------------

    def _plan(self, vocabulary: Vocabulary, request: Request) -> PromptPlan:
        renderer = self._tokenizing.renderer(vocabulary)
        if request.messages[-1].role == "assistant":
            return _begun(self.tokenizer, vocabulary.encode, request)
        return plan_prompt(renderer, self._history, request, "template" if self._by_template else "bridge")

    def _written(self, ids: list[int]) -> str:
        """A prompt's text, special tokens and all; what continues a sequence is read behind that sequence's text."""
        before = self.kept.continued_by(ids)
        if before is None:
            return self._vocabulary.decode(ids)
        return before.written + self._vocabulary.decode(ids[len(before.tokens) :])

    async def _sample(self, ids: list[int], written: str, given: dict[str, Any]) -> Tokens:
        """The prompt goes to the server as ids, which count, and as text, for a server of an environment's own."""
        return await self.server.tokens_and_logprobs_completion(**{**given, "input_ids": ids, "prompt": written})

    async def _sampled(
        self, ids: list[int], written: str, given: dict[str, Any]
    ) -> tuple[list[Sampled], list[SequenceNode]]:
        """The answers to a prompt, with the sequences that they make."""
        prompt, *answers = await self._sample(ids, written, given)
        sampled = [self._answer(*one) for one in zip(*answers, strict=True)]
        return sampled, self.kept.add(prompt, sampled, written)

    def _answer(self, ids: list[int], log_probs: list[float], reason: str, *, special: bool = False) -> Sampled:
        written = self._vocabulary.decode(ids)
        text = written if special else self._vocabulary.decode(ids, skip_special=True)
        return Sampled(ids, log_probs, text, written, {"finish_reason": reason})

    # -- answers -------------------------------------------------------------------------------------------------------

    def _said(self, vocabulary: Vocabulary, plan: PromptPlan, ids: list[int], *, tools: bool) -> tuple[Message, str]:
        """An answer as the environment sees it: reasoning stays in its text, calls are taken out."""
        renderer = self._tokenizing.renderer(vocabulary)
        marks = frozenset(i for mark in renderer.grammar.markers if (i := vocabulary.id_of(mark)) is not None)
        text = text_of(vocabulary, [i for i in ids if i not in renderer.stop_ids], keep=marks)
        calls = renderer.parse(plan.ids[-PROMPT_TAIL_TOKENS:].tolist(), ids, tools=True).tool_calls if tools else ()
        if calls:
            opener = CALL_OPENERS.get(renderer.grammar.calls, "")
            at = text.find(opener) if opener else -1
            text = text[:at].rstrip() if at >= 0 else ""
        return Message("assistant", text, None, calls), text

    def _remember(self, request: Request, answer: Message, plan: PromptPlan, ids: list[int]) -> None:
        record: NodeRecord = self._history.record(request, answer, plan.parent)
        self._history.add(record, plan.ids, np.asarray(ids, np.int32), plan.parent)


def _dicts(request: Request) -> list[dict[str, Any]]:
    return [to_dict(message) for message in request.messages]


def _begun(tokenizer: Any, encode: Any, request: Request) -> PromptPlan:
    """A conversation that ends in the beginning of an answer, for the model to go on with."""
    text = tokenizer.apply_chat_template(
        _dicts(request),
        tools=list(request.tools) or None,
        tokenize=False,
        continue_final_message=True,
        **request.options,
    )
    return PromptPlan(np.asarray(encode(text), np.int32), Cause.NEW_CONVERSATION)


def _shown_message(message: Message, text: str) -> ChatCompletionMessage:
    calls = [_shown_call(call) for call in message.tool_calls] or None
    return ChatCompletionMessage(content=text or None if calls else text, tool_calls=calls)


def _shown_call(call: Call) -> ToolCall:
    arguments = call.arguments if isinstance(call.arguments, str) else orjson.dumps(call.arguments).decode()
    return ToolCall.model_validate({"id": call.id, "function": {"name": call.name, "arguments": arguments}})
