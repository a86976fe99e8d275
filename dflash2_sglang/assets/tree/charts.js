// Calibration and recall over all rounds.

const PLOT = { width: 340, height: 250, left: 40, right: 20, top: 10, bottom: 38 };

function frame(label, xTitle, xTicks, xOf) {
  const yOf = (share) => PLOT.height - PLOT.bottom - share * (PLOT.height - PLOT.top - PLOT.bottom);
  const picture = draw("svg", { viewBox: `0 0 ${PLOT.width} ${PLOT.height}`, role: "img", "aria-label": label });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    picture.append(
      draw("line", { class: "axis", x1: PLOT.left, x2: PLOT.width - PLOT.right, y1: yOf(share), y2: yOf(share) }),
      draw("text", { x: PLOT.left - 6, y: yOf(share) + 4, "text-anchor": "end" }, percent(share, 0)),
    );
  }
  for (const [at, text] of xTicks) {
    picture.append(draw("text", { x: xOf(at), y: PLOT.height - PLOT.bottom + 16, "text-anchor": "middle" }, text));
  }
  picture.append(draw("text", { x: (PLOT.left + PLOT.width - PLOT.right) / 2, y: PLOT.height - 4, "text-anchor": "middle" }, xTitle));
  return { picture, yOf };
}

/** Predicted against accepted, a dot for each bin; its area grows with the count. */
function calibrationChart(bins) {
  const xOf = (share) => PLOT.left + share * (PLOT.width - PLOT.left - PLOT.right);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => [share, percent(share, 0)]);
  const said = bins.map((b) => `predicted ${percent(b.predicted)}, accepted ${percent(b.share)} of ${b.count}`).join("; ");
  const { picture, yOf } = frame(`Calibration: ${said}`, "predicted", ticks, xOf);
  const largest = Math.max(...bins.map((b) => b.count), 1);
  picture.append(draw("line", { class: "ideal", x1: xOf(0), y1: yOf(0), x2: xOf(1), y2: yOf(1) }));
  for (const b of bins) {
    const x = xOf(b.predicted);
    picture.append(
      draw("line", { class: "range", x1: x, x2: x, y1: yOf(b.share_low), y2: yOf(b.share_high) }),
      draw("circle", { class: "dot", cx: x, cy: yOf(b.share), r: (2.5 + 5 * Math.sqrt(b.count / largest)).toFixed(1) },
        draw("title", {}, `predicted ${percent(b.predicted)}, accepted ${percent(b.share)} (${b.accepted} of ${b.count})`)),
    );
  }
  return picture;
}

function binTable(bins) {
  const rows = bins.map((b) => [
    `${percent(b.low, 0)} – ${percent(b.high, 0)}`, String(b.count), percent(b.predicted), percent(b.share),
    `${percent(b.share_low)} – ${percent(b.share_high)}`,
  ]);
  return table(["predicted", "count", "mean", "accepted", "95 % interval"], rows);
}

/** Lines over depth; series are {name, of: depth record -> share}. */
function depthChart(depths, title, series) {
  const span = Math.max(depths.length - 1, 1);
  const xOf = (depth) => PLOT.left + 14 + ((depth - 1) / span) * (PLOT.width - PLOT.left - PLOT.right - 28);
  const ticks = depths.map((d) => [d.depth, String(d.depth)]);
  const { picture, yOf } = frame(title, "depth", ticks, xOf);
  for (const { name, of } of series) {
    const points = depths.filter((d) => d.rounds).map((d) => [xOf(d.depth), yOf(of(d)), d]);
    picture.append(draw("polyline", { class: `curve ${name}`, points: points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ") }));
    for (const [x, y, d] of points) {
      picture.append(draw("circle", { class: `point ${name}`, cx: x, cy: y, r: 3.5 }, draw("title", {}, `depth ${d.depth}, ${name}: ${percent(of(d))}`)));
    }
  }
  return picture;
}

function curveLegend(series) {
  return make("p", { class: "legend" }, ...series.map(({ name, label }) => make("span", {},
    draw("svg", { width: 30, height: 10, style: "display:inline-block;width:30px;margin-right:.4em" },
      draw("path", { class: `curve ${name}`, d: "M0 5H30" }), draw("circle", { class: `point ${name}`, cx: 15, cy: 5, r: 3 })),
    label)));
}

function calibrationFigure(statistics) {
  const kinds = [["paths", "whole paths"], ["edges", "single steps"]];
  const holder = make("div");
  const show = (kind) => holder.replaceChildren(calibrationChart(statistics[kind]), binTable(statistics[kind]));
  const choices = kinds.map(([kind, label], i) => {
    const input = make("input", { type: "radio", name: "bins", value: kind, checked: i === 0 });
    input.addEventListener("change", () => show(kind));
    return make("label", {}, input, " ", label);
  });
  show("paths");
  const choice = make("fieldset", { class: "choice", "aria-label": "Probability of" }, ...choices);
  return make("figure", { id: "calibration" }, make("figcaption", {}, "Calibration: predicted and accepted"), choice, holder);
}

function depthFigure(id, caption, depths, series, head, row) {
  return make("figure", { id }, make("figcaption", {}, caption), depthChart(depths, caption, series),
    curveLegend(series), table(head, depths.map(row)));
}

function drawCharts(statistics) {
  const depths = statistics.depths;
  const share = (key) => (d) => (d.rounds ? d[key] / d.rounds : 0);
  const shown = (hits, count) => (count ? percent(hits / count) : "–");
  const recall = [
    { name: "candidates", label: "among the candidates", of: share("candidates") },
    { name: "tree", label: "on a path of the tree", of: share("tree") },
    { name: "chain", label: "on the chain", of: share("chain") },
  ];
  const foreseen = [
    { name: "predicted", label: "predicted", of: share("predicted") },
    { name: "tree", label: "accepted", of: share("tree") },
  ];
  return [
    calibrationFigure(statistics),
    depthFigure("recall", "Recall: where the target’s token is", depths, recall,
      ["depth", "rounds", "candidates", "tree", "chain", "next child"],
      (d) => [String(d.depth), String(d.rounds), shown(d.candidates, d.rounds), shown(d.tree, d.rounds), shown(d.chain, d.rounds), shown(d.tree, d.reached)]),
    depthFigure("by-depth", "Calibration by depth: right up to there", depths, foreseen,
      ["depth", "rounds", "nodes", "predicted", "accepted"],
      (d) => [String(d.depth), String(d.rounds), String(d.nodes), shown(d.predicted, d.rounds), shown(d.tree, d.rounds)]),
  ];
}
