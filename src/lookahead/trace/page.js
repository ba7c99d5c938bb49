
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const names = data.vocabulary;
const PARTS = ["draft", "forward", "verify", "commit"];
const families = [...new Set(data.sources.map((name) => name.split(", ")[0]))];
let text = data.texts[0], current = 0, nodes = [], order = [], chosen = 0, playing = null;

const family = (evidence) => data.sources[data.evidence[evidence][0]].split(", ")[0];
const KNOWN = ["context match", "n-gram memory", "rejected sibling", "embedding neighbour", "recent prediction", "n-gram pool"];
// The same colour for a source on every page; further ones share what is left.
const color = (name) => `var(--s${KNOWN.includes(name) ? KNOWN.indexOf(name) : 6 + (families.indexOf(name) % 2)})`;
const colorOf = (node) => (node.number ? color(family(node.evidence)) : "var(--text)");
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((total, value) => total + value, 0);

function cell(content, tag = "td", kind = "") {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.append(content);
  return element;
}

function code(token) {
  return cell(visible(names[token], 40), "code");
}

function row(cells, tag = "td") {
  const line = document.createElement("tr");
  cells.forEach((each) => {
    const made = each instanceof HTMLTableCellElement ? each : cell(each, tag);
    if (tag === "th") made.scope = "col";
    line.append(made);
  });
  return line;
}

function table(id, head, rows) {
  const top = document.createElement("thead"), body = document.createElement("tbody");
  top.append(row(head, "th"));
  body.append(...rows);
  at(id).replaceChildren(top, body);
}

function bar(share, kind, style = "") {
  const element = document.createElement("span");
  element.className = `bar ${kind}`;
  element.style = `width: ${(3 * share).toFixed(2)}rem; ${style}`;
  return element;
}

function open(index) {
  text = data.texts[index];
  const drafted = sum(text.steps.map((step) => step.t.length - (step.w?.length ?? 0))), accepted = sum(text.steps.map((step) => step.a.length));
  const steps = text.steps.length;
  at("summary").innerHTML = `<b>${text.tokens}</b> tokens in <b>${steps}</b> steps: S = <b>${(text.tokens / Math.max(steps, 1)).toFixed(2)}</b> tokens per step, where plain decoding has 1. <b>${(text.nodes / Math.max(steps, 1)).toFixed(1)}</b> nodes per step; <b>${accepted}</b> of <b>${drafted}</b> drafted tokens were accepted.`;
  at("step").max = Math.max(steps, 1);
  const piece = (content, kind) => Object.assign(document.createElement("span"), { textContent: content, className: kind });
  at("text").replaceChildren(piece(text.prompt, "prompt"), ...text.steps.map((step, number) => {
    const span = piece(step.x, `step${number % 4}`);
    span.dataset.step = number;
    return span;
  }));
  tellSources();
  tellParts();
  drawCharts();
  show(0);
}

function show(number) {
  if (!text.steps.length) {
    at("said").textContent = "No step was recorded.";
    return;
  }
  current = Math.min(Math.max(number, 0), text.steps.length - 1);
  const step = text.steps[current];
  at("step").value = current + 1;
  at("step").setAttribute("aria-valuetext", `step ${current + 1} of ${text.steps.length}`);
  at("said").textContent = `Step ${current + 1} of ${text.steps.length}: ${step.t.length ? `${step.t.length} drafted, ${step.a.length} accepted` : "nothing drafted"}, ${count(step.k.length, "token")} added`;
  [at("first").disabled, at("back").disabled] = [current === 0, current === 0];
  [at("on").disabled, at("last").disabled] = [current === text.steps.length - 1, current === text.steps.length - 1];
  const spans = at("text").querySelectorAll("span[data-step]");
  spans.forEach((span, place) => {
    span.classList.toggle("later", place > current);
    span.classList.toggle("now", place === current);
  });
  const box = at("text"), here = spans[current];
  box.scrollTop += here.getBoundingClientRect().bottom - box.getBoundingClientRect().top - 0.66 * box.clientHeight;
  nodes = nodesOf(step);
  order = drawTree(at("tree"), nodes, names, step.k.at(-1), colorOf, choose);
  at("scroll").scrollTo(0, 0);
  tellLegend(step);
  tellNodes();
  tellTaught(step);
  drawMask(at("mask"), nodes, getComputedStyle(document.documentElement).getPropertyValue("--accent"));
  document.querySelectorAll(".chart .mark").forEach((line) => {
    const x = ((current + 0.5) / text.steps.length) * 300;
    line.setAttribute("d", `M${x} 0V100`);
  });
  choose(step.a.at(-1) ?? 0, false);
}

function tellLegend(step) {
  const counts = new Map();
  step.e.forEach((evidence, index) => {
    const told = counts.get(family(evidence)) ?? [0, 0];
    told[0] += 1;
    told[1] += nodes[index + 1].taken ? 1 : 0;
    counts.set(family(evidence), told);
  });
  at("legend").replaceChildren(...[...counts].sort((one, other) => other[1][0] - one[1][0]).map(([name, [sent, accepted]]) => {
    const item = document.createElement("li"), mark = document.createElement("i");
    mark.style.color = color(name);
    item.append(mark, `${name}: ${sent}${accepted ? `, ${accepted} accepted` : ""}`);
    return item;
  }));
}

function evidenceOf(node) {
  return data.evidence[node.evidence].map((source) => data.sources[source]);
}

function fate(node) {
  if (node.taken) return "accepted";
  return node.window ? "of the window: read, never accepted" : "not accepted";
}

function choose(number, scroll = true) {
  chosen = number;
  const node = nodes[number], box = at("node"), step = text.steps[current];
  at("tree").querySelectorAll(".node").forEach((mark) => mark.classList.toggle("chosen", Number(mark.dataset.node) === number));
  const first = document.createElement("div"), second = document.createElement("div");
  first.append(code(node.token));
  if (number) {
    first.append(` ${fate(node)}. Named by ${evidenceOf(node).join("; ")}.`);
    if (node.likely >= 0) first.append(` The path to it was taken to be ${percent(node.likely / 1000)} likely.`);
  } else first.append(" is the root, the last token of the text.");
  if (node.said >= 0) {
    second.append("After it the model's likeliest token is ", code(node.said));
    if (node.certainty) second.append(` (${node.certainty}%)`);
    const place = [0, ...step.a].indexOf(number);
    if (place >= 0 && step.k[place] !== undefined && step.k[place] !== node.said) second.append("; selected was ", code(step.k[place]));
    second.append(".");
  } else second.append("What the model says after it was not read.");
  box.replaceChildren(first, second);
  if (scroll) at("tree").querySelector(".chosen")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function tellNodes() {
  table("nodes", ["Node", cell("Token", "th", "left"), "After", "Likely", cell("Fate", "th", "left"), cell("Source", "th", "left"), cell("The model's token after it", "th", "left")], nodes.slice(1).map((node) => row([
    `${node.number}`, cell(code(node.token), "td", "left"), node.parent ? `${node.parent}` : "root", node.likely < 0 ? "–" : percent(node.likely / 1000),
    cell(node.taken ? "accepted" : "–", "td", "left"), cell(evidenceOf(node).join("; "), "td", "left"),
    cell(node.said < 0 ? "–" : code(node.said), "td", "left"),
  ])));
}

function tellTaught(step) {
  const before = step.n === undefined ? "" : ` The memory had ${count(step.n, "entry").replace("entrys", "entries")} before.`;
  at("memory").textContent = `${count(step.r, "prediction")} of the model, one for each node that was read, went to the drafter.${before} These are on the path of the text:`;
  const path = [0, ...step.a].slice(0, step.k.length);
  table("taught", ["After", cell("The model's likeliest tokens", "th", "left"), "Selected"], path.map((number, place) => {
    const told = cell("", "td", "left");
    (step.l?.[place] ?? (nodes[number].said < 0 ? [] : [[nodes[number].said, 0]])).forEach(([token, share]) => told.append(code(token), share ? ` ${percent(share / 1000)} ` : " "));
    return row([code(nodes[number].token), told, code(step.k[place])]);
  }));
}

function tellSources() {
  const counts = new Map();
  text.steps.forEach((step) => {
    const taken = new Set(step.a);
    step.e.forEach((evidence, index) => {
      const name = data.sources[data.evidence[evidence][0]], told = counts.get(name) ?? [0, 0];
      told[0] += 1;
      told[1] += taken.has(index + 1) ? 1 : 0;
      counts.set(name, told);
    });
  });
  const most = Math.max(1, ...[...counts.values()].map((told) => told[1]));
  table("sources", ["Source", "Sent", "Accepted", "Share", ""], [...counts].sort((one, other) => other[1][1] - one[1][1] || other[1][0] - one[1][0]).map(([name, [sent, accepted]]) => row([
    name, `${sent}`, `${accepted}`, percent(accepted / sent), cell(bar(accepted / most, "", `color: ${color(name.split(", ")[0])}`), "td", "left"),
  ])));
}

function tellParts() {
  const totals = PARTS.map((_, part) => sum(text.steps.map((step) => step.d[part]))), all = Math.max(1, sum(totals));
  table("parts", ["Part", "Total", "Per step", "Share", ""], PARTS.map((name, part) => row([
    name, `${(totals[part] / 1000).toFixed(1)} ms`, `${(totals[part] / 1000 / Math.max(1, text.steps.length)).toFixed(2)} ms`, percent(totals[part] / all), cell(bar(totals[part] / all, `part${part}`), "td", "left"),
  ])));
}

function chart(title, top, unit, draw) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  caption.append(...(Array.isArray(title) ? title : [title]));
  const svg = made("svg", { class: "chart", viewBox: "-30 -6 334 122", preserveAspectRatio: "none", role: "img", "aria-label": caption.textContent });
  const y = (value) => 100 - (100 * value) / top;
  svg.append(made("rect", { x: 0, y: 0, width: 300, height: 100, class: "behind" }));
  for (const value of [0, top / 2, top]) {
    svg.append(made("path", { d: `M0 ${y(value)}H300`, class: "grid" }));
  }
  draw(svg, (index) => (index / text.steps.length) * 300, y, 300 / text.steps.length);
  svg.append(made("path", { class: "mark" }));
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * 334 - 30;
    show(Math.floor((x / 300) * text.steps.length));
  });
  const holder = document.createElement("div");
  holder.style = "position: relative";
  for (const value of [0, top / 2, top]) {
    const tick = document.createElement("span");
    tick.textContent = `${Number.isInteger(value) ? value : value.toFixed(1)}${unit}`;
    tick.style = `position: absolute; left: 0; width: ${(28 / 334) * 100}%; text-align: right; font-size: .7rem; color: var(--soft); line-height: 1; top: calc(${((y(value) + 6) / 122) * 100}% - .35rem)`;
    holder.append(tick);
  }
  holder.append(svg);
  figure.append(caption, holder);
  return figure;
}

const nice = (value) => [1, 2, 4, 6, 8, 10, 16, 20, 32, 40, 64, 80, 100, 128, 160, 200, 400, 1000, 4096].find((each) => each >= value) ?? value;

function drawCharts() {
  const steps = text.steps;
  const near = (index) => steps.slice(Math.max(0, index - 7), index + 1);
  const rolling = steps.map((_, index) => sum(near(index).map((step) => step.k.length)) / near(index).length);
  const times = steps.map((step) => sum(step.d) / 1000);
  const sorted = [...times].sort((one, other) => one - other), usual = sorted[Math.floor(0.95 * (sorted.length - 1))] ?? 1;
  const rect = (x, y, width, height, kind) => made("rect", { x, y, width: Math.max(width * 0.86, 0.4), height: Math.max(height, 0), class: kind });
  at("charts").replaceChildren(
    chart("Tokens of each step; line: S over 8 steps", nice(Math.max(1, ...steps.map((step) => step.k.length))), "", (svg, x, y, width) => {
      steps.forEach((step, index) => svg.append(rect(x(index), y(step.k.length), width, 100 - y(step.k.length), "")));
      svg.append(made("path", { class: "curve", d: rolling.map((value, index) => `${index ? "L" : "M"}${x(index + 0.5)} ${y(value)}`).join(""), "vector-effect": "non-scaling-stroke" }));
    }),
    chart("Nodes of each step; blue: accepted", nice(Math.max(1, ...steps.map((step) => step.t.length + 1))), "", (svg, x, y, width) => {
      steps.forEach((step, index) => {
        svg.append(rect(x(index), y(step.t.length + 1), width, 100 - y(step.t.length + 1), ""));
        svg.append(rect(x(index), y(step.a.length), width, 100 - y(step.a.length), "hit"));
      });
    }),
    chart(["Milliseconds: ", ...PARTS.flatMap((name, part) => [part ? ", " : "", Object.assign(document.createElement("span"), { textContent: name, className: `part part${part}` })])], nice(Math.max(1, usual)), "", (svg, x, y, width) => {
      steps.forEach((step, index) => {
        let below = 0;
        step.d.forEach((each, part) => {
          const top = Math.max(y((below + each) / 1000), 0), bottom = Math.max(y(below / 1000), 0);
          svg.append(rect(x(index), top, width, bottom - top, `part${part}`));
          below += each;
        });
      });
    }),
  );
}

function play(on) {
  clearInterval(playing);
  playing = on ? setInterval(() => { if (current >= text.steps.length - 1) play(false); else show(current + 1); }, 700) : null;
  at("play").textContent = on ? "Pause" : "Play";
  at("play").setAttribute("aria-pressed", String(on));
}

at("step").addEventListener("input", () => show(Number(at("step").value) - 1));
at("first").addEventListener("click", () => show(0));
at("back").addEventListener("click", () => show(current - 1));
at("on").addEventListener("click", () => show(current + 1));
at("last").addEventListener("click", () => show(text.steps.length - 1));
at("play").addEventListener("click", () => play(playing === null));
at("which").addEventListener("change", () => open(Number(at("which").value)));
at("text").addEventListener("click", (event) => { if (event.target.dataset.step) show(Number(event.target.dataset.step)); });
at("scroll").addEventListener("keydown", (event) => {
  const way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!way || !order.length) return;
  event.preventDefault();
  choose(order[Math.min(Math.max(order.indexOf(chosen) + way, 0), order.length - 1)]);
});
document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
  const step = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: text.steps.length - 1 }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  show(step);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(current));

at("facts").textContent = [...Object.entries(data.facts).map(([name, value]) => `${name}: ${value}`), `lookahead ${data.version}`].join(" · ");
at("chooser").hidden = data.texts.length < 2;
data.texts.forEach((each, index) => at("which").append(new Option(`${index + 1}: ${[...each.prompt.trimEnd()].slice(-40).join("")}`, index)));
if (text) open(0);
else at("said").textContent = "Nothing was recorded.";
