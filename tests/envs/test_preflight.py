"""Before an environment begins, its tokenizer and its rollout servers are tried; nothing is made before that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.envs.api import Api
from tests.envs.cli.word_env import WordEnv
from tests.envs.kit import CountingEnv, config, running
from tests.site import Site

from headrace.data.errors import HeadraceError
from headrace.envs import APIServerConfig, BaseEnvConfig
from headrace.envs.cli import main
from headrace.envs.process import Processing, evaluate, process
from headrace.envs.server import NoServerAvailable, NoTokenizer

NOWHERE = "/there/is/no/such/folder"
#: Nobody listens there.
DEAD = APIServerConfig(base_url="http://127.0.0.1:9/v1", model_name="none", api_key="x", probe_s=0.01)


class Server:
    """A rollout server that is unwell until `well` is set, and answers completions once `answering` is."""

    def __init__(self) -> None:
        self.well, self.asked, self.answering = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.looked_for = asyncio.Event()
        self.root = "nowhere"
        self._site: Site | None = None

    async def start(self) -> APIServerConfig:
        self._site = Site(
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.post("/v1/completions", self._complete),
        )
        port = await self._site.start()
        return DEAD.model_copy(update={"base_url": f"http://127.0.0.1:{port}/v1", "server_type": "vllm"})

    async def die(self) -> None:
        if self._site is not None:
            await self._site.end()
            self._site = None

    async def _health(self, request: web.Request) -> web.Response:
        self.looked_for.set()
        return web.Response(status=200 if self.well.is_set() else 503, text="the model is being loaded")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "none", "root": self.root}]})

    async def _complete(self, request: web.Request) -> web.Response:
        self.asked.set()
        await self.answering.wait()
        return web.json_response({"choices": []})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    yield made
    await made.die()


async def test_a_wrong_tokenizer_is_an_error_that_names_it_before_anything_is_registered(api: Api) -> None:
    env = CountingEnv(config(api, tokenizer_name=NOWHERE))
    with pytest.raises(NoTokenizer, match=f"--env.tokenizer_name '{NOWHERE}': there is no such folder"):
        await env.env_manager()
    assert (api.asked, env.next) == ([], 0)


async def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    env = CountingEnv(BaseEnvConfig(tokenizer_name=str(tmp_path), use_wandb=False))
    with pytest.raises(NoTokenizer, match="the folder holds no tokenizer"):
        await process(env, 1)


async def test_a_server_that_never_answers_is_told_once_and_is_an_error_in_the_end(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    env = CountingEnv(config(api, server_wait_s=0.2), servers=[DEAD])
    with pytest.raises(
        NoServerAvailable, match=r"no rollout server answered within 0\.2 s: http://127\.0\.0\.1:9/health"
    ):
        await env.env_manager()
    assert (api.asked, env.next) == ([], 0)
    assert sum("is down" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("work", [lambda env: process(env, 1), evaluate], ids=["process", "evaluate"])
async def test_process_and_evaluate_try_the_server_first_too(work: Any, tmp_path: Path) -> None:
    env = CountingEnv(BaseEnvConfig(use_wandb=False, server_wait_s=0.05), servers=[DEAD])
    with pytest.raises(NoServerAvailable):
        await work(env)
    assert env.next == 0


async def test_a_server_that_is_being_loaded_is_waited_for(api: Api, server: Server) -> None:
    env = CountingEnv(config(api), most=1, servers=[await server.start()])
    async with running(env):
        await server.looked_for.wait()
        assert api.asked == []
        server.well.set()
        await api.until(lambda: len(api.received) == 1)


async def test_one_server_of_several_is_enough(api: Api, server: Server) -> None:
    server.well.set()
    env = CountingEnv(config(api), most=1, servers=[DEAD, await server.start()])
    async with running(env):
        await api.until(lambda: len(api.received) == 1)
    assert [one.server_healthy for one in env.server.servers] == [False, True]


async def test_a_server_without_a_health_check_counts_as_healthy_and_the_others_are_asked(api: Api) -> None:
    unasked = DEAD.model_copy(update={"health_check": False})
    env = CountingEnv(config(api), most=1, servers=[unasked, DEAD])
    async with running(env):
        await api.until(lambda: len(api.received) == 1)
    assert [one.server_healthy for one in env.server.servers] == [True, False]


async def test_where_no_tokenizer_is_named_the_servers_own_is_taken(api: Api, server: Server, folder: Path) -> None:
    server.well.set()
    server.root = str(folder)
    env = CountingEnv(config(api), most=1, servers=[await server.start()])
    async with running(env):
        await api.until(lambda: len(api.received) == 1)
    assert env.config.tokenizer_name == str(folder)
    assert env.tokenizer.name_or_path == str(folder)


async def test_a_stop_while_it_waits_for_a_server_is_heard(api: Api) -> None:
    env = CountingEnv(config(api), servers=[DEAD])
    async with running(env):
        while env.server.servers[0].server_healthy:
            await asyncio.sleep(0)
    assert (api.asked, env.next) == ([], 0)


class Asking(CountingEnv):
    """Its rollouts ask their server."""

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        await self.server.completion(prompt="?", max_tokens=1)
        return await super().collect_trajectory(item)


async def test_a_stop_breaks_items_off_that_wait_for_a_server_which_is_gone(api: Api, server: Server) -> None:
    server.well.set()
    env = Asking(config(api), servers=[await server.start()])
    async with running(env):
        await server.asked.wait()
        await server.die()
    assert (api.received, api.left, len(env.workers)) == ([], [0], 0)


async def test_process_that_is_stopped_before_a_group_says_so(server: Server) -> None:
    server.well.set()
    env = Asking(BaseEnvConfig(use_wandb=False, max_num_workers=2), servers=[await server.start()])
    processing = Processing(env, 4)
    work = asyncio.create_task(processing.run())
    await server.asked.wait()
    await server.die()
    processing.stop.request()
    await work
    assert (processing.done, len(env.workers)) == (0, 0)
    await env.close()


def test_on_the_command_line_it_is_one_line_and_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        main(WordEnv, ["process", "--env.tokenizer_name", NOWHERE], prog="words")
    assert f"words: --env.tokenizer_name '{NOWHERE}': there is no such folder" in capsys.readouterr().err


async def test_process_without_an_item_is_an_error(tmp_path: Path) -> None:
    env = CountingEnv(BaseEnvConfig(use_wandb=False), most=0)
    with pytest.raises(HeadraceError, match="no group was made: there are no items"):
        await process(env, 3)
