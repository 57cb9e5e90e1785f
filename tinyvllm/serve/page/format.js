// Numbers, sizes, times and names as people read them, and the colour of a sequence.

const whole = new Intl.NumberFormat("en");

export const count = (value) => whole.format(Math.round(value));

export const plural = (value, one, many = one + "s") => `${count(value)} ${value === 1 ? one : many}`;

export function rate(value) {
  if (value == null) return "–";
  return value < 100 ? value.toFixed(1) : count(value);
}

const NARROW = "\u202f"; // a space that keeps a number and its unit in one line

export const percent = (share) => `${(100 * share).toFixed(1)}${NARROW}%`;

export function bytes(value) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (value < 1024) return `${unit === "B" ? value : value.toFixed(1)}${NARROW}${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(2)}${NARROW}GiB`;
}

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds >= 100) return `${count(seconds)}${NARROW}s`;
  if (seconds >= 1) return `${seconds.toFixed(2)}${NARROW}s`;
  const ms = seconds * 1000;
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)}${NARROW}ms`;
}

export function ago(seconds) {
  for (const [unit, size] of [["day", 86400], ["hour", 3600], ["minute", 60]]) {
    if (seconds >= size) return plural(Math.floor(seconds / size), unit);
  }
  return plural(Math.floor(seconds), "second");
}

// `time`: seconds since 1970.
export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

// "cmpl-d41a9e61…-2": the kind, the first letters of the number, what comes after it.
export function shortId(id) {
  return id.replace(/[0-9a-f]{32}/, (hex) => hex.slice(0, 8) + "…");
}

// Neighbours in number are far apart in hue, and three lightnesses tell equal hues apart.
export function sequenceColour(label, dark) {
  const hue = (label * 137.508) % 360;
  const lightness = (dark ? [0.66, 0.74, 0.82] : [0.5, 0.58, 0.66])[label % 3];
  return `oklch(${lightness} ${dark ? 0.13 : 0.15} ${hue.toFixed(1)})`;
}
