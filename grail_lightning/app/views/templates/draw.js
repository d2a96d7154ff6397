"use strict";
// The first part of the page's program: what is drawn. The second part, use.js, follows it in the same script.
// Text of a model reaches the document through `textContent` and `aria-label` alone, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const methods = data.methods;
const hidden = new Set(); // Indices of methods that are switched off.
const KINDS = { slip: "wrong step (slip)", misconception: "wrong step (misconception)", inherited: "step from a wrong result", sound: "sound step", filler: "filler" };
let pinned = null;

function make(name, options = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "text") element.textContent = value;
    else if (key === "class") element.className = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

// Control characters would be invisible; a line break is shown and kept.
const visible = (text) =>
  text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0))).replace(/\n/g, "↵\n");
const inline = (text) => visible(text).replace(/\n/g, "");
const shown = (x) => (x === null || x === undefined ? "–" : x && Math.abs(x) < 0.001 ? x.toExponential() : String(x));
const cut = (text, length) => (text.length > length ? text.slice(0, length) + "…" : text);
const percent = (part, whole) => (whole ? Math.round((100 * part) / whole) + " %" : "–");

// --- colours ---------------------------------------------------------------------------------------------------------

const colouredBy = () => byId("value").value;

/** Where a value lies on the scale, as in heatmap.py: −1 (none of the advantage) to 0 (uniform credit) to 1 (the most). */
function position(value, largest) {
  if (value === null || value === undefined) return 0;
  if (colouredBy() === "scores") return largest ? Math.max(-1, Math.min(1, value / largest)) : 0;
  return value < 1 ? Math.max(-1, value - 1) : Math.min(1, Math.log(value) / Math.log(data.largest));
}

function colour(element, at) {
  element.classList.toggle("more", at > 0);
  element.classList.toggle("less", at < 0);
  element.style.setProperty("--part", (100 * Math.abs(at) ** 0.75).toFixed(1) + "%");
}

function drawLegend() {
  const scores = colouredBy() === "scores", top = data.largest, scale = make("div", { class: "scale" });
  const ticks = scores ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.25, 0.5, 0.75, 1, ...[0.25, 0.5, 0.75].map((part) => top ** part), top];
  for (const tick of ticks) {
    const cell = make("i");
    colour(cell, position(tick, 1));
    const number = scores ? Math.round(100 * tick) + " %" : (tick === top ? "≥ " : "") + String(Number(tick.toPrecision(2)));
    scale.append(make("span", {}, cell, make("span", { text: number })));
  }
  const key = (kind, sample, text) => make("span", { class: "key" }, make("span", { class: "t " + kind, text: sample }), " " + text);
  byId("legend").replaceChildren(
    make("span", { text: scores ? "score, of the largest in its rollout" : "weight (1 = uniform)" }), scale,
    ...(data.groups.some((g) => g.rollouts.some((r) => r.turns)) ? [key("told", "found: 17", "not sampled, not trained")] : []),
    key("slip", "7+5=2", "wrong step"), key("inherited", "2+1=3", "from a wrong result"), key("answer", "17", "answer"),
    make("span", { class: "key" }, make("span", { class: "fork", text: "fork" }), " goes wrong here"));
  byId("legend").setAttribute("aria-label", scores
    ? "Colour scale of scores, from 0 to the largest score of a rollout, in orange"
    : "Colour scale of weights: blue below 1, none at 1, orange up to " + top);
}

// --- a group ---------------------------------------------------------------------------------------------------------

function rate(correct, count, words) {
  const fill = make("i");
  fill.style.setProperty("--rate", correct / count);
  return make("span", { class: "rate" }, make("b", { "aria-hidden": "true" }, fill), make("span", { text: words }));
}

function drawTree(group) {
  const box = make("details", { class: "tree" }), right = group.rollouts.filter((r) => r.correct).length;
  box.open = right > 0 && right < group.rollouts.length;
  box.append(make("summary", { text: "Prefix tree: success rates of what rollouts have in common" }));
  for (const node of group.tree) {
    const count = node.rollouts.length;
    const text = group.rollouts[node.rollouts[0]].pieces.slice(node.start, node.stop).join("");
    const row = make("div", { class: "node" }, rate(node.correct, count, node.correct + "/" + count));
    row.style.setProperty("--depth", node.depth);
    if (node.fork) row.append(make("span", { class: "fork", text: "fork" }));
    row.append(make("code", { text: inline(cut(text, 300)) || (node.depth ? "(ends here)" : "(nothing in common)") }));
    if (node.end) {
      const ends = node.rollouts.map((place) => {
        const r = group.rollouts[place];
        const button = make("button", { type: "button", class: r.correct ? "right" : "wrong", text: "#" + r.number + (r.correct ? " ✓" : " ✗"),
          "aria-label": `Go to rollout ${r.number}, ${r.correct ? "right" : "wrong"}` });
        button.addEventListener("click", () => goTo(r));
        return button;
      });
      row.append(make("span", { class: "ends" }, ...ends));
    }
    box.append(row);
  }
  return box;
}

function drawTokens(rollout, which) {
  const credit = rollout.credit[which], values = credit[colouredBy()];
  const largest = values ? values.reduce((most, v) => Math.max(most, Math.abs(v ?? 0)), 0) : 0;
  const list = make("p", { class: "tokens", role: "listbox", dir: "auto", "aria-orientation": "horizontal",
    "aria-label": `Tokens of rollout ${rollout.number}, ${methods[which]}` });
  list.dataset.method = which;
  const kinds = new Map();
  for (const [first, last, kind] of rollout.steps) for (let k = first; k <= last; k++) kinds.set(k, kind);
  const outside = new Set(rollout.outside);
  const noun = colouredBy().slice(0, -1);
  const firsts = new Map((rollout.turns ?? []).map((_, n) => [rollout.turn_of.indexOf(n), n]));
  let part = list; // The element of the turn.
  rollout.pieces.forEach((piece, k) => {
    if (firsts.has(k)) list.append((part = drawTurn(rollout, credit, firsts.get(k))));
    const told = rollout.turn_of?.[k] < 0;
    const text = visible(piece), ends = text.endsWith("\n"); // A last line break stands outside: its box would begin the next line.
    const token = make("span", { class: "t", role: "option", tabindex: k ? -1 : 0, text: ends ? text.slice(0, -1) : text,
      "aria-label": `${cut(inline(piece), 100)}, ${told ? "not sampled" : `${noun} ${values ? shown(values[k]) : "none"}`}` });
    if (told) token.classList.add("told");
    if (values) colour(token, position(values[k], largest));
    if (kinds.has(k)) token.classList.add(kinds.get(k));
    if (outside.has(k)) token.classList.add("outside");
    if (rollout.box && k >= rollout.box[0] && k <= rollout.box[1]) token.classList.add("answer");
    if (rollout.fork === k) token.classList.add("forks");
    part.append(token, ends ? "\n" : "");
  });
  if (rollout.fork === rollout.pieces.length) list.append(make("span", { class: "fork", text: "fork: others went on" }));
  return list;
}

/** An element for the tokens of a turn, below its number, score, credit and calls. */
function drawTurn(rollout, credit, n) {
  const turn = rollout.turns[n], facts = [`turn ${n + 1}`];
  if (turn.score !== null) facts.push(`score ${shown(turn.score)}`);
  if (credit.turns?.[n]) facts.push(`advantages: sum ${shown(credit.turns[n][0])}, mean ${shown(credit.turns[n][1])}`);
  const calls = turn.calls.map(([name, status, result]) => make("span", { class: "call " + status, text: `${inline(name) || "call"}: ${status}`, title: inline(result) }));
  return make("span", { class: "turn", role: "group", "aria-label": `Turn ${n + 1}` }, make("span", { class: "facts" }, facts.join(" · "), ...calls));
}

function drawRollout(rollout) {
  const facts = [["right", "wrong"].includes(rollout.status) ? "" : rollout.status, `reward ${shown(rollout.reward)}`, `${rollout.pieces.length} tokens`];
  if (rollout.advantage !== null) facts.push(`advantage ${shown(rollout.advantage)}`);
  if (rollout.turns) facts.push(`${rollout.turns.length} turns`, `end: ${rollout.end}`);
  if (rollout.finished === false) facts.push("cut at the length limit");
  const mark = make("span", { class: "mark", text: rollout.correct ? "✓ right" : "✗ wrong" });
  mark.style.fontWeight = 600;
  const head = make("h3", { class: rollout.correct ? "right" : "wrong" }, `#${rollout.number} `, mark, make("span", { text: " · " + facts.filter(Boolean).join(" · ") }));
  const section = make("section", { class: "rollout " + (rollout.correct ? "right" : "wrong"), "aria-label": "Rollout " + rollout.number }, head);
  section.dataset.number = rollout.number;
  section.rollout = rollout;
  return later(section, () => section.append(drawPictures(rollout), drawColumns(rollout)), height(rollout));
}

/** The pictures of a rollout, each with the saliency of its tokens over it: a picture for each layer of grids. */
function drawPictures(rollout) {
  const box = make("div", { class: "pictures" }), sources = data.groups.find((g) => g.rollouts.includes(rollout)).sources;
  rollout.pictures.forEach((picture, n) => {
    let begun = 0;
    for (const layer of picture.shares.length && picture.layers.length ? picture.layers : [[]]) {
      const size = layer.reduce((sum, grid) => sum + grid[4] * grid[5], 0), shares = picture.shares.slice(begun, begun + size);
      begun += size;
      const image = make("img", { src: sources[picture.source], alt: `Picture ${n + 1}` }), over = make("canvas", { "aria-hidden": "true" });
      image.addEventListener("load", () => shade(over, image, layer, shares));
      const noun = picture.layers.length > 1 ? (layer === picture.layers[0] ? ", its tiles" : ", the whole") : "";
      box.append(make("figure", {}, make("figcaption", { text: `picture ${n + 1}${noun}` + (picture.shares.length ? picture.layers.length ? "" : " (its parts are not known)" : " (no answer to explain)") }),
        make("span", { class: "shaded" }, image, over)));
    }
  });
  return box;
}

/** Draw the shares, 0 to 1,000, of the cells of grids over an image. */
function shade(canvas, image, grids, shares) {
  canvas.width = image.naturalWidth;
  canvas.height = image.naturalHeight;
  const brush = canvas.getContext("2d"), { width, height } = canvas;
  let k = 0;
  for (const [left, top, wide, high, rows, columns] of grids)
    for (let row = 0; row < rows; row++)
      for (let column = 0; column < columns; column++, k++) {
        brush.fillStyle = `rgba(240, 116, 0, ${(0.85 * shares[k]) / 1000})`;
        const [w, h] = [(wide / columns) * width, (high / rows) * height];
        brush.fillRect(left * width + column * w, top * height + row * h, w, h);
      }
}

function drawColumns(rollout) {
  const columns = make("div", { class: "columns" });
  rollout.credit.forEach((credit, which) => {
    if (credit === null || hidden.has(which)) return;
    const note = credit.fallback ? " (could not weight this rollout)" : credit[colouredBy()] ? "" : ` (has no ${colouredBy()})`;
    columns.append(make("figure", {}, make("figcaption", { text: methods[which] + note }), drawTokens(rollout, which)));
  });
  return columns;
}

function drawGroup(group) {
  const right = group.rollouts.filter((r) => r.correct).length, count = group.rollouts.length;
  const box = make("article", { class: "group" }, make("header", {}, make("h2", { text: `Problem ${group.number}` }),
    rate(right, count, `${right} of ${count} right`), make("span", { class: "quiet", text: group.dataset })));
  box.group = group;
  return later(box, () => fillGroup(box), 30 * count + group.rollouts.filter(passes).reduce((sum, r) => sum + height(r), 150));
}

function fillGroup(box) {
  const group = box.group;
  box.append(make("div", { class: "prompt", tabindex: 0, role: "note", "aria-label": "Prompt", text: visible(group.prompt) }));
  if (group.reference) box.append(make("p", { class: "quiet", text: "Reference: " + cut(inline(group.reference), 2000) }));
  if (group.rollouts.length > 1) box.append(drawTree(group));
  for (const rollout of group.rollouts) if (passes(rollout)) box.append(drawRollout(rollout));
}

// --- drawing what comes near the window ------------------------------------------------------------------------------

const waiting = new Map(); // What draws the rest of an element.
const near = new IntersectionObserver((seen) => seen.filter((s) => s.isIntersecting).forEach((s) => fill(s.target)), { rootMargin: "500px" });

/** About the height of a rollout in pixels, which keeps the place of what is not drawn yet. */
const height = (rollout) => 80 + 26 * Math.min(20, rollout.pieces.filter((p) => p.includes("\n")).length + rollout.pieces.length / 12);

function later(element, draw, pixels) {
  element.style.minHeight = Math.round(pixels) + "px";
  waiting.set(element, draw);
  near.observe(element);
  return element;
}

function fill(element) {
  const draw = waiting.get(element);
  if (!draw) return;
  waiting.delete(element);
  near.unobserve(element);
  draw();
  element.style.minHeight = "";
}

function goTo(rollout) {
  if (!document.querySelector(`[data-number="${rollout.number}"]`)) { byId("outcome").value = "all"; byId("find").value = ""; draw(); }
  const box = [...byId("groups").children].find((b) => b.group.rollouts.includes(rollout));
  fill(box);
  const section = box.querySelector(`[data-number="${rollout.number}"]`);
  fill(section);
  const tokens = section.querySelectorAll(".tokens:first-of-type .t");
  section.scrollIntoView({ block: "center" });
  focusToken(tokens[Math.min(rollout.fork ?? 0, tokens.length - 1)], true);
}
