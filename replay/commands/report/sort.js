"use strict";
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0];
  const value = (row, column) => row.cells[column].textContent.trim();
  const number = (text) => (/^[-+]?[\d,]*\.?\d+(e[-+]?\d+)?$/i.test(text) ? Number(text.replaceAll(",", "")) : NaN);
  const compare = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
    return Number.isNaN(x) ? a.localeCompare(b) : x - y;
  };
  table.querySelectorAll("th button").forEach((button, column) => {
    button.addEventListener("click", () => {
      const header = button.parentElement;
      const rises = header.getAttribute("aria-sort") !== "ascending";
      for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", rises ? "ascending" : "descending");
      const rows = [...body.rows].sort((a, b) => compare(value(a, column), value(b, column)));
      body.append(...(rises ? rows : rows.reverse()));
    });
  });
}
