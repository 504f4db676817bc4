// Who was picked when: clients by rounds, on a canvas, with a table behind it.

import { h, style, text } from "./dom.js";
import { byName, count } from "./format.js";
import { roundTicks } from "./line_chart.js";
import { behind, table } from "./parts.js";

const LEFT = 4, BOTTOM = 24, SIDE = 74, GAP = 10, MOST_HEIGHT = 460, ROW = 15, NAMED = 34;

/** A map. open(round): show who was in it, and why. */
export function pickMap({ open }) {
  let clients = [], rounds = [], rows = [], order = "name", at = null, box = null, names = 0;
  const canvas = h("canvas", { class: "plot", role: "img", tabindex: 0 });
  const readout = h("output", { class: "readout", "aria-live": "polite" });
  const sort = h("select", { "aria-label": "Order of clients", onchange: () => {
    order = sort.value;
    arrange();
    redraw();
    numbers.refresh();
  } }, h("option", { value: "name" }, "by name"), h("option", { value: "picks" }, "most picked first"));
  const legend = h("ul", { class: "legend" },
    h("li", {}, h("i", { style: { background: "var(--accent)" } }), "in the model"),
    h("li", {}, h("i", { style: { background: "var(--series-1)" } }), "picked, left out"));
  const numbers = behind("Picks by client, as a table", () => table("Picks by client", [
    { title: "Client", cell: (row) => row.name },
    { title: "Picked", right: true, cell: (row) => row.picked },
    { title: "In the model", right: true, cell: (row) => row.included },
    { title: "Last in round", right: true, cell: (row) => row.last || "–" },
  ], rows));
  const element = h("figure", {}, h("figcaption", {}, h("div", { class: "map-tools" }, legend, h("label", {}, "Clients ", sort))), canvas, readout, numbers.element);

  function arrange() {
    const found = new Map(clients.map((name) => [name, { name, picked: 0, included: 0, last: 0, when: new Map() }]));
    for (const round of rounds) {
      const out = new Set(round.left_out);
      for (const place of round.cohort) {
        const row = found.get(round.names[place]);
        row.picked += 1;
        row.included += out.has(place) ? 0 : 1;
        row.last = round.round;
        row.when.set(round.round, !out.has(place));
      }
    }
    rows = [...found.values()].sort((one, other) => (order === "picks" ? other.picked - one.picked : 0) || byName(one.name, other.name));
    const least = Math.min(...rows.map((row) => row.picked)), most = Math.max(...rows.map((row) => row.picked));
    const never = rows.filter((row) => !row.picked).length;
    canvas.setAttribute("aria-label", rounds.length
      ? `Picks of ${count(rows.length, "client")} in ${count(rounds.length, "round")}: each from ${least} to ${most} times, ${never} never. Arrow keys read single cells, Enter opens a round.`
      : "No round yet.");
  }

  function redraw() {
    const width = element.clientWidth;
    if (!width || !rows.length) return;
    const narrow = width < 480;
    const named = rows.length <= NAMED;
    names = named ? Math.min(narrow ? 90 : 150, 10 + 7 * Math.max(...rows.map((row) => row.name.length))) : LEFT;
    const side = narrow ? 44 : SIDE;
    const high = named ? rows.length * ROW : Math.min(MOST_HEIGHT, Math.max(220, rows.length));
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round((high + BOTTOM) * ratio);
    canvas.style.height = `${high + BOTTOM}px`;
    const ink = canvas.getContext("2d");
    ink.scale(ratio, ratio);
    box = { left: names, top: 0, width: width - names - side - GAP, high, first: rounds[0]?.round ?? 1, last: rounds.at(-1)?.round ?? 1 };
    const slots = box.last - box.first + 1;
    const columns = Math.min(slots, Math.max(1, Math.floor(box.width / (named ? 3 : 2)))), lines = Math.min(rows.length, high);
    const cellWide = box.width / columns, cellHigh = high / lines;
    ink.fillStyle = style("--ground");
    ink.fillRect(box.left, 0, box.width, high);
    drawCells(ink, slots, columns, lines, cellWide, cellHigh);
    drawSide(ink, side, high, lines, cellHigh);
    ink.fillStyle = style("--soft");
    ink.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
    if (named) rows.forEach((row, place) => ink.fillText(clip(row.name, names), 0, place * ROW + 11));
    ink.textAlign = "center";
    for (const round of roundTicks(box.first, box.last, box.width)) ink.fillText(round, box.left + ((round - box.first + 0.5) / slots) * box.width, high + 17);
    if (at) drawCursor(ink, slots);
  }

  const clip = (name, room) => (name.length * 6.6 < room ? name : `${name.slice(0, Math.floor(room / 6.6) - 1)}…`);

  function drawCells(ink, slots, columns, lines, wide, high) {
    const taken = new Float32Array(columns * lines), left = new Float32Array(columns * lines);
    rows.forEach((row, place) => {
      const line = Math.floor((place * lines) / rows.length);
      for (const [round, included] of row.when) {
        const cell = line * columns + Math.floor(((round - box.first) * columns) / slots);
        (included ? taken : left)[cell] += 1;
      }
    });
    const most = Math.max(1, ...maxima(taken, left));
    const gap = wide > 5 && high > 5 ? 1 : 0;
    const [included, out] = [style("--accent"), style("--series-1")];
    for (let cell = 0; cell < taken.length; cell += 1) {
      if (!taken[cell] && !left[cell]) continue;
      ink.fillStyle = taken[cell] >= left[cell] ? included : out;
      ink.globalAlpha = 0.35 + 0.65 * ((taken[cell] + left[cell]) / most);
      ink.fillRect(box.left + (cell % columns) * wide, Math.floor(cell / columns) * high, Math.max(wide - gap, 1), Math.max(high - gap, 1));
    }
    ink.globalAlpha = 1;
  }

  function* maxima(taken, left) {
    let most = 1;
    for (let cell = 0; cell < taken.length; cell += 1) most = Math.max(most, taken[cell] + left[cell]);
    yield most;
  }

  function drawSide(ink, side, high, lines, cellHigh) {
    const sums = new Float32Array(lines), sizes = new Float32Array(lines);
    rows.forEach((row, place) => {
      const line = Math.floor((place * lines) / rows.length);
      sums[line] += row.picked;
      sizes[line] += 1;
    });
    const means = sums.map((sum, line) => sum / sizes[line]);
    const most = Math.max(1, ...means);
    const left = box.left + box.width + GAP;
    ink.fillStyle = style("--faint");
    means.forEach((mean, line) => ink.fillRect(left, line * cellHigh + (cellHigh > 5 ? 3 : 0), (mean / most) * (side - 28), Math.max(1, cellHigh - (cellHigh > 5 ? 7 : 0))));
    ink.fillStyle = style("--soft");
    ink.font = "11px system-ui, sans-serif";
    if (cellHigh >= ROW - 1) rows.forEach((row, line) => ink.fillText(`${row.picked}×`, left + (row.picked / most) * (side - 28) + 4, line * cellHigh + 11));
    else ink.fillText(`≤ ${Math.round(most)}×`, left, high + 17);
  }

  function drawCursor(ink, slots) {
    const [wide, high] = [box.width / slots, box.high / rows.length];
    ink.strokeStyle = style("--ink");
    ink.lineWidth = 1.5;
    ink.strokeRect(box.left + (at.round - box.first) * wide, at.row * high, Math.max(wide, 4), Math.max(high, 4));
  }

  function read(row, round) {
    if (row === null) {
      at = null;
      text(readout, "");
    } else {
      at = { row: Math.min(Math.max(row, 0), rows.length - 1), round: Math.min(Math.max(round, box.first), box.last) };
      const found = rows[at.row], included = found.when.get(at.round);
      const what = included === undefined ? "not picked" : included ? "picked, in the model" : "picked, left out of the model";
      text(readout, `${found.name}, round ${at.round}: ${what} · picked ${found.picked}× in all`);
    }
    redraw();
  }

  function under(event) {
    const area = canvas.getBoundingClientRect(), slots = box.last - box.first + 1;
    const round = box.first + Math.floor(((event.clientX - area.left - box.left) / box.width) * slots);
    const row = Math.floor(((event.clientY - area.top) / box.high) * rows.length);
    const inside = round >= box.first && round <= box.last && row >= 0 && row < rows.length;
    return inside ? { row, round } : null;
  }

  canvas.addEventListener("pointermove", (event) => {
    const found = box && rounds.length ? under(event) : null;
    if (found?.row !== at?.row || found?.round !== at?.round) read(found?.row ?? null, found?.round);
  });
  canvas.addEventListener("pointerleave", () => box && read(null));
  canvas.addEventListener("blur", () => box && read(null));
  canvas.addEventListener("click", (event) => {
    const found = box && rounds.length ? under(event) : null;
    if (found) open(found.round);
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Enter" && at) {
      event.preventDefault(); // or the button that is focused next would be pressed
      open(at.round);
    }
    if (!step || !box || !rounds.length) return;
    event.preventDefault();
    read(at ? at.row + step[0] : 0, at ? at.round + step[1] : box.first);
  });
  const resized = new ResizeObserver(() => redraw());
  resized.observe(element);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", redraw);

  return {
    element,
    /** names: of all clients; given: rounds as the server sends them, with `names`, the list that their cohorts point into. */
    draw(all, given) {
      [clients, rounds] = [all, given];
      arrange();
      redraw();
      numbers.refresh();
    },
    close() {
      resized.disconnect();
      scheme.removeEventListener("change", redraw);
    },
  };
}
