"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const cards = [...document.querySelectorAll(".card")];
  const filters = ["misses", "duplicates", "wrong", "cut"].filter(byId);
  const controls = ["view", "order", "class", ...filters].filter(byId);
  const kept = "stage2-report:" + location.pathname;

  const viewOf = (card) => card.querySelector(`.view[data-view="${byId("view").value}"]`);
  const orders = {
    worst: (a, b) => a.f1 - b.f1,
    best: (a, b) => b.f1 - a.f1,
    lost: (a, b) => a.gain - b.gain,
    won: (a, b) => b.gain - a.gain,
  };

  function passes(card, view) {
    const name = byId("class")?.value;
    if (name && !JSON.parse(card.dataset.classes).includes(name)) return false;
    return filters.every((one) => !byId(one).checked || Number(view.dataset[one]) > 0);
  }

  function show() {
    let shown = 0;
    const compare = orders[byId("order").value];
    const ranked = cards.map((card) => ({ card, view: viewOf(card) }));
    ranked.sort((a, b) => {
      const [x, y] = [a, b].map(({ view }) => (view ? { f1: +view.dataset.f1, gain: +view.dataset.gain } : { f1: 9, gain: 9 }));
      return compare(x, y);
    });
    for (const { card, view } of ranked) {
      for (const one of card.querySelectorAll(".view")) one.hidden = one !== view;
      card.hidden = !view || !passes(card, view);
      shown += card.hidden ? 0 : 1;
      byId("cards").append(card);
    }
    byId("count").textContent = `${shown} of ${cards.length} shown`;
    byId("none").hidden = shown > 0;
    remember();
  }

  function remember() {
    const state = {};
    for (const id of controls) state[id] = byId(id).type === "checkbox" ? byId(id).checked : byId(id).value;
    try { sessionStorage.setItem(kept, JSON.stringify(state)); } catch { /* a browser may forbid it */ }
  }

  function recall() {
    let state = {};
    try { state = JSON.parse(sessionStorage.getItem(kept) || "{}"); } catch { return; }
    for (const [id, value] of Object.entries(state)) {
      const control = byId(id);
      if (!control) continue;
      if (control.type === "checkbox") control.checked = value;
      else if ([...control.options].some((one) => one.value === value)) control.value = value;
    }
  }

  function fillClasses() {
    const counts = new Map();
    for (const card of cards) for (const name of JSON.parse(card.dataset.classes)) counts.set(name, (counts.get(name) || 0) + 1);
    const names = [...counts].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0])).slice(0, 300);
    for (const [name, count] of names) {
      const short = name.length > 40 ? name.slice(0, 40) + "…" : name;
      byId("class").append(new Option(`${short} (${count})`, name));
    }
  }

  function values(chart, at) {
    const [x0, x1] = JSON.parse(chart.dataset.x);
    const [y0, y1] = JSON.parse(chart.dataset.y);
    let best = null;
    const lines = [...chart.querySelectorAll("g")].map((group) => {
      let near = null;
      for (const line of group.querySelectorAll("polyline:not(.spread)")) {
        for (const point of line.points) if (!near || Math.abs(point.x - at) < Math.abs(near.x - at)) near = point;
      }
      if (near && (best === null || Math.abs(near.x - at) < Math.abs(best - at))) best = near.x;
      return near;
    });
    if (best === null) return null;
    const value = (point) => y0 + ((194 - point.y) / 184) * (y1 - y0);
    const step = Math.round(x0 + ((best - 54) / 454) * (x1 - x0));
    return { x: best, step, texts: lines.map((point) => (point ? value(point).toPrecision(3).replace(/e\+?(-?)0*/, "e$1") : "")) };
  }

  function hover(chart) {
    const svg = chart.querySelector("svg");
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor");
    const numbers = [...chart.querySelectorAll(".legend b")];
    const last = numbers.map((one) => one.textContent);
    const title = chart.querySelector("figcaption");
    const name = title.textContent;
    svg.addEventListener("pointermove", (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
      const found = values(chart, at);
      if (!found) return;
      for (const [key, value] of Object.entries({ x1: found.x, x2: found.x, y1: 10, y2: 194 })) cursor.setAttribute(key, value);
      svg.append(cursor);
      title.textContent = `${name} – step ${found.step.toLocaleString()}`;
      numbers.forEach((one, place) => { one.textContent = found.texts[place] || last[place]; });
    });
    svg.addEventListener("pointerleave", () => {
      cursor.remove();
      title.textContent = name;
      numbers.forEach((one, place) => { one.textContent = last[place]; });
    });
  }

  document.querySelectorAll(".chart").forEach(hover);
  if (cards.length) {
    if (byId("class")) fillClasses();
    recall();
    for (const id of controls) byId(id).addEventListener("change", show);
    byId("cards").addEventListener("click", (event) => {
      const picture = event.target.closest(".panes svg");
      if (!picture) return;
      if (document.fullscreenElement) document.exitFullscreen();
      else picture.requestFullscreen();
    });
    show();
  }
})();
