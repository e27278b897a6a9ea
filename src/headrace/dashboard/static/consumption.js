// Who took what: batches with their leases, and what became of any call, trajectory, prompt or batch.

import { RequestFailed, get } from "./api.js";
import { el, hostile, number, table, when } from "./dom.js";

const ROWS = 50;
const WORDS = { leased: "with a trainer", acked: "acknowledged", consumed: "consumed on hand-out", nack: "given back", expired: "lease ran out" };
const KINDS = { acked: "good", consumed: "good", nack: "wait", expired: "wait" };

/** A link to what became of something. */
export const whyLink = (name, words) => el("a", { href: `#/consumption?${new URLSearchParams({ name })}` }, words);

function line(answer, one) {
  const to = new URLSearchParams({ channel: answer.channel, uid: one.trajectory ?? "" });
  return el("tr", {}, el("td", { class: "when" }, one.at === null ? "" : when(one.at)), el("td", {}, hostile(one.words)),
    el("td", {}, one.trajectory !== null ? el("a", { href: `#/trajectory?${to}` }, "look") : null, " ",
      one.batch !== null ? whyLink(`batch ${one.batch}`, `batch ${one.batch}`) : null, " ",
      one.call !== null && answer.kind !== "call" ? whyLink(one.call, "call") : null));
}

function answerBox(answer) {
  return el("section", { class: "group", "data-view": "why" },
    el("h3", {}, `${answer.kind} `, hostile(answer.name), el("span", { class: "soft" }, " · ", hostile(answer.channel))),
    el("p", { class: "verdict" }, hostile(answer.verdict)),
    el("div", { class: "scroll" }, el("table", {}, el("tbody", {}, answer.lines.map((one) => line(answer, one))))),
    answer.left_out ? el("p", { class: "soft" }, `and ${number(answer.left_out)} more`) : null);
}

function batches(page) {
  return table([
    { title: "batch", cell: (row) => whyLink(`batch ${row.number}`, `batch ${row.number}`) },
    { title: "state", cell: (row) => el("span", { class: KINDS[row.state] ?? "" }, WORDS[row.state] ?? row.state) },
    { title: "handed out", cell: (row) => when(row.at) },
    { title: "ended", optional: true, cell: (row) => (row.ended_at === null ? (row.deadline === null ? "–" : `until ${when(row.deadline)}`) : when(row.ended_at)) },
    { title: "groups", numeric: true, cell: (row) => number(row.groups) },
    { title: "out before", numeric: true, cell: (row) => (row.again ? number(row.again) : "–") },
    { title: "trajectories", numeric: true, optional: true, cell: (row) => number(row.trajectories) },
    { title: "steps", numeric: true, cell: (row) => number(row.steps) },
    { title: "tokens sampled", numeric: true, optional: true, cell: (row) => number(row.tokens) },
    { title: "mean reward", numeric: true, cell: (row) => number(row.reward) },
    { title: "versions", numeric: true, optional: true, cell: (row) => (row.versions === null ? "–" : row.versions[0] === row.versions[1] ? number(row.versions[0]) : `${number(row.versions[0])} to ${number(row.versions[1])}`) },
    { title: "lease", name: true, optional: true, cell: (row) => (row.deadline === null ? "–" : hostile(row.name)) },
  ], page.rows, "No batch was handed out yet.");
}

function events(page) {
  return table([
    { title: "when", cell: (row) => when(row.at) },
    { title: "what", cell: (row) => hostile(row.kind.replaceAll("_", " ")) },
    { title: "channel", cell: (row) => hostile(row.channel) },
    { title: "about", cell: (row) => hostile(JSON.stringify(row.detail).slice(0, 500)) },
  ], page.events.slice(0, 200), "Nothing happened yet.");
}

export function open(view, asked, go) {
  const offset = Number(asked.offset ?? 0), body = el("div", {}, el("p", { class: "soft" }, "The journal is being read.")), answers = el("div", { role: "status" });
  let closed = false;
  const form = el("form", { class: "filters" },
    el("label", {}, "what became of", el("input", { name: "name", type: "search", value: asked.name ?? "", placeholder: "a trajectory, call, prompt or lease", class: "long" })),
    el("button", { type: "submit" }, "Why?"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    go("consumption", Object.fromEntries(new FormData(form)));
  });
  view.append(el("h1", {}, "Consumption"), form, answers, body);
  async function ask() {
    try {
      const found = await get("why", { name: asked.name });
      if (!closed) answers.replaceChildren(...found.map(answerBox));
    } catch (error) {
      if (closed) return;
      if (!(error instanceof RequestFailed) || error.passes) throw error;
      answers.replaceChildren(el("p", { class: "warning" }, hostile(error.message)));
    }
  }
  async function draw() {
    if (asked.name) await ask();
    const page = await get("consumption", { offset, limit: ROWS });
    if (closed) return;
    if (!page.journal) {
      body.replaceChildren(el("h2", {}, "What happened"), el("p", { class: "soft" }, "This pool has no journal that can be read here: batches are not listed, only what the pool noted itself."), events(page));
      return;
    }
    const counts = Object.entries(page.states).map(([state, count]) => `${number(count)} ${WORDS[state] ?? state}`).join(", ");
    const last = Math.min(offset + ROWS, page.total), to = (at) => () => go("consumption", { ...asked, offset: at });
    body.replaceChildren(el("h2", {}, "Batches"),
      el("p", { class: "soft" }, `${number(page.total)} batches${counts ? `: ${counts}` : ""}. ${number(page.redelivered)} redeliveries, ${number(page.late_rewards)} rewards that came too late. The journal as it was at ${when(page.read_at)}.`),
      batches(page),
      el("div", { class: "row" },
        el("button", { type: "button", disabled: offset === 0, onclick: to(Math.max(0, offset - ROWS)) }, "← Newer"),
        el("button", { type: "button", disabled: last >= page.total, onclick: to(offset + ROWS) }, "Older →"),
        el("button", { type: "button", onclick: () => go("consumption", asked) }, "Refresh")));
  }
  return { ready: draw(), close() { closed = true; } };
}
