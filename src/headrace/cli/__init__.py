"""The `headrace` command. One noun a file: each holds its commands as models, and what they do.

Exit codes: 0 done, 1 failed, 2 bad usage. An error is one line on stderr; a traceback is a bug.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import CliSubCommand

from headrace import __version__
from headrace.cli.bench import Bench
from headrace.cli.demo import Demo
from headrace.cli.engine import EngineCommand
from headrace.cli.gateway import GatewayCommand, ServeCommand
from headrace.cli.parser import BAD_USAGE, FAILED, OK, Commands, Usage, run
from headrace.cli.pool import Pool
from headrace.cli.train import Train
from headrace.data.errors import HeadraceError, InvalidInput

__all__ = ["main"]

#: Modules that come with an extra.
EXTRAS = {
    "ray": "ray",
    "pyarrow": "export",
    "renderers": "tokens",
    "transformers": "tokens",
    "tokenizers": "tokens",
    "torch": "train",
    "safetensors": "train",
    "yaml": "train",
    "PIL": "train",
}


class Headrace(Commands):
    """Headrace: the bridge between agents that run and the trainer that learns from them."""

    gateway: CliSubCommand[GatewayCommand] = Field(description="forward agents' calls and record them")
    serve: CliSubCommand[ServeCommand] = Field(description="gateway and pool in one process")
    pool: CliSubCommand[Pool] = Field(description="start, read and look after a pool")
    bench: CliSubCommand[Bench] = Field(description="measure, against named limits and peers")
    engine: CliSubCommand[EngineCommand] = Field(description="serve a small model as vLLM would")
    train: CliSubCommand[Train] = Field(description="train a model from a pool")
    demo: CliSubCommand[Demo] = Field(description="watch an agent learn a game from scratch")


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command line and exits with its code."""
    sys.exit(_run(sys.argv[1:] if args is None else args))


def _run(args: Sequence[str]) -> int:
    try:
        run(Headrace, args, prog="headrace", version=f"headrace {__version__}")
        sys.stdout.flush()
        return OK
    except (Usage, InvalidInput) as error:
        return _say(error, BAD_USAGE)
    except HeadraceError as error:
        return _say(error, FAILED)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return _say(f"this needs {error.name}: pip install 'headrace[{EXTRAS[error.name]}]'", FAILED)
    except BrokenPipeError:
        # The reader had enough (`| head`); Python would complain about the same pipe once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _say(f"{error.strerror or error}: {error.filename}" if error.filename else error, FAILED)
    except KeyboardInterrupt:
        return 130


def _say(error: object, code: int) -> int:
    print("headrace:", " ".join(str(error).split()), file=sys.stderr)
    return code
