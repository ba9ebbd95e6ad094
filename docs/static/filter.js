"use strict";
// On narrow screens a cell stands below the one before it, with its column's name (see site.css).
const tables = kind => [...document.querySelectorAll("table")].filter(one => one.closest(kind));
for (const table of tables(".stacked, .filtered")) {
  const heads = [...table.tHead.rows[0].cells].map(one => one.textContent.trim());
  for (const row of table.tBodies[0].rows) {
    for (const [k, cell] of [...row.cells].entries()) if (k) cell.dataset.name = heads[k];
  }
}
// Lists above a table with the class "filtered" choose rows by their first column (a paper or a suite)
// and by their verdict. Without scripts the table is whole.
for (const table of tables(".filtered")) {
  const heads = [...table.tHead.rows[0].cells].map(one => one.textContent.trim());
  const rows = [...table.tBodies[0].rows], at = heads.indexOf("verdict");
  const group = row => (row.cells[0].querySelector("a, code") ?? row.cells[0]).textContent.trim();
  const verdict = row => (row.cells[at].querySelector("strong") ?? row.cells[at]).textContent.trim();
  const columns = [[heads[0] === "where" ? "Paper" : "Suite", group], ["Verdict", verdict]];
  const bar = document.createElement("p"), count = document.createElement("span");
  bar.className = "filter";
  const chosen = columns.map(([name, of]) => {
    const label = document.createElement("label"), list = document.createElement("select");
    list.add(new Option("all", ""));
    for (const one of [...new Set(rows.map(of))].sort()) list.add(new Option(one));
    label.append(`${name}: `, list);
    list.addEventListener("change", show);
    bar.append(label);
    return list;
  });
  count.setAttribute("role", "status");
  bar.append(count);
  function show() {
    for (const row of rows) {
      row.hidden = columns.some(([, of], k) => chosen[k].value && of(row) !== chosen[k].value);
    }
    count.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} claims`;
  }
  (table.closest(".table-wrapper") ?? table).before(bar);
  show();
}
