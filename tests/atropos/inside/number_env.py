"""A small environment on atroposlib's unmodified BaseEnv, with a scripted model behind an OpenAI-style server.

Runs in atroposlib's own Python: `number_env.py '{"api": …, "tokenizer": …, …}'`, every other key a field of
BaseEnvConfig. Ends when BaseEnv does, disconnects, and prints what it did as one line of JSON.
"""

import asyncio
import json
import sys

import aiohttp
from aiohttp import web
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


class NumberEnv(BaseEnv):
    """Asks for the item's number; every other of the model's answers is right."""

    name = "number"

    async def setup(self):
        self.asked, self.sent, self.saved, self.evaluated = 0, [], [], []

    async def get_next_item(self):
        self.asked += 1
        return self.asked

    async def collect_trajectories(self, item):
        chat = [{"role": "user", "content": f"the number is {item}"}]
        answer = await self.server.chat_completion(messages=chat, n=self.config.group_size, max_tokens=8)
        prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        said = [choice.message.content for choice in answer.choices]
        ends = [[*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id] for text in said]
        self.sent.append(item)
        return {
            "tokens": [prompt + end for end in ends],
            "masks": [[-100] * len(prompt) + end for end in ends],
            "scores": [float(text == str(item)) for text in said],
            "inference_logprobs": [[1.0] * len(prompt) + [-0.1 * (n + 1) for n in range(len(end))] for end in ends],
            "generation_params": {"item": item},
            "group_overrides": {},
        }, []

    async def evaluate(self, *args, **kwargs):
        self.evaluated.append(self.status_dict["current_step"])

    def save_checkpoint(self, step, data=None):
        self.saved.append(step)
        super().save_checkpoint(step, {"asked": self.asked})


async def complete(request):
    body = await request.json()
    number = body["messages"][-1]["content"].split()[-1]
    choices = [
        {"index": n, "finish_reason": "stop", "message": {"role": "assistant", "content": "no" if n % 2 else number}}
        for n in range(body.get("n") or 1)
    ]
    return web.json_response(
        {"id": "x", "object": "chat.completion", "created": 0, "model": "scripted", "choices": choices}
    )


async def main(api, tokenizer, **more):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    model = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    more = {"wandb_name": NumberEnv.name, "use_wandb": False, **more}
    config = BaseEnvConfig(rollout_server_url=api, tokenizer_name=tokenizer, **more)
    env = NumberEnv(config, [APIServerConfig(base_url=model, model_name="scripted", api_key="x")])
    await env.env_manager()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{api}/disconnect-env", json={"env_id": env.env_id}) as response,
    ):
        left = await response.json()
    kept = ("env_id", "wandb_prepend", "curr_step", "sent", "saved", "evaluated")
    print(json.dumps({key: getattr(env, key) for key in kept} | {"left": left}))


asyncio.run(main(**json.loads(sys.argv[1])))
