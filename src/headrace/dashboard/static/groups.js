// Groups: what the rollouts of one prompt earned, side by side.

import { get } from "./api.js";
import { el, hostile, number, table } from "./dom.js";
import { link } from "./trajectories.js";

const ROWS = 20, MOST = 64;

const share = (value, low, high) => (value === null || value === undefined || high === low ? 0 : (value - low) / (high - low));
const signed = (value) => (value === null || value === undefined ? "–" : `${value > 0 ? "+" : ""}${number(value)}`);

function bar(value, low, high) {
  return el("progress", { max: 1, value: share(value, low, high) });
}

/** The rewards of a group side by side: each with its advantage and, where it is known, the parts that it is made of. */
function rewards(one) {
  const rows = one.trajectories.slice(0, MOST).map((row, at) => ({ ...row, advantage: one.advantages?.[at] ?? null, parts: one.parts?.[at] ?? {} }));
  const range = (values) => [Math.min(0, ...values), Math.max(0, ...values)];
  const [low, high] = range(rows.map((row) => row.reward).filter((value) => value !== null));
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.parts)))];
  const part = (name) => {
    const [least, most] = range(rows.map((row) => row.parts[name]).filter((value) => value !== undefined));
    return { title: name, head: hostile(name), numeric: true, part: true, cell: (row) => el("span", { class: "part" }, bar(row.parts[name], least, most), el("span", {}, number(row.parts[name]))) };
  };
  return table([
    { title: "trajectory", name: true, cell: (row) => link(row) },
    { title: "", optional: true, cell: (row) => bar(row.reward, low, high) },
    { title: "reward", numeric: true, cell: (row) => (row.reward === null ? el("span", { class: "soft" }, "none yet") : el("b", {}, number(row.reward))) },
    { title: "advantage", numeric: true, cell: (row) => el("span", { class: row.advantage > 0 ? "good" : row.advantage < 0 ? "bad" : "" }, signed(row.advantage)) },
    ...names.map(part),
    { title: "state", optional: true, cell: (row) => el("span", { class: "soft" }, row.complete ? hostile(row.state) : "open") },
  ], rows, "No trajectories.");
}

function group(one) {
  const known = one.trajectories.filter((row) => row.reward !== null).length;
  const best = one.mean === null ? "no rewards yet" : `mean ${number(one.mean)}, spread ${number(one.spread)}`;
  const flat = known > 1 && one.spread === 0;
  return el("section", { class: "group" },
    el("h3", {}, hostile(one.prompt_uid), el("span", { class: "soft" }, ` · ${one.state} · ${best}`)),
    one.waits_for ? el("p", { class: "warning" }, `Not ready: ${one.waits_for}.`) : null,
    flat ? el("p", { class: "soft" }, "All earned the same: there is nothing to tell them apart by.") : null,
    rewards(one),
    whole(one),
    one.trajectories.length > MOST ? el("p", { class: "soft" }, `and ${number(one.trajectories.length - MOST)} more`) : null);
}

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 900, LANE = 14;

function shape(tag, given, ...inside) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, String(value));
  made.append(...inside);
  return made;
}

/** The tokens of a group: along it their places, down it its sequences; what is shared is one box. */
function prefixPicture(tree) {
  const longest = Math.max(1, ...tree.nodes.map((node) => node.end)), height = Math.max(1, tree.leaves.length) * LANE;
  const boxes = tree.nodes.map((node) => shape("rect", {
    x: (node.start / longest) * WIDTH, y: node.first * LANE, width: Math.max(1, ((node.end - node.start) / longest) * WIDTH), height: node.count * LANE - 2,
    class: node.count > 1 ? "shared" : "own",
  }, shape("title", {}, `${node.end - node.start} tokens of ${node.count} sequence${node.count === 1 ? "" : "s"}, from ${node.start} on`)));
  return shape("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "prefix", role: "img", "aria-label": "tokens that the sequences share" }, ...boxes);
}

function side(words, uid, reward, message) {
  return el("div", { class: "message" }, el("div", { class: "role" }, `${words} · `, hostile(uid), ` · reward ${number(reward)}`),
    message === null ? el("p", { class: "soft" }, "It has ended.") : el("div", {}, el("div", { class: "role" }, hostile(message.role)),
      el("div", { class: "text", dir: "auto" }, hostile(message.content)), message.calls.map(([name, given]) => el("pre", { class: "call" }, hostile(`${name}(${given})`)))));
}

/** What the trajectories of a group share, and where its best leaves its worst: read when it is asked for. */
function whole(one) {
  const body = el("div");
  const box = el("details", { class: "whole" }, el("summary", {}, "What they share, and where they part"), body);
  box.addEventListener("toggle", async () => {
    if (!box.open || body.childNodes.length) return;
    try {
      const found = await get("group", { channel: one.channel, uid: one.prompt_uid }), tree = found.prefix;
      const saved = tree.tokens ? Math.round(100 * (1 - tree.computed / tree.tokens)) : 0;
      body.append(el("p", {}, `${number(tree.leaves.length)} sequences of ${number(tree.tokens)} tokens; ${number(tree.computed)} are different ones, so ${saved} % need not be computed twice.`),
        tree.nodes.length ? prefixPicture(tree) : "");
      if (found.difference === null) return void body.append(el("p", { class: "soft" }, `Its best and its worst are not compared: ${found.why_none}.`));
      const parts = found.difference;
      body.append(el("p", {}, `The best and the worst part at message ${parts.at + 1}:`),
        el("div", { class: "charts" }, side("best", parts.best, parts.best_reward, parts.best_message), side("worst", parts.worst, parts.worst_reward, parts.worst_message)));
    } catch (error) {
      body.replaceChildren(el("p", { class: "warning" }, hostile(error.message)));
    }
  });
  return box;
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
  view.append(el("h1", {}, "Groups"), form,
    el("p", { class: "soft" }, "A reward counts by how far it is from its group's: the advantage, as GRPO has it, is (reward − mean) / spread. What a reward is made of stands beside it, where whoever gave it said so."),
    count, rows);
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
