"""An agent on the OpenAI Agents SDK, with a tool: its client's base_url is all that changes.

headrace serve --vllm-addresses http://127.0.0.1:8001    # a vLLM, whose model ends its answers; see docs/gateway.md
python examples/gateway_agents_sdk.py [http://127.0.0.1:8100]
"""

import sys

import httpx
from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


gateway = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
begun = httpx.post(f"{gateway}/init_trajectory").json()
set_default_openai_client(AsyncOpenAI(base_url=begun["base_url"], api_key="not-needed"))
set_tracing_disabled(True)  # or it sends its traces to OpenAI

agent = Agent(name="adder", instructions="Add with the tool.", tools=[add], model="any")
result = Runner.run_sync(agent, "What is 2 + 3?")
print("answer:", repr(result.final_output))
reward = float("5" in result.final_output)
print(httpx.post(f"{begun['base_url']}/complete_trajectory", json={"reward": reward}).json())
