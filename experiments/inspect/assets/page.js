"use strict";
const LOSSES = { train_loss: "a", test_loss: "b", client_loss: "c" }, POINTS = 1500;
const RECENT = 20, FEW = 12;  // rounds that tell the rate, and evaluations that are marked
const LEFT_OUT = ["round", "faults", "dropped", "bytes_down", "bytes_up", "train_seconds",
  "seconds", "test_gap", ...Object.keys(LOSSES)];
const WORDS = { finished: "✓ finished", running: "● running", unfinished: "■ unfinished",
  failed: "✗ failed", lost: "✗ lost", damaged: "✗ damaged" };
const known = new Map(), main = document.querySelector("main");

function put(parent, tag, kind, text) {
  const drawn = ["svg", "path", "text"].includes(tag);
  const made = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  if (kind) made.setAttribute("class", kind);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

async function ask(path) {
  const answer = await fetch(path).catch(() => {
    throw new Error("The server of this page has stopped or does not answer; the last state is shown");
  });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

async function look() {
  const start = performance.now();
  let said;
  try {
    const { folder, runs, all } = await ask("runs");
    for (const [place, run] of runs.entries()) {
      const { box } = await follow(run, place);
      if (main.children[place] !== box) main.insertBefore(box, main.children[place] ?? null);
    }
    while (main.children.length > runs.length) {
      known.delete(last(main.children).dataset.run);
      main.lastChild.remove();
    }
    const count = state => runs.filter(run => run.state === state).length;
    const states = Object.keys(WORDS).filter(count).map(state => `${count(state)} ${state}`);
    said = `${folder}: ${all === 0 ? "no run has started here yet" : states.join(", ")}`
      + (all > runs.length ? `; the newest ${runs.length} of ${all} are shown` : "") + ".";
  } catch (error) {
    said = `${error.message}.`;
  }
  const about = document.getElementById("about");
  if (about.textContent !== said) about.textContent = said;
  setTimeout(look, Math.max(1000, 5 * (performance.now() - start)));
}

async function follow(run, place) {
  if (!known.has(run.name)) {
    const box = put(main, "details"), line = put(box, "summary"), body = put(box, "div");
    const one = { run, box, line, body, at: "", size: "", drawn: "", rounds: [], damaged: 0 };
    box.dataset.run = run.name;
    box.open = place === 0 || !["finished", "unfinished"].includes(run.state);
    box.addEventListener("toggle", () => draw(one));
    known.set(run.name, one);
  }
  const one = known.get(run.name);
  for (let more = one.size !== (run.size ?? ""); more;) {
    const from = new URLSearchParams({ run: run.name, from: one.at });
    const told = await ask(`rounds?${from}`);
    if (told.afresh) Object.assign(one, { rounds: [], damaged: 0 });
    for (const round of told.rounds) one.rounds.push(round);
    one.damaged += told.damaged;
    [one.at, more] = [told.at, told.more];
  }
  one.size = run.size ?? "";
  if (one.drawn !== (one.drawn = JSON.stringify(run) + one.at)) draw(Object.assign(one, { run }));
  return one;
}

const short = value => (Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-3)
  ? (+value.toPrecision(3)).toExponential() : String(+value.toPrecision(4))).replaceAll("-", "−");
const unreleased = run => run.note ? " (not released)" : "";
const spell = name => name.replaceAll("_", " ");
const last = list => list[list.length - 1];
function lasting(seconds) {
  const s = Math.round(seconds), two = n => String(n).padStart(2, "0");
  if (s < 60) return `${s < 10 ? seconds.toFixed(1) : s} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min ${two(s % 60)} s`
    : `${Math.floor(s / 3600)} h ${two(Math.floor(s % 3600 / 60))} min`;
}

function pace(rounds, total) {
  const end = last(rounds), from = rounds[Math.max(0, rounds.length - 1 - RECENT)];
  const rate = (end.round - from.round) / (end.seconds - from.seconds);
  if (!(rate > 0 && rate < Infinity)) return "";
  const said = rate < 1 ? `${short(1 / rate)} seconds a round` : `${short(rate)} rounds a second`;
  return `, ${said}, ${lasting((total - end.round) / rate)} left`;
}

function draw(one) {
  const { box, line, body, run, rounds } = one, end = last(rounds);
  line.replaceChildren();
  body.replaceChildren();
  put(line, "strong", "", run.name);
  put(line, "span", `state ${run.state}`, WORDS[run.state]);
  if (run.why) put(body, "p", run.state, run.why);
  if (run.state === "damaged") return;
  const done = end?.round ?? 0, spent = end ? ` in ${lasting(end.seconds)}` : "";
  const rate = put(line, "span", "rate", `round ${done} of ${run.total}${spent}`);
  if (end && run.state === "running") rate.textContent += pace(rounds, run.total);
  const scores = [...new Set(rounds.flatMap(Object.keys))].filter(name => !LEFT_OUT.includes(name));
  const score = scores[0] ?? "train_loss", seen = rounds.findLast(one => score in one);
  if (seen) rate.textContent += `, ${spell(score)} ${short(seen[score])}${unreleased(run)}`;
  if (!box.open) return;
  Object.assign(put(body, "progress"), { max: run.total, value: done, ariaLabel: "rounds done" });
  if (run.stopped) put(body, "p", "", `It ended early: ${run.stopped}.`);
  if (run.again) {
    put(put(body, "p", "", "No process writes to this run now. To resume it: "), "code", "", run.again);
  }
  if (run.note) put(body, "p", "", `${run.note} ${run.spent
    ? `Released: ${(run.spent.released ?? []).join(", ")}; ε ${run.spent.epsilon === null ? "= ∞"
      : `≤ ${short(run.spent.epsilon)}`} at δ = ${short(run.spent.delta)}, ${run.spent.certified
      ? "certified" : "not certified"}.` : ""}`);
  const start = Object.keys(run.untrained ?? {}).length ? [{ round: 0, ...run.untrained }] : [];
  const charts = put(body, "div", "charts");
  const panels = [["loss", Object.entries(LOSSES)],
    ...scores.slice(0, 2).map(name => [spell(name), [[name, "a"]]])];
  const figures = panels.map(() => put(charts, "figure"));  // all, as they share the width
  panels.forEach((panel, place) => chart(figures[place], ...panel, [...start, ...rounds], run));
  faults(body, one, rounds);
  const card = put(body, "dl");
  for (const [name, value] of run.card) {
    const fact = put(card, "div");
    put(fact, "dt", "", name);
    put(fact, "dd", "", value);
  }
}

function faults(body, one, rounds) {
  const found = rounds.filter(one => one.faults || one.dropped).map(one => `round ${one.round}: `
    + [...one.faults ?? [], ...one.dropped ? [`left out: ${one.dropped}`] : []].join("; "));
  if (one.damaged) put(body, "p", "bad", `Damaged lines of rounds.jsonl: ${one.damaged}.`);
  if (!found.length) return;
  const which = found.length > 5 ? ", the last of them" : "";
  put(body, "p", "bad", `Rounds with faults: ${found.length}${which}`);
  const list = put(body, "ul");
  for (const said of found.slice(-5)) put(list, "li", "", said);
}

function ticks(low, high, count, whole) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(whole ? 1 : 0, power * [1, 2, 5, 10].find(one => one * power >= raw));
  const first = Math.ceil(low / step - 1e-9);
  const many = Math.max(0, Math.floor(high / step - first + 1e-9)) + 1;
  return Array.from({ length: many }, (_, i) => +((first + i) * step).toPrecision(12));
}

function chart(figure, title, series, rounds, run) {
  const curves = series.map(([name, kind]) =>
    ({ name, kind, points: rounds.filter(one => name in one) }))
    .filter(one => one.points.length);
  const svg = put(figure, "svg"), caption = put(figure, "figcaption");
  const values = curves.flatMap(({ name, points }) => points.map(one => one[name]));
  let [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)],
    [Infinity, -Infinity]);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title} by round`);
  if (!values.length) return void (caption.textContent = `${title}: no value yet`);
  const log = low > 0 && high > 100 * low, on = log ? Math.log10 : value => value;
  const room = low === high ? Math.abs(low) / 10 + 1e-9 : 0;
  [low, high] = [low - room, high + room];
  const W = svg.clientWidth || 500, H = svg.clientHeight || 240, [L, R, T, B] = [56, 12, 22, 34];
  const first = Math.min(1, rounds[0].round), end = Math.max(first + 1, last(rounds).round);
  const x = round => L + (W - L - R) * (round - first) / (end - first);
  const y = value => T + (H - T - B) * (on(high) - on(value)) / (on(high) - on(low));
  const mark = (left, top, text, anchor = "middle") => {
    const made = put(svg, "text", "", text);
    for (const [name, value] of Object.entries({ x: left, y: top, "text-anchor": anchor }))
      made.setAttribute(name, value);
  };
  const grid = log ? ticks(on(low), on(high), 4, true).map(one => 10 ** one) : ticks(low, high, 4);
  for (const value of grid) {
    put(svg, "path", "grid").setAttribute("d", `M${L},${y(value)}H${W - R}`);
    mark(L - 6, y(value) + 4, short(value), "end");
  }
  for (const round of ticks(first, end, Math.max(2, W / 100), true)) mark(x(round), H - 16, round);
  mark(L, 12, title + (log ? " (log scale)" : "") + unreleased(run), "start");
  mark((L + W - R) / 2, H - 2, "round");
  for (const { name, kind, points } of curves) {
    const every = Math.ceil(points.length / POINTS);
    const kept = points.filter((_, i) => i % every === 0 || i === points.length - 1);
    const at = kept.map(one => `${x(one.round).toFixed(1)},${y(one[name]).toFixed(1)}`);
    put(svg, "path", kind).setAttribute("d", `M${at.join("L")}`);
    const dots = at.length <= FEW ? `M${at.join("h0M")}h0` : "";
    if (dots) put(svg, "path", `${kind} dots`).setAttribute("d", dots);
  }
  const say = most => {
    caption.replaceChildren();
    for (const { name, kind, points } of curves) {
      const held = points.findLast(one => one.round <= most) ?? points[0];
      const item = put(caption, "span");
      put(put(item, "svg", "key"), "path", kind).setAttribute("d", "M0,5H26");
      item.append(`${spell(name)} ${short(held[name])} in round ${held.round}`);
    }
  };
  say(Infinity);
  svg.onpointermove = event => say(first + .5 + (event.offsetX - L) / (W - L - R) * (end - first));
  svg.onpointerleave = () => say(Infinity);
}

let width = innerWidth;
addEventListener("resize", () => {
  if (width !== (width = innerWidth)) for (const one of known.values()) draw(one);
});
look();
