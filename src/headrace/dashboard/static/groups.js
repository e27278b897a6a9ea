// Groups: what the rollouts of one prompt earned, side by side.

import { get } from "./api.js";
import { el, hostile, number } from "./dom.js";
import { link } from "./trajectories.js";

const ROWS = 20;

function bar(row, low, high) {
  const share = row.reward === null || high === low ? 0 : (row.reward - low) / (high - low);
  return el("div", { class: "bar" }, el("span", {}, link(row)), el("progress", { max: 1, value: share }),
    el("span", {}, row.reward === null ? "no reward" : number(row.reward)), el("span", { class: "soft" }, row.complete ? hostile(row.state) : "open"));
}

function group(one) {
  const rewards = one.trajectories.map((row) => row.reward).filter((value) => value !== null);
  const low = Math.min(0, ...rewards), high = Math.max(low, ...rewards);
  const best = one.mean === null ? "no rewards yet" : `mean ${number(one.mean)}, spread ${number(one.spread)}`;
  const flat = rewards.length > 1 && one.spread === 0;
  return el("section", { class: "group" },
    el("h3", {}, hostile(one.prompt_uid), el("span", { class: "soft" }, ` · ${one.state} · ${best}`)),
    one.waits_for ? el("p", { class: "warning" }, `Not ready: ${one.waits_for}.`) : null,
    flat ? el("p", { class: "soft" }, "All earned the same: there is nothing to tell them apart by.") : null,
    el("div", { class: "bars" }, one.trajectories.slice(0, 64).map((row) => bar(row, low, high))),
    one.trajectories.length > 64 ? el("p", { class: "soft" }, `and ${number(one.trajectories.length - 64)} more`) : null);
}

export function open(view, asked, go) {
  const offset = Number(asked.offset ?? 0), rows = el("div"), count = el("p", { class: "soft", role: "status" });
  let closed = false;
  const form = el("form", { class: "filters" },
    el("label", {}, "prompt", el("input", { name: "find", type: "search", value: asked.find ?? "", accesskey: "f" })),
    el("button", { type: "submit" }, "Find"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    go("groups", Object.fromEntries(new FormData(form)));
  });
  view.append(el("h1", {}, "Groups"), form, count, rows);
  async function draw() {
    const page = await get("groups", { ...asked, limit: ROWS });
    if (closed) return;
    const last = Math.min(offset + ROWS, page.total);
    count.textContent = page.total ? `${number(offset + 1)} to ${number(last)} of ${number(page.total)}, newest first` : "None yet.";
    const to = (at) => () => go("groups", { ...asked, offset: at });
    rows.replaceChildren(...page.rows.map(group), el("div", { class: "row" },
      el("button", { type: "button", disabled: offset === 0, onclick: to(Math.max(0, offset - ROWS)) }, "← Newer"),
      el("button", { type: "button", disabled: last >= page.total, onclick: to(offset + ROWS) }, "Older →")));
  }
  return { ready: draw(), close() { closed = true; } };
}
