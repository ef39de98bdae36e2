"use strict";
/* Ask, and watch director and workers side by side as they write. Talks to this server only. */

const $ = id => document.getElementById(id);
const HUES = [168, 32, 318, 262, 88, 4];
const hue = worker => worker ? `light-dark(hsl(${HUES[(worker - 1) % 6]} 72% 36%), hsl(${HUES[(worker - 1) % 6]} 58% 62%))` : "var(--director)";
const number = value => value.toLocaleString("en");

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "text", "path", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) name === "className" && !svg ? made.className = value : made.setAttribute(name, value);
  made.append(...children);
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
  $("model").textContent = card.id;
  document.title = `${card.id} · dccot serve`;
  $("budget").max = settings.budget;
  $("budget").placeholder = settings.budget;
  $("temperature").placeholder = settings.temperature;
  pairs($("totals"), [["workers", `${[settings.workers].flat().join(" to ")}${settings.depth > 1 ? `, ${settings.depth} levels` : ""}`], ["longest path, at most", number(settings.budget)], ["context", number(card.max_model_len)]]);
}

/* ---- one response in the making ---- */
let lanes, seconds, began, running = null, dirty = false;

function start() {
  lanes = new Map();                                        // path of a call → {who, worker, text, tokens, card, body, count}
  began = performance.now();
  $("answer").textContent = "";
  $("texts").replaceChildren();
  $("result").hidden = false;
}

const segmentPath = (thread, number) => (thread.length && !number ? thread : [...thread, number, 0]).join(".");

/** What a call writes. Its path: (fork, worker) from the director downwards; after a fork, a thread continues as worker 0. */
function lane(path) {
  const key = path.join(".");
  if (!lanes.has(key)) {
    const thread = path.at(-1) ? path : path.slice(0, -2), who = thread.filter((_, at) => at % 2), above = thread.slice(0, -2);
    const count = el("span", {}), body = el("pre", { tabindex: "0" }), worker = who.at(-1) ?? 0;
    const read = path.at(-1) || path.at(-2) === 0 ? "" : ", having read the workers";
    const name = (worker ? `worker ${who.join(".")}` : "director") + read;
    const card = el("article", { className: "card writing", style: `--hue:${hue(worker)}`, "aria-label": name }, el("h3", {}, name, count), body);
    lanes.set(key, { who, worker, text: "", tokens: 0, card, body, count });
    place(card, path, worker);
    if (path.length === 2 && worker === 1) say(`Round ${path[0] + 1}: workers are writing side by side.`);
    if (!worker) for (const other of lanes.values()) if (other.card !== card) other.card.classList.remove("writing");
    if (worker && path.at(-1)) lanes.get(segmentPath(above, thread.at(-2)))?.card.classList.remove("writing");
  }
  return lanes.get(key);
}

function place(card, path, worker) {
  if (!worker) { $("texts").append(card); return; }
  const round = path[0] + 1;
  let grid = $(`round-${round}`);
  if (!grid) {
    grid = el("div", { className: "workers", id: `round-${round}`, role: "group", "aria-label": `workers of round ${round}` });
    $("texts").append(grid);
  }
  grid.append(card);
  grid.style.setProperty("--across", grid.children.length);
}

function hear(delta) {
  if (delta.content) $("answer").textContent += delta.content;
  if (delta.worker === undefined) return;                   // in reading order, for clients without lanes
  const mine = lane([...(delta.of ?? []), delta.round - 1, delta.worker]);
  mine.text += delta.text;
  mine.tokens += delta.tokens;
  if (mine.worker && delta.text.includes(`</worker_${mine.worker}>`)) mine.card.classList.remove("writing");
  if (!dirty) { dirty = true; requestAnimationFrame(draw); }
}

/** Boxes in tokens along the longest path; the workers of a fork start together. */
function boxes() {
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

function draw() {
  dirty = false;
  for (const one of lanes.values()) {
    const end = one.body.scrollTop + one.body.clientHeight >= one.body.scrollHeight - 4;
    if (one.body.textContent.length !== one.text.length) one.body.textContent = one.text;
    one.count.textContent = `${number(one.tokens)} tokens`;
    if (end) one.body.scrollTop = one.body.scrollHeight;
  }
  const { found, longest, total } = boxes();
  seconds = (performance.now() - began) / 1000;
  pairs($("facts"), [["longest path", number(longest)], ["total tokens", number(total)], ["parallelism", (total / Math.max(1, longest)).toFixed(2)],
    ["seconds", seconds.toFixed(2)]]);
  $("tree").replaceChildren(tree(found, longest));
}

function tree(found, longest) {
  const names = [...new Set(found.map(box => box.who.join(".")))].sort((a, b) => a.localeCompare(b, "en", { numeric: true })), left = 68, row = 22, gap = 8;
  const width = Math.max(300, $("tree").clientWidth - 24 - left), scale = width / Math.max(1, longest), y = at => at * (row + gap);
  const height = y(names.length - 1) + row + 20, named = who => who ? `worker ${who}` : "director";
  const label = `director and ${names.length - 1} workers to scale: longest path ${longest} tokens`;
  const svg = el("svg", { viewBox: `0 0 ${left + width} ${height}`, height, role: "img", "aria-label": label });
  names.forEach((who, at) => svg.append(el("text", { x: 0, y: y(at) + 15 }, named(who))));
  for (const box of found) {
    const who = box.who.join("."), wide = Math.max(1, box.tokens * scale);
    const rect = el("rect", { x: left + box.x * scale, y: y(names.indexOf(who)), width: wide, height: row, rx: 3, style: `fill:${hue(box.worker)}` });
    rect.append(el("title", {}, `${named(who)}: ${box.tokens} tokens`));
    svg.append(rect);
  }
  svg.append(el("text", { x: left, y: height - 3 }, "0"), el("text", { x: left + width, y: height - 3, "text-anchor": "end" }, `${number(longest)} tokens on the longest path`));
  return svg;
}

/* ---- asking ---- */
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

function request() {
  const body = { messages: [{ role: "user", content: $("question").value }], stream: true, stream_options: { include_usage: true } };
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("budget").value !== "") body.max_completion_tokens = Number($("budget").value);
  if ($("sequential").checked) body.reasoning_effort = "none";
  return JSON.stringify(body);
}

async function refusal(answer) {
  if (answer.status === 401) { $("key-label").hidden = false; $("key").focus(); return "This server wants an API key."; }
  const error = (await answer.json().catch(() => ({}))).error;
  return error?.message ?? `The server answered ${answer.status}.`;
}

async function ask() {
  if (running || !$("question").value.trim()) return;
  running = new AbortController();
  $("ask").disabled = true;
  $("stop").hidden = false;
  say("The director is writing.");
  try {
    const answer = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: request(), signal: running.signal });
    if (!answer.ok) { say(await refusal(answer), true); return; }
    start();
    await read(answer);
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped." : `The connection to the server was lost (${error.message}).`, true);
  } finally {
    running = null;
    $("ask").disabled = false;
    $("stop").hidden = true;
    for (const one of lanes?.values() ?? []) one.card.classList.remove("writing");
  }
}

async function read(answer) {
  let finish = null, usage = null;
  for await (const event of events(answer)) {
    if (event.error) { say(event.error.message, true); return; }
    usage = event.usage ?? usage;
    for (const choice of event.choices) { hear(choice.delta); finish = choice.finish_reason ?? finish; }
  }
  draw();
  const details = usage.completion_tokens_details, cut = finish === "length" ? " The budget ended it." : "";
  if (!$("answer").textContent) $("answer").textContent = "none: the director wrote no answer";
  say(`${cut ? "Ended" : "Answered"} after ${seconds.toFixed(2)} s: ${number(details.longest_path_tokens)} tokens on the longest path, ${number(usage.completion_tokens)} sampled by director and ${details.workers} workers.${cut}`);
}

$("form").addEventListener("submit", event => { event.preventDefault(); ask(); });
$("stop").addEventListener("click", () => running?.abort());
$("key").addEventListener("change", about);
document.addEventListener("keydown", event => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(); }
});
addEventListener("resize", () => { if (lanes?.size) draw(); });
about();
