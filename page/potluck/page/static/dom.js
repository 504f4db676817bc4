// Elements from plain values. Texts of others go in as text nodes, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element. `onclick` and its like are listeners; false, null and undefined are left out. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Put these into an element, in place of what is there. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Put these in place of what is there; what had the focus, by its `data-focus`, has it again. */
export function putAnew(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  put(element, ...children);
  if (focused) element.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

/** Set an element's text, where it is another. */
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

/** Have a screen reader say something. */
export function say(words) {
  text(document.getElementById("said"), words);
}

/** A colour or another custom property of the page as it is now, dark or light. */
export function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
