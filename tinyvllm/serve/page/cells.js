// What is in each block: decoding, counting, and what a drawn cell stands for.

// As in tinyvllm/engine/view.py.
export const FREE = 0, CACHED = 1, COPY = 2, SHARED = 3, FIRST_LABEL = 4;

function numbers(text) {
  const packed = atob(text);
  const cells = new Uint16Array(packed.length / 2);
  for (let i = 0; i < cells.length; i++) {
    cells[i] = packed.charCodeAt(2 * i) | (packed.charCodeAt(2 * i + 1) << 8);
  }
  return cells;
}

// The cells of a frame; with `base`, the cells that the server says this is a change of.
export function decode(text, base) {
  const cells = numbers(text);
  if (base) for (let i = 0; i < cells.length; i++) cells[i] ^= base[i];
  return cells;
}

export const kindOf = (cell) =>
  cell >= FIRST_LABEL ? "one" : ["free", "cached", "copy", "shared"][cell];

// Blocks [start, stop) by kind.
export function tally(cells, start = 0, stop = cells.length) {
  const found = { free: 0, cached: 0, copy: 0, shared: 0, one: 0 };
  for (let i = start; i < stop; i++) {
    const cell = cells[i];
    if (cell >= FIRST_LABEL) found.one++;
    else if (cell === FREE) found.free++;
    else if (cell === CACHED) found.cached++;
    else if (cell === COPY) found.copy++;
    else found.shared++;
  }
  return found;
}

// What most of the used blocks in [start, stop) hold: the value and how many have it.
export function commonest(cells, start, stop) {
  const sorted = cells.slice(start, stop).sort();
  let best = FREE, most = 0, run = 0;
  for (let i = 0; i < sorted.length; i++) {
    run = i > 0 && sorted[i] === sorted[i - 1] ? run + 1 : 1;
    if (sorted[i] >= COPY && run > most) [best, most] = [sorted[i], run];
  }
  return [best, most];
}

// A map's cells. `fit` shows all blocks in the room there is: small enough, and of several blocks
// each where there are too many. Further levels show fewer blocks to a cell, then larger cells.
const LEAST = 5, LARGEST = 18, READABLE = 30;

export function fit(blocks, width, height) {
  const room = (size) => Math.max(1, Math.floor(width / size) * Math.floor(height / size));
  let size = LARGEST, each = 1;
  while (size > LEAST && room(size) < blocks) size--;
  while (room(size) * each < blocks) each *= 2;
  while (size < LARGEST && room(size + 1) * each >= blocks) size++;
  return { size, each };
}

export function levels(blocks, width, height) {
  const found = [fit(blocks, width, height)];
  for (;;) {
    const { size, each } = found.at(-1);
    if (each > 1) found.push({ size, each: each / 2 });
    else if (size < READABLE) found.push({ size: Math.min(2 * size, READABLE), each: 1 });
    else return found;
  }
}
