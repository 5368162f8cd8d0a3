"use strict";
// The page is whole without this: it adds sorting, and marks a head or a sample everywhere.
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

// links: what belongs to a head or a sample is marked in every map, table and gallery at once

const HEAD = /^(?:head (\d+)\.(\d+)|layer (\d+), head (\d+))\b/;

function name(element) {
  if (element.matches("tr")) {
    const [first] = element.closest("table").tHead.rows[0].cells;
    const kind = first.textContent.trim(), text = element.cells[0].textContent.trim();
    return ["head", "sample"].includes(kind) ? `${kind} ${text}` : "";
  }
  if (element.matches("figure")) {
    return `sample ${element.querySelector("figcaption").textContent.trim().split(",")[0]}`;
  }
  const found = HEAD.exec(element.textContent);
  return found ? `head ${found[1] ?? found[3]}.${found[2] ?? found[4]}` : "";
}

let chosen = "";
const owners = new Map();

function choose(of) {
  for (const element of owners.get(chosen) ?? []) element.classList.remove("chosen");
  chosen = of === chosen ? "" : of;
  for (const element of owners.get(chosen) ?? []) element.classList.add("chosen");
  const places = owners.get(chosen)?.length;
  document.querySelector("#selected").textContent = chosen && `${chosen}: marked in ${places} places`;
}

for (const element of document.querySelectorAll("tbody tr, .gallery figure, .marks > *")) {
  const of = element.closest(".facts") ? "" : name(element);
  if (!of) continue;
  owners.set(of, [...(owners.get(of) ?? []), element]);
  element.dataset.of = of;
  element.setAttribute("tabindex", "0");
  element.addEventListener("click", () => choose(of));
  element.addEventListener("keydown", event => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose(of);
    }
  });
}
addEventListener("keydown", event => {
  if (event.key === "Escape") choose(chosen);
});

// print: everything is open

let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const each of opened) each.open = true;
});
addEventListener("afterprint", () => {
  for (const each of opened) each.open = false;
});
