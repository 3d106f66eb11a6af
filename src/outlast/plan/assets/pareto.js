// Cards, limits, the table, and the point that is looked at.
(() => {
  "use strict";
  const {
    root, figures, axes, points, knee, index, middle, state, all, element, node, number, shown, between,
    inside, least, choice, limited, named,
  } = plan;
  const { draw } = picture;
  const darkScreen = matchMedia("(prefers-color-scheme: dark)");

  // Cards: the points that most readers look for.
  function cards() {
    const found = [["◆", "Knee", knee]];
    const picked = choice();
    if (limited() && picked >= 0) {
      const words = figures[index[state.minimise]].words;
      found.unshift(["★", `Within the limits: ${state.minimise === "headroom_bytes" ? "most" : "least"} ${words}`, picked]);
    }
    for (const name of axes) {
      found.push(["", `Least ${figures[index[name]].words}`, least(name, all)]);
    }
    const seen = new Map();
    for (const [mark, words, point] of found) {
      const before = seen.get(point);
      const lower = `${words[0].toLowerCase()}${words.slice(1)}`;
      if (before && !before.words.includes(lower)) before.words += `; ${lower}`;
      if (before) before.mark += mark;
      else seen.set(point, { mark, words });
    }
    element("cards").replaceChildren(...[...seen].map(([point, { mark, words }]) => {
      const name = node("span", { class: "name" });
      if (mark) name.append(node("b", {}, mark));
      name.append(words);
      const value = node("span", { class: "value" });
      for (const axis of axes.slice(0, 2)) {
        const at = index[axis];
        const { factor, unit } = figures[at];
        value.append(node("span", {},
          number(points[point].figures[at][middle] * factor, 3), " ", node("small", {}, unit)));
      }
      const card = node("button", {
        type: "button", class: "card", "aria-pressed": String(point === state.point),
      }, name, value,
      node("span", { class: "words" }, named(point)),
      node("span", { class: "words" }, points[point].mechanisms));
      card.addEventListener("click", () => look(point));
      return card;
    }));
  }

  // Limits: one field per axis, in the unit that is shown.
  function limitFields() {
    const names = [...new Set([...axes, ...Object.keys(state.limits),
      ...["money", "device_hours"].filter((name) => name in index)])];
    const select = node("select", { id: "minimise" }, ...figures.map(({ name, words, more }) =>
      node("option", { value: name }, `${more ? "most" : "least"} ${words}`)));
    select.value = state.minimise;
    const fields = names.map((name) => {
      const { words, unit, factor, more } = figures[index[name]];
      const field = node("input", {
        type: "number", step: "any", inputmode: "decimal", placeholder: "no limit", "data-limit": name,
      });
      if (name in state.limits) field.value = Number((state.limits[name] * factor).toPrecision(6));
      const said = `${words}${unit ? `, ${unit}` : ""} ${more ? "≥" : "≤"} `;
      return node("label", {}, said, field);
    });
    element("limits").replaceChildren(node("label", {}, "best: ", select), ...fields);
    element("limits").addEventListener("submit", (event) => event.preventDefault());
    element("limits").addEventListener("input", (event) => {
      if (event.target.id === "minimise") state.minimise = event.target.value;
      const name = event.target.dataset.limit;
      if (name) {
        const value = event.target.valueAsNumber;
        if (Number.isFinite(value)) state.limits[name] = value / figures[index[name]].factor;
        else delete state.limits[name];
      }
      const picked = choice();
      if (picked >= 0) state.point = picked;
      refresh();
    });
  }

  function answer() {
    const place = element("answer");
    const picked = choice();
    place.classList.toggle("none", picked < 0);
    if (!limited()) {
      place.textContent = "";
      return;
    }
    if (picked >= 0) {
      const count = all.filter(inside).length;
      place.textContent = `★ ${count} of ${points.length} points keep to the limits; the best of them is point ${picked + 1}.`;
      return;
    }
    for (const [name, bound] of Object.entries(state.limits)) {
      const at = index[name];
      const best = least(name, all);
      const value = points[best].figures[at][middle];
      if (figures[at].more ? value < bound : value > bound) {
        place.textContent = `No point keeps to ${shown(at, bound)} of ${figures[at].words}: the ${figures[at].more ? "most" : "least"} is ${shown(at, value)} (point ${best + 1}).`;
        return;
      }
    }
    place.textContent = "Each limit can be kept alone, but not all together.";
  }

  // The point that is looked at.
  function list(title, entries) {
    const made = node("dl", {});
    for (const [name, value, more] of entries) {
      const definition = node("dd", {}, value);
      if (more) definition.append(node("small", {}, more));
      made.append(node("div", {}, node("dt", {}, name), definition));
    }
    return node("div", {}, node("h3", {}, title), made);
  }

  const plain = (value) => {
    if (Array.isArray(value)) return value.join(" + ");
    if (typeof value === "boolean") return value ? "yes" : "no";
    return typeof value === "number" ? number(value, 6) : String(value);
  };
  const fields = (values) => Object.entries(values).map(([name, value]) => [name.replaceAll("_", " "), plain(value)]);

  function details() {
    const { point } = state;
    const { configuration, settings, layout, figures: values, cluster, extrapolated } = points[point];
    const beyond = extrapolated.length
      ? [node("p", { class: "refused" }, `extrapolated: ${extrapolated.join("; ")}`)] : [];
    const measured = figures.map(({ words }, at) => [words, shown(at, values[at][middle]), between(at, values[at])]);
    element("point").replaceChildren(
      node("div", { class: "title" }, node("h2", {}, `Point ${point + 1}`), node("p", {}, layout)),
      ...beyond,
      node("div", { class: "facts" },
        list("Predicted figures", measured),
        list("Configuration", [["cluster", cluster], ...fields(configuration)]),
        list("Mechanisms", fields({
          ...settings,
          checkpoint_seconds: settings.checkpoint_seconds || "best interval",
          clock_mhz: settings.clock_mhz || "as the devices choose",
        }))),
    );
  }

  // The table.
  const body = document.querySelector("tbody");
  const rows = [...body.rows];
  const rowOf = Object.fromEntries(rows.map((row) => [row.dataset.point, row]));
  function table() {
    for (const row of rows) {
      const point = Number(row.dataset.point);
      row.classList.toggle("chosen", point === state.point);
      row.classList.toggle("outside", !inside(point));
      const marks = (point === knee ? "◆" : "") + (limited() && point === choice() ? "★" : "");
      row.querySelector("button").textContent = `${point + 1} ${marks}`.trim();
    }
  }
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row) look(Number(row.dataset.point));
  });
  for (const button of document.querySelectorAll("[data-sort]")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const at = Number(button.dataset.sort);
      const value = (point) => points[point].figures[at][middle];
      const order = [...all].sort((a, b) => (value(a) - value(b)) * (down ? -1 : 1) || a - b);
      body.append(...order.map((point) => rowOf[point]));
    });
  }

  function look(point) {
    state.point = point;
    refresh();
  }
  function refresh() {
    cards();
    answer();
    details();
    table();
    draw();
  }

  for (const id of ["x", "y", "colour", "size"]) {
    const select = element(id);
    if (id === "size") select.append(node("option", { value: "" }, "all alike"));
    select.append(...figures.map(({ name, words }) => node("option", { value: name }, words)));
    select.value = state[id];
    select.addEventListener("change", () => {
      state[id] = select.value;
      draw();
    });
  }
  element("bars").checked = state.bars;
  element("bars").addEventListener("change", () => {
    state.bars = element("bars").checked;
    draw();
  });

  element("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (darkScreen.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("outlast-theme", root.dataset.theme);
    } catch {
      // A page opened as a file may have no storage; the choice then lasts until it is closed.
    }
    draw();
  });
  darkScreen.addEventListener("change", draw);

  // The style sheet prints on white whatever the screen shows; the picture follows.
  let beforePrint = null;
  addEventListener("beforeprint", () => {
    beforePrint = root.dataset.theme || "";
    root.dataset.theme = "light";
    draw();
  });
  addEventListener("afterprint", () => {
    if (beforePrint) root.dataset.theme = beforePrint;
    else delete root.dataset.theme;
    draw();
  });

  limitFields();
  const first = choice();
  if (limited() && first >= 0) state.point = first;
  refresh();
  element("plot").on("plotly_click", ({ points: hit }) => {
    const found = hit.find((each) => each.data.name === "front");
    if (found) look(found.pointNumber);
  });
})();
