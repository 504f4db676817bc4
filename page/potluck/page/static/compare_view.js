// Runs beside each other: their measures in one picture, and the settings in which they differ.

import { get } from "./api.js";
import { h, put, style } from "./dom.js";
import { bytes, coverage, measure, point, seconds, share, tick } from "./format.js";
import { lineChart } from "./line_chart.js";
import { card, pill, table } from "./parts.js";

export function showCompare(place, { title, query }) {
  title("Compare runs");
  const body = h("div", {}, h("p", { class: "quiet" }, "Fetching the runs …"));
  put(place, h("div", { class: "head" }, h("div", { class: "grow" }, h("h1", {}, "Compare runs"), h("p", { class: "soft" }, "The same colour and dash is the same run in every picture."))), body);
  const charts = [];

  function label(run) {
    return `${run.status.name} ${run.status.run.slice(0, 6)}`;
  }

  function draw({ runs, differences }) {
    for (const [shown] of charts.splice(0)) shown.close();
    const measures = new Map(runs.flatMap((run) => run.measures.filter((each) => run.rounds.some((round) => (round.values[each.name] ?? null) !== null)).map((each) => [each.name, each])));
    const measured = (run, name) => run.rounds.findLast((round) => (round.values[name] ?? null) !== null);
    const value = (run, name) => measured(run, name)?.values[name] ?? null;
    const over = (run, name) => measured(run, name)?.coverage[name];
    const sum = (run, key) => run.rounds.reduce((total, round) => total + round[key], 0);
    const best = (name) => {
      const found = runs.filter((run) => !over(run, name)?.partial).map((run) => value(run, name)).filter((each) => each !== null);
      return measures.get(name).higher_is_better ? Math.max(...found) : Math.min(...found);
    };
    const figures = [
      { name: "State", of: (run) => pill(run.status.state) },
      { name: "Rounds", of: (run) => `${run.status.committed} of ${run.status.rounds}` },
      ...[...measures.values()].map((each) => ({ name: each.label, of: (run) => {
        const found = value(run, each.name), words = measure(found, each.unit), behind = over(run, each.name);
        const leads = found !== null && !behind?.partial && found === best(each.name) && runs.length > 1;
        return [leads ? h("strong", {}, words) : words, h("span", { class: "soft small" }, leads ? " best" : "", behind ? ` over ${coverage(behind)}` : "")];
      } })),
      { name: "Clients picked", of: (run) => new Set(run.rounds.flatMap((round) => round.cohort)).size || "–" },
      { name: "Time", of: (run) => seconds(sum(run, "seconds")) },
      { name: "Down", of: (run) => bytes(sum(run, "bytes_down")) },
      { name: "Up", of: (run) => bytes(sum(run, "bytes_up")) },
    ];
    const columns = () => [
      { title: "", cell: (row) => h("span", { class: "soft" }, row.name) },
      ...runs.map((run, index) => ({ title: h("a", { href: `/runs/${run.status.run}`, style: { color: style(`--series-${index}`) } }, label(run)), cell: (row) => row.of(run, index) })),
    ];
    const settings = differences.map((each) => ({ name: each.key, of: (_, index) => each.values[index] }));
    put(body,
      card("Side by side", { id: "figures" }, h("div", { class: "scroll" }, table("Runs side by side", columns(), figures))),
      card("Settings that differ", { id: "settings", aside: "of their run files" }, settings.length ? h("div", { class: "scroll" }, table("Settings that differ", columns(), settings)) : h("p", { class: "quiet" }, "None: the run files differ only in their names.")),
      card("Metrics", { id: "measures" }, [...measures.values()].map((each) => chart(each, runs).element), measures.size ? null : h("p", { class: "quiet" }, "No round of these runs was evaluated.")));
    for (const [chosen, draw] of charts) chosen.draw(draw);
  }

  function chart(each, runs) {
    const words = (found) => (each.unit === "share" ? share(found) : measure(found, each.unit));
    const made = lineChart({ title: `${each.label}, ${each.higher_is_better ? "more" : "less"} is better`, format: words, axis: each.unit === "share" ? (found) => `${Math.round(100 * found)} %` : tick, fixed: each.unit === "share" ? [0, 1] : null });
    charts.push([made, runs.map((run, index) => ({ name: label(run), colour: index, dashed: index, points: run.rounds.map((round) => point(round.round, round.values[each.name], round.coverage[each.name])).filter(([, found]) => found !== null && found !== undefined) }))]);
    return made;
  }

  async function fetchAll() {
    try {
      draw(await get(`/api/compare?${query.toString()}`));
    } catch (error) {
      put(body, h("div", { class: "card empty" }, h("h2", {}, "The runs can't be compared"), h("p", {}, error.message), h("a", { class: "button", href: "/" }, "Choose runs")));
    }
  }

  fetchAll();
  return {
    again: fetchAll,
    close() {
      for (const [chosen] of charts) chosen.close();
    },
  };
}
