// Small things everything else is made of. Text only ever enters the page as text nodes.

const SPACE = "http://www.w3.org/2000/svg";
const SIGNS = { " ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥" };

function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SPACE, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

/** The text with spaces, line ends and control characters as signs. */
function visible(text) {
  return [...text].map((c) => SIGNS[c] || (/\p{C}/u.test(c) ? `\\x${c.codePointAt(0).toString(16)}` : c)).join("");
}

function shortened(text, most) {
  const letters = [...text];
  return letters.length <= most ? text : letters.slice(0, most - 1).join("") + "…";
}

function percent(share, digits = 1) {
  const value = 100 * share;
  if (value > 0 && value < 0.1 ** digits / 2) return `<${(0.1 ** digits).toFixed(digits)}%`;
  return `${value.toFixed(digits)}%`;
}

function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

/** Rows of [term, description] as a description list. */
function terms(rows) {
  return make("dl", {}, ...rows.map(([term, text]) => make("div", {}, make("dt", {}, term), make("dd", {}, text))));
}

function table(head, rows) {
  const cells = (kind, row) => make("tr", {}, ...row.map((cell) => make(kind, {}, cell)));
  const body = make("table", {}, make("thead", {}, cells("th", head)), make("tbody", {}, ...rows.map((row) => cells("td", row))));
  return make("details", {}, make("summary", {}, "As a table"), make("div", { class: "table" }, body));
}
