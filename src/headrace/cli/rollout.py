"""`headrace rollout`: see `headrace.flows`."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field

from headrace.cli.common import StopHandler, remark
from headrace.commands import CommandModel, Positional, command
from headrace.data.visible import log_to_stderr
from headrace.extras import require_for
from headrace.files import expanded

if TYPE_CHECKING:
    from headrace.flows.flow import AgentFlowBase
    from headrace.flows.gateway_client import GatewayClient
    from headrace.flows.ray import RayFlow
    from headrace.flows.rollout_config import RolloutConfig
    from headrace.flows.rollouter import RolloutSummary

#: Where an agent is checked against that is not to play yet: nothing listens there.
NOWHERE = "http://127.0.0.1:1"
#: Folder of the started gateway's log, where there is no state's file to lie beside.
LOGS = Path("rollout-logs")


class RolloutCommand(CommandModel):
    """Play the rows of a dataset with an agent, through a gateway, until all are in its pool; as a YAML file says.
    SIGTERM or Ctrl-C ends it: what runs has a while to end, and where rollout.state names a file, the next run goes on
    where this one was, also where it was killed. The last line is JSON.
    """

    config: Positional[Path] = Field(description="the YAML file; docs/flows.md has every field")
    state: Path | None = Field(None, description="file that keeps the place in the data, in place of the file's")

    def execute(self) -> None:
        from headrace.flows.rollout_config import RolloutConfig

        log_to_stderr()
        logging.getLogger("httpx").setLevel(logging.WARNING)  # agents' SDKs: a line for every call
        config = RolloutConfig.read(self.config)
        if self.state is not None:
            given = config.rollout.model_copy(update={"state": self.state.absolute()})
            config = config.model_copy(update={"rollout": given})
        summary = asyncio.run(_rolled_out(config, (config.base or self.config.parent).absolute()))
        if summary is not None:
            print(msgspec.json.encode(summary).decode(), flush=True)


async def _rolled_out(config: RolloutConfig, base: Path) -> RolloutSummary | None:
    """Plays all that the configuration asks for. None where it was told to end before it began."""
    from headrace.flows.child_gateway import ChildGateway
    from headrace.flows.rollout_state import RolloutStateFile
    from headrace.flows.rollouter import AsyncRollouter
    from headrace.flows.schedule import RolloutSchedule
    from headrace.flows.schedule_state import TRAIN, VAL

    # Reading data and importing an agent's file awaits nothing, and ends at once too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own = config.rollout
    if config.gateway.start is not None:
        require_for("gateway")
    flags = _gateway_flags(config.gateway.start, base) if config.gateway.start is not None else None
    data: dict[str, Sequence[dict[str, Any]]] = {
        TRAIN: config.data.train_rows(base) or [],
        VAL: config.data.val_rows(base) or [],
    }
    config.agent.made(config.gateway.client(config.gateway.address or NOWHERE), base)  # wrong ones are told of here
    rules = config.rules(len(data[TRAIN]), len(data[VAL]))
    path = base / expanded(own.state) if own.state is not None else None
    stop = StopHandler()
    with ExitStack() as stack:
        file = stack.enter_context(RolloutStateFile(path))
        schedule = RolloutSchedule(rules, file.load(rules.rows, rules.val_rows))
        child = None
        address = config.gateway.address or ""
        if flags is not None:
            child = stack.enter_context(ChildGateway(flags, path.parent if path is not None else base / LOGS))
            remark(f"starting a gateway; its log is {child.log}")
            try:
                address = await asyncio.to_thread(child.listening)
            except asyncio.CancelledError:
                return None
        client = config.gateway.client(address)
        try:
            flow = await _player(config, client, address, base)
        except asyncio.CancelledError:
            return None
        rollouter = AsyncRollouter(
            schedule,
            flow,
            data,
            client,
            file,
            child=child,
            hidden=config.data.hidden,
            prompt=config.data.prompt,
            poll_s=own.poll_s,
            drain_s=own.drain_s,
            say=remark,
        )
        stop.calls(rollouter.stop)
        try:
            return await rollouter.run(lambda: print(f"rollouter ready on {address}", flush=True))
        finally:
            await flow.aclose()
            await client.aclose()


async def _player(config: RolloutConfig, client: GatewayClient, address: str, base: Path) -> AgentFlowBase | RayFlow:
    """Who plays: a flow in this process, or workers on Ray."""
    if config.workers is None:
        return config.agent.made(client, base)
    require_for("rollout on Ray")
    from headrace.flows.ray import RayFlow

    remark(f"starting {config.workers.count} rollout workers on Ray")
    # In a thread: in the main one Ray would have SIGTERM end this process at once.
    return await asyncio.to_thread(RayFlow.begun, config, address, base)


def _gateway_flags(given: dict[str, Any], base: Path) -> dict[str, Any]:
    """The flags of a gateway that differ from their defaults, with paths below the configuration's folder. Raises
    `InvalidInput` for one that is unknown or wrong, before anything is started."""
    from headrace.cli.gateway import GatewayCommand
    from headrace.data.errors import InvalidInput
    from headrace.files import checked, nearest

    named = {name.replace("-", "_"): value for name, value in given.items()}
    known = GatewayCommand.model_fields
    for name in named:
        if name not in known:
            raise InvalidInput(f"gateway.start.{name} is no flag of headrace gateway{nearest(name, known)}")
    command = checked(GatewayCommand, named, "gateway.start")
    command.options()  # the pool's
    found = {}
    for name in named:
        value = getattr(command, name)
        if value != known[name].get_default(call_default_factory=True):
            found[name] = base / expanded(value) if isinstance(value, Path) else value
    return found


rollout_app = command("rollout", RolloutCommand)
