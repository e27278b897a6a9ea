"""`ManagedServer`: a conversation whose tokens, masks and log-probs are recorded while it goes on.

An environment sends messages or text, as to any server. What the server consumes and samples are ids: a turn that
continues an earlier one reuses its ids, and only the new part is tokenised. The turn that is continued is found by its
messages or, for a tokenizer whose template has no renderer here, by the rendered text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

import numpy as np

from headrace.data.errors import InvalidInput
from headrace.envs.server.config import APIServerConfig
from headrace.envs.server.responses import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionMessage,
    ChatToolCall,
    CompletionChoice,
    TextCompletion,
    TokensAndLogprobs,
    plain_json,
)
from headrace.envs.server.sequences import SequenceNode, SessionAnswer, SessionSequences
from headrace.envs.server.tokenizing import PlainVocabulary, Tokenizing
from headrace.tokens import (
    Cause,
    Conversation,
    History,
    Message,
    NodeRecord,
    PromptPlan,
    ToolCall,
    Vocabulary,
    plan_prompt,
    read_messages,
    text_of,
)
from headrace.tokens.messages import to_dict
from headrace.tokens.renderer import PROMPT_TAIL_TOKENS, Tools, marker_ids


class TokenServer(Protocol):
    """What a session needs of one server, or of several: token completions, and the model's tokenizer."""

    config: APIServerConfig
    tokenizing: Tokenizing

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs: ...

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]: ...


class ManagedSession:
    """The recorded sequences that every kind of session shows to its environment."""

    def __init__(self, track_tree: bool) -> None:
        self.track_tree = track_tree
        self.recorded = SessionSequences(keep_all=track_tree)

    @property
    def current_nodes(self) -> list[SequenceNode]:
        """The current sequences."""
        return self.recorded.nodes

    @property
    def sequences(self) -> dict[str, SequenceNode]:
        """The current sequences by their texts."""
        return {node.full_text: node for node in self.recorded.nodes}

    def get_state(self) -> dict[str, Any]:
        """`nodes`, the current sequences; with track_tree instead `sequences` and `tree`, all of them by their text."""
        if self.track_tree:
            return {"sequences": self.sequences, "tree": self.sequences}
        return {"nodes": list(self.recorded.nodes)}

    def reset(self) -> None:
        """Forgets all sequences."""
        self.recorded.clear()


class ManagedServer(ManagedSession):
    """A session that renders and tokenises here. With a `tool_parser`, of any name, answers to calls with tools keep
    their special tokens in `full_text`, since tool calls may be written with them; how they are written is known from
    the model's template."""

    def __init__(
        self,
        server: TokenServer,
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
        """A chat completion of sampled tokens; what continues earlier answers begins with their ids, bit for bit."""
        given = dict(kwargs)
        messages = plain_json(given.pop("messages", None))
        tools, tool_choice = plain_json(given.pop("tools", None)) or [], given.pop("tool_choice", None)
        given |= given.pop("extra_body", None) or {}
        request = Conversation(read_messages(messages), tools, given.pop("chat_template_kwargs", None))
        vocabulary = self._vocabulary
        if isinstance(vocabulary, PlainVocabulary):
            return await self._chat_as_text(vocabulary, request, given)
        plan = self._plan(vocabulary, request)
        ids = plan.ids.tolist()
        written = self._written(ids)
        prompt, *answers = await self._sample(ids, written, given)
        special = bool(tools) and self._parses_tools
        choices, sampled = [], []
        for at, (ids, log_probs, reason) in enumerate(zip(*answers, strict=True)):
            offered = request.tools if tool_choice != "none" else ()
            message, text = self._parsed(vocabulary, plan, ids, offered)
            sampled.append(self._answer(prompt, ids, log_probs, reason, special=special))
            self._remember(request, message, plan, ids)
            whole = any(call.whole for call in message.tool_calls)
            ended = "tool_calls" if whole and reason == "stop" else reason
            choices.append(ChatChoice(index=at, message=_shown_message(message, text), finish_reason=ended))
        self.recorded.add(prompt, sampled, written)
        return ChatCompletion(model=self.server.config.model_name, choices=choices)

    async def completion(self, **kwargs: Any) -> TextCompletion:
        """A text completion, of text or of token ids. Raises `InvalidInput` without a prompt."""
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
        return TextCompletion(model=self.server.config.model_name, choices=choices)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """The server's log-probs of a text, of ids, or of messages as the template renders them."""
        given = dict(kwargs)
        messages = given.pop("messages", None)
        if messages is not None:
            given["prompt"] = self._convert_messages_to_prompt(messages)
            if not isinstance(self._vocabulary, PlainVocabulary):
                given["input_ids"] = self._plan(
                    self._vocabulary, Conversation(read_messages(plain_json(messages)))
                ).ids.tolist()
        return await self.server.get_logprobs(**given)

    def _convert_messages_to_prompt(self, messages: Any) -> str:
        """The text of a conversation's prompt, under the name that tests of Atropos' environments call."""
        request = Conversation(read_messages(plain_json(messages)))
        if isinstance(self._vocabulary, PlainVocabulary):
            return self._vocabulary.written(_dicts(request))
        return self._written(self._plan(self._vocabulary, request).ids.tolist())

    # By text.

    async def _chat_as_text(
        self, vocabulary: PlainVocabulary, request: Conversation, given: dict[str, Any]
    ) -> ChatCompletion:
        """A turn whose prompt is rendered by the tokenizer itself; one that begins with a sequence continues it."""
        if request.tools or request.options:
            raise InvalidInput(
                f"tools and chat_template_kwargs need a fast tokenizer of transformers', whose template is known; "
                f"{type(self.tokenizer).__name__} is none"
            )
        choices = [
            ChatChoice(
                index=at,
                message=ChatCompletionMessage(content=answer.text),
                finish_reason=answer.metadata["finish_reason"],
            )
            for at, answer in enumerate(await self._continue(vocabulary.written(_dicts(request)), given))
        ]
        return ChatCompletion(model=self.server.config.model_name, choices=choices)

    async def _continue(self, prompt: str, given: dict[str, Any]) -> list[SessionAnswer]:
        """The answers to a text. Later prompts that begin with it and an answer's text continue that sequence."""
        sampled, nodes = await self._sampled(self._ids_of(prompt), prompt, given)
        for answer, node in zip(sampled, nodes, strict=True):
            self._shown += [(prompt + answer.text, node), (prompt + answer.written, node)]
        return sampled

    def _ids_of(self, prompt: str) -> list[int]:
        """A text's ids: those of the sequence that it continues, followed by those of the new text."""
        fits = [(text, node) for text, node in self._shown if prompt.startswith(text) and self._is_current(node)]
        if not fits:
            return self._tokenizing.prompt_ids(prompt, self.tokenizer)
        text, node = max(fits, key=lambda fit: len(fit[0]))
        return node.tokens + self._vocabulary.encode_after(prompt[len(text) :])

    def _is_current(self, node: SequenceNode) -> bool:
        return any(current is node for current in self.recorded.nodes)

    # Ids.

    def _plan(self, vocabulary: Vocabulary, request: Conversation) -> PromptPlan:
        renderer = self._tokenizing.renderer(vocabulary)
        if request.messages[-1].role == "assistant":
            return _continue_final(self.tokenizer, vocabulary.encode, request)
        return plan_prompt(renderer, self._history, request, "template" if self._by_template else "bridge")

    def _written(self, ids: list[int]) -> str:
        """A prompt's text with special tokens. Behind a sequence that it continues, only the new ids are decoded."""
        before = self.recorded.continued_by(ids)
        if before is None:
            return self._vocabulary.decode(ids)
        return before.written + self._vocabulary.decode_after(before.tokens, ids[len(before.tokens) :])

    async def _sample(self, ids: list[int], written: str, given: dict[str, Any]) -> TokensAndLogprobs:
        """Samples. The prompt is sent as ids, which count, and as text, for an environment's own server class."""
        return await self.server.tokens_and_logprobs_completion(**{**given, "input_ids": ids, "prompt": written})

    async def _sampled(
        self, ids: list[int], written: str, given: dict[str, Any]
    ) -> tuple[list[SessionAnswer], list[SequenceNode]]:
        """The answers to a prompt, and the sequences recorded for them."""
        prompt, *answers = await self._sample(ids, written, given)
        sampled = [self._answer(prompt, *one) for one in zip(*answers, strict=True)]
        return sampled, self.recorded.add(prompt, sampled, written)

    def _answer(
        self, prompt: list[int], ids: list[int], log_probs: list[float], reason: str, *, special: bool = False
    ) -> SessionAnswer:
        written = self._vocabulary.decode_after(prompt, ids)
        text = written if special else self._vocabulary.decode_after(prompt, ids, skip_special=True)
        return SessionAnswer(ids, log_probs, text, written, {"finish_reason": reason})

    # Answers.

    def _parsed(self, vocabulary: Vocabulary, plan: PromptPlan, ids: list[int], tools: Tools) -> tuple[Message, str]:
        """An answer's message and text as the environment gets them: with its reasoning, without its tool calls."""
        renderer = self._tokenizing.renderer(vocabulary)
        marks = marker_ids(vocabulary, renderer.grammar)
        said = [i for i in ids if i not in renderer.stop_ids]
        text = text_of(vocabulary, said, keep=marks, prompt=plan.ids)
        calls = renderer.parse(plan.ids[-PROMPT_TAIL_TOKENS:].tolist(), ids, tools=tools).tool_calls if tools else ()
        if calls:
            opener = renderer.grammar.calls.opener if renderer.grammar.calls is not None else ""
            at = text.find(opener) if opener else -1
            text = text[:at].rstrip() if at >= 0 else ""
        return Message("assistant", text, None, calls), text

    def _remember(self, request: Conversation, answer: Message, plan: PromptPlan, ids: list[int]) -> None:
        record: NodeRecord = self._history.record(request, answer, plan.parent)
        self._history.add(record, plan.ids, np.asarray(ids, np.int32), plan.parent)


def _dicts(request: Conversation) -> list[dict[str, Any]]:
    return [to_dict(message) for message in request.messages]


def _continue_final(tokenizer: Any, encode: Any, request: Conversation) -> PromptPlan:
    """The prompt of a conversation that ends in a partial assistant message, which the model continues."""
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


def _shown_call(call: ToolCall) -> ChatToolCall:
    function = {"name": call.name, "arguments": call.arguments_text}
    return ChatToolCall.model_validate({"id": call.id, "function": function})


class ChatServer(Protocol):
    """What the adapter needs of a session."""

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion: ...

    async def completion(self, **kwargs: Any) -> TextCompletion: ...


class _Completions:
    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    async def create(self, **kwargs: Any) -> Any:
        return await self._call(**kwargs)


class ManagedServerAdapter:
    """A session in the shape of OpenAI's client, for libraries: `client.chat.completions.create(...)`."""

    def __init__(self, managed_server: ChatServer, base_url: str) -> None:
        self.base_url = base_url
        self.chat = SimpleNamespace(completions=_Completions(managed_server.chat_completion))
        self.completions = _Completions(managed_server.completion)

    async def post(self, path: str, body: Any = None, cast_to: Any = None) -> NoReturn:
        """Raises: a session has no other routes."""
        raise NotImplementedError(f"a managed session has no route {path!r}; use chat.completions or completions")

    def copy(self, **kwargs: Any) -> NoReturn:
        """Raises: a session is one conversation."""
        raise NotImplementedError("a managed session cannot be copied; use it as it is")
