// The map of blocks: a canvas with one cell a block, or several blocks where there are too many.

import { CACHED, COPY, FIRST_LABEL, FREE, SHARED, commonest, levels, tally } from "./cells.js";
import { count, plural, sequenceColour } from "./format.js";

export class BlockMap {
  // height: the most that the map takes. name: what to call the block of a label, for people.
  constructor(canvas, { height, name, changed = () => {} }) {
    this.canvas = canvas;
    this.height = height;
    this.name = name;
    this.changed = changed; // called when zoom, position or cursor have changed
    this.cells = new Uint16Array(0);
    this.selected = null; // a label: the other sequences are drawn faintly
    this.cursor = null; // of the cells shown: under the pointer, or moved by keys
    this.level = 0;
    this.first = 0;
    this.paint = canvas.getContext("2d");
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.moveTo(null));
    canvas.addEventListener("blur", () => this.moveTo(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  update(cells) {
    this.cells = cells;
    this.draw();
  }

  select(label) {
    this.selected = label;
    this.draw();
  }

  // What is shown: size of a cell, blocks in it, columns, rows and the range of blocks.
  layout() {
    const width = this.canvas.parentElement.clientWidth;
    const all = levels(this.cells.length, width, this.height);
    this.level = Math.min(this.level, all.length - 1);
    const { size, each } = all[this.level];
    const columns = Math.max(1, Math.floor(width / size));
    const needed = Math.ceil(this.cells.length / each / columns);
    const rows = Math.max(1, Math.min(needed, Math.floor(this.height / size)));
    const shown = Math.min(columns * rows * each, this.cells.length);
    const line = columns * each;
    const last = Math.max(0, Math.ceil((this.cells.length - shown) / line) * line);
    this.first = Math.min(Math.max(0, Math.round(this.first / line) * line), last);
    const stop = Math.min(this.first + shown, this.cells.length);
    return { width, size, each, columns, rows, line, last, stop, deepest: all.length - 1 };
  }

  zoom(by) {
    const { each, stop } = this.layout();
    const at = this.cursor == null ? (this.first + stop) / 2 : this.first + this.cursor * each;
    this.level = by === 0 ? 0 : Math.max(0, this.level + by);
    const after = this.layout();
    this.first = Math.max(0, at - (after.columns * after.rows * after.each) / 2);
    if (this.cursor != null) {
      this.layout();
      this.cursor = Math.floor((at - this.first) / after.each);
    }
    this.draw();
  }

  scrollTo(first) {
    this.first = first;
    this.draw();
  }

  moveTo(cursor) {
    if (cursor === this.cursor) return;
    this.cursor = cursor;
    this.draw();
  }

  // The blocks [start, stop) of the cell at the cursor.
  range() {
    if (this.cursor == null) return null;
    const { each } = this.layout();
    const start = this.first + this.cursor * each;
    return start < this.cells.length ? [start, Math.min(start + each, this.cells.length)] : null;
  }

  describe() {
    const range = this.range();
    if (!range) return "";
    const [start, stop] = range;
    if (stop - start === 1) return `Block ${count(start)}: ${this.holder(this.cells[start])}`;
    const kinds = tally(this.cells, start, stop);
    const used = kinds.one + kinds.shared + kinds.copy;
    const [value, most] = commonest(this.cells, start, stop);
    const mostly = used ? ` (${most} ${this.holder(value)})` : "";
    return `Blocks ${count(start)} to ${count(stop - 1)}: ${used} in use${mostly}, ` +
      `${kinds.cached} cached, ${kinds.free} free`;
  }

  holder(cell) {
    if (cell >= FIRST_LABEL) return this.name(cell);
    return ["free", "cached, for equal prefixes", "held by a copy under way", "shared"][cell];
  }

  scale() {
    const { size, each, stop } = this.layout();
    const all = this.cells.length;
    const cell = each === 1 ? "1 cell = 1 block" :
      `1 cell = ${each} blocks, filled as far as they are in use, coloured by what most hold`;
    const part = this.first === 0 && stop === all ? plural(all, "block") :
      `blocks ${count(this.first)} to ${count(stop - 1)} of ${count(all)}`;
    return { text: `${part}; ${cell}`, size };
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const { size, columns, rows } = this.layout();
    const column = Math.floor((event.clientX - box.left) / size);
    const row = Math.floor((event.clientY - box.top) / size);
    const inside = column >= 0 && column < columns && row >= 0 && row < rows;
    this.moveTo(inside ? row * columns + column : null);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { each, columns, rows, line, last, stop } = this.layout();
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const page = rows * line;
    const places = { PageUp: this.first - page, PageDown: this.first + page, Home: 0, End: last };
    if (event.key in steps) this.step(steps[event.key], columns, Math.ceil((stop - this.first) / each));
    else if (event.key in places) this.scrollTo(places[event.key]);
    else if (event.key === "+" || event.key === "=") this.zoom(1);
    else if (event.key === "-") this.zoom(-1);
    else if (event.key === "Escape") this.zoom(0);
    else return;
    event.preventDefault();
  }

  step(by, columns, shown) {
    if (this.cursor == null) return this.moveTo(0);
    let cursor = this.cursor + by;
    const { line, last } = this.layout();
    if (cursor < 0 && this.first > 0) {
      this.first -= line;
      cursor += columns;
    } else if (cursor >= shown && this.first < last) {
      this.first += line;
      cursor -= columns;
    }
    this.moveTo(Math.min(Math.max(0, cursor), shown - 1));
    this.draw();
  }

  draw() {
    const view = this.layout();
    const { size, each, columns, rows, stop } = view;
    const scale = window.devicePixelRatio || 1;
    const width = columns * size, height = rows * size;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const paint = this.paint;
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    const look = this.look();
    const gap = size >= 9 ? 2 : 1;
    for (let start = this.first, i = 0; start < stop; start += each, i++) {
      const x = (i % columns) * size, y = Math.floor(i / columns) * size;
      this.drawCell(look, start, Math.min(start + each, this.cells.length), x, y, size - gap);
    }
    paint.globalAlpha = 1;
    if (this.cursor != null) {
      paint.strokeStyle = look.text;
      paint.lineWidth = 2;
      const x = (this.cursor % columns) * size, y = Math.floor(this.cursor / columns) * size;
      paint.strokeRect(x - gap / 2, y - gap / 2, size, size);
    }
    this.changed(view);
  }

  drawCell(look, start, stop, x, y, side) {
    const paint = this.paint;
    let value = this.cells[start], used = value >= COPY ? 1 : 0, rest = value;
    if (stop - start > 1) {
      const kinds = tally(this.cells, start, stop);
      used = (kinds.one + kinds.shared + kinds.copy) / (stop - start);
      rest = kinds.cached > kinds.free ? CACHED : FREE;
      if (used > 0) [value] = commonest(this.cells, start, stop);
      const chosen = this.chosen(start, stop);
      if (chosen > 0) [value, used] = [this.selected, chosen / (stop - start)];
    }
    paint.globalAlpha = this.selected == null || value === this.selected ? 1 : 0.2;
    if (used < 1) {
      this.drawUnused(look, rest, x, y, side);
    }
    if (used === 0) return;
    const level = Math.max(1, Math.round(side * used));
    paint.fillStyle = value >= FIRST_LABEL ? sequenceColour(value, look.dark) :
      value === SHARED ? look.shared : look.copy;
    paint.fillRect(x, y + side - level, side, level);
    if (used < 1 || side < 5) return;
    const dot = Math.max(2, Math.round(side / 3)), inset = (side - dot) / 2;
    paint.fillStyle = look.card;
    if (value === SHARED) paint.fillRect(x + inset, y + inset, dot, dot); // a hole
    if (value === COPY) paint.fillRect(x + 1, y + inset, side - 2, dot / 2); // a bar
    if (value >= FIRST_LABEL && side >= 24 && stop - start === 1) {
      paint.fillStyle = look.dark ? "#000" : "#fff";
      paint.font = "600 11px system-ui, sans-serif";
      paint.textAlign = "center";
      paint.textBaseline = "middle";
      paint.fillText(String(value - FIRST_LABEL), x + side / 2, y + side / 2 + 1, side - 2);
    }
  }

  // How many of these blocks the selected sequence holds.
  chosen(start, stop) {
    if (this.selected == null) return 0;
    return this.cells.subarray(start, stop).filter((cell) => cell === this.selected).length;
  }

  drawUnused(look, rest, x, y, side) {
    const paint = this.paint;
    paint.fillStyle = rest === CACHED ? look.cached : look.free;
    if (rest === FREE && side < 7) { // a frame would fill it
      paint.fillRect(x + side / 2 - 1, y + side / 2 - 1, 2, 2);
      return;
    }
    paint.fillRect(x, y, side, side);
    if (rest === FREE) {
      paint.fillStyle = look.card;
      paint.fillRect(x + 1, y + 1, side - 2, side - 2);
    }
  }

  // Colours of the theme, and the hatching of cached blocks.
  look() {
    const style = getComputedStyle(this.canvas);
    const key = style.getPropertyValue("--card") + window.devicePixelRatio;
    if (this.known?.key === key) return this.known;
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const tile = document.createElement("canvas");
    tile.width = tile.height = 4;
    const paint = tile.getContext("2d");
    paint.fillStyle = colour("cached");
    for (let i = 0; i < 4; i++) {
      paint.globalAlpha = 1;
      paint.fillRect(i, 3 - i, 1, 1);
      paint.globalAlpha = 0.45;
      paint.fillRect((i + 1) % 4, 3 - i, 1, 1);
    }
    this.known = {
      key,
      dark: colour("dark") === "1",
      card: colour("card"),
      text: colour("text"),
      free: colour("free"),
      shared: colour("shared"),
      copy: colour("copy"),
      cached: this.paint.createPattern(tile, "repeat"),
    };
    return this.known;
  }
}
