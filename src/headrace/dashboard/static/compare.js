// Two runs side by side: figures, curves, and what the same prompts earned in both.

import { RequestFailed, get } from "./api.js";
import { chart } from "./charts.js";
import { el, hostile, number, table } from "./dom.js";

const ROWS = 50;
const FIGURES = { trajectories: "trajectories", prompts: "prompts", consumed: "consumed", reward: "mean reward", tokens: "mean tokens sampled", turns: "mean turns" };

function answer(words, one) {
  const parts = Object.entries(one.parts ?? {});
  return el("div", { class: "message" }, el("div", { class: "role" }, `${words} · `, hostile(one.uid), ` · reward ${number(one.reward)}`),
    parts.length ? el("p", { class: "soft" }, hostile(parts.map(([name, value]) => `${name} ${number(value)}`).join(", "))) : null,
    one.text === null ? el("p", { class: "soft" }, hostile(one.why_none)) : el("div", { class: "text", dir: "auto" }, hostile(one.text)));
}

export function open(view, asked, go) {
  const offset = Number(asked.offset ?? 0), body = el("div"), answers = el("div", { class: "charts", role: "status" });
  const drawn = [];
  let closed = false, timer = null;
  view.append(el("h1", {}, "Two runs side by side"), body);

  async function show(prompt) {
    try {
      const [here, there] = await get("answers", { prompt_uid: prompt });
      if (!closed) answers.replaceChildren(answer("this run", here), answer("the other", there));
    } catch (error) {
      if (!closed) answers.replaceChildren(el("p", { class: "warning" }, hostile(error.message)));
    }
    answers.scrollIntoView({ block: "nearest" });
  }

  async function draw() {
    let found;
    try {
      found = await get("comparison", { offset, limit: ROWS });
    } catch (error) {
      if (!(error instanceof RequestFailed) || error.passes) throw error;
      return void body.append(el("p", { class: "warning" }, hostile(error.message)));
    }
    if (closed) return;
    if (found.reading) {
      body.replaceChildren(el("p", { class: "soft", role: "status" }, "The runs are still being read…"));
      timer = setTimeout(draw, 1500);
      return;
    }
    body.replaceChildren();
    const curves = Object.entries(found.curves).map(([title, those]) => chart(title, those));
    drawn.push(...curves);
    const parts = [...new Set([...Object.keys(found.here.parts), ...Object.keys(found.beside.parts)])];
    const last = Math.min(offset + ROWS, found.total), to = (at) => () => go("compare", { offset: at });
    body.append(
      table([
        { title: "", cell: ([, words]) => words },
        { title: found.here.title, head: hostile(found.here.title), numeric: true, cell: ([name]) => number(found.here[name]) },
        { title: found.beside.title, head: hostile(found.beside.title), numeric: true, cell: ([name]) => number(found.beside[name]) },
      ], Object.entries(FIGURES), ""),
      ...(parts.length ? [
        el("h2", {}, "What rewards are made of"),
        el("p", { class: "soft" }, `Means over the newest with a reward: ${number(found.here.parts_of)} here, ${number(found.beside.parts_of)} in the other.`),
        table([
          { title: "part", name: true, cell: (name) => hostile(name) },
          { title: "here", numeric: true, cell: (name) => number(found.here.parts[name]) },
          { title: "in the other", numeric: true, cell: (name) => number(found.beside.parts[name]) },
        ], parts, ""),
      ] : []),
      el("h2", {}, "Curves"), curves.length ? el("div", { class: "charts" }, curves.map((one) => one.box)) : el("p", { class: "soft" }, "Neither has a trainer's metrics."),
      el("h2", {}, "The same prompts"),
      el("p", { class: "soft" }, `${number(found.total)} prompts are in both; those whose reward differs most come first.`),
      table([
        { title: "prompt", name: true, cell: (row) => el("button", { type: "button", onclick: () => show(row.prompt_uid) }, hostile(row.prompt_uid)) },
        { title: "reward here", numeric: true, cell: (row) => number(row.here.reward) },
        { title: "in the other", numeric: true, cell: (row) => number(row.beside.reward) },
        { title: "difference", numeric: true, cell: (row) => el("span", { class: row.gain > 0 ? "good" : row.gain < 0 ? "bad" : "" }, number(row.gain)) },
        { title: "rollouts", numeric: true, optional: true, cell: (row) => `${number(row.here.trajectories)} and ${number(row.beside.trajectories)}` },
      ], found.prompts, "No prompt is in both."),
      el("div", { class: "row" },
        el("button", { type: "button", disabled: offset === 0, onclick: to(Math.max(0, offset - ROWS)) }, "← Before"),
        el("button", { type: "button", disabled: last >= found.total, onclick: to(offset + ROWS) }, "After →")),
      answers);
  }
  return { ready: draw(), close() { closed = true; clearTimeout(timer); for (const one of drawn) one.close(); } };
}
