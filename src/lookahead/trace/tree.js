"use strict";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 25, LEFT = 8, GAP = 22, LETTER = 7.3, SMALL = 6.1;

function made(name, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

function visible(token, most = 16) {
  const shown = token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·") || "∅";
  return [...shown].length > most ? [...shown].slice(0, most - 1).join("") + "…" : shown;
}

// Nodes of a step as objects; node 0 is the root. The children that were accepted come first, so that the accepted
// path is the topmost line; the others follow in the order in which they were drafted.
function nodesOf(step) {
  const taken = new Set(step.a), window = new Set(step.w ?? []);
  const nodes = [{ number: 0, token: step.o, parent: -1, depth: 0, taken: true, evidence: -1, likely: -1, children: [] }];
  step.t.forEach((token, index) => {
    const number = index + 1, parent = nodes[step.p[index]];
    const node = {
      number, token, parent: parent.number, depth: parent.depth + 1, taken: taken.has(number), window: window.has(number),
      evidence: step.e[index], likely: step.q ? step.q[index] : -1, children: [],
    };
    nodes.push(node);
    parent.children.push(number);
  });
  nodes.forEach((node) => {
    node.said = step.m[node.number] ?? -1;
    node.certainty = step.c ? step.c[node.number] : 0;
    node.children.sort((one, other) => nodes[other].taken - nodes[one].taken || nodes[one].window - nodes[other].window || one - other);
  });
  return nodes;
}

// Rows from top to bottom: a node stands beside its first child. Returns them in that order.
function arrange(nodes) {
  const order = [];
  let rows = 0;
  const place = (number) => {
    const node = nodes[number];
    order.push(number);
    node.row = rows;
    node.children.forEach((child, index) => {
      if (index) rows += 1;
      place(child);
    });
  };
  place(0);
  return { order, rows: rows + 1 };
}

// The order in which nodes are sent: candidates depth first, each followed by the child that was drafted first, then
// the window.
function sendingOrder(nodes) {
  const order = [];
  const visit = (number) => {
    order.push(number);
    [...nodes[number].children].sort((one, other) => one - other).filter((child) => !nodes[child].window).forEach(visit);
  };
  visit(0);
  return [...order, ...nodes.filter((node) => node.window).map((node) => node.number)];
}

function drawTree(svg, nodes, names, own, colorOf, choose) {
  const { order, rows } = arrange(nodes);
  const end = nodes[order.filter((number) => nodes[number].taken).at(-1)];
  const widths = [];
  const size = (label, extra) => LETTER * [...label].length + (extra ? SMALL * extra.length + 5 : 0) + 14;
  nodes.forEach((node) => {
    node.label = visible(names[node.token]);
    node.extra = node.likely < 0 ? "" : percent(node.likely / 1000);
    node.width = size(node.label, node.extra);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  });
  const ownLabel = visible(names[own]), ownWidth = size(ownLabel, ""), behind = end.depth + 1;
  widths[behind] = Math.max(widths[behind] ?? 0, ownWidth);
  const x = [LEFT];
  widths.forEach((width, depth) => { x[depth + 1] = x[depth] + width + GAP; });
  // The model's own token has a row of its own where something is drafted behind the accepted path.
  const shift = end.children.length ? 1 : 0, y = (row) => 16 + (row + shift) * ROW;
  const lines = [], marks = [];
  const join = (parent, left, row, kind) => {
    const from = x[parent.depth] + parent.width, top = y(parent.row), to = y(row), middle = left - GAP / 2;
    const way = top === to ? `M${from} ${top}H${left}` : `M${from} ${top}H${middle - 6}Q${middle} ${top} ${middle} ${top + 6 * Math.sign(to - top)}V${to - 6 * Math.sign(to - top)}Q${middle} ${to} ${middle + 6} ${to}H${left}`;
    lines.push(made("path", { d: way, class: kind }));
  };
  const pill = (group, left, row, width, label, extra, round) => {
    group.append(made("rect", { x: left, y: y(row) - 9.5, width, height: 19, rx: round, class: "mark" }));
    group.append(made("text", { x: left + 7, y: y(row) + 4, class: "label" }, label));
    if (extra) group.append(made("text", { x: left + width - 6, y: y(row) + 3.5, class: "extra", "text-anchor": "end" }, extra));
    marks.push(group);
  };
  for (const number of order) {
    const node = nodes[number];
    if (number) join(nodes[node.parent], x[node.depth], node.row, node.taken ? "taken" : "");
    const group = made("g", { class: `node ${node.taken ? "taken" : ""}`, "data-node": number, style: `color: ${colorOf(node)}` });
    group.append(made("title", {}, names[node.token]));
    group.addEventListener("click", () => choose(number));
    pill(group, x[node.depth], node.row, node.width, node.label, node.extra, node.window ? 2 : 9);
  }
  const row = end.row - shift;
  join(end, x[behind], row, "taken");
  const group = made("g", { class: "own" });
  group.append(made("title", {}, "selected by the model after the accepted path"));
  pill(group, x[behind], row, ownWidth, ownLabel, "", 9);
  svg.setAttribute("width", Math.max(...x) + 10);
  svg.setAttribute("height", (rows + shift) * ROW + 10);
  svg.replaceChildren(...lines, ...marks);
  return order;
}

function percent(share) {
  const value = 100 * share;
  return value >= 9.95 || value === 0 ? `${Math.round(value)}%` : value < 0.1 ? "<0.1%" : `${value.toFixed(1)}%`;
}

function drawMask(canvas, nodes, color) {
  const order = sendingOrder(nodes), place = new Map(order.map((number, slot) => [number, slot])), size = order.length;
  const scale = Math.max(1, Math.min(14, Math.ceil(384 / size)));
  canvas.width = canvas.height = size * scale;
  canvas.style.width = `${size * scale}px`;
  const context = canvas.getContext("2d");
  context.fillStyle = color;
  order.forEach((number, row) => {
    for (let node = number; node >= 0; node = nodes[node].parent) context.fillRect(place.get(node) * scale, row * scale, scale - (scale > 3), scale - (scale > 3));
  });
  canvas.setAttribute("aria-label", `${size} nodes; each attends to its ancestors and itself`);
}
