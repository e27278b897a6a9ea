// What a run says of itself: what it was, what it came to, where its files are.

import { get } from "./api.js";
import { el, hostile, number, plain } from "./dom.js";
import { shade } from "./trajectory.js";

const cell = (value) => (typeof value === "number" ? number(value) : hostile(value ?? "–"));

function tableOf(one) {
  const most = one.bars ? Math.max(1e-9, ...one.rows.map((row) => row.at(-1) ?? 0)) : 0;
  const kind = (value) => (typeof value === "number" ? "number" : "");
  return el("div", { class: "scroll" }, el("table", { class: "about" },
    el("thead", {}, el("tr", {}, one.columns.map((title, at) => el("th", { scope: "col", class: kind(one.rows[0]?.[at]) }, hostile(title))), one.bars ? el("th") : null)),
    el("tbody", {}, one.rows.map((row) => el("tr", {}, row.map((value) => el("td", { class: kind(value) }, cell(value))),
      one.bars ? el("td", {}, el("progress", { max: most, value: row.at(-1) ?? 0, "aria-hidden": "true" })) : null)))));
}

function call(one) {
  return el("div", { class: "call-tokens" }, el("div", { class: "tokens" }, one.tokens.map((token) => {
    const about = [`id ${token.id}`, token.log_prob !== null && `log-prob ${token.log_prob.toFixed(4)}`].filter(Boolean).join("\n");
    return el("span", { class: `token ${token.log_prob === null ? "prompt" : `shade${shade(token.log_prob)}`}`, title: plain(about) }, hostile(`${token.text} `));
  })), el("div", { class: "soft" }, hostile(one.note)));
}

function section(one) {
  return el("section", {}, el("h2", {}, hostile(one.title)), one.text.map((words) => el("p", {}, hostile(words))),
    el("div", { class: "charts" }, one.tables.map(tableOf)), one.calls.map(call),
    one.code === null ? null : el("details", {}, el("summary", {}, "show"), el("pre", { class: "call" }, hostile(one.code))));
}

/** The sentence that says what a run came to, for the head of another view; nothing where there is no run. */
export async function outcome() {
  const found = await get("about");
  return found.title ? el("p", { class: "outcome", "data-view": "outcome" }, hostile(found.outcome), " ", el("a", { href: "#/about" }, "More about this run")) : "";
}

export function open(view) {
  const body = el("div", { "data-view": "about" });
  let closed = false;
  view.append(body);
  async function draw() {
    const found = await get("about");
    if (closed) return;
    body.replaceChildren(el("h1", {}, hostile(found.title || "No run")), el("p", { class: "outcome" }, hostile(found.outcome || "The folder of a run says nothing of itself before it has ended.")), ...found.sections.map(section));
  }
  return { ready: draw(), close() { closed = true; } };
}
