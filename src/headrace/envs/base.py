"""`BaseEnv`: what an author of an environment inherits from.

An author writes `setup`, `get_next_item`, `collect_trajectory` (or `collect_trajectories`) and `evaluate`; what they
return and which other methods may be overridden is in `core`. This class adds how an environment is run: for a
trainer (`manager`), without one (`process`), and by its command line (`cli`).
"""

from __future__ import annotations

from headrace.envs.core import EnvCore
from headrace.envs.manager import Manager
from headrace.envs.process import evaluate, process
from headrace.envs.subcommands import EnvSubcommand, EvaluateSubcommand, ProcessSubcommand, ServeSubcommand


class BaseEnv(EnvCore):
    """An environment. A file that defines one ends with `if __name__ == "__main__": MyEnv.cli()`."""

    manager: Manager | None

    async def env_manager(self) -> None:
        """Works for a trainer until its steps are done or a signal comes; ends with everything sent."""
        self.manager = Manager(self)
        await self.manager.run()

    async def process_manager(self) -> None:
        """Makes `total_steps` groups without a trainer, into `data_path_to_save_groups`, and a page of them."""
        groups = self.config.total_steps if self.n_groups_to_process is None else self.n_groups_to_process
        await process(self, groups)

    async def _run_evaluate(self) -> None:
        await evaluate(self)

    @classmethod
    def cli(cls) -> None:
        """Runs the command line of this process and exits with its code."""
        from headrace.envs.cli import main  # with it comes the library of command lines

        main(cls)

    @classmethod
    def get_cli_serve_config_cls(cls) -> type[EnvSubcommand]:
        """The `serve` command; an override returns a subclass of it."""
        return ServeSubcommand.of(cls)

    @classmethod
    def get_cli_process_config_cls(cls) -> type[EnvSubcommand]:
        """The `process` command; an override returns a subclass of it."""
        return ProcessSubcommand.of(cls)

    @classmethod
    def get_cli_evaluate_config_cls(cls) -> type[EnvSubcommand]:
        """The `evaluate` command; an override returns a subclass of it."""
        return EvaluateSubcommand.of(cls)
