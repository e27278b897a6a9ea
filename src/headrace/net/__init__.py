"""What every server and client of Headrace stands on: sockets and requests, long-lived tasks, pages and metrics.

There is one HTTP client each way: `async_client.py` on aiohttp, which the core depends on anyway and which has pools of
connections, TLS, compression and streams, and `blocking_client.py` on the standard library's `http.client`, for
trainers and tools, whose environment need not have aiohttp. Both give an `HttpAnswer` or raise `NoAnswer`
(`http_answer.py`); what a status means, and what is tried again, each caller says itself. No client uses a proxy;
certificates are checked against the system's authorities, or those that `SSL_CERT_FILE` and `SSL_CERT_DIR` name.

Clients that are not these, and why:

- `gateway/upstream/http_client.py` carries every call: a general client takes more CPU than the gateway's own work.
- `demo/agents.py` lets hundreds of agents share two cores: it takes a quarter of aiohttp's CPU.
- Loads and peers in `bench/` are bare aiohttp and `http.client`: what is measured is the server, or the peer's stack.
- `compat/` takes aiohttp's objects where atroposlib's functions do.

Nothing here imports the pool, the gateway or an environment.
"""
