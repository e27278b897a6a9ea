"""A rollout server that says what a test tells it to, with a real tokenizer and vLLM's wire.

What it sampled is what the script says: the ids of a text and the id that ends a turn. It keeps every order that it
was given, waits where a test holds it, and misbehaves as told. It runs in a thread of its own, so that it can be told
so from anywhere; everything is awaited by event.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from tests.gateway.kit import Running, running_gateway
from tests.gateway.wire import Writer, begin_stream, end_stream, event, respond, send

from headrace import DataPool
from headrace.tokens.vocabulary import Vocabulary, load_vocabulary

Json = dict[str, Any]
Behaviour = Callable[[Json, Writer], Awaitable[None]]

#: How long a test waits for what must come, on a machine that is busy.
PATIENCE_S = 120
MAX_MODEL_LEN = 131_072
#: Ids of a prompt with which vLLM primes its detokenizer.
PRIMING_TOKENS = 6
#: What the OpenAI SDK sends with a call that it makes again.
RETRY = {"x-stainless-retry-count": "1"}


class Gate:
    """A place where the server waits: `reached` says that it does, `open` lets it go on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open = asyncio.Event()
        self._reached = threading.Event()

    async def passed(self) -> None:
        self._reached.set()
        await self._open.wait()

    def reached(self) -> None:
        assert self._reached.wait(PATIENCE_S), "nobody came to the gate"

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)


@dataclass(frozen=True)
class Say:
    """One answer. `text` of several choices is a tuple; `ids` stand in place of a text's own; `ended`: with the id that
    ends a turn. The rest is what a server may get wrong (`log_probs`, the `shown` text, the `prompt` that it says it
    consumed), and where it waits: `at` a gate before its first token, or `after` so many tokens."""

    text: str | tuple[str, ...] = "ok"
    ids: Sequence[int] | None = None
    ended: bool = True
    finish: str | None = None
    stop_reason: str | None = None
    log_probs: Sequence[float | None] | None = None
    shown: str | None = None
    prompt: Sequence[int] | None = None
    told_ids: bool = True
    at: Gate | None = None
    after: tuple[int, Gate] | None = None
    then: Behaviour | None = None  # what it does there in place of going on


class Rollout:
    """One scripted server. `script` is said in order; when it is empty, `reply` decides."""

    def __init__(self, vocabulary: Vocabulary, end: str, *, port: int = 0) -> None:
        self.vocabulary = vocabulary
        self.end = vocabulary.id_of(end)
        assert self.end is not None, f"the vocabulary has no {end}"
        self.address = ""
        self.script: deque[Say | str | Behaviour] = deque()
        self.reply: Callable[[Json], Say | str | Behaviour] = lambda asked: "ok"
        self.orders: list[Json] = []
        self.controls: list[str] = []
        self.hung_up = 0
        self.log_prob_mode = "processed"
        self.max_model_len = MAX_MODEL_LEN
        self.adapters: tuple[str, ...] = ()
        #: What `/weight_info` says; without it there is no such route.
        self.weight_version: str | None = None
        self.refuses_probe = False
        self._port = port
        self._connections: set[Writer] = set()
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    # -- its life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Rollout:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def die(self) -> None:
        """Nothing listens any more, and every connection breaks."""
        self._run(self._stop())

    def revive(self) -> None:
        """Listens again, where it did before."""
        self._run(self._start())

    def forget(self) -> None:
        """As if it were new: for a server that many tests share."""
        self.script.clear()
        self.orders.clear()
        self.reply = lambda asked: "ok"
        self.hung_up = 0

    def gate(self) -> Gate:
        return Gate(self._loop)

    def until(self, holds: Callable[[], bool]) -> None:
        """Returns once something holds of what it was asked, or of who hung up."""
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE_S), "it never came to that"

    def _run(self, work: Awaitable[None]) -> None:
        async def done() -> None:
            await work

        asyncio.run_coroutine_threadsafe(done(), self._loop).result(PATIENCE_S)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=2**26)
        self._port = self._server.sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{self._port}"

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._connections):
            writer.transport.abort()
        while self._connections:
            await asyncio.sleep(0)

    # -- what it answers -----------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self._connections.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                _, path, _ = head[0].split(" ")
                lengths = [line.split(":")[1] for line in head if line.lower().startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0]) if lengths else 0)
                answering = asyncio.ensure_future(self._answer(path, json.loads(body or b"null"), writer))
                gone = asyncio.ensure_future(reader.read(1))
                gone.add_done_callback(lambda read: read.cancelled() or read.exception())  # a reset is no news here
                await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    answering.cancel()
                    await asyncio.wait([answering])
                    if self._server is not None:
                        with self._changed:
                            self.hung_up += 1
                            self._changed.notify_all()
                    return
                answering.result()
                gone.cancel()
                await asyncio.wait([gone])
                if writer.is_closing() or (not gone.cancelled()):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, path: str, asked: Any, writer: Writer) -> None:
        match path.partition("?")[0]:
            case "/health":
                await respond(writer, 200, {})
            case "/pause" | "/resume":
                self.controls.append(path)
                await respond(writer, 200, {})
            case "/v1/models":
                card = {"id": "scripted", "object": "model", "max_model_len": self.max_model_len}
                adapters = [{"id": name, "object": "model", "parent": "scripted"} for name in self.adapters]
                await respond(writer, 200, {"object": "list", "data": [card, *adapters]})
            case "/weight_info" if self.weight_version is not None:
                await respond(writer, 200, {"weight_version": self.weight_version})
            case "/tokenize":
                await respond(writer, 200, {"tokens": self.vocabulary.encode(asked["prompt"])})
            case "/v1/completions" if asked.get("return_tokens_as_token_ids"):
                await self._probe(asked, writer)
            case "/v1/completions":
                found = self.script.popleft() if self.script else self.reply(asked)
                with self._changed:
                    self.orders.append(asked)
                    self._changed.notify_all()
                if isinstance(found, str):
                    found = Say(found)
                if isinstance(found, Say):
                    await self._say(found, asked, writer)
                else:
                    await found(asked, writer)
            case _:
                await respond(writer, 404, {"error": {"message": "no such route", "param": None, "code": 404}})

    async def _probe(self, asked: Json, writer: Writer) -> None:
        if self.refuses_probe:
            await respond(writer, 400, {"error": {"message": "out of vocabulary", "param": "prompt", "code": 400}})
            return
        heat = asked["temperature"] if self.log_prob_mode == "processed" else 1.0
        top = {"token_id:5": -0.5 / heat, "token_id:6": -2.5 / heat}
        choice = self._choice(asked, 0, [5], "x", [-0.5], "length")
        choice["logprobs"]["top_logprobs"] = [top]
        await respond(writer, 200, {"choices": [choice]})

    async def _say(self, say: Say, asked: Json, writer: Writer) -> None:
        if say.at is not None:
            await say.at.passed()
        n = asked.get("n", 1)
        texts = say.text if isinstance(say.text, tuple) else (say.text,) * n
        answers = [self._sampled(replace(say, text=text), asked) for text in texts]
        if not asked.get("stream"):
            if say.then is not None:
                await say.then(asked, writer)
                return
            choices = [self._choice(asked, i, *answer, say=say) for i, answer in enumerate(answers)]
            await respond(writer, 200, {"id": "cmpl-1", "object": "text_completion", "choices": choices})
            return
        await begin_stream(writer)
        shown = [self._certain_after_each(ids, asked["prompt"]) for ids, _, _, _ in answers]
        for at in range(max(len(ids) for ids, _, _, _ in answers)):
            if say.after is not None and at == say.after[0]:
                await say.after[1].passed()
                if say.then is not None:
                    await say.then(asked, writer)
                    return
            for index, answer in enumerate(answers):
                if at < len(answer[0]):
                    await send(writer, event({"choices": [self._piece(asked, index, at, answer, shown[index], say)]}))
        await send(writer, event({"choices": [], "usage": {}}) + b"data: [DONE]\n\n")
        await end_stream(writer)

    def _sampled(self, say: Say, asked: Json) -> tuple[list[int], str, list[float | None], str]:
        """Ids, text, log-probs and how it ended."""
        assert isinstance(say.text, str)
        ids = list(say.ids) if say.ids is not None else self.vocabulary.encode(say.text)
        ids += [self.end] if say.ended and self.end is not None else []
        finish = say.finish or ("stop" if say.ended or say.stop_reason is not None else "length")
        most = asked.get("max_tokens", 16)
        if len(ids) > most:
            ids, finish = ids[:most], "length"
        said = ids[:-1] if ids and ids[-1] == self.end else ids
        text = say.shown if say.shown is not None else self._certain(said, asked["prompt"])
        values = list(say.log_probs) if say.log_probs is not None else log_probs_of(ids)
        return ids, text, values, finish

    def _piece(
        self,
        asked: Json,
        index: int,
        at: int,
        answer: tuple[list[int], str, Any, str],
        shown: Sequence[str],
        say: Say,
    ) -> Json:
        ids, text, values, finish = answer
        last = at + 1 == len(ids)
        # What a stop string cuts off is held back, as servers do.
        before = "" if at == 0 else shown[at - 1][: len(text)]
        now = text if last else shown[at][: len(text)]
        share = list(values[at:]) if last else list(values[at : at + 1])
        choice = self._choice(asked, index, [ids[at]], now[len(before) :], share, finish if last else None, say=say)
        if at:
            choice["prompt_token_ids"] = None
        return choice

    def _certain_after_each(self, ids: list[int], prompt: Any) -> list[str]:
        """The text of every beginning of the ids, up to a character that is not whole yet."""
        if not self.vocabulary.bytewise:
            return [self._certain(ids[: at + 1], prompt) for at in range(len(ids))]
        texts, whole, begin = [], "", 0
        for at in range(len(ids)):
            piece = self.vocabulary.decode(ids[begin : at + 1])
            texts.append(whole + piece.rstrip("\ufffd"))
            if not piece.endswith("\ufffd"):
                whole, begin = whole + piece, at + 1
        return texts

    def _certain(self, ids: list[int], prompt: Any) -> str:
        """The text of ids as what follows a prompt, up to a character that is not whole yet."""
        if self.vocabulary.bytewise or not isinstance(prompt, list):
            return self.vocabulary.decode(ids).rstrip("\ufffd")
        tail = prompt[-PRIMING_TOKENS:]
        before = self.vocabulary.decode(tail)
        return self.vocabulary.decode([*tail, *ids])[len(before) :].rstrip("\ufffd")

    def _choice(
        self,
        asked: Json,
        index: int,
        ids: list[int],
        text: str,
        values: Sequence[float | None],
        finish: str | None,
        say: Say = Say(),  # noqa: B008
    ) -> Json:
        tokens = [self.vocabulary.decode([token]) for token in ids]
        tops = [{token: -0.5, f"{token}'": -1.5} for token in tokens]
        return {
            "index": index,
            "text": text,
            "logprobs": {"token_logprobs": list(values), "tokens": tokens, "top_logprobs": tops, "text_offset": []},
            "finish_reason": finish,
            "stop_reason": say.stop_reason,
            "token_ids": ids if say.told_ids else None,
            "prompt_token_ids": list(say.prompt) if say.prompt is not None else asked["prompt"],
        }


def log_probs_of(ids: Sequence[int]) -> list[float | None]:
    """The log-probs that it gives: one a token, none like the next, all exact in float32."""
    return [-(at % 8 + 1) / 16 for at in range(len(ids))]


def answers(status: int, answer: Any) -> Behaviour:
    async def behave(asked: Json, writer: Writer) -> None:
        await respond(writer, status, answer)

    return behave


# -- in front of it ----------------------------------------------------------------------------------------------------


@contextmanager
def scripted(folder: Path, end: str = "<|im_end|>") -> Iterator[Rollout]:
    """A scripted server with the tokenizer of a folder."""
    with Rollout(load_vocabulary(folder), end) as rollout:
        yield rollout


@contextmanager
def in_front(rollout: Rollout, folder: Path, pool: DataPool | None = None, **settings: Any) -> Iterator[Running]:
    """A gateway in front of a scripted server, on a pool of its own unless there is one."""
    with (
        DataPool() if pool is None else _as_it_is(pool) as used,
        running_gateway(used, rollout.address, folder, **settings) as gateway,
    ):
        yield gateway


@contextmanager
def _as_it_is(pool: DataPool) -> Iterator[DataPool]:
    yield pool


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def uid_of(base: str) -> str:
    """The trajectory of a base_url."""
    return base.split("/")[3]


def chat(gateway: Running, base: str, messages: list[Json] | str, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", None)
    given = [user(messages)] if isinstance(messages, str) else messages
    return gateway.post(f"{base}/v1/chat/completions", {"model": "m", "messages": given, **fields}, headers=headers)


def events_of(text: str) -> list[Json]:
    """The chunks of a stream that ended as it should."""
    datas = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert datas[-1] == "[DONE]", text
    return [json.loads(data) for data in datas[:-1]]


def content_of(text: str) -> str:
    """What a stream of a chat said."""
    chunks = [chunk for chunk in events_of(text) if chunk.get("choices")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def error_of(answer: httpx.Response, status: int) -> Json:
    """OpenAI's error object of a call that was refused."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert isinstance(body["error"]["type"], str)
    found: Json = body["error"]
    return found
