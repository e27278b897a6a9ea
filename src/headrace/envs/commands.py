"""What an environment's commands call: the part of `BaseEnv` that a command line drives."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from headrace.envs.config import BaseEnvConfig

if TYPE_CHECKING:
    from headrace.envs.base import BaseEnv
    from headrace.envs.cli import Command


class CommandLine:
    """`cli` is what a file ends with: `if __name__ == "__main__": MyEnv.cli()`."""

    config: BaseEnvConfig
    #: Set by `process`, for environments that do something else then.
    process_mode = False
    n_groups_to_process: int | None = None
    group_size_to_process: int | None = None

    @classmethod
    def cli(cls) -> None:
        """Runs the command line of this process and exits."""
        from headrace.envs.cli import main

        main(cast("type[BaseEnv]", cls))

    @classmethod
    def get_cli_serve_config_cls(cls) -> type[Command]:
        """The `serve` command; an override hands out a subclass of it."""
        from headrace.envs.cli import Serve

        return Serve.of(cast("type[BaseEnv]", cls))

    @classmethod
    def get_cli_process_config_cls(cls) -> type[Command]:
        """The `process` command."""
        from headrace.envs.cli import Process

        return Process.of(cast("type[BaseEnv]", cls))

    @classmethod
    def get_cli_evaluate_config_cls(cls) -> type[Command]:
        """The `evaluate` command."""
        from headrace.envs.cli import Evaluate

        return Evaluate.of(cast("type[BaseEnv]", cls))

    async def process_manager(self) -> None:
        """Makes groups without a trainer, into `data_path_to_save_groups`, and a page of them."""
        from headrace.envs.process import process

        groups = self.config.total_steps if self.n_groups_to_process is None else self.n_groups_to_process
        await process(cast("BaseEnv", self), groups)

    async def _run_evaluate(self) -> None:
        """Evaluates once, from `setup` to the files."""
        from headrace.envs.evaluate import evaluate

        await evaluate(cast("BaseEnv", self))
