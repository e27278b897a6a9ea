"""An engine behind a real server, and transformers' own forward pass to hold it to."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headrace.engine.engine import Engine, EngineSettings
from headrace.engine.routes import create_app
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import EngineSequence
from headrace.net.server import Server

Json = dict[str, Any]


class Client:
    """One engine's HTTP side."""

    def __init__(self, engine: Engine, address: str) -> None:
        self.engine = engine
        self.host = address.removeprefix("http://")
        self.pool = ThreadPoolExecutor(16)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.host, timeout=240)
        try:
            data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else None
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, found = self.send("GET", path)
        assert status == 200, found
        return found

    def post(self, path: str, body: Any = None) -> Any:
        status, found = self.send("POST", path, body)
        assert status == 200, found
        return found

    def refused(self, path: str, body: Any) -> tuple[int, Json]:
        """The status and the error object of a request that is refused, with vLLM's shape."""
        status, found = self.send("POST", path, body)
        assert status >= 400, found
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "param", "code"}
        assert found["error"]["code"] == status
        return status, found["error"]

    def later(self, path: str, body: Any) -> Future[Any]:
        return self.pool.submit(self.post, path, body)

    def complete(self, prompt: Any, **fields: Any) -> Json:
        """The first choice of a completion with ids and log-probs."""
        given = {"prompt": prompt, "logprobs": 1, "return_token_ids": True, **fields}
        found: Json = self.post("/v1/completions", given)["choices"][0]
        return found

    @contextmanager
    def stream(self, path: str, body: Json) -> Iterator[Iterator[Json]]:
        """The chunks of a stream, as they come; leaving the block hangs up."""
        connection = http.client.HTTPConnection(self.host, timeout=240)
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.getheader("content-type", "").startswith("text/event-stream")

        def chunks() -> Iterator[Json]:
            for line in answer:
                if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                    yield json.loads(line[6:])
                elif line == b"data: [DONE]\n":
                    return
            raise AssertionError("the stream ended without [DONE]")

        try:
            yield chunks()
        finally:
            answer.close()
            connection.close()

    def chunks(self, path: str, body: Json) -> list[Json]:
        with self.stream(path, body) as found:
            return list(found)

    def recorded(self, request_id: str) -> Json:
        """What the engine consumed and sampled for a call, once it has ended: asked for until it is there."""
        for _ in range(10_000):
            for call in self.get("/debug/calls")["calls"]:
                if call["request_id"] == request_id:
                    found: Json = call
                    return found
        raise AssertionError(f"{request_id} never ended")


@contextmanager
def serving(**settings: Any) -> Iterator[Client]:
    engine = Engine(EngineSettings(**{"record": 1000, "device": "cpu", **settings}))
    server = Server(create_app(engine), "127.0.0.1", 0)
    bound = threading.Event()
    thread = threading.Thread(target=server.run, kwargs={"ready": lambda _: bound.set()}, daemon=True)
    thread.start()
    assert bound.wait(120)
    client = Client(engine, server.address)
    try:
        yield client
    finally:
        asyncio.run(engine.worker.ask(lambda scheduler: scheduler.resume()))
        asyncio.run(engine.worker.stop_all(lambda _: True))
        client.pool.shutdown()
        server.stop()
        thread.join(120)
        engine.close()


@contextmanager
def rollout_engine(folder: Path, name: str = "tiny", record: int = 1000) -> Iterator[Client]:
    """An engine as rollouts need it: its log-probs are of what it samples from; it records the last `record` calls."""
    with serving(
        model=str(folder), served_model_name=name, logprobs_mode="processed_logprobs", record=record
    ) as client:
        yield client


def hold_until_resumed(client: Client, *, steps: int = 1, times: int = 1) -> None:
    """From now on the engine takes so many steps for each answer that begins, and no other: none ends by itself before
    a busy machine has paused it. The hold goes as the engine is resumed for the last of so many times; what the others
    resume has had its steps."""

    def hold(scheduler: Scheduler) -> None:
        step, resume, taken = scheduler.step, scheduler.resume, Counter[EngineSequence]()

        def step_for_new() -> list[EngineSequence]:
            here = scheduler.unfinished
            if all(taken[sequence] >= steps for sequence in here):
                time.sleep(0.001)  # who pauses it needs the processor
                return []
            taken.update(here)
            return step()

        def go_on() -> None:
            nonlocal times
            times -= 1
            if not times:
                del scheduler.step, scheduler.resume
            resume()

        scheduler.step, scheduler.resume = step_for_new, go_on  # type: ignore[method-assign]

    asyncio.run(client.engine.worker.ask(hold))


class Reference:
    """A checkpoint as transformers computes it: one full forward pass, no cache, no batch."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.model(torch.tensor([ids])).logits[0].float()
        return found

    def logprobs(self, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
        """Of each token of the output, after the prompt and those before it."""
        table = (self.logits(prompt + output) / temperature).log_softmax(-1)
        return [table[len(prompt) + at - 1, token].item() for at, token in enumerate(output)]


def gap(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected)
    return max((abs(a - b) for a, b in zip(found, expected, strict=True)), default=0.0)
