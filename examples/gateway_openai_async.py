"""A group of agents at once on the `openai` SDK's async client, streaming: four tries at one prompt.

headrace serve --engine tiny                       # in another terminal; for vLLM see docs/gateway.md
python examples/gateway_openai_async.py [http://127.0.0.1:8100]
"""

import asyncio
import sys
import uuid

import httpx
from openai import AsyncOpenAI

GATEWAY = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
TRIES = 4


async def agent(http: httpx.AsyncClient, prompt_uid: str) -> str:
    asked = {"prompt_uid": prompt_uid, "n_rollouts": TRIES}  # a trainer gets the group once all its tries are there
    base_url = (await http.post("/init_trajectory", json=asked)).json()["base_url"]
    text = ""
    async with AsyncOpenAI(base_url=base_url, api_key="not-needed") as client:
        question = {"role": "user", "content": "Say yes or no."}
        async for chunk in await client.chat.completions.create(
            model="any", messages=[question], max_tokens=16, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
    await http.post(f"{base_url}/complete_trajectory", json={"reward": float("yes" in text)})
    return text


async def main() -> None:
    prompt_uid = f"yes-{uuid.uuid4().hex}"
    async with httpx.AsyncClient(base_url=GATEWAY) as http:
        for text in await asyncio.gather(*(agent(http, prompt_uid) for _ in range(TRIES))):
            print(repr(text))


asyncio.run(main())
