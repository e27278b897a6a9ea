// One trajectory: its branches as conversations, its steps, and any step's tokens.

import { RequestFailed, get } from "./api.js";
import { whyLink } from "./consumption.js";
import { curateForm } from "./curate.js";
import { el, fill, hostile, number, plain, table, when } from "./dom.js";

const TOKENS = 500, STEPS = 200;
// Log-probs by how likely a token was: from likely to one in a thousand.
const SHADES = [-0.1, -0.7, -2.3, -6.9];
export const shade = (value) => SHADES.filter((bound) => value < bound).length;

const PAINTS = {
  "log-prob": {
    kind: (t) => (t.log_prob === null ? "prompt" : `shade${shade(t.log_prob)}`),
    legend: [["shade0", "over 90 %"], ["shade1", "over 50 %"], ["shade2", "over 10 %"], ["shade3", "over 0.1 %"], ["shade4", "less"]],
  },
  "loss mask": {
    kind: (t) => (t.trained ? "trained" : t.sampled ? "masked" : "prompt"),
    legend: [["trained", "trained on"], ["masked", "sampled, not trained on"], ["prompt", "context"]],
  },
  version: {
    kind: (t) => (t.version < 0 ? "prompt" : `shade${t.version % 5}`),
    legend: [["shade0", "one colour a policy version"], ["prompt", "context"]],
  },
  advantage: {
    // By half of the largest in view: advantages have no scale of their own.
    kind: (t, most) => (t.advantage === null ? "prompt" : t.advantage === 0 ? "level" : `${t.advantage > 0 ? "up" : "down"}${Math.abs(t.advantage) > most / 2 ? 2 : 1}`),
    legend: [],
    legendOf: (found, most) => (found.advantages === null ? [] : [["up2", `over ${number(most / 2)}`], ["up1", "above 0"], ["level", "0"], ["down1", "below 0"], ["down2", `under ${number(-most / 2)}`], ["prompt", "not trained on"]]),
    words: (found) => (found.advantages === null ? `No advantages: ${found.advantages_from}.` : `Advantages: ${found.advantages_from}.`),
  },
};

/** What made a branch: where it leaves another, and the first message that differs, as removed and added words. */
function difference(found) {
  const pieces = found.pieces.map(([kind, text]) => (kind === "same" ? el("span", {}, hostile(text)) : el(kind === "removed" ? "del" : "ins", {}, hostile(text))));
  return el("section", { class: "difference", "data-view": "difference" }, el("h3", {}, "What made this branch"), el("p", {}, hostile(found.words)),
    pieces.length ? el("div", { class: "diff text", dir: "auto" }, pieces) : null,
    pieces.length ? el("p", { class: "soft" }, el("del", {}, "struck"), ` stands in the branch to step ${found.other}, `, el("ins", {}, "underlined"), " in this one.") : null);
}

// Only files that a browser decodes as pictures: never markup, and nothing that is fetched.
const PICTURE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/;

function picture(one) {
  const words = `image ${one.number} · ${one.about}`;
  if (one.url === null || !PICTURE.test(one.url)) return el("p", { class: "soft" }, hostile(words));
  return el("figure", {}, el("img", { src: one.url, alt: words, decoding: "async" }), el("figcaption", { class: "soft" }, words));
}

function message(one) {
  return el("article", { class: `message ${["assistant", "user", "system", "tool"].includes(one.role) ? one.role : ""}` },
    el("div", { class: "role" }, hostile(one.role)),
    one.reasoning ? el("details", {}, el("summary", { class: "soft" }, "reasoning"), el("div", { class: "text" }, hostile(one.reasoning))) : null,
    one.content ? el("div", { class: "text", dir: "auto" }, hostile(one.content)) : null,
    one.images?.length ? el("div", { class: "pictures" }, one.images.map(picture)) : null,
    one.cut ? el("p", { class: "soft" }, `${number(one.cut)} more characters are not shown.`) : null,
    one.calls.map(([name, given]) => el("pre", { class: "call" }, hostile(`${name}(${given})`))));
}

export function open(view, asked, go) {
  const named = { channel: asked.channel, uid: asked.uid };
  const body = el("div");
  let closed = false;
  view.append(el("h1", {}, hostile(asked.uid ?? "")), body);

  async function draw() {
    let found, choices;
    try {
      [found, choices] = await Promise.all([get("trajectory", { ...named, offset: asked.offset }), get("choices")]);
    } catch (error) {
      if (!(error instanceof RequestFailed) || error.passes) throw error;
      body.append(el("p", { class: "warning" }, hostile(error.message)), el("p", {}, whyLink(asked.uid ?? "", "What became of it")));
      return;
    }
    if (closed) return;
    const t = found.trajectory, offset = Number(asked.offset ?? 0);
    const talk = el("section", { "data-view": "conversation" }), tokens = el("section", { "data-view": "tokens" });
    const facts = { prompt: t.prompt_uid, channel: t.channel, state: t.complete ? t.state : `${t.state}, open`, reward: number(t.reward),
      steps: number(t.steps), "tokens sampled": number(t.tokens), "oldest version": number(t.version), begun: when(t.created_at) };
    const inside = (value) => hostile(typeof value === "string" ? value : JSON.stringify(value));
    const list = (view, fields) => el("dl", { class: "facts", "data-view": view }, Object.entries(fields).flatMap(([name, value]) => [el("dt", {}, hostile(name)), el("dd", {}, inside(value))]));
    // A dataset's row and an agent name metadata as they like, also like a fact: it has a list of its own.
    fill(body,
      list("facts", facts),
      Object.keys(found.metadata).length ? [el("h2", {}, "Metadata"), list("metadata", found.metadata)] : null,
      el("p", {}, whyLink(t.uid, "What became of it")),
      choices.editable ? curation(found) : null,
      el("h2", {}, found.total_leaves > 1 ? `Conversation: ${number(found.total_leaves)} branches` : "Conversation"),
      found.total_leaves > 1 ? el("div", { class: "row" }, found.leaves.map((leaf) => el("button", { type: "button", "data-leaf": leaf, onclick: () => converse(talk, leaf) }, `to step ${leaf}`))) : null,
      talk,
      el("h2", {}, "Steps"),
      table([
        { title: "step", cell: (row) => el("button", { type: "button", "data-step": row.step_index, onclick: () => show(tokens, row.step_index) }, `tokens of ${row.step_index}`) },
        { title: "continues", numeric: true, cell: (row) => (row.parent < 0 ? "–" : number(row.parent)) },
        { title: "prompt", numeric: true, cell: (row) => number(row.prompt_tokens) },
        { title: "response", numeric: true, cell: (row) => number(row.response_tokens) },
        { title: "reward", numeric: true, cell: (row) => number(row.reward) },
        { title: "version", numeric: true, optional: true, cell: (row) => number(row.version) },
        { title: "mean log-prob", numeric: true, optional: true, cell: (row) => number(row.mean_log_prob) },
        { title: "finished by", optional: true, cell: (row) => hostile(row.finish_reason ?? "–") },
        { title: "remarks", cell: (row) => hostile([row.quarantined && `quarantined: ${row.quarantined}`, !row.trainable && "not trainable", ...row.tags, row.note].filter(Boolean).join("; ")) },
      ], found.steps, "It has no steps."),
      el("div", { class: "row" },
        offset > 0 ? el("button", { type: "button", onclick: () => go("trajectory", { ...named, offset: Math.max(0, offset - STEPS) }) }, "← Steps before") : null,
        offset + found.steps.length < found.total_steps ? el("button", { type: "button", onclick: () => go("trajectory", { ...named, offset: offset + STEPS }) }, "More steps →") : null),
      tokens);
    const leaf = found.leaves.at(-1);
    if (leaf !== undefined) await converse(talk, leaf);
    if (found.steps.length) await show(tokens, found.steps.at(-1).step_index, false);
  }

  /** What is decided about this trajectory, or one step of it. */
  function curation(found) {
    const which = el("select", { name: "step" }, el("option", { value: "" }, "all steps"), found.steps.map((one) => el("option", { value: one.step_index }, `step ${one.step_index}`)));
    const target = () => ({ ...named, ...(which.value === "" ? {} : { step: Number(which.value) }) });
    const form = curateForm("Change", target, () => setTimeout(() => { if (!closed) go("trajectory", asked); }, 1500));
    form.querySelector("form").prepend(el("label", {}, "of", which));
    return form;
  }

  async function converse(place, leaf) {
    const found = await get("conversation", { ...named, leaf });
    if (closed) return;
    place.replaceChildren();
    for (const button of body.querySelectorAll("[data-leaf]")) button.setAttribute("aria-pressed", String(Number(button.dataset.leaf) === leaf));
    if (found.difference) fill(place, difference(found.difference));
    if (found.messages === null) return void fill(place, el("p", { class: "soft" }, hostile(found.why_none)));
    fill(place, found.source ? el("p", { class: "soft" }, found.source) : null, found.left_out ? el("p", { class: "soft" }, `${number(found.left_out)} messages before are not shown.`) : null, found.messages.map(message));
  }

  async function show(place, step, bring = true, offset = undefined, paint = "log-prob") {
    const found = await get("tokens", { ...named, step, offset, limit: TOKENS });
    if (closed) return;
    const box = el("div", { class: "tokens" }), legend = el("div", { class: "row legend" });
    const rows = found.ids.map((id, at) => ({
      id, text: found.text?.[at] ?? null, log_prob: found.log_probs[at], trained: found.trained[at], version: found.versions[at],
      sampled: found.offset + at >= found.prompt_tokens, advantage: found.advantages?.[at] ?? null,
    }));
    const most = Math.max(0, ...rows.map((t) => Math.abs(t.advantage ?? 0)));
    const draw = (name) => {
      paint = name;
      const chosen = PAINTS[name];
      legend.replaceChildren(...(chosen.legendOf?.(found, most) ?? chosen.legend).map(([kind, words]) => el("span", { class: `token ${kind}` }, words)));
      if (chosen.words) legend.append(el("span", { class: "soft" }, hostile(chosen.words(found))));
      box.replaceChildren(...rows.map((t) => {
        const about = [`id ${t.id}`, t.text !== null && JSON.stringify(plain(t.text)), t.log_prob !== null && `log-prob ${t.log_prob.toFixed(4)}`,
          t.advantage !== null && `advantage ${t.advantage.toFixed(4)}`, t.version >= 0 && `version ${t.version}`, t.trained ? "trained on" : "not trained on"].filter(Boolean).join("\n");
        return el("span", { class: `token ${chosen.kind(t, most)}`, title: about }, t.text === null ? String(t.id) : hostile(t.text || "∅"));
      }));
      for (const button of place.querySelectorAll("[data-paint]")) button.setAttribute("aria-pressed", String(button.dataset.paint === name));
    };
    const to = (at) => () => show(place, step, false, Math.max(0, at), paint);
    const end = found.offset + rows.length;
    place.replaceChildren(
      el("h2", {}, `Tokens of step ${step}`),
      el("div", { class: "row" }, Object.keys(PAINTS).map((name) => el("button", { type: "button", "data-paint": name, onclick: () => draw(name) }, name)),
        el("span", { class: "soft" }, `${number(found.offset)} to ${number(end)} of ${number(found.total)}; the response begins at ${number(found.prompt_tokens)}`)),
      legend, box,
      el("div", { class: "row" },
        found.offset > 0 ? el("button", { type: "button", onclick: to(found.offset - TOKENS) }, "← Before") : null,
        end < found.total ? el("button", { type: "button", onclick: to(end) }, "After →") : null));
    draw(paint);
    if (bring) place.scrollIntoView({ block: "start" });
  }
  return { ready: draw(), close() { closed = true; } };
}
