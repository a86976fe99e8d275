// The page: which prompt and round is shown, and how to get to another.

const DATA = JSON.parse(byId("data").textContent);
const state = { answer: 0, round: 0 };
const spell = (token) => visible(DATA.texts[token]);
const answerShown = () => DATA.answers[state.answer];
const roundShown = () => answerShown().rounds[state.round];

function showHeader() {
  const { settings: s, statistics: t } = DATA;
  byId("pair").append(`${baseName(s.target)} with ${baseName(s.drafter)} · ${s.nodes} nodes, depth ${s.depth}, at most ${counted(s.children, "child").replace("childs", "children")} · temperature ${s.temperature}`);
  const length = (value) => (value === null ? "–" : value.toFixed(2));
  const entries = [
    ["acceptance length, tree", length(t.acceptance_length), "tree"],
    ["chain", length(t.chain_acceptance_length), "chain"],
    ["rounds", String(t.rounds), ""],
  ];
  byId("summary").append(...entries.map(([term, text, kind]) => make("div", {}, make("dt", {}, term), make("dd", { class: kind }, text))));
  byId("picker").hidden = DATA.answers.length < 2;
  byId("prompt").append(...DATA.answers.map((answer, i) => make("option", { value: i }, `${i + 1}. ${shortened(answer.prompt, 90)}`)));
}

function baseName(path) {
  return /^[./~]/.test(path) ? path.replace(/\/+$/, "").split("/").pop() : path;
}

// --- the answer ---

/** A piece of text in which line ends, lone spaces and special tokens can be seen. */
function readable(piece) {
  if (/^<[|\w/].*>$/s.test(piece)) return [make("span", { class: "special" }, visible(piece))];
  if (/^ +$/.test(piece)) return [make("span", { class: "sign" }, visible(piece))];
  return piece.split(/(\n|\t)/).flatMap((part) => {
    if (part === "\n") return [make("span", { class: "sign", "aria-hidden": "true" }, "↵"), "\n"];
    return part ? [part] : [];
  });
}

function showAnswer() {
  const answer = answerShown();
  byId("question").textContent = answer.prompt;
  const token = (place, kind) => make("span", { class: `token ${kind}`, "data-place": place }, ...readable(answer.pieces[place]));
  const spans = answer.rounds.map((round, i) => {
    const drafted = round.accepted.length - 1;
    const tokens = Array.from({ length: round.gain }, (_, k) => token(round.place + 1 + k, k < drafted ? "accepted" : "bonus"));
    const span = make("span", { class: "round", "data-round": i }, ...tokens);
    span.addEventListener("click", () => go(i));
    return span;
  });
  const first = answer.rounds.length ? [0] : answer.tokens.keys();
  byId("answer").replaceChildren(...Array.from(first, (place) => token(place, "first")), ...spans);
}

// --- the timeline ---

function showTimeline() {
  const rounds = answerShown().rounds;
  const holder = byId("timeline");
  const most = Math.max(2, ...rounds.map((r) => Math.max(r.gain, r.chain_gain)));
  const unit = Math.min(14, 90 / most);
  const pitch = Math.max(12, Math.min(26, (holder.clientWidth - 30) / Math.max(rounds.length, 1)));
  const [left, top, height] = [26, 4, most * unit];
  const width = left + pitch * rounds.length + 4;
  const picture = draw("svg", { width, height: height + top + 18, role: "slider", tabindex: 0, "aria-label": "Round", "aria-valuemin": 1, "aria-valuemax": rounds.length });
  for (const count of [1, most]) {
    picture.append(draw("text", { x: left - 8, y: top + height - count * unit + 4, "text-anchor": "end", "font-size": 11, fill: "currentColor" }, String(count)));
  }
  rounds.forEach((round, i) => {
    const x = left + i * pitch;
    const y = (count) => top + height - count * unit;
    const slot = draw("rect", { class: "slot", x: x - 0.5, y: 1, width: pitch, height: height + top + 16, rx: 3, "data-round": i },
      draw("title", {}, `round ${i + 1}: tree ${round.gain}, chain ${round.chain_gain}`));
    slot.addEventListener("click", () => go(i));
    const drafted = Math.min(round.accepted.length - 1, round.gain);
    const bar = { x: x + pitch * 0.2, width: pitch * 0.6, "pointer-events": "none" };
    picture.append(slot, draw("rect", { ...bar, class: "bar-accepted", y: y(drafted), height: drafted * unit }));
    if (round.gain > drafted) picture.append(draw("rect", { ...bar, class: "bar-bonus", y: y(round.gain), height: unit - 1 }));
    picture.append(draw("rect", { ...bar, class: "bar-chain", x: x + 1, width: pitch - 3, y: y(round.chain_gain) - 1.5, height: 3 }));
    if (i === 0 || (i + 1) % (pitch < 20 ? 10 : 5) === 0) {
      picture.append(draw("text", { x: x + pitch / 2, y: height + top + 14, "text-anchor": "middle", "font-size": 10, "pointer-events": "none" }, String(i + 1)));
    }
  });
  holder.replaceChildren(picture);
}

// --- the round ---

function showRound() {
  const answer = answerShown();
  const round = roundShown();
  const count = answer.rounds.length;
  byId("position").textContent = count ? `Round ${state.round + 1} of ${count}` : "No rounds";
  for (const id of ["first", "back"]) byId(id).disabled = state.round <= 0;
  for (const id of ["next", "last"]) byId(id).disabled = state.round >= count - 1;
  if (!round) {
    byId("tree-title").textContent = "The answer ended before a round.";
    for (const id of ["tree", "detail", "chain"]) byId(id).replaceChildren();
    return;
  }
  const said = `tree ${counted(round.gain, "token")}, chain ${round.chain_gain}`;
  byId("tree-title").textContent = `Round ${state.round + 1}: ${said}`;
  const hadFocus = byId("tree").contains(document.activeElement);
  const show = (node) => byId("detail").replaceChildren(terms(facts(round, node, spell)));
  byId("tree").replaceChildren(drawTree(round, spell, byId("tree").clientWidth, show));
  show(0);
  if (hadFocus) byId("tree").querySelector(".node").focus();
  showChain(round);
  mark(".slot", state.round);
  const slider = byId("timeline").querySelector("svg");
  slider.setAttribute("aria-valuenow", state.round + 1);
  slider.setAttribute("aria-valuetext", `Round ${state.round + 1} of ${count}: ${said}`);
  reveal(byId("answer"), mark("#answer .round", state.round), "Top", "Height");
  reveal(byId("timeline"), mark(".slot", state.round), "Left", "Width");
}

function showChain(round) {
  byId("chain").replaceChildren(...round.chain.map((token, i) => {
    const kind = i < round.chain_hits ? "hit" : i === round.chain_hits ? "miss" : "after";
    const said = { hit: "right", miss: "wrong", after: "after a wrong one" }[kind];
    const title = `depth ${i + 1}, path ${percent(round.chain_prob[i], 2)}, ${said}`;
    return make("li", { class: kind, title, "aria-label": `${spell(token)}, ${title}` }, spell(token));
  }));
}

function mark(selector, index) {
  let found = null;
  for (const element of document.querySelectorAll(selector)) {
    const chosen = Number(element.getAttribute("data-round")) === index;
    element.classList.toggle("current", chosen);
    if (chosen) found = element;
  }
  return found;
}

/** Scroll the holder, and only it, until the element is seen. */
function reveal(holder, element, side, size) {
  if (!element) return;
  const low = side.toLowerCase();
  const [inner, outer] = [element.getBoundingClientRect(), holder.getBoundingClientRect()];
  const extent = size.toLowerCase();
  if (inner[low] < outer[low] || inner[low] + inner[extent] > outer[low] + outer[extent]) {
    holder[`scroll${side}`] += inner[low] - outer[low] - (outer[extent] - inner[extent]) / 2;
  }
}

// --- going places ---

function go(round, answer = state.answer) {
  const other = answer !== state.answer;
  state.answer = Math.max(0, Math.min(answer, DATA.answers.length - 1));
  state.round = Math.max(0, Math.min(round, answerShown().rounds.length - 1));
  if (other) showPrompt();
  else showRound();
  try { history.replaceState(null, "", `#${state.answer + 1}.${state.round + 1}`); } catch { /* a sandbox may forbid it */ }
}

function showPrompt() {
  byId("prompt").value = state.answer;
  showAnswer();
  showTimeline();
  showRound();
}

function readAddress() {
  const found = /^#(\d+)\.(\d+)$/.exec(location.hash);
  if (!found) return;
  state.answer = Math.max(0, Math.min(Number(found[1]), DATA.answers.length) - 1);
  state.round = Math.max(0, Math.min(Number(found[2]), answerShown().rounds.length) - 1);
}

const KEYS = {
  ArrowLeft: () => go(state.round - 1),
  ArrowRight: () => go(state.round + 1),
  Home: () => go(0),
  End: () => go(answerShown().rounds.length - 1),
  n: () => state.answer + 1 < DATA.answers.length && go(0, state.answer + 1),
  p: () => state.answer > 0 && go(0, state.answer - 1),
  t: () => byId("tree").querySelector('[tabindex="0"]')?.focus(),
  "?": () => byId("help").showModal(),
};

function onKey(event) {
  const busy = event.ctrlKey || event.altKey || event.metaKey || byId("help").open;
  if (busy || /^(SELECT|INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function start() {
  readAddress();
  showHeader();
  showPrompt();
  const { statistics: t, settings: s } = DATA;
  byId("verdict").textContent = `Over all ${counted(t.rounds, "round")} it expected ${t.predicted_nodes.toFixed(0)} of its nodes to be accepted; ${t.accepted_nodes} were.`;
  byId("charts").append(...drawCharts(t));
  const sampled = s.temperature > 0 ? " Above temperature 0 stock DFLASH draws its chain, so its figure is a guide only, and probabilities estimate how often a node is accepted." : "";
  byId("note").textContent = `What the chain would have got is read off the answer, from the same anchors. Positions beyond the end of an answer are left out. Bars show 95 % intervals.${sampled}`;
  byId("random-legend").hidden = !DATA.answers.some((a) => a.rounds.some((r) => r.random.length));
  document.addEventListener("keydown", onKey);
  byId("prompt").addEventListener("change", (event) => go(0, Number(event.target.value)));
  const steps = { first: "Home", back: "ArrowLeft", next: "ArrowRight", last: "End", "help-open": "?" };
  for (const [id, key] of Object.entries(steps)) byId(id).addEventListener("click", KEYS[key]);
  window.addEventListener("resize", () => { showTimeline(); showRound(); });
}

start();
