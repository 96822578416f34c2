// What figures on a canvas are drawn with: a pen that fills a canvas, and one that writes an SVG.

/** A pen for a canvas. */
export class CanvasPen {
  constructor(canvas, width, height, colour) {
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    this.context = canvas.getContext("2d");
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.textBaseline = "middle";
    this.colour = colour;
    this.filled = ""; // the name of the colour that is set: setting it for each of many marks takes longer than drawing them
  }

  fill(name) {
    if (this.filled === name) return;
    this.context.fillStyle = this.colour[name];
    this.filled = name;
  }

  rect(x, y, wide, high, name) {
    this.fill(name);
    this.context.fillRect(x, y, wide, high);
  }

  frame(x, y, wide, high, name) {
    this.context.strokeStyle = this.colour[name];
    this.context.lineWidth = 2;
    this.context.strokeRect(x, y + 1, wide, high - 2);
  }

  line(x1, y1, x2, y2, name) {
    this.context.strokeStyle = this.colour[name];
    this.context.lineWidth = 1;
    this.context.beginPath();
    this.context.moveTo(x1, y1);
    this.context.lineTo(x2, y2);
    this.context.stroke();
  }

  dot(x, y, radius, name) {
    this.fill(name);
    this.context.beginPath();
    this.context.arc(x, y, radius, 0, 2 * Math.PI);
    this.context.fill();
  }

  ring(x, y, radius, name) {
    this.context.strokeStyle = this.colour[name];
    this.context.lineWidth = 2;
    this.context.beginPath();
    this.context.arc(x, y, radius, 0, 2 * Math.PI);
    this.context.stroke();
  }

  area(points, name) {
    this.fill(name);
    this.context.beginPath();
    points.forEach(([x, y], i) => (i ? this.context.lineTo(x, y) : this.context.moveTo(x, y)));
    this.context.fill();
  }

  text(x, y, text, name, anchor, strong = false) {
    this.fill(name);
    this.context.font = `${strong ? 650 : 500} 11.5px ${this.colour.text}`;
    this.context.textAlign = anchor === "middle" ? "center" : anchor;
    this.context.fillText(text, x, y);
  }

  clip(x, y, wide, high) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, wide, high);
    this.context.clip();
  }

  unclip() {
    this.context.restore();
    this.filled = "";
  }
}

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };

/** A pen that writes an SVG by itself. */
export class SvgPen {
  constructor(width, height, colour) {
    Object.assign(this, { width, height, colour, parts: [] });
  }

  rect(x, y, wide, high, name) {
    this.parts.push(`<rect x="${x.toFixed(2)}" y="${y.toFixed(2)}" width="${wide.toFixed(2)}" height="${high}" fill="${this.colour[name]}"/>`);
  }

  frame() {
    // what is looked at is not part of the picture
  }

  line(x1, y1, x2, y2, name) {
    this.parts.push(`<line x1="${x1.toFixed(2)}" x2="${x2.toFixed(2)}" y1="${y1}" y2="${y2}" stroke="${this.colour[name]}"/>`);
  }

  dot(x, y, radius, name) {
    this.parts.push(`<circle cx="${x.toFixed(2)}" cy="${y.toFixed(2)}" r="${radius}" fill="${this.colour[name]}"/>`);
  }

  ring(x, y, radius, name) {
    this.parts.push(`<circle cx="${x.toFixed(2)}" cy="${y.toFixed(2)}" r="${radius}" fill="none" stroke-width="2" stroke="${this.colour[name]}"/>`);
  }

  area(points, name) {
    this.parts.push(`<path d="M${points.map(([x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`).join("L")}Z" fill="${this.colour[name]}"/>`);
  }

  text(x, y, text, name, anchor, strong = false) {
    const safe = text.replace(/[&<>]/g, (letter) => ESCAPES[letter]);
    this.parts.push(`<text x="${x.toFixed(2)}" y="${y.toFixed(2)}" fill="${this.colour[name]}" font-size="11.5"
      font-weight="${strong ? 650 : 500}" text-anchor="${anchor}" dominant-baseline="central">${safe}</text>`);
  }

  clip() {}

  unclip() {}

  /** The drawing as a file. */
  written() {
    const font = this.colour.text.replaceAll('"', "'");
    return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${this.width} ${this.height}" font-family="${font}">
<rect width="${this.width}" height="${this.height}" fill="${this.colour.sheet}"/>
${this.parts.join("\n")}</svg>`;
  }
}
