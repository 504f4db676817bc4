// Who was in a round, and why.

import { get } from "./api.js";
import { h, put } from "./dom.js";
import { count, seconds } from "./format.js";
import { table, trouble } from "./parts.js";

export async function openRound(run, round) {
  const place = h("div", {}, h("p", { class: "quiet" }, "Fetching …"));
  const close = h("button", { onclick: () => dialog.close() }, "Close");
  const dialog = h("dialog", { "aria-labelledby": "round-title" },
    h("header", {}, h("h2", { id: "round-title" }, `Round ${round}: who was picked, and why`), close), place);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  try {
    const { members } = await get(`/api/runs/${encodeURIComponent(run)}/rounds/${round}`);
    const find = h("input", { class: "find", type: "search", placeholder: "Find a client", "aria-label": "Find a client or a reason", oninput: () => draw() });
    const list = h("div", { class: "scroll" });
    const draw = () => {
      const words = find.value.trim().toLowerCase();
      const shown = members.filter((member) => `${member.client} ${member.reason} ${member.state} ${member.host}`.toLowerCase().includes(words));
      put(list, table(`Clients of round ${round}, in the order chosen`, [
        { title: "Client", kind: "nowrap", cell: (member) => member.client },
        { title: "Why it was chosen", cell: (member) => member.reason || "–" },
        { title: "How it ended", cell: (member) => (member.trouble ? `${member.state}: ${member.trouble}` : member.state === "included" ? "in the model" : member.state) },
        { title: "Host", cell: (member) => member.host },
        { title: "Samples", right: true, cell: (member) => member.samples || "–" },
        { title: "Time", right: true, kind: "nowrap", cell: (member) => (member.seconds ? seconds(member.seconds) : "–") },
      ], shown, { rowKind: (member) => (["lost", "failed", "late"].includes(member.state) ? "trouble" : undefined) }));
    };
    draw();
    put(place, members.length > 12 ? h("p", {}, find, " ", h("span", { class: "small soft" }, count(members.length, "client"))) : null, list);
  } catch (error) {
    put(place, trouble(error));
  }
}
