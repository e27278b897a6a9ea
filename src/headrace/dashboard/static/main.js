// The page itself: which view is open, the login, and the live figures.

import { NeedsLogin, RequestFailed, get, listen, post } from "./api.js";
import { el, hostile, number } from "./dom.js";
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
// Whether the view lacks something that the server, or its pool, could not answer: it is drawn again once they can.
let lacking = false;

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

/** Says that the server, or its pool, is away; asks for the key where that is what is missing. */
function away(error) {
  if (error instanceof NeedsLogin) return login(error.message);
  say(`No answer: ${error.message}. The page goes on by itself when it comes back.`);
}

/** Says why a view lacks something: in the view, or, where it may be answered later, until it is. */
function failed(error) {
  if (error.passes) lacking = true;
  if (error.passes || error instanceof NeedsLogin) return away(error);
  view.querySelector(":scope > .failure")?.remove();
  const words = el("p", { class: "warning failure", role: "alert" }, hostile(error.message));
  view.append(words);
  words.scrollIntoView({ block: "nearest" });
}

function show() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const name = path in VIEWS ? path : "overview";
  current?.close();
  view.replaceChildren();
  lacking = false;
  const opened = current = VIEWS[name].open(view, Object.fromEntries(new URLSearchParams(query)), go);
  opened.ready?.catch((error) => { if (opened === current) failed(error); });
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
  if (live.trouble) say(`The pool does not answer: ${live.trouble}`);
  else if (!lacking) say(null);
  if (current && lacking && !live.trouble) show();
  else current?.live?.(live);
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
  stop = listen(heard, away);
  get("choices").then((choices) => {
    byId("compare").hidden = !choices.beside;
    byId("about").hidden = !choices.about;
    byId("logout").hidden = !choices.keyed;
    if (choices.about) document.title = choices.about;
  }, () => {});
  show();
}

byId("logout").addEventListener("click", async () => {
  await post("logout").catch(() => {});
  location.reload();
});
// What a view asks for when something in it is pressed.
addEventListener("unhandledrejection", (event) => {
  if (!(event.reason instanceof NeedsLogin || event.reason instanceof RequestFailed)) return;
  event.preventDefault();
  if (current) failed(event.reason);
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
  else { away(error); setTimeout(() => location.reload(), 3000); }
});
