"""The commands of an environment: what each makes of the settings, and what it runs."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from headrace.envs.cli.settings import Servers, Settings
from headrace.envs.cli.watch import watched
from headrace.envs.config import BaseEnvConfig

if TYPE_CHECKING:
    from headrace.envs.base import BaseEnv


@cache
def console() -> Console:
    """What a command shows while it runs; results are printed on stdout."""
    return Console(stderr=True)


class Command:
    """One command of one environment. An environment changes what a command does by a subclass of its own, handed out
    by `get_cli_serve_config_cls` and its like.
    """

    summary: ClassVar[str]
    env_cls: ClassVar[type[BaseEnv]]

    def __init__(self, settings: Settings, options: Mapping[str, Any] | None = None) -> None:
        """`options` are the values of the command's own flags, by their names."""
        self.settings = settings
        self.options = options or {}

    @classmethod
    def of(cls, env_cls: type[BaseEnv]) -> type[Command]:
        """This command for an environment."""
        return type(cls.__name__, (cls,), {"env_cls": env_cls, "__doc__": cls.__doc__})

    @classmethod
    def defaults(cls) -> tuple[BaseEnvConfig, Servers]:
        """The settings before flags and file: what the environment's `config_init` says, changed for this command."""
        config, servers = cls.env_cls.config_init()
        return config.model_copy(update=cls.changes(config)), servers

    @classmethod
    def changes(cls, config: BaseEnvConfig) -> dict[str, object]:
        """Fields of the configuration that a command line has other defaults for."""
        return {
            "wandb_name": config.wandb_name or cls.env_cls.name,
            "metrics_path": config.metrics_path or f"data/{cls.called()}.metrics.jsonl",
        }

    @classmethod
    def called(cls) -> str:
        return cls.env_cls.name or cls.env_cls.__name__

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds flags that only this command has; none by default."""

    def environment(self) -> BaseEnv:
        found = self.settings
        return self.env_cls(config=found.env, server_configs=found.servers, slurm=found.slurm, testing=found.testing)

    def run(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define run()")


class Serve(Command):
    """Work for a trainer: register at the Trajectory API, roll items out and send scored groups until its steps are
    done. Ctrl-C ends it with everything sent that is under way; a second one ends it at once.
    """

    summary = "work for a trainer, through the Trajectory API"

    def run(self) -> None:
        env = self.environment()

        async def serve() -> None:
            async with watched(env, "steps", console()):
                await env.env_manager()

        asyncio.run(serve())


class Process(Command):
    """Roll out without a trainer: total_steps groups into a JSON lines file, and a page to read them. Ctrl-C ends it
    with the groups that are under way; a second one ends it at once.
    """

    summary = "write groups to a file and a page, without a trainer"

    @classmethod
    def changes(cls, config: BaseEnvConfig) -> dict[str, object]:
        path = config.data_path_to_save_groups or f"data/{cls.called()}.jsonl"
        return super().changes(config) | {
            "data_path_to_save_groups": path,
            "ensure_scores_are_not_same": False,
            "include_messages": True,
        }

    def run(self) -> None:
        env = self.environment()
        env.process_mode = True
        env.n_groups_to_process, env.group_size_to_process = env.config.total_steps, env.config.group_size

        async def process() -> None:
            async with watched(env, "groups", console()):
                await env.process_manager()

        asyncio.run(process())
        if env.jsonl_writer is not None:
            path = env.jsonl_writer.path
            print(f"{env.counts.groups} groups in {path}, to be read in {path.with_suffix('.html')}")


class Evaluate(Command):
    """Evaluate once, and write metrics.json and samples.jsonl."""

    summary = "evaluate once, into metrics.json and samples.jsonl"

    @classmethod
    def changes(cls, config: BaseEnvConfig) -> dict[str, object]:
        folder = config.data_dir_to_save_evals or f"data/{cls.called()}-evaluation"
        return super().changes(config) | {"data_dir_to_save_evals": folder}

    def run(self) -> None:
        env = self.environment()
        asyncio.run(env._run_evaluate())
        if env.last_evaluation is not None:
            print(f"{env.last_evaluation}; in {env.config.data_dir_to_save_evals}")
