// What api.js asks a server for, out of the file that this page is in.

const answers = JSON.parse(document.getElementById("answers").textContent);

export class NeedsLogin extends Error { name = "NeedsLogin"; }

/** What this file does not hold, it never will. */
export class RequestFailed extends Error { name = "RequestFailed"; passes = false; }

const has = (row, part) => row.uid.includes(part) || row.prompt_uid.includes(part);
const same = (row, asked, name) => !asked[name] || row[name] === asked[name];
const between = (value, from, to) => (!from && !to) || (value !== null && (!from || value >= Number(from)) && (!to || value <= Number(to)));

function trajectories(asked) {
  const rows = answers.trajectories.filter((row) => (!asked.find || has(row, asked.find)) && same(row, asked, "channel") && same(row, asked, "state")
    && same(row, asked, "prompt_uid") && same(row, asked, "uid") && (!asked.tag || row.tags.includes(asked.tag))
    && between(row.reward, asked.min_reward, asked.max_reward) && between(row.version, asked.min_version, asked.max_version));
  const way = asked.descending === "false" ? 1 : -1, by = asked.sort;
  if (by && by !== "number") rows.sort((a, b) => (a[by] === null) - (b[by] === null) || (a[by] - b[by]) * way);
  else if (way === 1) rows.reverse();
  const offset = Number(asked.offset ?? 0);
  return { rows: rows.slice(offset, offset + Number(asked.limit ?? 50)), total: rows.length, indexed: answers.trajectories.length };
}

/** Trajectories of a filter in which a text stands: those that the file holds whole are looked into. */
function search(asked) {
  const wanted = asked.text.toLowerCase(), { offset, ...filter } = asked;
  const rows = trajectories({ ...filter, limit: Infinity }).rows.filter((row) => `${row.channel}\n${row.uid}` in answers.whole);
  const stands = (row) => {
    const found = answers.whole[`${row.channel}\n${row.uid}`], tokens = Object.values(found.tokens).map((one) => (one.text ?? []).join(""));
    return [JSON.stringify(found.detail.metadata), JSON.stringify(Object.values(found.conversations)), ...row.tags, ...tokens].some((one) => one.toLowerCase().includes(wanted));
  };
  return { rows: rows.filter(stands), searched: rows.length, total: answers.trajectories.length, next: null };
}

function groups(asked) {
  const rows = answers.groups.filter((one) => one.prompt_uid.includes(asked.find ?? "")), offset = Number(asked.offset ?? 0);
  return { rows: rows.slice(offset, offset + Number(asked.limit ?? 20)), total: rows.length };
}

function consumption(asked) {
  const all = answers.consumption, offset = Number(asked.offset ?? 0);
  return { ...all, rows: all.rows.slice(offset, offset + Number(asked.limit ?? 50)), total: Math.min(all.total, all.rows.length) };
}

function whole(asked) {
  const found = answers.whole[`${asked.channel}\n${asked.uid}`];
  if (!found) throw new RequestFailed("This file holds some trajectories whole, the newest, the best and the worst; this is none of them.");
  return found;
}

function part(found, what) {
  if (found === undefined) throw new RequestFailed(`This file does not hold ${what}.`);
  return found;
}

const VIEWS = {
  comparison: () => part(undefined, "another run"),
  group: (asked) => part(answers.group_details[`${asked.channel}\n${asked.uid}`], "what this group shares"),
  search,
  trajectories, groups, consumption,
  trajectory: (asked) => whole(asked).detail,
  conversation: (asked) => part(whole(asked).conversations[asked.leaf], "this branch"),
  tokens: (asked) => (asked.offset === undefined ? part(whole(asked).tokens[asked.step], "the tokens of this step") : part(undefined, "the other tokens of this step")),
  why: (asked) => {
    const found = Object.values(answers.whole).filter((one) => one.detail.trajectory.uid === asked.name).flatMap((one) => one.why);
    return found.length ? found : part(undefined, `what became of ${asked.name}`);
  },
};

export async function get(name, asked = {}) {
  return name in VIEWS ? VIEWS[name](asked) : answers[name];
}

/** A file offers no downloads of its own. */
export function exportAddress() { return null; }

export async function post() { throw new RequestFailed("This file cannot be changed."); }

export function listen(heard) {
  heard(answers.overview);
  return () => {};
}
