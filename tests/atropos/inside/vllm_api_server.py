"""atroposlib's own vLLM server, unmodified, around a vLLM that is scripted: each answer is the prompt, read backwards.

Runs in atroposlib's own Python: `vllm_api_server.py PORT`. What it imports of torch and vLLM is made here; the sampling
parameters are as strict as vLLM's: a field that they do not have is an error.
"""

import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import atroposlib
import uvicorn


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list | None = None
    max_tokens: int = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    output_kind: object = None


class Engine:
    class tokenizer:
        @staticmethod
        def decode(ids):
            return " ".join(map(str, ids))

    async def generate(self, prompt, sampling, request_id, lora_request=None):
        ids = prompt["prompt_token_ids"]
        answers = []
        for n in range(sampling.n):
            sampled = ids[::-1][: sampling.max_tokens]
            logprobs = [{token: types.SimpleNamespace(logprob=-0.5 - n)} for token in sampled]
            kept = logprobs if sampling.logprobs is not None else None
            answers.append(types.SimpleNamespace(text="x", finish_reason="length", logprobs=kept, token_ids=sampled))
        yield types.SimpleNamespace(prompt=None, prompt_token_ids=ids, outputs=answers)


def made(name, **attributes):
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


class Anything:
    """Stands for what is only named."""


made("torch", cuda=types.SimpleNamespace(is_available=lambda: False))
made("vllm")
for package in ("engine", "entrypoints", "usage", "v1", "v1.engine", "lora"):
    made(f"vllm.{package}")
made("vllm.envs")
made("vllm.engine.arg_utils", AsyncEngineArgs=Anything)
made("vllm.entrypoints.launcher", serve_http=None)
made("vllm.entrypoints.utils", with_cancellation=lambda handler: handler)
made("vllm.logger", init_logger=__import__("logging").getLogger)
made("vllm.sampling_params", SamplingParams=SamplingParams, RequestOutputKind=types.SimpleNamespace(FINAL_ONLY=2))
made("vllm.usage.usage_lib", UsageContext=Anything)
made("vllm.utils", random_uuid=lambda: "1", FlexibleArgumentParser=Anything, set_ulimit=lambda: None)
made("vllm.v1.engine.async_llm", AsyncLLM=Anything)
made("vllm.outputs", RequestOutput=Anything)
made("vllm.version", __version__="0")
made("vllm.lora.request", LoRARequest=Anything)

path = Path(atroposlib.__file__).parents[1] / "example_trainer" / "vllm_api_server.py"
spec = importlib.util.spec_from_file_location("vllm_api_server", path)
server = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = server
spec.loader.exec_module(server)
server.engine = Engine()
uvicorn.run(server.app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
