"""Tokenizers, each loaded once, in a thread that nobody waits for at the end."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from headrace.tokens import Renderer, load_renderer


class Renderers:
    """Renderers by folder and family; models that share a tokenizer share its renderer."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], asyncio.Future[Renderer]] = {}

    def prepare(self) -> None:
        """Begins to import what any tokenizer needs, before it is known which one; `load` tells what went wrong."""
        threading.Thread(target=_import_libraries, name="headrace-import", daemon=True).start()

    async def load(self, path: str, family: str) -> Renderer:
        found = self._known.get((path, family))
        if found is None:
            found = self._known[path, family] = _begun(path, family)
        return await asyncio.shield(found)


def _import_libraries() -> None:
    with contextlib.suppress(ImportError):
        from transformers import AutoTokenizer  # noqa: F401 - for those who import it next


def _begun(path: str, family: str) -> asyncio.Future[Renderer]:
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Renderer] = loop.create_future()

    def told(outcome: Renderer | BaseException) -> None:
        if loaded.done():
            return
        if isinstance(outcome, BaseException):
            loaded.set_exception(outcome)
        else:
            loaded.set_result(outcome)

    def load() -> None:
        try:
            outcome: Renderer | BaseException = load_renderer(path, family)
        except BaseException as error:
            outcome = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(told, outcome)

    threading.Thread(target=load, name="headrace-tokenizer", daemon=True).start()
    return loaded
