"use strict";

const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
let model = null;
let messages = [];
let running = null; // the AbortController of the answer that is being made

function headers() {
  const key = at("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function say(text, isError = false) {
  at("status").textContent = text;
  at("status").classList.toggle("error", isError);
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers() });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the server answered with status ${answer.status}`);
}

function explain(error) {
  if (error.name === "AbortError") return "Stopped.";
  if (error instanceof TypeError) return "The server went away. Start it again and send once more.";
  return error.message;
}

async function lookAround() {
  try {
    if (model === null) {
      model = (await (await ask("v1/models")).json()).data[0].id;
      at("model").textContent = model;
      if (at("status").classList.contains("error")) say("");
    }
    const load = await (await ask("load")).json();
    at("load").textContent = `${load.running} running, ${load.waiting} waiting, ${(load.kv_bytes / 2 ** 20).toFixed(1)} MiB of keys and values`;
  } catch (error) {
    at("load").textContent = "load unknown";
    if (model === null) say(explain(error), true);
  }
}

function turn(parent, title) {
  const box = parent.appendChild(document.createElement("div"));
  box.className = "turn";
  const head = box.appendChild(document.createElement("h2"));
  head.textContent = title;
  const text = box.appendChild(document.createElement("pre"));
  const copy = head.appendChild(document.createElement("button"));
  copy.type = "button";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", `Copy: ${title}`);
  copy.addEventListener("click", () => copyText(text));
  return text;
}

async function copyText(place) {
  try {
    await navigator.clipboard.writeText(place.textContent); // which pages have that come by https or from this machine
    say("Copied.");
  } catch {
    getSelection().selectAllChildren(place);
    say("The text is selected; copy it with the keyboard.");
  }
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function stream(place, enabled, row, seed) {
  const started = performance.now();
  let tokens = 0, steps = 0;
  const system = at("system").value.trim();
  const answer = await ask("v1/chat/completions", {
    method: "POST",
    signal: running.signal,
    body: JSON.stringify({
      model, messages: system ? [{ role: "system", content: system }, ...messages] : messages, stream: true,
      temperature: Number(at("temperature").value), top_p: Number(at("top_p").value), max_tokens: Number(at("most").value),
      seed, // one for both ways, so that sampled texts are the same
      lookahead: { enabled, steps: true },
    }),
  });
  for await (const event of events(answer)) {
    running.signal.throwIfAborted(); // what has arrived already is still read
    if (event.error) throw new Error(event.error.message);
    const piece = event.choices[0]?.delta.content ?? "";
    if (event.lookahead) {
      tokens += event.lookahead.tokens;
      steps += 1;
      if (enabled && event.lookahead.tree) draw(event.lookahead.tree, steps);
    }
    if (piece) {
      const span = place.appendChild(document.createElement("span"));
      span.className = `step${steps % 4}`;
      span.textContent = piece;
      at("log").scrollTop = at("log").scrollHeight;
    }
    if (steps) {
      const seconds = (performance.now() - started) / 1000;
      show(row, (tokens / seconds).toFixed(1), (tokens / steps).toFixed(2), steps);
    }
  }
}

function show(row, ...values) {
  [...at(row).querySelectorAll("td")].forEach((cell, place) => { cell.textContent = values[place] ?? "–"; });
}

function visible(token) {
  const shown = token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·");
  return shown.length > 10 ? shown.slice(0, 9) + "…" : shown;
}

const SOURCES = ["context match", "n-gram memory", "rejected sibling", "embedding neighbour", "recent prediction", "n-gram pool"];

// The same colour for a source in every step; further ones share what is left.
function colorOf(families, source) {
  const family = source.split(", ")[0], known = SOURCES.indexOf(family);
  return `var(--s${known >= 0 ? known : 6 + (families.indexOf(family) % 2)})`;
}

const LETTER = 6.7, GAP = 14, COLUMN = 24 + 10 * LETTER + GAP; // of labels of up to 10 letters, in pixels

function draw(tree, step) {
  const taken = new Set([0, ...tree.path]);
  const children = tree.tokens.map(() => []);
  const depth = tree.parents.map(() => 0);
  tree.parents.forEach((parent, node) => {
    if (node) { children[parent].push(node); depth[node] = depth[parent] + 1; }
  });
  const height = [];
  let leaves = 0;
  const place = (node) => {
    children[node].forEach(place);
    const [first, last] = [children[node][0], children[node].at(-1)];
    height[node] = first === undefined ? leaves++ : (height[first] + height[last]) / 2;
  };
  place(0);
  const wide = Math.max(...depth) + 1, x = (node) => 12 + depth[node] * COLUMN, y = (node) => 16 + height[node] * 22;
  const svg = at("tree");
  svg.setAttribute("width", Math.max(wide * COLUMN + 12, 240));
  svg.setAttribute("height", Math.max(leaves * 22 + 12, 60));
  const made = (name, attributes) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const lines = [], marks = [];
  const families = [...new Set(tree.sources.map((name) => name.split(", ")[0]))];
  tree.tokens.forEach((token, node) => {
    const kind = taken.has(node) ? "taken" : "";
    const source = node ? tree.sources[node - 1] : "the last token of the text", likely = node ? tree.probabilities[node - 1] : null;
    const color = node ? colorOf(families, source) : "var(--text)";
    if (node) { // from behind the parent's label, between two columns, so that it crosses no label
      const parent = tree.parents[node], begin = x(parent) + 10 + LETTER * visible(tree.tokens[parent]).length;
      lines.push(made("path", { d: `M ${begin} ${y(parent)} H ${x(node) - GAP} V ${y(node)} H ${x(node) - 5}`, class: kind }));
    }
    const mark = made("circle", { cx: x(node), cy: y(node), r: 5, class: kind });
    mark.style.color = color; // as an attribute the page's security policy would not let it count
    mark.appendChild(made("title", {})).textContent = `${source}${likely === null ? "" : `; path taken to be ${(100 * likely).toFixed(1)}% likely`}`;
    marks.push(mark);
    const label = made("text", { x: x(node) + 7, y: y(node) + 4 });
    label.textContent = visible(token);
    marks.push(label);
  });
  lines.sort((one, other) => one.classList.contains("taken") - other.classList.contains("taken")); // these on top
  svg.replaceChildren(...lines, ...marks);
  at("legend").replaceChildren(...families.map((name) => {
    const item = document.createElement("li");
    item.appendChild(document.createElement("i")).style.color = colorOf(families, name);
    item.append(`${name}: ${tree.sources.filter((source) => source.split(", ")[0] === name).length}`);
    return item;
  }));
  at("caption").textContent = `Step ${step}: ${tree.tokens.length - 1} tokens drafted, ${tree.path.length} accepted.`;
}

async function send() {
  const text = at("text").value;
  if (!text.trim() || running) return;
  if (model === null) await lookAround();
  if (model === null) return;
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  say("Answering…");
  show("with");
  show("without");
  turn(at("log"), "You").textContent = text;
  const talk = messages; // which "Clear" may replace
  talk.push({ role: "user", content: text });
  at("text").value = "";
  const compare = at("compare").checked;
  const sides = at("log").appendChild(document.createElement("div"));
  sides.className = "sides";
  const place = turn(sides, compare ? "Answer, with lookahead" : "Answer");
  const plain = compare ? turn(sides, "Without lookahead") : null;
  const seed = at("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : Number(at("seed").value);
  try {
    await stream(place, true, "with", seed);
    if (plain) await stream(plain, false, "without", seed); // afterwards, so that they share no step
    talk.push({ role: "assistant", content: place.textContent });
    say("Done.");
  } catch (error) {
    if (error.name === "AbortError" && place.textContent) talk.push({ role: "assistant", content: place.textContent });
    else talk.pop();
    if (error.name !== "AbortError") at("text").value = text;
    say(explain(error), error.name !== "AbortError");
  } finally {
    running = null;
    at("send").disabled = false;
    at("stop").disabled = true;
    at("text").focus();
  }
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("form").addEventListener("invalid", ({ target }) => { // also in settings that are closed, where nothing would show it
  target.closest("details")?.setAttribute("open", "");
  say(`${target.labels[0].textContent.trim()}: ${target.validationMessage}`, true);
}, true);
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); at("form").requestSubmit(); }
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => { running?.abort(); messages = []; at("log").replaceChildren(); say(""); });
at("key").addEventListener("change", () => { model = null; lookAround(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
lookAround();
setInterval(lookAround, 2000);
