"use strict";
/* One response: its facts, its tree to scale, its texts. */

const HUES = [168, 32, 318, 262, 88, 4];
function hue(worker) {
  const degrees = HUES[(worker - 1) % HUES.length];
  return worker ? `light-dark(hsl(${degrees} 72% 36%), hsl(${degrees} 58% 62%))` : "var(--director)";
}

const path = thread => typeof thread === "number" ? thread : thread.reduce((sum, part) => sum + (typeof part === "number" ? part : Math.max(...part.map(path))), 0);

/** Boxes of a response in tokens along the longest path: {segment, who, name, worker, lane, round, x, length, onPath}. `who` are the numbers of its
    worker and of those above it, a lane each. The first box of a worker has `spawned`, the lane of its spawner; the last `end`, where its fork
    ends, and `read`, the lane that continues there. */
function boxes(shape) {
  const found = [];
  const walk = (parts, who, x, onPath) => {
    let round = 0;
    parts.forEach((part, at) => {
      if (typeof part === "number") {
        const name = who.length ? `worker ${who.join(".")}` : "director";
        found.push({ segment: found.length, who, name, worker: who.at(-1) ?? 0, round, x, length: part, onPath });
        x += part;
        return;
      }
      const lengths = part.map(path), longest = Math.max(...lengths), spawner = found.length - 1;
      part.forEach((worker, i) => {
        const first = found.length, mine = [...who, i + 1];
        walk(typeof worker === "number" ? [worker] : worker, mine, x, onPath && lengths[i] === longest);
        found[first].spawned = spawner;
        found[first].round = round;
        const last = found.findLast(box => box.who.length === mine.length);
        Object.assign(last, { end: x + longest, read: at + 1 < parts.length ? spawner : null });
      });
      x += longest;
      round++;
    });
  };
  walk(shape, [], 0, true);
  const order = [...new Map(found.map(box => [box.who.join("."), box.who])).values()].sort((a, b) => { for (let i = 0; ; i++) if (a[i] !== b[i]) return (a[i] ?? 0) - (b[i] ?? 0); else if (a[i] === undefined) return 0; });
  const lanes = new Map(order.map((who, lane) => [who.join("."), lane]));
  for (const box of found) box.lane = lanes.get(box.who.join("."));
  return found;
}

function thumbnail(row) {
  const width = 190, height = 15, scale = width / longestOfAll, lane = height / mostLanes;
  const svg = el("svg", { width, height });
  for (const box of boxes(columns.shape[row]))
    svg.append(el("rect", { x: box.x * scale, y: box.lane * lane, width: Math.max(.8, box.length * scale), height: lane - .6, style: `fill:${hue(box.worker)}` }));
  return svg;
}

let shownRow = null, turn = 0;
async function showDetail(row) {
  const mine = ++turn;
  if (row === undefined) { shownRow = null; $("detail").replaceChildren(el("p", { className: "empty" }, "No response is listed: clear the filter or the search.")); return; }
  const segments = await details(row);
  if (mine !== turn) return;                                // another one has been chosen meanwhile
  const moved = shownRow !== row;
  shownRow = row;
  $("detail").dataset.row = row;
  $("detail").replaceChildren(...heading(row), tree(row, segments), toolbar(segments), ...texts(row, segments));
  paint(segments);
  if (moved) $("detail").scrollTop = 0;
  try { history.replaceState(null, "", `#${row}`); } catch { /* some browsers refuse that for files */ }
}

function siblings(row) { return rows.filter(other => columns.problem[other] === columns.problem[row]); }

/* How often the token that ended a segment ran on after its tag, by what it wrote there. */
function overshoots(among) {
  const counts = {};
  for (const row of among) for (const [kind, count] of Object.entries(columns.overshoots[row])) counts[kind] = (counts[kind] ?? 0) + count;
  return Object.entries(counts).map(([kind, count]) => `${number(count)} ${kind}`).join(", ");
}

function heading(row) {
  const [id, question, gold] = problems[columns.problem[row]], [, kind] = verdict(row), same = siblings(row), flaw = columns.flaw[row];
  const step = columns.step[row] === null ? "" : ` · step ${columns.step[row]}`;
  const badge = (text, className, title) => el("span", { className: `badge ${className}`, title }, text);
  const facts = {
    answer: columns.answer[row] ?? "none", "right answer": gold, reward: fixed(columns.reward[row], 3), advantage: fixed(columns.advantage[row], 3),
    "longest path": number(columns.longest[row]), "total tokens": number(columns.total[row]), parallelism: fixed(parallelism(row)),
    "mean log-prob": fixed(columns.logprob[row], 3), ...(overshoots([row]) ? { overshoots: overshoots([row]) } : {}),
  };
  return [
    el("h2", {}, id, el("small", {}, `sample ${columns.sample[row]}${step}`), badge(columns.verdict[row] ?? "not graded", kind, "verdict of the grader"),
      flaw ? badge(`ill-formed: ${flaw}`, "other", FLAWS[flaw]) : badge("well-formed", "correct"),
      columns.finish[row] === "answered" ? null : badge(columns.finish[row], "other", FINISHES[columns.finish[row]])),
    flaw && FLAWS[flaw] ? el("small", { className: "other" }, `${flaw}: ${FLAWS[flaw]}`) : null,
    same.length > 1 ? el("div", { className: "siblings" }, ...same.slice(0, 64).map(other => el("button", {
      title: "another response to this problem (n, p)", "aria-current": other === row, onclick: () => jump(other) },
      el("span", { className: verdict(other)[1] }, verdict(other)[0]), ` ${fixed(columns.reward[other])}`))) : null,
    el("div", { className: "question" }, question),
    el("dl", { className: "facts" }, ...Object.entries(facts).map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", { className: name.includes("answer") ? "answer" : "" }, value)))),
  ].filter(Boolean);
}

function tree(row, segments) {
  const total = Math.max(1, columns.longest[row]), all = boxes(columns.shape[row]), lanes = Math.max(0, ...all.map(box => box.lane));
  const left = 62, lane = 22, gap = 9, width = Math.max(300, $("detail").clientWidth - 70 - left), scale = width / total;
  const y = at => at * (lane + gap), height = y(lanes) + lane + 26;
  const svg = el("svg", { viewBox: `0 0 ${left + width} ${height}`, height, role: "img", "aria-label": "director and workers over tokens of the longest path" });
  for (const [at, name] of new Map(all.map(box => [box.lane, box.name]))) svg.append(el("text", { x: 0, y: y(at) + 15 }, name));
  let unit = 10 ** Math.floor(Math.log10(total / 4 || 1));
  unit = Math.max(1, [1, 2, 5, 10].map(times => times * unit).find(tick => total / tick <= 9) ?? unit);
  for (let tick = 0; tick <= total; tick += unit) {
    svg.append(el("line", { x1: left + tick * scale, x2: left + tick * scale, y1: 0, y2: height - 18, style: "stroke:var(--line)" }),
      el("text", { x: left + tick * scale, y: height - 5, "text-anchor": "middle" }, number(tick)));
  }
  for (const box of all) {                                  // down where it is spawned, along while it waits, up where it is read
    const x = left + box.x * scale, middle = y(box.lane) + lane / 2, from = at => y(all[at].lane) + lane;
    if (box.spawned !== undefined) svg.append(el("path", { d: `M${x} ${from(box.spawned)}V${middle}`, class: "link" }));
    if (box.end === undefined) continue;
    const end = left + box.end * scale;
    if (box.x + box.length < box.end) svg.append(el("path", { d: `M${x + box.length * scale} ${middle}H${end}`, class: "link waiting" }));
    if (box.read !== null) svg.append(el("path", { d: `M${end} ${middle}V${from(box.read)}`, class: "link" }));
  }
  for (const box of all) {
    const x = left + box.x * scale, wide = Math.max(1.5, box.length * scale), values = measured(segments[box.segment]);
    const place = { x, y: y(box.lane), width: wide, height: lane, rx: Math.min(4, wide / 2) };
    const group = el("g", { class: "segment", "data-segment": box.segment },
      el("rect", { ...place, style: `fill:${values ? "var(--paper)" : hue(box.worker)};opacity:${values || box.onPath ? 1 : .55}` }));
    if (values) heat(group, place, segments[box.segment].inserted, box.length, values);
    group.append(el("rect", { ...place, class: "outline", style: `fill:none;stroke:${values ? hue(box.worker) : "none"}` }));
    for (const [token, version] of (segments[box.segment].changes ?? []).slice(1)) {        // other weights from here on
      const at = x + (segments[box.segment].inserted + token) * wide / Math.max(1, box.length);
      group.append(el("line", { x1: at, x2: at, y1: y(box.lane) - 3, y2: y(box.lane) + lane + 3, class: "change", "data-version": version }));
    }
    if (wide > 34) group.append(el("text", { x: x + wide / 2, y: y(box.lane) + 15, "text-anchor": "middle", style: `fill:${values ? "var(--ink)" : "var(--card)"};font-weight:600` }, number(box.length)));
    group.addEventListener("click", () => { const card = $(`segment-${box.segment}`); card.scrollIntoView({ block: "center" }); card.classList.remove("flash"); void card.offsetWidth; card.classList.add("flash"); });
    group.addEventListener("mousemove", event => tip(event, `${box.name}${box.worker ? `, round ${box.round + 1}` : ""}\n${number(box.length)} tokens${meanOf(segments[box.segment].logprobs)}${weightsOf(segments[box.segment])}`));
    group.addEventListener("mouseleave", () => tip());
    svg.append(group);
  }
  return el("div", { className: "tree" }, svg);
}

const weightsOf = segment => segment.changes ? `\nweights after ${segment.changes.map(change => number(change[1])).join(", ")} steps` : "";
const meanOf = logprobs => logprobs.length ? `, mean log-prob ${fixed(-logprobs.reduce((a, b) => a + b, 0) / logprobs.length / 100, 3)}` : "";
/** Hundredths of a nat per sampled token of what is being coloured by, or null. */
function measured(segment) {
  const values = state.colour === "log-prob" ? segment.logprobs : state.colour === "entropy" ? segment.entropies : null;
  return values && values.length ? values : null;
}

const SHADES = 16, STRONGEST = { "log-prob": 500, entropy: 250 };  // in hundredths of a nat
const strength = centinats => Math.min(1, Math.max(0, centinats / STRONGEST[state.colour]));
const shade = (part, colour = state.colour) => `hsl(${colour === "entropy" ? 268 : Math.round(48 - 48 * part)} 92% 54% / ${(.85 * part ** .8).toFixed(3)})`;

/** A lane's box filled with one strip per two pixels at most, each the mean of its tokens. */
function heat(group, place, inserted, length, values) {
  const strips = Math.max(1, Math.min(values.length, Math.floor(place.width / 2))), token = place.width / Math.max(1, length);
  for (let strip = 0; strip < strips; strip++) {
    const from = Math.floor(strip * values.length / strips), to = Math.max(from + 1, Math.floor((strip + 1) * values.length / strips));
    const mean = values.slice(from, to).reduce((a, b) => a + b, 0) / (to - from);
    group.append(el("rect", { x: place.x + (inserted + from) * token, y: place.y, width: (to - from) * token + .3, height: place.height, style: `fill:${shade(strength(mean))}` }));
  }
}

const colourings = segments => ["off", "log-prob", ...(segments.some(segment => segment.entropies) ? ["entropy"] : [])];
function toolbar(segments) {
  const steps = state.colour === "entropy" ? [0, 30, 70, 140, 250].map(c => [c, `${c / 100} nats`]) : [[0, "p = 1"], [69, "½"], [230, "0.1"], [461, "0.01"]];
  return el("div", { className: "toolbar" }, "colour by",
    el("span", { className: "choice" }, ...colourings(segments).map(name => el("button", { "aria-pressed": name === state.colour, onclick: () => colour(name) }, name))),
    state.colour === "off" ? null : el("span", { className: "legend" }, ...steps.map(([value, label]) => el("i", { style: `background:${shade(strength(value))}` }, label))),
    state.colour !== "off" && !index.tokens ? el("span", {}, "lanes only: texts are cut at the tags; `dccot view --model PATH` tells tokens apart") : null);
}
function colour(name) { state.colour = name; showDetail(listed[at]); }

function texts(row, segments) {
  const found = [], all = boxes(columns.shape[row]), who = box => box.who.join(".");
  const spawners = new Set(all.filter(box => box.spawned !== undefined).map(box => who(all[box.spawned])));
  let workers = null, block = null;                         // side by side; one that spawned has a line for itself
  for (const box of all) {
    const segment = segments[box.segment], card = el("div", { className: "card", id: `segment-${box.segment}`, style: `--hue:${hue(box.worker)}` },
      el("h3", {}, box.name, el("span", {}, `${number(box.length)} tokens${meanOf(segment.logprobs)}`)), body(segment));
    const mine = spawners.has(who(box)) ? who(box) : `below ${box.who.slice(0, -1).join(".")}`;
    if (box.worker && mine !== block) { workers = el("div", { className: "workers", style: `margin-left:${18 * (box.who.length - 1)}px` }); found.push(workers); }
    block = box.worker ? mine : null;
    (box.worker ? workers.append(card) : found.push(card));
    if (box.worker) workers.style.setProperty("--across", Math.min(workers.children.length, Math.max(1, Math.floor($("detail").clientWidth / 230))));
  }
  return found;
}

function body(segment) {
  const pre = el("pre");
  let from = 0;                                             // tags are faint, what was searched for is marked
  for (const match of segment.text.matchAll(TAG)) {
    marked(pre, segment.text.slice(from, match.index));
    pre.append(el("span", { className: "tag" }, match[0]));
    from = match.index + match[0].length;
  }
  marked(pre, segment.text.slice(from));
  if (segment.lengths) explainTokens(pre, segment);
  return pre;
}

function marked(pre, text) {
  const query = state.query, lower = text.toLowerCase();
  let from = 0;
  if (query && lower.length === text.length)
    for (let hit = lower.indexOf(query); hit >= 0; hit = lower.indexOf(query, from)) {
      pre.append(text.slice(from, hit), el("mark", {}, text.slice(hit, hit + query.length)));
      from = hit + query.length;
    }
  pre.append(text.slice(from));
}

/** Text nodes of an element and where in its text each begins. */
function textNodes(element) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), nodes = [], starts = [];
  for (let at = 0; walker.nextNode(); at += walker.currentNode.length) { nodes.push(walker.currentNode); starts.push(at); }
  return [nodes, starts];
}

/** Colours are laid over the text as CSS highlights, one per shade: thousands of tokens, and not one element more. */
function paint(segments) {
  const ranges = Array.from({ length: SHADES + 1 }, () => []);
  segments.forEach((segment, number) => {
    const values = measured(segment);
    if (!values || !segment.lengths) return;
    const [nodes, starts] = textNodes($(`segment-${number}`).querySelector("pre"));
    let node = 0, from = 0;
    const place = offset => { while (node + 1 < nodes.length && starts[node + 1] <= offset) node++; return [nodes[node], offset - starts[node]]; };
    segment.lengths.forEach((length, i) => {
      const step = i < segment.inserted ? 0 : Math.ceil(SHADES * strength(values[i - segment.inserted]) - .25);
      if (step > 0 && length) {
        const [startContainer, startOffset] = place(from), [endContainer, endOffset] = place(from + length - 1);
        ranges[step].push(new StaticRange({ startContainer, startOffset, endContainer, endOffset: endOffset + 1 }));
      }
      from += length;
    });
  });
  for (const colour of Object.keys(STRONGEST))
    for (let step = 1; step <= SHADES; step++)
      CSS.highlights.set(`${colour}-${step}`, new Highlight(...(colour === state.colour ? ranges[step] : [])));
}
const highlightRules = () => Object.keys(STRONGEST).flatMap(colour => Array.from({ length: SHADES }, (_, i) =>
  `::highlight(${colour}-${i + 1}) { background-color: ${shade((i + 1) / SHADES, colour)}; }`)).join("\n");

/** A token's log-prob and entropy while the pointer is over it. */
function explainTokens(pre, segment) {
  let ends;                                                 // made when first needed
  pre.addEventListener("mousemove", event => {
    const caret = document.caretPositionFromPoint?.(event.clientX, event.clientY);
    const [nodes, starts] = textNodes(pre), node = caret ? nodes.indexOf(caret.offsetNode) : -1;
    if (node < 0) return tip();
    let sum = 0;
    ends ??= segment.lengths.map(length => sum += length);
    const i = ends.findIndex(end => end > starts[node] + Math.max(0, caret.offset - .5)), sampled = i - segment.inserted;
    if (i < 0) return tip();
    const token = JSON.stringify(segment.text.slice(ends[i] - segment.lengths[i], ends[i]));
    if (sampled < 0 || !segment.logprobs.length) return tip(event, `${token}\n${sampled < 0 ? "inserted, not sampled" : "no log-prob recorded"}`);
    const nats = segment.logprobs[sampled] / 100, entropy = segment.entropies ? `\nentropy  ${fixed(segment.entropies[sampled] / 100)}` : "";
    tip(event, `${token}\nlog-prob ${fixed(-nats)}\np        ${Math.exp(-nats).toPrecision(2)}${entropy}`);
  });
  pre.addEventListener("mouseleave", () => tip());
}

function tip(event, text) {
  const box = $("tip");
  box.hidden = !event;
  if (!event) return;
  box.textContent = text;
  box.style.left = `${Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${Math.min(event.clientY + 16, innerHeight - box.offsetHeight - 8)}px`;
}
