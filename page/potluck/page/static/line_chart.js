// Lines over rounds: an SVG that says in words what it shows, and a table behind it.

import { h, put, style, svg, text } from "./dom.js";
import { behind, table } from "./parts.js";

const LEFT = 52, RIGHT = 14, TOP = 10, BOTTOM = 26, HEIGHT = 210;
const DASHES = ["", "6 4", "2 4", "9 3 2 3", "1 5", "12 4"];

/** Round numbers between two values. */
function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return found;
}

/** A chart. format(value): as text; fixed: [low, high] of the y axis, else as the values need.
 *
 * `draw(series)` takes {name, points: [[round, value, over?, partial?]], colour?, dashed?}; colours and
 * dashes go by place. over: the clients and samples behind the value, as text; partial ones are hollow.
 */
export function lineChart({ title, format, axis = format, fixed = null, height = HEIGHT, zero = true }) {
  let series = [], at = null, width = 0, low = 0, high = 1, first = 1, last = 1;
  const drawing = svg("svg", { class: "plot", role: "img", tabindex: 0, height });
  const legend = h("ul", { class: "legend" });
  const readout = h("output", { class: "readout", "aria-live": "polite" });
  const numbers = behind(`${title}, as a table`, () => {
    const rounds = [...new Set(series.flatMap((each) => each.points.map(([x]) => x)))].sort((one, other) => one - other);
    const maps = series.map((each) => new Map(each.points.map((point) => [point[0], point])));
    return table(title, [
      { title: "Round", right: true, cell: (round) => round },
      ...series.map((each, place) => ({ title: each.name, right: true, cell: (round) => (maps[place].has(round) ? marked(maps[place].get(round)) : "–") })),
    ], rounds);
  });
  const element = h("figure", { class: "chart" }, h("figcaption", {}, h("h3", {}, title), legend), drawing, readout, numbers.element);

  const marked = ([, value, over, partial]) => `${format(value)}${partial ? ` (${over})` : ""}`;
  const dot = (place, [round, value, , partial]) => svg("circle", { cx: x(round), cy: y(value), r: 3.5, fill: partial ? style("--card") : colour(place), stroke: colour(place) });
  const x = (round) => LEFT + (last > first ? (round - first) / (last - first) : 0.5) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low || 1)) * (height - TOP - BOTTOM);
  const colour = (place) => style(`--series-${(series[place].colour ?? place) % 6}`);

  function extent() {
    const points = series.flatMap((each) => each.points);
    [first, last] = [Math.min(...points.map(([round]) => round)), Math.max(...points.map(([round]) => round))];
    if (fixed) [low, high] = fixed;
    else {
      const values = points.map(([, value]) => value);
      [low, high] = [Math.min(...values), Math.max(...values)];
      if (zero && low > 0) low = 0;
      if (low === high) high = low + 1;
      const steps = ticks(low, high, 4);
      high = Math.max(high, steps.at(-1) + (high > steps.at(-1) ? steps[1] - steps[0] || 0 : 0));
    }
  }

  function redraw() {
    width = Math.round(element.clientWidth);
    if (!width) return;
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const points = series.flatMap((each) => each.points);
    if (!points.length) {
      put(drawing, svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "No round yet"));
      return;
    }
    extent();
    const lines = series.map((each, place) => each.points.length === 1
      ? dot(place, each.points[0])
      : svg("path", { stroke: colour(place), "stroke-dasharray": dash(place), d: each.points.map(([round, value], index) => `${index ? "L" : "M"}${x(round).toFixed(1)} ${y(value).toFixed(1)}`).join("") }));
    put(drawing,
      ticks(low, high, 4).map((tick) => [
        svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
        svg("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, axis(tick))]),
      roundTicks(first, last, width).map((round) => svg("text", { x: x(round), y: height - 6, "text-anchor": "middle" }, round)),
      at === null ? null : svg("line", { class: "cursor", x1: x(at), x2: x(at), y1: TOP, y2: height - BOTTOM }),
      lines,
      series.map((each, place) => each.points.filter((point) => point[3]).map((point) => dot(place, point))),
      at === null ? null : series.map((each, place) => {
        const found = each.points.find(([round]) => round === at);
        return found ? dot(place, found) : null;
      }));
  }

  const dash = (place) => DASHES[series[place].dashed ?? 0];

  function words() {
    const said = series.filter((each) => each.points.length).map((each) => {
      return `${each.name} from ${marked(each.points[0])} to ${marked(each.points.at(-1))} in round ${each.points.at(-1)[0]}`;
    });
    return said.length ? `${title}: ${said.join("; ")}. Arrow keys read single rounds.` : `${title}: no round yet.`;
  }

  function describe() {
    put(legend, series.map((each, place) => h("li", {},
      svg("svg", { width: 22, height: 8, "aria-hidden": "true" }, svg("line", { x1: 1, x2: 21, y1: 4, y2: 4, stroke: colour(place), "stroke-width": 2.5, "stroke-dasharray": dash(place) })),
      each.name, " ", each.points.length ? h("b", {}, marked(each.points.at(-1))) : null)));
    drawing.setAttribute("aria-label", words());
  }

  function read(round) {
    at = round;
    redraw();
    if (round === null) return text(readout, "");
    const found = series.map((each) => [each.name, each.points.find(([number]) => number === round)]).filter(([, point]) => point);
    return text(readout, `Round ${round}: ${found.map(([name, point]) => `${name} ${format(point[1])}${point[2] ? ` (${point[2]})` : ""}`).join(" · ")}`);
  }

  const rounds = () => [...new Set(series.flatMap((each) => each.points.map(([round]) => round)))].sort((one, other) => one - other);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect(), all = rounds();
    if (!all.length) return;
    const wanted = first + ((event.clientX - box.left - LEFT) / (width - LEFT - RIGHT)) * (last - first);
    const nearest = all.reduce((best, each) => (Math.abs(each - wanted) < Math.abs(best - wanted) ? each : best));
    if (nearest !== at) read(nearest);
  });
  drawing.addEventListener("pointerleave", () => read(null));
  drawing.addEventListener("blur", () => read(null));
  drawing.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    const all = rounds();
    if (step === undefined || !all.length) return;
    event.preventDefault();
    const place = (at !== null ? all.indexOf(at) : step < 0 ? all.length : -1) + step;
    read(all[Math.min(Math.max(place, 0), all.length - 1)]);
  });
  const resized = new ResizeObserver(() => element.clientWidth !== width && redraw());
  resized.observe(element);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const recoloured = () => {
    describe();
    redraw();
  };
  scheme.addEventListener("change", recoloured);

  return {
    element,
    draw(given) {
      series = given;
      describe();
      redraw();
      numbers.refresh();
    },
    close() {
      resized.disconnect();
      scheme.removeEventListener("change", recoloured);
    },
  };
}

/** Whole rounds to name on an axis. */
export function roundTicks(first, last, width) {
  const most = Math.max(2, Math.floor(width / 90));
  if (last - first < most) return Array.from({ length: last - first + 1 }, (_, place) => first + place);
  const step = Math.max(1, [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000].find((each) => (last - first) / each <= most) ?? 10000);
  const found = [first];
  for (let tick = Math.ceil((first + 1) / step) * step; tick <= last; tick += step) if (tick - first >= step / 2) found.push(tick);
  return found;
}
