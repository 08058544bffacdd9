// Chromium runs this in every document, after init.js. Then browser.py calls window['page.js'] with
// [name, ...given] and receives what the function of that name returns; `functions`, near the end, lists the names.
//
// `observe` writes the page as text and numbers the elements that can be used. The page keeps those elements
// in an array on the window, so an id in an action is an index into what the last observation numbered.
//
// A page may contain anything. `el.disabled` of a form can be an input of that name, so this file asks
// `el.matches(':disabled')`, and it takes the properties it cannot do without from the prototypes.
Object.defineProperty(window, 'page.js', {value: (() => {
  const ELEMENTS = Symbol.for('elements'), WORK = Symbol.for('work'), REFUSALS = Symbol.for('refusals');
  const MODALS = Symbol.for('modals');
  // A page's own `class Event` would stand before the window's.
  const {CSS, DOMMatrix, DOMRect, Event, KeyboardEvent, NodeFilter, Range} = window;
  const ELEMENT = 1, TEXT = 3, DOCUMENT = 9, FRAGMENT = 11;  // values of nodeType
  const real = (type, name) => {  // a property of the prototype, whatever an instance has under that name
    const {get, value} = Object.getOwnPropertyDescriptor(type.prototype, name);
    return get ? node => get.call(node) : (node, ...rest) => value.call(node, ...rest);
  };
  const nodeType = real(Node, 'nodeType'), childNodes = real(Node, 'childNodes');
  const parentOf = real(Node, 'parentElement'), contains = real(Node, 'contains');
  const rootOf = real(Node, 'getRootNode'), shadowRoot = real(Element, 'shadowRoot');
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
  const numbered = id => window[ELEMENTS]?.[id];
  const missing = id => {
    if (!numbered(id)) return `there is no element ${id} on this page`;
    return numbered(id).isConnected ? '' : `element ${id} is no longer on the page`;
  };
  const cut = (s, length) => s.length > length ? s.slice(0, length) + '…' : s;
  const attribute = (el, name) => tidy(attributeOf(el, name));
  const inside = (selector, el) => [...el.querySelectorAll(selector)];
  const wordless = el => !tidy(el.textContent);
  // What a text stands in: an element, or the host of a shadow root.
  const holderOf = text => parentOf(text) ?? rootOf(text).host;

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

  // ---- What is visible

  // Whether an element is displayed and visible. One with `display: contents` has no box, but what it holds is seen.
  const shown = (el, style) => style.display === 'contents'
    ? style.visibility === 'visible'
    : el.hidden !== 'until-found' && drawn(el).checkVisibility({visibilityProperty: true});
  // The nearest element with a box, which checkVisibility asks for.
  const boxed = el => {
    while (getComputedStyle(el).display === 'contents' && holderOf(el)) el = holderOf(el);
    return el;
  };

  // From the coordinates of el's frame to those of the window.
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
    while (el && !position.test(getComputedStyle(el).position)) el = parentOf(el);
    return el;
  };

  // What the mouse hits at a point of el's document or shadow root: null outside the window.
  const hitAt = (el, x, y) => {
    const root = rootOf(el);
    if (nodeType(root) === DOCUMENT) return atPoint(root, x, y);
    // A text that the page puts into a slot lies on top of what holds the slot, and is a part of it.
    const hosts = [];
    for (let at = root; at.host; at = rootOf(at.host)) hosts.push(at.host);
    return allInShadow(root, x, y).find(hit => !hosts.some(host => contains(host, hit))) ?? null;
  };
  // The box that el moves with and that may cut it off.
  const boxAround = el => /fixed|absolute/.test(getComputedStyle(el).position) ? el.offsetParent : parentOf(el);

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
    const good = middle.hit ? presses(middle.hit, el) : inReach;
    if (good) return middle;

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
    return [inUncut, ...around].find(({hit}) => hit && presses(hit, el)) ?? inUncut;
  });
  // Whether a clip path stands between el and what it is a part of: a closed menu may be cut off by one.
  const clippedOff = (el, outer) => {
    for (let at = el; at && at !== outer; at = parentOf(at)) {
      if (getComputedStyle(at).clipPath !== 'none') return true;
    }
    return false;
  };
  // Whether the mouse can hit el where it is now, or the label that stands for it.
  const atHand = el => {
    const {hit} = aimOf(el);
    return contains(el, hit) || hit?.closest('label')?.control === el;
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
    return aimOf(el).root === document && !!layer && !contains(layer, el);
  };
  // Of an element that something lies on: whether scrolling one of the panels around it, or the page, frees it.
  const scrollingFrees = el => {
    const {x, y, hit} = aimOf(el);
    const layer = layerOf(hit, /fixed|sticky/);
    const layerStays = layer && !contains(layer, el);
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
  // Whether something else lies on top of el. For an element outside the window: whether something will, where
  // `locate` scrolls it.
  const covered = remembered(el => {
    const target = matches(el, TICKS) ? toPress(el) : el;
    if (target !== el) return covered(target);
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
  // The layer that keeps the mouse from all of the page: a dialog with what dims the rest. 25 points show it.
  // Most pages have no fixed layer in their first corner, so they pay for one point.
  const coverOf = () => {
    const steps = [0.002, 0.25, 0.5, 0.75, 0.998];
    const layers = new Set();
    for (const down of steps) {
      for (const across of steps) {
        const layer = layerOf(atPoint(document, across * innerWidth, down * innerHeight), /fixed/);
        const background = layer && getComputedStyle(layer).zIndex < 0;  // the page is painted over it
        if (!layer || background) return null;
        layers.add(layer);
      }
    }
    const atCenter = allAtPoint(document, innerWidth / 2, innerHeight / 2);
    // What closes a menu when it is pressed may be as large, but people read the page through it.
    const dimmed = atCenter.some(el => fillsWindow(el) && dims(el) && layerOf(el, /fixed/));
    return dimmed ? [...layers].find(fillsWindow) : null;
  };
  // Whether el lies on top of that layer: the dialog may stand beside what dims the page, or open a menu.
  const inFront = (el, style, cover) => {
    if (el === cover) return true;
    if (style.position === 'static') return false;
    const {hit} = aimOf(el);
    const layer = hit && layerOf(hit, /fixed/);
    return contains(el, hit) && (!layer || layer === el || !contains(el, layer));
  };

  // Whether a modal dialog is open in a document. No selector finds one in a shadow root, so init.js keeps them.
  const hasModal = root => !!root.querySelector('dialog:modal')
    || [...window[MODALS] ?? []].some(each => each.ownerDocument === root.ownerDocument && each.matches(':modal'));

  const childrenOf = el => {
    if (/^(i?frame|object)$/.test(el.localName) && el.contentDocument) return [bodyOf(el.contentDocument)];
    if (/^(i?frame|canvas|video|audio)$/.test(el.localName)) return [];  // what stands inside is for old browsers
    if (el.localName === 'details' && !el.open) return el.querySelectorAll(':scope > summary');
    if (shadowRoot(el)) return shadowRoot(el).childNodes;
    if (el.localName === 'slot' && el.assignedNodes().length) return el.assignedNodes();
    return childNodes(el);
  };

  // ---- What can be used

  const CONTROLS = 'a[href],button,select,textarea,summary,input:not([type=hidden])';
  const ROLES = new RegExp('^(button|link|tab|checkbox|radio|switch|option|combobox|textbox|searchbox|slider|'
    + 'treeitem|menuitem(checkbox|radio)?)$');
  const clickHandlers = window[Symbol.for('click handlers')];
  const role = el => el.getAttribute('role') || '';
  const native = el => el.matches(CONTROLS);
  const HANDLERS = ['onclick', 'onmousedown', 'onmouseup', 'onpointerdown', 'onpointerup'];
  const hears = el => clickHandlers?.has(el) || HANDLERS.some(name => typeof el?.[name] === 'function');
  const isRow = el => el.matches('li,tr:has(> td)')  // a table, a list or a tree may listen for its rows
    && (hears(el.closest('table,ul,ol')) || hears(el.closest('[role=tree]')) || hears(parentOf(el)));
  // A calendar may listen for its days, of which the keys reach one: the others have a tabindex of -1.
  const isDay = el => el.matches('[role=gridcell][tabindex]') && hears(el.closest('table,[role=grid]'));
  // A menu may listen for its parts, and tell them apart by such attributes.
  const PART = ':is([data-action],[data-command],[data-value],[data-id],[data-key],[data-index],[data-tab],[data-view])'
    + ':not(:only-child)';
  const isPart = el => el.matches(PART) && hears(parentOf(el));
  const marked = el => native(el) || ROLES.test(role(el)) || hears(el) || isRow(el) || isDay(el) || isPart(el);
  const disabled = el => el.matches(':disabled') || el.getAttribute('aria-disabled') === 'true';

  // A checkbox or radio button that is styled away: people see and press its label.
  const standsForControl = el => el.localName === 'label'
    && el.control?.matches(TICKS)
    && !disabled(el.control) && !shown(el.control, getComputedStyle(el.control));

  // Editors of code draw their text themselves. The keys go to a text field of a few pixels that they hold.
  const tiny = el => el.offsetWidth < 5 || el.offsetHeight < 5;
  // What draws the text of such a field; null for an ordinary one.
  const drawerOf = field => {
    const holder = parentOf(field);
    const cutOff = holder && tiny(holder) && getComputedStyle(holder).overflow === 'hidden';
    if (!tiny(field) && !cutOff) return null;
    let at = holder;
    while (at && tiny(at)) at = parentOf(at);
    const holdsMore = !at || at === bodyOf(field.ownerDocument) || inside(CONTROLS, at).length > 1;
    return holdsMore ? null : at;
  };
  const keyFieldsIn = remembered(top => {
    const fields = inside('textarea:not(:disabled,[readonly],[tabindex="-1"])', top);
    const open = fields.filter(field => shown(field, getComputedStyle(field)));
    return new Map(open.map(field => [drawerOf(field), field]));
  });
  const keyField = remembered(el => keyFieldsIn(topOf(el)).get(el));

  // The outermost element whose text can be edited; what it holds is its text, links and buttons included.
  const editable = el => el.isContentEditable
    && (el === bodyOf(el.ownerDocument) || !parentOf(el)?.isContentEditable);
  const editor = el => editable(el) || !!keyField(el);

  // What the rules of a document's style sheets tell:
  // hands: the selectors by which they show a hand over an element. A hand is inherited, so in a box that has one,
  // only the rules tell which of its parts are meant to be clicked apart from it.
  // reveals: [what the mouse goes over, what that shows] of rules such as "li:hover button { display: block }".
  // overs: the former of all of them.
  const rulesRead = new WeakMap();  // document -> {count of its rules, hands, overs, reveals}
  // Of "li:hover > button", li. Rules nested in others, with an &, do not count.
  const HOVER = /^([^&]*[^&\s>+~]):hover[^\s>+~]*[\s>+~]+[^&]+$/;
  const revealsIn = rule => {
    const {display, visibility} = rule.style;
    const shows = display && display !== 'none' || visibility === 'visible';
    if (!shows) return [];
    const pairs = [];
    for (const selector of rule.selectorText.split(/,(?![^(]*\))/)) {  // not at the comma in :is(a, b)
      const [all, over] = selector.trim().match(HOVER) ?? [];
      if (!all) continue;
      const what = all.replaceAll(':hover', '');
      const valid = [over, what].every(each => CSS.supports(`selector(${each})`));
      if (valid) pairs.push([over, what]);
    }
    return pairs;
  };
  const rulesOf = remembered(doc => {
    const lists = [];
    for (const sheet of [...sheetsOf(doc), ...adoptedOf(doc)]) {
      try {
        lists.push(sheet.cssRules);
      } catch { /* another site's */ }
    }
    const count = lists.reduce((sum, rules) => sum + rules.length, 0);
    if (rulesRead.get(doc)?.count === count) return rulesRead.get(doc);

    const hands = [];
    const reveals = [];
    const collect = rules => {
      for (const rule of rules) {
        const hand = rule.selectorText && rule.style.cursor === 'pointer';
        const everything = /\*(,|$)/.test(rule.selectorText);  // `.menu *` means no part in particular
        if (hand && !everything) hands.push(rule.selectorText);
        if (/:hover/.test(rule.selectorText)) reveals.push(...revealsIn(rule));
        if (rule.cssRules?.length) collect(rule.cssRules);
      }
    };
    lists.forEach(collect);
    const overs = [...new Set(reveals.map(([over]) => over))].join(',');
    const read = {count, hands: hands.join(','), overs, reveals};
    rulesRead.set(doc, read);
    return read;
  });
  const hasOwnHand = el => {
    const {hands} = rulesOf(el.ownerDocument);
    return el.style?.cursor === 'pointer' || hands && el.matches(hands);
  };
  // Whether something in it comes only while the mouse is over it, as the buttons of a row may.
  const opensOnHover = el => {
    const {overs, reveals} = rulesOf(el.ownerDocument);
    if (!reveals.length || !el.childElementCount || !el.matches(overs)) return false;
    const hidden = part => !shown(part, getComputedStyle(part)) && (native(part) || !wordless(part));
    return reveals.some(([over, what]) => el.matches(over) && inside(what, el).some(hidden));
  };

  // Without a role or a listener of its own, for instance because the document hears all clicks.
  const looksClickable = el => {
    const outer = parentOf(el);
    if (getComputedStyle(el).cursor !== 'pointer' || el === bodyOf(el.ownerDocument)) return false;
    if (!outer || closest(outer, 'label')?.control) return false;
    return getComputedStyle(outer).cursor !== 'pointer' || hasOwnHand(el);
  };

  // What the keys reach only to scroll it, or to have it read aloud.
  const READ = 'pre,article,section,main,figure,table';
  const READ_ROLES = /^(article|dialog|document|feed|figure|group|log|main|note|region|status|table|tabpanel)$/;
  const isForReading = el => {
    const scrolls = el.scrollHeight > el.clientHeight && /auto|scroll/.test(getComputedStyle(el).overflowY);
    return scrolls || (role(el) ? READ_ROLES.test(role(el)) : el.matches(READ));
  };

  const clickable = remembered(el => {
    if (disabled(el)) return false;
    // The mouse goes through it: so do style sheets disable links. A switch may be pressed on its label.
    if (getComputedStyle(el).pointerEvents === 'none' && !labelsOf(el).length) return false;
    return marked(el) || standsForControl(el)
      || editor(el)
      || el.tabIndex >= 0 && el.hasAttribute('tabindex') && !isForReading(el)
      || looksClickable(el)
      || opensOnHover(el);
  });
  const someInside = (top, test) => inside('*', top).some(inner => test(inner) || someInShadow(inner, test));
  const someInShadow = (el, test) => !!shadowRoot(el) && someInside(shadowRoot(el), test);
  // What a person aims at. A role speaks for all that the element holds, down to the next control.
  const innermost = el => {
    const usable = inner => {
      const whole = ROLES.test(role(el)) && !marked(inner);
      return !whole && clickable(inner) && shown(inner, getComputedStyle(inner));
    };
    if (native(el) && !summaryWithControls(el) || editor(el) || standsForControl(el)) return true;
    return !someInside(el, usable) && !someInShadow(el, usable);
  };

  // Whether a container holds nothing but a checkbox and its name: then pressing the one presses the other.
  const holdsOnlyTick = el => {
    const controls = inside('input,select,textarea,button,a', el);
    return controls.length === 1 && controls[0].matches(TICKS)
      && seenText(el, 'input') === nameOf(controls[0]);
  };

  // A <summary> opens its <details> where it is pressed beside its controls, as a card does.
  const summaryWithControls = el => el.localName === 'summary' && !!el.querySelector(CONTROLS);
  // A container that people see is usable, or that says so, though it holds controls of its own: a card, a row.
  const isCard = (el, style) => {
    const says = ROLES.test(role(el)) || hears(el) && el.matches('tr,[tabindex]');
    if (summaryWithControls(el)) return clickable(el);
    return !native(el) && !editor(el) && el.localName !== 'label'
      && (style.cursor === 'pointer' || says) && clickable(el) && !holdsOnlyTick(el);
  };
  // Whether this part of a card belongs to one of the controls that the card holds.
  const inControl = (part, card) => {
    for (let at = part; at && at !== card; at = parentOf(at)) {
      if (clickable(at)) return true;
    }
    return false;
  };
  // Whether a click on this part of a card reaches the card and none of its controls.
  const reaches = (part, card) => {
    const {hit} = aimOf(part);
    return !inControl(contains(card, hit) ? hit : part, card) && !covered(part);
  };
  // The text that a card is called by: the first of more than two characters, since the letters of an avatar
  // often come before it.
  const titleIn = (card, visible) => {
    const short = [];
    const fits = node => {
      const part = parentOf(node);
      const label = part.closest('label');
      if (label && onlyNamesControl(label)) return false;
      return visible(node) && !inControl(part, card) && !inIconFont(part, tidy(node.data))
        && !part.closest('[aria-hidden=true]') && reaches(part, card);
    };
    const texts = textsIn(document, card, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode()) {
      const {length} = tidy(node.data);
      if (length > 2 && fits(node)) return node;
      if (length && length <= 2) short.push(node);
    }
    return short.find(fits);
  };

  // A container of much text, or of rows: its text is shown as usual, and its first line gets its id.
  const spread = el => {
    if (el.localName === 'tr') return true;
    if (el.matches('input,textarea,select') || el.isContentEditable || keyField(el)) return false;
    const muchText = el.textContent.length > 300 && tidy(el.innerText).length > 300;
    return muchText || !!el.querySelector('tr ~ tr') || inside('h1,h2,h3,h4,h5,h6', el).length > 1;
  };

  // ---- What an element is called, and its value

  // Icon fonts draw a picture where a word such as account_balance_wallet stands. The class counts as well,
  // since the font itself may not have come.
  const ICON_CLASS = /(^|\s)material-(icons|symbols)/;
  const ICON_FAMILY = /^[^,]*(icon|symbol|glyph)/i;
  const hasIconFont = remembered(doc => !!bodyOf(doc)?.querySelector('[class*="material-" i]')
    || [...fontsOf(doc)].some(font => ICON_FAMILY.test(font.family)));
  const inIconFont = (el, text) => {
    if (!/^[a-z\d_]{2,}$/.test(text) || !hasIconFont(el.ownerDocument)) return false;
    return ICON_CLASS.test(attributeOf(el, 'class')) || ICON_FAMILY.test(getComputedStyle(el).fontFamily);
  };

  // Whether something is seen between an element and its neighbors in the line.
  const setApart = style => !/^(inline|contents)$/.test(style.display) || /[1-9]/.test(style.margin + style.padding);

  // The text that people see in an element, without some of its parts. Drawings (svg) may hold text, but are
  // no text. alt: whether pictures count with what they show.
  const seenText = (el, without, alt) => {
    let text = '';
    if (!el.childElementCount && !shadowRoot(el)) {
      text = tidy(el.textContent);
      return inIconFont(el, text) ? '' : text;
    }
    const add = node => {
      if (nodeType(node) === TEXT) {
        if (!inIconFont(holderOf(node), tidy(node.data))) text += node.data;
        return;
      }
      if (nodeType(node) !== ELEMENT) return;
      if (node.matches(without)) {
        if (node.localName !== 'svg') text += ' ';
        return;
      }
      const style = getComputedStyle(node);
      if (style.display === 'none' || style.visibility !== 'visible') return;
      const space = setApart(style) || node.localName === 'br' ? ' ' : '';
      text += space;
      if (node.localName === 'img' && alt) text += ` ${node.alt} `;
      for (const child of childrenOf(node)) add(child);
      text += space;
    };
    for (const child of childrenOf(el)) add(child);
    return tidy(text);
  };
  const labelText = el => seenText(el, 'input,select,textarea,button,svg', true);
  const TOOLTIPS = ['title', 'data-tooltip', 'data-bs-title', 'data-original-title'];  // scripts show the others
  const tooltipOf = el => TOOLTIPS.map(name => attribute(el, name)).find(text => text) ?? '';
  const LABELED = ['aria-label', ...TOOLTIPS].map(name => `[${name}]`).join(',');
  const labelOf = el => attribute(el, 'aria-label') || tooltipOf(el);

  // ---- Switches and checkboxes that style sheets draw

  // Their classes tell: toggle-switch or custom-checkbox, but not menu-toggle, a button that opens a menu.
  const SWITCH = /^(custom[-_]|ui[-_])?(toggle|switch)([-_]?(switch|toggle|control))?$/i;
  const TICK = /(^|[-_])(check-?box|radio)([-_](box|mark|icon|circle|control|custom|button|btn))?$/i;
  const KNOB = '[class*="knob" i],[class*="thumb" i],[class*="slider" i]';
  const DRAWN = '[class*="toggle" i],[class*="switch" i],[class*="check" i],[class*="radio" i]';
  const drawsSwitch = el => {
    if (!el.matches(DRAWN) || !wordless(el) || el.querySelector('input')) return false;
    const called = pattern => [...el.classList].some(name => pattern.test(name));
    const hasPicture = el.querySelector('img,svg,i');
    return called(TICK) || called(SWITCH) && !hasPicture || !!el.querySelector(KNOB);
  };
  // The switch that el is, or the only one in it, as in a row that is pressed as a whole.
  const drawnSwitch = remembered(el => {
    if (el.matches('input,select,textarea,a[href]')) return null;
    if (drawsSwitch(el)) return el;
    if (!el.childElementCount || el.querySelector('input')) return null;
    const [first, ...others] = inside(DRAWN, el).filter(part => drawsSwitch(part) && !inControl(part, el));
    return first && others.every(part => contains(first, part)) ? first : null;
  });

  // ---- Text beside a checkbox, a switch or a field that has no label

  const FIELDS = 'input:not([type=hidden]),select,textarea';
  const BLOCKS = 'form,fieldset,table,thead,tbody,ul,ol,dialog,main,section,article,nav,header,footer,body';
  const canBeTicked = el => el.matches(TICKS) || !el.matches(FIELDS);
  const ticksAll = el => {
    const tested = closest(el, '[data-testid]') ?? el;
    return /select-?all/i.test(`${el.id} ${el.className} ${attribute(tested, 'data-testid')}`);
  };

  // The first text of a row that is longer than the letters of an avatar. A checkbox may be called by a link, as
  // that of a table's row is; a field may not.
  const firstText = (row, el) => {
    let short = null;
    const texts = textsIn(document, row, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode()) {
      const text = tidy(node.data);
      const part = parentOf(node);
      if (!text || contains(el, node) || part.closest('option,script,style,button,svg')) continue;
      if (!boxed(part).checkVisibility() || inIconFont(part, text)) continue;
      if (!canBeTicked(el) && inControl(part, row)) continue;
      if (text.length > 2) return node;
      short ??= node;
    }
    return short;
  };
  const fieldsOf = remembered(row => {
    const candidates = inside(`${FIELDS},${DRAWN}`, row);
    return candidates.filter(field => field.matches(FIELDS) || drawsSwitch(field));
  });
  // Whether it is the name of el: it is no paragraph, table or sum ("8 + 8 ="), and el is the row's only field.
  const isNameIn = (row, text, el) => {
    const called = tidy(text.data);
    const longest = canBeTicked(el) ? 100 : 40;
    const hasWord = /\p{L}{2}/u.test(called);
    if (called.length > longest || !hasWord) return false;

    const block = closest(parentOf(text), BLOCKS);
    const inBlockOfRow = block !== row && contains(row, block);
    if (inBlockOfRow) return false;

    return fieldsOf(row).every(field => contains(el, field) || contains(field, el));
  };
  // The row is the nearest element around el that holds any text.
  const textBeside = remembered(el => {
    if (el.closest('th') || ticksAll(el)) return null;
    for (let row = parentOf(el); row && !matches(row, BLOCKS); row = parentOf(row)) {
      const text = firstText(row, el);
      if (text) return isNameIn(row, text, el) ? text : null;
    }
    return null;
  });
  // A <label> that the page has not tied to its field.
  const looseLabel = el => {
    const text = !canBeTicked(el) && textBeside(el);
    return text && closest(parentOf(text), 'label') ? tidy(text.data) : '';
  };
  // In a table's row with several fields: what the head of the table says.
  const columnOf = el => {
    const cell = el.closest('td');
    const head = cell?.closest('table')?.rows[0]?.cells[cell.cellIndex];
    return head && head !== cell ? tidy(head.textContent) : '';
  };

  // ---- The words of the program, where people read nothing

  // Of "btn-remove-item-a1b2c3", remove: not what kind of thing it is, and nothing that is made up, another one
  // each time. A short number may be all that tells two cells apart.
  const KINDS = new RegExp('^(action|bi|box|btn|button|cell|checkbox|col|component|container|control|css|ctrl|div|'
    + 'el|elem|element|fa[srlb]?|glyphicon|icons?|id|image|img|inner|item|js|link|mdi|outer|radio|row|span|svg|ui|'
    + 'wrap|wrapper)$');
  const programWords = s => {
    if (s && !/\p{L}|\d{3}/u.test(s)) return s;  // "(-2,1)", a point of a plot
    const isWord = word => /\p{L}{2}/u.test(word) && !/\d{3}/.test(word);
    const isNumber = word => /^\d\d?$/.test(word);
    const apart = s.replace(/\S*css-\S*/g, ' ').replace(/([a-z])([A-Z])/g, '$1 $2').toLowerCase();
    const words = apart.split(/[^\p{L}\d]+/u).filter(word => isWord(word) || isNumber(word));
    const telling = words.filter(word => !KINDS.test(word));
    const said = telling.some(isWord) ? telling : words;
    return said.some(isWord) ? [...new Set(said)].join(' ') : '';
  };
  const programName = el => {
    const said = (name, from = el) => programWords(attribute(from, name));
    const icon = [el, ...inside('*', el)].find(each => inIconFont(each, tidy(each.textContent)));
    if (icon) return tidy(icon.textContent).replaceAll('_', ' ');
    const tested = el.closest('[data-testid],:not(:only-child)') ?? el;
    return (drawnSwitch(el) ? '' : said('data-action'))  // a switch's is to switch
      || said('data-testid', tested)
      || said('id')
      || leads(el) && nameOfTwin(el)
      || programWords(iconFile(el))
      || said('class')
      || said('class', inside('[class]', el)[0] ?? el)
      || attribute(el, 'href');
  };
  // What the file of its picture is called: trash, of "/icons/trash.svg" or "/icons.svg#trash".
  const iconFile = el => {
    const use = el.querySelector('svg use');
    const drawing = el.matches('img') ? el : el.querySelector('img[src]');
    const place = use ? attribute(use, 'href') || attribute(use, 'xlink:href') : attribute(drawing ?? el, 'src');
    if (place.startsWith('data:')) return '';
    const [path, part] = place.split('#');
    return part || path.split('?')[0].split('/').at(-1).replace(/\.\w+$/, '');
  };
  const leads = el => el.matches('a[href]:not([href^="#"],[href^="javascript:"])');
  // Another link to the same place has a text.
  const textsOfLinks = remembered(doc => {
    const texts = new Map();  // {address: the first text of a link to it}
    for (const link of inside('a[href]', bodyOf(doc))) {
      const href = attribute(link, 'href');
      if (!texts.get(href)) texts.set(href, tidy(link.innerText));
    }
    return texts;
  });
  const nameOfTwin = el => textsOfLinks(el.ownerDocument).get(attribute(el, 'href'));

  // In a choice of colors each swatch is empty but for the color that the page gives it alone.
  const swatchColor = el => {
    if (el.childElementCount || !wordless(el) || !el.style?.backgroundColor || drawnSwitch(el)) return '';
    const rgb = getComputedStyle(el).backgroundColor.match(/^rgb\((\d+), (\d+), (\d+)\)$/);
    if (!rgb) return '';
    const inHex = rgb.slice(1).map(part => Number(part).toString(16).padStart(2, '0'));
    return '#' + inHex.join('');
  };

  // ---- The name

  const picture = el => tidy(el.alt
    || el.querySelector('img[alt]')?.alt
    || el.querySelector('svg title')?.textContent
    || el.querySelector('svg text')?.textContent);
  // The text of an element and of the pictures in it. A title says more than a sign or two letters do.
  const ownText = el => {
    const icons = inside(LABELED, el).filter(icon => wordless(icon) && icon.checkVisibility());
    const text = tidy([seenText(el, FIELDS + ',svg'), ...icons.map(labelOf)].join(' '));
    const title = attribute(el, 'title');
    if (title && text.length < 3) return title.includes(text) ? title : `${text} ${title}`;

    const number = text && !/\p{L}/u.test(text);
    if (!number || !el.querySelector('svg,img')) return text;
    return tidy(`${text} ${picture(el) || programWords(attribute(el, 'data-action'))}`);  // 12 beside a heart
  };
  // What its labels say that nobody sees as a text: the colors of swatches, the numbers of stars.
  const hiddenLabel = el => labelsOf(el)
    .map(label => labelOf(label) || ownText(label) || tidy(label.textContent)).find(text => text);
  const labelsText = el => labelsOf(el).map(labelText).find(text => text);
  const textOfIds = (el, name) => {
    if (!el.hasAttribute(name)) return '';
    const root = rootOf(el);
    const find = {[DOCUMENT]: byId, [FRAGMENT]: byIdInShadow}[nodeType(root)];
    const others = attribute(el, name).split(' ').map(id => id && find?.(root, id));
    return tidy(others.map(other => other && (seenText(other, 'svg') || other.textContent)).join(' '));
  };
  // What a style sheet writes into an empty editor.
  const hint = el => [el, ...inside('*', el)].map(each => getComputedStyle(each, '::before').content)
    .find(content => /^"[^"]/.test(content))?.slice(1, -1);

  const nameOf = remembered(el => {
    if (keyField(el)) return attribute(keyField(el), 'aria-label');
    const field = el.matches('input,select,textarea');
    const button = el.matches('input[type=submit],input[type=button],input[type=reset]');
    return attribute(el, 'aria-label')
      || textOfIds(el, 'aria-labelledby')
      || (field ? labelsText(el) || looseLabel(el) : '')
      || (button ? tidy(el.value) || el.type : '')
      || (field ? '' : ownText(el) || labelsText(el))
      || tidy(el.placeholder)
      || tooltipOf(el)
      || textOfIds(el, 'aria-describedby')
      || picture(el)
      || (editable(el) ? tidy(hint(el)) : '')
      || (field || drawnSwitch(el) ? tidy(textBeside(el)?.data) || columnOf(el) : '')
      || (field ? hiddenLabel(el) : '')
      || tidy(el.name)
      || tidy(`${programName(el)} ${field ? '' : swatchColor(el)}`);
  });
  // Whether a label says only what its control is called. If the control is written, its name says that already.
  const onlyNamesControl = el => {
    const {control} = el;
    if (!control || !native(control) || !shown(control, getComputedStyle(control))) return false;
    if (control.closest('[aria-hidden=true]') || covered(control)) return false;
    const text = labelText(el);
    return text.length <= 300 && (!text || nameOf(control) === text);
  };

  // ---- Kind and value

  const kindOf = el => {
    if (keyField(el)) return 'textarea';
    const type = el.localName === 'input' ? el.type : '';
    if (/^(checkbox|radio)$/.test(type)) return type;
    if (type) return /^(submit|button|reset|image)$/.test(type) ? 'button' : 'input';
    const named = role(el).replace('link', 'a').replace('switch', 'checkbox').replace('textbox', 'input');
    if (/^(checkbox|radio|button|a|input)$/.test(named)) return named;
    return drawnSwitch(el) ? 'checkbox' : el.localName;
  };

  // The last words of an element's classes: of "nav-item nav-item--active is-open", item, active and open. A class
  // that denies something, or says it about something else, is no state.
  const stateWords = el => [...el.classList]
    .filter(name => !/^(has|no|not|non)[-_]|[:[]/.test(name))
    .map(name => name.split(/[-_]+/).pop().toLowerCase());
  const STATES = /unread|selected|checked|active|current|pressed|liked|starred|marked|rited|voted|saved/i;
  const PRESSED = /^(pressed|liked|starred|bookmarked|favou?rited|upvoted|downvoted|marked|saved)$/;
  // What they say about an element, or about the list item that it fills.
  const stateOf = el => {
    const item = el.matches('li > :only-child') ? parentOf(el) : el;
    if (!STATES.test(el.classList) && !STATES.test(item.classList)) return '';
    const words = [...stateWords(el), ...stateWords(item)];
    const says = word => words.includes(word);
    if (says('unread')) return 'unread';
    if (says('selected') || says('checked')) return 'selected';
    if (kindOf(el) === 'button' && words.some(word => PRESSED.test(word))) return 'pressed';
    if (!says('active') && !says('current') || !parentOf(item)) return '';
    // "active" may also mean that a person or a plan is: then all rows of a list say so.
    const alike = [...elementsIn(parentOf(item))].filter(other => other.localName === item.localName);
    const all = alike.every(other => /active|current/.test(attributeOf(other, 'class')));
    return all && alike.length > 1 ? '' : 'selected';
  };

  // The options of a dropdown that people see.
  const optionsOf = el => [...el.options].filter(option =>
    !option.closest('optgroup[hidden]') && getComputedStyle(option).display !== 'none');
  // An option as a dropdown offers it, with its group if another one is called the same.
  const optionsCalled = remembered(el => Map.groupBy(el.options, option => tidy(option.label)));
  const offered = (el, option) => {
    const name = tidy(option.label);
    const group = closest(option, 'optgroup');
    return group && optionsCalled(el).get(name).length > 1 ? `${tidy(group.label)}: ${name}` : name;
  };
  const listed = (el, option) => offered(el, option) + (matches(option, ':disabled') ? ' (disabled)' : '');

  // What a control shows inside, if its name comes from elsewhere: the choice of a drawn dropdown, a number beside
  // a label such as "Cart", the hour on a button that is called "Book". A small word alone may name an icon.
  const chosenIn = el => {
    if (!el.hasAttribute('aria-label') && !el.hasAttribute('aria-labelledby')) return '';
    const text = attribute(el, 'aria-valuetext') || attribute(el, 'aria-valuenow') || ownText(el);
    const opensList = /^(menu|listbox)$/.test(attribute(el, 'aria-haspopup'));
    const holdsValue = opensList || /^(combobox|spinbutton|slider)$/.test(role(el));
    const says = /(^|\W)\d|\p{L}\s|\p{Lu}\p{L}{2}/u.test(text);
    const named = nameOf(el).toLowerCase().includes(text.toLowerCase());
    return named || !holdsValue && !says ? '' : cut(text, 300);
  };

  // What a field offers, at most sixty texts of it.
  const choiceOf = texts => {
    const first = texts.slice(0, 60).join(' | ');
    const rest = texts.length - 60;
    return rest > 0 ? `${first} | ... ${rest} more` : first;
  };

  const valueOf = el => {
    const kind = kindOf(el);
    const holds = state => !/^(false|undefined)?$/.test(el.getAttribute(`aria-${state}`) ?? '');
    if (/^(checkbox|radio)$/.test(kind)) {
      if (el.indeterminate || el.getAttribute('aria-checked') === 'mixed') return 'mixed';
      const words = drawnSwitch(el) ? stateWords(drawnSwitch(el)) : [];
      const drawnOn = words.some(word => /^(on|active|checked|selected|enabled)$/.test(word));
      const on = el.checked ?? (drawnOn || ['checked', 'pressed', 'selected'].some(holds));
      return on ? 'on' : 'off';
    }
    if (kind === 'select') {
      const textOf = option => offered(el, option);
      const chosen = [...el.selectedOptions].map(textOf).join(' | ');
      return tidy(`${chosen} (${choiceOf(optionsOf(el).map(option => listed(el, option)))})`);
    }
    if (keyField(el)) return cut(tidy(el.innerText), 500);
    if (el.isContentEditable) return el.hasAttribute('aria-label') ? cut(tidy(el.innerText), 500) : '';
    if (kind !== 'input' && kind !== 'textarea') {
      const choice = chosenIn(el);
      const told = name => attribute(el, `aria-${name}`) === 'mixed' ? `partly ${name}` : name;
      const ariaStates = ['expanded', 'selected', 'checked', 'pressed', 'current'].filter(holds).map(told);
      const hasAria = ['selected', 'checked', 'pressed', 'current'].some(name => el.hasAttribute(`aria-${name}`));
      const byClass = stateOf(el);
      const classState = hasAria && byClass !== 'unread' ? '' : byClass;  // ARIA outranks classes
      const sorted = attribute(closest(el, 'th') ?? el, 'aria-sort').replace('none', '');
      return [choice, ...ariaStates, classState, sorted].filter(word => word).join(', ');
    }
    if (el.type === 'password') return el.value ? '****' : '';
    const value = cut(tidy(el.value), 500), example = tidy(el.placeholder);
    const suggestions = [...el.list?.options ?? []].map(option => tidy(option.value));
    if (suggestions.length) return tidy(`${value} (${choiceOf(suggestions)})`);
    if (value || !example || nameOf(el).includes(example)) return value;
    return `(${cut(example, 100)})`;  // people see it in the field as long as that is empty
  };

  // What an element without text says: its label, or all its classes if it is a rating made of stars.
  const pictured = el => {
    const classes = [el, ...el.querySelectorAll('[class]')].map(each => each.getAttribute('class'));
    return labelOf(el) || (/\b(ratings?|stars)\b/.test(classes[0]) ? tidy(classes.join(' ')) : '');
  };

  // ---- The page as text
  // A usable element becomes <tag>name <id>[ = value]</tag>. The id follows the name, so a policy that looks
  // for an element by its name only has to copy the number after it.

  const observe = async (viewportOnly, maxChars) => {
    await window[WORK]?.done();
    putBack();
    const elements = [];
    const lines = [];
    const titles = new Map();  // the text that a card is called by -> the card, which holds controls of its own
    const beside = new Map();  // a text that is written as the name of a control -> that control
    const cover = coverOf();
    let line = '';
    let size = 0;
    let prefix = '';    // of a heading's lines
    let tight = false;  // the line ends in text with no white space after it: what follows may join it
    let words = null;   // the parent of the line's first text
    let inert = false;  // nobody can use what stands here
    let behind = !!cover;  // here is what a dialog covers
    let leftOut = false;   // something was, for that
    let clips = [];     // the boxes that cut off what reaches out of them
    let cell = false;   // in a short table cell, whose parts stay in the row's line
    let pre = false;    // line breaks of the text are kept
    let aim = null;     // a usable container of much text: its first line gets its id
    const put = (s, joined) => {
      if (s) line += (line && !line.endsWith(' ') && !joined ? ' ' : '') + s;
      tight = false;
    };
    // The id stands after the name: <a>red lamp <12></a>. A name may end in a number ("Mar 10") or in anything else
    // that a page prints, but never in <12>, since we write a page's own < as &lt;.
    const tagged = (el, name, id) => {
      const kind = kindOf(el), value = valueOf(el);
      return `<${kind}>${name} <${id}>${value && ' = ' + escape(value)}</${kind}>`;
    };
    const flush = () => {
      if (/[^|\s]/.test(line)) {  // not only empty cells
        const text = line.trim();
        const initials = text.length < 3 && aim?.localName !== 'tr';  // an avatar is no first line
        if (aim && words && !initials && !text.includes('<') && !covered(words)) {
          line = tagged(aim, text, elements.push(words) - 1);
          aim = null;
        }
        lines.push(prefix + line.trim());
        size += line.length;
      }
      line = '';
      tight = false;
      words = null;
    };
    const nameText = el => escape(cut(nameOf(el), 300));
    // A picture and a title in a row that link to the same place count once, by the name that says more.
    const repeats = el => {
      const last = elements.at(-1);
      const samePlace = last?.getAttribute('href') === el.getAttribute('href') && leads(el);
      if (!samePlace) return false;
      if (!wordless(el) && !wordless(last)) return false;
      const before = nameOf(last);
      const uncut = nameOf(el).replace(/ ?(\.\.\.|…)$/, '');
      return before.startsWith(uncut);
    };
    const putUsable = el => {
      if (repeats(el)) return;
      const control = standsForControl(el) ? el.control : el;
      put(tagged(control, nameText(control), elements.length));
      elements.push(el);
    };
    const putDisabled = el => {
      const value = valueOf(el);
      put(nameText(el) + (value && ' = ' + escape(value)) + ' (disabled)');
    };
    const leaveOut = () => {
      if (leftOut) return;
      flush();
      lines.push('[the page behind this dialog is left out]');
      leftOut = true;
    };
    const visible = node => within(node, clips) && (!viewportOnly || inWindow(node));
    const putText = node => {
      const control = beside.get(node);
      const told = control && visible(control) && !titles.has(node);
      if (told || !visible(node) || fadedOut(node)) return;
      const parts = pre ? node.data.split('\n') : [node.data];
      parts.forEach((part, i) => {
        if (i > 0) flush();
        const text = tidy(part);
        if (!text) tight = false;
        if (!text || inIconFont(holderOf(node), text)) return;
        if (behind) {
          if (inWindow(node)) leaveOut();
          return;
        }
        words ??= holderOf(node);
        const joined = tight && !/^\s/.test(part);
        let written = escape(text);
        const card = titles.get(node);
        if (card) {  // the text is its name
          titles.delete(node);
          const id = elements.length;
          elements.push(holderOf(node));
          written = tagged(card, written, id);
        }
        put(written, joined);
        tight = /\S$/.test(part);
      });
    };
    // A text beside a checkbox, a switch or a field is written once, as the name of that.
    const pairUp = root => {
      for (const el of inside(`${FIELDS},${DRAWN}`, root)) {
        const field = el.matches(FIELDS);
        if (!field && !drawsSwitch(el)) continue;
        const style = getComputedStyle(el);
        if (!shown(el, style) || shrunkAway(style)) continue;
        const text = nameOf(el) && textBeside(el);
        if (!text || nameOf(el) !== tidy(text.data) || parentOf(text).closest('td,a[href]')) continue;
        const written = disabled(el) || clickable(el);
        const shows = written && !el.closest('[inert],[aria-hidden=true]') && !covered(el);
        if (shows) beside.set(text, el);
      }
    };

    const visit = node => {
      const outside = [inert, clips, cell, pre, behind];
      try {
        look(node);
      } catch (error) {
        if (error instanceof TypeError) childrenOf(node).forEach(visit);  // a form whose fields hide its methods
        else if (!(error instanceof RangeError)) throw error;  // nested too deeply: what is outside goes on
      }
      if (aim === node) aim = null;
      [inert, clips, cell, pre, behind] = outside;
    };
    const look = node => {
      if (!node || size > maxChars) return;
      if (nodeType(node) === TEXT) return putText(node);
      if (nodeType(node) !== ELEMENT) return;
      if (/^(script|style|noscript|template|head|embed)$/.test(node.localName)) return;
      if (node.localName === 'br') return cell ? put('') : flush();
      const style = getComputedStyle(node);
      if (node.getAttribute('aria-hidden') === 'true' || shrunkAway(style)) return;
      if (!shown(node, style)) {
        if (style.visibility === 'visible' || style.display === 'none') return;
        childNodes(node).forEach(child => {
          if (nodeType(child) === ELEMENT) visit(child);  // it may be visible
        });
        return;
      }
      pre = /pre|break/.test(style.whiteSpace);
      clips = clipsOf(node, style, clips);
      if (node === bodyOf(node.ownerDocument)) {
        behind ||= hasModal(node);
        pairUp(node);
      }
      if (behind) {
        const dialog = node.matches('dialog:modal') || cover && inFront(node, style, cover);
        if (dialog) behind = false;
      }
      if (node.hasAttribute('inert')) inert = true;

      // Can it be used? If not, and it is a card, its title gets an id.
      const near = visible(node);
      const free = near && !inert && !behind;
      let usable = free && clickable(node) && innermost(node);
      if (free && !usable && isCard(node, style)) {
        const title = titleIn(node, visible);
        if (title) titles.set(title, node);
        else usable = native(node);  // a <summary> with no text but that of a link
      }
      const wide = usable && spread(node);

      // Does it begin a line of its own?
      const inline = /^(inline|contents|table-cell|ruby)/.test(style.display);
      const inRow = inline || cell || node.localName === 'select';
      const block = wide || !usable && !inRow;
      const apart = setApart(style);
      if (block) flush();
      if (apart) tight = false;
      if (style.display === 'table-cell') {
        const before = node.previousElementSibling;
        if (line.trim() || before && getComputedStyle(before).display === 'table-cell') put('|');
        cell = tidy(node.textContent).length < 100 && !node.querySelector('table');
      }
      if (wide) aim = node;
      write(node, near, usable && !wide);
      if (block) flush();
      if (apart) tight = false;
    };
    const write = (el, near, usable) => {
      const children = () => {
        for (const child of childrenOf(el)) visit(child);
      };
      const controls = () => {
        for (const inner of el.querySelectorAll(CONTROLS)) visit(inner);
      };
      if (behind && !/^i?frame$/.test(el.localName)) {
        children();
      } else if (el.localName === 'label' && onlyNamesControl(el)) {
        controls();  // the text is the name of one of them
      } else if (usable) {
        if (!covered(el)) putUsable(el);
        if (standsForControl(el)) controls();  // a link in it
      } else if (/^h[1-6]$/.test(el.localName)) {
        flush();
        prefix = '#'.repeat(el.localName[1]) + ' ';
        children();
        flush();
        prefix = '';
      } else if (/^i?frame$/.test(el.localName) && !el.contentDocument) {
        const about = tidy(`${labelOf(el)} ${el.src.slice(0, 200)}`);
        if (near) put(escape(`[a frame that cannot be read: ${about}]`));
      } else if (el.localName === 'img') {
        if (near) put(escape(tidy(el.alt) || labelOf(el)));
      } else if (el.matches('button,input,select,textarea') && (inert || disabled(el))) {
        if (near) putDisabled(el);
      } else {
        const linesBefore = lines.length;
        const lineBefore = line;
        children();
        const addedNothing = lines.length === linesBefore && line === lineBefore;
        const said = addedNothing ? pictured(el) : '';
        if (said && near && wordless(el) && boxOf(el) && !fadedOut(el)) put(escape(said));
      }
    };

    for (const [el, why] of window[REFUSALS] ?? []) {
      const what = el ? `"${nameOf(el).slice(0, 100)}": ` : '';
      lines.push(escape(`note: the browser refuses ${what}${tidy(why)}`));
    }
    window[REFUSALS]?.clear();
    const title = tidy(titleOf(document)).slice(0, 200);
    if (title) lines.push('title: ' + escape(title));
    visit(bodyOf(document) ?? document.documentElement);  // an SVG has no body
    flush();
    window[ELEMENTS] = elements;
    const text = lines.join('\n');
    return text.length > maxChars ? text.slice(0, maxChars) + '\n[the page goes on]' : text;
  };

  // ---- Actions

  // Boxes that people cannot scroll, but scrollIntoView and focus do, and where they stood before.
  let shifted = [];
  const putBack = () => {
    for (const {box, side, at} of shifted) box[side] = at;
    shifted = [];
  };
  const around = el => {
    const root = rootOf(el);
    return el.assignedSlot || parentOf(el)
      || (nodeType(root) === DOCUMENT ? root.defaultView?.frameElement : root.host);
  };
  const stuckAround = el => {
    const found = [];
    for (let box = around(el); box; box = around(box)) {
      const styled = [box];
      const isPage = box === scrollerOf(box.ownerDocument);
      if (isPage) styled.push(bodyOf(box.ownerDocument));  // the body's overflow is the page's
      const styles = styled.map(each => getComputedStyle(each));
      const stuck = axis => styles.some(style => style[axis] === 'hidden');
      const {scrollLeft, scrollTop} = box;
      if (stuck('overflowX')) found.push({box, side: 'scrollLeft', at: scrollLeft});
      if (stuck('overflowY')) found.push({box, side: 'scrollTop', at: scrollTop});
    }
    return found;
  };
  // Scrolls el to the middle of what people can scroll. If it is out of their reach, as in a window that is too
  // small for its page, the other boxes move as well, until the next observation.
  const reveal = el => {
    const center = () => el.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});
    const stuck = stuckAround(el);
    shifted = stuck;
    center();
    putBack();
    forget();
    if (atHand(el)) return;
    shifted = stuck;
    center();
    forget();
  };

  // Waits, ms at most, for what the page has begun (see init.js). Returns whether to ask again, with its files.
  const settled = (files, ms) => window[WORK]?.settled(files, ms);

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

  // Where to aim the mouse, in window coordinates: the middle of the part of the element's box that `aimOf` chose,
  // and the size of that part.
  // leaves: whether a press there takes the focus from a field, whose scripts then check what was typed.
  // We scroll only to what the mouse cannot hit, since some pop-ups close when their page scrolls.
  // Returns {x, y, width, height, leaves}, or {error}: what the agent reads.
  const locate = id => {
    const el = numbered(id);
    if (missing(id)) return {error: missing(id)};
    const isHidden = {error: `element ${id} is hidden now`};
    const isCovered = {error: `something else lies on top of element ${id}`};
    let aim = toPress(el);
    const inFrame = aim.ownerDocument !== document;
    if (inFrame || !atHand(drawn(aim))) {
      reveal(drawn(aim));
      aim = toPress(el);  // el may be at hand now
    }
    const r = aimOf(aim).box || aim.getClientRects()[0];
    if (!r || parked(aim)) return isHidden;
    if (covered(aim) || !reached(aim)) return isCovered;
    const {left, top, width, height} = outward(el, r);
    const x = left + width / 2, y = top + height / 2;
    if (x < 0 || x >= innerWidth || y < 0 || y >= innerHeight) return isHidden;
    const frameOf = node => node.ownerDocument.defaultView.frameElement;
    let frame = frameOf(aim);
    while (frame && frameOf(frame)) frame = frameOf(frame);
    if (frame && hitAt(frame, x, y) !== frame) return isCovered;
    const field = aim.ownerDocument.activeElement;
    const leaves = field !== aim && (field?.isContentEditable || field?.matches('input,textarea'));
    return {x, y, width, height, leaves};
  };

  // Whether an element lies elsewhere than the mouse, as when a menu has closed that the mouse left.
  const missed = (id, x, y) => {
    const el = numbered(id);
    if (!el?.isConnected) return false;
    const boxes = [...toPress(el).getClientRects()].map(box => outward(el, box));
    return !boxes.some(({left, top, width, height}) =>
      x >= left && x <= left + width && y >= top && y <= top + height);
  };

  // Chooses an option of a dropdown by its text, or by a part of it that no other option has. Returns what is wrong,
  // or ''.
  const select = (id, wanted) => {
    const el = numbered(id);
    if (missing(id)) return missing(id);
    if (!el.options) return 'it is not a dropdown';
    if (!el.options.length) return 'it has no options';
    const plain = s => tidy(s).toLowerCase();
    const words = s => ` ${plain(s).replace(/[^\p{L}\p{N}]+/gu, ' ')} `;
    const text = plain(wanted);
    const inWords = options => options.slice(0, 60).map(option => offered(el, option)).join(', ')
      + (options.length > 60 ? ', ...' : '');
    const open = optionsOf(el).filter(option => !option.matches(':disabled'));
    let found = open.find(option => plain(offered(el, option)) === text)
      ?? open.find(option => plain(option.label) === text);
    const looser = [
      option => plain(option.label).startsWith(text),
      option => words(option.label).includes(words(wanted)),
      option => plain(option.label).includes(text),
    ];
    if (!found && text) {
      const fitting = looser.map(fits => open.filter(fits)).find(options => options.length) ?? [];
      if (fitting.length > 1) return 'more than one option fits: ' + inWords(fitting);
      found = fitting[0];
    }
    if (!found) return 'its options are: ' + inWords(open);
    found.selected = !(el.multiple && found.selected);  // in a list of several, a chosen one is taken back
    el.dispatchEvent(new Event('input', {bubbles: true, composed: true}));  // as a person's, it leaves a shadow root
    el.dispatchEvent(new Event('change', {bubbles: true}));
    return '';
  };

  // Moves the focus to what the agent types into. Returns that element, or what is wrong. Selects what an
  // editable element holds.
  const focus = id => {
    const usable = numbered(id);
    const el = usable && keyField(usable) || usable;
    const root = el?.getRootNode(), before = root?.activeElement;
    if (missing(id)) return missing(id);
    const refusal = why => `element ${id} does not take text: it is ${why}`;
    if (!el.isContentEditable && !el.matches('input,textarea')) return refusal('no field');
    if (el.matches(':disabled,[readonly]')) return refusal('locked');
    if (el.matches('[type=file]')) return refusal('for files, which you cannot choose');
    shifted = stuckAround(el);
    el.focus();  // its handler may move the focus on, but where nothing moves, something is in the way
    if (root.activeElement === before && before !== el) return refusal('hidden or behind a dialog');
    if (el.isContentEditable) el.ownerDocument.getSelection().selectAllChildren(el);
    return el;
  };

  // browser.py calls this after `fill`, which sends no key events. Autocomplete widgets listen for those, so send
  // the last key's. Browsers empty a date field without a word if the format is wrong, and move a slider to the
  // nearest value that it has: the agent reads that as a refusal.
  const typed = (id, text) => {
    const el = numbered(id), key = text.slice(-1) || 'Backspace';
    const formats = {date: '2024-12-31', month: '2024-12', week: '2024-W52', time: '23:59',
      'datetime-local': '2024-12-31T23:59'};
    if (text && el && !el.value && formats[el.type])
      window[REFUSALS]?.set(el, `it takes the format ${formats[el.type]}, and is empty now`);
    if (el?.type === 'range' && Number(el.value) !== Number(text))
      window[REFUSALS]?.set(el, `it goes from ${el.min || 0} to ${el.max || 100}, and is ${el.value} now`);
    for (const type of ['keydown', 'keyup']) {
      el?.dispatchEvent(new KeyboardEvent(type, {key, bubbles: true, composed: true}));
    }
  };

  // What lies in the window's middle, down into shadow roots and frames (there, in the frame's middle).
  const inMiddle = () => {
    let [x, y] = [innerWidth / 2, innerHeight / 2];
    let el = atPoint(document, x, y);
    for (let deeper = el; deeper; ) {
      el = deeper;
      const frame = el.contentDocument;
      if (frame) [x, y] = [el.clientWidth / 2, el.clientHeight / 2];
      deeper = frame ? atPoint(frame, x, y) : shadowRoot(el) && inShadow(shadowRoot(el), x, y);
      if (deeper === el) break;
    }
    return el;
  };
  // Scrolls the page or, if it cannot go on or a dialog is open, the innermost panel under the mouse that can, or else
  // in the window's middle; if there is none, the largest that can. direction: -1 or 1.
  const scroll = direction => {
    const goesOn = el => direction < 0 ? el.scrollTop > 1 : el.scrollTop + el.clientHeight < el.scrollHeight - 1;
    const isStuck = doc => [scrollerOf(doc), bodyOf(doc)].some(el => el && getComputedStyle(el).overflowY === 'hidden');
    const scrolls = el => el === scrollerOf(el.ownerDocument)
      ? !isStuck(el.ownerDocument)
      : /auto|scroll/.test(getComputedStyle(el).overflowY);
    const canScroll = el => scrolls(el) && goesOn(el);
    const page = scrollerOf(document);
    const pageFirst = page && canScroll(page) && !hasModal(document.documentElement) && !coverOf();
    let panel = null;
    if (!pageFirst) {
      const innermostOf = at => !at || canScroll(at) ? at : innermostOf(around(at));
      // In a page without a doctype, a lone :hover finds links only.
      panel = innermostOf(inside(':hover:not(:root)', document.documentElement).at(-1));
      if (!panel || panel === page) panel = innermostOf(inMiddle());
    }
    if (!pageFirst && !panel) {
      const others = inside('*', document.documentElement).filter(el => canScroll(el) && boxOf(el) && reached(el));
      const areaOf = el => el.clientWidth * el.clientHeight;
      panel = others.sort((a, b) => areaOf(b) - areaOf(a))[0];
    }
    const height = panel?.clientHeight || innerHeight;
    const scroller = panel || window;
    scroller.scrollBy({top: direction * height * 2 / 3, behavior: 'instant'});
    // Scripts hear of it in the next frame, unless the window is hidden; what they begin then is waited for.
    return new Promise(go => { requestAnimationFrame(() => setTimeout(go)); setTimeout(go, 501); });
  };

  // Whether an element draws the text that is typed into it.
  const drawsKeys = id => !!keyField(numbered(id));

  const functions = {observe, settled, locate, missed, select, focus, drawsKeys, typed, scroll};
  return ([name, ...given]) => {
    forget();  // the page has changed since the last call
    return functions[name](...given);
  };
})()});
