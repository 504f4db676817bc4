// What the page's server is asked, and what it says of itself.

/** An answer that is an error; `problems` of a run file, by key. */
export class Refusal extends Error {
  constructor(found) {
    super(found.error);
    this.trouble = found.trouble;
    this.problems = found.problems ?? [];
  }
}

async function answer(request) {
  let response;
  try {
    response = await request;
  } catch {
    throw new Refusal({ error: "the web UI's server does not answer; start `potluck page` again", trouble: "ended" });
  }
  let found;
  try {
    found = await response.json();
  } catch {
    throw new Refusal({ error: `the web UI's server failed (${response.status}); see the terminal in which \`potluck page\` runs`, trouble: "ended" });
  }
  if (!response.ok) throw new Refusal(found);
  return found;
}

export function get(path) {
  return answer(fetch(path, { headers: { Accept: "application/json" } }));
}

export function post(path, body = {}) {
  return answer(
    fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }),
  );
}

const KINDS = ["overview", "run", "round", "live", "status", "notice", "gone", "full"];

/** Calls `hear(kind, data)` with events, of a run too where one is named, until the result is called.
 *
 * A page that is not to be seen listens to nothing: browsers open few connections to one server.
 */
export function listen(run, hear) {
  let source = null, full = false;
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource(run ? `/api/events?run=${encodeURIComponent(run)}` : "/api/events");
    for (const kind of KINDS) source.addEventListener(kind, (event) => hear(kind, JSON.parse(event.data)));
    source.addEventListener("open", () => hear("open", null));
    source.addEventListener("full", () => (full = true)); // the stream ends, and is asked for again
    source.addEventListener("error", () => {
      if (!full) hear("ended", null);
      full = false;
    });
  };
  const close = () => {
    source?.close();
    source = null;
  };
  const look = () => (document.hidden ? close() : open());
  document.addEventListener("visibilitychange", look);
  open();
  return () => {
    document.removeEventListener("visibilitychange", look);
    close();
  };
}
