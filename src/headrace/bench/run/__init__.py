"""`headrace bench run`: what a run adds around its agents, and whether rewards cost the same however many there are.

The rollout server is a stub in a process of its own, which answers every call after a fixed time with the same 128
tokens: chat completions to agents that call it straight, and vLLM's ids and log-probs to the gateway. The agents are
coroutines of this process, the same function on both sides, over the same HTTP client; only the address that they are
given differs.

`quick` takes fewer rounds. The sizes that give the keys their meaning (rollouts, calls, delay, samples) are the same.
"""
