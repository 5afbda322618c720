// Values under the pointer, and smoothed lines. The page is complete without this script.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const plots = [];

  const make = (parent, name, attributes) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return parent.appendChild(element);
  };

  const text = (value) => {
    if (value === null) return "not finite";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(3);
    return String(Number(value.toPrecision(5)));
  };

  // Exponential moving average without the bias of its beginning, as TensorBoard shows it.
  const smoothed = (values, weight) => {
    let sum = 0, count = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * weight + (1 - weight) * value;
      count += 1;
      return sum / (1 - weight ** count);
    });
  };

  const tipOf = (figure) => {
    const tip = figure.querySelector(".plot").appendChild(document.createElement("div"));
    tip.className = "tip";
    return tip;
  };

  const position = (svg, event) =>
    new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());

  const show = (figure, tip, event) => {
    const frame = figure.querySelector(".plot").getBoundingClientRect();
    tip.style.display = "block";
    const beside = event.clientX - frame.left + 14;
    const fits = beside + tip.offsetWidth < frame.width;
    tip.style.left = `${fits ? beside : Math.max(0, beside - tip.offsetWidth - 28)}px`;
    tip.style.top = `${event.clientY - frame.top + 10}px`;
  };

  class Plot {
    constructor(figure) {
      this.figure = figure;
      this.svg = figure.querySelector("svg");
      Object.assign(this, JSON.parse(figure.querySelector("script").textContent));
      this.steps = [...new Set(this.lines.flatMap((line) => line.x))].sort((one, other) => one - other);
      this.layer = make(this.svg, "g", { class: "hover" });
      this.tip = tipOf(figure);
      this.svg.addEventListener("pointermove", (event) => this.point(event));
      this.svg.addEventListener("pointerleave", () => this.clear());
      this.smooth(0);
    }

    place(x, y) {
      const { box, xs, ys, log } = this.axes;
      const scaled = log ? [y, ...ys].map(Math.log10) : [y, ...ys];
      return [
        box[0] + ((x - xs[0]) / (xs[1] - xs[0])) * (box[2] - box[0]),
        box[3] - ((scaled[0] - scaled[1]) / (scaled[2] - scaled[1])) * (box[3] - box[1]),
      ];
    }

    smooth(weight) {
      this.shown = this.lines.map((line) => (weight ? smoothed(line.y, weight) : line.y));
      this.smoothing = weight;
      for (const old of this.svg.querySelectorAll(".smooth")) old.remove();
      this.figure.classList.toggle("smoothed", weight > 0);
      if (!weight) return;
      this.lines.forEach((line, number) => {
        let path = "", pen = "M";
        this.shown[number].forEach((value, index) => {
          if (value === null || (this.axes.log && value <= 0)) { pen = "M"; return; }
          path += pen + this.place(line.x[index], value).map((each) => each.toFixed(2)).join(" ");
          pen = "L";
        });
        make(this.svg, "path", { class: "smooth", d: path, style: `stroke: var(--series-${number % this.colours})` });
      });
      this.svg.append(this.layer);
    }

    clear() {
      this.layer.replaceChildren();
      this.tip.style.display = "none";
    }

    point(event) {
      const at = position(this.svg, event);
      const { box, xs } = this.axes;
      this.clear();
      if (at.x < box[0] || at.x > box[2] || !this.steps.length) return;
      const wanted = xs[0] + ((at.x - box[0]) / (box[2] - box[0])) * (xs[1] - xs[0]);
      const x = this.steps.reduce((best, each) => (Math.abs(each - wanted) < Math.abs(best - wanted) ? each : best));
      const [left] = this.place(x, 1);
      make(this.layer, "line", { x1: left, x2: left, y1: box[1], y2: box[3] });
      this.tip.replaceChildren(document.createElement("b"));
      this.tip.firstChild.textContent = `${this.x_label} ${text(x)}`;
      this.lines.forEach((line, number) => {
        const index = line.x.indexOf(x);
        if (index < 0) return;
        const value = line.y[index], drawn = this.shown[number][index];
        const row = this.tip.appendChild(document.createElement("div"));
        const mark = row.appendChild(document.createElement("i"));
        mark.style.background = `var(--series-${number % this.colours})`;
        row.append(`${line.words}: ${text(value)}`);
        if (this.smoothing && drawn !== null) row.append(` (smoothed ${text(drawn)})`);
        if (drawn === null || (this.axes.log && drawn <= 0)) return;
        const [cx, cy] = this.place(x, drawn);
        if (cy >= box[1] - 1 && cy <= box[3] + 1)
          make(this.layer, "circle", { cx, cy, r: 2.6, style: `fill: var(--series-${number % this.colours})` });
      });
      show(this.figure, this.tip, event);
    }
  }

  // A heat map: the value of the cell under the pointer.
  class Cells {
    constructor(figure) {
      Object.assign(this, JSON.parse(figure.querySelector("script").textContent));
      const svg = figure.querySelector("svg");
      const tip = tipOf(figure);
      svg.addEventListener("pointermove", (event) => {
        const words = this.words(position(svg, event));
        tip.textContent = words;
        if (words) show(figure, tip, event);
        else tip.style.display = "none";
      });
      svg.addEventListener("pointerleave", () => { tip.style.display = "none"; });
    }

    words(at) {
      const [left, top, right, bottom] = this.box;
      const row = Math.floor(((at.y - top) / (bottom - top)) * this.rows.length);
      const column = Math.floor(((at.x - left) / (right - left)) * this.values[0].length);
      const value = this.values[row]?.[column];
      if (value === undefined) return "";
      return `${this.row} ${this.rows[row]}, ${this.column} ${column}: ${text(value)} ${this.unit}`.trim();
    }
  }

  for (const figure of document.querySelectorAll("figure")) {
    const data = figure.querySelector("script");
    if (data && figure.querySelector("svg .cells, svg .cross")) new Cells(figure);
    else if (data) plots.push(new Plot(figure));
  }
  const control = document.getElementById("smoothing");
  if (!control || !plots.length) return;
  control.hidden = false;
  const [slider, output] = control.querySelectorAll("input, output");
  slider.addEventListener("input", () => {
    output.textContent = slider.value;
    for (const plot of plots) plot.smooth(Number(slider.value));
  });
})();
