// Elements out of data. Text is only ever set as text: nothing that an agent wrote becomes markup.

// Characters that turn or hide writing; they are shown by their numbers.
const INVISIBLE = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** An element; `given` are its properties (`class`, `on...`, or attributes), `inside` texts and elements. */
export function el(tag, given = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  return fill(made, ...inside);
}

/** Adds texts and elements to an element, which is returned; what is null or false is left out. */
export function fill(place, ...inside) {
  place.append(...inside.flat().filter((one) => one !== null && one !== undefined && one !== false));
  return place;
}

/** Text of somebody's: its invisible characters can be seen. */
export function hostile(text) {
  const found = document.createDocumentFragment();
  let at = 0;
  for (const match of text.matchAll(INVISIBLE)) {
    found.append(text.slice(at, match.index));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    found.append(el("span", { class: "invisible" }, `U+${code}`));
    at = match.index + match[0].length;
  }
  found.append(text.slice(at));
  return found;
}

/** The same for where there can be no elements, such as a tooltip. */
export function plain(text) {
  return text.replace(INVISIBLE, (one) => `<U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}>`);
}

/** A number in at least three digits, and all of its whole part with one digit behind it. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return Number(value).toExponential(1);
  return String(Number(Number(value).toPrecision(Math.max(3, String(Math.floor(size)).length + 1))));
}

/** A table; a column has `title`, `cell(row)`, and may be `numeric` or `optional` on a small screen. */
export function table(columns, rows, empty) {
  if (!rows.length) return el("p", { class: "soft" }, empty);
  const kind = (c) => [c.numeric && "number", c.optional && "optional", c.name && "name"].filter(Boolean).join(" ");
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, columns.map((c) => el("th", { class: kind(c), scope: "col", "aria-sort": c.sorted }, c.head ?? c.title)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, columns.map((c) => el("td", { class: kind(c) }, c.cell(row))))))));
}

export function when(seconds) {
  return seconds === null ? "–" : new Date(seconds * 1000).toLocaleString();
}
