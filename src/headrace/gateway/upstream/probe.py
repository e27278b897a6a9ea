"""Is a rollout server fit: does it serve this tokenizer's model, which log-probs does it give, what else can it do?

A server that cannot be asked is `Failed`; one that answers wrongly is `Unfit`, with the reason.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from headrace.data.errors import shown
from headrace.gateway.upstream.client import Client
from headrace.gateway.upstream.errors import Failed
from headrace.gateway.upstream.options import Options
from headrace.gateway.upstream.server import Server
from headrace.gateway.upstream.versions import version_number
from headrace.gateway.upstream.wire import said
from headrace.tokens.servers import SAMPLE, LogProbMode, log_prob_mode, tokenization_trouble
from headrace.tokens.vocabulary import Vocabulary

#: The second temperature that log-probs are asked at, and how many tokens' are compared.
TEMPERATURE = 0.5
TOPS = 5
#: Ids of the sample text before the last id of the vocabulary.
FEW = 7


#: One model in a server's /v1/models.
Card = dict[str, Any]


class Unfit(Exception):
    """Why a server must not be used."""


class Verdict(msgspec.Struct, frozen=True):
    """What a probe found of a server that may be used."""

    model: str
    max_model_len: int | None
    log_prob_mode: LogProbMode
    generate: bool
    version: int | None


class Probe:
    """Asks one server."""

    def __init__(self, client: Client, server: Server, vocabulary: Vocabulary, options: Options) -> None:
        self._client, self._server, self._vocabulary, self._options = client, server, vocabulary, options

    async def healthy(self) -> None:
        status, data = await self._ask("GET", "/health")
        if status >= 300:
            raise Failed(f"/health answers {status}{f': {said(status, data).message}' if data else ''}", "status")

    async def verify(self) -> Verdict:
        model, longest = await self._model()
        await self._tokenization(model)
        mode = await self._mode(model)
        wanted = self._options.log_prob_mode
        if "unknown" not in (mode, wanted) and wanted not in ("auto", mode):
            raise Unfit(
                f"the server gives {mode} log-probs where {wanted} ones are expected; start it with "
                f"--logprobs-mode {wanted}_logprobs"
            )
        generate = self._options.wire != "completions" and await self._generates(model)
        if self._options.wire == "generate" and not generate:
            raise Unfit(
                "the server has no /inference/v1/generate; start vLLM with --enable-scale-out, or use wire auto"
            )
        return Verdict(model, longest, mode, generate, await self.version())

    async def _model(self) -> tuple[str, int | None]:
        card, named = await model_card(self._client, self._server, self._options)
        # An adapter's card need not say how long its context is: it is its base's.
        longest = next((each["max_model_len"] for each in (card, *named) if _has_length(each)), None)
        return card["id"], longest

    async def _tokenization(self, model: str) -> None:
        """Not every server tokenizes; one that does must do it as we do."""
        asked = {"model": model, "prompt": SAMPLE, "add_special_tokens": False}
        status, data = await self._ask("POST", "/tokenize", asked)
        found = _json(data) if status == 200 else None
        ids = found.get("tokens") if isinstance(found, dict) else None
        if isinstance(ids, list) and all(isinstance(token, int) for token in ids):
            trouble = tokenization_trouble(self._vocabulary, ids)
            if trouble is not None:
                raise Unfit(trouble)

    async def _mode(self, model: str) -> LogProbMode:
        last = self._vocabulary.size - 1
        prompt = [*self._vocabulary.encode(SAMPLE)[:FEW], last]
        at = []
        for temperature in (1.0, TEMPERATURE):
            asked = {
                "model": model,
                "prompt": prompt,
                "max_tokens": 1,
                "temperature": temperature,
                "top_p": 1.0,
                "top_k": -1,
                "logprobs": TOPS,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            status, data = await self._ask("POST", "/v1/completions", asked)
            if status == 400:
                raise Unfit(
                    f"the server refuses a prompt with {last}, the tokenizer's last id ({said(status, data).message}); "
                    "give --tokenizer-path the folder of the model that the server runs"
                )
            if status != 200:
                raise Failed(f"/v1/completions answers {status}: {said(status, data).message}", "status")
            at.append(_candidates(_json(data)))
        return log_prob_mode(at[0], at[1], TEMPERATURE)

    async def _generates(self, model: str) -> bool:
        asked = {
            "model": model,
            "token_ids": self._vocabulary.encode(SAMPLE)[:FEW],
            "sampling_params": {"max_tokens": 1},
        }
        status, data = await self._ask("POST", "/inference/v1/generate", asked)
        found = _json(data) if status == 200 else None
        choices = found.get("choices") if isinstance(found, dict) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        return isinstance(first, dict) and isinstance(first.get("token_ids"), list)

    async def version(self) -> int | None:
        """The number that the server's weights have, where it knows one."""
        status, data = await self._ask("GET", "/weight_info")
        found = _json(data) if status == 200 else None
        told = found.get("weight_version") if isinstance(found, dict) else None
        return version_number(told) if isinstance(told, str) else None

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        return await self._client.ask(method, self._server.url(path), body, self._options.verify_s)


async def model_card(client: Client, server: Server, options: Options) -> tuple[Card, list[Card]]:
    """What a server's /v1/models says of the model that is used, and of all; `Failed` where it is not there."""
    status, data = await client.ask("GET", server.url("/v1/models"), None, options.verify_s)
    if status != 200:
        raise Failed(f"/v1/models answers {status}: {said(status, data).message}", "denied")
    found = _json(data)
    cards = found.get("data") if isinstance(found, dict) else None
    named = [card for card in cards if _is_card(card)] if isinstance(cards, list) else []
    if not named:
        raise Failed(f"/v1/models names no model: {shown(found)}", "malformed")
    card = next((card for card in named if options.model in (None, card["id"])), None)
    if card is None:
        served = ", ".join(card["id"] for card in named)
        raise Failed(f"it serves no {options.model!r} (yet); it serves {served}", "model")
    return card, named


async def model_root(client: Client, server: Server, options: Options) -> str | None:
    """Where a server says that its model lies: the folder or the name that it was started with; an adapter's is its
    base's. None where it does not say."""
    card, named = await model_card(client, server, options)
    base = next((each for each in named if each["id"] == card.get("parent")), card)
    root = base.get("root")
    return root if isinstance(root, str) and root else None


def _is_card(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("id"), str)


def _has_length(card: dict[str, Any]) -> bool:
    return isinstance(card.get("max_model_len"), int)


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        return None


def _candidates(found: Any) -> dict[int, float]:
    """The log-probs of an answer's first token, by id; none where it does not tell them so."""
    try:
        top = found["choices"][0]["logprobs"]["top_logprobs"][0]
        return {int(name.removeprefix("token_id:")): float(value) for name, value in top.items()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return {}
