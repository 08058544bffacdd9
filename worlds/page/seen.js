// What people see of a page, and what their mouse hits: boxes, clips, layers, dialogs.

// Where an element without a box is seen: an option in its dropdown, an <area> on its image.
const drawn = el => {
  if (!/^(opt|area)/.test(el.localName)) return el;
  const map = CSS.escape(el.closest('map')?.name ?? '');
  return el.closest('select') || bodyOf(el.ownerDocument).querySelector(`img[usemap="#${map}"]`) || el;
};

// The box around an area of an image map.
const boxOfArea = el => {
  const image = drawn(el).getBoundingClientRect();
  const numbers = el.coords.split(',').map(text => parseFloat(text) || 0);  // x, y, x, y, ...
  if (numbers.length < 3) return image;  // the default area: what the others leave
  let xs = numbers.filter((_, i) => i % 2 === 0);
  let ys = numbers.filter((_, i) => i % 2 === 1);
  if (numbers.length === 3) {
    const [x, y, radius] = numbers;
    xs = [x - radius, x + radius];
    ys = [y - radius, y + radius];
  }
  const left = Math.min(...xs), top = Math.min(...ys);
  return new DOMRect(image.left + left, image.top + top, Math.max(...xs) - left, Math.max(...ys) - top);
};
// The first box with an area. A link that wraps block or floated children has an empty first box, so
// the boxes of its contents count as well.
const boxOf = el => {
  if (el.localName === 'area') return boxOfArea(el);
  const seen = r => r.width >= 1 && r.height >= 1;
  const own = [...el.getClientRects()].find(seen);
  if (own) return own;
  const contents = new Range();
  contents.selectNodeContents(el);
  return [...contents.getClientRects()].find(seen);
};

// Whether an element is displayed and visible. One with `display: contents` has no box, but what it holds is seen.
const shown = (el, style) => style.display === 'contents'
  ? style.visibility === 'visible'
  : el.hidden !== 'until-found' && drawn(el).checkVisibility({visibilityProperty: true});
// The nearest element with a box, which checkVisibility asks for.
const boxed = el => {
  while (getComputedStyle(el).display === 'contents' && holderOf(el)) el = holderOf(el);
  return el;
};

// From the coordinates of a node's frame to those of the window.
const outward = (node, {left, top, width, height}) => {
  for (let w = node.ownerDocument.defaultView; w !== window && w?.frameElement; w = w.parent) {
    const frame = w.frameElement, at = frame.getBoundingClientRect(), style = getComputedStyle(frame);
    const across = at.width / frame.offsetWidth, down = at.height / frame.offsetHeight;
    left = at.left + (frame.clientLeft + parseFloat(style.paddingLeft) + left) * across;
    top = at.top + (frame.clientTop + parseFloat(style.paddingTop) + top) * down;
    width *= across;
    height *= down;
  }
  return new DOMRect(left, top, width, height);
};

// A text has lines of its own: the boxes of its ancestors may be elsewhere.
const range = new Range();
const inWindow = node => {
  range.selectNode(node);
  const box = nodeType(node) === TEXT ? range : drawn(node);
  const {left, right, top, bottom} = outward(node, box.getBoundingClientRect());
  return bottom > 0 && top < innerHeight && right > 0 && left < innerWidth;
};

// A message that has gone, or has not come. Below the window it may come when the page is scrolled.
const fadedOut = node => {
  const el = boxed(nodeType(node) === TEXT ? holderOf(node) : node);
  return !el.checkVisibility({opacityProperty: true}) && inWindow(node);
};

// Scaled to nothing, as some closed menus are.
const shrunkAway = ({transform}) => {
  if (transform === 'none') return false;
  const {a, b, c, d, is2D} = new DOMMatrix(transform);
  return is2D && a * d === b * c;
};

const boxesOf = node => {  // of an element also those of its labels
  range.selectNode(node);
  if (nodeType(node) === TEXT) return [range.getBoundingClientRect()];
  const parts = [node, ...labelsOf(node)].map(drawn);
  return parts.map(part => boxOf(part) || part.getBoundingClientRect());
};
const overlap = (r, s) => {
  const across = Math.min(r.right, s.right) - Math.max(r.left, s.left);
  const down = Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top);
  return across > 0.5 && down > 0.5;
};
// A clip cuts off what reaches out of its box. Whether some of a node, or of its label, is left.
const within = (node, clips) => {
  if (!clips.length) return true;
  const boxes = boxesOf(node);
  return clips.every(clip => boxes.some(box => overlap(box, clip.box)));
};
const windowOf = el => {
  const {innerWidth, innerHeight} = el.ownerDocument.defaultView;
  return {el: el.ownerDocument, box: new DOMRect(0, 0, innerWidth, innerHeight)};
};
// The clips of el's contents. outer: those around el. A panel that scrolls can show all that it holds, and
// what is shrunk to one pixel is there to be read aloud.
const clipsOf = (el, style, outer) => {
  if (/fixed|absolute/.test(style.position))
    outer = outer.filter(clip => contains(clip.el, el.offsetParent));
  // Nobody can scroll to what a fixed layer holds beyond the window, as a closed drawer does.
  if (style.position === 'fixed' && !el.offsetParent) outer = [windowOf(el)];
  if (style.overflow === 'visible' || /^(inline|contents)$/.test(style.display)) return outer;
  if (/^(body|input|select|textarea)$/.test(el.localName)) return outer;
  const onePixel = el.offsetWidth === 1 && el.offsetHeight === 1;
  if (onePixel) return outer;
  const scrolls = /auto|scroll/.test(style.overflow) || /^i?frame$/.test(el.localName);
  if (scrolls && el.clientWidth && el.clientHeight && within(el, outer)) return [];
  return [...outer, {el, box: el.getBoundingClientRect()}];
};

// What stays in its place while the page scrolls: a header, a banner, a dialog. el, or what it stands in.
const layerOf = (el, position) => {
  while (el && !position.test(getComputedStyle(el).position)) el = outerOf(el);
  return el;
};

// What the mouse hits at a point of el's document or shadow root: null outside the window.
const hitAt = (el, x, y) => {
  const root = rootOf(el);
  if (nodeType(root) === DOCUMENT) return atPoint(root, x, y);
  // A text that the page puts into a slot lies on top of what holds the slot, and is a part of it.
  const hosts = [];
  for (let at = root; nodeType(at) === FRAGMENT; at = rootOf(at.host)) hosts.push(at.host);
  return allInShadow(root, x, y).find(hit => !hosts.some(host => contains(host, hit))) ?? null;
};
// The box that el moves with and that may cut it off.
const boxAround = el => /fixed|absolute/.test(getComputedStyle(el).position) ? el.offsetParent : outerOf(el);

// Parked outside of its document, where nobody can scroll to.
const parked = el => {
  const page = scrollerOf(el.ownerDocument);
  const box = boxOf(el);
  if (!page || !box) return false;
  const toTheLeft = getComputedStyle(page).direction === 'rtl';
  const leftmost = toTheLeft ? page.clientWidth - page.scrollWidth : 0;
  const outside = box.right + page.scrollLeft <= leftmost || box.bottom + page.scrollTop <= 0;
  if (!outside) return false;
  for (let panel = boxAround(el); panel && panel !== page; panel = boxAround(panel)) {
    if (/auto|scroll/.test(getComputedStyle(panel).overflow)) return false;  // that can scroll to it
  }
  return true;
};

// The part of el's box that the boxes around it do not cut off, as a cell does with a link that is too long for it.
// The whole box if they cut off all of it.
const uncutBox = (el, whole) => {
  let {left, right, top, bottom} = whole;
  let at = drawn(el);
  while (at) {
    const box = boxAround(at);
    if (!box || box === bodyOf(el.ownerDocument)) break;
    const {overflow, display} = getComputedStyle(box);
    const hides = !/visible|auto|scroll/.test(overflow);
    const hasEdges = !/^(inline|contents)$/.test(display);
    if (hides && hasEdges) {
      const edges = box.getBoundingClientRect();
      left = Math.max(left, edges.left);
      right = Math.min(right, edges.right);
      top = Math.max(top, edges.top);
      bottom = Math.min(bottom, edges.bottom);
    }
    at = box;
  }
  const width = right - left;
  const height = bottom - top;
  return width < 1 || height < 1 ? whole : new DOMRect(left, top, width, height);
};
// Whether a press at `hit` presses el, and not a link or another control in it, as in a label
// "I accept the <a>terms</a>".
const presses = (hit, el) => {
  if (!contains(el, hit)) return false;
  const other = el.localName === 'label' && closest(hit, 'a[href],button,select,textarea');
  return !other || !contains(el, other) || other === el.control;
};
// Places on a drawn line or area, which may be anywhere in its box: along its outline, and all over the box.
const placesOn = (el, {left, top, width, height}) => {
  const places = [];
  const line = el.localName === 'g' ? el.querySelector('path,line,polyline,polygon,rect,circle,ellipse') : el;
  const toWindow = line?.getTotalLength && line.getScreenCTM();
  for (let part = 0; toWindow && part < 8; part++) {
    const {x, y} = line.getPointAtLength(line.getTotalLength() * (part + 0.5) / 8).matrixTransform(toWindow);
    places.push({x, y});
  }
  for (let cell = 0; cell < 64; cell++) {
    places.push({x: left + width * (cell % 8 + 0.5) / 8, y: top + height * (Math.floor(cell / 8) + 0.5) / 8});
  }
  return places;
};
// Where to aim at el, and what the mouse hits there: the middle of what is seen of its box or, if something lies on
// that, one of eight places around it.
const aimOf = remembered(el => {
  const root = el.getRootNode();
  const whole = boxOf(el);
  if (!whole) return {root};
  const aimAt = box => {
    const x = box.left + box.width / 2;
    const y = box.top + box.height / 2;
    const hit = hitAt(el, x, y);
    return {x, y, box, root, hit};
  };
  const middle = aimAt(whole);
  const inReach = middle.x >= 0 && middle.x < innerWidth;  // by scrolling up or down
  const middleIsGood = middle.hit ? presses(middle.hit, el) : inReach;
  if (middleIsGood) return middle;

  const uncut = uncutBox(el, whole);
  const {left, top, width, height} = uncut;
  const inUncut = aimAt(uncut);
  const places = [  // across and down, as shares of the box
    [0.15, 0.5], [0.85, 0.5], [0.5, 0.15], [0.15, 0.15], [0.85, 0.15], [0.5, 0.85], [0.15, 0.85], [0.85, 0.85]];
  const around = places.map(([across, down]) => {
    const x = left + width * (across - 0.05);
    const y = top + height * (down - 0.05);
    return aimAt(new DOMRect(x, y, width / 10, height / 10));
  });
  const isGood = ({hit}) => hit && presses(hit, el);
  const found = [inUncut, ...around].find(isGood);
  if (found || !el.ownerSVGElement) return found ?? inUncut;
  for (const {x, y} of placesOn(el, uncut)) {
    const place = aimAt(new DOMRect(x - 0.5, y - 0.5, 1, 1));
    if (isGood(place)) return place;
  }
  return inUncut;
});
// Whether a clip path stands between el and what it is a part of: a closed menu may be cut off by one.
const clippedOff = (el, outer) => {
  for (let at = el; at && at !== outer; at = parentOf(at)) {
    if (getComputedStyle(at).clipPath !== 'none') return true;
  }
  return false;
};
// Whether hit, which shows no hand, says what was chosen in the field el, as in Ant Design's dropdowns with a search.
// Both are drawn in a box without other controls.
const showsChoiceOf = (hit, el) => {
  if (!hit || !el.matches('input[role=combobox]') || getComputedStyle(hit).cursor === 'pointer') return false;
  const layer = layerOf(hit, /fixed|sticky/);
  if (layer && !drawnIn(el, layer)) return false;  // it covers the field
  let box = parentOf(el);
  while (box && !contains(box, hit)) box = parentOf(box);
  return !!box && box.localName !== 'body' && inside(CONTROLS, box).length === 1;
};
// Whether the mouse can hit el where it is now, what shows its choice, or the label that stands for it.
const atHand = el => {
  const {hit} = aimOf(el);
  return contains(el, hit) || hit?.closest('label')?.control === el || showsChoiceOf(hit, el);
};
// Whether a press there reaches el, what el is a part of, or its label.
const reached = el => {
  const {hit} = aimOf(el);
  return !hit || atHand(el) || contains(hit, el) && !clippedOff(el, hit);
};

// Whether anything stays in the window's middle, where `locate` scrolls an element. Nine points tell, and on
// most pages they save the question for each element below the window.
const staysInMiddle = remembered(doc => [0.01, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99].some(
  across => layerOf(atPoint(doc, across * innerWidth, innerHeight / 2), /fixed/)));

// Of an element outside the window: whether a fixed layer will lie on top of it, once `locate` has scrolled it
// to the window's middle. x: where it is then.
const coveredInMiddle = (el, x) => {
  if (!staysInMiddle(document)) return false;
  const there = atPoint(document, x, innerHeight / 2);
  const layer = layerOf(there, /fixed/);
  return aimOf(el).root === document && !!layer && !drawnIn(el, layer);
};
// Of an element that something lies on: whether scrolling one of the panels around it, or the page, frees it.
const scrollingFrees = el => {
  const {x, y, hit} = aimOf(el);
  const layer = layerOf(hit, /fixed|sticky/);
  const layerStays = layer && !drawnIn(el, layer);
  const page = scrollerOf(el.ownerDocument);
  for (let panel = boxAround(el); panel; panel = boxAround(panel)) {
    const edges = panel.getBoundingClientRect();
    if (panel !== page) {
      const scrolls = /auto|scroll/.test(getComputedStyle(panel).overflow);
      if (!scrolls) continue;
      const scrolledOut = x < edges.left || x >= edges.right || y < edges.top || y >= edges.bottom;
      if (scrolledOut) return true;
    }
    if (!layerStays) continue;
    const layerBox = layer.getBoundingClientRect();
    // The layer may be a column that stays. With the panel scrolled back, el lies beside it.
    const besideColumn = x + panel.scrollLeft >= layerBox.right;
    if (panel !== page && panel.scrollLeft > 0 && besideColumn) return true;
    // `locate` scrolls the element to the middle of the panel, as far as the panel scrolls.
    const {clientHeight, scrollHeight, scrollTop} = panel;
    const panelTop = panel === page ? 0 : edges.top;
    const wanted = y - clientHeight / 2 - panelTop;
    const farthest = scrollHeight - clientHeight - scrollTop;
    const scrolled = Math.max(-scrollTop, Math.min(farthest, wanted));
    const yThen = y - scrolled;
    if (yThen < layerBox.top || yThen >= layerBox.bottom) return true;
  }
  return false;
};
// What to press for a control. One that is styled away may have no size, or be parked where nobody can scroll to:
// then its label.
const toPress = el => {
  const labels = labelsOf(el);
  if (!labels.length) return el;
  const label = labels.find(each => boxOf(each) && !each.querySelector('a,button')) ?? labels.find(boxOf);
  const leftToKeys = el.matches(TICKS) && !atHand(el);  // of one pixel, cut off or under something
  const styledAway = parked(el) || !boxOf(el) || leftToKeys;
  return styledAway && label || el;
};

// Whether something else lies on top of el. For an element outside the window: whether something will, where
// `locate` scrolls it.
const covered = remembered(el => {
  const target = matches(el, TICKS) ? toPress(el) : el;
  if (target !== el) return covered(target);
  // For those who use the keys, under a slider that is drawn: typing needs no mouse.
  const cutOff = at => at.offsetWidth <= 1 && getComputedStyle(at).clipPath !== 'none';
  if (el.type === 'range' && [el, parentOf(el)].some(at => at && cutOff(at))) return false;
  const {x, y, hit} = aimOf(el);
  const boxless = hit === undefined;
  if (boxless) return !el.matches(TICKS);
  const before = x < 0 || y < 0;
  if (before && parked(el) && !labelsOf(el).length) return true;

  const beyondSides = x < 0 || x >= innerWidth;
  if (beyondSides || y < 0 || y >= innerHeight) return coveredInMiddle(el, beyondSides ? innerWidth / 2 : x);

  return !reached(el) && !scrollingFrees(el);
});

const fillsWindow = el => {
  const {left, right, top, bottom} = el.getBoundingClientRect();
  return left <= 1 && top <= 1 && right >= innerWidth - 1 && bottom >= innerHeight - 1;
};
// Whether el paints something over all that is behind it.
const dims = el => el.checkVisibility({opacityProperty: true}) && ['', '::before', '::after'].some(pseudo => {
  const {backgroundColor, backgroundImage, backdropFilter} = getComputedStyle(el, pseudo);
  return backgroundColor !== 'rgba(0, 0, 0, 0)' || backgroundImage !== 'none' || backdropFilter !== 'none';
});
// What the mouse hits at a point of a document, down into shadow roots.
const deepestAt = (doc, x, y) => {
  let hit = atPoint(doc, x, y);
  while (hit && shadowRoot(hit)) {
    const inner = inShadow(shadowRoot(hit), x, y);
    if (!inner || rootOf(inner) !== shadowRoot(hit)) break;
    hit = inner;
  }
  return hit;
};
// The layer that keeps the mouse from all of the page: a dialog with what dims the rest. 25 points show it.
// Most pages have no fixed layer in their first corner, so they pay for one point.
const coverOf = () => {
  const steps = [0.002, 0.25, 0.5, 0.75, 0.998];
  const layers = new Set();
  for (const down of steps) {
    for (const across of steps) {
      const layer = layerOf(deepestAt(document, across * innerWidth, down * innerHeight), /fixed/);
      const background = layer && getComputedStyle(layer).zIndex < 0;  // the page is painted over it
      if (!layer || background) return null;
      layers.add(layer);
    }
  }
  const atCenter = allAtPoint(document, innerWidth / 2, innerHeight / 2);
  const below = [...layers].map(layer => layer.previousElementSibling);  // the mouse may go through it
  // What closes a menu when it is pressed may be as large, but people read the page through it.
  const curtain = el => el && fillsWindow(el) && dims(el) && layerOf(el, /fixed/);
  const dimmed = [...atCenter, ...below, ...layers].some(curtain);
  return dimmed ? [...layers].find(fillsWindow) : null;
};
// Whether el lies on top of that layer: the dialog may stand beside what dims the page, or open a menu.
const inFront = (el, style, cover) => {
  if (el === cover) return true;
  if (style.position === 'static') return false;
  const {hit} = aimOf(el);
  const layer = hit && layerOf(hit, /fixed/);
  return contains(el, hit) && (!layer || layer === el || !drawnIn(layer, el));
};

// Whether a modal dialog is open in a document. No selector finds one in a shadow root, so init.js keeps them.
const hasModal = root => !!root.querySelector('dialog:modal')
  || [...window[MODALS] ?? []].some(each => each.ownerDocument === root.ownerDocument && each.matches(':modal'));

// A grid may keep its rows in another order than it shows them in, and tell their numbers.
const rowNumber = row => Number(attributeOf(row, 'aria-rowindex'));
const isNumbered = node => nodeType(node) === ELEMENT ? rowNumber(node) > 0 : !tidy(node.data);
const numbersRows = el => attributeOf(el, 'role') === 'rowgroup' && [...childNodes(el)].every(isNumbered);
const childrenOf = el => {
  if (/^(i?frame|object)$/.test(el.localName) && el.contentDocument) return [bodyOf(el.contentDocument)];
  if (/^(i?frame|canvas|video|audio)$/.test(el.localName)) return [];  // what stands inside is for old browsers
  if (el.localName === 'details' && !el.open) return el.querySelectorAll(':scope > summary');
  if (shadowRoot(el)) return shadowRoot(el).childNodes;
  if (el.localName === 'slot' && el.assignedNodes().length) return el.assignedNodes();
  if (numbersRows(el)) return [...elementsIn(el)].sort((a, b) => rowNumber(a) - rowNumber(b));
  return childNodes(el);
};
