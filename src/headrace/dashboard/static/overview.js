// The first view: where the steps are, how fast they come, who waits for whom, and whether it learns.

import { outcome } from "./about.js";
import { get } from "./api.js";
import { chart } from "./charts.js";
import { el, hostile, number, table } from "./dom.js";

const SLOW_MS = 5000;

function box(title, count, note, kind = "") {
  return el("div", {}, el("small", {}, title), el("b", { class: kind }, number(count)), el("small", {}, note));
}

const arrow = () => el("div", { class: "arrow", "aria-hidden": "true" }, "→");

function flow(now) {
  const ledger = now.ledger, dropped = Object.entries(ledger.dropped ?? {}).filter(([, count]) => count);
  const lost = dropped.reduce((sum, [, count]) => sum + count, 0);
  return el("div", { class: "flow", "data-view": "flow" },
    box("submitted", ledger.submitted ?? 0, `${number(now.rates.submitted)} steps/s`), arrow(),
    box("queued", ledger.queued ?? 0, "in the pool"), arrow(),
    box("leased", ledger.leased ?? 0, "with a trainer"), arrow(),
    box("consumed", ledger.consumed ?? 0, `${number(now.rates.consumed)} steps/s`, "good"),
    box("dropped", lost, dropped.map(([why, count]) => `${why} ${number(count)}`).join(", ") || "none", lost ? "wait" : ""),
    box("quarantined", ledger.quarantined ?? 0, "never trained on", ledger.quarantined ? "bad" : ""));
}

function channels(now) {
  const queue = (row) => (row.capacity
    ? el("span", {}, el("meter", { min: 0, max: row.capacity, value: row.groups.queued, high: row.capacity * 0.9 }), ` ${number(row.groups.queued)} of ${number(row.capacity)}`)
    : number(row.groups.queued));
  return table([
    { title: "channel", name: true, cell: (row) => hostile(row.name) },
    { title: "groups queued", cell: queue },
    { title: "ready", numeric: true, cell: (row) => number(row.groups.ready) },
    { title: "leases", numeric: true, cell: (row) => number(row.leases) },
    { title: "trajectories", numeric: true, cell: (row) => number(row.trajectories) },
    { title: "policy version", numeric: true, cell: (row) => number(row.policy_version) },
    { title: "oldest queued", numeric: true, optional: true, cell: (row) => number(row.oldest_version) },
  ], now.channels, "None yet: the first step begins one.");
}

/** What environments posted to the Trajectory API, and where it is. */
function scoredGroups(found) {
  if (!found) return [];
  const columns = Object.keys(found).map((name) => ({ title: name, numeric: true, cell: (row) => number(row[name]) }));
  return [el("h2", {}, "Scored groups of environments"), table(columns, [found], "")];
}

function servers(now) {
  return table([
    { title: "address", name: true, cell: (row) => hostile(String(row.address)) },
    { title: "state", cell: (row) => hostile(String(row.state)) },
    { title: "model", optional: true, cell: (row) => hostile(String(row.model ?? "–")) },
    { title: "version", numeric: true, cell: (row) => number(row.version) },
    { title: "in flight", numeric: true, cell: (row) => number(row.in_flight) },
    { title: "calls", numeric: true, cell: (row) => number(row.calls) },
    { title: "reason", optional: true, cell: (row) => hostile(String(row.reason ?? "")) },
  ], now.servers, "This dashboard knows of none: a gateway's own shows them.");
}

function survivors(tables) {
  return tables.filter((one) => one.rows.length).map((one) => el("section", { class: "chart" },
    el("h3", {}, `By ${one.measure}`),
    one.warning ? el("p", { class: "warning" }, one.warning) : null,
    table([
      { title: one.measure, cell: (row) => hostile(row.label) },
      { title: "known", numeric: true, cell: (row) => number(row.known) },
      { title: "consumed", numeric: true, cell: (row) => number(row.consumed) },
      { title: "dropped", numeric: true, cell: (row) => number(row.dropped) },
      { title: "trained on", numeric: true, cell: (row) => (row.share === null ? "–" : `${Math.round(100 * row.share)} %`) },
      { title: "", optional: true, cell: (row) => (row.share === null ? "" : el("progress", { max: 1, value: row.share, "aria-hidden": "true" })) },
    ], one.rows, "")));
}

export function open(view) {
  const places = Object.fromEntries(["outcome", "flow", "waits", "charts", "channels", "scored", "servers", "survivors"].map((name) => [name, el("div")]));
  const learning = el("h2", {}, "Is it learning?");
  places.charts.className = places.survivors.className = "charts";
  view.append(el("h1", {}, "Overview"), places.outcome, places.flow, places.waits,
    learning, places.charts,
    el("h2", {}, "Channels"), places.channels, places.scored,
    el("h2", {}, "Rollout servers"), places.servers,
    el("h2", {}, "What was thrown away: submitted against trained"), places.survivors);
  const drawn = new Map();
  let closed = false, timer = null;
  outcome().then((found) => places.outcome.replaceChildren(found), () => {});

  async function slow() {
    try {
      const [curves, tables] = await Promise.all([get("curves"), get("survivors")]);
      if (closed) return;
      for (const [title, those] of Object.entries(curves)) {
        if (drawn.has(title)) { drawn.get(title).update(those); continue; }
        const made = chart(title, those);
        drawn.set(title, made);
        places.charts.append(made.box);
      }
      if (!Object.keys(curves).length) places.charts.replaceChildren(el("p", { class: "soft" }, "No trainer's metrics are known here."));
      else places.charts.querySelector(":scope > p")?.remove();
      const found = survivors(tables);
      places.survivors.replaceChildren(...(found.length ? found : [el("p", { class: "soft" }, "No trajectory is known yet.")]));
    } catch { /* the head of the page says what is wrong */ }
    if (!closed) timer = setTimeout(slow, SLOW_MS);
  }
  let read = null;
  return {
    live(now) {
      if (read !== now.indexing) { read = now.indexing; clearTimeout(timer); slow(); }  // at first, and once all is read
      places.flow.replaceChildren(flow(now), ...(now.balanced ? [] : [el("p", { class: "warning bad" }, "The ledger does not balance: steps were lost.")]));
      places.waits.replaceChildren(...now.waits.map((words) => el("p", { class: "warning" }, hostile(words))));
      places.channels.replaceChildren(channels(now));
      places.scored.replaceChildren(...scoredGroups(now.scored_groups));
      places.servers.replaceChildren(servers(now));
    },
    close() { closed = true; clearTimeout(timer); for (const made of drawn.values()) made.close(); },
  };
}
