"""What is tried before an environment begins: its tokenizer and its rollout servers.

What is wrong with them is then one error, before anything is registered or rolled out, and not one a rollout.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from headrace.envs.base import BaseEnv

log = logging.getLogger("headrace.envs")

T = TypeVar("T")


async def preflight(env: BaseEnv) -> None:
    """Returns once the tokenizer is loaded and a rollout server answers, where the environment is known to need them.

    Raises `NoTokenizer`, or `NoServer` where none answers within `server_wait_s`. Where no tokenizer is configured,
    that of the model which the server names is taken, if it is a folder on this machine.
    """
    if env.names_tokenizer:
        await in_thread(lambda: env.tokenizer)
    await env.server.ready(env.config.server_wait_s, wait=env.needs_server)
    if not env.names_tokenizer:
        root = await env.server.model_root()
        if root is not None and Path(root).is_dir():
            log.info("the tokenizer is that of the server's model, %s", root)
            env.config.tokenizer_name = root
    if env.names_tokenizer or env.needs_tokenizer:
        await in_thread(lambda: env.tokenizer)


async def in_thread(call: Callable[[], T]) -> T:
    """What a blocking call gives, from a thread that nothing waits for: neither a cancelled caller nor the end of the
    process, as it does for those of `asyncio.to_thread`.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:  # whatever it is, it is the caller's
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="headrace-preflight", daemon=True).start()
    return await future
