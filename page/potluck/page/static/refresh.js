// Asks what clients disclosed, not more often than is of use.

import { get } from "./api.js";

const MILLISECONDS = 5000;

/** `soon(now)` asks at once or after a pause; what came is handed to `take`. */
export function disclosedRefresh(runId, take) {
  let timer = null, asking = false, closed = false;
  async function ask() {
    timer = null;
    if (asking || closed || !runId()) return;
    asking = true;
    try {
      const found = await get(`/api/runs/${encodeURIComponent(runId())}/disclosed`);
      if (!closed) take(found);
    } catch {
      // The frame says what is wrong with the connection; the next round asks again.
    }
    asking = false;
  }
  return {
    soon(now) {
      if (now) ask();
      else timer ??= setTimeout(ask, MILLISECONDS);
    },
    close() {
      closed = true;
      clearTimeout(timer);
    },
  };
}
