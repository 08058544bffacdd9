// What the other files of this folder share: the DOM as it is, whatever a page puts in its way, and short answers.
//
// A page may contain anything. `el.disabled` of a form can be an input of that name, so we ask
// `el.matches(':disabled')`, and take the properties we cannot do without from the prototypes.

const ELEMENTS = Symbol.for('elements'), WORK = Symbol.for('work'), REFUSALS = Symbol.for('refusals');
const MODALS = Symbol.for('modals');
// A page's own `class Event` would stand before the window's.
const {CSS, DOMMatrix, DOMRect, Event, KeyboardEvent, NodeFilter, Range, matchMedia} = window;
const {requestAnimationFrame, setTimeout} = window;
const ELEMENT = 1, TEXT = 3, DOCUMENT = 9, FRAGMENT = 11;  // values of nodeType
const real = (type, name) => {  // a property of the prototype, whatever an instance has under that name
  const {get, value} = Object.getOwnPropertyDescriptor(type.prototype, name);
  return get ? node => get.call(node) : (node, ...rest) => value.call(node, ...rest);
};
const nodeType = real(Node, 'nodeType'), childNodes = real(Node, 'childNodes');
const parentOf = real(Node, 'parentElement'), contains = real(Node, 'contains');
const rootOf = real(Node, 'getRootNode'), shadowRoot = real(Element, 'shadowRoot');
const comparePosition = real(Node, 'compareDocumentPosition');
const slotOf = real(Element, 'assignedSlot');
const attributeOf = real(Element, 'getAttribute');
const matches = real(Element, 'matches'), closest = real(Element, 'closest');
const elementsIn = real(Element, 'children'), bodyOf = real(Document, 'body');
const scrollerOf = real(Document, 'scrollingElement');
const titleOf = real(Document, 'title'), byId = real(Document, 'getElementById');
const byIdInShadow = real(DocumentFragment, 'getElementById');
const sheetsOf = real(Document, 'styleSheets'), adoptedOf = real(Document, 'adoptedStyleSheets');
const fontsOf = real(Document, 'fonts'), textsIn = real(Document, 'createTreeWalker');
const atPoint = real(Document, 'elementFromPoint'), inShadow = real(ShadowRoot, 'elementFromPoint');
const allAtPoint = real(Document, 'elementsFromPoint'), allInShadow = real(ShadowRoot, 'elementsFromPoint');

// Soft hyphens, and marks for where a line may break and in which direction it is read.
const INVISIBLE = /[\u00ad\u200b\u200e\u200f\u2060]/g;
// Also the characters for private use: icon fonts draw their pictures as such, which nobody can read.
const SPACE = /[\s\u00a0\ue000-\uf8ff]+/g;
const tidy = s => (typeof s === 'string' ? s : '').replace(INVISIBLE, '').replace(SPACE, ' ').trim();
const escape = s => s.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
const cut = (s, length) => s.length > length ? s.slice(0, length) + '…' : s;
// A property of an element; undefined if reading it throws, as that of a custom element may.
const propertyOf = (el, name) => {
  try {
    return el[name];
  } catch { /* the page's own error */ }
};
const attribute = (el, name) => tidy(attributeOf(el, name));
const inside = (selector, el) => [...el.querySelectorAll(selector)];
const wordless = el => !tidy(el.textContent);
// What a text stands in: an element, or the host of a shadow root.
const holderOf = text => {
  const parent = parentOf(text);
  if (parent) return parent;
  const root = rootOf(text);
  return nodeType(root) === FRAGMENT ? root.host : undefined;  // a form of that name may be a document's host
};
// What an element is drawn in: also the slot of a shadow root.
const outerOf = el => slotOf(el) ?? holderOf(el);
// Whether el is outer, or is drawn somewhere in it.
const drawnIn = (el, outer) => {
  while (el && el !== outer) el = outerOf(el);
  return !!el;
};

// Whether a node comes before another one, and does not hold it.
const precedes = (node, other) => comparePosition(node, other) === Node.DOCUMENT_POSITION_FOLLOWING;

// Some answers take a search of the page and are needed again in the same call: a name, what the mouse hits.
const caches = [];
const forget = () => caches.forEach(known => known.clear());
const remembered = find => {
  const known = new Map();
  caches.push(known);
  return key => {
    if (!known.has(key)) known.set(key, find(key));
    return known.get(key);
  };
};

// The outermost element, or the shadow root.
const topOf = el => closest(el, 'html') ?? rootOf(el);
const TICKS = 'input[type=checkbox],input[type=radio]';
// The labels of a control. `el.labels` would walk the whole page, once for each control.
const labelsIn = remembered(top => Map.groupBy(inside('label', top), label => label.control));
const labelsOf = el => labelsIn(topOf(el)).get(el) ?? [];

// ---- Tables: a cell may span several columns and rows

// A cell of a table, or one of several in a row that the page makes of boxes.
const CELL_ROLES = ':is([role=cell],[role=gridcell],[role=columnheader],[role=rowheader])';
const GRID_CELLS = `[role=row] > ${CELL_ROLES}:not(:only-child)`;
const isCell = (el, style) => style.display === 'table-cell' || style.display !== 'none' && matches(el, GRID_CELLS);

// [row][column] -> the cell that is seen there.
const gridOf = remembered(table => {
  const rows = [...table.rows];
  const grid = rows.map(() => []);
  const widest = rows.reduce((most, row) => Math.max(most, row.cells.length), 0);  // a cell may claim 1,000
  rows.forEach((row, y) => {
    let x = 0;
    for (const cell of row.cells) {
      if (getComputedStyle(cell).display === 'none') continue;
      while (grid[y][x]) x++;
      const width = Math.min(cell.colSpan, widest);
      const end = cell.rowSpan ? y + cell.rowSpan : rows.length;  // 0: down to the last
      for (let below = y; below < end && rows[below]?.parentNode === row.parentNode; below++) {
        for (let right = x; right < x + width; right++) grid[below][right] = cell;
      }
      x += width;
    }
  });
  return grid;
});
// -1: it is no cell of a table.
const columnAt = cell => {
  const table = cell.matches('td,th') && cell.closest('table');
  const row = table && gridOf(table)[cell.parentNode.rowIndex];
  return row ? row.indexOf(cell) : -1;
};
const hasSpans = remembered(table => !!table.querySelector('[colspan],[rowspan]'));
// How many columns right before a cell are no cell's first one in its row: other cells span them.
const columnsSpanned = cell => {
  const table = cell.closest('table');
  const column = table && hasSpans(table) ? columnAt(cell) : 0;
  if (column < 1) return 0;
  const row = gridOf(table)[cell.parentNode.rowIndex];
  const begins = (other, x) => other?.parentNode === cell.parentNode && other !== row[x - 1];
  return column - 1 - row.slice(0, column).findLastIndex(begins);
};
