// Small helpers to build nodes and write numbers. Text only ever becomes a text node: what a model or a server says
// is never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** The element with this id; the page's own ids are known to exist. */
export const byId = (id) => document.getElementById(id);

/** An HTML element with attributes and children (nodes or strings). */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A number for reading: `digits` decimals, two significant ones where that would say 0, a dash for none. */
export function num(value, digits = 2) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const text = value.toFixed(digits);
  const precise = value !== 0 && Number(text) === 0 ? value.toPrecision(2) : text;
  return precise.replace("-", "−");
}

/** A speed: whole tokens above ten, a decimal below. */
export const speed = (value) => (value >= 10 && value < 1e9 ? Math.round(value).toLocaleString("en") : num(value, 1));

export const percent = (share) => (Number.isFinite(share) ? `${Math.round(100 * share)} %` : "–");

export const plural = (count, word, many = `${word}s`) => `${count} ${count === 1 ? word : many}`;

/** White space made visible, for places where a token stands alone; a part of a character is a dotted circle. */
export const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "◌";

/** Whether the reader has nothing against motion. */
export const moving = () => !matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Calls `draw` at most once a frame however often it is asked to. A hidden tab draws when it is seen again. */
export function everyFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}
