// What clients disclosed: the label mix of cohorts, and the privacy that it cost.

import { h, put, style, text } from "./dom.js";
import { count } from "./format.js";
import { roundTicks } from "./line_chart.js";
import { behind, card, facts, table } from "./parts.js";

const HEIGHT = 190, BOTTOM = 24, WHOLE = 46, GAP = 14;

/** A muted colour per class, different from its neighbours. */
function classColours(classes) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return Array.from({ length: classes }, (_, place) =>
    `oklch(${(dark ? 0.66 : 0.72) + (place % 2 ? 0.09 : 0)} 0.1 ${(170 + (place * 360) / classes) % 360})`);
}

export function mixCard() {
  const place = h("div", {}, h("p", { class: "quiet" }, "Asking what clients disclosed …"));
  const element = card("Labels of the cohorts", { id: "mix" }, place);
  let mix = null, canvas = null, readout = null, at = null, box = null, parts = null;

  function draw(given) {
    mix = given;
    if (!mix.disclosed || !mix.rounds.length) {
      canvas = parts = null;
      const why = mix.disclosed
        ? "Label counts are disclosed; the mix of a cohort is shown from the first committed round on."
        : "No client of this run has disclosed label counts: its selector does not ask for them, or their policies keep them. Selectors such as fedentopt, kl or dc-balanced ask.";
      put(place, h("p", { class: "quiet" }, why));
      return;
    }
    if (!parts) lay();
    canvas.setAttribute("aria-label", words());
    const colours = classColours(mix.classes);
    const legend = mix.classes > 20 ? null : h("ul", { class: "legend" }, colours.map((colour, label) => h("li", {}, h("i", { style: { background: colour } }), label)));
    const partly = mix.disclosed < mix.clients ? ` of ${mix.disclosed} of ${mix.clients} clients` : "";
    put(parts.caption, h("span", { class: "small soft" }, `Classes in each cohort's combined data, from the disclosed counts${partly}; at the right, all clients.`), legend);
    parts.numbers.refresh();
    if (at !== null) at = Math.min(at, mix.rounds.length - 1);
    redraw();
    tell();
  }

  /** The elements that stay: who reads the table, or single rounds by keys, is not to lose the place. */
  function lay() {
    canvas = h("canvas", { class: "plot", role: "img", tabindex: 0 });
    readout = h("output", { class: "readout", "aria-live": "polite" });
    const numbers = behind("Label mix, as a table", () => table("Share of each class in the cohorts", [
      { title: "Round", right: true, cell: (round) => round.round },
      { title: "Entropy", right: true, cell: (round) => (round.entropy === null ? "–" : `${round.entropy.toFixed(2)} bit`) },
      ...Array.from({ length: mix.classes }, (_, label) => ({ title: `${label}`, right: true, cell: (round) => (round.selected ? `${(100 * round.selected[label]).toFixed(0)} %` : "–") })),
    ], mix.rounds));
    parts = { caption: h("figcaption", {}), numbers };
    put(place, h("figure", {}, parts.caption, canvas, readout, numbers.element));
    canvas.addEventListener("pointermove", (event) => read(under(event)));
    canvas.addEventListener("pointerleave", () => read(null));
    canvas.addEventListener("blur", () => read(null));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      read(at === null ? 0 : Math.min(Math.max(at + step, 0), mix.rounds.length - 1));
    });
  }

  const words = () => {
    const known = mix.rounds.filter((round) => round.entropy !== null).map((round) => round.entropy);
    const mean = known.reduce((sum, each) => sum + each, 0) / (known.length || 1);
    return `Label mix of ${count(mix.rounds.length, "cohort")}; their labels' entropy is ${mean.toFixed(2)} bit on average, of ${Math.log2(mix.classes).toFixed(2)} bit for equal shares. Arrow keys read single rounds.`;
  };

  function redraw() {
    const width = place.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!canvas || !width) return;
    canvas.width = width * ratio;
    canvas.height = HEIGHT * ratio;
    canvas.style.height = `${HEIGHT}px`;
    const ink = canvas.getContext("2d"), colours = classColours(mix.classes), high = HEIGHT - BOTTOM;
    ink.scale(ratio, ratio);
    box = { wide: (width - WHOLE - GAP) / mix.rounds.length };
    const gap = box.wide > 6 ? 2 : box.wide > 3 ? 1 : 0;
    const stack = (shares, left, wide) => {
      let top = high;
      shares?.forEach((share, label) => {
        top -= share * high;
        ink.fillStyle = colours[label];
        ink.fillRect(left, top, wide, share * high + 0.4);
      });
    };
    mix.rounds.forEach((round, index) => stack(round.selected, index * box.wide, Math.max(box.wide - gap, 0.7)));
    stack(mix.federation, width - WHOLE, WHOLE);
    ink.fillStyle = style("--soft");
    ink.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
    ink.textAlign = "center";
    const [first, last] = [mix.rounds[0].round, mix.rounds.at(-1).round];
    for (const round of roundTicks(first, last, width - WHOLE)) ink.fillText(round, (round - first + 0.5) * box.wide, HEIGHT - 7);
    ink.textAlign = "right";
    ink.fillText("all", width - WHOLE / 2 + 8, HEIGHT - 7);
    if (at !== null) {
      ink.strokeStyle = style("--ink");
      ink.lineWidth = 1.5;
      ink.strokeRect(at * box.wide, 0.75, Math.max(box.wide - gap, 2), high - 1);
    }
  }

  function under(event) {
    const found = Math.floor((event.clientX - canvas.getBoundingClientRect().left) / box.wide);
    return found >= 0 && found < mix.rounds.length ? found : null;
  }

  function read(index) {
    if (index === at) return;
    at = index;
    redraw();
    tell();
  }

  function tell() {
    const round = at === null ? null : mix.rounds[at];
    const shares = round?.selected?.map((share, label) => [share, label]).sort(([one], [other]) => other - one).slice(0, 4);
    text(readout, round === null ? "" : shares ? `Round ${round.round}: entropy ${round.entropy.toFixed(2)} bit; most of ${shares.map(([share, label]) => `class ${label} ${(100 * share).toFixed(0)} %`).join(", ")}` : `Round ${round.round}: no client in it disclosed labels`);
  }

  const resized = new ResizeObserver(redraw);
  resized.observe(place);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", redraw);
  return {
    element,
    draw,
    close() {
      resized.disconnect();
      scheme.removeEventListener("change", redraw);
    },
  };
}

export function privacyCard() {
  const place = h("div", {}, h("p", { class: "quiet" }, "Asking what the clients disclosed …"));
  const element = card("Privacy spent", { id: "privacy" }, place);
  const figures = h("div", {});
  let most = [], numbers = null;
  const claim = (found) => (found.claim ? h("p", { class: "small soft" }, `${found.claim}.`) : null);
  return {
    element,
    draw(found) {
      if (!found.clients.length && !found.sums_aborted) {
        numbers = null;
        put(place, h("p", { class: "quiet" }, "The clients of this run sent model updates only, and no profiles or secure sums."), claim(found));
        return;
      }
      most = [...found.clients].sort((one, other) => other.epsilon - one.epsilon || (other.updates ?? 0) - (one.updates ?? 0));
      const first = numbers === null; // the table stays: who reads it is not to lose the place
      numbers ??= behind("Privacy by client, as a table", () => table("Privacy spent by client, most first", [
        { title: "Client", cell: (row) => row.client },
        { title: "ε in all", right: true, cell: (row) => row.epsilon.toLocaleString("en", { maximumFractionDigits: 4 }) },
        { title: "Secure sums", right: true, cell: (row) => row.sums },
        { title: "Least hosts in one", right: true, cell: (row) => row.least_hosts ?? "–" },
        { title: "Disclosed itself", cell: (row) => row.disclosed.join(", ") || "nothing" },
        ...(most.some((each) => each.updates !== null) ? [{ title: "ε of updates", right: true, cell: (row) => row.updates?.toLocaleString("en", { maximumFractionDigits: 4 }) ?? "–" }] : []),
      ], most));
      const released = found.sums_released || found.sums_aborted || most.some((each) => each.disclosed.length);
      put(figures,
        released ? facts([
          ["Largest ε", found.largest.toLocaleString("en", { maximumFractionDigits: 3 }), "of a client"],
          ["Median ε", found.median.toLocaleString("en", { maximumFractionDigits: 3 })],
          ["Secure sums", `${found.sums_released}`, found.sums_aborted ? `${found.sums_aborted} aborted` : ""],
        ]) : h("p", { class: "quiet" }, "The clients of this run sent model updates only, and no profiles or secure sums."),
        released ? spread(most.map((each) => each.epsilon)) : null,
        found.sums_released ? h("p", { class: "small soft" }, `Sums hide single clients from ${found.holds_against}.`) : null,
        claim(found));
      if (first) put(place, figures, numbers.element);
      numbers.refresh();
    },
  };
}

/** A strip with a mark for each client's ε; nothing where all are alike. */
function spread(values) {
  if (!values.length) return null;
  const most = Math.max(...values), least = Math.min(...values);
  if (!(most > least)) return h("p", { class: "small soft", style: { margin: "0.8rem 0" } }, most ? "All clients have spent the same." : "No noisy release: sums are exact.");
  const bins = Array.from({ length: 24 }, () => 0);
  for (const value of values) bins[Math.min(23, Math.floor((24 * value) / most))] += 1;
  const high = Math.max(...bins);
  return h("div", { role: "img", "aria-label": `Privacy loss of clients, from ${least.toFixed(3)} to ${most.toFixed(3)}`, style: { display: "flex", "align-items": "flex-end", gap: "2px", height: "3.5rem", margin: "0.9rem 0 0.6rem" } },
    bins.map((many, bin) => h("span", { title: `${many} with ε from ${((bin * most) / 24).toFixed(2)}`, style: { flex: "1", height: many ? `${8 + (92 * many) / high}%` : "1px", background: many ? "var(--accent)" : "var(--line)", "border-radius": "2px" } })));
}
