"use strict";
// Tables inside an element of the class `sortable` get a button in each head, which sorts the rows by that column.
// Without JavaScript they stay tables in the order of the page.
for (const table of document.querySelectorAll(".sortable table")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const text = (row, column) => row.cells[column].textContent.trim();
  const sort = (column) => {
    const head = heads[column], rows = [...body.rows];
    const numeric = rows.some((row) => !Number.isNaN(parseFloat(text(row, column))));
    const before = head.getAttribute("aria-sort"); // Numbers begin with the largest one, texts with the first letter.
    const descending = before ? before === "ascending" : numeric;
    const compare = (one, other) =>
      numeric ? parseFloat(one) - parseFloat(other) : one.localeCompare(other, "en", { sensitivity: "base" });
    const empty = (value) => (numeric ? Number.isNaN(parseFloat(value)) : value === "-");
    rows.sort((a, b) => {
      const [one, other] = [text(a, column), text(b, column)];
      if (empty(one) || empty(other)) return empty(one) - empty(other); // What has no figure stands last.
      return (descending ? -1 : 1) * compare(one, other);
    });
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    body.append(...rows);
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(column));
    head.append(button);
  });
}
