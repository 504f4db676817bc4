// Starting a run: a form and the run file beside each other; the file is what counts.

import { get, post } from "./api.js";
import { h, put, say } from "./dom.js";
import { count } from "./format.js";
import { trouble } from "./parts.js";

const PAUSE_MILLISECONDS = 350;

export function showStart(place, { go, title, query }) {
  title("Start a run");
  let fields = [], inputs = new Map(), problems = [], timer = null, checked = Promise.resolve();
  const said = h("div", {});
  const file = h("textarea", { id: "run-file", spellcheck: "false", autocapitalize: "off", autocomplete: "off", "aria-describedby": "file-problems file-hint", oninput: () => later({}) });
  const fileProblems = h("div", { id: "file-problems", class: "wrong", "aria-live": "polite" });
  const form = h("div", { class: "fields" });
  const start = h("button", { class: "first", type: "submit" }, "Start the run");
  const whole = h("button", { type: "button", onclick: () => fetchForm("?example") }, "Every setting, explained");
  const element = h("form", { class: "start", novalidate: true },
    h("section", { class: "card", "aria-labelledby": "form-title" }, h("header", {}, h("h2", { id: "form-title" }, "What is to be trained")), form),
    h("section", { class: "card", "aria-labelledby": "file-title" }, h("header", {}, h("h2", {}, h("label", { for: "run-file", id: "file-title" }, "Run file")), h("span", { class: "aside" }, "TOML; the form writes into it")), file, fileProblems,
      h("p", { class: "small soft", id: "file-hint" }, "Options of the task, the selector and the strategy go into their tables here. Control-Enter starts the run."),
      h("div", { class: "actions", style: { "margin-top": "1rem" } }, start, whole)));
  put(place, h("div", { class: "head" }, h("div", { class: "grow" }, h("h1", {}, query.get("again") ? "Start a run again" : "Start a run"), h("p", { class: "soft" }, query.get("again") ? `With the run file of ${query.get("again")}.` : "The coordinator checks it once more, with the plug-ins that it has."))), said, element);
  element.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  file.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  });

  async function fetchForm(search) {
    try {
      const found = await get(`/api/form${search}`);
      fields = found.fields;
      layFields();
      file.value = found.draft.run_file;
      take(found.draft);
      put(said);
    } catch (error) {
      put(said, trouble(error));
    }
  }

  function layFields() {
    inputs = new Map(fields.map((field) => {
      const id = `field-${field.key.replaceAll(".", "-")}`;
      const input = h("input", { id, name: field.key, inputmode: { integer: "numeric", number: "decimal" }[field.kind], placeholder: field.default, list: field.choices.length ? `${id}-choices` : undefined, autocomplete: "off", "aria-describedby": `${id}-wrong ${id}-hint`, oninput: () => later({ [field.key]: input.value }) });
      const wrong = h("p", { class: "wrong", id: `${id}-wrong` });
      const element = h("div", { class: `field ${field.key === "name" || field.key === "task.name" ? "wide" : ""}` },
        h("label", { for: id }, field.label), input,
        field.choices.length ? h("datalist", { id: `${id}-choices` }, field.choices.map((choice) => h("option", { value: choice }))) : null,
        wrong, h("p", { class: "hint", id: `${id}-hint` }, field.hint));
      return [field.key, { input, wrong, element }];
    }));
    put(form, [...inputs.values()].map((each) => each.element));
  }

  let waiting = {};
  function later(changes) {
    Object.assign(waiting, changes);
    clearTimeout(timer);
    timer = setTimeout(check, PAUSE_MILLISECONDS);
  }

  /** Puts what was typed into the file, and marks what is wrong: one after the other, or an earlier change would come last. */
  function check() {
    clearTimeout(timer);
    timer = null;
    checked = checked.then(write);
    return checked;
  }

  async function write() {
    const changes = waiting, before = file.value;
    const keep = () => {
      waiting = { ...changes, ...waiting }; // what was typed meanwhile counts
    };
    waiting = {};
    try {
      const draft = await post("/api/draft", { run_file: before, changes });
      if (file.value !== before) {
        keep();
        later({});
        return;
      }
      if (Object.keys(changes).length && draft.run_file !== file.value) file.value = draft.run_file;
      take(draft);
    } catch (error) {
      keep();
      put(said, trouble(error));
    }
  }

  function take(draft) {
    for (const [key, { input }] of inputs) {
      if (document.activeElement !== input && !(key in waiting)) input.value = draft.values[key] ?? "";
    }
    mark(draft.problems);
  }

  function mark(found) {
    problems = found;
    for (const [key, { input, wrong }] of inputs) {
      const mine = problems.filter((problem) => problem.key === key || problem.key === key.replace(/\.name$/, ""));
      put(wrong, mine.map((problem) => problem.text).join("; "));
      if (mine.length) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
    if (problems.length) file.setAttribute("aria-invalid", "true");
    else file.removeAttribute("aria-invalid");
    put(fileProblems, problems.length ? h("ul", { class: "problems" }, problems.map((problem) => h("li", {},
      problem.line ? [h("button", { type: "button", class: "plain", onclick: () => select(problem.line) }, `Line ${problem.line}`), ": "] : null, problem.text))) : null);
  }

  function select(line) {
    const lines = file.value.split("\n"), begin = lines.slice(0, line - 1).reduce((sum, each) => sum + each.length + 1, 0);
    file.focus();
    file.setSelectionRange(begin, begin + (lines[line - 1]?.length ?? 0));
    file.scrollTop = Math.max(0, (line - 4) * 21);
  }

  async function submit() {
    if (start.disabled) return;
    start.disabled = true;
    do await (timer || Object.keys(waiting).length ? check() : checked);
    while (timer);
    if (Object.keys(waiting).length) { // they could not be put into the file, and the reason is said
      start.disabled = false;
      return;
    }
    try {
      const { run } = await post("/api/runs", { run_file: file.value });
      say("The run is started.");
      go(`/runs/${run}`);
      return;
    } catch (error) {
      mark(error.problems ?? []);
      put(said, h("div", { class: "notice bad", role: "alert", tabindex: -1 }, h("strong", {}, error.trouble === "refused" ? "The run was not started" : "The run could not be started"), problems.length > 1 ? `${count(problems.length, "problem")}, marked below` : error.message));
      const first = [...inputs.values()].find(({ input }) => input.getAttribute("aria-invalid"));
      (first?.input ?? said.firstChild).focus();
      said.scrollIntoView({ block: "nearest" });
    }
    start.disabled = false;
  }

  fetchForm(query.get("again") ? `?again=${encodeURIComponent(query.get("again"))}` : "");
  return {
    close() {
      clearTimeout(timer);
    },
  };
}
