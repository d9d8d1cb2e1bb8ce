// The planner page: reads the form, asks the predictor (planner/engine.js, made from the library's Python), draws the answer.
// Plans are made in workers, so that the page stays quick. All files are loaded as scripts: that also works from a folder.
"use strict";

(() => {
  const FILES = new URL("planner/", document.currentScript.src);
  const GIB = 2 ** 30;
  const IDLE = 700; // ms without a change before the slower "one change at a time" starts

  // --- workers ---

  function work(engine, data) {
    const planner = new engine.Planner(engine.toPython(data.machines));
    onmessage = ({ data: job }) => {
      if (job.family) return planner.learn(job.name, job.family);
      try {
        postMessage({ plan: engine.fromPython(planner.plan(engine.toPython(job.values), job.turns)) });
      } catch (error) {
        if (!error.args) throw error; // not one of Python's: a mistake in the code
        postMessage({ error: error.message });
      }
    };
  }
  const code = `(${work})((${plannerEngine})(), ${JSON.stringify(plannerData)});`;
  const address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));

  /** A worker that plans for the latest values that it was asked for and skips those between. */
  class Helper {
    constructor(turns, done) {
      Object.assign(this, { turns, done });
      this.begin();
    }
    begin() {
      this.worker = new Worker(address);
      this.known = new Set();
      this.busy = false;
      this.waiting = null;
      this.worker.onmessage = ({ data }) => {
        this.busy = false;
        const values = this.asked;
        if (this.waiting) this.ask(this.waiting);
        else this.done(values, data);
      };
    }
    ask(values) {
      this.waiting = null;
      if (this.busy) {
        this.waiting = values;
        return;
      }
      const name = needs(values);
      if (!this.known.has(name)) this.worker.postMessage({ name, family: families.get(name) });
      this.known.add(name);
      [this.busy, this.asked] = [true, values];
      this.worker.postMessage({ values, turns: this.turns });
    }
    stop() {
      if (!this.busy) return;
      this.worker.terminate();
      this.begin();
    }
  }

  // --- families: how a model runs, one file each ---

  const families = new Map();
  const coming = new Map();
  window.plannerFamily = (name, text) => families.set(name, text);
  function fetchFamily(name) {
    if (!coming.has(name)) {
      coming.set(name, new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = new URL(`${name}.js`, FILES);
        script.onload = resolve;
        script.onerror = () => {
          coming.delete(name);
          reject(new Error(`${name}.js could not be loaded`));
        };
        document.head.append(script);
      }));
    }
    return coming.get(name);
  }

  // --- the form ---

  const engine = plannerEngine();
  const checker = new engine.Planner(engine.toPython(plannerData.machines));
  const needs = (values) => checker.needs(engine.toPython(values));
  let form, status, result, preset, planner, turner, timer;

  const fields = () => [...form.elements].filter((field) => field.name);
  const read = () => Object.fromEntries(fields().map((f) => [f.name, f.type === "checkbox" ? f.checked : f.value]));
  function fill(values) {
    for (const field of fields()) {
      if (!(field.name in values)) continue;
      const value = values[field.name];
      if (field.type === "checkbox") field.checked = value === true || value === "true";
      else if (field.tagName !== "SELECT" || [...field.options].some((option) => option.value === String(value))) field.value = value;
    }
  }
  const fromAddress = () => fill(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
  const toAddress = () => history.replaceState(null, "", `#${new URLSearchParams(read())}`);

  async function replan() {
    const values = read();
    clearTimeout(timer);
    turner.stop();
    for (const field of fields()) field.removeAttribute("aria-invalid");
    try {
      await fetchFamily(needs(values));
    } catch (error) {
      return refuse(error.message);
    }
    if (JSON.stringify(values) === JSON.stringify(read())) planner.ask(values); // else a later change has come
  }

  function refuse(message) {
    status.textContent = message;
    status.classList.add("planner-wrong");
    result.hidden = true;
    for (const field of fields()) {
      if (message.startsWith(field.labels[0].firstChild.textContent.trim() + ":")) field.setAttribute("aria-invalid", "true");
    }
  }

  // --- the answer ---

  const gib = (size) => `${(size / GIB).toFixed(2)} GiB`;
  const count = (n) => Math.round(n).toLocaleString("en");
  const seconds = (s) => `${Number(s.toPrecision(3))} s`;
  function make(tag, attributes = {}, ...inside) {
    const svg = ["svg", "rect", "line", "title"].includes(tag);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...inside);
    return made;
  }
  /** Rows of cells; the first of a row is its header. Numbers come as text. */
  function table(caption, head, rows) {
    const row = (cells, tag) => make("tr", {}, ...cells.map((cell, i) => make(i ? tag : "th", { scope: tag === "th" ? "col" : "row" }, cell)));
    const whole = make("table", { class: "table" }, make("caption", {}, caption));
    if (head) whole.append(make("thead", {}, row(head, "th")));
    whole.append(make("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
    return make("div", { class: "course-scroll" }, whole);
  }
  /** A bar without text of its own; `said` is its description. parts: [class, from, to]; marks: [class, at]. */
  function bar(said, end, parts, marks) {
    const at = (x) => (100 * x) / end;
    return make("svg", { class: "planner-bar", role: "img", viewBox: "0 0 100 10", preserveAspectRatio: "none" },
      make("title", {}, said),
      ...parts.map(([kind, from, to]) => make("rect", { class: kind, x: at(from), width: at(to - from), y: 2, height: 6 })),
      ...marks.map(([kind, x]) => make("line", { class: kind, x1: at(x), x2: at(x), y1: 0, y2: 10 })));
  }
  const PARTS = ["parameters", "gradients", "master weights", "optimizer states", "reduce bucket", "libraries' workspace",
    "gathered parameters", "activations", "gradients in flight", "optimizer's temporaries"];
  const kindOf = (part) => `planner-part-${PARTS.indexOf(part)}`;

  function memory(plan) {
    const { parts, peak, host, fullest } = plan.memory;
    let filled = 0;
    const blocks = Object.entries(parts).map(([part, size]) => [kindOf(part), filled, (filled += size)]);
    const room = plan.gpu_memory - peak;
    const verdict = plan.fits
      ? `It fits, with ${gib(room)} left. The CUDA context, NCCL and unused parts of blocks take from that.`
      : `It does not fit: ${gib(-room)} too much.`;
    const rows = Object.entries(parts).map(([part, size]) => [make("span", {}, make("i", { class: `planner-key ${kindOf(part)}` }), part), gib(size)]);
    const inHost = Object.entries(host).map(([part, size]) => [`${part}, on the host`, gib(size)]);
    return [
      make("h2", {}, "Memory of one card"),
      bar(`Memory: ${gib(peak)} of ${gib(plan.gpu_memory)}; the parts are in the table below`, Math.max(peak, plan.gpu_memory), blocks, [["planner-limit", plan.gpu_memory]]),
      make("p", {}, verdict),
      table(`At the fullest moment (${fullest})`, null, [...rows, ["peak", gib(peak)], ...inHost]),
    ];
  }

  function collectives(plan) {
    return [
      make("h2", {}, "Collectives of a step"),
      make("p", {}, `The model is gathered ${plan.passes.toFixed(2)} times in a micro-step. A card receives ${gib(plan.received)} in a step.`),
      table("In a steady step", ["Phase", "Collective", "Count", "Elements"],
        plan.collectives.map(([op, phase, number, elements]) => [phase, op.replaceAll("_", "-"), count(number), count(elements)])),
    ];
  }

  function time(plan) {
    const { lower, upper, expected, busy } = plan.seconds;
    const said = `${seconds(expected)} expected; ${seconds(lower)} if everything overlaps, ${seconds(upper)} if nothing does`;
    return [
      make("h2", {}, "Seconds of a step"),
      bar(said, upper, [["planner-sure", 0, lower], ["planner-open", lower, upper]], [["planner-limit", expected]]),
      make("p", {}, said + "."),
      table(`Work of each lane, at the rates of ${plan.machine}`, null,
        Object.entries(busy).filter(([, s]) => s > 0).map(([lane, s]) => [lane, seconds(s)])),
    ];
  }

  function turnRows(turns) {
    const value = (v) => (v === null ? "off" : typeof v === "object" ? v.device : v === 0 ? "0" : v.toExponential().replace("e+", "e"));
    const sign = (size) => `${size < 0 ? "−" : "+"}${gib(Math.abs(size))}`;
    return table("Each alone, against the plan above", ["Change", "Step time", "Peak memory"],
      turns.map((turn) => [make("code", {}, `${turn.key}: ${value(turn.value)}`), `× ${turn.time.toFixed(2)}`, sign(turn.memory)]));
  }

  function draw(values, { plan, error }) {
    if (error) return refuse(error);
    const fits = plan.fits ? "fits" : "does not fit";
    status.classList.remove("planner-wrong");
    status.textContent = `${gib(plan.memory.peak)} on a card of ${gib(plan.gpu_memory)}: ${fits}. ` +
      `Gathered ${plan.passes.toFixed(2)} times a micro-step. ${seconds(plan.seconds.expected)} a step.`;
    const later = make("div", { id: "planner-turns" }, make("p", {}, "Trying one change at a time."));
    const config = make("details", {}, make("summary", {}, "The ds_config"), make("pre", { tabindex: 0 }, JSON.stringify(plan.ds_config, null, 2)));
    result.replaceChildren(...memory(plan), ...collectives(plan), ...time(plan), make("h2", {}, "What would change it most"), later, config);
    result.hidden = false;
    result.dataset.plan = JSON.stringify(plan);
    timer = setTimeout(() => turner.ask(values), IDLE);
  }

  function drawTurns(values, { plan }) {
    const place = document.getElementById("planner-turns");
    if (!plan || !place || JSON.stringify(values) !== JSON.stringify(read())) return;
    place.replaceChildren(turnRows(plan.turns));
    place.dataset.turns = JSON.stringify(plan.turns);
  }

  function start() {
    [form, status, result, preset] = ["planner", "planner-status", "planner-result", "planner-preset"].map((id) => document.getElementById(id));
    planner = new Helper(false, draw);
    turner = new Helper(true, drawTurns);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", ({ target }) => {
      if (target === preset) {
        if (preset.value) fill(engine.fromPython(engine.presets(form.elements.model.value).get(preset.value)));
      } else preset.value = "";
      toAddress();
      replan();
    });
    window.addEventListener("hashchange", () => {
      fromAddress();
      replan();
    });
    if (location.hash.includes("=")) fromAddress();
    else preset.value = preset.options[1].value;
    replan();
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
