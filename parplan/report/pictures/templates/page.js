"use strict";
(() => {
  const data = JSON.parse(document.getElementById("blocks").textContent);
  const byId = (name) => document.getElementById(name);
  for (const hidden of document.querySelectorAll(".tools")) hidden.hidden = false;

  // ---- the layer table; the page of a measured step has none, and no plan file ----
  const table = byId("layers"), body = table?.tBodies[0], heads = [...(table?.tHead.rows[0].cells ?? [])];
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
      const up = now ? now === "descending" : !["forward", "backward", "transfer", "sum", "memory"].includes(head.className);
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [key(row, column), row]);
      rows.sort(([one], [other]) => (up ? 1 : -1) * compare(one, other));
      body.append(...rows.map(([, row]) => row));
    });
  });
  byId("filter")?.addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    let count = 0;
    for (const row of body.rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
      count += !row.hidden;
    }
    byId("shown").textContent = wanted ? `${count} of ${body.rows.length} layers` : "";
  });

  // ---- the plan file ----
  byId("save")?.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([byId("plan").textContent], { type: "application/json" }));
    link.download = "plan.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });

  // ---- reasons are in folds, which paper cannot open ----
  const folds = [...document.querySelectorAll("#plan-layers details")];
  addEventListener("beforeprint", () => { for (const fold of folds) fold.dataset.was = fold.open, fold.open = true; });
  addEventListener("afterprint", () => { for (const fold of folds) fold.open = fold.dataset.was === "true"; });

  // ---- the net: one row can be tabbed to, arrow keys go to the others; the one with the focus says its words ----
  const tip = byId("tip");
  const place = (x, y) => {
    tip.style.left = `${Math.max(8, Math.min(x, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(y, innerHeight - tip.offsetHeight - 8))}px`;
  };
  const look = (target) => {
    const inside = byId(target.dataset.zoom ?? "");
    if (!inside) return;
    for (let one = inside; one; one = one.parentElement.closest("details")) one.open = true;
    inside.scrollIntoView({ block: "nearest" });
    inside.querySelector("summary").focus();
  };
  for (const net of document.querySelectorAll("#plan-net svg")) [...net.querySelectorAll("[tabindex]")].forEach((target, number, targets) => {
    target.addEventListener("click", () => look(target));
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
      if (event.key === "Enter") look(target);
      if (goes[event.key] === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      target.setAttribute("tabindex", "-1");
      targets[goes[event.key]].setAttribute("tabindex", "0");
      targets[goes[event.key]].focus();
      event.preventDefault();
    });
  });

  // ---- the timelines: blocks are [label, words, start in s, end in s, y of the label or 0, light], by their number ----
  const svg = "http://www.w3.org/2000/svg", { blocks, names, step, character } = data, views = [];
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
  for (const view of document.querySelectorAll(".view")) {
    const plot = view.querySelector("svg svg"), name = plot.id.replace("plot", "");
    const labels = byId(`${name}labels`), axis = byId(`${name}axis`), { width, height } = plot.viewBox.baseVal;
    const left = plot.x.baseVal.value, top = plot.y.baseVal.value;
    const own = [...plot.querySelectorAll("[data-n]")].map((one) => blocks[one.dataset.n]);
    let start = 0, long = step, held = null;
    const show = (from, seconds) => {
      long = Math.min(step, Math.max(step / 1e5, seconds));
      start = Math.min(Math.max(0, from), step - long);
      plot.setAttribute("viewBox", `${(start / step) * width} 0 ${(long / step) * width} ${height}`);
      labels.replaceChildren();
      for (const [label, , begin, end, y, light] of own) {
        if (!y || end < start || begin > start + long) continue;
        const x = Math.max(0, ((begin - start) / long) * width), stop = Math.min(width, ((end - start) / long) * width);
        const text = names[label];
        if (text && stop - x > character * text.length + 6)
          draw("text", text, { x: left + x + 3, y, class: light ? "on-light" : "on-dark", fill: light ? "#10151b" : "#fff" }, labels);
      }
      axis.replaceChildren();
      const rough = (long * 80) / width, power = 10 ** Math.floor(Math.log10(rough));
      const apart = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
      for (let number = Math.ceil(start / apart); number * apart <= start + long; number++) {
        const x = left + ((number * apart - start) / long) * width;
        draw("path", "", { d: `M${x} ${top - 6}V${top + height}`, class: "line-rule", stroke: "#d5dbe3", fill: "none" }, axis);
        draw("text", number ? time(number * apart) : "0", { x, y: top - 10 }, axis);
      }
    };
    const zoom = (factor, at = 0.5) => (factor ? show(start + long * at * (1 - factor), long * factor) : show(0, step));
    views.push(zoom);
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
  }
  for (const button of document.querySelectorAll("[data-zoom]:is(button)"))
    button.addEventListener("click", () => { for (const zoom of views) zoom(Number(button.dataset.zoom)); });
})();
