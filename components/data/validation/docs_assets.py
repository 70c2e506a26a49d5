"""Style and script of the data documentation: what the library's pages need of a style sheet, and no more."""

STYLE = """\
:root { --ink: #1c2024; --soft: #60646c; --line: #d9dbe0; --ground: #ffffff; --shade: #f3f4f6;
  --good: #18794e; --bad: #c62a2f; --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #edeef0; --soft: #b0b4ba; --line: #363a3f; --ground: #111315; --shade: #1d2023;
    --good: #3dd68c; --bad: #ff9592; --link: #70b8ff; }
}
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--ground);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
h1 { font-size: 1.6rem; }
h4, h5, h6 { margin: 0 0 .3rem; font-size: 1rem; }
.banner { padding: .7rem 1.5rem; border-bottom: 1px solid var(--line); background: var(--shade); }
.index { max-width: 60rem; margin: 0 auto; padding: 1rem 1.5rem 3rem; }
.verdict { font-size: 1.15rem; font-weight: 600; }
.good, .text-success { color: var(--good); }
.bad, .text-danger { color: var(--bad); }
.note, .lead { color: var(--soft); }
.mark::before { content: "\\2713"; font-weight: 700; }
.mark.bad::before { content: "\\2717"; }
.container-fluid > .row { display: flex; gap: 2rem; padding: 1rem 1.5rem; align-items: flex-start; }
.container-fluid > .row > .col-lg-2 { flex: 0 0 15rem; position: sticky; top: 1rem; }
.container-fluid > .row > .col-md-10 { flex: 1 1 auto; min-width: 0; }
.container-fluid .container-fluid > .row { display: block; padding: 0; }
.card { border: 1px solid var(--line); border-radius: 6px; margin-bottom: 1rem; }
.card-header { padding: .4rem .8rem; background: var(--shade); border-bottom: 1px solid var(--line); }
.card-body { padding: .6rem .8rem; }
.nav { list-style: none; margin: 0; padding: 0; }
.btn-group { display: flex; gap: 1rem; white-space: nowrap; flex-wrap: wrap; }
.alert { padding: .5rem .8rem; margin: 1.2rem 0 .6rem; background: var(--shade); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .35rem .8rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
td:first-child, th:first-child { width: 6rem; }
td table { width: auto; margin: .5rem 0; }
.table-sm { width: auto; }
.table-sm td:first-child { width: 16rem; }
.index td:first-child { width: 2rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.badge { padding: 0 .4rem; border-radius: 4px; background: var(--shade); border: 1px solid var(--line); }
.fas { font-style: normal; font-weight: 700; }
.fa-check-circle::before { content: "\\2713"; }
.fa-times::before { content: "\\2717"; }
.fa-exclamation-triangle::before { content: "!"; }
.collapse { display: none; }
.collapse.open { display: block; }
.failed-only .passed { display: none; }
@media (max-width: 50rem) { .container-fluid > .row { display: block; } .card.d-none { display: none; } }
"""

SCRIPT = """\
// "Failed Only" on the pages of results, and the parts that open on a click
function showAllValidations() { document.body.classList.remove("failed-only"); }
function hideSucceededValidations() { document.body.classList.add("failed-only"); }
for (const cell of document.querySelectorAll(".hide-succeeded-validation-target-child")) {
  cell.closest("tr").classList.add("passed");
}
for (const table of document.querySelectorAll(".hide-succeeded-validations-column-section-target-child")) {
  const section = table.closest(".ge-section");
  section.classList.add("passed");
  document.querySelector(`a[href="#${section.id}"]`)?.parentElement.classList.add("passed");
}
for (const link of document.querySelectorAll("[data-toggle=collapse]")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById(link.getAttribute("href").slice(1))?.classList.toggle("open");
  });
}
"""
