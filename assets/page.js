// Chromium runs this in every document, after init.js. Then rollout.py calls window['page.js'] with
// [name, ...given] and receives what the function of that name returns. The last statement lists the names.
//
// `observe` writes the page as text and numbers the elements that can be used. The page keeps those elements
// in an array on the window, so an id in an action is an index into what the last observation numbered.
//
// A page may contain anything. `el.disabled` of a form can be an input of that name, so this file asks
// `el.matches(':disabled')`, and it takes the properties it cannot do without from the prototypes.
Object.defineProperty(window, 'page.js', {value: ([name, ...given]) => {
  const ELEMENTS = Symbol.for('elements'), WORK = Symbol.for('work'), REFUSALS = Symbol.for('refusals');
  const ELEMENT = 1, TEXT = 3, DOCUMENT = 9;  // values of nodeType
  const real = (type, name) => {  // a property of the prototype, whatever an instance has under that name
    const {get, value} = Object.getOwnPropertyDescriptor(type.prototype, name);
    return get ? node => get.call(node) : (node, ...rest) => value.call(node, ...rest);
  };
  const nodeType = real(Node, 'nodeType'), childNodes = real(Node, 'childNodes');
  const parentOf = real(Node, 'parentElement'), contains = real(Node, 'contains');
  const shadowRoot = real(Element, 'shadowRoot'), bodyOf = real(Document, 'body');
  const scrollerOf = real(Document, 'scrollingElement');
  const titleOf = real(Document, 'title'), byId = real(Document, 'getElementById');
  const atPoint = real(Document, 'elementFromPoint'), inShadow = real(ShadowRoot, 'elementFromPoint');

  // Icon fonts draw their pictures as characters for private use, which nobody can read.
  const tidy = s => (typeof s === 'string' ? s : '').replace(/[\s\u00a0\ue000-\uf8ff]+/g, ' ').trim();
  const escape = s => s.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
  const numbered = id => window[ELEMENTS]?.[id];
  const cut = (s, length) => s.length > length ? s.slice(0, length) + '…' : s;

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
  const middleOf = el => {
    const r = boxOf(el), x = r && r.left + r.width / 2, y = r && r.top + r.height / 2;
    return {x, y, root: el.getRootNode(), hit: r && hitBeside(el, x, y)};
  };

  // Whether something else lies on top: of an element outside the window, where `locate` scrolls it.
  const covered = el => {
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

  const clickable = (el, style) => {
    if (disabled(el) || el.getAttribute('aria-disabled') === 'true') return false;
    return marked(el) || standsForControl(el)
      || editor(el)
      || el.tabIndex >= 0 && el.hasAttribute('tabindex')
      || style.cursor === 'pointer' && el.parentElement
         && getComputedStyle(el.parentElement).cursor !== 'pointer';
  };
  // What a person aims at. A role speaks for all that the element holds, down to the next control.
  const innermost = el => native(el) || editor(el) || ![...el.querySelectorAll('*')].some(inner => {
    const style = getComputedStyle(inner), whole = ROLES.test(role(el)) && !marked(inner);
    return !whole && clickable(inner, style) && shown(inner, style);
  });

  // A container that people see is usable, though it holds controls of its own: a card, a row.
  const isCard = (el, style) => !native(el) && !editor(el) && el.localName !== 'label'
    && (style.cursor === 'pointer' || el.localName === 'tr' && hears(el)) && clickable(el, style);
  // Whether a click on this part of a card reaches the card and none of its controls.
  const reaches = (part, card) => {
    let at = middleOf(part).hit;
    while (at && at !== card && !marked(at)) at = parentOf(at);
    return (!at || at === card) && !covered(part);
  };

  // A container of much text: its text is shown as usual, and its first line gets its id.
  const spread = el => el.localName === 'tr' || !el.matches('input,textarea,select')
    && !el.isContentEditable && el.textContent.length > 300 && tidy(el.innerText).length > 300;

  // ---- What an element is called, and its value

  const labelText = el => {
    const copy = el.cloneNode(true);
    copy.querySelectorAll('input,select,textarea,button').forEach(control => control.remove());
    copy.querySelectorAll('img[alt]').forEach(img => img.replaceWith(img.alt));
    return tidy(copy.textContent);
  };
  const leads = el => el.matches('a[href]:not([href^="#"],[href^="javascript:"])');
  const wordless = el => !tidy(el.textContent);
  const labelOf = el => tidy(el.getAttribute('aria-label')) || tidy(el.getAttribute('title'));
  const findName = el => {
    const attribute = (name, from = el) => tidy(from.getAttribute(name));
    const inside = (selector, root = el) => [...root.querySelectorAll(selector)];
    const twin = () => inside(`a[href="${CSS.escape(attribute('href'))}"]`, bodyOf(el.ownerDocument))
      .find(link => tidy(link.innerText));
    const control = el.matches('input,select,textarea');
    const button = el.matches('input[type=submit],input[type=button],input[type=reset]');
    const others = name => {
      const found = attribute(name).split(' ').map(id => id && byId(el.ownerDocument, id));
      return tidy(found.map(other => other?.textContent).join(' '));
    };
    // What a style sheet writes into an empty editor.
    const hint = () => [el, ...inside('*')].map(each => getComputedStyle(each, '::before').content)
      .find(content => /^"[^"]/.test(content))?.slice(1, -1);
    // Without the words that programs make up, another one each time.
    const readable = (name, from) => tidy(attribute(name, from).replace(/\S*(\d{3}|css-)\S*/g, ''));
    const icons = inside('[aria-label],[title]').filter(
      icon => wordless(icon) && icon.checkVisibility());
    return attribute('aria-label')
      || others('aria-labelledby')
      || (control && el.labels?.length ? labelText(el.labels[0]) : '')
      || (button ? tidy(el.value) || el.type : '')
      || (control ? '' : tidy([el.innerText ?? el.textContent, ...icons.map(labelOf)].join(' ')))
      || tidy(el.placeholder) || tidy(el.title) || others('aria-describedby')
      || tidy(el.alt || el.querySelector('img[alt]')?.alt || el.querySelector('svg title')?.textContent)
      || editor(el) && tidy(hint())
      || tidy(el.name) || attribute('data-testid', el.closest('[data-testid],:not(:only-child)') ?? el)
      || readable('id')
      || leads(el) && tidy(twin()?.innerText)
      || readable('class') || readable('class', inside('[class]')[0] ?? el) || attribute('href');
  };
  const found = new Map();  // a name may need a search of the page, and is asked for again
  const nameOf = el => found.get(el) ?? found.set(el, findName(el)).get(el);
  // Whether a label's text is the name of a control that people see: then it is written with the control.
  const names = el => el.control && shown(el.control, getComputedStyle(el.control))
    && (boxOf(el.control) || el.control.matches('input[type=checkbox],input[type=radio]'))
    && nameOf(el.control) === labelText(el);
  const kindOf = el => {
    const type = el.localName === 'input' ? el.type : '';
    if (/^(checkbox|radio)$/.test(type)) return type;
    if (type) return /^(submit|button|reset|image)$/.test(type) ? 'button' : 'input';
    const named = role(el).replace('link', 'a').replace('switch', 'checkbox').replace('textbox', 'input');
    return /^(checkbox|radio|button|a|input)$/.test(named) ? named : el.localName;
  };
  const valueOf = el => {
    const kind = kindOf(el);
    if (/^(checkbox|radio)$/.test(kind)) return (el.checked ?? el.ariaChecked === 'true') ? 'on' : 'off';
    if (kind === 'select') {
      const texts = options => [...options].map(option => tidy(option.label)).join(' | ');
      const some = texts([...el.options].slice(0, 60)), rest = el.options.length - 60;
      return tidy(`${texts(el.selectedOptions)} (${some}${rest > 0 ? ` | ... ${rest} more` : ''})`);
    }
    if (el.isContentEditable) return el.hasAttribute('aria-label') ? cut(tidy(el.innerText), 500) : '';
    if (kind !== 'input' && kind !== 'textarea') {
      const holds = state => !/^(false|undefined)?$/.test(el.getAttribute(`aria-${state}`) ?? '');
      return ['expanded', 'selected', 'checked', 'pressed', 'current'].filter(holds).join(', ');
    }
    return el.type === 'password' ? (el.value ? '****' : '') : cut(tidy(el.value), 500);
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
    const elements = [], lines = [];
    let line = '', size = 0;
    let prefix = '';    // of a heading's lines
    let tight = false;  // the line ends in text with no white space behind it: what follows may join it
    let words = null;   // the parent of the line's first text
    let inert = false;  // nobody can use what stands here
    let clips = [];     // the boxes that cut off what reaches out of them
    let cell = false;   // in a short table cell, whose parts stay in the row's line
    let pre = false;    // line breaks of the text are kept
    let aim = null;     // a usable container of much text: its first line gets its id
    let card = null;    // a usable container that holds controls: its first text gets its id
    const put = (s, joined) => {
      if (s) line += (line && !line.endsWith(' ') && !joined ? ' ' : '') + s;
      tight = false;
    };
    const flush = () => {
      if (/[^|\s]/.test(line)) {  // not only empty cells
        if (aim && words && !line.includes('<') && !covered(words)) {
          line = `<${kindOf(aim)}>${line.trim()} <${elements.push(words) - 1}></${kindOf(aim)}>`;
          aim = null;
        }
        lines.push(prefix + line.trim());
        size += line.length;
      }
      line = '';
      tight = false;
      words = null;
    };
    const described = (el, id = '') => {
      const value = valueOf(el);
      return escape(cut(nameOf(el), 300)) + id + (value && ' = ' + escape(value));
    };
    // A picture and a title in a row that link to the same place count once, by the name that says more.
    const repeats = (el, last = elements.at(-1)) => last?.getAttribute('href') === el.getAttribute('href')
      && leads(el) && (wordless(el) || wordless(last))
      && nameOf(last).startsWith(nameOf(el).replace(/ ?(\.\.\.|…)$/, ''));
    const putUsable = el => {
      if (repeats(el)) return;
      const control = standsForControl(el) ? el.control : el, kind = kindOf(control);
      put(`<${kind}>${described(control, ` <${elements.length}>`)}</${kind}>`);
      elements.push(el);
    };

    const visit = node => {
      const outside = [inert, clips, cell, pre];
      try {
        look(node);
      } catch (error) {
        if (error instanceof TypeError) childrenOf(node).forEach(visit);  // a form whose fields hide its methods
        else if (!(error instanceof RangeError)) throw error;  // nested too deeply: what is outside goes on
      }
      if (aim === node) aim = null;
      [inert, clips, cell, pre] = outside;
    };
    const look = node => {
      if (!node || size > maxChars) return;
      if (nodeType(node) === TEXT) {
        if (!within(node, clips) || viewportOnly && !inWindow(node)) return;
        (pre ? node.data.split('\n') : [node.data]).forEach((part, i) => {
          if (i) flush();
          const text = tidy(part);
          if (text) words ??= parentOf(node);
          const joined = tight && !/^\s/.test(part);
          if (text && card && contains(card, node) && reaches(parentOf(node), card)) {
            put(`<${kindOf(card)}>${escape(text)} <${elements.push(parentOf(node)) - 1}></${kindOf(card)}>`, joined);
            card = null;
          } else put(escape(text), joined);
          tight = /\S$/.test(part);
        });
        return;
      }
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
      if (node === bodyOf(node.ownerDocument)) inert ||= !!node.querySelector('dialog:modal');
      if (inert && node.matches('dialog:modal')) inert = false;
      if (node.hasAttribute('inert')) inert = true;
      const near = within(node, clips) && (!viewportOnly || inWindow(node));
      const usable = near && !inert && clickable(node, style) && innermost(node);
      const wide = usable && spread(node);
      if (near && !inert && !usable && isCard(node, style)) card = node;
      const inline = /^(inline|contents|table-cell|ruby)/.test(style.display);
      const block = wide || !inline && !usable && node.localName !== 'select' && !cell;
      const apart = !/^(inline|contents)$/.test(style.display) || /[1-9]/.test(style.margin + style.padding);
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
      if (el.localName === 'label' && names(el)) {
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
        if (near) put(described(el) + ' (disabled)');
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

  // Resolves once the work is done that the page has begun: see init.js.
  const settled = (files, ms) => window[WORK]?.settled(files, ms);

  // Where to aim the mouse: the center of the element's box, in window coordinates, and the size of that box.
  // leaves: whether a press there takes the focus from a field, whose scripts then check what was typed.
  // We scroll only to what the mouse cannot hit, since some pop-ups close when their page scrolls.
  const locate = id => {
    const el = numbered(id);
    if (!el) return {error: `there is no element ${id} on this page`};
    if (!el.isConnected) return {error: `element ${id} is no longer on the page`};
    // A control that is styled away may be parked where nobody can scroll to: press its label instead.
    const parked = r => r && (r.right + scrollX <= 0 || r.bottom + scrollY <= 0);
    const aim = parked(el.getBoundingClientRect()) && el.labels?.[0] || el;
    if (aim.ownerDocument !== document || !contains(drawn(aim), middleOf(aim).hit))
      drawn(aim).scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});
    const r = boxOf(aim) || aim.getClientRects()[0];
    if (!r || parked(r)) return {error: `element ${id} is hidden now`};
    if (covered(aim)) return {error: `something else lies on top of element ${id}`};
    const {left, top, width, height} = outward(el, r);
    const x = left + width / 2, y = top + height / 2, around = node => node.ownerDocument.defaultView.frameElement;
    let frame = around(aim);
    while (frame && around(frame)) frame = around(frame);
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
    let el = root && longer(root) ? null : atPoint(document, innerWidth / 2, innerHeight / 2);
    while (el && !(longer(el) && /auto|scroll/.test(getComputedStyle(el).overflowY))) el = el.parentElement;
    const height = el?.clientHeight || innerHeight;
    (el || window).scrollBy({top: direction * height * 2 / 3, behavior: 'instant'});
    // Scripts hear of it in the next frame, unless the window is hidden; what they begin then is waited for.
    return new Promise(go => { requestAnimationFrame(() => setTimeout(go)); setTimeout(go, 501); });
  };

  return {observe, settled, locate, select, focus, typed, scroll}[name](...given);
}});
