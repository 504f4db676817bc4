// Parts that several views are made of.

import { h, put } from "./dom.js";

export function pill(state) {
  return h("span", { class: `pill ${state}` }, state);
}

export function bar(done, { label, kind = "" } = {}) {
  const filled = h("span", { style: { width: `${(100 * done).toFixed(1)}%` } });
  return h("span", {
    class: `bar ${kind}`, role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100,
    "aria-valuenow": Math.round(100 * done),
  }, filled);
}

export function setBar(element, done) {
  element.firstChild.style.width = `${(100 * done).toFixed(1)}%`;
  element.setAttribute("aria-valuenow", Math.round(100 * done));
}

export function card(title, { aside, id, kind = "" } = {}, ...children) {
  const heading = h("h2", { id: id ? `${id}-title` : undefined }, title);
  const note = aside === undefined ? null : h("span", { class: "aside" }, aside);
  return h("section", { class: `card ${kind}`, id, "aria-labelledby": id ? `${id}-title` : undefined },
    h("header", {}, heading, note), ...children);
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, value, note]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value, note ? h("small", {}, ` ${note}`) : null))));
}

/** A table. columns: {title, right?, cell(row)}; caption: for screen readers. */
export function table(caption, columns, rows, { kind = "", rowKind = () => undefined } = {}) {
  return h("table", { class: kind },
    h("caption", { class: "unseen" }, caption),
    h("thead", {}, h("tr", {}, columns.map((each) =>
      h("th", { scope: "col", class: each.right ? "right" : undefined }, each.title)))),
    h("tbody", {}, rows.map((row) => h("tr", { class: rowKind(row) }, columns.map((each) =>
      h("td", { class: [each.right ? "right" : "", each.kind ?? ""].join(" ").trim() || undefined }, each.cell(row)))))));
}

/** A table behind a picture, made when it is opened, and again with each update while it is open. */
export function behind(label, make) {
  const place = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label });
  const element = h("details", { class: "table" }, h("summary", {}, label), place);
  const refresh = () => element.open && put(place, make());
  element.addEventListener("toggle", refresh);
  return { element, refresh };
}

/** Asks a yes-or-no question; true for yes. */
export function confirmed(title, words, yes) {
  return new Promise((resolve) => {
    const close = (answer) => () => dialog.close(answer);
    const dialog = h("dialog", { "aria-labelledby": "question" },
      h("h2", { id: "question" }, title), h("p", {}, words),
      h("div", { class: "actions" },
        h("button", { class: "first", onclick: close("yes") }, yes), h("button", { onclick: close("no"), autofocus: true }, "Cancel")));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** An error as a box. */
export function trouble(error) {
  return h("div", { class: "notice bad", role: "alert" }, error.message);
}
