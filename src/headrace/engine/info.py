"""The routes that say what is served, and what text is in ids."""

from __future__ import annotations

import random
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from headrace.engine import answers
from headrace.engine.engine import Engine
from headrace.engine.failures import Refused
from headrace.engine.requests import DetokenizeRequest, TokenizeRequest, checked
from headrace.engine.routing import body, json
from headrace.version import __version__

#: The version of vLLM whose wire this is, and what really answers.
VERSION = f"0.32.0+headrace.{__version__}"


class Info:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._started = answers.now()

    async def tokenize(self, request: Request) -> Response:
        asked = await body(request, TokenizeRequest)
        self.engine.served(asked.model)
        words = self.engine.words
        if asked.messages is not None:
            ids = self.engine.rendered(asked)
        elif asked.prompt is not None:
            ids = words.encode(asked.prompt, special=asked.add_special_tokens is not False)
        else:
            raise Refused("Either prompt or messages must be given.", param="prompt")
        found = {"count": len(ids), "max_model_len": self.engine.context, "tokens": ids}
        return json({**found, "token_strs": words.pieces(ids) if asked.return_token_strs else None})

    async def detokenize(self, request: Request) -> Response:
        asked = await body(request, DetokenizeRequest)
        self.engine.served(asked.model)
        ids = checked(asked.tokens, self.engine.vocabulary, len(asked.tokens) + 1) if asked.tokens else []
        return json({"prompt": self.engine.words.decode(ids)})

    async def models(self, request: Request) -> Response:
        permission = {
            "id": f"modelperm-{random.getrandbits(64):016x}",
            "object": "model_permission",
            "created": self._started,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": self.engine.name,
            "object": "model",
            "created": self._started,
            "owned_by": "headrace",
            "root": str(self.engine.folder),
            "parent": None,
            "max_model_len": self.engine.context,
            "permission": [permission],
        }
        return json({"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:
        return Response()

    async def version(self, request: Request) -> Response:
        return json({"version": VERSION})

    async def load(self, request: Request) -> Response:
        return json({"server_load": len(self.engine.open)})

    async def memory(self, request: Request) -> Response:
        """What the engine holds, part by part, in bytes."""
        return json(asdict(await self.engine.worker.ask(lambda scheduler: scheduler.memory())))
