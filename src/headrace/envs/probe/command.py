"""`probe`, as a command of an environment."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import orjson

from headrace.data.json import to_json
from headrace.envs.cli import EnvSubcommand
from headrace.envs.probe.model import ScriptedModel
from headrace.envs.probe.policies import POLICIES
from headrace.envs.probe.script import Script
from headrace.envs.probe.trial import probe
from headrace.envs.testing.tokenizer import byte_tokenizer
from headrace.envs.types import BaseEnvConfig

#: The exit code of a probe that found something wrong with the reward.
FOUND = 3
#: Bytes of a token, about: limits of length hold for tokens, and the probe's own tokenizer has one a byte.
BYTES = 4


class Probe(EnvSubcommand):
    """See what the reward pays for, without a model: policies answer that say nothing, echo the prompt, have only the
    form, pad, instruct a judge, or know the answer where an item carries it. Ends with 0 where nothing is wrong with
    the reward, with 3 where it is hackable, flat, not deterministic or raises, and with 1 where no reward was seen.
    """

    summary = "see what its reward pays for, without a model"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--items", metavar="N", type=int, default=8, help="items to roll out (default: 8)")
        parser.add_argument("--json", metavar="FILE", type=Path, help="write the report to this file as JSON")
        parser.add_argument(
            "--own-tokenizer", action="store_true", help="load the environment's tokenizer, and not one of bytes"
        )

    @classmethod
    def changes(cls, config: BaseEnvConfig) -> dict[str, object]:
        return {
            "group_size": len(POLICIES),
            "use_wandb": False,
            "ensure_scores_are_not_same": False,
            "include_messages": True,
            "data_path_to_save_groups": None,
            "max_token_length": config.max_token_length * BYTES,
        }

    def run(self) -> None:
        own = self.options.get("own_tokenizer")
        shown: dict[str, Any] = {} if own else {"tokenizer": byte_tokenizer()}
        found = self.settings
        # The tokenizer is there before the environment's own __init__ asks for it.
        env_cls = type(self.env_cls.__name__, (self.env_cls,), {"__module__": self.env_cls.__module__, **shown})
        env = env_cls(config=found.env, server_configs=found.servers, slurm=found.slurm, testing=found.testing)
        report = asyncio.run(probe(env, ScriptedModel(Script(), env.tokenizer), self.options["items"]))
        print(report)
        if self.options["json"] is not None:
            self.options["json"].write_bytes(to_json(report.as_dict(), orjson.OPT_INDENT_2) + b"\n")
        if report.findings():
            raise SystemExit(FOUND)
