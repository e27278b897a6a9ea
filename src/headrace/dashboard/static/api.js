// Requests to the server that this page came from.

export class NeedsLogin extends Error { name = "NeedsLogin"; }

/** What came instead of an answer: its words, and the server's status, 0 where the server was not reached. */
export class RequestFailed extends Error {
  name = "RequestFailed";

  constructor(words, status) {
    super(words);
    this.status = status;
  }

  /** Whether the same request may be answered later: the server is away, or its pool is. */
  get passes() { return this.status === 0 || this.status > 500; }
}

/** The body of an answer as JSON. Raises `NeedsLogin`, or `RequestFailed` for every other answer than what was asked. */
async function ask(address, options) {
  const response = await fetch(address, options).catch((error) => { throw new RequestFailed(error.message, 0); });
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) throw new NeedsLogin(body.detail);
  if (!response.ok) throw new RequestFailed(body.detail ?? `the server answered ${response.status}`, response.status);
  return body;
}

/** A view as JSON; fields of `asked` that are empty are left out. */
export async function get(name, asked = {}) {
  const given = Object.entries(asked).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  return ask(`api/${name}${query && "?"}${query}`);
}

/** Where a file of what a filter shows is downloaded. */
export function exportAddress(asked) {
  const given = Object.entries(asked).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `api/export?${new URLSearchParams(given)}`;
}

export async function post(name, body = {}) {
  const headers = { "content-type": "application/json", "x-headrace-dashboard": "1" };
  return ask(`api/${name}`, { method: "POST", headers, body: JSON.stringify(body) });
}

/** Follows the live figures; `heard(fields)` gets those that changed, `lost(reason)` hears when the server is away. */
export function listen(heard, lost) {
  let source = null, timer = null, checking = null, closed = false;
  const open = () => {
    source = new EventSource("api/live");
    source.onmessage = (event) => heard(JSON.parse(event.data));
    source.onopen = () => { clearTimeout(checking); checking = null; };
    source.onerror = () => {
      checking ??= setTimeout(check, 1500);
      if (source.readyState === EventSource.CLOSED && !closed) timer = setTimeout(open, 2000);
    };
  };
  // A stream ends by itself every few seconds, and the browser opens it again: only one that stays away is looked into.
  const check = () => {
    checking = null;
    get("choices").catch((error) => { if (!closed) lost(error); });
  };
  open();
  return () => { closed = true; clearTimeout(timer); clearTimeout(checking); source.close(); };
}
