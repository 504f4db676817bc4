// The frame: which view is shown, and whether the coordinator answers.

import { listen } from "./api.js";
import { h, put, say, text } from "./dom.js";
import { trouble } from "./parts.js";
import { showRun } from "./run_view.js";
import { showRuns } from "./runs_view.js";

const content = document.getElementById("content");
const banner = document.getElementById("banner");
const linkState = document.getElementById("link-state");
const TITLES = {
  lost: "The coordinator does not answer",
  certificate: "A certificate can't be used",
  other: "The coordinator can't be reached",
  ended: "The web UI's server has ended",
  fault: "The web UI's server failed",
  full: "The web UI is open in too many windows",
};

let overview = null;
let view = null;
let stopListening = () => {};
let wrong = "";
let shows = 0;

const ROUTES = [
  [/^\/$/, async () => ({ make: showRuns })],
  [/^\/runs\/([^/]+)$/, async (run) => ({ make: showRun, run: decodeURIComponent(run) })],
  [/^\/hosts$/, async () => ({ make: (await import("./hosts_view.js")).showHosts })],
  [/^\/start$/, async () => ({ make: (await import("./start_view.js")).showStart })],
  [/^\/compare$/, async () => ({ make: (await import("./compare_view.js")).showCompare })],
];

/** Go to another view of the page. */
export function go(path) {
  history.pushState(null, "", path);
  show(true);
}

async function show(moved) {
  const mine = (shows += 1);
  stopListening();
  stopListening = () => {};
  view?.close?.();
  view = null;
  const found = ROUTES.map(([pattern, route]) => [pattern.exec(location.pathname), route]).find(([match]) => match);
  markPlace();
  if (!found) {
    put(content, h("div", { class: "empty" }, h("h1", {}, "This page does not exist"), h("a", { class: "button", href: "/" }, "All runs")));
    return;
  }
  const [match, route] = found;
  let make, run;
  try {
    ({ make, run } = await route(...match.slice(1)));
  } catch {
    if (mine === shows) put(content, trouble(new Error("The web UI's server did not send this view; reload the page.")));
    return;
  }
  if (mine !== shows) return; // another view was asked for meanwhile
  const place = h("div", {});
  put(content, place);
  const title = (words) => {
    document.title = words === "Potluck" ? words : `${words} · Potluck`;
  };
  view = make(place, { run, go, title, overview: () => overview, query: new URLSearchParams(location.search) });
  stopListening = listen(run, hear);
  if (overview) view.hear?.("overview", overview);
  if (moved) {
    window.scrollTo(0, 0);
    content.focus({ preventScroll: true });
    say(document.title);
  }
}

function hear(kind, data) {
  if (kind === "ended") {
    connection({ reached: false, trouble: "ended", text: "Start `potluck page` again, and open the address that it prints.", address: "" });
    return;
  }
  if (kind === "full") {
    connection({ reached: false, trouble: "full", text: "This window shows nothing new until you close other windows of the web UI.", address: "" });
    return;
  }
  if (kind === "overview") {
    const again = overview && !overview.connection.reached && data.connection.reached;
    overview = data;
    connection(data.connection);
    if (again) view?.again?.();
  }
  try {
    view?.hear?.(kind, data);
  } catch (error) {
    put(banner, trouble(error));
    throw error;
  }
}

function connection(found) {
  linkState.className = `link-state ${found.reached ? "reached" : "lost"}`;
  const version = overview?.coordinator ? ` · Potluck ${overview.coordinator.version}` : "";
  text(linkState, found.reached ? `${found.address}${version}` : "not connected");
  const words = found.reached ? "" : `${found.trouble}: ${found.text}`;
  if (words === wrong) return;
  wrong = words;
  if (found.reached) put(banner);
  else {
    put(banner, h("div", { class: "notice bad", role: "alert", id: "connection-trouble" },
      h("strong", {}, TITLES[found.trouble]), found.text,
      found.trouble === "ended" ? null : " The data below are from before; the page reconnects automatically."));
  }
}

function markPlace() {
  for (const link of document.querySelectorAll(".top nav a")) {
    const here = link.pathname === "/" ? /^\/($|runs|compare)/.test(location.pathname) : location.pathname === link.pathname;
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || link.origin !== location.origin || link.target || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
  if (link.getAttribute("href").startsWith("#")) return;
  event.preventDefault();
  go(link.pathname + link.search);
});
window.addEventListener("popstate", () => show(true));
show(false);
