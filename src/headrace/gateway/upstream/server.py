"""One rollout server: what is known of it, and the probe that verifies it.

The probe finds out whether a server serves this tokenizer's model, which log-probs it gives and what else it can do. A
server that cannot be asked is `RolloutServerFailed`; one that answers wrongly is `Unfit`, with the reason.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import orjson
from yarl import URL

from headrace.data.adapter_name import adapter_version
from headrace.data.errors import InvalidInput, shown
from headrace.data.weight_version import UNVERIFIED
from headrace.gateway.upstream.errors import RolloutServerFailed, read_fault
from headrace.gateway.upstream.http_client import UpstreamClient
from headrace.gateway.upstream.options import UpstreamOptions
from headrace.gateway.upstream.wire import version_number
from headrace.tokens.check import SAMPLE, LogProbMode, log_prob_mode, tokenization_trouble
from headrace.tokens.vocabulary import Vocabulary

#: `new` was never verified, `down` is probed until it is verified again, `paused` too, by somebody else or for weights
#: that nobody verified, `unfit` must not be used, `leaving` takes no new calls.
ServerState = Literal["new", "up", "down", "paused", "unfit", "leaving"]


class UpstreamServer:
    """What is known of one server. Changed by its fleet's probes and by the calls that it takes."""

    def __init__(self, address: str, version: int) -> None:
        self.address = address
        self.version = version
        #: It said itself which version its weights have; one that cannot say so any more was started anew.
        self.numbered = False
        self.state: ServerState = "new"
        self.reason: str | None = "not verified yet"
        #: The loop's time at which a probe first found it paused; None: it was not when it was last probed.
        self.paused_since: float | None = None
        self.model = ""
        #: The LoRA adapter that its version is sampled with; None: the model itself.
        self.adapter: str | None = None
        self.max_model_len: int | None = None
        self.log_prob_mode: LogProbMode = "unknown"
        self.generate = False
        self.in_flight = 0
        self.calls = 0
        self.failures = 0
        self.completions_url = self.url("/v1/completions")
        self.generate_url = self.url("/inference/v1/generate")

    def url(self, path: str) -> URL:
        """The URL of a path on this server."""
        return URL(self.address + path, encoded=True)

    @property
    def sampled_model(self) -> str:
        """The name by which it knows what calls are sampled with."""
        return self.adapter or self.model

    def saw_version(self, version: int) -> None:
        """Takes over a version from an answer; an older one, of a call that began before a sync, changes nothing."""
        if version > self.version:
            self.version = version

    def describe(self) -> dict[str, Any]:
        """What `/servers` tells of it."""
        return {
            "address": self.address,
            "state": self.state,
            "reason": self.reason,
            "version": self.version,
            "wire": "generate" if self.generate else "completions",
            "model": self.model,
            "adapter": self.adapter,
            "max_model_len": self.max_model_len,
            "log_prob_mode": self.log_prob_mode,
            "in_flight": self.in_flight,
            "calls": self.calls,
            "failures": self.failures,
        }


def normal_address(given: str) -> str:
    """The address by which a server is known: scheme, host and port, without a slash or /v1 at its end.

    Raises `InvalidInput` for what is no address."""
    text = given.strip()
    if text and "://" not in text:
        text = f"http://{text}"
    text = text.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(text)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and not parts.fragment
        right = right and (parts.port is None or parts.port > 0)
    except ValueError:
        right = False
    if not right:
        raise InvalidInput(f"{shown(given)} is no server's address; one looks like http://host:8001")
    return text


#: The temperature beside 1.0 at which a probe asks for log-probs, and of how many alternatives it compares them.
PROBE_TEMPERATURE = 0.5
PROBE_TOP_LOGPROBS = 5
#: How many ids of the sample text a probe's prompt has, before the last id of the vocabulary.
PROBE_PROMPT_TOKENS = 7


#: One model in a server's /v1/models.
ModelCard = dict[str, Any]


class Unfit(Exception):
    """Why a server must not be used."""


class Unverified(Exception):
    """A trainer has loaded weights into a server and not verified them: it must not be used until one has."""

    def __init__(self) -> None:
        super().__init__("its weights are loaded and not verified: a publish ends that")


class ProbeResult(msgspec.Struct, frozen=True):
    """What a probe found out about a server that may be used."""

    model: str
    max_model_len: int | None
    log_prob_mode: LogProbMode
    generate: bool
    version: int | None
    adapter: str | None


class ServerProbe:
    """Asks one server all that must be known before it takes requests."""

    def __init__(
        self, client: UpstreamClient, server: UpstreamServer, vocabulary: Vocabulary, options: UpstreamOptions
    ) -> None:
        self._client, self._server, self._vocabulary, self._options = client, server, vocabulary, options

    async def healthy(self) -> None:
        """Returns where `/health` is well; raises `RolloutServerFailed` otherwise."""
        status, data = await self._ask("GET", "/health")
        if status >= 300:
            raise RolloutServerFailed(
                f"/health answers {status}{f': {read_fault(status, data).message}' if data else ''}", "status"
            )

    async def paused(self) -> bool:
        """Whether it says that it is paused, and so would sample nothing, not even for a probe."""
        status, data = await self._ask("GET", "/is_paused")
        found = _json(data) if status == 200 else None
        return isinstance(found, dict) and found.get("is_paused") is True

    async def resume(self) -> None:
        """Ends its pause."""
        await self._ask("POST", "/resume")

    async def verify(self) -> ProbeResult:
        """Asks everything; raises `Unfit` for a server that must not be used, `Unverified` for one that must not be
        yet, `RolloutServerFailed` without answers."""
        model, longest, adapters = await self._model()
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
        version = await self.version()
        adapter = next((name for name, of in adapters.items() if of == version), None)
        return ProbeResult(model, longest, mode, generate, version, adapter)

    async def _model(self) -> tuple[str, int | None, dict[str, int]]:
        """The model's name, its longest context, and a trainer's adapters beside it with their versions."""
        card, named = await model_card(self._client, self._server, self._options)
        adapters = {each["id"]: adapter_version(each["id"]) for each in named}
        # An adapter's card need not say how long its context is: it is its base's.
        longest = next((each["max_model_len"] for each in (card, *named) if _has_length(each)), None)
        return card["id"], longest, {name: version for name, version in adapters.items() if version is not None}

    async def _tokenization(self, model: str) -> None:
        """`Unfit` where the server has `/tokenize` and tokenizes otherwise than this vocabulary."""
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
        prompt = [*self._vocabulary.encode(SAMPLE)[:PROBE_PROMPT_TOKENS], last]
        at = []
        for temperature in (1.0, PROBE_TEMPERATURE):
            asked = {
                "model": model,
                "prompt": prompt,
                "max_tokens": 1,
                "temperature": temperature,
                "top_p": 1.0,
                "top_k": -1,
                "logprobs": PROBE_TOP_LOGPROBS,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            status, data = await self._ask("POST", "/v1/completions", asked)
            if status == 400:
                raise Unfit(
                    f"the server refuses a prompt with {last}, the tokenizer's last id "
                    f"({read_fault(status, data).message}); "
                    "give --tokenizer-path the folder of the model that the server runs"
                )
            if status != 200:
                raise RolloutServerFailed(
                    f"/v1/completions answers {status}: {read_fault(status, data).message}", "status"
                )
            at.append(_candidates(_json(data)))
        return log_prob_mode(at[0], at[1], PROBE_TEMPERATURE)

    async def _generates(self, model: str) -> bool:
        asked = {
            "model": model,
            "token_ids": self._vocabulary.encode(SAMPLE)[:PROBE_PROMPT_TOKENS],
            "sampling_params": {"max_tokens": 1},
        }
        status, data = await self._ask("POST", "/inference/v1/generate", asked)
        found = _json(data) if status == 200 else None
        choices = found.get("choices") if isinstance(found, dict) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        return isinstance(first, dict) and isinstance(first.get("token_ids"), list)

    async def version(self) -> int | None:
        """The number that the server's weights have, where it knows one; raises `Unverified`."""
        status, data = await self._ask("GET", "/weight_info")
        found = _json(data) if status == 200 else None
        told = found.get("weight_version") if isinstance(found, dict) else None
        if told == UNVERIFIED:
            raise Unverified
        return version_number(told) if isinstance(told, str) else None

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        return await self._client.ask(method, self._server.url(path), body, self._options.verify_s)


async def model_card(
    client: UpstreamClient, server: UpstreamServer, options: UpstreamOptions
) -> tuple[ModelCard, list[ModelCard]]:
    """The card of the model that is used in a server's /v1/models, and all cards; `RolloutServerFailed` without it."""
    status, data = await client.ask("GET", server.url("/v1/models"), None, options.verify_s)
    if status != 200:
        raise RolloutServerFailed(f"/v1/models answers {status}: {read_fault(status, data).message}", "denied")
    found = _json(data)
    cards = found.get("data") if isinstance(found, dict) else None
    named = [card for card in cards if _is_card(card)] if isinstance(cards, list) else []
    if not named:
        raise RolloutServerFailed(f"/v1/models names no model: {shown(found)}", "malformed")
    card = next((card for card in named if options.model in (None, card["id"])), None)
    if card is None:
        served = ", ".join(card["id"] for card in named)
        raise RolloutServerFailed(f"it serves no {options.model!r} (yet); it serves {served}", "model")
    return card, named


async def model_root(client: UpstreamClient, server: UpstreamServer, options: UpstreamOptions) -> str | None:
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
