"use strict";
/* Ask, and watch director and workers side by side as they write; several questions at a time. Talks to this server only. */

const $ = id => document.getElementById(id);
const HUES = [168, 32, 318, 262, 88, 4];
const hue = worker => worker ? `light-dark(hsl(${HUES[(worker - 1) % 6]} 72% 36%), hsl(${HUES[(worker - 1) % 6]} 58% 62%))` : "var(--director)";
const number = value => value.toLocaleString("en");
const KEPT = "dccot runs", MOST_KEPT = 20;                    // of this tab, so that a reload shows them again

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "text", "path", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) name === "className" && !svg ? made.className = value : made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function button(text, action) {
  const made = el("button", { type: "button" }, text);
  made.addEventListener("click", action);
  return made;
}

function pairs(list, entries) {
  list.replaceChildren(...entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function say(text, bad = false) { $("status").textContent = text; $("status").className = bad ? "bad" : ""; }

const headers = () => ({ "Content-Type": "application/json", ...($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {}) });

async function about() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (answer.status === 401) { $("key-label").hidden = false; say("This server wants an API key.", true); return; }
  const card = (await answer.json()).data[0], settings = card.dccot;
  say("");
  $("model").textContent = card.id;
  document.title = `${card.id} · dccot serve`;
  $("budget").max = settings.budget;
  $("budget").placeholder = settings.budget;
  $("temperature").placeholder = settings.temperature;
  pairs($("totals"), [["workers", `${[settings.workers].flat().join(" to ")}${settings.depth > 1 ? `, ${settings.depth} levels` : ""}`], ["longest path, at most", number(settings.budget)], ["context", number(card.max_model_len)]]);
  $("examples").replaceChildren(...settings.examples.map(text => button(text, () => { $("question").value = text; $("question").focus(); })));
}

/* ---- one question and its response ---- */
class Run {
  constructor(question, seed) {
    Object.assign(this, { question, seed, answer: "", note: "", bad: false, seconds: 0, rollout: null, lanes: new Map(), began: performance.now() });
    const part = (tag, className, attributes = {}) => this[className] = el(tag, { className, ...attributes });
    this.buttons = { cancel: button("Cancel", () => this.abort?.abort()), again: button("Ask again", () => { $("question").value = question; $("question").focus(); }),
      copy: button("Copy answer", () => copy(this.answer)), all: button("Copy all", () => copy(this.whole())), save: button("Save run", () => this.save()) };
    this.buttons.save.title = "a file that `dccot view` opens";
    this.element = el("article", { className: "run", "aria-label": question }, el("h2", {}, question), part("p", "state", { role: "status", "aria-live": "polite" }),
      part("div", "said", { "aria-label": "answer" }), el("div", { className: "actions" }, ...Object.values(this.buttons)),
      part("dl", "facts"), part("div", "tree"), part("div", "texts"));
    this.show();
    $("runs").prepend(this.element);
  }

  tell(note, bad = false) { Object.assign(this, { note, bad }); this.show(); }

  show() {
    this.state.textContent = this.note;
    this.state.classList.toggle("bad", this.bad);
    this.said.textContent = this.answer;
    this.said.hidden = !this.answer;
    this.tree.hidden = this.facts.hidden = !this.lanes.size;
    const there = { cancel: this.abort, again: !this.abort, copy: this.answer, all: this.lanes.size, save: this.rollout };
    for (const [name, yes] of Object.entries(there)) this.buttons[name].hidden = !yes;
  }

  hear(delta) {
    this.answer += delta.content ?? "";
    if (delta.worker === undefined) return;                   // in reading order, for clients without lanes
    this.write([...(delta.of ?? []), delta.round - 1, delta.worker], delta.text, delta.tokens);
    if (!this.dirty) { this.dirty = true; requestAnimationFrame(() => this.draw()); }
  }

  /** What a call writes. Its path: (fork, worker) from the director downwards; after a fork, a thread continues as worker 0. */
  write(path, text, tokens) {
    const key = path.join(".");
    if (!this.lanes.has(key)) this.open(path, key);
    const lane = this.lanes.get(key);
    lane.text += text;
    lane.tokens += tokens;
    if (lane.worker && lane.text.includes(`</worker_${lane.worker}>`)) lane.card.classList.remove("writing");
  }

  open(path, key) {
    const thread = path.at(-1) ? path : path.slice(0, -2), who = thread.filter((_, at) => at % 2), worker = who.at(-1) ?? 0;
    const first = path.at(-1) > 0, start = path.length === 2 && key === "0.0";
    const body = el("pre", { tabindex: "0" }), count = el("span", {});
    let card = first ? null : this.lanes.get(thread.join("."))?.card;
    if (!card) {
      const name = worker ? `worker ${who.join(".")}` : start ? "director" : "director, having read the workers";
      card = el("article", { className: "card", style: `--hue:${hue(worker)}`, "aria-label": name }, el("h3", {}, name, count));
      (worker ? this.group(thread) : this.texts).append(card);
    }
    if (!first) for (const other of this.lanes.values()) if (other.card.parentElement.closest(".card") === card || !worker) other.card.classList.remove("writing");
    if (first) this.lanes.get(segmentPath(path.slice(0, -2), path.at(-2)))?.card.classList.remove("writing");
    card.classList.add("writing");
    card.append(body);
    this.lanes.set(key, { path, who, worker, text: "", tokens: 0, card, body, count: first || !worker ? count : null });
    if (path.length === 2 && path[1] === 1) this.tell(`Round ${path[0] + 1}: workers are writing side by side.`);
  }

  /** Where the workers of a fork go: after what their thread has written. */
  group(thread) {
    const name = thread.slice(0, -1).join("."), label = `workers of round ${thread.at(-2) + 1}`;
    const above = this.lanes.get(segmentPath(thread.slice(0, -2), thread.at(-2)))?.card ?? this.texts;
    const inside = thread.length > 2 ? above : this.texts;
    let grid = [...inside.children].find(each => each.dataset.fork === name);
    if (!grid) inside.append(grid = el("div", { className: "workers", "data-fork": name, role: "group", "aria-label": label }));
    return grid;
  }

  draw() {
    this.dirty = false;
    const totals = new Map();
    for (const lane of this.lanes.values()) {
      const { body } = lane, end = body.scrollTop + body.clientHeight >= body.scrollHeight - 4;
      if (body.textContent.length !== lane.text.length) body.textContent = lane.text;
      if (end) body.scrollTop = body.scrollHeight;
      totals.set(lane.card, (totals.get(lane.card) ?? 0) + lane.tokens);
    }
    for (const { card, count } of this.lanes.values()) if (count) count.textContent = `${number(totals.get(card))} tokens`;
    const { found, longest, total } = boxes(this.lanes);
    if (this.abort) this.seconds = (performance.now() - this.began) / 1000;
    pairs(this.facts, [["longest path", number(longest)], ["total tokens", number(total)], ["parallelism", (total / Math.max(1, longest)).toFixed(2)],
      ["seconds", this.seconds.toFixed(2)], ["seed", String(this.seed)]]);
    this.show();
    this.tree.replaceChildren(tree(found, longest, this.tree.clientWidth));
  }

  async ask(settings) {
    this.abort = new AbortController();
    this.tell("The director is writing.");
    try {
      const body = JSON.stringify({ messages: [{ role: "user", content: this.question }], seed: this.seed, stream: true, stream_options: { include_usage: true }, return_rollout: true, ...settings });
      const answer = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body, signal: this.abort.signal });
      if (answer.ok) await this.read(answer); else this.fail(await refusal(answer));
    } catch (error) {
      this.fail(error.name === "AbortError" ? "Cancelled." : `The connection to the server was lost (${error.message}).`);
    } finally {
      this.seconds = (performance.now() - this.began) / 1000;
      this.abort = null;
      for (const lane of this.lanes.values()) lane.card.classList.remove("writing");
      this.draw();
      keep();
    }
  }

  fail(reason) { this.answer = ""; this.tell(reason, true); }

  async read(answer) {
    let finish = null, usage = null, warnings = [];
    for await (const event of events(answer)) {
      if (event.error) { this.fail(event.error.message); return; }
      usage = event.usage ?? usage;
      warnings = event.warnings ?? warnings;
      for (const choice of event.choices) { this.hear(choice.delta); finish = choice.finish_reason ?? finish; this.rollout = choice.rollout ?? this.rollout; }
    }
    const details = usage.completion_tokens_details, cut = finish === "length" ? ["The budget ended it."] : this.answer ? [] : ["The director wrote no answer."];
    const lengths = `${number(details.longest_path_tokens)} tokens on the longest path, ${number(usage.completion_tokens)} sampled by director and ${details.workers} workers.`;
    this.tell([lengths, ...cut, ...warnings.map(each => `${each}.`)].join(" "));
  }

  whole() { return `${this.question}\n\n${[...this.lanes.values()].sort((a, b) => order(a.path, b.path)).map(lane => lane.text).join("")}\n`; }

  save() {
    const link = el("a", { href: URL.createObjectURL(new Blob([JSON.stringify(this.rollout) + "\n"], { type: "application/jsonl" })), download: `${$("model").textContent}.${this.seed}.jsonl` });
    link.click();
    URL.revokeObjectURL(link.href);
    this.tell(`${this.note} Saved: dccot view ${link.download}`);
  }
}

const segmentPath = (thread, number) => (thread.length && !number ? thread : [...thread, number, 0]).join(".");
const order = (a, b) => { for (let at = 0; at < Math.min(a.length, b.length); at++) if (a[at] !== b[at]) return a[at] - b[at]; return a.length - b.length; };

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", {}, text);                      // where pages may not: http from another machine
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Boxes in tokens along the longest path; the workers of a fork start together. */
function boxes(lanes) {
  const found = [], most = Math.max(0, ...[...lanes.values()].flatMap(one => one.who));
  const walk = (thread, x) => {
    for (let number = 0; lanes.has(segmentPath(thread, number)); number++) {
      const own = lanes.get(segmentPath(thread, number));
      let longest = 0;
      found.push({ ...own, x });
      x += own.tokens;
      for (let i = 1; i <= most; i++) longest = Math.max(longest, walk([...thread, number, i], x) - x);
      x += longest;
    }
    return x;
  };
  return { longest: walk([], 0), found, total: found.reduce((sum, box) => sum + box.tokens, 0) };
}

function tree(found, longest, room) {
  const names = [...new Set(found.map(box => box.who.join(".")))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const left = 76, row = names.length > 12 ? 12 : 20, gap = names.length > 12 ? 3 : 6, named = who => who ? `worker ${who}` : "director";
  const width = Math.max(200, room - 24 - left), scale = width / Math.max(1, longest), y = at => at * (row + gap), height = y(names.length - 1) + row + 20;
  const label = `director and ${names.length - 1} workers to scale: longest path ${longest} tokens`;
  const svg = el("svg", { viewBox: `0 0 ${left + width} ${height}`, height, role: "img", "aria-label": label });
  names.forEach((who, at) => svg.append(el("text", { x: 0, y: y(at) + row - (row > 12 ? 5 : 2) }, named(who))));
  for (const box of found) {
    const who = box.who.join("."), wide = Math.max(1, box.tokens * scale);
    const rect = el("rect", { x: left + box.x * scale, y: y(names.indexOf(who)), width: wide, height: row, rx: 3, style: `fill:${hue(box.worker)}` });
    rect.append(el("title", {}, `${named(who)}: ${box.tokens} tokens`));
    svg.append(rect);
  }
  svg.append(el("text", { x: left, y: height - 3 }, "0"), el("text", { x: left + width, y: height - 3, "text-anchor": "end" }, `${number(longest)} tokens on the longest path`));
  return svg;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

async function refusal(answer) {
  if (answer.status === 401) { $("key-label").hidden = false; $("key").focus(); return "This server wants an API key."; }
  const error = (await answer.json().catch(() => ({}))).error;
  return error?.message ?? `The server answered ${answer.status}.`;
}

/* ---- history ---- */
const runs = [];

function keep() {
  const kept = runs.filter(run => !run.abort).slice(-MOST_KEPT).map(({ question, seed, answer, note, bad, seconds, rollout, lanes }) =>
    ({ question, seed, answer, note, bad, seconds, rollout, lanes: [...lanes.values()].map(({ path, text, tokens }) => [path, text, tokens]) }));
  for (; kept.length; kept.shift()) try { return sessionStorage.setItem(KEPT, JSON.stringify(kept)); } catch { /* too much: without the oldest */ }
}

function restore() {
  for (const { question, seed, lanes, ...known } of JSON.parse(sessionStorage.getItem(KEPT) ?? "[]")) {
    const run = new Run(question, seed);
    for (const [path, text, tokens] of lanes) run.write(path, text, tokens);
    for (const lane of run.lanes.values()) lane.card.classList.remove("writing");
    Object.assign(run, known);
    run.draw();
    runs.push(run);
  }
}

/* ---- asking ---- */
function ask() {
  const question = $("question").value.trim(), value = id => $(id).value === "" ? undefined : Number($(id).value);
  if (!question) return;
  const run = new Run(question, value("seed") ?? Math.floor(Math.random() * 1e6));
  runs.push(run);
  $("question").value = "";
  return run.ask({ temperature: value("temperature"), max_completion_tokens: value("budget"), reasoning_effort: $("sequential").checked ? "none" : undefined });
}

$("form").addEventListener("submit", event => { event.preventDefault(); ask(); });
$("key").addEventListener("change", about);
$("question").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
document.addEventListener("keydown", event => { if (event.key === "Escape") runs.findLast(run => run.abort)?.abort.abort(); });
addEventListener("resize", () => { for (const run of runs) if (run.lanes.size) run.draw(); });
restore();
about();
