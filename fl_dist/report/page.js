"use strict";

(() => {
  const AXES = { rounds: "round", gigabytes: "sent to and from clients (GB)", passes: "passes", minutes: "minutes",
    local_minutes: "minutes of local training" };
  const REST = { least: 2000, most: 10000, times: 3 }; // milliseconds between two questions, and how often the answer's own
  const HEIGHTS = { small: 210, wide: 320, "": 280 };
  const PAPER = 660; // pixels across a printed page
  const LIGHT = { ink: "#1c2126", faint: "#626b74", rule: "#e4e7ea" };
  const DARK = { ink: "#e4e7ea", faint: "#9aa4ad", rule: "#30363c" };

  const $ = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const charts = new Map(); // by name: what is on the page
  const chosen = new Map(); // by the name of a choice: the label that was chosen
  const hidden = new Set(); // names of rows that are not drawn
  const shownSections = new Map(); // by id: what it was built from
  let data = JSON.parse($("data").textContent);
  let axis = "rounds";
  let printing = false;

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // Charts

  const seen = new IntersectionObserver(
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
    const known = charts.get(name);
    if (known) return known.node;
    const plot = make("div", { class: "plot" });
    const node = make("figure", {}, make("figcaption"), plot);
    node.dataset.name = name;
    const figure = data.figures[name];
    plot.style.height = `${figure.height || HEIGHTS[kind]}px`;
    charts.set(name, { name, kind, node, plot, stale: true, visible: false });
    seen.observe(node);
    return node;
  }

  function forget(name) {
    const chart = charts.get(name);
    if (!chart) return;
    seen.unobserve(chart.node);
    Plotly.purge(chart.plot);
    charts.delete(name);
  }

  function draw(chart) {
    const figure = data.figures[chart.name];
    if (!chart.stale || !figure || !chart.node.isConnected) return;
    chart.stale = false;
    const height = figure.height || HEIGHTS[chart.kind];
    chart.plot.style.height = `${height}px`;
    const without = new Set();
    const traces = figure.data.map((trace) => drawn(trace, figure, without)).filter(Boolean);
    caption(chart, figure, without);
    const buttons = ["toImage", figure.layout.scene ? "resetCameraDefault3d" : "resetScale2d"];
    const config = { responsive: true, displaylogo: false, modeBarButtons: [buttons] };
    const made = layout(figure);
    if (printing) made.width = Math.min(chart.plot.clientWidth, PAPER);
    Plotly.react(chart.plot, traces, made, config);
  }

  function caption(chart, figure, without) {
    const head = chart.node.firstChild;
    head.replaceChildren(figure.title);
    if (without.size) {
      head.append(make("span", { class: "note" }, `${axis} unknown: ${[...without].join(", ")}`));
    }
    if (figure.keys) head.append(make("div", { class: "keys" }, ...figure.keys.map(keyNode)));
  }

  function keyNode([name, colour]) {
    const swatch = make("i");
    swatch.style.background = visible(colour);
    return make("span", {}, swatch, name);
  }

  function drawn(trace, figure, without) {
    const copy = { ...trace };
    if (hidden.has(trace.legendgroup)) copy.visible = false;
    if (figure.over && axis !== "rounds") {
      const places = data.places[trace.meta.place];
      if (!places || !places[axis]) {
        without.add(trace.legendgroup);
        return null;
      }
      copy.x = trace.x.map((round) => between(places.rounds, places[axis], round));
    }
    return theme() === DARK ? recoloured(copy) : copy;
  }

  // Where a round lies, from the places of rounds before and after it.
  function between(rounds, places, round) {
    let low = 0;
    let high = rounds.length - 1;
    if (round <= rounds[low]) return places[low];
    if (round >= rounds[high]) return places[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (rounds[middle] <= round) low = middle;
      else high = middle;
    }
    const share = (round - rounds[low]) / (rounds[high] - rounds[low]);
    return places[low] + share * (places[high] - places[low]);
  }

  function recoloured(value) {
    if (typeof value === "string") return data.dark[value] || value;
    if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, recoloured(inner)]));
  }

  // Outside of charts: what dark ground would hide is drawn like text.
  const visible = (colour) => (colour in data.dark ? "currentColor" : colour);

  const theme = () => (dark.matches && !printing ? DARK : LIGHT);

  function layout(figure) {
    const { ink, faint, rule } = theme();
    const own = figure.layout;
    const line = { gridcolor: rule, zeroline: false, linecolor: faint, tickfont: { color: faint }, automargin: true };
    const made = {
      ...own,
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif", size: 11.5, color: ink },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 46, r: 12, t: 10, b: 40 },
      hoverlabel: { align: "left", namelength: -1 },
      hovermode: "closest",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: faint, activecolor: ink },
      uirevision: figure.over ? axis : "same",
      showlegend: false,
      autosize: true,
    };
    for (const name of Object.keys(own).filter((key) => /^[xy]axis\d*$/.test(key))) made[name] = { ...line, ...own[name] };
    made.xaxis = { ...line, ...(own.xaxis || {}) };
    made.yaxis = { ...line, ...(own.yaxis || {}) };
    if (figure.over) made.xaxis.title = { text: AXES[axis], standoff: 6 };
    if (figure.over) made.xaxis.rangemode = "tozero";
    if (own.scene) {
      const depth = { gridcolor: rule, zerolinecolor: rule, color: faint };
      made.scene = { xaxis: depth, yaxis: depth, zaxis: { ...depth, ...own.scene.zaxis }, aspectmode: "cube" };
      made.scene.camera = { eye: { x: 1.55, y: 1.55, z: 1.1 } };
      made.margin = { l: 0, r: 0, t: 0, b: 0 };
    }
    return made;
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
      const node = make("div");
      node.innerHTML = part.html;
      return node;
    }
    if (part.charts) {
      return make("div", { class: `charts ${part.kind}` }, ...part.charts.map((name) => chartNode(name, part.kind)));
    }
    return choiceNode(part);
  }

  function choiceNode(part) {
    const select = make("select");
    for (const option of part.options) select.append(make("option", {}, option.label));
    const known = part.options.findIndex((option) => option.label === chosen.get(part.choice));
    select.selectedIndex = Math.max(0, known);
    const inner = make("div");
    const show = () => {
      const option = part.options[select.selectedIndex];
      const wanted = new Set(namesIn(option.parts));
      for (const other of part.options) for (const name of namesIn(other.parts)) if (!wanted.has(name)) forget(name);
      inner.replaceChildren(...option.parts.map(partNode));
    };
    select.addEventListener("change", () => {
      chosen.set(part.choice, part.options[select.selectedIndex].label);
      show();
    });
    show();
    return make("div", {}, make("label", { class: "choice" }, part.label, select), inner);
  }

  function namesIn(parts) {
    return parts.flatMap((part) => part.charts || (part.options || []).flatMap((option) => namesIn(option.parts)));
  }

  function sectionNode(section) {
    const node = make("section", { id: section.id }, make("h2", {}, section.title));
    if (section.note) node.append(make("p", { class: "note" }, section.note));
    if (section.over) node.append(make("div", { class: "bar" }, axisNode(), legendNode()));
    node.append(...section.parts.map(partNode));
    return node;
  }

  function axisNode() {
    const group = make("span", { class: "axis", role: "group", "aria-label": "horizontal axis" });
    for (const name of Object.keys(AXES)) {
      const button = make("button", { type: "button", "data-axis": name, "aria-pressed": name === axis }, name);
      button.addEventListener("click", () => {
        axis = name;
        for (const other of document.querySelectorAll("[data-axis]")) {
          other.setAttribute("aria-pressed", other.dataset.axis === axis);
        }
        redraw((chart) => data.figures[chart.name] && data.figures[chart.name].over);
      });
      group.append(button);
    }
    return group;
  }

  function legendNode() {
    const legend = make("span", { class: "legend" });
    for (const style of data.styles) {
      const button = make("button", { type: "button", "aria-pressed": !hidden.has(style.name) }, sample(style), style.name);
      button.dataset.row = style.name;
      button.addEventListener("click", () => toggle(style.name));
      legend.append(button);
    }
    return legend;
  }

  function sample(style) {
    const dashes = { solid: "", dash: "6 3", dot: "2 2", dashdot: "6 2 2 2" };
    const space = "http://www.w3.org/2000/svg";
    const picture = document.createElementNS(space, "svg");
    const line = document.createElementNS(space, "line");
    for (const [name, value] of [["width", 20], ["height", 4]]) picture.setAttribute(name, value);
    const attributes = { x1: 0, x2: 20, y1: 2, y2: 2, "stroke-width": 2.5, stroke: visible(style.colour) };
    for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, value);
    line.setAttribute("stroke-dasharray", dashes[style.dash]);
    picture.append(line);
    return picture;
  }

  function toggle(name) {
    if (!hidden.delete(name)) hidden.add(name);
    for (const button of document.querySelectorAll(".legend button")) {
      button.setAttribute("aria-pressed", !hidden.has(button.dataset.row));
    }
    redraw((chart) => (data.figures[chart.name]?.data || []).some((trace) => trace.legendgroup === name));
  }

  // The page as a whole; sections that are the same stay as they are, others keep their charts, folds and scrolls.

  function show() {
    document.title = data.title;
    $("title").textContent = data.title;
    say(`${data.live ? "updated" : "made"} ${data.made}`);
    const before = shownSections;
    const links = data.sections.map((section) => make("a", { href: `#${section.id}` }, section.title));
    $("nav").replaceChildren(...links);
    for (const id of [...before.keys()]) if (!data.sections.some((section) => section.id === id)) drop(id);
    let previous = null;
    for (const section of data.sections) {
      const text = JSON.stringify([section, section.over ? data.styles : null]);
      let node = $(section.id);
      if (before.get(section.id) !== text) {
        const fresh = sectionNode(section);
        if (node) {
          restore(node, fresh);
          node.replaceWith(fresh);
        }
        node = fresh;
        before.set(section.id, text);
      }
      const place = previous ? previous.nextSibling : $("report").firstChild;
      if (node !== place) $("report").insertBefore(node, place);
      previous = node;
    }
    const wanted = new Set(data.sections.flatMap((section) => namesIn(section.parts)));
    for (const name of [...charts.keys()]) if (!wanted.has(name)) forget(name);
    for (const box of document.querySelectorAll(".box[data-left]")) {
      box.scrollLeft = Number(box.dataset.left);
      delete box.dataset.left;
    }
  }

  function drop(id) {
    $(id).remove();
    shownSections.delete(id);
  }

  function restore(old, fresh) {
    const open = new Set([...old.querySelectorAll("details[open] > summary")].map((node) => node.textContent));
    for (const node of fresh.querySelectorAll("details > summary")) node.parentNode.open = open.has(node.textContent);
    const boxes = [...old.querySelectorAll(".box")];
    fresh.querySelectorAll(".box").forEach((box, k) => {
      if (boxes[k] && boxes[k].scrollLeft) box.dataset.left = boxes[k].scrollLeft;
    });
  }

  const say = (state) => {
    $("told").textContent = `${data.told} · ${state} · fl_dist ${data.version}`;
  };

  // Following

  async function follow(mark) {
    const began = performance.now();
    let next = mark;
    let took = 0;
    try {
      const answer = await fetch("data", { headers: mark ? { "If-None-Match": mark } : {}, cache: "no-store" });
      took = performance.now() - began;
      if (answer.status === 200) {
        take(await answer.json());
        next = answer.headers.get("ETag");
      } else if (answer.status !== 304) {
        say(`not updated since ${data.made}: ${(await answer.text()).slice(0, 300)}`);
      } else {
        say(`updated ${data.made}`);
      }
    } catch (error) {
      say(`the server has ended; this is how it was at ${data.made}`);
    }
    // The longer an answer takes, the longer the runs are left in peace.
    setTimeout(() => follow(next), Math.min(REST.most, Math.max(REST.least, REST.times * took)));
  }

  // An answer has only the figures that changed, and the names of all.
  function take(answer) {
    const figures = {};
    for (const name of answer.names) figures[name] = answer.figures[name] || data.figures[name];
    data = { ...answer, figures, live: true };
    show();
    redraw((chart) => chart.name in answer.figures);
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
  if (data.live) follow(data.mark);
})();
