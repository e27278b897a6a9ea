// The page itself: which view is open, the login, and the live figures.

import { NeedsLogin, get, listen, post } from "./api.js";
import { el, number } from "./dom.js";
import * as about from "./about.js";
import * as compare from "./compare.js";
import * as consumption from "./consumption.js";
import * as groups from "./groups.js";
import * as overview from "./overview.js";
import * as trajectories from "./trajectories.js";
import * as trajectory from "./trajectory.js";

const VIEWS = { overview, about, trajectories, groups, consumption, compare, trajectory };
const byId = (id) => document.getElementById(id);
const view = byId("view");
let current = null, live = {}, stop = null;

const go = (name, asked) => {
  const given = Object.entries(asked).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const query = new URLSearchParams(given).toString();
  const next = `#/${name}${query && "?"}${query}`;
  if (location.hash === next) show();
  else location.hash = next;
};

function say(words) {
  byId("trouble").hidden = !words;
  byId("trouble").textContent = words ?? "";
}

function failed(error) {
  if (error instanceof NeedsLogin) return login(error.message);
  say(`No answer: ${error.message} The page goes on by itself when it comes back.`);
}

function show() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const name = path in VIEWS ? path : "overview";
  current?.close();
  view.replaceChildren();
  current = VIEWS[name].open(view, Object.fromEntries(new URLSearchParams(query)), go);
  current.ready?.catch(failed);
  if (live.ledger) current.live?.(live);
  for (const link of document.querySelectorAll("header nav a")) {
    const here = link.hash === `#/${name}` || (name === "trajectory" && link.hash === "#/trajectories");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  view.focus({ preventScroll: true });
}

function heard(changed) {
  live = { ...live, ...changed };
  byId("title").textContent = live.title;
  byId("status").textContent = `${number(live.indexed)} trajectories${live.indexing ? ", reading…" : ""}`;
  say(live.trouble ? `The pool does not answer: ${live.trouble}` : null);
  current?.live?.(live);
}

function login(why) {
  stop?.();
  stop = null;
  current?.close();
  current = null;
  const key = el("input", { type: "password", name: "key", autocomplete: "current-password", required: true });
  const wrong = el("p", { class: "bad", role: "alert" });
  const form = el("form", { class: "login" }, el("h1", {}, "Log in"), why && why !== "log in first" ? el("p", { class: "warning" }, why) : null, el("label", {}, "key of this server", key), el("button", { type: "submit" }, "Log in"), wrong);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await post("login", { key: key.value });
      byId("logout").hidden = false;
      begin();
    } catch (error) {
      wrong.textContent = error.message;
    }
  });
  view.replaceChildren(form);
  key.focus();
}

function begin() {
  stop?.();
  stop = listen(heard, failed);
  get("choices").then((choices) => {
    byId("compare").hidden = !choices.beside;
    byId("about").hidden = !choices.about;
    if (choices.about) document.title = choices.about;
  }, () => {});
  show();
}

byId("logout").addEventListener("click", async () => {
  await post("logout").catch(() => {});
  location.reload();
});
addEventListener("hashchange", () => stop && show());
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const to = { o: "overview", t: "trajectories", g: "groups", c: "consumption" }[event.key];
  if (to) go(to, {});
  if (event.key === "/") { event.preventDefault(); view.querySelector("input[type=search]")?.focus(); }
});

get("choices").then(begin, (error) => {
  if (error instanceof NeedsLogin) login(error.message);
  else { failed(error); setTimeout(() => location.reload(), 3000); }
});
