"use strict";

// Sorting: a click or a key on a head sorts by its column, again turns it around. A cell's
// data-value is a number; other cells compare as text, numbers inside it by their value.
const text = new Intl.Collator("en", { numeric: true });

function compare(a, b) {
  if (a.dataset.value !== undefined && b.dataset.value !== undefined)
    return Number(a.dataset.value) - Number(b.dataset.value);
  return text.compare(a.textContent.trim(), b.textContent.trim());
}

function sort(head) {
  const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  const body = head.closest("table").tBodies[0];
  const sign = order === "ascending" ? 1 : -1;
  const rows = [...body.rows].sort(
    (a, b) => sign * compare(a.cells[head.cellIndex], b.cells[head.cellIndex]),
  );
  for (const other of head.parentElement.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", order);
  body.append(...rows);
}

for (const button of document.querySelectorAll("th > button"))
  button.addEventListener("click", () => sort(button.parentElement));

// The theme is the system's until the button is pressed.
const theme = document.getElementById("theme");

theme.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});

for (const button of document.querySelectorAll("button[data-open]"))
  button.addEventListener("click", () => {
    for (const part of document.querySelectorAll("#tree details"))
      part.open = button.dataset.open === "true";
  });
