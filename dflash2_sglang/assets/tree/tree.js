// One round's tree as SVG, likelier children above: depth from left to right, or indented where the
// page is narrow.

const NARROW = { width: 158, height: 28, across: 22, down: 34, margin: 6, letters: 12, indented: true };

/** Boxes side by side, as wide as lets the columns fit the room, within reason. */
function wide(room, columns) {
  const across = Math.max(126, Math.min(172, Math.floor((room - 12) / (columns - 0.2))));
  const width = Math.floor(across * 0.8);
  return { width, height: 28, across, down: 38, margin: 6, letters: Math.round((width - 52) / 8), indented: false };
}

/** Places {column, row} of all nodes and of the bonus token, which follows the last accepted node. */
function layout(round, indented) {
  const count = round.tokens.length;
  const children = Array.from({ length: count + 1 }, () => []);
  for (let node = 1; node < count; node++) children[round.parent[node]].push(node);
  const last = round.accepted[round.accepted.length - 1];
  children[last].push(count); // the bonus token
  const places = [];
  let rows = 0;
  const visit = (node, column) => {
    places[node] = { column, row: rows };
    if (indented || !children[node].length) rows += 1; // else level with the first child
    for (const child of children[node]) visit(child, column + 1);
  };
  visit(0, 0);
  return { places, rows, columns: 1 + Math.max(...places.map((p) => p.column)), last };
}

/** Nodes on the greedy chain, as far as the tree holds it. */
function chainNodes(round) {
  const found = new Set();
  let above = 0;
  for (const token of round.chain) {
    const node = round.parent.findIndex((parent, i) => parent === above && round.tokens[i] === token);
    if (node < 0) break;
    found.add(node);
    above = node;
  }
  return found;
}

function edgeShare(round, node) {
  const above = round.prob[round.parent[node]];
  return above > 0 ? Math.min(round.prob[node] / above, 1) : 0;
}

function verdict(round, node) {
  if (node === 0) return "anchor, the last token before this round";
  if (round.accepted.includes(node)) return "accepted";
  return round.accepted.includes(round.parent[node]) ? "not accepted" : "not reached: its parent was not accepted";
}

/** What is known of a node; number round.tokens.length is the bonus token. */
function facts(round, node, spell) {
  const bonus = node === round.tokens.length;
  const token = bonus ? round.bonus : round.tokens[node];
  const rows = [["token", spell(token)], ["id", String(token)]];
  if (bonus) return [...rows, ["verdict", "the target’s own token"]];
  rows.push(["depth", String(round.depth[node])]);
  if (node) rows.push(["path", percent(round.prob[node], 2)], ["step", percent(edgeShare(round, node), 2)]);
  if (round.random.includes(node)) rows.push(["kind", "drawn at random"]);
  return [...rows, ["verdict", verdict(round, node)]];
}

/** From the parent's box to the child's. */
function edgePath(box, [x, y], [u, v]) {
  const middle = v + box.height / 2;
  if (box.indented) return `M${x + 11} ${y + box.height}V${middle - 8}Q${x + 11} ${middle} ${u} ${middle}`;
  const [start, level] = [x + box.width, y + box.height / 2];
  const bend = (u - start) / 2;
  return `M${start} ${level}C${start + bend} ${level} ${u - bend} ${middle} ${u} ${middle}`;
}

/** `room` is the width in pixels that there is. */
function drawTree(round, spell, room, onShow) {
  const narrow = room < 560;
  const { places, rows, columns, last } = layout(round, narrow);
  const BOX = narrow ? NARROW : wide(room, columns);
  const chain = chainNodes(round);
  const width = (columns - 1) * BOX.across + BOX.width + 2 * BOX.margin;
  const height = (rows - 1) * BOX.down + BOX.height + 2 * BOX.margin;
  const left = (node) => BOX.margin + places[node].column * BOX.across;
  const top = (node) => BOX.margin + places[node].row * BOX.down;
  const bonus = round.tokens.length;
  const kind = (node) => {
    if (node === bonus) return "bonus";
    if (node === 0) return "root";
    return round.accepted.includes(node) ? "accepted" : "rejected";
  };

  const edge = (node) => {
    const above = node === bonus ? last : round.parent[node];
    const share = node === bonus ? 0.25 : edgeShare(round, node);
    return draw("path", {
      class: `edge ${kind(node)}`,
      d: edgePath(BOX, [left(above), top(above)], [left(node), top(node)]),
      "stroke-width": (1 + (narrow ? 4 : 6) * share).toFixed(2),
      opacity: node === bonus ? 1 : (0.3 + 0.7 * Math.sqrt(round.prob[node])).toFixed(2),
    });
  };

  const box = (node) => {
    const name = spell(node === bonus ? round.bonus : round.tokens[node]);
    const label = facts(round, node, spell).map(([term, text]) => `${term} ${text}`).join(", ");
    const random = round.random.includes(node) ? "~" : "";
    const noShare = node === 0 || node === bonus;
    const group = draw("g", {
      class: `node ${kind(node)}`,
      transform: `translate(${left(node)} ${top(node)})`,
      role: "treeitem", "aria-level": places[node].column + 1, "aria-label": label, "aria-selected": "false",
      tabindex: node === 0 ? 0 : -1, "data-node": node,
    });
    group.append(draw("rect", { class: "box", width: BOX.width, height: BOX.height, rx: 7 }));
    if (chain.has(node)) group.append(draw("rect", { class: "on-chain", x: 9, y: BOX.height - 4, width: BOX.width - 18, height: 2.6, rx: 1 }));
    group.append(draw("text", { class: "name", x: 9, y: 18 }, random + shortened(name, BOX.letters + (noShare ? 4 : 0))));
    if (!noShare) group.append(draw("text", { class: "share", x: BOX.width - 8, y: 18, "text-anchor": "end" }, percent(round.prob[node], round.prob[node] < 0.095 ? 1 : 0)));
    return group;
  };

  const all = Array.from({ length: bonus + 1 }, (_, node) => node);
  const boxes = all.map(box);
  const picture = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "tree", "aria-label": "Drafted tree" });
  // Unlikely edges first, so that the accepted path lies on top.
  const edges = all.slice(1).sort((a, b) => (kind(a) === "rejected" ? 0 : 1) - (kind(b) === "rejected" ? 0 : 1));
  picture.append(draw("g", { "aria-hidden": "true" }, ...edges.map(edge)), ...boxes);
  wire(picture, boxes, places, onShow);
  return picture;
}

/** Hover and focus show a node; up and down go through the nodes as they are drawn. */
function wire(picture, boxes, places, onShow) {
  const order = boxes.map((_, node) => node).sort((a, b) => places[a].row - places[b].row || places[a].column - places[b].column);
  const show = (node) => {
    boxes.forEach((box, i) => {
      box.classList.toggle("shown", i === node);
      box.setAttribute("aria-selected", String(i === node));
    });
    onShow(node);
  };
  boxes.forEach((box, node) => {
    box.addEventListener("pointerenter", () => show(node));
    box.addEventListener("focus", () => {
      boxes.forEach((other) => other.setAttribute("tabindex", other === box ? 0 : -1));
      show(node);
    });
    box.addEventListener("click", () => box.focus());
  });
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const at = boxes.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    const to = order[order.indexOf(at) + step];
    if (to !== undefined) boxes[to].focus();
  });
}
