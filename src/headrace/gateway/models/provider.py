"""`Provider`: a model that calls are passed on to as they are, and answered as it answers. Nothing is recorded.

It may be a judge, or somebody's API: the agent's trajectory does not hear of it. The gateway's own keys never leave.
"""

from __future__ import annotations

from urllib.parse import unquote

import aiohttp
import msgspec
from starlette.datastructures import Headers
from yarl import URL

from headrace.gateway.errors import Refusal
from headrace.gateway.models.spec import ModelSpec
from headrace.gateway.sending import Sending
from headrace.gateway.settings import Settings
from headrace.gateway.upstream.errors import RolloutServerFailed

#: What concerns one connection only, and what a request says anew.
HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade"),
        "transfer-encoding",
    }
)
NOT_SENT = HOP | {"host", "content-length", "expect"}
KEYS = ("authorization", "x-api-key")
OURS = "x-headrace-"
#: What aiohttp would add of its own.
NOT_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class Provider:
    def __init__(self, name: str, spec: ModelSpec, settings: Settings) -> None:
        self.name = name
        (self._address,) = spec.servers
        self._served = spec.served
        self._passed = spec.passed
        self._key = spec.key()
        self._keyed = settings.keyed
        self._timeout = aiohttp.ClientTimeout(
            total=settings.call_s, sock_connect=settings.connect_s, sock_read=settings.idle_s
        )
        self._session: aiohttp.ClientSession | None = None

    async def forward(self, headers: Headers, rest: str, body: bytes, sending: Sending) -> None:
        """Sends a call on and its answer back, byte by byte; `rest` is its path behind the base URL."""
        try:
            async with self._client().post(
                self._url(rest),
                data=self._named(body),
                headers=self._sent(headers),
                allow_redirects=False,
                skip_auto_headers=NOT_ADDED,
            ) as answer:
                told = [(name.lower(), value) for name, value in answer.headers.items()]
                await sending.relay(answer.status, [each for each in told if each[0] not in HOP])
                async for part in answer.content.iter_any():
                    await sending.pass_on(part)
            await sending.pass_on(b"", more=False)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            said = str(error) or type(error).__name__
            raise RolloutServerFailed(f"the provider of model {self.name!r} failed: {said}", "unreachable") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=self._timeout,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _url(self, rest: str) -> URL:
        """Where a call goes; a refusal where its path is none that is passed on. An address with a path is the SDK's
        whole base URL; to a bare one, `/v1` is added."""
        path, _, query = rest.partition("?")
        path = unquote(path).removeprefix("v1/")
        if path not in self._passed:
            raise Refusal(
                f"model {self.name!r} is passed on to its provider for {', '.join(sorted(self._passed))}, not for "
                f"{path[:200]!r}; `paths` of the model in the --models file says what else",
                404,
                code="path_not_passed",
            )
        base = self._address if URL(self._address).path.strip("/") else f"{self._address}/v1"
        return URL(f"{base}/{path}{f'?{query}' if query else ''}", encoded=True)

    def _named(self, body: bytes) -> bytes:
        """The body as it came, unless the provider knows the model by another name."""
        if self._served is None:
            return body
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return msgspec.json.encode({**fields, "model": self._served})

    def _sent(self, headers: Headers) -> dict[str, str]:
        """The agent's own headers. Its key goes along only where it cannot be one of the gateway's."""
        sent = {name: value for name, value in headers.items() if name not in NOT_SENT and not name.startswith(OURS)}
        if self._key is None and not self._keyed:
            return sent
        used = [name for name in KEYS if sent.pop(name, None) is not None] or ["authorization"]
        if self._key is not None:
            sent |= {name: f"Bearer {self._key}" if name == "authorization" else self._key for name in used}
        return sent
