// All runs, newest first.

import { h, put, putAnew, text } from "./dom.js";
import { ago, count, date } from "./format.js";
import { bar, pill, table } from "./parts.js";

const MOST_COMPARED = 6;
const AGES_MILLISECONDS = 60_000;

export function showRuns(place, { go, title }) {
  title("Runs");
  const picked = new Set();
  const figures = h("p", { class: "soft" }, "Asking the coordinator …");
  const compare = h("button", { disabled: true, onclick: () => go(`/compare?${[...picked].map((run) => `run=${encodeURIComponent(run)}`).join("&")}`) }, "Compare");
  const find = h("input", { class: "find", type: "search", placeholder: "Find a run", "aria-label": "Find a run by name, task, selector or id", oninput: () => draw() });
  const tools = h("div", { class: "actions" }, find, compare, h("a", { class: "button first", href: "/start" }, "Start a run"));
  const list = h("div", {});
  put(place, h("div", { class: "head" }, h("div", { class: "grow" }, h("h1", {}, "Runs"), figures), tools), list);
  let runs = null, more = false, drawn = "";

  function pick(run, chosen) {
    if (chosen) picked.add(run);
    else picked.delete(run);
    mark();
  }

  function mark() {
    compare.disabled = picked.size < 2 || picked.size > MOST_COMPARED;
    text(compare, picked.size < 2 ? "Compare" : `Compare ${picked.size}`);
    compare.title = picked.size > MOST_COMPARED ? `At most ${MOST_COMPARED} at once` : "Choose two runs or more";
  }

  function draw() {
    if (runs === null) return;
    const words = find.value.trim().toLowerCase();
    const shown = runs.filter((run) => `${run.name} ${run.run} ${run.task} ${run.selector} ${run.strategy} ${run.state}`.toLowerCase().includes(words));
    const state = JSON.stringify([shown, more, Math.floor(Date.now() / AGES_MILLISECONDS)]);
    if (state === drawn) return;
    drawn = state;
    putAnew(list, content(shown));
  }

  function content(shown) {
    if (!runs.length) {
      return h("div", { class: "card empty" }, h("h2", {}, "No runs yet"),
        h("p", {}, "A run trains one model: a task, a way to choose clients, a way to combine what they learn."),
        h("a", { class: "button first", href: "/start" }, "Start the first run"));
    }
    if (!shown.length) return h("div", { class: "card empty" }, h("h2", {}, "No run is called like that"), h("p", {}, `Of ${count(runs.length, "run")}, none matches “${find.value}”.`));
    const columns = [
      { title: h("span", { class: "unseen" }, "Compare"), kind: "pick", cell: (run) => h("input", { type: "checkbox", "data-focus": `pick ${run.run}`, checked: picked.has(run.run), "aria-label": `Compare ${run.name} ${run.run}`, onchange: (event) => pick(run.run, event.target.checked) }) },
      { title: "Run", cell: (run) => [h("a", { class: "name", "data-focus": `open ${run.run}`, href: `/runs/${run.run}` }, run.name), " ", h("span", { class: "soft mono" }, run.run)] },
      { title: "State", cell: (run) => pill(run.state) },
      { title: "Rounds", kind: "progress", cell: (run) => [h("span", { class: "small number" }, `${run.committed} of ${run.rounds}`), bar(run.rounds ? run.committed / run.rounds : 0, { label: `Rounds of ${run.name}`, kind: run.state === "running" ? "" : "still" })] },
      { title: "Task · selector · strategy", kind: "what", cell: (run) => [`${run.task} · ${run.selector} · ${run.strategy}`, run.why ? h("div", { class: "small soft" }, run.why) : null] },
      { title: "Started", right: true, kind: "when nowrap", cell: (run) => h("time", { datetime: run.created_at, title: date(run.created_at) }, ago(run.created_at)) },
    ];
    return h("section", { class: "card", "aria-label": "All runs" }, h("div", { class: "scroll" }, table("All runs, newest first", columns, shown, { kind: "runs" })),
      more ? h("p", { class: "quiet small" }, `The newest ${runs.length} runs; `, h("code", {}, "potluck runs"), " lists all.") : null);
  }

  mark();
  const timer = setInterval(draw, AGES_MILLISECONDS); // else what was started just now stays so
  return {
    close: () => clearInterval(timer),
    hear(kind, overview) {
      if (kind !== "overview") return;
      if (overview.connection.reached || overview.runs.length) [runs, more] = [overview.runs, overview.more_runs];
      const at = overview.coordinator;
      if (at) text(figures, `${count(at.hosts, "host")} with ${count(at.clients, "client")} connected`);
      else if (!overview.connection.reached) text(figures, "The coordinator has not answered yet.");
      draw();
    },
  };
}
