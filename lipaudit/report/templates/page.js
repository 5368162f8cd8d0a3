"use strict";
// The page is whole without this: it adds sorting, filters, and figures under the pointer.
const MISSING = ["", "–", "NaN"];
const FEW = 8; // rows that need no filter
const STATES = { none: "ascending", ascending: "descending", descending: "none" };
const names = new Intl.Collator("en", { numeric: true });

function make(tag, properties) {
  return Object.assign(document.createElement(tag), properties);
}

// tables: a button in every heading sorts, a third press brings the first order back

function key(cell, named) {
  if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
  const text = cell.textContent.trim(), value = named ? NaN : parseFloat(text);
  return MISSING.includes(text) ? null : Number.isNaN(value) ? text : value;
}

function compare(a, b) {
  return typeof a === "number" && typeof b === "number"
    ? (a > b) - (a < b)
    : names.compare(String(a), String(b));
}

function sort(table, rows, th) {
  const state = STATES[th.getAttribute("aria-sort") || "none"];
  for (const other of th.parentNode.cells) other.setAttribute("aria-sort", "none");
  th.setAttribute("aria-sort", state);
  const sign = state === "descending" ? -1 : 1, named = th.classList.contains("t");
  const keyed = rows.map(row => [key(row.cells[th.cellIndex], named), row]);
  if (state !== "none") {
    keyed.sort(([a], [b]) =>
      a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b));
  }
  table.tBodies[0].append(...keyed.map(([, row]) => row));
}

function sortable(table, rows) {
  for (const th of table.tHead.rows[0].cells) {
    const button = make("button", { type: "button" });
    button.append(...th.childNodes);
    th.append(button);
    th.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => sort(table, rows, th));
    button.addEventListener("focus", () => button.matches(":focus-visible") && show(th, th.title));
    button.addEventListener("blur", hide);
  }
}

// a word that begins like a number is the beginning of a cell, another stands anywhere

function matches(texts, word) {
  return texts.some(text => (/^[-+.\d]/.test(word) ? text.startsWith(word) : text.includes(word)));
}

function filterable(table, rows, title) {
  const line = make("p", { className: "filter" });
  const input = make("input", { type: "search", placeholder: "Filter rows" });
  const count = make("output", { textContent: `${rows.length} rows` });
  input.setAttribute("aria-label", `Filter the rows of ${title}`);
  const texts = rows.map(row => [...row.cells].map(cell => cell.textContent.toLowerCase()));
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let kept = 0;
    rows.forEach((row, i) => {
      const stays = words.every(word => matches(texts[i], word));
      row.classList.toggle("off", !stays);
      kept += stays;
    });
    count.textContent = words.length ? `${kept} of ${rows.length} rows` : `${rows.length} rows`;
  });
  line.append(input, " ", count);
  table.parentNode.before(line);
}

for (const table of document.querySelectorAll("main table")) {
  if (!table.tHead) continue;
  const rows = [...table.tBodies[0].rows], figure = table.closest("figure");
  const caption = figure.querySelector("figcaption") || figure.parentNode.querySelector("summary");
  if (rows.length > 1) sortable(table, rows);
  if (rows.length > FEW) filterable(table, rows, caption ? caption.textContent : "this table");
}

// pictures: what a place says, under the pointer and by the arrow keys

const tip = make("div", { id: "tip", hidden: true });
tip.setAttribute("role", "status");
document.body.append(tip);

let pointed = null;

function show(place, text) {
  if (!text) return hide();
  pointed = place;
  tip.textContent = text;
  tip.hidden = false;
  put();
}

function put() {
  if (tip.hidden) return;
  const box = pointed.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const right = document.documentElement.clientWidth - own.width - 4;
  const left = box.left + box.width / 2 - own.width / 2, above = box.top - own.height - 6;
  tip.style.left = `${Math.max(4, Math.min(left, right))}px`;
  tip.style.top = `${above < 4 ? box.bottom + 6 : above}px`;
}

function hide() {
  tip.hidden = true;
}

function said(mark) {
  const title = mark.querySelector("title");
  if (title) { // else the browser shows it a second time
    mark.dataset.said = title.textContent;
    title.remove();
  }
  return mark.dataset.said;
}

const ARROWS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };

function middle(mark) {
  const box = mark.getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
}

function next(marks, at, [right, down]) {
  const [x, y] = middle(at);
  let best = at, least = Infinity;
  for (const mark of marks) {
    const [u, v] = middle(mark), ahead = (u - x) * right + (v - y) * down;
    const far = ahead + 3 * Math.abs((u - x) * down + (v - y) * right);
    if (ahead > 0.5 && far < least) [best, least] = [mark, far];
  }
  return best;
}

for (const group of document.querySelectorAll(".marks")) {
  const picture = group.closest("svg"), marks = [...group.children];
  let at = null;
  const go = mark => {
    at?.classList.remove("at");
    at = mark;
    at?.classList.add("at");
    if (at) show(at, said(at));
    else hide();
  };
  picture.setAttribute("tabindex", "0");
  picture.closest(".scroll")?.removeAttribute("tabindex");
  group.addEventListener("pointerover", event => go(event.target.closest(".marks > *")));
  group.addEventListener("pointerout", () => go(null));
  picture.addEventListener("blur", () => go(null));
  picture.addEventListener("focus", () => picture.matches(":focus-visible") && go(marks[0]));
  picture.addEventListener("keydown", event => {
    if (event.key === "Escape") go(null);
    if (!(event.key in ARROWS)) return;
    event.preventDefault();
    go(at ? next(marks, at, ARROWS[event.key]) : marks[0]);
    at.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}
addEventListener("scroll", put, { capture: true, passive: true });

// print: everything is open

let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const each of opened) each.open = true;
});
addEventListener("afterprint", () => {
  for (const each of opened) each.open = false;
});
