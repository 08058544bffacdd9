// Chromium runs this in every document, after init.js. Then rollout.py calls window['page.js'] with
// [name, ...given] and receives what the function of that name returns. The last statement lists the names.
//
// `observe` writes the page as text and numbers the elements that can be used. The page keeps those elements
// in an array on the window, so an id in an action is an index into what the last observation numbered.
//
// A page may contain anything. `el.disabled` of a form can be an input of that name, so this file asks
// `el.matches(':disabled')`, and it takes the properties it cannot do without from the prototypes.
Object.defineProperty(window, 'page.js', {value: (() => {
  // How an id stands behind the name in <a>red lamp 12</a>. A name may end in a number ("Mar 10"), or in
  // anything else that a page likes to print, but never in <12>: a page's own < is written as &lt;.
  // The base in worlds/base has learned to read the plain form, so `marked` waits for its successor.
  const ID_FORMS = {plain: id => ` ${id}`, marked: id => ` <${id}>`};
  const idText = ID_FORMS.plain;

  const ELEMENTS = Symbol.for('elements'), WORK = Symbol.for('work'), REFUSALS = Symbol.for('refusals');
  const SHIFTED = Symbol.for('shifted'), HANDS = Symbol.for('hands');
  const ELEMENT = 1, TEXT = 3, DOCUMENT = 9;  // values of nodeType
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
  const fontsOf = real(Document, 'fonts'), sheetsOf = real(Document, 'styleSheets'), adoptedOf = real(Document, 'adoptedStyleSheets');
  const atPoint = real(Document, 'elementFromPoint'), inShadow = real(ShadowRoot, 'elementFromPoint');
  const textsIn = real(Document, 'createTreeWalker');

  // Icon fonts draw their pictures as characters for private use, which nobody can read.
  const tidy = s => (typeof s === 'string' ? s : '').replace(/[\s\u00a0\ue000-\uf8ff]+/g, ' ').trim();
  const escape = s => s.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
  const numbered = id => window[ELEMENTS]?.[id];
  const cut = (s, length) => s.length > length ? s.slice(0, length) + '…' : s;
  const caches = [];
  const forget = () => caches.forEach(known => known.clear());
  const remembered = find => {  // what takes a search of the page is asked for again within a call
    const known = new Map();
    caches.push(known);
    return key => {
      if (!known.has(key)) known.set(key, find(key));
      return known.get(key);
    };
  };

  // Where an element without a box is seen: an option in its dropdown, an <area> on its image.
  const drawn = el => {
    if (!/^(opt|area)/.test(el.localName)) return el;
    const map = CSS.escape(el.closest('map')?.name ?? '');
    return el.closest('select') || bodyOf(el.ownerDocument).querySelector(`img[usemap="#${map}"]`) || el;
  };

  // The first box with an area. A link that wraps block or floated children has an empty first box, so
  // the boxes of its contents count as well.
  const boxOf = el => {
    if (el.localName === 'area') {  // the middle of its points; a circle has one point and a radius
      const {left, top} = drawn(el).getBoundingClientRect();
      const xy = el.coords.split(','), n = xy.length >> 1;
      const mean = k => xy.slice(0, 2 * n).reduce((sum, v, i) => sum + (i % 2 === k ? v / n : 0), 0);
      return new DOMRect(left + mean(0), top + mean(1), 1, 1);
    }
    const range = new Range(), seen = r => r.width >= 1 && r.height >= 1;
    range.selectNodeContents(el);
    return [...el.getClientRects()].find(seen) || [...range.getClientRects()].find(seen);
  };

  // ---- What is visible

  // Elements that are not displayed, or that stand inside something closed, have no box.
  const shown = (el, style) => style.display === 'contents'
    || el.hidden !== 'until-found' && drawn(el).checkVisibility({visibilityProperty: true});

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

  // A clip cuts off what reaches out of its box. Whether some of a node, or of its label, is left.
  const within = (node, clips) => {
    if (!clips.length) return true;
    range.selectNode(node);
    const parts = nodeType(node) === TEXT ? [range] : [node, ...node.labels ?? []].map(drawn);
    const boxes = parts.map(part => part !== range && boxOf(part) || part.getBoundingClientRect());
    const common = (r, s, from, to) => Math.min(r[to], s[to]) - Math.max(r[from], s[from]);
    return clips.every(({box}) => boxes.some(
      r => common(r, box, 'left', 'right') > 0.5 && common(r, box, 'top', 'bottom') > 0.5));
  };
  // The clips of el's contents. outer: those around el. A panel that scrolls can show all that it holds, and
  // what is shrunk to one pixel is there to be read aloud.
  const clipsOf = (el, style, outer) => {
    if (/fixed|absolute/.test(style.position))
      outer = outer.filter(clip => contains(clip.el, el.offsetParent));
    if (style.overflow === 'visible' || /^(inline|contents)$/.test(style.display)
      || /^(body|input|select|textarea)$/.test(el.localName)
      || el.offsetWidth === 1 && el.offsetHeight === 1) return outer;
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
  const hitBeside = (el, x, y) => {
    const root = el.getRootNode();
    return (nodeType(root) === DOCUMENT ? atPoint : inShadow)(root, x, y);
  };
  // The middle of el, and what the mouse hits there.
  const middleOf = remembered(el => {
    const r = boxOf(el), x = r && r.left + r.width / 2, y = r && r.top + r.height / 2;
    return {x, y, root: el.getRootNode(), hit: r && hitBeside(el, x, y)};
  });

  // Whether something else lies on top: of an element outside the window, where `locate` scrolls it.
  const covered = remembered(el => {
    const {x, y, root, hit} = middleOf(el);
    if (hit === undefined) return !el.matches('input[type=checkbox],input[type=radio]');
    if (x < 0 || y < 0 || x >= innerWidth || y >= innerHeight) {
      const there = atPoint(document, x < 0 || x >= innerWidth ? innerWidth / 2 : x, innerHeight / 2);
      const layer = layerOf(there, /fixed/);
      return root === document && !!layer && !contains(layer, el);
    }
    if (!hit || contains(el, hit) || contains(hit, el) || hit.closest('label')?.control === el) return false;
    const layer = layerOf(hit, /fixed|sticky/);
    const page = scrollerOf(el.ownerDocument);
    for (let at = el; parentOf(at) && getComputedStyle(at).position !== 'fixed'; at = parentOf(at)) {
      const panel = parentOf(at), {left, right, top, bottom} = panel.getBoundingClientRect();
      if (panel !== page) {
        if (!/auto|scroll/.test(getComputedStyle(panel).overflow)) continue;
        if (x < left || x >= right || y < top || y >= bottom) return false;
      }
      if (!layer || contains(layer, el)) continue;
      // `locate` scrolls the element to the middle of the panel, as far as the panel scrolls.
      const {clientHeight, scrollHeight, scrollTop} = panel, box = layer.getBoundingClientRect();
      const wanted = y - clientHeight / 2 - (panel === page ? 0 : top);
      const there = y - Math.max(-scrollTop, Math.min(scrollHeight - clientHeight - scrollTop, wanted));
      if (there < box.top || there >= box.bottom) return false;
    }
    return true;
  });

  // The layer that keeps the mouse from all of the page: a dialog with what dims the rest. 25 points show it.
  // Most pages have no fixed layer in their first corner, so they pay for one point.
  const coverOf = () => {
    const steps = [0.002, 0.25, 0.5, 0.75, 0.998];
    const layers = new Set();
    for (const down of steps) {
      for (const across of steps) {
        const layer = layerOf(atPoint(document, across * innerWidth, down * innerHeight), /fixed/);
        if (!layer) return null;
        layers.add(layer);
      }
    }
    return [...layers].find(layer => {
      const {left, right, top, bottom} = layer.getBoundingClientRect();
      return left <= 1 && top <= 1 && right >= innerWidth - 1 && bottom >= innerHeight - 1;
    });
  };
  // Whether el lies on top of that layer: the dialog may stand beside what dims the page, or open a menu.
  const inFront = (el, style, cover) => {
    if (el === cover) return true;
    if (!/fixed|absolute/.test(style.position)) return false;
    const {hit} = middleOf(el);
    const layer = hit && layerOf(hit, /fixed/);
    return contains(el, hit) && (!layer || layer === el || !contains(el, layer));
  };

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
    + 'menuitem(checkbox|radio)?)$');
  const clickHandlers = window[Symbol.for('click handlers')];
  const role = el => el.getAttribute('role') || '';
  const native = el => el.matches(CONTROLS);
  const hears = el => clickHandlers?.has(el) || typeof el?.onclick === 'function';
  const delegate = el => el.matches('li,tr:has(> td)')  // a table or a list may listen for its rows
    && (hears(el.closest('table,ul,ol')) || hears(parentOf(el)));
  const marked = el => native(el) || ROLES.test(role(el)) || hears(el) || delegate(el);
  const disabled = el => el.matches(':disabled');

  // A checkbox or radio button that is styled away: people see and press its label.
  const standsForControl = el => el.localName === 'label'
    && el.control?.matches('input[type=checkbox],input[type=radio]')
    && !disabled(el.control) && !shown(el.control, getComputedStyle(el.control));

  // The outermost element whose text can be edited; what it holds is its text, links and buttons included.
  const editor = el => el.isContentEditable
    && (el === bodyOf(el.ownerDocument) || !parentOf(el)?.isContentEditable);

  // The selectors by which a document's style sheets show a hand over an element itself. A hand is inherited,
  // so in a box that has one, only they tell which parts are meant to be clicked apart from the box.
  const handsOf = remembered(doc => {
    const read = window[HANDS] ??= new WeakMap();
    const lists = [];
    for (const sheet of [...sheetsOf(doc), ...adoptedOf(doc)]) {
      try {
        lists.push(sheet.cssRules);
      } catch { /* another site's */ }
    }
    const count = lists.reduce((sum, rules) => sum + rules.length, 0);
    if (read.get(doc)?.count === count) return read.get(doc).hands;

    const found = [];
    const collect = rules => {
      for (const rule of rules) {
        const everything = /\*(,|$)/.test(rule.selectorText);  // .menu * means no part in particular
        if (rule.selectorText && rule.style?.cursor === 'pointer' && !everything) found.push(rule.selectorText);
        if (rule.cssRules?.length) collect(rule.cssRules);
      }
    };
    lists.forEach(collect);
    const hands = found.join(',');
    read.set(doc, {count, hands});
    return hands;
  });
  const hasOwnHand = el => {
    const hands = handsOf(el.ownerDocument);
    return el.style?.cursor === 'pointer' || hands && el.matches(hands);
  };

  // Without a role or a listener of its own, for instance because the document hears all clicks.
  const looksClickable = el => {
    const outer = parentOf(el);
    if (getComputedStyle(el).cursor !== 'pointer' || el === bodyOf(el.ownerDocument)) return false;
    if (!outer || closest(outer, 'label')?.control) return false;
    return getComputedStyle(outer).cursor !== 'pointer' || hasOwnHand(el);
  };

  const clickable = remembered(el => {
    if (disabled(el) || el.getAttribute('aria-disabled') === 'true') return false;
    return marked(el) || standsForControl(el)
      || editor(el)
      || el.tabIndex >= 0 && el.hasAttribute('tabindex')
      || looksClickable(el);
  });
  // What a person aims at. A role speaks for all that the element holds, down to the next control.
  const innermost = el => native(el) || editor(el) || ![...el.querySelectorAll('*')].some(inner => {
    const whole = ROLES.test(role(el)) && !marked(inner);
    return !whole && clickable(inner) && shown(inner, getComputedStyle(inner));
  });

  // The checkbox that is all there is in a container but its name: pressing the one presses the other.
  const tickIn = el => {
    const ticks = inside('input,select,textarea,button,a', el);
    return ticks.length === 1 && ticks[0].matches('input[type=checkbox],input[type=radio]')
      && seenText(el, 'input') === nameOf(ticks[0]);
  };

  // A container that people see is usable, though it holds controls of its own: a card, a row.
  const isCard = (el, style) => !native(el) && !editor(el) && el.localName !== 'label'
    && (style.cursor === 'pointer' || el.localName === 'tr' && hears(el)) && clickable(el) && !tickIn(el);
  // Whether this part of a card belongs to one of the controls that the card holds.
  const inControl = (part, card) => {
    for (let at = part; at && at !== card; at = parentOf(at)) {
      if (clickable(at)) return true;
    }
    return false;
  };
  // Whether a click on this part of a card reaches the card and none of its controls.
  const reaches = (part, card) => {
    const {hit} = middleOf(part);
    const beside = hit && !contains(card, hit) || inControl(hit ?? part, card);
    return !beside && !covered(part);
  };
  // The text that a card is called by: the first of more than two characters, since the letters of an avatar
  // often come before it.
  const titleIn = (card, visible) => {
    let short = null;
    const texts = textsIn(document, card, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode()) {
      const text = tidy(node.data), part = parentOf(node);
      if (!text || !visible(node) || inControl(part, card)) continue;
      if (inIconFont(part, text) || part.closest('[aria-hidden=true]') || !reaches(part, card)) continue;
      if (text.length > 2) return node;
      short ??= node;
    }
    return short;
  };

  // A container of much text: its text is shown as usual, and its first line gets its id.
  const spread = el => el.localName === 'tr' || !el.matches('input,textarea,select')
    && !el.isContentEditable && el.textContent.length > 300 && tidy(el.innerText).length > 300;

  // ---- What an element is called, and its value

  // Icon fonts draw a picture for a word such as account_balance_wallet. Their name tells where the font itself
  // has not come.
  const ICONS = /(^|\s)material-(icons|symbols)|^[^,]*(icon|symbol|glyph)/i;
  const hasIconFont = remembered(doc => !!bodyOf(doc).querySelector('[class*="material-" i]')
    || [...fontsOf(doc)].some(font => ICONS.test(font.family)));
  const inIconFont = (el, text) => /^[a-z\d_]{2,}$/.test(text) && hasIconFont(el.ownerDocument)
    && (ICONS.test(el.getAttribute('class')) || ICONS.test(getComputedStyle(el).fontFamily));

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
        if (!inIconFont(parentOf(node), tidy(node.data))) text += node.data;
        return;
      }
      if (nodeType(node) !== ELEMENT || node.matches(without)) return;
      const style = getComputedStyle(node);
      if (!shown(node, style)) return;
      const space = setApart(style) || node.localName === 'br' ? ' ' : '';
      text += space;
      if (node.localName === 'img' && alt) text += ` ${node.alt} `;
      for (const child of childrenOf(node)) add(child);
      text += space;
    };
    for (const child of childrenOf(el)) add(child);
    return tidy(text);
  };
  const labelText = el => seenText(el, 'input,select,textarea,button,svg', true) || tidy(el.textContent);
  const leads = el => el.matches('a[href]:not([href^="#"],[href^="javascript:"])');
  const wordless = el => !tidy(el.textContent);
  const attribute = (el, name) => tidy(attributeOf(el, name));
  const labelOf = el => attribute(el, 'aria-label') || attribute(el, 'title');
  const inside = (selector, el) => [...el.querySelectorAll(selector)];

  // ---- Switches and checkboxes that style sheets draw

  // By the words of their classes. A menu-toggle is a button that opens a menu.
  const SWITCH = /^(custom[-_]|ui[-_])?(toggle|switch)([-_]?(switch|toggle|control))?$/i;
  const TICK = /(^|[-_])(check-?box|radio)([-_](box|mark|icon|circle|control|custom|button|btn))?$/i;
  const KNOB = '[class*="knob" i],[class*="thumb" i],[class*="slider" i]';
  const DRAWN = '[class*="toggle" i],[class*="switch" i],[class*="check" i],[class*="radio" i]';
  const drawsSwitch = el => {
    if (!el.matches(DRAWN) || !wordless(el) || el.querySelector('input')) return false;
    const called = pattern => [...el.classList].some(name => pattern.test(name));
    const plain = !el.querySelector('img,svg,i');
    return called(TICK) || called(SWITCH) && plain || !!el.querySelector(KNOB);
  };
  // el itself, or the only one in it, as in a row that is pressed as a whole.
  const drawnSwitch = remembered(el => {
    if (el.matches('input,select,textarea,a[href]')) return null;
    if (drawsSwitch(el)) return el;
    const parts = inside(DRAWN, el).filter(part => drawsSwitch(part) && !inControl(part, el));
    const [first, ...others] = parts;
    return first && !el.querySelector('input') && others.every(part => contains(first, part)) ? first : null;
  });

  // The last words of an element's classes: of "nav-item nav-item--active is-open", item, active and open.
  // What a class says about others or denies is no state.
  const stateWords = el => [...el.classList]
    .filter(name => !/^(has|no|not|non)[-_]|[:[]/.test(name))
    .map(name => name.split(/[-_]+/).pop().toLowerCase());

  // ---- The name

  const FIELDS = 'input:not([type=hidden]),select,textarea';
  // The text beside a checkbox, a switch or a field without a label: the first in the nearest element around it
  // that has any, unless that holds other fields, too. A row's checkbox may be called by its link.
  const BLOCKS = 'form,fieldset,table,thead,tbody,ul,ol,dialog,main,section,article,nav,header,footer,body';
  const ticks = el => el.matches('input[type=checkbox],input[type=radio]') || !el.matches(FIELDS);
  const allOf = el => /select-?all/i.test(
    [el.id, el.className, attribute(closest(el, '[data-testid]') ?? el, 'data-testid')].join(' '));
  const besides = remembered(el => {
    if (el.closest('th') || allOf(el)) return null;
    for (let row = parentOf(el); row && !matches(row, BLOCKS); row = parentOf(row)) {
      const text = firstText(row, el);
      if (!text) continue;
      const others = inside(`${FIELDS},${DRAWN}`, row).filter(other => !contains(el, other) && !contains(other, el));
      return others.some(other => other.matches(FIELDS) || drawsSwitch(other)) ? null : text;
    }
    return null;
  });
  const looseLabel = el => {  // a <label> that the page has not tied to its field
    const text = !ticks(el) && besides(el);
    return text && closest(parentOf(text), 'label') ? tidy(text.data) : '';
  };
  const firstText = (row, el) => {
    let short = null;
    const texts = textsIn(document, row, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode()) {
      const text = tidy(node.data), part = parentOf(node);
      if (!text || contains(el, node) || part.closest('option,script,style,button,svg')) continue;
      if (!part.checkVisibility() || inIconFont(part, text)) continue;
      if (!ticks(el) && inControl(part, row)) continue;
      if (text.length > 2) return node;
      short ??= node;
    }
    return short;
  };
  // In a row with several: what the head of the table says.
  const columnOf = el => {
    const cell = el.closest('td'), head = cell?.closest('table')?.rows[0]?.cells[cell.cellIndex];
    return head && head !== cell ? tidy(head.textContent) : '';
  };

  // Where nothing can be read, the words of the program: of "btn-remove-item_17", remove. Not those that say
  // what kind of thing it is, and not those that are made up, another one each time.
  const KINDS = new RegExp('^(btn|button|icons?|item|img|image|link|wrap|wrapper|container|row|cell|col|box|el|elem|'
    + 'element|component|ctrl|control|checkbox|radio|inner|outer|ui|css|fa[srlb]?|bi|mdi|glyphicon|svg|div|span|action|js|id)$');
  const programWords = s => {
    const known = s.replace(/\S*css-\S*/g, ' ').replace(/([a-z])([A-Z])/g, '$1 $2').toLowerCase();
    const words = known.split(/[^\p{L}\d]+/u).filter(word => word.length > 1 && !/\d/.test(word));
    const telling = words.filter(word => !KINDS.test(word));
    return [...new Set(telling.length ? telling : words)].join(' ');
  };
  const programName = el => {
    const icon = [el, ...inside('*', el)].find(each => inIconFont(each, tidy(each.textContent)));
    if (icon) return tidy(icon.textContent).replaceAll('_', ' ');
    const tested = el.closest('[data-testid],:not(:only-child)') ?? el;
    const twin = leads(el) && inside(`a[href="${CSS.escape(attribute(el, 'href'))}"]`, bodyOf(el.ownerDocument))
      .map(link => tidy(link.innerText)).find(text => text);
    return !drawnSwitch(el) && programWords(attribute(el, 'data-action')) || programWords(attribute(tested, 'data-testid'))
      || programWords(attribute(el, 'id')) || twin || programWords(attribute(el, 'class'))
      || programWords(attribute(inside('[class]', el)[0] ?? el, 'class')) || attribute(el, 'href');
  };

  const picture = el => tidy(el.alt || el.querySelector('img[alt]')?.alt
    || el.querySelector('svg title')?.textContent || el.querySelector('svg text')?.textContent);
  // The text of an element and of the pictures in it. A title says more than a sign or two letters do.
  const ownText = el => {
    const icons = inside('[aria-label],[title]', el).filter(icon => wordless(icon) && icon.checkVisibility());
    const text = tidy([seenText(el, FIELDS + ',svg'), ...icons.map(labelOf)].join(' '));
    const title = attribute(el, 'title');
    if (title && text.length < 3) return title.includes(text) ? title : `${text} ${title}`;
    const drawn = text && !/\p{L}/u.test(text) && el.querySelector('svg,img');  // such as a heart beside 12
    return drawn ? tidy(`${text} ${picture(el) || programWords(attribute(el, 'data-action'))}`) : text;
  };
  const textOfIds = (el, name) => {
    const others = attribute(el, name).split(' ').map(id => id && byId(el.ownerDocument, id));
    return tidy(others.map(other => other?.textContent).join(' '));
  };
  // What a style sheet writes into an empty editor.
  const hint = el => [el, ...inside('*', el)].map(each => getComputedStyle(each, '::before').content)
    .find(content => /^"[^"]/.test(content))?.slice(1, -1);

  const nameOf = remembered(el => {
    const field = el.matches('input,select,textarea');
    const button = el.matches('input[type=submit],input[type=button],input[type=reset]');
    return attribute(el, 'aria-label') || textOfIds(el, 'aria-labelledby')
      || (field ? [...el.labels ?? []].map(labelText).find(text => text) || looseLabel(el) : '')
      || (button ? tidy(el.value) || el.type : '')
      || (field ? '' : ownText(el))
      || tidy(el.placeholder) || attribute(el, 'title') || textOfIds(el, 'aria-describedby')
      || picture(el)
      || editor(el) && tidy(hint(el))
      || (field || drawnSwitch(el)) && (tidy(besides(el)?.data) || columnOf(el))
      || tidy(el.name) || programName(el);
  });
  // Whether a label's text is the name of a control that people see: then it is written with the control.
  const names = el => el.control && shown(el.control, getComputedStyle(el.control))
    && (boxOf(el.control) || el.control.matches('input[type=checkbox],input[type=radio]'))
    && nameOf(el.control) === labelText(el);

  // ---- Kind and value

  const kindOf = el => {
    const type = el.localName === 'input' ? el.type : '';
    if (/^(checkbox|radio)$/.test(type)) return type;
    if (type) return /^(submit|button|reset|image)$/.test(type) ? 'button' : 'input';
    const named = role(el).replace('link', 'a').replace('switch', 'checkbox').replace('textbox', 'input');
    if (/^(checkbox|radio|button|a|input)$/.test(named)) return named;
    return drawnSwitch(el) ? 'checkbox' : el.localName;
  };

  // What its classes say about an element, or about the list item that it fills.
  const PRESSED = /^(pressed|liked|starred|bookmarked|favou?rited|upvoted|downvoted|marked|saved)$/;
  const stateOf = el => {
    const item = el.matches('li > :only-child') ? parentOf(el) : el;
    if (!el.classList.length && !item.classList.length) return '';
    const words = [...stateWords(el), ...stateWords(item)];
    const says = word => words.includes(word);
    if (says('unread')) return 'unread';
    if (says('selected') || says('checked')) return 'selected';
    if (kindOf(el) === 'button' && words.some(word => PRESSED.test(word))) return 'pressed';
    if (!says('active') && !says('current') || !parentOf(item)) return '';
    // "active" may also mean that a person or a plan is: then all rows of a list say so.
    const alike = [...elementsIn(parentOf(item))].filter(other => other.localName === item.localName);
    const all = alike.length > 1 && alike.every(other => /active|current/.test(other.getAttribute('class')));
    return all ? '' : 'selected';
  };

  const valueOf = el => {
    const kind = kindOf(el);
    const holds = state => !/^(false|undefined)?$/.test(el.getAttribute(`aria-${state}`) ?? '');
    if (/^(checkbox|radio)$/.test(kind)) {
      const box = drawnSwitch(el);
      const on = box && stateWords(box).some(word => /^(on|active|checked|selected|enabled)$/.test(word));
      if (el.indeterminate || el.getAttribute('aria-checked') === 'mixed') return 'mixed';
      return (el.checked ?? (on || ['checked', 'pressed', 'selected'].some(holds))) ? 'on' : 'off';
    }
    if (kind === 'select') {
      const texts = options => [...options].map(option => tidy(option.label)).join(' | ');
      const some = texts([...el.options].slice(0, 60)), rest = el.options.length - 60;
      return tidy(`${texts(el.selectedOptions)} (${some}${rest > 0 ? ` | ... ${rest} more` : ''})`);
    }
    if (el.isContentEditable) return el.hasAttribute('aria-label') ? cut(tidy(el.innerText), 500) : '';
    if (kind !== 'input' && kind !== 'textarea') {
      const said = ['expanded', 'selected', 'checked', 'pressed', 'current'].filter(holds);
      const told = ['selected', 'pressed', 'checked', 'current'].some(state => el.hasAttribute(`aria-${state}`));
      return [...said, told ? '' : stateOf(el)].filter(state => state).join(', ');
    }
    if (el.type === 'password') return el.value ? '****' : '';
    const example = tidy(el.placeholder);  // what people see in the field as long as it is empty
    return cut(tidy(el.value), 500) || (example && !nameOf(el).includes(example) ? `(${cut(example, 100)})` : '');
  };

  // What an element without text says: its label, or all its classes if it is a rating made of stars.
  const pictured = el => {
    const classes = [el, ...el.querySelectorAll('[class]')].map(each => each.getAttribute('class'));
    return labelOf(el) || (/\b(ratings?|stars)\b/.test(classes[0]) ? tidy(classes.join(' ')) : '');
  };

  // ---- The page as text
  // A usable element becomes <tag>name id[ = value]</tag>. The id follows the name, so a policy that looks
  // for an element by its name only has to copy the number behind it.

  const observe = async (viewportOnly, maxChars) => {
    await window[WORK]?.done();
    putBack();
    const elements = [], lines = [];
    const titles = new Map();  // the text that a card is called by -> the card, which holds controls of its own
    const told = new Set();    // texts that are written as the name of the control beside them
    const cover = coverOf();
    let line = '', size = 0;
    let prefix = '';    // of a heading's lines
    let tight = false;  // the line ends in text with no white space behind it: what follows may join it
    let words = null;   // the parent of the line's first text
    let inert = false;  // nobody can use what stands here
    let behind = !!cover;  // here is what a dialog covers
    let left = false;   // something was left out for that
    let clips = [];     // the boxes that cut off what reaches out of them
    let cell = false;   // in a short table cell, whose parts stay in the row's line
    let pre = false;    // line breaks of the text are kept
    let aim = null;     // a usable container of much text: its first line gets its id
    const put = (s, joined) => {
      if (s) line += (line && !line.endsWith(' ') && !joined ? ' ' : '') + s;
      tight = false;
    };
    const tagged = (el, name, id) => {
      const kind = kindOf(el), value = valueOf(el);
      return `<${kind}>${name}${idText(id)}${value && ' = ' + escape(value)}</${kind}>`;
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
    const repeats = (el, last = elements.at(-1)) => last?.getAttribute('href') === el.getAttribute('href')
      && leads(el) && (wordless(el) || wordless(last))
      && nameOf(last).startsWith(nameOf(el).replace(/ ?(\.\.\.|…)$/, ''));
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
      if (left) return;
      flush();
      lines.push('[the page behind this dialog is left out]');
      left = true;
    };
    const visible = node => within(node, clips) && (!viewportOnly || inWindow(node));
    const putText = node => {
      if (!visible(node) || told.has(node) && !titles.has(node)) return;
      (pre ? node.data.split('\n') : [node.data]).forEach((part, i) => {
        if (i) flush();
        const text = tidy(part);
        if (!text) tight = false;
        if (!text || inIconFont(parentOf(node), text)) return;
        if (behind) return leaveOut();
        words ??= parentOf(node);
        const joined = tight && !/^\s/.test(part);
        const card = titles.get(node);
        titles.delete(node);
        put(card ? tagged(card, escape(text), elements.push(parentOf(node)) - 1) : escape(text), joined);
        tight = /\S$/.test(part);
      });
    };
    // A text beside a checkbox, a switch or a field is told once, as its name.
    const pair = root => {
      for (const el of inside(`${FIELDS},${DRAWN}`, root)) {
        if (!el.matches(FIELDS) && !drawsSwitch(el) || !el.checkVisibility()) continue;
        const name = nameOf(el), text = besides(el);
        const free = text && name === tidy(text.data) && !parentOf(text).closest('td,a[href]');
        if (free && !covered(el)) told.add(text);
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
      if (node.getAttribute('aria-hidden') === 'true') return;
      if (!shown(node, style)) {
        if (style.visibility === 'visible' || style.display === 'none') return;
        return childNodes(node).forEach(child => nodeType(child) === ELEMENT && visit(child));  // may be visible
      }
      pre = /pre|break/.test(style.whiteSpace);
      clips = clipsOf(node, style, clips);
      if (node === bodyOf(node.ownerDocument)) {
        behind ||= !!node.querySelector('dialog:modal');
        pair(node);
      }
      if (behind && (node.matches('dialog:modal') || cover && inFront(node, style, cover))) behind = false;
      if (node.hasAttribute('inert')) inert = true;
      const near = visible(node);
      const usable = near && !inert && !behind && clickable(node) && innermost(node);
      const wide = usable && spread(node);
      if (near && !inert && !behind && !usable && isCard(node, style)) titles.set(titleIn(node, visible), node);
      const inline = /^(inline|contents|table-cell|ruby)/.test(style.display);
      const block = wide || !inline && !usable && node.localName !== 'select' && !cell;
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
      if (behind && !/^i?frame$/.test(el.localName)) {
        children();
      } else if (el.localName === 'label' && names(el)) {
        for (const inner of el.querySelectorAll(CONTROLS)) visit(inner);  // the text is the control's name
      } else if (usable) {
        if (!covered(el)) putUsable(el);
      } else if (/^h[1-6]$/.test(el.localName)) {
        flush();
        prefix = '#'.repeat(el.localName[1]) + ' ';
        children();
        flush();
        prefix = '';
      } else if (/^i?frame$/.test(el.localName) && !el.contentDocument) {
        const about = tidy(`${labelOf(el)} ${el.src.slice(0, 200)}`);
        if (near) put(escape(`[a frame of another site: ${about}]`));
      } else if (el.localName === 'img') {
        if (near) put(escape(tidy(el.alt) || labelOf(el)));
      } else if (el.matches('button,input,select,textarea') && (inert || disabled(el))) {
        if (near) putDisabled(el);
      } else {
        const before = lines.length + line;
        children();
        const said = before !== lines.length + line ? '' : pictured(el);
        if (said && near && wordless(el) && boxOf(el)) put(escape(said));
      }
    };

    for (const [el, why] of window[REFUSALS] ?? [])
      lines.push(escape(`note: the browser refuses ${el ? `"${nameOf(el).slice(0, 100)}": ` : ''}${why}`));
    window[REFUSALS]?.clear();
    const title = tidy(titleOf(document)).slice(0, 200);
    if (title) lines.push('title: ' + escape(title));
    visit(bodyOf(document));
    flush();
    window[ELEMENTS] = elements;
    const text = lines.join('\n');
    return text.length > maxChars ? text.slice(0, maxChars) + '\n[the page goes on]' : text;
  };

  // ---- Actions

  // The boxes around el that people cannot scroll, but scrollIntoView and focus do, and where they stand.
  const around = el => {
    const root = rootOf(el);
    return el.assignedSlot || parentOf(el)
      || (nodeType(root) === DOCUMENT ? root.defaultView?.frameElement : root.host);
  };
  const stuckAround = el => {
    const found = [];
    for (let box = around(el); box; box = around(box)) {
      const page = box === scrollerOf(box.ownerDocument);
      const styles = (page ? [box, bodyOf(box.ownerDocument)] : [box]).map(each => getComputedStyle(each));
      const stuck = axis => styles.some(style => style[axis] === 'hidden');
      const {scrollLeft, scrollTop} = box;
      if (stuck('overflowX')) found.push({box, side: 'scrollLeft', at: scrollLeft});
      if (stuck('overflowY')) found.push({box, side: 'scrollTop', at: scrollTop});
    }
    return found;
  };
  // Whether the mouse can hit el where it is now, or the label that stands for it.
  const atHand = el => {
    const {hit} = middleOf(el);
    return contains(el, hit) || hit?.closest('label')?.control === el;
  };
  const putBack = () => {
    for (const {box, side, at} of window[SHIFTED] ?? []) box[side] = at;
    window[SHIFTED] = [];
  };
  // Scrolls el to the middle of what people can scroll. If it is out of their reach, as in a window that is too
  // small for its page, the other boxes move as well, until the next observation.
  const reveal = el => {
    const center = () => el.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});
    const stuck = window[SHIFTED] = stuckAround(el);
    center();
    putBack();
    forget();
    if (atHand(el)) return;
    window[SHIFTED] = stuck;
    center();
    forget();
  };

  // Resolves once the work is done that the page has begun: see init.js.
  const settled = (files, ms) => window[WORK]?.settled(files, ms);

  // Where to aim the mouse: the center of the element's box, in window coordinates, and the size of that box.
  // leaves: whether a press there takes the focus from a field, whose scripts then check what was typed.
  // We scroll only to what the mouse cannot hit, since some pop-ups close when their page scrolls.
  const locate = id => {
    const el = numbered(id);
    if (!el) return {error: `there is no element ${id} on this page`};
    if (!el.isConnected) return {error: `element ${id} is no longer on the page`};
    // A control that is styled away may have no size, or be parked where nobody can scroll to: press its label.
    const parked = r => r && (r.right + scrollX <= 0 || r.bottom + scrollY <= 0);
    const labels = [...el.labels ?? []];
    const label = labels.find(each => boxOf(each) && !each.querySelector('a,button')) ?? labels[0];
    const aim = (parked(el.getBoundingClientRect()) || !boxOf(el)) && label || el;
    if (aim.ownerDocument !== document || !atHand(drawn(aim))) reveal(drawn(aim));
    const r = boxOf(aim) || aim.getClientRects()[0];
    if (!r || parked(r)) return {error: `element ${id} is hidden now`};
    if (covered(aim)) return {error: `something else lies on top of element ${id}`};
    const {left, top, width, height} = outward(el, r);
    const x = left + width / 2, y = top + height / 2;
    const frameOf = node => node.ownerDocument.defaultView.frameElement;
    let frame = frameOf(aim);
    while (frame && frameOf(frame)) frame = frameOf(frame);
    if (frame && hitBeside(frame, x, y) !== frame) return {error: `something else lies on top of element ${id}`};
    const field = aim.ownerDocument.activeElement;
    return {x, y, width, height, leaves: field !== aim && (field?.isContentEditable || field?.matches('input,textarea'))};
  };

  // Chooses an option of a dropdown by its text, or by a part of it. Returns what is wrong, or ''.
  const select = (id, wanted) => {
    const el = numbered(id), plain = s => tidy(s).toLowerCase(), w = plain(wanted);
    if (!el?.options?.length) return 'it is not a dropdown';
    const open = [...el.options].filter(option => !option.matches(':disabled'));
    const found = open.find(option => plain(option.label) === w)
      || w && open.find(option => plain(option.label).includes(w));
    if (!found) {
      const some = open.slice(0, 60).map(option => option.label.trim()).join(', ');
      return 'its options are: ' + some + (open.length > 60 ? ', ...' : '');
    }
    found.selected = !(el.multiple && found.selected);  // takes a chosen one back
    for (const type of ['input', 'change']) el.dispatchEvent(new Event(type, {bubbles: true}));
    return '';
  };

  // Moves the focus to what the agent types into. Returns that element, or what is wrong. Selects what an
  // editor holds.
  const focus = id => {
    const el = numbered(id), root = el?.getRootNode(), before = root?.activeElement;
    if (!el?.isConnected) return `there is no element ${id} on this page`;
    const refusal = why => `element ${id} does not take text: it is ${why}`;
    if (!el.isContentEditable && !el.matches('input,textarea')) return refusal('no field');
    if (el.matches(':disabled,[readonly]')) return refusal('locked');
    window[SHIFTED] = stuckAround(el);
    el.focus();  // its handler may move the focus on, but where nothing moves, something is in the way
    if (root.activeElement === before && before !== el) return refusal('hidden or behind a dialog');
    if (el.isContentEditable) el.ownerDocument.getSelection().selectAllChildren(el);
    return el;
  };

  // After a field was filled. Autocomplete widgets listen for key events, which that does not send, so send
  // the last key. And browsers empty a field of dates without a word if the format is wrong.
  const typed = (id, text) => {
    const el = numbered(id), key = text.slice(-1) || 'Backspace';
    const formats = {date: '2024-12-31', month: '2024-12', week: '2024-W52', time: '23:59',
      'datetime-local': '2024-12-31T23:59'};
    if (text && el && !el.value && formats[el.type])
      window[REFUSALS]?.set(el, `it takes the format ${formats[el.type]}, and is empty now`);
    for (const type of ['keydown', 'keyup']) el?.dispatchEvent(new KeyboardEvent(type, {key, bubbles: true}));
  };

  // Scrolls the page, or the panel in its middle if the page is as high as the window. direction: -1 or 1.
  const scroll = direction => {
    const root = scrollerOf(document), longer = el => el.scrollHeight > el.clientHeight;
    const stuck = [root, bodyOf(document)].some(el => el && getComputedStyle(el).overflowY === 'hidden');
    let el = root && longer(root) && !stuck ? null : atPoint(document, innerWidth / 2, innerHeight / 2);
    while (el && !(longer(el) && /auto|scroll/.test(getComputedStyle(el).overflowY))) el = el.parentElement;
    const height = el?.clientHeight || innerHeight;
    (el || window).scrollBy({top: direction * height * 2 / 3, behavior: 'instant'});
    // Scripts hear of it in the next frame, unless the window is hidden; what they begin then is waited for.
    return new Promise(go => { requestAnimationFrame(() => setTimeout(go)); setTimeout(go, 501); });
  };

  const functions = {observe, settled, locate, select, focus, typed, scroll};
  return ([name, ...given]) => {
    forget();  // the page has changed since the last call
    return functions[name](...given);
  };
})()});
