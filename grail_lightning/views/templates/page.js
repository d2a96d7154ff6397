"use strict";
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

/** Where a value lies on the scale: −1 (none of the advantage) to 0 (as GRPO) to 1 (the most). */
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
    make("span", { text: scores ? "score, of the largest in its rollout" : "weight (1 = GRPO)" }), scale,
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
  const path = [];
  for (const node of group.tree) {
    path.length = node.depth;
    const above = path[node.depth - 1], count = node.rollouts.length;
    path.push(node);
    const text = group.rollouts[node.rollouts[0]].pieces.slice(node.start, node.stop).join("");
    const row = make("div", { class: "node" }, rate(node.correct, count, node.correct + "/" + count));
    row.style.setProperty("--depth", node.depth);
    if (above && above.correct && !node.correct) row.append(make("span", { class: "fork", text: "fork" }));
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
  rollout.pieces.forEach((piece, k) => {
    const text = visible(piece), ends = text.endsWith("\n"); // A last line break stands outside: its box would begin the next line.
    const token = make("span", { class: "t", role: "option", tabindex: k ? -1 : 0, text: ends ? text.slice(0, -1) : text,
      "aria-label": `${cut(inline(piece), 100)}, ${noun} ${values ? shown(values[k]) : "none"}` });
    if (values) colour(token, position(values[k], largest));
    if (kinds.has(k)) token.classList.add(kinds.get(k));
    if (outside.has(k)) token.classList.add("outside");
    if (rollout.box && k >= rollout.box[0] && k <= rollout.box[1]) token.classList.add("answer");
    if (rollout.fork === k) token.classList.add("forks");
    list.append(token, ends ? "\n" : "");
  });
  if (rollout.fork === rollout.pieces.length) list.append(make("span", { class: "fork", text: "fork: others went on" }));
  return list;
}

function drawRollout(rollout) {
  const facts = [["right", "wrong"].includes(rollout.status) ? "" : rollout.status, `reward ${shown(rollout.reward)}`, `${rollout.pieces.length} tokens`];
  if (rollout.advantage !== null) facts.push(`advantage ${shown(rollout.advantage)}`);
  if (rollout.finished === false) facts.push("cut at the length limit");
  const columns = make("div", { class: "columns" });
  rollout.credit.forEach((credit, which) => {
    if (credit === null || hidden.has(which)) return;
    const note = credit.fallback ? " (could not weight this rollout)" : credit[colouredBy()] ? "" : ` (has no ${colouredBy()})`;
    columns.append(make("figure", {}, make("figcaption", { text: methods[which] + note }), drawTokens(rollout, which)));
  });
  const mark = make("span", { class: "mark", text: rollout.correct ? "✓ right" : "✗ wrong" });
  mark.style.fontWeight = 600;
  const head = make("h3", { class: rollout.correct ? "right" : "wrong" }, `#${rollout.number} `, mark, make("span", { text: " · " + facts.filter(Boolean).join(" · ") }));
  const section = make("section", { class: "rollout " + (rollout.correct ? "right" : "wrong"), "aria-label": "Rollout " + rollout.number }, head, columns);
  section.dataset.number = rollout.number;
  section.rollout = rollout;
  return section;
}

function drawGroup(group) {
  const right = group.rollouts.filter((r) => r.correct).length, count = group.rollouts.length;
  const box = make("article", { class: "group" }, make("header", {}, make("h2", { text: `Problem ${group.number}` }),
    rate(right, count, `${right} of ${count} right`), make("span", { class: "quiet", text: group.dataset })));
  box.group = group;
  later.observe(box);
  return box;
}

/** The part of a group that is drawn when it comes near the window. */
function fill(box) {
  later.unobserve(box);
  if (box.filled) return;
  box.filled = true;
  const group = box.group;
  box.append(make("div", { class: "prompt", tabindex: 0, role: "note", "aria-label": "Prompt", text: visible(group.prompt) }));
  if (group.reference) box.append(make("p", { class: "quiet", text: "Reference: " + cut(inline(group.reference), 2000) }));
  if (group.rollouts.length > 1) box.append(drawTree(group));
  for (const rollout of group.rollouts) if (passes(rollout)) box.append(drawRollout(rollout));
}

const later = new IntersectionObserver(
  (seen) => seen.filter((s) => s.isIntersecting).forEach((s) => fill(s.target)), { rootMargin: "600px" });

function goTo(rollout) {
  if (!document.querySelector(`[data-number="${rollout.number}"]`)) { byId("outcome").value = "all"; byId("find").value = ""; draw(); }
  const box = [...byId("groups").children].find((b) => b.group.rollouts.includes(rollout));
  fill(box);
  const section = box.querySelector(`[data-number="${rollout.number}"]`);
  const tokens = section.querySelectorAll(".tokens:first-of-type .t");
  section.scrollIntoView({ block: "center" });
  focusToken(tokens[Math.min(rollout.fork ?? 0, tokens.length - 1)], true);
}

// --- sorting and filtering -------------------------------------------------------------------------------------------

const mean = (list) => list.reduce((sum, x) => sum + x, 0) / (list.length || 1);

/** Mean distance between the weights of the first two methods. */
function distance(rollout) {
  const [a, b] = rollout.credit.filter((c) => c && c.weights);
  return a && b ? mean(a.weights.map((w, k) => Math.abs((w ?? 0) - (b.weights[k] ?? 0)))) : 0;
}

data.groups.forEach((group, index) => {
  group.number = index + 1;
  group.rate = mean(group.rollouts.map((r) => Number(r.correct)));
  group.length = Math.max(...group.rollouts.map((r) => r.pieces.length));
  group.differ = mean(group.rollouts.map(distance));
});

const ORDERS = {
  number: (a, b) => a.number - b.number,
  hard: (a, b) => a.rate - b.rate || a.number - b.number,
  easy: (a, b) => b.rate - a.rate || a.number - b.number,
  long: (a, b) => b.length - a.length || a.number - b.number,
  differ: (a, b) => b.differ - a.differ || a.number - b.number,
};

function passes(rollout) {
  const outcome = byId("outcome").value;
  return outcome === "right" ? rollout.correct : outcome === "wrong" ? !rollout.correct : true;
}

function matches(group) {
  if (byId("outcome").value === "mixed" && (group.rate === 0 || group.rate === 1)) return false;
  if (!group.rollouts.some(passes)) return false;
  const wanted = byId("find").value.toLowerCase();
  const texts = () => [group.prompt, group.reference, ...group.rollouts.map((r) => r.pieces.join(""))];
  return !wanted || texts().some((text) => text.toLowerCase().includes(wanted));
}

function draw() {
  hideTip(true);
  later.disconnect();
  drawLegend();
  const groups = data.groups.filter(matches).sort(ORDERS[byId("sort").value]);
  byId("groups").replaceChildren(...groups.map(drawGroup));
  const count = groups.reduce((sum, g) => sum + g.rollouts.filter(passes).length, 0);
  byId("shown").textContent = groups.length === data.groups.length && byId("outcome").value === "all" ? ""
    : `${count} rollouts of ${groups.length} problems match.`;
}

// --- values of a token -----------------------------------------------------------------------------------------------

const tokenOf = (event) => (event.target instanceof Element ? event.target.closest(".tokens .t") : null);
const indexOf = (token) => Array.prototype.indexOf.call(token.parentNode.children, token);

function showTip(token) {
  const rollout = token.closest(".rollout").rollout, k = indexOf(token), own = Number(token.parentNode.dataset.method);
  const step = rollout.steps.find(([first, last]) => k >= first && k <= last);
  const notes = [`token ${k + 1} of ${rollout.pieces.length}`];
  if (step) notes.push(KINDS[step[2]] ?? step[2]);
  if (token.classList.contains("answer")) notes.push("answer");
  if (rollout.fork === k) notes.push("after it no rollout of the group was right");
  const rows = make("tbody");
  rollout.credit.forEach((credit, which) => {
    if (!credit || hidden.has(which)) return;
    const cells = [credit.weights, credit.scores].map((list) => make("td", { text: list ? shown(list[k]) : "–" }));
    rows.append(make("tr", which === own ? { class: "this" } : {}, make("th", { scope: "row", text: methods[which] }), ...cells));
  });
  const head = make("thead", {}, make("tr", {}, make("td"), make("td", { text: "weight" }), make("td", { text: "score" })));
  const tip = byId("tip");
  tip.replaceChildren(make("span", { class: "token", text: cut(inline(rollout.pieces[k]) || "(part of a character)", 200) }),
    make("span", { text: notes.join(" · ") }), make("table", {}, head, rows));
  tip.hidden = false;
  tip.classList.toggle("pinned", pinned === token);
  document.querySelectorAll(".same").forEach((other) => other.classList.remove("same"));
  for (const list of token.closest(".columns").querySelectorAll(".tokens")) if (list !== token.parentNode) list.children[k].classList.add("same");
  const at = token.getClientRects()[0] ?? token.getBoundingClientRect(), own_ = tip.getBoundingClientRect();
  const below = at.bottom + 8 + own_.height < innerHeight;
  tip.style.left = Math.max(8, Math.min(at.left, innerWidth - own_.width - 8)) + "px";
  tip.style.top = Math.max(8, below ? at.bottom + 8 : at.top - own_.height - 8) + "px";
}

function hideTip(always = false) {
  if (pinned && !always) return showTip(pinned);
  pinned = null;
  byId("tip").hidden = true;
  document.querySelectorAll(".same").forEach((other) => other.classList.remove("same"));
}

function focusToken(token, still = false) {
  if (!token || !token.classList.contains("t")) return;
  token.parentNode.querySelector('[tabindex="0"]')?.setAttribute("tabindex", -1);
  token.setAttribute("tabindex", 0);
  token.focus({ preventScroll: still });
}

/** The same place in the next or previous list of tokens. */
function neighbour(token, by) {
  const lists = [...document.querySelectorAll(".tokens")], list = lists[lists.indexOf(token.parentNode) + by];
  const tokens = list?.querySelectorAll(".t");
  return tokens?.[Math.min(indexOf(token), tokens.length - 1)];
}

const MOVES = {
  ArrowRight: (t) => t.nextElementSibling, ArrowLeft: (t) => t.previousElementSibling,
  ArrowDown: (t) => neighbour(t, 1), ArrowUp: (t) => neighbour(t, -1),
  Home: (t) => t.parentNode.firstElementChild, End: (t) => [...t.parentNode.querySelectorAll(".t")].at(-1),
};

const main = byId("groups");
main.addEventListener("pointerover", (event) => { const t = tokenOf(event); if (t && !pinned) showTip(t); });
main.addEventListener("pointerout", (event) => { if (tokenOf(event) && !main.contains(document.activeElement?.closest(".t"))) hideTip(); });
main.addEventListener("focusin", (event) => { const t = tokenOf(event); if (t) { if (pinned) pinned = t; showTip(t); } });
main.addEventListener("focusout", (event) => { if (tokenOf(event)) hideTip(); });
main.addEventListener("click", (event) => { const t = tokenOf(event); if (t) focusToken(t, true); });
main.addEventListener("keydown", (event) => {
  const token = tokenOf(event);
  if (!token || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "Enter" || event.key === " ") { pinned = pinned === token ? null : token; showTip(token); }
  else if (MOVES[event.key]) focusToken(MOVES[event.key](token));
  else return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(true); });
addEventListener("scroll", () => { const t = document.activeElement?.closest(".t"); if (!byId("tip").hidden) t ? showTip(t) : hideTip(true); }, { passive: true });

// --- the page --------------------------------------------------------------------------------------------------------

methods.forEach((name, which) => {
  const box = make("input", { type: "checkbox" });
  box.checked = true;
  box.addEventListener("change", () => { box.checked ? hidden.delete(which) : hidden.add(which); draw(); });
  byId("methods").append(make("label", {}, box, name));
});
byId("methods").hidden = methods.length < 2;
byId("sort").querySelector('[value="differ"]').hidden = methods.length < 2;
for (const id of ["outcome", "sort", "value"]) byId(id).addEventListener("change", draw);
let typing = 0;
byId("find").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(draw, 150); });
byId("controls").addEventListener("submit", (event) => event.preventDefault());
const THEMES = ["system", "light", "dark"];
byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % 3];
  document.documentElement.dataset.theme = next;
  byId("theme").textContent = "Theme: " + next;
});
const all = data.groups.flatMap((group) => group.rollouts), right = all.filter((r) => r.correct).length;
byId("summary").textContent = `${all.length} rollouts of ${data.groups.length} problems, ${percent(right, all.length)} right. ` +
  `${methods.length === 1 ? "Method" : "Methods"}: ${methods.join(", ")}.` +
  (data.left_out ? ` ${data.left_out} further rollouts are not on this page: make one with "python -m grail_lightning.views FILE --max_rollouts N".` : "");
draw();
document.documentElement.dataset.ready = "true";
