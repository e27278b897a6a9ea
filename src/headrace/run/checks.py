"""What a look at this machine tells of a run's file before anything is started: each problem with what would be right.

A reward's functions and an environment's file are imported in processes of their own, which end; an agent's file is
imported in this one.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.extras import MissingExtra, install_command, missing
from headrace.files import checked, local_model_folder
from headrace.flows.dataset import Dataset
from headrace.flows.gateway_client import GatewayClient
from headrace.net.blocking_client import BlockingHttpClient
from headrace.net.http_answer import NoAnswer
from headrace.rewards.reward import Reward
from headrace.run.config import RunConfig
from headrace.run.environment import check_environment
from headrace.run.plan import trainer_file
from headrace.run.stack import reserved_ports
from headrace.trainer.config import TrainerConfig

#: An address that nothing listens on: what is checked here calls nobody.
NOWHERE = "http://127.0.0.1:1"
#: Seconds that a rollout server or a cluster which runs already may take to answer.
ANSWER_S = 10.0
#: The files without which a folder is no checkpoint that can be served.
MODEL_PARTS = ("config.json", "tokenizer_config.json")


def check(config: RunConfig, base: Path) -> None:
    """Checks all that can be known before a start. Raises `InvalidInput` with everything that is wrong, each with its
    fix. `base` is the folder of the run's file."""
    wrong = problems(config, base)
    if wrong:
        raise InvalidInput("; ".join(wrong))


def problems(config: RunConfig, base: Path) -> list[str]:
    """What is wrong with a run's file on this machine; nothing: it can start."""
    looks: list[Callable[[], None]] = [
        lambda: _model(config),
        lambda: _servers(config),
        lambda: _data(config, base),
        lambda: _agent(config, base),
        lambda: _reward(config, base),
        lambda: _trainer(config, base),
        lambda: _port(config),
        lambda: _place(config),
    ]
    found = []
    for look in looks:
        try:
            look()
        except (HeadraceError, OSError) as error:
            found.append(str(error))
    return found


def _model(config: RunConfig) -> None:
    folder = local_model_folder(config.model)
    if folder is None:
        return  # a name on the hub: who serves it fetches it
    lacking = [name for name in MODEL_PARTS if not (folder / name).exists()]
    if lacking:
        raise InvalidInput(
            f"model: {folder} has no {' and no '.join(lacking)}; it is no folder that transformers saved"
        )


def _servers(config: RunConfig) -> None:
    if config.servers.command is not None:
        program = shlex.split(config.servers.command)[0]
        if program != "headrace" and shutil.which(program) is None:
            raise InvalidInput(
                f"servers.start: there is no program {program!r} on the path; install it, or name its whole path"
            )
    for address in config.servers.addresses:
        try:
            answer = BlockingHttpClient(address, timeout_s=ANSWER_S).request("GET", "/health")
        except NoAnswer as error:
            raise InvalidInput(f"servers.addresses: {error}; start it, or have it started by servers.start") from None
        if answer.status not in (200, 503):  # 503: it still loads
            raise InvalidInput(f"servers.addresses: {address}/health answered {answer.status}; it is no rollout server")


def _data(config: RunConfig, base: Path) -> None:
    if config.data is None:
        return
    if config.data.train is None:
        raise InvalidInput("data.train is missing: name the rows to learn from, as in data: {train: train.jsonl}")
    for name, rows in (("train", config.data.train_rows(base)), ("val", config.data.val_rows(base))):
        if rows is not None:
            _rows(config, f"data.{name}", rows)


def _rows(config: RunConfig, name: str, rows: Dataset) -> None:
    if config.reward is not None and config.reward.ground_truth is not None:
        try:
            rows.check_column(config.reward.ground_truth)
        except InvalidInput as error:
            raise InvalidInput(f"{name}: {error} (reward.ground_truth names it)") from None
    for column in config.evaluate.by:
        if column not in rows.columns:
            raise InvalidInput(f"evaluate.by: {name} has no column {column!r}; it has {', '.join(rows.columns)}")


def _agent(config: RunConfig, base: Path) -> None:
    if config.agent.env is None:
        asyncio.run(_made(config, base))
        return
    path = base / config.agent.env
    if config.agent.env.endswith(".py") and not path.is_file():
        raise InvalidInput(f"agent.env: there is no file {path}")
    check_environment(config, base)


async def _made(config: RunConfig, base: Path) -> None:
    client = GatewayClient(NOWHERE)
    try:
        flow = config.agent.made(client, base)
        await flow.aclose()
    except InvalidInput as error:
        raise InvalidInput(f"agent.{config.agent.kind}: {error}") from None
    finally:
        await client.aclose()


def _reward(config: RunConfig, base: Path) -> None:
    if config.reward is not None:
        try:
            asyncio.run(_scoring(Reward(config.reward.below(base))))
        except InvalidInput as error:
            raise InvalidInput(f"reward: {error}") from None


async def _scoring(reward: Reward) -> None:
    async with reward:
        await reward.ready()


def _trainer(config: RunConfig, base: Path) -> None:
    found = checked(TrainerConfig, trainer_file(config, base, NOWHERE, NOWHERE), "train")
    if found.algorithm.has_own_functions:  # else torch, which takes seconds, is not for this process
        from headrace.trainer.own_functions import check_functions

        try:
            check_functions(found.algorithm)
        except InvalidInput as error:
            raise InvalidInput(f"train: {error}") from None


def _port(config: RunConfig) -> None:
    if config.gateway.port:
        with reserved_ports(0, config.gateway.port, config.host):
            pass


def _place(config: RunConfig) -> None:
    if config.where == "local":
        return
    if missing(["ray"]):
        raise MissingExtra(f"where: this needs ray: {install_command('ray')}")
    if config.where.ray_address is not None:
        try:
            socket.create_connection(config.where.ray_address, ANSWER_S).close()
        except OSError as error:
            raise InvalidInput(
                f"where.ray: no cluster at {config.where.ray}: {error.strerror or error}; start one there "
                "(ray start --head), or name the address that it told"
            ) from None
