"use strict";
// The page is whole without this: it adds sorting.
const MISSING = ["", "–", "NaN"];
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
  }
}

for (const table of document.querySelectorAll("main table")) {
  if (!table.tHead) continue;
  const rows = [...table.tBodies[0].rows];
  if (rows.length > 1) sortable(table, rows);
}

// print: everything is open

let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const each of opened) each.open = true;
});
addEventListener("afterprint", () => {
  for (const each of opened) each.open = false;
});
