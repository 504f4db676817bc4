// Numbers for people, as `potluck` writes them in a terminal.

const BYTES = ["B", "kB", "MB", "GB", "TB", "PB"];

export function bytes(count) {
  let value = count, unit = 0;
  while (value >= 999.5 && unit < BYTES.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${value.toFixed(unit && value < 9.95 ? 1 : 0)} ${BYTES[unit]}`;
}

export function seconds(given) {
  if (given < 9.95) return `${Math.max(given, 0).toFixed(1)} s`;
  const whole = Math.round(given), two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${two(Math.floor((whole % 86400) / 3600))} h`;
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toPrecision(4).replace(/\.$/, "");
}

/** A value at an axis: 0.2, 1500, 2.5e+7. */
export function tick(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
}

/** A measure with its unit: 93.1 %, 0.2712, 3.400 mm. */
export function measure(value, unit) {
  if (unit === "share") return share(value);
  return unit && value !== null && value !== undefined ? `${number(value)} ${unit}` : number(value);
}

export function count(many, noun) {
  return `${many} ${noun}${many === 1 ? "" : "s"}`;
}

/** The clients and samples that a measure is over: 7 clients, 280 samples; 4 of 7 clients, partial. */
export function coverage(found) {
  if (!found) return "";
  const clients = found.asked ? `${found.clients < found.asked ? `${found.clients} of ` : ""}${count(found.asked, "client")}` : "";
  return [clients, found.samples ? count(found.samples, "sample") : "", found.partial ? "partial" : ""].filter(Boolean).join(", ");
}

/** A point of a curve: the round, its value, and what that is over. */
export function point(round, value, found) {
  return [round, value, coverage(found), Boolean(found?.partial)];
}

export function ago(moment) {
  if (!moment) return "–";
  const passed = (Date.now() - Date.parse(moment)) / 1000;
  return passed < 1.5 ? "just now" : `${seconds(passed)} ago`;
}

/** The local date and time. */
export function date(moment) {
  return moment ? new Date(moment).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : "–";
}

const collator = new Intl.Collator("en", { numeric: true });

/** Sorts names with the numbers in them as numbers. */
export const byName = (one, other) => collator.compare(one, other);
