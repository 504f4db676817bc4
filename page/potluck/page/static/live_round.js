// The round under way: whom the selector chose and why, and how far each has come.

import { h, put, style, text } from "./dom.js";
import { bytes, count, seconds } from "./format.js";
import { bar, card, setBar, table } from "./parts.js";

const SHOWN = 40, NOTEWORTHY = 15, TILE = 12;
const COLOURS = {
  selected: "--faint", downloading: "--series-5", training: "--series-2", uploading: "--series-3",
  included: "--accent", lost: "--bad", failed: "--bad", late: "--series-1", spared: "--line",
};
const AT_WORK = new Set(["selected", "downloading", "training", "uploading"]);
const TROUBLED = new Set(["lost", "failed", "late"]);
const LABELS = { selected: "waiting", included: "update received" };

export function liveRound() {
  let live = null, cohort = null, all = false, rowsFor = "", rows = new Map();
  const phase = h("span", { class: "aside" });
  const progress = bar(0, { label: "Training of this round" });
  const counts = h("ul", { class: "counts" });
  const tiles = h("canvas", { class: "tiles", role: "img" });
  const list = h("div", { class: "scroll" });
  const more = h("button", { class: "plain", onclick: () => {
    all = !all;
    rowsFor = "";
    drawMembers();
  } });
  const element = card("Round", { id: "live", kind: "live" }, progress, counts, tiles, list, more);
  element.querySelector("header").append(phase);
  const title = element.querySelector("h2");
  element.hidden = true;

  function draw() {
    element.hidden = live === null;
    if (live === null) return;
    text(title, `Round ${live.round}${live.attempt > 1 ? `, attempt ${live.attempt}` : ""}`);
    const moved = live.bytes_down || live.bytes_up ? ` · ${bytes(live.bytes_down)} down, ${bytes(live.bytes_up)} up` : "";
    text(phase, `${live.phase} · ${seconds(live.seconds)}${moved}`);
    setBar(progress, live.done);
    put(counts, live.counts.map((each) => h("li", { style: { "--swatch": `var(${COLOURS[each.state] ?? "--faint"})` } }, `${each.clients} ${LABELS[each.state] ?? each.state}`)),
      live.stragglers.length ? h("li", { style: { "--swatch": "var(--warn)" } }, count(live.stragglers.length, "straggler")) : null);
    drawTiles();
    drawMembers();
  }

  function drawTiles() {
    const many = live.states.length > SHOWN;
    tiles.hidden = !many;
    const width = tiles.parentElement.clientWidth - 44;
    if (!many || width < 50) return;
    const across = Math.floor(width / TILE), down = Math.ceil(live.states.length / across), ratio = window.devicePixelRatio || 1;
    tiles.width = across * TILE * ratio;
    tiles.height = down * TILE * ratio;
    tiles.style.width = `${across * TILE}px`;
    tiles.style.height = `${down * TILE}px`;
    tiles.setAttribute("aria-label", `${count(live.states.length, "client")}: ${live.counts.map((each) => `${each.clients} ${each.state}`).join(", ")}`);
    const ink = tiles.getContext("2d");
    ink.scale(ratio, ratio);
    const colours = Object.fromEntries(Object.entries(COLOURS).map(([state, name]) => [state, style(name)]));
    const empty = style("--line");
    live.states.forEach((state, place) => {
      const [left, top] = [(place % across) * TILE, Math.floor(place / across) * TILE], full = TILE - 2;
      const done = AT_WORK.has(state) ? live.fractions[place] : 1;
      ink.fillStyle = empty;
      ink.fillRect(left, top, full, full);
      ink.fillStyle = colours[state] ?? colours.selected;
      const high = Math.max(state === "selected" ? 2 : 3, full * done);
      ink.fillRect(left, top + full - high, full, high);
    });
  }

  /** Places in the cohort worth a row: all of a few; of many the troubled, the stragglers, the slowest. */
  function worthy() {
    const places = live.states.map((_, place) => place);
    if (all || places.length <= SHOWN) return places;
    const slow = new Set(live.stragglers);
    const rank = (place) => (TROUBLED.has(live.states[place]) ? 0 : slow.has(place) ? 1 : AT_WORK.has(live.states[place]) ? 2 + live.fractions[place] : 4);
    return places.sort((one, other) => rank(one) - rank(other)).slice(0, NOTEWORTHY);
  }

  function drawMembers() {
    const many = live.states.length > SHOWN;
    more.hidden = !many;
    text(more, all ? "Show the noteworthy only" : `Show all ${live.states.length} clients and why each was chosen`);
    if (!cohort || cohort.round !== live.round || cohort.attempt !== live.attempt) return put(list);
    const places = worthy(), wanted = `${cohort.round}/${cohort.attempt}/${places.join()}`;
    if (wanted !== rowsFor) {
      rowsFor = wanted;
      rows = new Map(places.map((place) => [place, { meter: bar(0, { label: `Progress of ${cohort.clients[place]}` }), state: h("span", {}), tag: h("span", { class: "tag", hidden: true }) }]));
      put(list, table(`Clients of round ${live.round}`, [
        { title: "Client", kind: "nowrap", cell: (place) => cohort.clients[place] },
        { title: "Why it was chosen", kind: "why", cell: (place) => cohort.reasons[place] || "–" },
        { title: "Host", cell: (place) => cohort.hosts[place] },
        { title: "Progress", kind: "nowrap", cell: (place) => [h("span", { class: "meter" }, rows.get(place).meter), rows.get(place).state, rows.get(place).tag] },
      ], places, { kind: "members" }));
    }
    const slow = new Set(live.stragglers);
    for (const [place, { meter, state, tag }] of rows) {
      const at = live.states[place], over = !AT_WORK.has(at);
      setBar(meter, over ? 1 : live.fractions[place]);
      meter.className = `bar ${TROUBLED.has(at) ? "trouble" : ""}`;
      const why = live.troubles[place];
      text(state, why ? `${at}: ${why}` : LABELS[at] ?? at);
      tag.hidden = !slow.has(place);
      text(tag, "straggler");
    }
    return undefined;
  }

  const resized = new ResizeObserver(() => live && drawTiles());
  resized.observe(element);
  return {
    element,
    /** The round as it is; null between rounds. The cohort comes where it is another than before. */
    update(given, givenCohort) {
      live = given;
      if (givenCohort) cohort = givenCohort;
      draw();
    },
    close: () => resized.disconnect(),
  };
}
