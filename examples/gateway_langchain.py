"""An agent on LangChain's `ChatOpenAI`, with a tool: base_url is all that changes.

headrace serve --engine tiny                       # in another terminal; for vLLM see docs/gateway.md
python examples/gateway_langchain.py [http://127.0.0.1:8100]
"""

import sys

import httpx
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


gateway = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
begun = httpx.post(f"{gateway}/init_trajectory").json()
model = ChatOpenAI(base_url=begun["base_url"], api_key="not-needed", model="any", temperature=0, max_tokens=64)
model = model.bind_tools([add])

messages = [HumanMessage("What is 2 + 3?")]
for _ in range(8):
    answer = model.invoke(messages)
    messages.append(answer)
    if not answer.tool_calls:
        break
    for call in answer.tool_calls:
        print(f"{call['name']}({call['args']})")
        messages.append(add.invoke(call))
print("answer:", repr(answer.content))
print(httpx.post(f"{begun['base_url']}/complete_trajectory", json={"reward": float("5" in answer.content)}).json())
