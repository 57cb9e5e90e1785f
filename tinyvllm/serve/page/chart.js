// Lines over the last minutes, with their scale and, for those who do not see them, in words.

import { rate } from "./format.js";

const SECONDS = 300, LEAST_SECONDS = 60;

// Points of the last minutes: { time, ...values }. A gap between them is no line.
export class History {
  constructor() {
    this.points = [];
    this.ticks = []; // times of events
  }

  add(point) {
    this.points.push(point);
    while (this.points[0].time < point.time - SECONDS) this.points.shift();
  }
}

// series: [{ key, colour, dashed, area }]; later areas are drawn over earlier ones.
export class Chart {
  constructor(canvas, history, { series, top, mark, ticks, unit, say }) {
    Object.assign(this, { canvas, history, series, top, mark, ticks, unit, say });
    this.paint = canvas.getContext("2d");
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  draw() {
    const { canvas, paint } = this;
    const points = this.history.points;
    const scale = window.devicePixelRatio || 1;
    const width = canvas.parentElement.clientWidth, height = 130, foot = 16;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const last = points.at(-1);
    const top = this.top?.(last) ?? roundUp(Math.max(1, ...points.flatMap(
      (point) => this.series.map(({ key }) => point[key] ?? 0))));
    const span = Math.max(LEAST_SECONDS, last ? last.time - points[0].time : 0);
    const x = (time) => width - ((last?.time ?? 0) - time) / span * width;
    const y = (value) => 6 + (1 - value / top) * (height - foot - 7);

    paint.font = "11px system-ui, sans-serif";
    paint.textBaseline = "middle";
    paint.lineWidth = 1;
    for (const share of [0, 0.5, 1]) {
      paint.strokeStyle = colour("line");
      rule(paint, y(share * top), width);
    }
    for (const series of this.series) this.drawSeries(series, x, y, colour);
    const mark = this.mark?.(last);
    if (mark != null) {
      paint.strokeStyle = colour("text");
      paint.setLineDash([5, 4]);
      rule(paint, y(mark), width);
      paint.setLineDash([]);
    }
    paint.fillStyle = colour("alarm");
    for (const time of this.ticks ? this.history.ticks : []) {
      if (last && time > last.time - span) {
        const at = x(time);
        paint.beginPath();
        paint.moveTo(at - 4, 0);
        paint.lineTo(at + 4, 0);
        paint.lineTo(at, 7);
        paint.fill();
      }
    }
    paint.textAlign = "left";
    for (const share of [0.5, 1]) halo(paint, this.unit(share * top), 2, y(share * top) + 8, colour);
    paint.fillStyle = colour("soft");
    const unit = span < 120 ? `${Math.round(span)} seconds` : `${(span / 60).toFixed(1)} minutes`;
    paint.fillText(`${unit} ago`, 2, height - 6);
    paint.textAlign = "right";
    paint.fillText("now", width - 2, height - 6);
    canvas.setAttribute("aria-label", last ? this.say(points) : "No figures yet");
  }

  drawSeries({ key, colour: name, dashed, area }, x, y, colour) {
    const paint = this.paint;
    for (const run of runs(this.history.points, key)) {
      paint.beginPath();
      run.forEach((point, i) => paint[i ? "lineTo" : "moveTo"](x(point.time), y(point[key])));
      if (area) {
        paint.lineTo(x(run.at(-1).time), y(0));
        paint.lineTo(x(run[0].time), y(0));
        paint.fillStyle = area === "hatched" ? hatching(paint, colour(name)) : colour(name);
        paint.fill();
      } else {
        paint.strokeStyle = colour(name);
        paint.lineWidth = 1.75;
        paint.lineJoin = "round";
        paint.setLineDash(dashed ? [4, 3] : []);
        paint.stroke();
        paint.setLineDash([]);
      }
    }
  }
}

// Parts of the points without a gap in time, and with a value.
function runs(points, key) {
  const found = [];
  for (const point of points) {
    if (point[key] == null) continue;
    const run = found.at(-1);
    if (run && point.time - run.at(-1).time < 5) run.push(point);
    else found.push([point]);
  }
  return found;
}

function rule(paint, y, width) {
  paint.beginPath();
  paint.moveTo(0, Math.round(y) + 0.5);
  paint.lineTo(width, Math.round(y) + 0.5);
  paint.stroke();
}

function halo(paint, text, x, y, colour) {
  paint.strokeStyle = colour("card");
  paint.lineWidth = 3;
  paint.strokeText(text, x, y);
  paint.lineWidth = 1;
  paint.fillStyle = colour("soft");
  paint.fillText(text, x, y);
}

function hatching(paint, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 4;
  const ink = tile.getContext("2d");
  ink.fillStyle = colour;
  for (let i = 0; i < 4; i++) ink.fillRect(i, 3 - i, 1, 1);
  return paint.createPattern(tile, "repeat");
}

// 1, 2 or 5 times a power of ten.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((m) => m * power >= value) * power;
}

export function inWords(points, key, unit) {
  const values = points.map((point) => point[key]).filter((value) => value != null);
  if (!values.length) return `no ${unit} yet`;
  return `now ${rate(values.at(-1))} ${unit}, in the last minutes from ` +
    `${rate(Math.min(...values))} to ${rate(Math.max(...values))}`;
}
