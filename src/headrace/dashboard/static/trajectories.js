// All trajectories: found, sorted, paged. What is asked for stands in the address, so that it can be kept and shared.

import { exportAddress, get } from "./api.js";
import { curateForm } from "./curate.js";
import { el, hostile, number, table, when } from "./dom.js";

const ROWS = 50;
// A file of steps or sequences has one channel; one of conversations may have several.
const STEP_FILES = { "steps.jsonl": "steps (JSONL)", "steps.parquet": "steps (Parquet)", "sequences.jsonl": "sequences (JSONL)", "sequences.parquet": "sequences (Parquet)" };
const CONVERSATION_FILES = { sft: "conversations (SFT)", preferences: "best against worst (preferences)" };
const COLUMNS = [
  { title: "trajectory", name: true, cell: (row) => link(row) },
  { title: "prompt", name: true, optional: true, cell: (row) => hostile(row.prompt_uid) },
  { title: "channel", optional: true, cell: (row) => hostile(row.channel) },
  { title: "state", cell: (row) => hostile(row.complete ? row.state : `${row.state}, open`) },
  { title: "reward", sort: "reward", numeric: true, cell: (row) => number(row.reward) },
  { title: "steps", sort: "steps", numeric: true, cell: (row) => number(row.steps) },
  { title: "tokens", sort: "tokens", numeric: true, optional: true, cell: (row) => number(row.tokens) },
  { title: "version", sort: "version", numeric: true, optional: true, cell: (row) => number(row.version) },
  { title: "tags", optional: true, cell: (row) => hostile(row.tags.join(", ")) },
  { title: "begun", sort: "created_at", optional: true, cell: (row) => when(row.created_at) },
];

export function link(row) {
  const query = new URLSearchParams({ channel: row.channel, uid: row.uid });
  return el("a", { href: `#/trajectory?${query}` }, hostile(row.uid));
}

function field(words, input) {
  return el("label", {}, words, input);
}

function choice(name, asked, options) {
  const known = asked[name] && !options.includes(asked[name]) ? [asked[name], ...options] : options;
  return el("select", { name }, el("option", { value: "" }, "any"),
    known.map((one) => el("option", { value: one, selected: asked[name] === one }, one)));
}

export function open(view, asked, go) {
  const filters = el("form", { class: "filters" }), count = el("p", { class: "soft", role: "status" }), rows = el("div");
  const offset = Number(asked.offset ?? 0);
  let closed = false;
  view.append(el("h1", {}, "Trajectories"), filters, count, rows);

  const change = (fields) => go("trajectories", { ...asked, offset: "", ...fields });
  filters.addEventListener("submit", (event) => {
    event.preventDefault();
    change(Object.fromEntries(new FormData(filters)));
  });

  function heading(column) {
    if (!column.sort) return column;
    const sorted = asked.sort === column.sort, down = asked.descending !== "false";
    const turn = () => change({ sort: column.sort, descending: sorted && down ? "false" : "true" });
    const head = el("button", { type: "button", onclick: turn }, column.title, sorted ? (down ? " ↓" : " ↑") : "");
    return { ...column, head, sorted: sorted ? (down ? "descending" : "ascending") : undefined };
  }

  /** What a search for a text found: it reads for a while, and says how far it came. */
  function found(page) {
    count.textContent = `${number(page.rows.length)} found in ${number(page.searched)} read, from ${number(offset)} on, of ${number(page.total)}, newest first`;
    rows.replaceChildren(
      table(COLUMNS, page.rows, "The text stands in none of these."),
      el("div", { class: "row" }, el("button", { type: "button", disabled: page.next === null, onclick: () => change({ offset: page.next }) }, "Search on →")));
  }

  /** Links that download all that the filter shows, not only this page. */
  function exports(total, channels) {
    const { offset: _, sort: __, descending: ___, ...filter } = asked;
    const to = (format) => exportAddress({ ...filter, format });
    if (to("sft") === null) return el("p");
    const one = asked.channel || channels.length < 2;
    const offered = Object.entries({ ...(one ? STEP_FILES : {}), ...CONVERSATION_FILES });
    return el("p", { class: "row exports" }, `Download all ${number(total)}:`,
      offered.map(([format, words]) => el("a", { href: to(format), download: "" }, words)),
      one ? null : el("span", { class: "soft" }, "steps and sequences once a channel is chosen"));
  }

  /** What is decided about all that the filter shows. */
  function curate(total) {
    const { offset: _, sort: __, descending: ___, ...filter } = asked;
    return curateForm(`Change all ${number(total)}`, () => ({ filter }), () => {});
  }

  async function draw() {
    const view = asked.text ? "search" : "trajectories";
    const choices = await get("choices");
    if (closed) return;
    const text = (name, more) => el("input", { name, value: asked[name] ?? "", ...more });
    filters.replaceChildren(
      field("uid or prompt", text("find", { type: "search", accesskey: "f" })),
      field("text or metadata", text("text", { placeholder: "what was said, an agent's name" })),
      field("channel", choice("channel", asked, choices.channels)),
      field("state", choice("state", asked, choices.states)),
      field("tag", choice("tag", asked, choices.tags)),
      field("reward from", text("min_reward", { type: "number", step: "any", class: "short" })),
      field("reward to", text("max_reward", { type: "number", step: "any", class: "short" })),
      field("version from", text("min_version", { type: "number", min: 0, class: "short" })),
      field("version to", text("max_version", { type: "number", min: 0, class: "short" })),
      el("button", { type: "submit" }, "Find"),
      el("button", { type: "button", onclick: () => go("trajectories", {}) }, "Clear"));
    const page = await get(view, { ...asked, limit: ROWS });
    if (closed) return;
    if (asked.text) return found(page);
    const last = Math.min(offset + ROWS, page.total);
    count.textContent = page.total ? `${number(offset + 1)} to ${number(last)} of ${number(page.total)}` : "None fits.";
    rows.replaceChildren(
      table(COLUMNS.map(heading), page.rows, page.indexed ? "No trajectory fits." : "Nothing is known yet."),
      el("div", { class: "row" },
        el("button", { type: "button", "data-page": "previous", disabled: offset === 0, onclick: () => change({ offset: Math.max(0, offset - ROWS) }) }, "← Previous"),
        el("button", { type: "button", "data-page": "next", disabled: last >= page.total, onclick: () => change({ offset: offset + ROWS }) }, "Next →"),
        el("button", { type: "button", onclick: draw }, "Refresh")),
      page.total ? exports(page.total, choices.channels) : el("p"),
      choices.editable && page.total ? curate(page.total) : el("p"));
  }
  return { ready: draw(), close() { closed = true; } };
}
