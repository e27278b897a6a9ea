"""One LLM call, from its request to the last byte of its answer and its recorded steps.

In the order of a call's way: `call` (the whole of it), `ask` (reading the request), `target` (its trajectory),
`retries` and `replay` (whether it was answered before), then `headrace.gateway.planner`, `sampling` (its parameters),
`turn` (its prompt and answers), `executor` (sampling and recording) and `connection` (writing, and noticing that the
client left).
"""
