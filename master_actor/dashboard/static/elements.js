// Making and changing elements. Text goes in as text, never as markup: names and reasons are anybody's.

export const byId = (id) => document.getElementById(id);

/** An element with a class and children, which are elements or text. */
export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** Sets the text if it is another: what does not change costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** The value of a colour of the style sheet. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Makes a canvas as fine as the screen; returns its context, in CSS pixels, with its width and height. */
export function prepare(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
