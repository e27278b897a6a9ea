"""What an environment's commands do: `serve`, `process`, `evaluate` and `check`, each with defaults of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, Field
from rich.console import Console

from headrace.envs.core import EnvCore
from headrace.envs.progress import watched
from headrace.envs.settings import ENV, OPENAI, EnvSettings, Servers
from headrace.envs.types import BaseEnvConfig

#: The flag that `--port` is short for.
URL_FLAG = f"--{ENV}.rollout_server_url"


@cache
def console() -> Console:
    """The console of progress and logs, on stderr; results are printed on stdout."""
    return Console(stderr=True)


class CommandOptions(BaseModel):
    """The flags of a command beside those of its configurations. A subclass has those that only one command has."""

    config: Path | None = Field(None, description=f"YAML or JSON with {ENV}:, {OPENAI}: and the rest")
    port: int | None = Field(None, description=f"short for {URL_FLAG} http://localhost:N")


class EnvSubcommand:
    """One command of one environment; its docstring is the command's help. An environment changes a command by a
    subclass, which it returns from `get_cli_serve_config_cls` and its like.
    """

    summary: ClassVar[str]
    env_cls: ClassVar[type[EnvCore]]
    options_cls: ClassVar[type[CommandOptions]] = CommandOptions

    def __init__(self, settings: EnvSettings, options: CommandOptions) -> None:
        self.settings = settings
        self.options = options

    @classmethod
    def of(cls, env_cls: type[EnvCore]) -> type[EnvSubcommand]:
        """This command for an environment."""
        return type(cls.__name__, (cls,), {"env_cls": env_cls, "__doc__": cls.__doc__})

    @classmethod
    def defaults(cls) -> tuple[BaseEnvConfig, Servers]:
        """The configurations before flags and file: those of `config_init`, with the changes of this command."""
        config, servers = cls.env_cls.config_init()
        return config.model_copy(update=cls.changes(config)), servers

    @classmethod
    def changes(cls, config: BaseEnvConfig) -> dict[str, object]:
        """Fields of the configuration that have other defaults on a command line."""
        return {
            "wandb_name": config.wandb_name or cls.env_cls.name,
            "metrics_path": config.metrics_path or f"data/{cls.env_name()}.metrics.jsonl",
        }

    @classmethod
    def env_name(cls) -> str:
        """The environment's name, or that of its class, for the files that the command writes."""
        return cls.env_cls.name or cls.env_cls.__name__

    def environment(self) -> EnvCore:
        """An environment with these settings."""
        found = self.settings
        return self.env_cls(config=found.env, server_configs=found.servers, slurm=found.slurm, testing=found.testing)

    def run(self) -> None:
        """Does what the command is for. Raises `HeadraceError` where it fails."""
        raise NotImplementedError(f"{type(self).__name__} must define run()")


class ServeSubcommand(EnvSubcommand):
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


class ProcessSubcommand(EnvSubcommand):
    """Roll out without a trainer: total_steps groups into a JSON lines file, and a page to read them. Ctrl-C ends it
    with the groups that are under way; a second one ends it at once.
    """

    summary = "write groups to a file and a page, without a trainer"

    @classmethod
    def changes(cls, config: BaseEnvConfig) -> dict[str, object]:
        path = config.data_path_to_save_groups or f"data/{cls.env_name()}.jsonl"
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
        if env.jsonl_writer is not None and env.jsonl_writer.written:
            path = env.jsonl_writer.path
            print(f"{env.counts.groups} groups in {path}, to be read in {path.with_suffix('.html')}")


class EvaluateSubcommand(EnvSubcommand):
    """Evaluate once, and write metrics.json and samples.jsonl."""

    summary = "evaluate once, into metrics.json and samples.jsonl"

    @classmethod
    def changes(cls, config: BaseEnvConfig) -> dict[str, object]:
        folder = config.data_dir_to_save_evals or f"data/{cls.env_name()}-evaluation"
        return super().changes(config) | {"data_dir_to_save_evals": folder}

    def run(self) -> None:
        env = self.environment()
        asyncio.run(env._run_evaluate())
        if env.last_evaluation is not None:
            print(f"{env.last_evaluation}; in {env.config.data_dir_to_save_evals}")


class CheckSubcommand(EnvSubcommand):
    """Import the environment and read its flags and its file, as serve does; start nothing and call nobody."""

    summary = "import it and read its configuration, and start nothing"

    def run(self) -> None:
        found = self.settings
        servers = found.servers if isinstance(found.servers, Sequence) else []
        where = ", ".join(dict.fromkeys(str(server.base_url) for server in servers)) or "a node's own servers"
        print(f"{self.env_name()}: groups of {found.env.group_size}, played by {where}")
