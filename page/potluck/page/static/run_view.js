// One run: the current round, metrics, selected clients and costs.

import { get, post } from "./api.js";
import { disclosedRefresh } from "./refresh.js";
import { mixCard, privacyCard } from "./disclosed.js";
import { h, put, putAnew, say, text } from "./dom.js";
import { bytes, count, coverage, date, measure, point, seconds, share, tick } from "./format.js";
import { lineChart } from "./line_chart.js";
import { liveRound } from "./live_round.js";
import { bar, card, confirmed, facts, pill, setBar, table, trouble } from "./parts.js";
import { pickMap } from "./pick_map.js";
import { openRound } from "./round_dialog.js";

const NEWEST = 12, MOST_ROUNDS = 2000, RETRY_MILLISECONDS = 3000;
const UNMEASURED = "No round was evaluated yet: the task has no evaluation data on the coordinator, or [evaluation] sets every to 0 or to many rounds.";

export function showRun(place, { run: wanted, go, title }) {
  title("Run");
  let run = null, roster = [], charts = new Map(), acting = false, retry = null, closed = false;
  const name = h("h1", {}, "Run"), state = h("span", {}), parts = h("p", { class: "soft" }), why = h("p", { class: "small" });
  const progress = bar(0, { label: "Rounds committed" });
  const progressText = h("span", { class: "small soft number" });
  const stop = h("button", { class: "danger", onclick: () => act("stop"), hidden: true }, "Stop");
  const resume = h("button", { class: "first", onclick: () => act("resume"), hidden: true }, "Resume");
  const again = h("a", { class: "button", hidden: true }, "Start again …");
  const said = h("div", {}), unfollowed = h("div", {});
  const head = h("div", { class: "head" },
    h("div", { class: "grow" }, h("div", { class: "actions" }, name, state), parts, why, progressText, progress),
    h("div", { class: "actions" }, stop, resume, again));
  const summary = h("div", { class: "card", hidden: true });
  const live = liveRound();
  const curves = card("Metrics", { id: "measures" });
  const curvesPlace = h("div", { class: "charts" });
  const unmeasured = h("p", { class: "quiet", hidden: true }, UNMEASURED);
  curves.append(curvesPlace, unmeasured);
  const map = pickMap({ open: (round) => openRound(run.status.run, round) });
  const picks = card("Who was picked", { id: "picks" }, h("p", { class: "quiet" }, "From the first committed round on: which clients were picked when."));
  const mix = mixCard(), privacy = privacyCard();
  const noisePlace = h("div", {}), noiseFacts = h("div", {});
  const noise = card("Privacy loss of updates", { id: "noise" }, noiseFacts, noisePlace);
  noise.hidden = true;
  const trafficPlace = h("div", { class: "charts" });
  const traffic = card("Time and traffic", { id: "traffic" }, trafficPlace);
  const rounds = card("Rounds", { id: "rounds" });
  const notices = card("Notices", { id: "notices" });
  put(place, h("p", { class: "quiet" }, "Fetching the run …"));

  const disclosed = disclosedRefresh(() => run?.status.run, (found) => {
    mix.draw(found.mix);
    privacy.draw(found.privacy);
    if (found.roster.length !== roster.length) {
      roster = found.roster;
      drawSummary();
      drawPicks();
    }
  });

  function lay() {
    put(place, head, unfollowed, said, summary, live.element, notices, curves, picks, h("div", { class: "two" }, mix.element, privacy.element), noise, traffic, rounds);
    chartOf("seconds", trafficPlace, { title: "Seconds a round", format: seconds, axis: tick, height: 150 });
    chartOf("bytes", trafficPlace, { title: "Bytes a round", format: bytes, height: 150 });
  }

  function chartOf(key, parent, options) {
    if (!charts.has(key)) {
      charts.set(key, lineChart(options));
      parent.append(charts.get(key).element);
    }
    return charts.get(key);
  }

  async function act(what) {
    if (acting) return;
    const [question, words, yes] = what === "stop"
      ? ["Stop this run?", "The round under way is abandoned; the last committed model stays, and the run can be resumed.", "Stop the run"]
      : ["Resume this run?", `The run continues after round ${run.status.committed}.`, "Resume the run"];
    if (!(await confirmed(question, words, yes))) return;
    acting = true;
    drawHead();
    try {
      await post(`/api/runs/${encodeURIComponent(run.status.run)}/${what}`);
      put(said);
      say(what === "stop" ? "The run is stopped." : "The run continues.");
    } catch (error) {
      put(said, trouble(error));
    }
    acting = false;
    drawHead();
  }

  function drawHead() {
    const status = run.status;
    title(status.name);
    text(name, status.name);
    put(state, pill(status.state));
    put(parts, `${status.task} · ${status.selector} · ${status.strategy} · ${count(status.count, "client")} a round · seed ${status.seed} · `, h("span", { class: "mono" }, status.run));
    text(why, status.why);
    why.hidden = !status.why;
    text(progressText, `${status.committed} of ${count(status.rounds, "round")}, started ${date(status.created_at)}`);
    setBar(progress, status.rounds ? status.committed / status.rounds : 0);
    progress.className = `bar ${status.state === "running" ? "" : "still"}`;
    stop.hidden = !status.can_stop;
    resume.hidden = !status.can_resume;
    stop.disabled = resume.disabled = acting;
    again.hidden = false;
    again.setAttribute("href", `/start?again=${encodeURIComponent(status.run)}`);
  }

  function drawSummary() {
    summary.hidden = !run.rounds.length;
    if (!run.rounds.length) return;
    const sum = (key) => run.rounds.reduce((total, round) => total + round[key], 0);
    const chosen = new Set(run.rounds.flatMap((round) => round.cohort)).size;
    const latest = run.measures.map((each) => {
      const round = run.rounds.findLast((found) => found.values[each.name] !== undefined && found.values[each.name] !== null);
      if (!round) return null;
      const notes = [run.rounds.length > 1 ? `round ${round.round}` : "", coverage(round.coverage[each.name])];
      return [each.label, measure(round.values[each.name], each.unit), notes.filter(Boolean).join(", over ")];
    }).filter(Boolean).slice(0, 4);
    put(summary, facts([...latest, ["Clients picked", String(chosen), roster.length ? `of ${roster.length}` : ""], ["Time", seconds(sum("seconds"))], ["Moved", bytes(sum("bytes_down") + sum("bytes_up"))]]));
  }

  function drawCurves() {
    const units = [...new Set(run.measures.map((each) => each.unit))].sort((one, other) => (other === "share") - (one === "share"));
    units.forEach((unit) => {
      const mine = run.measures.filter((each) => each.unit === unit);
      const better = mine[0].higher_is_better ? "more is better" : "less is better";
      const series = mine.flatMap((each, place) => {
        const points = (values, over) => run.rounds.map((round) => point(round.round, round[values][each.name], round[over][each.name])).filter(([, found]) => found !== null && found !== undefined);
        const lines = [{ name: each.label, points: points("values", "coverage"), colour: place }];
        const worst = points("worst_tenth", "spread_coverage");
        if (worst.length) lines.push({ name: `${each.label}, worst tenth of clients`, points: worst, colour: place, dashed: 1 });
        return lines;
      });
      const axis = unit === "share" ? (value) => `${Math.round(100 * value)} %` : tick;
      chartOf(`unit ${unit}`, curvesPlace, {
        title: unit === "share" ? `Shares, ${better}` : `${mine[0].label}${mine.length > 1 ? " and others" : ""}${unit ? ` in ${unit}` : ""}, ${better}`,
        format: (value) => (unit === "share" ? share(value) : measure(value, unit)), axis, fixed: unit === "share" ? [0, 1] : null,
      }).draw(series);
    });
    const failed = run.rounds.some((round) => Object.values(round.coverage).some((each) => each.asked && !each.clients));
    text(unmeasured, failed ? "No client could measure a model so far; the notices list the reasons." : UNMEASURED);
    unmeasured.hidden = !run.rounds.length || run.rounds.some((round) => Object.keys(round.values).length);
    curvesPlace.hidden = !unmeasured.hidden;
  }

  function drawPicks() {
    if (!run.rounds.length) return;
    if (!map.element.isConnected) put(picks, picks.querySelector("header"), map.element);
    const names = new Set([...roster, ...run.clients]);
    map.draw([...names], run.rounds.map((round) => ({ ...round, names: run.clients })));
  }

  function drawTraffic() {
    const points = (key) => run.rounds.map((round) => [round.round, round[key]]);
    charts.get("seconds").draw([{ name: "seconds", points: points("seconds"), colour: 0 }]);
    charts.get("bytes").draw([{ name: "down", points: points("bytes_down"), colour: 0 }, { name: "up", points: points("bytes_up"), colour: 1, dashed: 1 }]);
  }

  /** ε over rounds, and the clients that are near the run's limit or refuse; only with [privacy]. */
  function drawNoise() {
    const latest = run.rounds.at(-1)?.noise;
    noise.hidden = !latest;
    if (!latest) return;
    const number = (value) => (value === null ? "unknown" : value.toLocaleString("en", { maximumSignificantDigits: 4 }));
    const points = (key) => run.rounds.filter((round) => round.noise && round.noise[key] !== null).map((round) => [round.round, round.noise[key]]);
    put(noiseFacts, facts([
      ["Largest ε", number(latest.largest), `of a client, at δ = ${latest.delta}`],
      ["Median ε", number(latest.median)],
      ["Near the limit", latest.near_limit === null ? "–" : String(latest.near_limit), latest.near_limit === null ? "the run sets no epsilon" : "clients that used 80 % of their trainings"],
      ["Refused", String(latest.refused), "clients that may train no more"],
    ]), h("p", { class: "small soft" }, "Counted from the updates of this run that have arrived. The ledgers of hosts also count other runs."));
    chartOf("noise", noisePlace, { title: "ε by round", format: number, axis: tick, height: 150 })
      .draw([{ name: "largest", points: points("largest"), colour: 0 }, { name: "median", points: points("median"), colour: 1, dashed: 1 }]);
  }

  function drawRounds() {
    const newest = run.rounds.slice(-NEWEST).reverse();
    const shown = run.measures.slice(0, 3);
    const columns = [
      { title: "Round", right: true, cell: (round) => round.round },
      { title: "Cohort", right: true, cell: (round) => `${round.left_out.length ? `${round.cohort.length - round.left_out.length} of ` : ""}${round.cohort.length}${round.late ? ` + ${round.late} late` : ""}` },
      ...shown.map((each) => ({ title: each.label, right: true, cell: (round) => [measure(round.values[each.name], each.unit), round.coverage[each.name]?.partial ? h("small", {}, " partial") : null] })),
      { title: "Over", kind: "nowrap", cell: (round) => coverage(shown.map((each) => round.coverage[each.name]).find(Boolean) ?? Object.values(round.coverage)[0]) || "–" },
      { title: "Time", right: true, kind: "nowrap", cell: (round) => seconds(round.seconds) },
      { title: "Down", right: true, kind: "nowrap", cell: (round) => bytes(round.bytes_down) },
      { title: "Up", right: true, kind: "nowrap", cell: (round) => bytes(round.bytes_up) },
      { title: h("span", { class: "unseen" }, "Details"), right: true, cell: (round) => h("button", { class: "plain", "data-focus": `round ${round.round}`, "aria-label": `Who was picked in round ${round.round}, and why`, onclick: () => openRound(run.status.run, round.round) }, "Who and why") },
    ];
    const earlier = run.rounds.length - newest.length + run.earlier;
    putAnew(rounds, rounds.querySelector("header"), newest.length
      ? [h("div", { class: "scroll" }, table("The newest rounds", columns, newest, { rowKind: (round) => (round.left_out.length ? "trouble" : undefined) })), earlier ? h("p", { class: "quiet small" }, `${count(earlier, "earlier round")}; the map above opens each, `, h("code", {}, "potluck export"), " writes all.") : null]
      : h("p", { class: "quiet" }, "No round is committed yet."));
  }

  function drawNotices() {
    notices.hidden = !run.notices.length;
    const newest = run.notices.slice(-NEWEST).reverse();
    put(notices, notices.querySelector("header"), h("ul", { class: "small notices" }, newest.map((each) => h("li", { class: each.warning ? "warning" : undefined },
      each.warning ? h("strong", {}, "Warning: ") : null, each.text, each.at ? h("span", { class: "soft" }, ` · ${date(each.at)}`) : null))));
  }

  function drawAll() {
    if (!head.isConnected) lay();
    drawHead();
    live.update(run.live, run.cohort);
    drawRest();
    drawNotices();
    disclosed.soon(true);
  }

  function drawRest() {
    drawSummary();
    drawCurves();
    drawPicks();
    drawTraffic();
    drawNoise();
    drawRounds();
  }

  const heard = {
    run(data) {
      stale("");
      run = data;
      drawAll();
      performance.mark("run drawn");
    },
    round({ round, new_clients: clients }) {
      if (run.rounds.at(-1)?.round >= round.round) return;
      run.clients.push(...clients);
      run.rounds.push(round);
      if (run.rounds.length > MOST_ROUNDS) run.rounds.shift(); // as the server keeps no more of them
      run.earlier = run.rounds[0].round - 1;
      run.status.committed = Math.max(run.status.committed, round.round);
      drawHead();
      drawRest();
      disclosed.soon(false);
    },
    live: (data) => live.update(data.live, data.cohort),
    status(data) {
      run.status = data;
      drawHead();
    },
    notice(data) {
      run.notices.push(data);
      drawNotices();
    },
  };

  /** Says that the run is followed no more; once, as it is read out. */
  function stale(words) {
    if (unfollowed.textContent === words) return;
    put(unfollowed, words ? trouble(new Error(words)) : null);
  }

  async function fetchAgain() {
    try {
      const found = await get(`/api/runs/${encodeURIComponent(wanted)}`);
      if (!run && !closed) heard.run(found); // else the stream brings it, and what goes wrong after
    } catch (error) {
      missed(error.message, error.trouble);
    }
  }

  /** Says why there is nothing to be seen. Asking at once would be refused at once, without end. */
  function missed(words, what) {
    if (closed) return;
    if (run) stale(`${words}. What is shown of the run is what was known before.`);
    else put(place, h("div", { class: "card empty" }, h("h1", {}, what === "missing" ? "There is no such run" : "The run can't be shown"), h("p", {}, words), h("a", { class: "button", href: "/" }, "All runs")));
    clearTimeout(retry);
    if (what !== "missing") retry = setTimeout(fetchAgain, RETRY_MILLISECONDS);
  }

  return {
    hear(kind, data) {
      if (kind === "gone") missed(data.error, data.trouble);
      else if (kind === "run" || run) heard[kind]?.(data);
    },
    again: () => go(location.pathname),
    close() {
      closed = true;
      clearTimeout(retry);
      disclosed.close();
      live.close();
      map.close();
      mix.close();
      for (const chart of charts.values()) chart.close();
    },
  };
}
