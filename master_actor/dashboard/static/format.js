// Figures as people read them.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

// By hand: the first formatter of Intl takes longer to make than everything else on this page together.
export const count = (value) => String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ",");
const two = (value) => String(value).padStart(2, "0");

/** Three digits, whatever the size. */
export function digits(value) {
  if (!(value > 0)) return "0";
  if (value >= 100) return count(value);
  if (value >= 10) return value.toFixed(1);
  return value >= 0.01 ? value.toFixed(2) : value.toPrecision(1);
}

/** [figure, unit] of so many bytes. */
export function byteParts(value) {
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return [unit === 0 ? String(Math.round(value)) : digits(value), UNITS[unit]];
}

export const bytes = (value) => byteParts(value).join(" ");
export const rate = (value) => `${bytes(value)}/s`;
/** Without zeros at the end, for round numbers. */
export const tidy = (text) => text.replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, "");
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

/** A stretch of time, short. */
export function seconds(value) {
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(value % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

/** Milliseconds, as recoveries have them. */
export const milliseconds = (value) => (value >= 10_000 ? seconds(value / 1000) : `${value >= 100 ? Math.round(value) : value.toFixed(1)} ms`);

export function shortTime(at) {
  const date = new Date(at * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export const time = (at) => `${shortTime(at)}.${String(new Date(at * 1000).getMilliseconds()).padStart(3, "0")}`;

export function moment(at) {
  const date = new Date(at * 1000);
  return `${date.getDate()} ${MONTHS[date.getMonth()]}, ${two(date.getHours())}:${two(date.getMinutes())}`;
}

/** The text, cut in its middle: the ends of names tell them apart. */
export function shorten(text, length) {
  if (text.length <= length) return text;
  const kept = length - 1;
  return `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`;
}
