"use strict";

(() => {
  const POLL = { min: 2000, max: 10000, factor: 3 }; // milliseconds between two requests; factor of the response time
  const HEIGHTS = { small: 210, wide: 320, "": 280 };
  const PRINT_WIDTH = 660; // pixels across a printed page
  const LIGHT = { text: "#1c2126", muted: "#626b74", grid: "#e4e7ea" };
  const DARK = { text: "#e4e7ea", muted: "#9aa4ad", grid: "#30363c" };

  const $ = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const charts = new Map(); // by name: those on the page
  const chosen = new Map(); // by the name of a choice: its label
  const hidden = new Set(); // rows that are not drawn
  const shownSections = new Map(); // by id: what it was built from
  let data = JSON.parse($("data").textContent);
  let axis = "rounds";
  let printing = false;

  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // Charts

  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const chart = charts.get(entry.target.dataset.name);
        if (chart) chart.visible = entry.isIntersecting;
        if (chart && chart.visible) draw(chart);
      }
    },
    { rootMargin: "500px" },
  );

  function chartNode(name, kind) {
    const existing = charts.get(name);
    if (existing) return existing.node;
    const plot = element("div", { class: "plot" });
    const node = element("figure", {}, element("figcaption"), plot);
    node.dataset.name = name;
    const figure = data.figures[name];
    plot.style.height = `${figure.height || HEIGHTS[kind]}px`;
    charts.set(name, { name, kind, node, plot, stale: true, visible: false });
    observer.observe(node);
    return node;
  }

  function removeChart(name) {
    const chart = charts.get(name);
    if (!chart) return;
    observer.unobserve(chart.node);
    Plotly.purge(chart.plot);
    charts.delete(name);
  }

  function draw(chart) {
    const figure = data.figures[chart.name];
    if (!chart.stale || !figure || !chart.node.isConnected) return;
    chart.stale = false;
    const height = figure.height || HEIGHTS[chart.kind];
    chart.plot.style.height = `${height}px`;
    const unknown = new Set();
    const traces = figure.data.map((trace) => prepareTrace(trace, figure, unknown)).filter(Boolean);
    caption(chart, figure, unknown);
    const buttons = ["toImage", figure.layout.scene ? "resetCameraDefault3d" : "resetScale2d"];
    const config = { responsive: true, displaylogo: false, modeBarButtons: [buttons] };
    const settings = layout(figure);
    if (printing) settings.width = Math.min(chart.plot.clientWidth, PRINT_WIDTH);
    Plotly.react(chart.plot, traces, settings, config);
  }

  function caption(chart, figure, unknown) {
    const head = chart.node.firstChild;
    head.replaceChildren(figure.title);
    if (unknown.size) {
      head.append(element("span", { class: "note" }, `${axis} unknown: ${[...unknown].join(", ")}`));
    }
    if (figure.keys) head.append(element("div", { class: "keys" }, ...figure.keys.map(keyNode)));
  }

  function keyNode([name, colour]) {
    const swatch = element("i");
    swatch.style.background = cssColour(colour);
    return element("span", {}, swatch, name);
  }

  function prepareTrace(trace, figure, unknown) {
    const copy = { ...trace };
    if (hidden.has(trace.legendgroup)) copy.visible = false;
    if (figure.overRounds && axis !== "rounds") {
      const axes = data.axes[trace.meta.axes];
      if (!axes || !axes[axis]) {
        unknown.add(trace.legendgroup);
        return null;
      }
      copy.x = trace.x.map((round) => interpolate(axes.rounds, axes[axis], round));
    }
    return theme() === DARK ? recolour(copy) : copy;
  }

  // The value at a round, from those at the rounds before and after it.
  function interpolate(rounds, values, round) {
    let low = 0;
    let high = rounds.length - 1;
    if (round <= rounds[low]) return values[low];
    if (round >= rounds[high]) return values[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (rounds[middle] <= round) low = middle;
      else high = middle;
    }
    const share = (round - rounds[low]) / (rounds[high] - rounds[low]);
    return values[low] + share * (values[high] - values[low]);
  }

  function recolour(value) {
    if (typeof value === "string") return data.darkColours[value] || value;
    if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, recolour(inner)]));
  }

  // Outside of charts: what a dark background would hide has the colour of text.
  const cssColour = (colour) => (colour in data.darkColours ? "currentColor" : colour);

  const theme = () => (dark.matches && !printing ? DARK : LIGHT);

  function layout(figure) {
    const { text, muted, grid } = theme();
    const own = figure.layout;
    const line = { gridcolor: grid, zeroline: false, linecolor: muted, tickfont: { color: muted }, automargin: true };
    const result = {
      ...own,
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif", size: 11.5, color: text },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 46, r: 12, t: 10, b: 40 },
      hoverlabel: { align: "left", namelength: -1 },
      hovermode: "closest",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: text },
      uirevision: figure.overRounds ? axis : "same",
      showlegend: false,
      autosize: true,
    };
    for (const name of Object.keys(own).filter((key) => /^[xy]axis\d*$/.test(key))) result[name] = { ...line, ...own[name] };
    result.xaxis = { ...line, ...(own.xaxis || {}) };
    result.yaxis = { ...line, ...(own.yaxis || {}) };
    if (figure.overRounds) result.xaxis.title = { text: data.axisLabels[axis], standoff: 6 };
    if (figure.overRounds) result.xaxis.rangemode = "tozero";
    if (own.scene) {
      const depth = { gridcolor: grid, zerolinecolor: grid, color: muted };
      result.scene = { xaxis: depth, yaxis: depth, zaxis: { ...depth, ...own.scene.zaxis }, aspectmode: "cube" };
      result.scene.camera = { eye: { x: 1.55, y: 1.55, z: 1.1 } };
      result.margin = { l: 0, r: 0, t: 0, b: 0 };
    }
    return result;
  }

  function redraw(which = () => true) {
    for (const chart of charts.values()) {
      if (!which(chart)) continue;
      chart.stale = true;
      if (chart.visible || printing) draw(chart);
    }
  }

  // Sections

  function partNode(part) {
    if (part.html !== undefined) {
      const node = element("div");
      node.innerHTML = part.html;
      return node;
    }
    if (part.charts) {
      return element("div", { class: `charts ${part.kind}` }, ...part.charts.map((name) => chartNode(name, part.kind)));
    }
    return choiceNode(part);
  }

  function choiceNode(part) {
    const select = element("select");
    for (const option of part.options) select.append(element("option", {}, option.label));
    const known = part.options.findIndex((option) => option.label === chosen.get(part.choice));
    select.selectedIndex = Math.max(0, known);
    const inner = element("div");
    const show = () => {
      const option = part.options[select.selectedIndex];
      const wanted = new Set(namesIn(option.parts));
      for (const other of part.options) for (const name of namesIn(other.parts)) if (!wanted.has(name)) removeChart(name);
      inner.replaceChildren(...option.parts.map(partNode));
    };
    select.addEventListener("change", () => {
      chosen.set(part.choice, part.options[select.selectedIndex].label);
      show();
    });
    show();
    return element("div", {}, element("label", { class: "choice" }, part.label, select), inner);
  }

  function namesIn(parts) {
    return parts.flatMap((part) => part.charts || (part.options || []).flatMap((option) => namesIn(option.parts)));
  }

  function sectionNode(section) {
    const node = element("section", { id: section.id }, element("h2", {}, section.title));
    if (section.note) node.append(element("p", { class: "note" }, section.note));
    if (section.overRounds) node.append(element("div", { class: "bar" }, axisNode(), legendNode()));
    node.append(...section.parts.map(partNode));
    return node;
  }

  function axisNode() {
    const group = element("span", { class: "axis", role: "group", "aria-label": "horizontal axis" });
    for (const name of Object.keys(data.axisLabels)) {
      const button = element("button", { type: "button", "data-axis": name, "aria-pressed": name === axis }, name);
      button.addEventListener("click", () => {
        axis = name;
        for (const other of document.querySelectorAll("[data-axis]")) {
          other.setAttribute("aria-pressed", other.dataset.axis === axis);
        }
        redraw((chart) => data.figures[chart.name] && data.figures[chart.name].overRounds);
      });
      group.append(button);
    }
    return group;
  }

  function legendNode() {
    const legend = element("span", { class: "legend" });
    for (const style of data.styles) {
      const button = element("button", { type: "button", "aria-pressed": !hidden.has(style.name) }, lineSample(style), style.name);
      button.dataset.row = style.name;
      button.addEventListener("click", () => toggle(style.name));
      legend.append(button);
    }
    return legend;
  }

  function lineSample(style) {
    const dashes = { solid: "", dash: "6 3", dot: "2 2", dashdot: "6 2 2 2" };
    const namespace = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(namespace, "svg");
    const line = document.createElementNS(namespace, "line");
    for (const [name, value] of [["width", 20], ["height", 4]]) svg.setAttribute(name, value);
    const attributes = { x1: 0, x2: 20, y1: 2, y2: 2, "stroke-width": 2.5, stroke: cssColour(style.colour) };
    for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, value);
    line.setAttribute("stroke-dasharray", dashes[style.dash]);
    svg.append(line);
    return svg;
  }

  function toggle(name) {
    if (!hidden.delete(name)) hidden.add(name);
    for (const button of document.querySelectorAll(".legend button")) {
      button.setAttribute("aria-pressed", !hidden.has(button.dataset.row));
    }
    redraw((chart) => (data.figures[chart.name]?.data || []).some((trace) => trace.legendgroup === name));
  }

  // The whole page: unchanged sections stay; the others keep their charts, open details and scroll positions.

  function show() {
    document.title = data.title;
    $("title").textContent = data.title;
    setStatus(`${data.live ? "updated" : "created"} ${data.time}`);
    const before = shownSections;
    const links = data.sections.map((section) => element("a", { href: `#${section.id}` }, section.title));
    $("nav").replaceChildren(...links);
    for (const id of [...before.keys()]) if (!data.sections.some((section) => section.id === id)) removeSection(id);
    let previous = null;
    for (const section of data.sections) {
      const text = JSON.stringify([section, section.overRounds ? data.styles : null]);
      let node = $(section.id);
      if (before.get(section.id) !== text) {
        const replacement = sectionNode(section);
        if (node) {
          copyState(node, replacement);
          node.replaceWith(replacement);
        }
        node = replacement;
        before.set(section.id, text);
      }
      const next = previous ? previous.nextSibling : $("report").firstChild;
      if (node !== next) $("report").insertBefore(node, next);
      previous = node;
    }
    const wanted = new Set(data.sections.flatMap((section) => namesIn(section.parts)));
    for (const name of [...charts.keys()]) if (!wanted.has(name)) removeChart(name);
    for (const box of document.querySelectorAll(".box[data-left]")) {
      box.scrollLeft = Number(box.dataset.left);
      delete box.dataset.left;
    }
  }

  function removeSection(id) {
    $(id).remove();
    shownSections.delete(id);
  }

  function copyState(old, replacement) {
    const open = new Set([...old.querySelectorAll("details[open] > summary")].map((node) => node.textContent));
    for (const node of replacement.querySelectorAll("details > summary")) node.parentNode.open = open.has(node.textContent);
    const boxes = [...old.querySelectorAll(".box")];
    replacement.querySelectorAll(".box").forEach((box, k) => {
      if (boxes[k] && boxes[k].scrollLeft) box.dataset.left = boxes[k].scrollLeft;
    });
  }

  const setStatus = (state) => {
    $("status").textContent = `${data.runCounts} · ${state} · fl_dist ${data.version}`;
  };

  // Updates

  async function poll(etag) {
    const start = performance.now();
    let next = etag;
    let duration = 0;
    try {
      const response = await fetch("data", { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store" });
      duration = performance.now() - start;
      if (response.status === 200) {
        update(await response.json());
        next = response.headers.get("ETag");
      } else if (response.status !== 304) {
        setStatus(`not updated since ${data.time}: ${(await response.text()).slice(0, 300)}`);
      } else {
        setStatus(`updated ${data.time}`);
      }
    } catch (error) {
      setStatus(`the server has ended; last updated ${data.time}`);
    }
    // The longer a response takes, the rarer the requests.
    setTimeout(() => poll(next), Math.min(POLL.max, Math.max(POLL.min, POLL.factor * duration)));
  }

  // An update has only the figures that changed, and the names of all.
  function update(changes) {
    const figures = {};
    for (const name of changes.figureNames) figures[name] = changes.figures[name] || data.figures[name];
    data = { ...changes, figures, live: true };
    show();
    redraw((chart) => chart.name in changes.figures);
  }

  dark.addEventListener("change", () => redraw());
  addEventListener("beforeprint", () => {
    printing = true;
    redraw();
  });
  addEventListener("afterprint", () => {
    printing = false;
    redraw();
  });
  show();
  if (data.live) poll(data.etag);
})();
