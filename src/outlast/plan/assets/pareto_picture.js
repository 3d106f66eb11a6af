// The picture: points in two figures, a third as colour, a fourth as size.
const picture = (() => {
  "use strict";
  const {
    root, figures, axes, points, knee, coverage, index, low, middle, high, state, all, element, node,
    number, shown, between, signed, inside, choice, limited,
  } = plan;

  const style = () => {
    const computed = getComputedStyle(root);
    return (name) => computed.getPropertyValue(`--${name}`).trim();
  };

  function coloured(at, colour) {
    const { log, factor, words, unit } = figures[at];
    const values = points.map((point) => point.figures[at][middle] * factor);
    const place = log ? values.map(Math.log10) : values;
    const from = Math.min(...place), to = Math.max(...place);
    const extent = to - from;
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => from + share * extent);
    const narrow = innerWidth < 560;
    return {
      color: place,
      cmin: extent ? from : from - 1,
      cmax: extent ? to : to + 1,
      colorscale: [0, 1, 2, 3, 4].map((step) => [step / 4, colour(`scale-${step}`)]),
      reversescale: figures[at].more,
      showscale: extent > 0,
      colorbar: {
        title: { text: `${words}${unit ? ` (${unit})` : ""}`, side: narrow ? "top" : "right", font: { size: 12 } },
        thickness: 11,
        outlinewidth: 0,
        tickvals: ticks,
        ticktext: ticks.map((tick) => number(log ? 10 ** tick : tick, 3)),
        ...(narrow ? { orientation: "h", y: -0.2, yanchor: "top", len: 1 } : { x: 1.01, len: 0.95 }),
      },
    };
  }

  function sizes() {
    const at = index[state.size];
    if (at === undefined) return points.map(() => 11);
    const values = points.map((_, point) => signed(at, point));
    const from = Math.min(...values), extent = Math.max(...values) - from;
    return values.map((value) => (extent ? 19 - 12 * (value - from) / extent : 11));
  }

  const kinds = ["cluster", "precision"].map((key) => [...new Set(points.map((point) => point[key]))]);
  const kind = kinds[0].length > 1 ? "cluster" : "precision";
  const symbols = ["circle", "square", "triangle-up", "pentagon", "hexagon", "cross"];

  const escaped = (text) => String(text).replace(/[&<>]/g, (sign) => `&#${sign.charCodeAt(0)};`);
  const wrapped = (text) => escaped(text).split(" · ").reduce((lines, part) => {
    const last = lines[lines.length - 1];
    if (last && last.length + part.length < 46) lines[lines.length - 1] = `${last} · ${part}`;
    else lines.push(part);
    return lines;
  }, []).join("<br>");

  function hover(point) {
    const { layout, mechanisms, cluster, figures: values, extrapolated } = points[point];
    const lines = axes.map((name) => {
      const at = index[name];
      const ends = between(at, values[at]);
      return `${figures[at].words}: <b>${escaped(shown(at, values[at][middle]))}</b>${ends ? `  (${ends})` : ""}`;
    });
    const where = kind === "cluster" ? `${escaped(cluster)}<br>` : "";
    return `<b>point ${point + 1}</b><br>${lines.join("<br>")}<br><br>${where}${wrapped(layout)}<br>${wrapped(mechanisms)}${extrapolated.length ? "<br><br>extrapolated" : ""}`;
  }

  function errors(at, some, colour) {
    const { factor } = figures[at];
    const ends = some.map((point) => points[point].figures[at].map((value) => value * factor));
    return {
      type: "data", symmetric: false, thickness: 1, width: 0, color: colour,
      array: ends.map((three) => three[high] - three[middle]),
      arrayminus: ends.map((three) => three[middle] - three[low]),
    };
  }

  function axis(at, colour) {
    const { words, unit, log } = figures[at];
    const values = points.flatMap(({ figures: own }) => (state.bars ? own[at] : [own[at][middle]]));
    const wide = Math.max(...values) / Math.min(...values) > 20;
    return {
      title: { text: `${words}${unit ? ` (${unit})` : ""}`, standoff: 8 },
      type: log ? "log" : "linear",
      ...(log ? (wide ? { dtick: 1 } : ticks(values, figures[at].factor)) : {}),
      gridcolor: colour("grid"), zerolinecolor: colour("grid"), linecolor: colour("line"),
      automargin: true, tickangle: 0, showline: true, ticks: "outside", tickcolor: colour("line"),
    };
  }

  // A logarithmic axis of less than a decade labels 1, 2, 5 only: too few to read a value.
  function ticks(values, factor) {
    const from = Math.min(...values) * factor, to = Math.max(...values) * factor;
    if (to > 3 * from) {
      const powers = [-1, 0, 1, 2].map((shift) => 10 ** (Math.floor(Math.log10(from)) + shift));
      const round = powers.flatMap((power) => [1, 1.5, 2, 3, 4, 5, 6, 8].map((m) => m * power));
      return { tickvals: round, ticktext: round.map((value) => number(value, 3)) };
    }
    const rough = (to - from) / 6 || from;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((each) => each >= rough);
    const places = [];
    for (let value = Math.max(step, Math.floor(from / step - 1) * step); value <= to + step; value += step) {
      places.push(value);
    }
    return { tickvals: places, ticktext: places.map((value) => number(value, 4)) };
  }

  function edge(x, y) {
    // The front of the two axes alone, as steps.
    const order = [...all].sort((a, b) => signed(x, a) - signed(x, b) || signed(y, a) - signed(y, b));
    const kept = [];
    for (const point of order) {
      if (!kept.length || signed(y, point) < signed(y, kept[kept.length - 1])) kept.push(point);
    }
    return kept;
  }

  function draw() {
    const colour = style();
    const x = index[state.x], y = index[state.y], c = index[state.colour];
    const at = (some, which) => some.map((point) => points[point].figures[which][middle] * figures[which].factor);
    const scale = coloured(c, colour);
    const size = sizes();
    const base = { type: "scatter", hoverinfo: "skip", showlegend: false };
    const border = edge(x, y);
    const within = points.map((_, point) => inside(point));
    const traces = [{
      ...base, mode: "lines", x: at(border, x), y: at(border, y),
      line: { color: colour("muted"), width: 1.2, dash: "dot", shape: "hv" },
    }];
    const picked = choice();
    const marked = [knee, state.point, ...(limited() && picked >= 0 ? [picked] : [])];
    const barred = state.bars ? all : [...new Set(marked)];
    traces.push({
      ...base, mode: "markers", x: at(barred, x), y: at(barred, y),
      marker: { size: 1, opacity: 0 },
      error_x: errors(x, barred, colour("muted")), error_y: errors(y, barred, colour("muted")),
      opacity: state.bars ? 0.45 : 0.9,
    });
    traces.push({
      type: "scatter", mode: "markers", x: at(all, x), y: at(all, y), name: "front",
      showlegend: false, text: all.map(hover), hovertemplate: "%{text}<extra></extra>",
      marker: {
        ...scale, size, opacity: within.map((is) => (is ? 0.95 : 0.16)),
        symbol: points.map((point) => symbols[kinds[kind === "cluster" ? 0 : 1].indexOf(point[kind]) % symbols.length]),
        line: { color: colour("panel"), width: 1 },
      },
    });
    const ring = (some, symbol, grow, name, width) => ({
      ...base, mode: "markers", name, x: at(some, x), y: at(some, y),
      marker: { symbol, size: some.map((point) => size[point] + grow), color: colour("text"), line: { width, color: colour("text") } },
    });
    traces.push(ring([state.point], "circle-open", 9, "shown below", 2));
    traces.push(ring([knee], "diamond-open", 14, "knee", 1.8));
    if (limited() && picked >= 0) {
      const star = ring([picked], "star", 5, "within the limits", 1.5);
      star.marker.color = colour("accent");
      star.marker.line.color = colour("panel");
      traces.push(star);
    }
    const lines = [];
    for (const [name, bound] of Object.entries(state.limits)) {
      const at = bound * figures[index[name]].factor;
      const line = { color: colour("accent"), width: 1.3, dash: "dash" };
      if (name === state.x) lines.push({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line, layer: "below" });
      if (name === state.y) lines.push({ type: "line", y0: at, y1: at, xref: "paper", x0: 0, x1: 1, line, layer: "below" });
    }
    const narrow = innerWidth < 560;
    Plotly.react("plot", traces, {
      autosize: true,
      margin: { l: narrow ? 44 : 62, r: narrow ? 10 : 20, t: 12, b: narrow ? 96 : 50 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("text"), size: 12.5, family: getComputedStyle(document.body).fontFamily },
      hovermode: "closest",
      hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), align: "left", font: { color: colour("text"), size: 12, family: getComputedStyle(document.body).fontFamily } },
      xaxis: { ...axis(x, colour), uirevision: state.x }, yaxis: { ...axis(y, colour), uirevision: state.y },
      shapes: lines, uirevision: "kept",
    }, {
      responsive: true, displaylogo: false,
      displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
    });
    caption(x, y, c);
  }

  function caption(x, y, c) {
    const parts = [];
    const mark = (sign, words) => parts.push(node("span", { class: "legend" }, node("b", {}, sign), ` ${words}`));
    mark("◇", "knee");
    mark("○", "shown below");
    if (limited()) mark("★", "best within the limits");
    mark("┄", "edge of the front in these two figures");
    const size = figures[index[state.size]];
    if (size && new Set(points.map((point) => point.figures[index[state.size]][middle])).size > 1) {
      mark("⬤", `the larger, the ${size.more ? "more" : "less"} ${size.words}`);
    }
    const names = kinds[kind === "cluster" ? 0 : 1];
    if (names.length > 1) names.forEach((name, at) => mark("●■▲⬟⬢✚"[at % 6], name));
    mark("─", `interval that covers ${coverage} %`);
    element("caption").replaceChildren(...parts);
    const words = (at) => figures[at].words;
    element("plot").setAttribute("aria-label",
      `${points.length} points: ${words(x)} across, ${words(y)} up, ${words(c)} as colour`);
  }

  return { draw };
})();
