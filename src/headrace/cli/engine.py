"""`headrace engine`: see `headrace.engine`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from headrace.cli.common import listening_on
from headrace.commands import CommandModel, command
from headrace.data.visible import log_to_stderr
from headrace.extras import require_for
from headrace.files import local_model_folder

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

#: Weights below which a model is slower with several CPU threads than with one.
ONE_THREAD_WEIGHTS = 20_000_000

#: The name of the model that is built on the spot, with random weights.
TINY = "tiny"


def check_model(model: str) -> None:
    """Raises `MissingExtra` or `InvalidInput` for a model that cannot be served, before anything is loaded."""
    require_for("engine")
    if model != TINY:
        local_model_folder(model)


class EngineCommand(CommandModel):
    """Serve a model with vLLM's wire, for the laptop and the tests, until SIGTERM or Ctrl-C. Says where it listens, and
    when its model is loaded: until then it answers 503. Whoever reaches it can use it and change its weights: keep
    it on loopback.
    """

    model: str = Field(
        "tiny",
        description="a checkpoint's folder or its name on Hugging Face's hub (Llama, Mistral, Qwen2, Qwen3), or tiny: "
        "built on the spot",
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8001, ge=0, le=65535, description="port to listen on; 0: a free one")
    served_model_name: str | None = Field(None, description="the model's name in requests; default: what --model says")
    max_model_len: int | None = Field(
        None, ge=2, description="longest prompt and answer together; default: the model's"
    )
    max_num_seqs: int = Field(256, ge=1, description="answers that are computed at once")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="float32 on a CPU, else the checkpoint's"
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto: a GPU where there is one")
    seed: int = Field(0, description="of tiny's weights, and of requests that bring none")
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        "raw_logprobs", description="log-probs of the model at temperature 1, or of what was sampled from"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; default: one for a small model, else all cores")
    prefix_cache_mb: float = Field(256, ge=0, description="memory for beginnings that prompts share; 0: none")
    record: int = Field(0, ge=0, description="keep the last N answers under /debug/calls, for tests")

    def execute(self) -> None:
        from headrace.engine.serve import LoadingApp, run
        from headrace.net.server import LocalOnly, Server, loopback

        log_to_stderr()
        check_model(self.model)
        front = LoadingApp(self.model)
        with listening_on(self.host, self.port):
            server = Server(LocalOnly(front) if loopback(self.host) else front, self.host, self.port)
        run(
            *(server, front, self._load),
            listening=lambda address: print(f"engine listening on {address}", flush=True),
            ready=lambda address: print(f"engine ready on {address}", flush=True),
        )

    def _load(self) -> Engine:
        from headrace.engine import tiny
        from headrace.tokens import import_without_models

        if self.model != TINY or tiny.is_built(self.seed):
            import_without_models()
        import torch

        from headrace.engine.engine import Engine, EngineSettings

        engine = Engine(EngineSettings(**self.model_dump(exclude={"host", "port", "threads"})))
        torch.set_num_threads(self.threads or (1 if engine.size < ONE_THREAD_WEIGHTS else os.cpu_count() or 1))
        return engine


engine_app = command("engine", EngineCommand)
