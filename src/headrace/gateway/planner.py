"""From what was asked to its turns: the prompt of each, what it continues, and the request that goes upstream.

Long texts are tokenised in a thread, so that one agent's new document does not hold up the others. First prompts are
remembered: the rollouts of a group ask the same question, and it is tokenised once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from headrace.data.errors import InvalidInput
from headrace.data.step import IntArray, check_depth
from headrace.gateway.counters import GatewayCounters
from headrace.gateway.errors import RETRY_AFTER_S, Refusal
from headrace.gateway.request import (
    MAX_CALL_BYTES,
    BadField,
    CallRequest,
    References,
    SamplingRules,
    tools_bytes,
)
from headrace.gateway.sessions import Session, Sessions
from headrace.gateway.tool_choice import forced_tool_call
from headrace.gateway.turn import Choice, TextAnswerStream, Turn, tool_call_ids
from headrace.gateway.upstream.types import UpstreamRequest
from headrace.pool.errors import PoolUnreachable
from headrace.tokens import (
    AnswerStream,
    Cause,
    Conversation,
    History,
    HistoryMode,
    Match,
    PromptPlan,
    Renderer,
    plan_prompt,
)
from headrace.tokens.images import check_pixels
from headrace.tokens.messages import images_of
from headrace.tokens.renderer import PROMPT_TAIL_TOKENS

log = logging.getLogger("headrace.gateway")

#: Characters that are tokenised on the spot. More, about half a millisecond's worth, go to a thread: the tokenizer lets
#: others run meanwhile, on another core where there is one.
INLINE_CHARACTERS = 1_500
#: The same where the tokenizer remembers words, which takes a third as long; words that are new wait all the same.
INLINE_CHARACTERS_OF_WORDS = 4_000
#: Characters from which on a text is tokenised apart from all others: it takes a second or more.
HUGE_CHARACTERS = 1_000_000
#: Seconds that a call waits for the pool to say what other processes sampled.
REFRESH_TIMEOUT_S = 1.0
#: The same of a call that names an answer, and cannot be planned without it.
NAMED_REFRESH_TIMEOUT_S = 5.0

#: Images that are remembered to be whole, by their digests.
MAX_CHECKED_IMAGES = 10_000

#: What templates call the option that switches reasoning on and off.
THINKING_OPTION = "enable_thinking"

#: Digests of a conversation, its tools and its template options.
PromptKey = tuple[bytes, bytes, bytes]
#: First prompts that are remembered, some 400 bytes each beside their tokens, and the tokens of all; four bytes each.
MAX_CACHED_PROMPTS = 4_096
MAX_CACHED_TOKENS = 2_000_000


class PromptCache:
    """The ids of first prompts; the least used are forgotten first.

    Only conversations of text and without answers are remembered. What systems and users said is the same here only if
    it is the same text, so the same key means the same ids.
    """

    def __init__(self, most_tokens: int = MAX_CACHED_TOKENS, most_prompts: int = MAX_CACHED_PROMPTS) -> None:
        self._most = most_tokens
        self._most_prompts = most_prompts
        self._known: OrderedDict[PromptKey, IntArray] = OrderedDict()
        self._tokens = 0

    def key(self, conversation: Conversation) -> PromptKey | None:
        """What a conversation is remembered by; None where it is not to be."""
        if any(message.role not in ("system", "user") or message.parts for message in conversation.messages):
            return None
        return conversation.chain.whole, conversation.tools_key, conversation.options_key

    def get(self, key: PromptKey) -> IntArray | None:
        """The ids of a prompt that is remembered; None where it is not."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        return found

    def put(self, key: PromptKey, ids: IntArray) -> None:
        """Remembers a prompt's ids, which nobody may write to from here on."""
        if key in self._known or len(ids) > self._most:
            return
        ids.flags.writeable = False  # many trajectories share it
        self._known[key] = ids
        self._tokens += len(ids)
        while self._tokens > self._most or len(self._known) > self._most_prompts:
            _, oldest = self._known.popitem(last=False)
            self._tokens -= len(oldest)


class Planner:
    """Plans the calls of one model. `shared`: other processes write to the same pool, so a session may be behind it."""

    def __init__(
        self,
        renderer: Renderer,
        sessions: Sessions,
        sampling: SamplingRules,
        counters: GatewayCounters,
        *,
        mode: HistoryMode,
        shared: bool,
    ) -> None:
        self.renderer = renderer
        self._sessions = sessions
        self._sampling = sampling
        self._counters = counters
        self._mode = mode
        self._shared = shared
        self._prompts = PromptCache()
        self._inline = INLINE_CHARACTERS_OF_WORDS if renderer.vocabulary.remembers_words else INLINE_CHARACTERS
        self._checked_images: dict[str, None] = {}  # images that are whole
        self._threads = ThreadPoolExecutor(1, "headrace-tokenize")
        self._for_huge = ThreadPoolExecutor(1, "headrace-tokenize-huge")  # which hold up nobody but each other

    def close(self) -> None:
        """Ends its threads without waiting for what they tokenise."""
        for threads in (self._threads, self._for_huge):
            threads.shutdown(wait=False, cancel_futures=True)

    def _threads_for(self, characters: int) -> ThreadPoolExecutor:
        return self._for_huge if characters > HUGE_CHARACTERS else self._threads

    def apply_thinking(self, request: CallRequest) -> None:
        """Turns `request.thinking` into the template's option for it, where it has one."""
        if (
            request.thinking is not None
            and request.conversation is not None
            and self.renderer.has_option(THINKING_OPTION)
        ):
            request.conversation = request.conversation.with_option(THINKING_OPTION, request.thinking)

    async def turns(
        self, session: Session, request: CallRequest, call_id: str, digest: str, context: int | None
    ) -> list[Turn]:
        """The turns of a call: one for a conversation, or one for each prompt of a completion. Raises `Refusal` or
        `BadField` where it cannot be sampled."""
        conversation = request.conversation
        if conversation is not None:
            if request.references is not None:
                conversation = await self._referred(session, conversation, request.references)
            if request.previous is not None:
                conversation = await self._continued(session, conversation, request.opening, request.previous)
            request = msgspec.structs.replace(request, conversation=conversation)
            texts = [message.content for message in conversation.messages]
            self._check_length(texts, context, extra_tokens=len(texts))
            plan = await self.conversation(conversation, session, request.named, request.tools_bytes)
            return [self.turn(session.channel, request, plan, call_id, digest, context, session=session)]
        turns: list[Turn] = []
        for prompt in request.prompts:
            self._check_length([prompt] if isinstance(prompt, str) else [], context)
        behind = self._shared and session.steps > 0
        for at, prompt in enumerate(request.prompts):
            plan = await self._completion(session, prompt, behind=behind)
            behind = behind and plan.parent is not None  # once a call is enough
            named = call_id if len(request.prompts) == 1 else f"{call_id}-{at}"
            turn = self.turn(session.channel, request, plan, named, digest, context, session=session)
            turn.first = at * request.n
            turn.text = prompt if isinstance(prompt, str) else None
            turns.append(turn)
        return turns

    def _check_length(self, texts: Sequence[str], context: int | None, extra_tokens: int = 0) -> None:
        """Refuses texts that no tokenizer could make short enough, before one tries: the longest token is so long.
        `extra_tokens`: those that are not theirs; every message has one at least that says where it begins."""
        longest = self.renderer.vocabulary.longest
        if longest is not None:
            least = -(-sum(map(len, texts)) // longest) + extra_tokens
            self._sampling.check_length(least, context, at_least=True)

    async def length(self, session: Session, request: CallRequest) -> int:
        """How many tokens the prompt of a conversation has, if it is asked next."""
        assert request.conversation is not None
        return len((await self.conversation(request.conversation, session)).ids)

    def turn(
        self,
        channel: str,
        request: CallRequest,
        plan: PromptPlan,
        call_id: str,
        digest: str,
        context: int | None,
        *,
        session: Session | None = None,
        sticky: str = "",
    ) -> Turn:
        """A turn for a prompt that is decided; `Refusal` where it is too long or asks for what may not be. `sticky` is
        what keeps calls on one server, where they are of no session."""
        chat = request.conversation is not None
        stop_ids = self.renderer.stop_ids if chat else ()
        forced = session.sampling if session is not None else None
        sticky = session.uid if session is not None else sticky
        given = self._sampling.effective(request, channel, len(plan.ids), context, stop_ids, forced)
        if request.required_tools:
            assert request.conversation is not None
            given["structured_outputs"] = forced_tool_call(
                self.renderer.grammar, request.conversation.tools, request.required_tools
            )
        call_bytes = _checked_bytes(request, given)
        # Even where no alternatives are wanted, tokens must be told by their text.
        top_logprobs = 0 if request.top_logprobs is None else max(1, request.top_logprobs)
        upstream_request = UpstreamRequest(plan.ids, given, request.extra, top_logprobs, sticky, call_id, plan.images)
        self._counters.add("prompts", channel, plan.cause.value)
        if plan.parent is not None and not plan.bridged and chat:
            self._counters.add("rendered", channel)
        return Turn(
            call_id=call_id,
            request=request,
            plan=plan,
            upstream_request=upstream_request,
            choices=self.choices(request, plan, call_id, upstream_request),
            created=int(time.time()),
            began=time.monotonic(),
            request_digest=digest,
            call_bytes=call_bytes,
        )

    def choices(
        self, request: CallRequest, plan: PromptPlan, call_id: str, sampled_by: UpstreamRequest
    ) -> list[Choice]:
        """Choices for the answers to a prompt, of which nothing is sampled yet."""
        reasoning = self.renderer.grammar.reasoning
        thought = self.renderer.vocabulary.id_of(reasoning.close.strip()) if reasoning is not None else None
        single = request.single_tool_call
        return [
            Choice(index, self._reader(request, plan, call_id, index, sampled_by), thought, single_tool_call=single)
            for index in range(request.n)
        ]

    def _reader(
        self, request: CallRequest, plan: PromptPlan, call_id: str, index: int, sampled_by: UpstreamRequest
    ) -> AnswerStream:
        tail = plan.ids[-PROMPT_TAIL_TOKENS:].tolist()
        stop, min_tokens = sampled_by.cut, sampled_by.min_tokens
        if request.conversation is None:
            return TextAnswerStream(self.renderer.vocabulary, stop, tail, min_tokens)
        renderer = self.renderer.with_options(request.conversation.options)
        tools = request.conversation.tools if request.allow_tool_calls else ()
        new_id = tool_call_ids(call_id, index)
        return renderer.stream(tail, tools=tools, new_id=new_id, stop=stop, min_tokens=min_tokens)

    async def conversation(
        self,
        conversation: Conversation,
        session: Session | None = None,
        previous: str | None = None,
        tools_size: int | None = None,
    ) -> PromptPlan:
        """The prompt of messages, continuing a session where there is one, and the call `previous` where it fits.
        `tools_size`: bytes of its tools; None where they are few."""
        await self._check_images(conversation)
        history = History() if session is None else session.history
        match = history.match(conversation, previous)
        unknown = match.node is None and any(message.role == "assistant" for message in conversation.messages)
        if unknown and self._shared and session is not None:
            await self._refresh(session)  # perhaps another process sampled it
            history = session.history
            match = history.match(conversation, previous)
        key = self._prompts.key(conversation) if match.node is None else None
        known = self._prompts.get(key) if key is not None else None
        if known is not None:
            return PromptPlan(known, match.cause)
        plan = await self._planned(history, conversation, match, tools_size)
        if key is not None:
            self._prompts.put(key, plan.ids)
        return plan

    async def _check_images(self, conversation: Conversation) -> None:
        """Refuses broken images. Each file is read once, in a thread."""
        for number, image in enumerate(images_of(conversation.messages), 1):
            if image.digest not in self._checked_images:
                at = f"image {number} of the conversation"
                await asyncio.get_running_loop().run_in_executor(self._threads, check_pixels, image, at)
                self._checked_images[image.digest] = None
                if len(self._checked_images) > MAX_CHECKED_IMAGES:
                    del self._checked_images[next(iter(self._checked_images))]

    async def _planned(
        self, history: History, conversation: Conversation, match: Match, tools_size: int | None
    ) -> PromptPlan:
        size = _size(conversation, match, tools_size)
        if size < self._inline:
            return plan_prompt(self.renderer, history, conversation, self._mode, match)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads_for(size), plan_prompt, self.renderer, history, conversation, self._mode, match
        )

    async def _referred(self, session: Session, given: Conversation, references: References) -> Conversation:
        """The conversation with the items that the agent referred to."""
        own = session.stored.answers(references.calls)
        missing = next((call for call in references.calls if call not in own and call not in references.known), None)
        if missing is not None and self._shared:  # perhaps another process answered it
            await self._refresh_named(session, missing, "input")
            own = session.stored.answers(references.calls)
        return Conversation(references.read({**references.known, **own}), given.tools, given.options)

    async def _refresh_named(self, session: Session, call: str, param: str) -> None:
        """Returns once all is known here that the pool knows of a call; 503 where the pool cannot be asked. `param` is
        where the agent named the call."""
        if not await self._refresh(session, NAMED_REFRESH_TIMEOUT_S):
            raise Refusal(
                f"{param}: the answer {call!r} is not known here, and the pool cannot be asked",
                503,
                code="pool_unreachable",
                param=param,
                retry_after=RETRY_AFTER_S,
            )

    async def _continued(self, session: Session, given: Conversation, opening: int, previous: str) -> Conversation:
        """The whole conversation: what the agent named goes behind the `opening` messages of what it gave."""
        earlier = session.stored.messages(previous)
        if earlier is None and self._shared:  # perhaps another process answered it
            await self._refresh_named(session, previous, "previous_response_id")
            earlier = session.stored.messages(previous)
        if earlier is None:
            raise Refusal(
                f"previous_response_id: no answer {previous!r} is stored in this trajectory; it was given in another, "
                "by another model, with store: false, or never. Send the items themselves",
                404,
                code="previous_response_not_found",
                param="previous_response_id",
            )
        messages = (*given.messages[:opening], *earlier, *given.messages[opening:])
        return Conversation(messages, given.tools, given.options)

    async def _refresh(self, session: Session, timeout_s: float = REFRESH_TIMEOUT_S) -> bool:
        """Reads a session anew. A pool that cannot be asked holds nobody up: what is unknown here is then a branch."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._sessions.refresh(session)
        except (TimeoutError, PoolUnreachable) as error:
            log.warning("trajectory %r could not be read anew: %s", session.uid, error)
            return False
        return True

    async def _completion(self, session: Session, prompt: str | IntArray, *, behind: bool) -> PromptPlan:
        """The plan of a completion's prompt. `behind`: other processes may have sampled what it goes on from, and where
        nothing here is that, the session is read anew."""
        if not isinstance(prompt, str):
            self.checked(prompt)
            parent = session.continued_ids(prompt)
            if parent is None and behind:
                await self._refresh(session)
                parent = session.continued_ids(prompt)
            if parent is not None:
                return PromptPlan(prompt, Cause.EXTENDED, parent, parent.total, True)
            return PromptPlan(prompt, Cause.NEW_CONVERSATION if session.history.nodes else Cause.FIRST)
        continued = session.continued_text(prompt)
        if continued is None and behind:
            await self._refresh(session)
            continued = session.continued_text(prompt)
        if continued is not None and continued[1]:
            parent, rest = continued
            new = self.checked(np.asarray(await self._encoded(rest, special=False), np.int32))
            return PromptPlan(np.concatenate([parent.whole(), new]), Cause.EXTENDED, parent, parent.total, True)
        ids = await self._encoded(prompt, special=True)
        if not ids:
            raise BadField("prompt is empty: it has no tokens", "prompt")
        cause = Cause.NEW_CONVERSATION if session.history.nodes else Cause.FIRST
        return PromptPlan(self.checked(np.asarray(ids, np.int32)), cause)

    async def _encoded(self, text: str, *, special: bool) -> list[int]:
        encode = self.renderer.vocabulary.encode_prompt if special else self.renderer.vocabulary.encode_after
        if len(text) < self._inline:
            return encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads_for(len(text)), encode, text)

    def checked(self, prompt: IntArray) -> IntArray:
        """The ids; `BadField` where the model cannot read one of them."""
        most = self.renderer.vocabulary.size
        vision = self.renderer.vision
        if not isinstance(vision, str) and vision.placeholder in prompt:
            raise BadField("the prompt holds an image's placeholder: images are taken in messages only", "prompt")
        if len(prompt) and int(prompt.max()) >= most:
            raise BadField(f"the prompt holds the id {int(prompt.max())}; the vocabulary has {most} tokens", "prompt")
        return prompt


def _checked_bytes(request: CallRequest, given: dict[str, Any]) -> int:
    """How many bytes each step keeps of a call's fields, the parameters `given` that it is sampled with among them.
    What a step could not keep, since it is too deep or too large, is refused before anything is sampled."""
    form = "tools" if request.required_tools else "response_format"
    nested = dict(request.extra)
    if "structured_outputs" in given:
        nested[form] = given["structured_outputs"]
    for name, value in nested.items():
        try:
            check_depth({name: {name: value}}, name)
        except InvalidInput as error:
            raise BadField(str(error), name) from None
    fields = {**given, **nested, "model": request.model, "user": request.user}
    fields.pop("structured_outputs", None)
    size = len(msgspec.msgpack.encode(fields))
    if size <= MAX_CALL_BYTES:
        return size
    sizes = {name: len(msgspec.msgpack.encode(value)) for name, value in fields.items()}
    largest = max(sizes, key=sizes.__getitem__)
    raise BadField(
        f"{largest} has {sizes[largest]} bytes, which every step of the call would keep; at most {MAX_CALL_BYTES} are "
        "taken, of all fields but messages and tools",
        largest,
    )


def _size(conversation: Conversation, match: Match, tools_size: int | None) -> int:
    """How much text there is to tokenise, tools among it. Few tools need not be measured where the messages alone are
    too long to be tokenised on the spot."""
    if match.node is not None:
        return sum(len(message.content) for message in match.new)
    size = sum(len(message.content) for message in conversation.messages)
    if tools_size is None:
        tools_size = tools_bytes(conversation) if size < INLINE_CHARACTERS else 0
    return size + tools_size
