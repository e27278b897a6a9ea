// Decisions by hand about steps: quality, trainable or not, tags, a note, a reward; and the way back.

import { post } from "./api.js";
import { el, hostile, number } from "./dom.js";

const NAME = "headrace-curator";
const stored = () => { try { return localStorage.getItem(NAME) ?? ""; } catch { return ""; } };
const store = (name) => { try { localStorage.setItem(NAME, name); } catch { /* a page may not keep anything */ } };

/** A form that changes what `target()` names (`{channel, uid, step?}` or `{filter}`); `done()` is called after a change. */
export function curateForm(words, target, done) {
  const said = el("p", { role: "status", class: "soft" });
  const undo = el("button", { type: "button" }, "Undo the last change");
  const field = (label, input) => el("label", {}, label, input);
  const input = (name, more) => el("input", { name, ...more });
  const form = el("form", { class: "filters", "data-view": "curate" },
    field("trained on", el("select", { name: "trainable" }, el("option", { value: "" }, "unchanged"), el("option", { value: "true" }, "yes"), el("option", { value: "false" }, "no"))),
    field("quality", input("quality", { type: "number", step: "any", class: "short" })),
    field("tags, by commas", input("tags", {})),
    field("note", input("note", {})),
    field("reward", input("reward", { type: "number", step: "any", class: "short" })),
    field("your name", input("by", { value: stored(), maxlength: 100, class: "short" })),
    el("button", { type: "submit" }, words), undo);
  async function send(name, body) {
    try {
      const found = await post(name, body);
      const refused = found.refused ? ` ${number(found.refused)} were with a trainer or gone, and stay as they are.` : "";
      const kept = found.kept_rewards ? ` ${number(found.kept_rewards)} rewards stay: there was none before.` : "";
      said.textContent = `${number(found.steps)} steps of ${number(found.trajectories)} trajectories changed.${refused}${kept}`;
      done();
    } catch (error) {
      said.replaceChildren(hostile(error.message));
    }
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(form)), changes = {};
    if (given.trainable) changes.trainable = given.trainable === "true";
    if (given.quality !== "") changes.quality = Number(given.quality);
    if (given.reward !== "") changes.reward = Number(given.reward);
    if (given.tags.trim()) changes.tags = given.tags.split(",").map((one) => one.trim()).filter(Boolean);
    if (given.note.trim()) changes.note = given.note;
    store(given.by);
    send("curate", { ...target(), changes, by: given.by });
  });
  undo.addEventListener("click", () => send("undo", { by: new FormData(form).get("by") }));
  return el("details", { class: "curate" }, el("summary", {}, "Curate by hand"), form, said);
}
