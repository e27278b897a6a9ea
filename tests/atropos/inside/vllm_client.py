"""atroposlib's own client of a vLLM server, unmodified, on the server at `base_url`.

Runs in atroposlib's own Python: `vllm_client.py '{"base_url": …, "tokenizer": …, "input_ids": […]}'`. Prints what it
was given as one line of JSON.
"""

import asyncio
import json
import sys

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer


async def main(base_url, tokenizer, input_ids):
    config = APIServerConfig(base_url=base_url, model_name="tiny", tokenizer_name=tokenizer, api_key="x")
    server = VLLMServer(config)
    sampled = await server.tokens_and_logprobs_completion(input_ids=input_ids, n=2, max_tokens=6)
    logprobs = await server.get_logprobs(input_ids=input_ids, top_k=2)
    managed = ManagedServer(server, tokenizer=server.tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    answer = await managed.chat_completion(messages=messages, max_tokens=5, temperature=1.0)
    messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "on"}]
    await managed.chat_completion(messages=messages, max_tokens=5, temperature=1.0)
    nodes = [node.model_dump() for node in managed.get_state()["nodes"]]
    print(json.dumps({"sampled": sampled, "logprobs": logprobs, "nodes": nodes}))
    sys.stdout.flush()


asyncio.run(main(**json.loads(sys.argv[1])))
