// The timeline: rows of jobs, or of one job's turns, in a window of rows and time that moves and zooms.
// Only what is inside the window is drawn, so that it stays quick whatever the number of turns.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const ROWS = 25, ROW_PX = 22, AXIS_PX = 26, MARK_PX = 12;
  // A turn, as written by page.py.
  const [NUMBER, DUE, START, FIRST, LAST, HELD_END, TOOL_END, PROMPT, CACHED, OUTPUT, VERDICT, OK, TOOL] = Array(13).keys();
  const VERDICTS = {
    first: "first turn", hit: "hit", part: "partly hit", miss: "miss", unknown: "not known",
  };
  const NAMES = { held: "tool with its cache held" };
  const find = (id) => document.getElementById(`timeline-${id}`);
  const { runs, heights } = JSON.parse(find("data").textContent);
  const view = find("view");
  const state = { run: 0, job: null, from: 0, to: 1, top: 0, focus: 0, fits: true };

  function make(name, attributes, ...children) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  function html(name, ...children) {
    const element = document.createElement(name);
    element.append(...children);
    return element;
  }

  function seconds(value) {
    if (value === null) return "–";
    if (value >= 100) return `${Math.round(value).toLocaleString("en")} s`;
    return value >= 1 || value === 0 ? `${Number(value.toPrecision(3))} s` : `${Number((value * 1000).toPrecision(3))} ms`;
  }

  const tokens = (value) => (value === null ? "–" : value.toLocaleString("en"));

  // What is shown.

  function getRows() {
    const { jobs } = runs[state.run];
    if (state.job === null) return jobs.map(([name, turns]) => ({ label: name, turns }));
    return jobs[state.job][1].map((turn) => ({ label: `turn ${turn[NUMBER]}`, turns: [turn] }));
  }

  function getEnd(turn) {
    return Math.max(...[DUE, START, FIRST, LAST, HELD_END, TOOL_END].map((field) => turn[field] ?? 0));
  }

  function getSpan(rows = getRows()) {
    let from = Infinity, to = 0;
    for (const { turns } of rows) {
      for (const turn of turns) {
        from = Math.min(from, turn[DUE]);
        to = Math.max(to, getEnd(turn));
      }
    }
    return { from, to: Math.max(to, from + 0.001) };
  }

  function getSlices(turn) {
    const waiting = turn[START] === null ? "wait" : "queue";
    const marks = [
      [waiting, turn[START] ?? turn[FIRST]], ["prefill", turn[START] === null ? null : turn[FIRST]],
      ["decode", turn[LAST]], ["held", turn[HELD_END]], ["tool", turn[TOOL_END]],
    ];
    const slices = [];
    let at = turn[DUE];
    for (const [name, end] of marks) {
      if (end !== null && end > at) {
        slices.push([turn[OK] ? name : "failed", at, end]);
        at = end;
      }
    }
    return slices;
  }

  // Words for it.

  function describeTurn(turn) {
    const parts = getSlices(turn).map(([name, from, to]) => `${NAMES[name] ?? name} ${seconds(to - from)}`);
    const cache = turn[CACHED] === null ? "" : `, ${tokens(turn[CACHED])} of ${tokens(turn[PROMPT])} prompt tokens hit`;
    return `turn ${turn[NUMBER]}${turn[OK] ? "" : " failed"}: ${parts.join(", ")}${cache}; ${VERDICTS[turn[VERDICT]]}`;
  }

  function describeRow(row) {
    if (state.job !== null) return describeTurn(row.turns[0]);
    const last = Math.max(...row.turns.map((turn) => turn[LAST] ?? turn[DUE]));
    const misses = row.turns.filter((turn) => turn[VERDICT] === "miss").length;
    const count = row.turns.length === 1 ? "1 turn" : `${row.turns.length} turns`;
    return `job ${row.label}: ${count}, ${seconds(last - row.turns[0][DUE])}, ${misses} missed the cache`;
  }

  // Drawing.

  function drawMark(x, y, verdict) {
    const full = verdict === "hit" ? " full" : "";
    const marks = [make("circle", { class: `mark${full}`, cx: x, cy: y, r: 3.5 })];
    if (verdict === "part") marks.push(make("path", { class: "mark full", d: `M${x} ${y - 3.5}a3.5 3.5 0 0 0 0 7z` }));
    return make("g", { class: `verdict-${verdict}` }, ...marks);
  }

  function drawBars(turns, place, left, middle) {
    const drawn = [], ends = {};
    for (const turn of turns) {
      if (turn[DUE] > state.to || getEnd(turn) < state.from) continue;
      for (const [name, from, to] of getSlices(turn)) {
        if (to < state.from || from > state.to) continue;
        const start = Math.max(left, place(from)), width = Math.max(1, place(Math.min(to, state.to)) - start);
        if (start + width <= (ends[name] ?? 0) + 0.5) continue; // It would cover what is there.
        ends[name] = start + width;
        const height = ROW_PX * heights[name];
        const bar = make("rect", { class: name, x: start, y: middle - height / 2, width, height });
        if (width > 3) bar.append(make("title", {}, describeTurn(turn)));
        drawn.push(bar);
      }
    }
    return drawn;
  }

  function drawMarks(turns, place, left, middle) {
    const drawn = [];
    let end = left - MARK_PX;
    for (const turn of turns) {
      const at = turn[START] ?? turn[FIRST];
      if (!["hit", "part", "miss"].includes(turn[VERDICT]) || at === null || at < state.from || at > state.to) continue;
      const x = Math.max(left + 4, place(at) - 5); // Before the prefill it is about.
      if (x - end < MARK_PX) continue;
      end = x;
      drawn.push(drawMark(x, middle, turn[VERDICT]));
    }
    return drawn;
  }

  function drawAxis(place, width, height) {
    const step = chooseStep((state.to - state.from) / (width < 600 ? 4 : 8));
    const ticks = [];
    for (let tick = Math.ceil(state.from / step) * step; tick <= state.to; tick += step) {
      const x = place(tick);
      ticks.push(make("line", { x1: x, x2: x, y1: AXIS_PX - 6, y2: height }));
      if (x < width - 24) ticks.push(make("text", { x, y: 14, "text-anchor": "middle" }, seconds(Number(tick.toPrecision(6)))));
    }
    return make("g", { class: "axis", "aria-hidden": "true" }, ...ticks);
  }

  function chooseStep(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
  }

  function draw() {
    const rows = getRows(), width = Math.max(240, view.clientWidth), left = width < 600 ? 84 : 150;
    state.top = Math.max(0, Math.min(state.top, rows.length - ROWS));
    if (state.fits) fit(); // Other rows may be shown than before.
    const shown = rows.slice(state.top, state.top + ROWS), height = AXIS_PX + shown.length * ROW_PX + 2;
    const place = (time) => left + ((time - state.from) / (state.to - state.from)) * (width - left - 2);
    state.focus = Math.max(state.top, Math.min(state.focus, state.top + shown.length - 1));
    const hadFocus = view.contains(document.activeElement);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "Rows of the timeline", "aria-describedby": "timeline-help" });
    svg.append(drawAxis(place, width, height));
    const letters = Math.floor((left - 10) / 7.2);
    shown.forEach((row, index) => {
      const y = AXIS_PX + index * ROW_PX, middle = y + ROW_PX / 2, number = state.top + index;
      const label = row.label.length > letters ? `${row.label.slice(0, letters - 1)}…` : row.label;
      svg.append(make("g", {
        class: "row", "data-row": number, role: state.job === null ? "button" : "img",
        tabindex: number === state.focus ? 0 : -1, "aria-label": describeRow(row),
      },
      make("rect", { class: "back", x: 1, y: y + 1, width: width - 2, height: ROW_PX - 2 }),
      make("text", { x: 4, y: middle + 4 }, label),
      ...drawBars(row.turns, place, left, middle), ...drawMarks(row.turns, place, left, middle)));
    });
    view.replaceChildren(svg);
    if (hadFocus) focusRow();
    showState(rows.length, shown.length);
  }

  function showState(numRows, numShown) {
    const what = state.job === null ? "Jobs" : `${runs[state.run].jobs[state.job][0]}: turns`;
    find("status").textContent = `${what} ${state.top + 1}–${state.top + numShown} of ${numRows}, ${seconds(state.from)} to ${seconds(state.to)}`;
    find("back").disabled = state.job === null;
    const span = getSpan();
    const off = {
      up: state.top === 0, down: state.top + numShown >= numRows,
      earlier: state.from <= span.from, later: state.to >= span.to,
      out: state.from <= span.from && state.to >= span.to, fit: state.fits,
      in: state.to - state.from < 0.002,
    };
    for (const [name, isOff] of Object.entries(off)) {
      const button = document.querySelector(`[data-do="${name}"]`);
      // A disabled button would lose the focus that pressed it.
      button.setAttribute("aria-disabled", isOff);
    }
  }

  function showTurns() {
    const place = find("turns");
    if (state.job === null) return place.replaceChildren();
    const [name, turns] = runs[state.run].jobs[state.job];
    const head = ["Turn", "Due at", "Queue", "Prefill", "Decode", "Tool", "Cache held", "Prompt tokens", "Hit tokens", "Output tokens", "Cache"];
    const rows = turns.map((turn) => {
      const spent = Object.fromEntries(getSlices(turn).map(([key, from, to]) => [key, seconds(to - from)]));
      const length = turn[TOOL_END] === null || turn[LAST] === null ? "–" : seconds(turn[TOOL_END] - turn[LAST]);
      const tool = turn[TOOL] ? `${turn[TOOL]}, ${length}` : length;
      const queue = spent.queue ?? (spent.wait ? `${spent.wait} to the first token` : "–");
      return [
        `${turn[NUMBER]}${turn[OK] ? "" : ", failed"}`, seconds(turn[DUE]), queue, spent.prefill ?? "–", spent.decode ?? "–", tool, spent.held ?? "–",
        tokens(turn[PROMPT]), tokens(turn[CACHED]), tokens(turn[OUTPUT]), VERDICTS[turn[VERDICT]],
      ];
    });
    const table = html("table",
      html("thead", html("tr", ...head.map((text) => Object.assign(html("th", text), { scope: "col" })))),
      html("tbody", ...rows.map((row) => html("tr", ...row.map((text) => html("td", text))))));
    const scroll = html("div", table);
    Object.assign(scroll, { className: "scroll", tabIndex: 0 });
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", `Turns of job ${name}`);
    place.replaceChildren(html("h3", `Turns of job ${name}`), scroll);
  }

  // Moving.

  function fit() {
    Object.assign(state, getSpan(getRows().slice(state.top, state.top + ROWS)), { fits: true });
  }

  function move(share) {
    const span = getSpan(), length = state.to - state.from;
    state.fits = false;
    state.from = Math.max(span.from, Math.min(state.from + share * length, span.to - length));
    state.to = state.from + length;
  }

  function zoom(factor) {
    const span = getSpan(), middle = (state.from + state.to) / 2;
    state.fits = false;
    const half = Math.max(0.0005, ((state.to - state.from) / 2) * factor);
    state.from = Math.max(span.from, middle - half);
    state.to = Math.min(span.to, Math.max(middle + half, state.from + 0.001));
  }

  const actions = {
    in: () => zoom(0.5), out: () => zoom(2), fit, earlier: () => move(-0.25), later: () => move(0.25),
    up: () => { state.top -= ROWS; state.focus -= ROWS; }, down: () => { state.top += ROWS; state.focus += ROWS; },
  };

  function openRun(run) {
    Object.assign(state, { run, job: null, top: 0, focus: 0 });
    const options = runs[run].jobs.map(([name, turns], index) => new Option(`${name} (${turns.length})`, index));
    find("job").replaceChildren(new Option("All jobs", ""), ...options);
    openJob(null);
  }

  function openJob(job) {
    const before = state.job;
    Object.assign(state, { job, top: 0, focus: 0 });
    if (job === null && before !== null) Object.assign(state, { focus: before, top: before - Math.floor(ROWS / 2) });
    find("job").value = job === null ? "" : job;
    state.fits = true;
    draw();
    showTurns();
  }

  function focusRow() {
    view.querySelector(`[data-row="${state.focus}"]`)?.focus({ preventScroll: true });
  }

  function goToRow(row) {
    state.focus = Math.max(0, Math.min(row, getRows().length - 1));
    state.top = Math.min(state.top, state.focus);
    state.top = Math.max(state.top, state.focus - ROWS + 1);
    draw();
    focusRow();
  }

  const keys = {
    ArrowUp: () => goToRow(state.focus - 1), ArrowDown: () => goToRow(state.focus + 1),
    PageUp: () => goToRow(state.focus - ROWS), PageDown: () => goToRow(state.focus + ROWS),
    Home: () => goToRow(0), End: () => goToRow(Infinity),
    ArrowLeft: () => { move(-0.25); draw(); }, ArrowRight: () => { move(0.25); draw(); },
    "+": () => { zoom(0.5); draw(); }, "=": () => { zoom(0.5); draw(); }, "-": () => { zoom(2); draw(); },
    0: () => { fit(); draw(); },
    Enter: () => state.job === null && openJob(state.focus), " ": () => state.job === null && openJob(state.focus),
    Escape: () => state.job !== null && openJob(null),
  };

  view.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
    if (["Enter", " ", "Escape"].includes(event.key)) focusRow();
  });
  view.addEventListener("focusin", (event) => {
    const row = event.target.closest("[data-row]");
    if (!row) return;
    view.querySelector('[tabindex="0"]')?.setAttribute("tabindex", -1);
    row.setAttribute("tabindex", 0);
    state.focus = Number(row.dataset.row);
  });

  // A drag over a stretch of time zooms to it; a click opens the row's job.
  let drag = null;
  const getX = (event) => event.clientX - view.getBoundingClientRect().left;
  view.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType === "mouse") drag = { x: getX(event) };
  });
  window.addEventListener("pointermove", (event) => {
    if (!drag || Math.abs(getX(event) - drag.x) < 8) return;
    drag.box ??= view.firstChild.appendChild(make("rect", { class: "selection", y: AXIS_PX }));
    const x = Math.min(drag.x, getX(event));
    const size = { x, width: Math.abs(getX(event) - drag.x), height: view.clientHeight - AXIS_PX };
    for (const [key, value] of Object.entries(size)) drag.box.setAttribute(key, value);
  });
  window.addEventListener("pointerup", (event) => {
    if (!drag?.box) return;
    const width = view.clientWidth, left = width < 600 ? 84 : 150, length = state.to - state.from;
    const times = [drag.x, getX(event)].map((x) => {
      const share = Math.max(0, Math.min(1, (x - left) / (width - left - 2)));
      return state.from + share * length;
    });
    state.fits = false;
    [state.from, state.to] = [Math.min(...times), Math.max(Math.max(...times), Math.min(...times) + 0.001)];
    draw();
  });
  view.addEventListener("click", (event) => {
    const wasDrag = drag?.box;
    drag = null;
    const row = event.target.closest("[data-row]");
    if (row && !wasDrag && state.job === null) openJob(Number(row.dataset.row));
  });

  for (const button of document.querySelectorAll("[data-do]")) {
    button.addEventListener("click", () => { actions[button.dataset.do](); draw(); });
  }
  find("run").append(...runs.map(({ label }, index) => new Option(label, index)));
  find("run").addEventListener("change", (event) => openRun(Number(event.target.value)));
  find("job").addEventListener("change", (event) => openJob(event.target.value === "" ? null : Number(event.target.value)));
  find("back").addEventListener("click", () => openJob(null));
  new ResizeObserver(() => { if (view.firstChild && view.clientWidth !== view.firstChild.viewBox.baseVal.width) draw(); }).observe(view);
  openRun(0);
})();
