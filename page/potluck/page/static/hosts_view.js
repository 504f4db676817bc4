// Hosts: their devices, their versions, and the clients that they hold.

import { get } from "./api.js";
import { h, put, putAnew, text } from "./dom.js";
import { ago, count, date } from "./format.js";
import { table, trouble } from "./parts.js";

const REFRESH_MILLISECONDS = 10_000;
const SOON_DAYS = 14;

export function showHosts(place, { title, overview }) {
  title("Hosts");
  const figures = h("p", { class: "soft" }, "Asking the coordinator …");
  const find = h("input", { class: "find", type: "search", placeholder: "Find a host or client", "aria-label": "Find a host by name, device, tag or client", oninput: () => draw() });
  const list = h("div", {}), said = h("div", {});
  put(place, h("div", { class: "head" }, h("div", { class: "grow" }, h("h1", {}, "Hosts"), figures), find), said, list);
  let found = null, drawn = "", closed = false;

  async function refresh() {
    try {
      found = await get("/api/hosts");
      put(said);
      draw();
    } catch (error) {
      if (!overview()?.connection.trouble) put(said, trouble(error));
    }
  }

  function draw() {
    if (!found) return;
    text(figures, found.summary);
    const words = find.value.trim().toLowerCase();
    const hosts = found.hosts.filter((host) => `${host.host} ${host.device} ${host.tags} ${host.version}`.toLowerCase().includes(words) || host.clients.some((client) => client.client.toLowerCase().includes(words)));
    const state = JSON.stringify([hosts, words, Math.floor(Date.now() / 60_000)]);
    if (state === drawn) return;
    drawn = state;
    const open = new Set([...list.querySelectorAll("details[open]")].map((each) => each.dataset.host));
    putAnew(list, content(hosts, open));
  }

  function content(hosts, open) {
    if (!found.hosts.length) {
      return h("div", { class: "card empty" }, h("h2", {}, "No host has connected yet"), h("p", {}, "Hosts connect to the coordinator; start a host with ", h("code", {}, "potluck-client --config FILE"), " where the data is."));
    }
    if (!hosts.length) return h("div", { class: "card empty" }, h("h2", {}, "No host matches"), h("p", {}, `None of ${count(found.hosts.length, "host")} has “${find.value}” in its name, device, tags or clients.`));
    const release = overview()?.coordinator?.version;
    return h("section", { class: "card", "aria-label": "All hosts" }, h("div", { class: "scroll" }, table("Hosts, connected hosts first", [
      { title: "Host", cell: (host) => [h("strong", {}, host.host), host.tags ? h("div", { class: "small soft" }, host.tags) : null] },
      { title: "State", cell: (host) => h("span", { class: `pill ${host.attending ? "running" : "waiting"}` }, host.attending ? (host.relay ? `connected through ${host.relay}` : "connected") : "disconnected") },
      { title: "Device", cell: (host) => host.device },
      { title: "Version", cell: (host) => [host.version || "–", host.version && release && host.version !== release ? h("span", { class: "tag" }, `coordinator has ${release}`) : null] },
      { title: "Heard of", kind: "nowrap", cell: (host) => (host.attending ? "now" : ago(host.last_seen)) },
      { title: "Certificate ends", kind: "nowrap", cell: (host) => ends(host.certificate_expires_at) },
      { title: "Clients", cell: (host) => clients(host, open.has(host.host)) },
    ], hosts)));
  }

  function ends(moment) {
    if (!moment) return "–";
    const days = (Date.parse(moment) - Date.now()) / 86_400_000;
    return [date(moment).split(",").slice(0, 2).join(","), days < SOON_DAYS ? h("span", { class: "tag" }, days < 0 ? "expired" : `in ${Math.ceil(days)} days`) : null];
  }

  function clients(host, open) {
    const body = h("div", {});
    const fill = () => put(body, table(`Clients of ${host.host}`, [
      { title: "Client", cell: (client) => client.client },
      { title: "Picked", right: true, cell: (client) => client.selected },
      { title: "In a model", right: true, cell: (client) => client.included },
      { title: "Note", cell: (client) => client.note },
    ], host.clients, { rowKind: (client) => (client.note ? "trouble" : undefined) }));
    const notes = host.clients.filter((client) => client.note).length;
    const element = h("details", { open, "data-host": host.host }, h("summary", { "data-focus": host.host }, count(host.clients.length, "client"), notes ? h("span", { class: "tag" }, `${notes} with a note`) : null), body);
    element.addEventListener("toggle", () => element.open && fill());
    if (open) fill();
    return element;
  }

  refresh();
  const timer = setInterval(() => !document.hidden && !closed && refresh(), REFRESH_MILLISECONDS);
  return {
    again: refresh,
    close() {
      closed = true;
      clearInterval(timer);
    },
  };
}
