// The second part of the page's program: sorting, filtering, the values of a token, the keyboard, and the start.

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
  near.disconnect();
  waiting.clear();
  drawLegend();
  const groups = data.groups.filter(matches).sort(ORDERS[byId("sort").value]);
  byId("groups").replaceChildren(...groups.map(drawGroup));
  const count = groups.reduce((sum, g) => sum + g.rollouts.filter(passes).length, 0);
  byId("shown").textContent = groups.length === data.groups.length && byId("outcome").value === "all" ? ""
    : `${count} rollouts of ${groups.length} problems match.`;
}

// --- values of a token -----------------------------------------------------------------------------------------------

const tokenOf = (event) => (event.target instanceof Element ? event.target.closest(".tokens .t") : null);
const listOf = (token) => token.closest(".tokens");
const tokensOf = (list) => [...list.querySelectorAll(".t")];
const indexOf = (token) => tokensOf(listOf(token)).indexOf(token);

function showTip(token) {
  const rollout = token.closest(".rollout").rollout, k = indexOf(token), own = Number(listOf(token).dataset.method);
  const step = rollout.steps.find(([first, last]) => k >= first && k <= last);
  const notes = [`token ${k + 1} of ${rollout.pieces.length}`];
  if (step) notes.push(KINDS[step[2]] ?? step[2]);
  if (token.classList.contains("told")) notes.push("put in by the environment, not trained");
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
  for (const list of token.closest(".columns").querySelectorAll(".tokens")) if (list !== listOf(token)) tokensOf(list)[k].classList.add("same");
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
  listOf(token).querySelector('[tabindex="0"]')?.setAttribute("tabindex", -1);
  token.setAttribute("tabindex", 0);
  token.focus({ preventScroll: still });
}

/** The same place in the next or previous list of tokens. */
function neighbour(token, by) {
  const lists = [...document.querySelectorAll(".tokens")], list = lists[lists.indexOf(listOf(token)) + by];
  const tokens = list && tokensOf(list);
  return tokens?.[Math.min(indexOf(token), tokens.length - 1)];
}

const MOVES = {
  ArrowRight: (t) => tokensOf(listOf(t))[indexOf(t) + 1], ArrowLeft: (t) => tokensOf(listOf(t))[indexOf(t) - 1],
  ArrowDown: (t) => neighbour(t, 1), ArrowUp: (t) => neighbour(t, -1),
  Home: (t) => tokensOf(listOf(t))[0], End: (t) => tokensOf(listOf(t)).at(-1),
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
addEventListener("scroll", () => { const t = document.activeElement?.closest(".t"); if (!byId("tip").hidden) t ? showTip(t) : hideTip(true); }, { passive: true, capture: true });

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
  (data.left_out ? ` ${data.left_out} further rollouts are not on this page: make one with grail_lightning.write_page(file, page, max_rollouts=N).` : "");
draw();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
