// What can be used: controls, and whatever else a page listens to, down to the part that a person aims at.

const CONTROLS = 'a[href],button,select,textarea,summary,input:not([type=hidden])';
const ROLES = new RegExp('^(button|link|tab|checkbox|radio|switch|option|combobox|textbox|searchbox|slider|'
  + 'treeitem|menuitem(checkbox|radio)?)$');
const clickHandlers = window[Symbol.for('click handlers')];
const role = el => el.getAttribute('role') || '';
const native = el => el.matches(CONTROLS);
const HANDLERS = ['onclick', 'onmousedown', 'onmouseup', 'onpointerdown', 'onpointerup'];
// Svelte and Solid listen on the document, and keep the handlers on the elements.
const PRESSES = ['click', 'mousedown', 'mouseup', 'pointerdown', 'pointerup'];
const KEPT = PRESSES.flatMap(press => [`__${press}`, `$$${press}`]);
const isDelegated = el => KEPT.some(key => el[key])
  || Object.getOwnPropertySymbols(el).some(symbol => symbol.description === 'events'
    && PRESSES.some(press => el[symbol]?.[press]));
// React listens for everything on each element that it draws into, and gives it an onclick that does nothing.
const isReactRoot = el => Object.keys(el).some(key => key.startsWith('_reactListening'));
const isIdle = handler => /\{\s*\}$/.test(Function.prototype.toString.call(handler));
const hasHandler = (el, counts) => HANDLERS.some(name => typeof el[name] === 'function' && counts(el[name]));
const listens = el => {
  const heard = clickHandlers?.has(el) || hasHandler(el, () => true);
  return heard && (!isReactRoot(el) || hasHandler(el, handler => !isIdle(handler)));
};
const hears = remembered(el => !!el && (listens(el) || isDelegated(el)));
const isRow = el => el.matches('li,tr:has(> td)')  // a table, a list or a tree may listen for its rows
  && (hears(el.closest('table,ul,ol')) || hears(el.closest('[role=tree]')) || hears(parentOf(el)));
// A calendar may listen for its days, of which the keys reach one: the others have a tabindex of -1.
const isDay = el => el.matches('[role=gridcell][tabindex]') && hears(el.closest('table,[role=grid]'));
// A menu may listen for its parts, and tell them apart by such attributes.
const PART = ':is([data-action],[data-command],[data-value],[data-id],[data-key],[data-index],[data-tab],[data-view])'
  + ':not(:only-child)';
const isPart = el => el.matches(PART) && hears(parentOf(el));
// What a drawn dropdown shows as its choice: the dropdown is what people use.
const showsChoice = el => el.matches('[role=combobox] [role=textbox][aria-readonly=true]');
const hasRole = el => ROLES.test(role(el)) && !showsChoice(el);
// A slider that the page draws. It may listen on the parts that it is drawn with.
const isSlider = el => el.matches('[role=slider][aria-valuenow]') && !native(el)
  && !el.querySelector('a[href],input,select,textarea');
const marked = el => native(el) || hasRole(el) || hears(el) || isRow(el) || isDay(el) || isPart(el);
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
  const fields = inside('textarea:not(:disabled,[readonly],[tabindex="-1"]),[role=textbox]', top);
  const takesKeys = field => field.localName === 'textarea' || propertyOf(field, 'editContext');  // Monaco
  const open = fields.filter(field => takesKeys(field) && shown(field, getComputedStyle(field)));
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
// hoverHands: those of "td.day:hover" and the like, as "td.day": while the mouse is elsewhere, no hand is computed.
// reveals: [what the mouse goes over, what that shows] of rules such as "li:hover button { display: block }".
// overs: the former of all of them.
// heldLooks: classes such as ui-active of ".ui-active:active", which say how an element looks while it is held down.
const rulesRead = new WeakMap();  // document -> {count of its rules, and these}
const parts = selectors => selectors.split(/,(?![^(]*\))/);  // not at the comma in :is(a, b)
const isSelector = text => CSS.supports(`selector(${text})`);
// Of "li:hover > button", li. Rules nested in others, with an &, do not count.
const HOVER = /^([^&]*[^&\s>+~]):hover[^\s>+~]*[\s>+~]+[^&]+$/;
const revealsIn = rule => {
  const {display, visibility} = rule.style;
  const shows = display && display !== 'none' || visibility === 'visible';
  if (!shows) return [];
  const pairs = [];
  for (const selector of parts(rule.selectorText)) {
    const [all, over] = selector.trim().match(HOVER) ?? [];
    if (!all) continue;
    const what = all.replaceAll(':hover', '');
    if (isSelector(over) && isSelector(what)) pairs.push([over, what]);
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
  let hoverHands = '';
  const reveals = [];
  const heldLooks = new Set();
  const states = new Set();
  const collect = rules => {
    for (const rule of rules) {
      if (rule.media && !matchMedia(rule.media.mediaText).matches) continue;
      const nested = rule.selectorText?.includes('&');
      const hand = rule.selectorText && !nested && rule.style.cursor === 'pointer';
      const everything = /\*(,|$)/.test(rule.selectorText);  // `.menu *` means no part in particular
      if (hand && !everything) {
        const over = parts(rule.selectorText).filter(selector => selector.includes(':hover'));
        const atRest = over.map(selector => selector.replaceAll(':hover', ''))
          .filter(each => isSelector(each) && !/[\s>+~]$/.test(each));
        hands.push(rule.selectorText, ...atRest);
        for (const each of atRest) hoverHands += hoverHands ? `,${each}` : each;  // a page may have bent `join`
      }
      if (/:hover/.test(rule.selectorText)) reveals.push(...revealsIn(rule));
      for (const [, name, held] of (rule.selectorText ?? '').matchAll(/\.([\w-]*active)(?![\w-])(:active)?/g)) {
        (held ? heldLooks : states).add(name);
      }
      if (rule.cssRules?.length) collect(rule.cssRules);
    }
  };
  lists.forEach(collect);
  states.forEach(name => heldLooks.delete(name));
  const overs = [...new Set(reveals.map(([over]) => over))].join(',');
  const read = {count, hands: hands.join(','), hoverHands, overs, reveals, heldLooks};
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
  const outer = holderOf(el);
  const {cursor} = getComputedStyle(el);
  const {hoverHands} = rulesOf(el.ownerDocument);
  // A rule for a:hover is meant for links, not for anchors.
  const underMouse = hoverHands && outer && el.matches(hoverHands) && !el.matches('a:not([href],[class])')
    && cursor === getComputedStyle(outer).cursor;  // a disabled day has a cursor of its own
  if (cursor !== 'pointer' && !underMouse || el === bodyOf(el.ownerDocument)) return false;
  if (!outer || closest(outer, 'label')?.control) return false;
  const topOfUsable = !parentOf(el) && marked(outer);  // its host is what people use
  if (topOfUsable) return false;
  return getComputedStyle(outer).cursor !== 'pointer' || hasOwnHand(el);
};

// What the keys reach only to scroll it, or to have it read aloud.
const READ = 'pre,article,section,main,figure,table';
const READ_ROLES = /^(article|dialog|document|feed|figure|group|log|main|note|region|status|table|tabpanel)$/;
const isLine = el => /^(none|presentation|separator)$/.test(role(el)) && !drawsSomething(el)  // between items of a menu
  && !el.hasAttribute('aria-valuenow');
const isForReading = el => {
  if (isLine(el)) return true;
  const scrolls = el.scrollHeight > el.clientHeight && /auto|scroll/.test(getComputedStyle(el).overflowY);
  return scrolls || (role(el) ? READ_ROLES.test(role(el)) : el.matches(READ));
};

const clickable = remembered(el => {
  if (disabled(el)) return false;
  // The mouse goes through it: so do style sheets disable links. A switch may be pressed on its label, but a
  // dropdown that nobody can open stands behind one that is drawn.
  const hasLabel = labelsOf(el).length && el.localName !== 'select';
  if (getComputedStyle(el).pointerEvents === 'none' && !hasLabel) return false;
  return marked(el) || standsForControl(el)
    || editor(el)
    || el.tabIndex >= 0 && el.hasAttribute('tabindex') && !isForReading(el)
    || looksClickable(el)
    || opensOnHover(el);
});
const someInside = (top, test) => inside('*', top).some(inner =>
  test(inner) || someInShadow(inner, test) || someInSlot(inner, test));
const someInShadow = (el, test) => !!shadowRoot(el) && someInside(shadowRoot(el), test);
// What the page puts into a slot stands there, though it is no part of the shadow root.
const someInSlot = (el, test) => el.localName === 'slot'
  && el.assignedElements({flatten: true}).some(each => test(each) || someInside(each, test));
// What a person aims at. A role speaks for all that the element holds, down to the next control.
const innermost = el => {
  const usable = inner => {
    const whole = hasRole(el) && !marked(inner);
    return !whole && clickable(inner) && shown(inner, getComputedStyle(inner));
  };
  if (native(el) && !summaryWithControls(el) || editor(el) || standsForControl(el) || isSlider(el)) return true;
  return ![someInside, someInShadow, someInSlot].some(find => find(el, usable));
};

// Whether a container holds nothing but a checkbox and its name: then pressing the one presses the other.
const holdsOnlyTick = el => {
  const controls = inside('input,select,textarea,button,a', el);
  return controls.length === 1 && controls[0].matches(TICKS)
    && seenText(el, 'input') === nameOf(controls[0]);
};

// A <summary> opens its <details> where it is pressed beside its controls, as a card does.
const summaryWithControls = el => el.localName === 'summary' && !!el.querySelector(CONTROLS);
// By the Tab key, or from its neighbors by the arrow keys.
const TABBED = '[tabindex]:not([tabindex^="-"])';
const REACHED = `${TABBED},${TABBED} ~ [tabindex],[tabindex]:has(~ ${TABBED})`;
// A container that people see is usable, or that says so, though it holds controls of its own: a card, a row.
const isCard = (el, style) => {
  if (summaryWithControls(el)) return clickable(el);
  if (native(el) || editor(el) || el.matches('label,main')) return false;

  // One alone with a tabindex of -1 is a dialog that takes the focus, or a box that listens for its keys.
  const isReached = el.matches(`tr,[role=row],[aria-sort],${REACHED}`) && !el.matches('[role*=dialog]');
  const looksUsable = style.cursor === 'pointer' || hasRole(el) || hears(el) && isReached;
  return looksUsable && clickable(el) && !holdsOnlyTick(el);
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

// A picture that people press, though it is no part of what is read aloud: the cross of a tag. Not what lies behind
// a dialog and closes it.
const pressedPicture = el => (tidy(el.textContent).length <= 2 || inIconFont(el, tidy(el.textContent)))
  && !el.matches('a[href],input,select,textarea') && !el.querySelector(CONTROLS)
  && (hears(el) || hasOwnHand(el)) && drawsSomething(el) && !fillsWindow(el);
const drawsSomething = el => !wordless(el) || el.matches('svg,img') || [el, ...inside('*', el)].some(part =>
  part.matches('svg,img') || ['', '::before', '::after'].some(pseudo => {
    const {backgroundImage, maskImage, content} = getComputedStyle(part, pseudo);
    return backgroundImage !== 'none' || maskImage !== 'none' || /^("|url)/.test(content);
  }));

// A dropdown that nobody sees or opens: another one is drawn before it.
const standsBehind = el => el.localName === 'select' && getComputedStyle(el).pointerEvents === 'none'
  && !el.checkVisibility({opacityProperty: true});

// A container of much text, or of rows: its text is shown as usual, and its first line gets its id.
const spread = el => {
  if (el.localName === 'tr') return true;
  if (el.matches('input,textarea,select') || el.isContentEditable || keyField(el)) return false;
  const muchText = el.textContent.length > 300 && tidy(el.innerText).length > 300;
  return muchText || !!el.querySelector('tr ~ tr') || inside('h1,h2,h3,h4,h5,h6', el).length > 1;
};
