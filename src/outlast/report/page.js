(() => {
  "use strict";
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figure-data").textContent);
  const darkScreen = matchMedia("(prefers-color-scheme: dark)");
  const choices = {};
  const config = {
    responsive: true,
    displaylogo: false,
    // Where nothing can hover the bar would always cover a part of the picture.
    displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
  };

  // Figures name their colours as var(--name); plotly wants the colours themselves.
  function resolve(value, style) {
    if (typeof value === "string") {
      const found = /^var\((--[\w-]+)\)$/.exec(value);
      return found ? style.getPropertyValue(found[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((each) => resolve(each, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.entries(value).map(([key, inner]) => [key, resolve(inner, style)])
    );
  }

  function draw(plot) {
    const name = plot.dataset.figure;
    const { data, layout, views, keyedBelow } = figures[name];
    const { view = 0, scale = null } = choices[name] || {};
    const style = getComputedStyle(root);
    const traces = resolve(data, style);
    const drawn = resolve(layout, style);
    drawn.font.family = getComputedStyle(document.body).fontFamily;
    if (views.length) {
      traces.forEach((trace, index) => { trace.x = views[view].x[index]; });
      drawn.xaxis.title.text = views[view].title;
      drawn.xaxis.uirevision = views[view].title;
    }
    if (keyedBelow && innerWidth < 560) drawn.showlegend = false;
    if (scale) {
      drawn.yaxis.type = scale;
      drawn.yaxis.uirevision = scale;
    }
    Plotly.react(plot, traces, drawn, config);
  }

  const plots = [...document.querySelectorAll(".plot")];
  const drawAll = () => plots.forEach(draw);

  if (typeof Plotly === "undefined") {
    document.getElementById("no-library").hidden = false;
    for (const plot of plots) plot.hidden = true;
    plots.length = 0;
  }

  for (const button of document.querySelectorAll(".switch button")) {
    button.addEventListener("click", () => {
      const plot = button.closest("figure").querySelector(".plot");
      const choice = (choices[plot.dataset.figure] ||= {});
      if (button.dataset.view) choice.view = Number(button.dataset.view);
      if (button.dataset.scale) choice.scale = button.dataset.scale;
      for (const each of button.parentElement.children) {
        each.setAttribute("aria-pressed", String(each === button));
      }
      draw(plot);
    });
  }

  document.getElementById("theme").addEventListener("click", () => {
    const shown = root.dataset.theme || (darkScreen.matches ? "dark" : "light");
    root.dataset.theme = shown === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("outlast-theme", root.dataset.theme);
    } catch {
      // A page opened as a file may have no storage; the choice then lasts until it is closed.
    }
    drawAll();
  });
  darkScreen.addEventListener("change", drawAll);

  // The style sheet prints on white whatever the screen shows; the pictures follow.
  let beforePrint = null;
  addEventListener("beforeprint", () => {
    beforePrint = root.dataset.theme || "";
    root.dataset.theme = "light";
    drawAll();
  });
  addEventListener("afterprint", () => {
    if (beforePrint) root.dataset.theme = beforePrint;
    else delete root.dataset.theme;
    drawAll();
  });

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const text = button.parentElement.querySelector("pre");
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(text);
        button.textContent = "selected";
      }
    });
  }

  drawAll();
})();
