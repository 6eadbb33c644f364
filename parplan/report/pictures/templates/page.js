"use strict";
(() => {
  const data = JSON.parse(document.getElementById("blocks").textContent);
  const byId = (name) => document.getElementById(name);
  for (const hidden of document.querySelectorAll(".tools")) hidden.hidden = false;

  // ---- the layer table ----
  const table = byId("layers"), body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const cell = row.cells[column], text = cell.dataset.v ?? cell.textContent;
    return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
  };
  const compare = (one, other) =>
    typeof one === "number" && typeof other === "number" ? one - other
      : String(one).localeCompare(String(other), undefined, { numeric: true });
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const up = now ? now === "descending" : !head.classList.contains("number");
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [key(row, column), row]);
      rows.sort(([one], [other]) => (up ? 1 : -1) * compare(one, other));
      body.append(...rows.map(([, row]) => row));
    });
  });
  byId("filter").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    let count = 0;
    for (const row of body.rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
      count += !row.hidden;
    }
    byId("shown").textContent = wanted ? `${count} of ${body.rows.length} layers` : "";
  });

  // ---- the plan file ----
  byId("save").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([byId("plan").textContent], { type: "application/json" }));
    link.download = "plan.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });

  // ---- the net: one row can be tabbed to, arrow keys go to the others; the one with the focus says its words ----
  const tip = byId("tip"), targets = [...document.querySelectorAll("#net [tabindex]")];
  const place = (x, y) => {
    tip.style.left = `${Math.max(8, Math.min(x, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(y, innerHeight - tip.offsetHeight - 8))}px`;
  };
  targets.forEach((target, number) => {
    if (number) target.setAttribute("tabindex", "-1");
    target.addEventListener("focus", () => {
      tip.setAttribute("aria-live", "off");  // the label is read already
      tip.hidden = false;
      tip.textContent = target.getAttribute("aria-label");
      const box = target.getBoundingClientRect();
      place(box.left + 24, box.bottom + 6);
    });
    target.addEventListener("blur", () => { tip.hidden = true; });
    target.addEventListener("keydown", (event) => {
      const last = targets.length - 1;
      const goes = { ArrowDown: Math.min(number + 1, last), ArrowUp: Math.max(number - 1, 0), Home: 0, End: last };
      if (event.key === "Escape") tip.hidden = true;
      if (goes[event.key] === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      target.setAttribute("tabindex", "-1");
      targets[goes[event.key]].setAttribute("tabindex", "0");
      targets[goes[event.key]].focus();
      event.preventDefault();
    });
  });

  // ---- the timeline: blocks are [words, start in s, end in s, x of its label, y of its label or 0, light] ----
  const plot = byId("step-plot");
  if (!plot) return;
  const svg = "http://www.w3.org/2000/svg", view = byId("step-view");
  const labels = byId("step-labels"), axis = byId("step-axis");
  const { blocks, names, step, left, width, top, character } = data;
  const height = plot.viewBox.baseVal.height;
  let start = 0, long = step;

  const draw = (tag, text, attributes, parent) => {
    const element = document.createElementNS(svg, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    parent.append(element);
    return element;
  };
  const time = (seconds) => {
    const size = Math.abs(seconds);
    const [unit, factor] = size >= 1 ? ["s", 1] : size >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
    return `${Number((seconds * factor).toPrecision(4))} ${unit}`;
  };
  const show = (from, seconds) => {
    long = Math.min(step, Math.max(step / 1e5, seconds));
    start = Math.min(Math.max(0, from), step - long);
    plot.setAttribute("viewBox", `${(start / step) * width} 0 ${(long / step) * width} ${height}`);
    labels.replaceChildren();
    for (const [name, , begin, end, y, light] of blocks) {
      if (!y || end < start || begin > start + long) continue;
      const x = Math.max(0, ((begin - start) / long) * width), stop = Math.min(width, ((end - start) / long) * width);
      const text = names[name];
      if (text && stop - x > character * text.length + 6)
        draw("text", text, { x: left + x + 3, y, class: light ? "on-light" : "on-dark", fill: light ? "#10151b" : "#fff" }, labels);
    }
    axis.replaceChildren();
    const power = 10 ** Math.floor(Math.log10(long / 8));
    const apart = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= long / 8);
    for (let number = Math.ceil(start / apart); number * apart <= start + long; number++) {
      const x = left + ((number * apart - start) / long) * width;
      draw("path", "", { d: `M${x} ${top - 6}V${top + height}`, class: "line-rule", stroke: "#d5dbe3", fill: "none" }, axis);
      draw("text", number ? time(number * apart) : "0", { x, y: top - 10 }, axis);
    }
  };
  const zoom = (factor, at = 0.5) => (factor ? show(start + long * at * (1 - factor), long * factor) : show(0, step));
  for (const button of document.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => zoom(Number(button.dataset.zoom)));
  const share = (event) => {
    const box = plot.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  view.addEventListener("keydown", (event) => {
    const acts = {
      ArrowLeft: () => show(start - long / 8, long), ArrowRight: () => show(start + long / 8, long),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => zoom(0),
    };
    if (acts[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
      acts[event.key]();
      event.preventDefault();
    }
  });
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, share(event));
    event.preventDefault();
  }, { passive: false });
  view.addEventListener("dblclick", (event) => zoom(0.5, share(event)));
  let held = null;
  view.addEventListener("pointerdown", (event) => { held = [event.clientX, start]; });
  addEventListener("pointerup", () => { held = null; });
  view.addEventListener("pointermove", (event) => {
    if (held) show(held[1] - ((event.clientX - held[0]) / plot.getBoundingClientRect().width) * long, long);
    const number = event.target.dataset?.n;
    tip.hidden = number === undefined;
    if (tip.hidden) return;
    const [, words, begin, end] = blocks[number];
    tip.setAttribute("aria-live", "polite");
    tip.textContent = `${names[words]}: ${time(end - begin)}, from ${time(begin)} to ${time(end)}`;
    place(event.clientX + 14, event.clientY + 18);
  });
  view.addEventListener("pointerleave", () => { tip.hidden = true; });
})();
