// What the page holds: figures and points, the limits in use, and questions to them.
const plan = (() => {
  "use strict";
  const root = document.documentElement;
  const { figures, axes, points, knee, limits, minimise, coverage } =
    JSON.parse(document.getElementById("content").textContent);
  const index = Object.fromEntries(figures.map((figure, at) => [figure.name, at]));
  const element = (id) => document.getElementById(id);
  const low = 0, middle = 1, high = 2;

  const number = (value, digits = 4) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-4 || size >= 1e12) return value.toExponential(digits - 1);
    return value.toLocaleString("en", { maximumSignificantDigits: digits });
  };
  const shown = (at, value, digits) => {
    const { factor, unit } = figures[at];
    return `${number(value * factor, digits)} ${unit}`.trim();
  };
  const between = (at, three) => three[low] === three[high] ? ""
    : `${number(three[low] * figures[at].factor, 3)} – ${number(three[high] * figures[at].factor, 3)}`;
  const signed = (at, point, end = middle) =>
    (figures[at].more ? -1 : 1) * points[point].figures[at][end];

  // What is in use: the axes, the limits, and the point that is looked at.
  const reliability = ["miss_probability", "lost_hours"].find((name) => axes.includes(name));
  const fallback = (wanted, other) => (wanted in index ? wanted : other);
  const state = {
    x: fallback("hours", axes[0]),
    y: fallback("kwh", axes[1] || fallback("device_hours", axes[0])),
    colour: reliability || axes[axes.length - 1],
    size: fallback("loss_difference", ""),
    bars: points.length <= 40,
    limits: { ...limits },
    minimise,
    point: knee,
  };

  const inside = (point) => Object.entries(state.limits).every(([name, bound]) => {
    const at = index[name];
    const value = points[point].figures[at][middle];
    return figures[at].more ? value >= bound : value <= bound;
  });

  function least(name, among) {
    const order = [name, ...axes.filter((axis) => axis !== name)].map((each) => index[each]);
    return among.reduce((best, point) => {
      if (best < 0) return point;
      for (const at of order) {
        const gap = signed(at, point) - signed(at, best);
        if (gap) return gap < 0 ? point : best;
      }
      return best;
    }, -1);
  }

  const all = points.map((_, point) => point);
  const choice = () => least(state.minimise, all.filter(inside));
  const limited = () => Object.keys(state.limits).length > 0;

  function node(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const several = new Set(points.map(({ cluster }) => cluster)).size > 1;
  const named = (point) =>
    several ? `${points[point].cluster} · ${points[point].layout}` : points[point].layout;

  return {
    root, figures, axes, points, knee, coverage, index, low, middle, high, state, all, element, node,
    number, shown, between, signed, inside, least, choice, limited, named,
  };
})();
