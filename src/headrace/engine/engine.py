"""The engine: a served model, its tokenizer and worker, and the calls it answers."""

from __future__ import annotations

import json
import random
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.data.errors import InvalidInput
from headrace.engine import tiny
from headrace.engine.device import device_of
from headrace.engine.http import no_such_model
from headrace.engine.model import EngineModel
from headrace.engine.requests import ChatRequest, TokenizeRequest, check_prompt
from headrace.engine.sampler import Sampler
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import EngineSequence, OutputText, SamplingParams
from headrace.engine.tokenizer import EngineTokenizer, render_chat
from headrace.engine.weights import DTYPES
from headrace.engine.worker import EngineCall, Worker
from headrace.files import model_folder
from headrace.version import __version__

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
#: Fields of a checkpoint's generation_config.json that a request without them takes.
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is run; the flags of `headrace engine` of the same names. Raises `InvalidInput` where they cannot
    work."""

    model: str = "tiny"
    served_model_name: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    logprobs_mode: str = "raw_logprobs"
    prefix_cache_mb: float = 256
    #: How many of the last calls are kept for `/debug/calls`; 0 keeps none.
    record: int = 0

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise InvalidInput(f"dtype is {self.dtype!r}; it is auto, {', '.join(DTYPES)}")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise InvalidInput(f"logprobs_mode is {self.logprobs_mode!r}; it is one of {', '.join(LOGPROBS_MODES)}")
        if self.max_num_seqs < 1 or (self.max_model_len is not None and self.max_model_len < 2):
            raise InvalidInput("max_num_seqs is at least 1, and max_model_len at least 2")


class Engine:
    """A model with its tokenizer, and the worker that samples from it. `start` begins a call; `end` must follow."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.folder = tiny.folder(settings.seed) if settings.model == "tiny" else model_folder(settings.model)
        if not (self.folder / "config.json").exists():
            raise InvalidInput(f"model is {settings.model!r}; {self.folder} is no checkpoint: it has no config.json")
        device = torch.device(device_of(settings.device))
        model = EngineModel(self.folder, dtype=_dtype(settings.dtype, self.folder, device), device=device)
        self.name = settings.served_model_name or settings.model
        self.vocabulary, self.size = model.vocabulary, model.size
        self.context = settings.max_model_len or model.context
        if self.context > model.context:
            raise InvalidInput(f"max_model_len is {self.context}; this model's longest context is {model.context}")
        self.tokenizer = EngineTokenizer(self.folder)
        generation = _json(self.folder / "generation_config.json")
        self.defaults = {name: generation[name] for name in GENERATION_DEFAULTS if generation.get(name) is not None}
        self.default_max_tokens: int | None = generation.get("max_new_tokens")
        self.eos = _eos(self.tokenizer.hf_tokenizer, generation, model.config)
        self.fingerprint = f"headrace-{__version__}-{uuid.uuid4().hex[:8]}"
        self.calls: deque[dict[str, Any]] = deque(maxlen=settings.record or 0)
        self.open: set[EngineCall] = set()
        self._seeds = random.Random(settings.seed)
        scheduler = Scheduler(
            model,
            Sampler(processed=settings.logprobs_mode == "processed_logprobs"),
            max_num_seqs=settings.max_num_seqs,
            max_model_len=self.context,
            prefix_bytes=int(settings.prefix_cache_mb * 1e6),
        )
        self.worker = Worker(scheduler, self._record if settings.record else _ignore)

    def served(self, model: str | None) -> None:
        """Raises a 404 where a request names another model."""
        if model and model != self.name:
            raise no_such_model(model, self.name)

    def rendered(self, asked: ChatRequest | TokenizeRequest) -> list[int]:
        """The ids of a request's messages. Raises `EngineRequestError` where the model cannot take them."""
        ids = render_chat(
            self.tokenizer.hf_tokenizer,
            asked.messages or [],
            asked.tools,
            add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
            continue_final_message=asked.continue_final_message,
            **(asked.chat_template_kwargs or {}),
        )
        return check_prompt(ids, self.vocabulary, self.context)

    def start(self, request_id: str, prompts: list[tuple[list[int], SamplingParams]], *, stream: bool) -> EngineCall:
        """Begins a call with `n` answers to each prompt; choices are numbered across prompts."""
        sequences: list[EngineSequence] = []
        for prompt, sampling in prompts:
            seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
            for choice in range(sampling.n):
                sequences.append(
                    EngineSequence(
                        request_id,
                        len(sequences),
                        prompt,
                        sampling,
                        seed=seed + choice,
                        eos=self.eos,
                        text=OutputText(self.tokenizer.inner, prompt, skip_special_tokens=sampling.skip_special_tokens),
                        stream=stream,
                    )
                )
        call = EngineCall(request_id, sequences, stream=stream)
        self.open.add(call)
        self.worker.submit(call)
        return call

    def end(self, call: EngineCall) -> None:
        """Forgets a call, and aborts what of it still runs."""
        self.open.discard(call)
        if not call.finished:
            self.worker.abort(lambda sequence: sequence.call is call)

    def close(self) -> None:
        self.worker.close()

    def _record(self, sequence: EngineSequence) -> None:
        self.calls.append(
            {
                "request_id": sequence.request_id,
                "index": sequence.index,
                "prompt_token_ids": sequence.prompt,
                "token_ids": sequence.output,
                "logprobs": sequence.logprobs,
                "text": sequence.text.value,
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
                "weight_versions": sequence.versions(),
                "temperature": sequence.sampling.temperature,
                "seed": sequence.seed,
            }
        )


def _ignore(sequence: EngineSequence) -> None:
    pass


def _dtype(asked: str, folder: Path, device: torch.device) -> torch.dtype:
    """The dtype to compute in; `auto` is float32 on a CPU, where nothing else is faster, and the checkpoint's
    elsewhere."""
    if asked == "auto":
        config = _json(folder / "config.json")
        asked = str(config.get("dtype") or config.get("torch_dtype") or "") if device.type != "cpu" else ""
    return DTYPES.get(asked, torch.float32)


def _eos(tokenizer: Any, generation: dict[str, Any], config: Any) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's and the checkpoint's."""
    found: set[int] = set()
    for given in (tokenizer.eos_token_id, generation.get("eos_token_id"), config.eos_token_id):
        found.update([given] if isinstance(given, int) else given or [])
    return frozenset(found)


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes())) if path.exists() else {}
