// rollout.py evaluates this function in the page with [name, ...given] and receives what the function of
// that name returns. The last statement lists the names.
//
// `observe` writes the page as text and numbers the elements that can be used. The page keeps those elements
// in an array on the window, so an id in an action is an index into what the last observation numbered.
//
// A page may contain anything. `el.disabled` of a form can be an input of that name, so this file asks
// `el.matches(':disabled')`, and it takes the properties it cannot do without from the prototypes.
([name, ...given]) => {
  const ELEMENTS = Symbol.for('elements'), WORK = Symbol.for('work');
  const ELEMENT = 1, TEXT = 3;  // values of nodeType
  const real = (type, name) => {  // a property of the prototype, whatever an instance has under that name
    const {get, value} = Object.getOwnPropertyDescriptor(type.prototype, name);
    return get ? node => get.call(node) : (node, ...rest) => value.call(node, ...rest);
  };
  const nodeType = real(Node, 'nodeType'), childNodes = real(Node, 'childNodes');
  const parentOf = real(Node, 'parentElement'), contains = real(Node, 'contains');
  const shadowRoot = real(Element, 'shadowRoot'), bodyOf = real(Document, 'body');

  const tidy = s => (typeof s === 'string' ? s : '').replace(/[\s\u00a0]+/g, ' ').trim();
  const escape = s => s.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
  const numbered = id => window[ELEMENTS]?.[id];

  // The first box with an area. A link that wraps block or floated children has an empty first box, so
  // the boxes of its contents count as well.
  const boxOf = el => {
    const range = new Range(), seen = r => r.width >= 1 && r.height >= 1;
    range.selectNodeContents(el);
    return [...el.getClientRects()].find(seen) || [...range.getClientRects()].find(seen);
  };

  // ---- What is visible

  // Elements that are not displayed, or that stand inside something closed, have no box. The options of a
  // dropdown have none either but belong to it.
  const shown = (el, style) => style.display === 'contents' || /^opt/.test(el.localName)
    || el.checkVisibility({visibilityProperty: true});

  // A text has lines of its own: the boxes of its ancestors may be elsewhere.
  const range = new Range();
  const inWindow = node => {
    range.selectNode(node);
    const box = nodeType(node) === TEXT ? range : node.closest('select') || node;
    const r = box.getBoundingClientRect();
    let left = 0, top = 0;
    for (let w = node.ownerDocument.defaultView; w !== window && w?.frameElement; w = w.parent) {
      const at = w.frameElement.getBoundingClientRect();
      left += at.left;
      top += at.top;
    }
    return top + r.bottom > 0 && top + r.top < innerHeight
      && left + r.right > 0 && left + r.left < innerWidth;
  };

  // Whether something else lies on top. This can be decided only inside the window.
  const covered = el => {
    const r = boxOf(el);
    if (!r) return !el.matches('input[type=checkbox],input[type=radio]');
    const x = r.left + r.width / 2, y = r.top + r.height / 2;
    if (x < 0 || y < 0 || x >= innerWidth || y >= innerHeight) return false;
    const hit = el.getRootNode().elementFromPoint?.(x, y);
    if (!hit || contains(el, hit) || contains(hit, el) || hit.closest('label')?.control === el) return false;
    for (let panel = parentOf(el); panel; panel = parentOf(panel)) {  // `locate` scrolls inside panels
      const {left, right, top, bottom} = panel.getBoundingClientRect();
      const within = x >= left && x < right && y >= top && y < bottom;
      if (!within && /auto|scroll/.test(getComputedStyle(panel).overflow)) return false;
    }
    return true;
  };

  const childrenOf = el => {
    if (el.localName === 'iframe') return [el.contentDocument?.body];  // null if it is another site's
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
  const marked = el => native(el) || ROLES.test(role(el)) || clickHandlers?.has(el);
  const disabled = el => el.matches(':disabled');

  // A checkbox or radio button that is styled away: people see and press its label.
  const standsForControl = el => el.localName === 'label'
    && el.control?.matches('input[type=checkbox],input[type=radio]')
    && !disabled(el.control) && !shown(el.control, getComputedStyle(el.control));

  const clickable = (el, style) => {
    if (disabled(el) || el.getAttribute('aria-disabled') === 'true') return false;
    return marked(el) || standsForControl(el) || typeof el.onclick === 'function'
      || el.isContentEditable && !el.parentElement?.isContentEditable
      || el.tabIndex >= 0 && el.hasAttribute('tabindex')
      || style.cursor === 'pointer' && el.parentElement
         && getComputedStyle(el.parentElement).cursor !== 'pointer';
  };
  const innermost = el => native(el) || ![...el.querySelectorAll('*')].some(
    inner => marked(inner) && !disabled(inner) && shown(inner, getComputedStyle(inner)));

  // ---- What an element is called, and its value

  const labelText = el => {
    const copy = el.cloneNode(true);
    copy.querySelectorAll('input,select,textarea,button').forEach(control => control.remove());
    return tidy(copy.textContent);
  };
  const nameOf = el => {
    const attribute = name => tidy(el.getAttribute(name));
    const control = el.matches('input,select,textarea');
    const button = el.matches('input[type=submit],input[type=button],input[type=reset]');
    const ids = attribute('aria-labelledby').split(' ');
    const others = ids.map(id => id && el.ownerDocument.getElementById(id));
    return attribute('aria-label')
      || tidy(others.map(other => other?.textContent).join(' '))
      || (control && el.labels?.length ? labelText(el.labels[0]) : '')
      || (button ? tidy(el.value) || el.type : '')
      || (control ? '' : tidy(el.innerText ?? el.textContent))
      || tidy(el.placeholder) || tidy(el.title)
      || tidy(el.alt || el.querySelector('img[alt]')?.alt || el.querySelector('svg title')?.textContent)
      || tidy(el.name) || tidy(el.id) || attribute('class');
  };
  const kindOf = el => {
    const type = el.localName === 'input' ? el.type : '';
    if (/^(checkbox|radio)$/.test(type)) return type;
    if (type) return /^(submit|button|reset|image)$/.test(type) ? 'button' : 'input';
    return /^(checkbox|radio|button|link)$/.test(role(el)) ? role(el).replace('link', 'a') : el.localName;
  };
  const valueOf = el => {
    const kind = kindOf(el);
    if (/^(checkbox|radio)$/.test(kind)) return (el.checked ?? el.ariaChecked === 'true') ? 'on' : 'off';
    if (kind === 'select') {
      const text = option => tidy(option?.text), options = [...el.options].slice(0, 60).map(text).join(' | ');
      return `${text(el.selectedOptions[0])} (${options})`;
    }
    if (el.isContentEditable) return el.hasAttribute('aria-label') ? tidy(el.innerText).slice(0, 500) : '';
    if (kind !== 'input' && kind !== 'textarea') return '';
    return el.type === 'password' ? (el.value ? '****' : '') : tidy(el.value).slice(0, 500);
  };

  // ---- The page as text
  // A usable element becomes <tag>name id[ = value]</tag>. The id follows the name, so a policy that looks
  // for an element by its name only has to copy the number behind it.

  const observe = async (viewportOnly, maxChars) => {
    await window[WORK]?.done();
    const elements = [], lines = [];
    let line = '', size = 0;
    let tight = false;  // the line ends in text with no white space behind it: what follows may join it
    const put = (s, joined) => {
      if (s) line += (line && !line.endsWith(' ') && !joined ? ' ' : '') + s;
      tight = false;
    };
    const flush = () => {
      if (line.trim()) {
        lines.push(line.trim());
        size += line.length;
      }
      line = '';
      tight = false;
    };
    const described = (el, id = '') => {
      const value = valueOf(el);
      return escape(nameOf(el).slice(0, 300)) + id + (value && ' = ' + escape(value));
    };
    const putUsable = el => {
      const control = standsForControl(el) ? el.control : el, kind = kindOf(control);
      put(`<${kind}>${described(control, ` ${elements.length}`)}</${kind}>`);
      elements.push(el);
    };

    const visit = node => {
      try {
        look(node);
      } catch (error) {
        if (!(error instanceof TypeError)) throw error;
        for (const child of childrenOf(node)) visit(child);  // a form whose fields hide its methods
      }
    };
    const look = node => {
      if (!node || size > maxChars) return;
      if (nodeType(node) === TEXT) {
        if (viewportOnly && !inWindow(node)) return;
        put(escape(tidy(node.data)), tight && !/^\s/.test(node.data));
        tight = /\S$/.test(node.data);
        return;
      }
      if (nodeType(node) !== ELEMENT) return;
      if (/^(script|style|noscript|template|head|object|embed)$/.test(node.localName)) return;
      if (node.localName === 'br') return flush();
      const style = getComputedStyle(node);
      if (!shown(node, style) || node.getAttribute('aria-hidden') === 'true') return;
      const near = !viewportOnly || inWindow(node);
      const usable = near && clickable(node, style) && innermost(node);
      const inline = /^(inline|contents|table-cell|ruby)/.test(style.display);
      const block = !inline && !usable && node.localName !== 'select';
      const apart = !/^(inline|contents)$/.test(style.display) || /[1-9]/.test(style.margin + style.padding);
      if (block) flush();
      if (apart) tight = false;
      if (style.display === 'table-cell' && line.trim()) put('|');
      write(node, near, usable);
      if (block) flush();
      if (apart) tight = false;
    };
    const write = (el, near, usable) => {
      const children = () => {
        for (const child of childrenOf(el)) visit(child);
      };
      if (el.localName === 'label' && el.control && shown(el.control, getComputedStyle(el.control))) {
        for (const inner of el.querySelectorAll(CONTROLS)) visit(inner);  // the text is the control's name
      } else if (usable) {
        if (!covered(el)) putUsable(el);
      } else if (/^h[1-6]$/.test(el.localName)) {
        flush();
        children();
        if (line) line = `<${el.localName}>${line.trim()}</${el.localName}>`;
        flush();
      } else if (el.localName === 'img') {
        if (near) put(escape(tidy(el.alt)));
      } else if (el.matches('button,input,select,textarea') && disabled(el)) {
        if (near) put(described(el) + ' (disabled)');
      } else {
        children();
      }
    };

    if (document.title) lines.push(`<title>${escape(tidy(document.title).slice(0, 200))}</title>`);
    visit(bodyOf(document));
    flush();
    window[ELEMENTS] = elements;
    const text = lines.join('\n');
    return text.length > maxChars ? text.slice(0, maxChars) + '\n[the page goes on]' : text;
  };

  // ---- Actions

  // Resolves once the work is done that the page has begun. Browsers submit a form one task after the click,
  // so we let one task pass before we ask.
  const settled = async () => {
    await window[WORK]?.task();
    await window[WORK]?.done();
  };

  // Where to aim the mouse: the center of the element's box, scrolled into view, in window coordinates.
  const locate = id => {
    const el = numbered(id);
    if (!el) return {error: `there is no element ${id} on this page`};
    if (!el.isConnected) return {error: `element ${id} is no longer on the page`};
    // A control that is styled away may be parked where nobody can scroll to: press its label instead.
    const parked = r => r && (r.right + scrollX <= 0 || r.bottom + scrollY <= 0);
    const aim = parked(el.getBoundingClientRect()) && el.labels?.[0] || el;
    aim.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});
    const r = boxOf(aim) || aim.getClientRects()[0];
    if (!r || parked(r)) return {error: `element ${id} is hidden now`};
    let x = r.left + r.width / 2, y = r.top + r.height / 2;
    for (let w = el.ownerDocument.defaultView; w !== window && w?.frameElement; w = w.parent) {
      const frame = w.frameElement, at = frame.getBoundingClientRect(), style = getComputedStyle(frame);
      x = at.left + (frame.clientLeft + parseFloat(style.paddingLeft) + x) * at.width / frame.offsetWidth;
      y = at.top + (frame.clientTop + parseFloat(style.paddingTop) + y) * at.height / frame.offsetHeight;
    }
    return {x, y};
  };

  // Chooses an option of a dropdown by its text, or by a part of it. Returns what is wrong, or ''.
  const select = (id, wanted) => {
    const el = numbered(id), plain = s => tidy(s).toLowerCase(), w = plain(wanted);
    if (!el?.options?.length) return 'it is no dropdown';
    const open = [...el.options].filter(option => !option.disabled);
    const found = open.find(option => plain(option.text) === w)
      || w && open.find(option => plain(option.text).includes(w));
    if (!found) {
      const some = open.slice(0, 60).map(option => option.text.trim()).join(', ');
      return 'its options are: ' + some + (open.length > 60 ? ', ...' : '');
    }
    found.selected = true;
    for (const type of ['input', 'change']) el.dispatchEvent(new Event(type, {bubbles: true}));
    return '';
  };

  // Autocomplete widgets listen for key events, which filling a field does not send, so send the last key.
  const typeLastKey = (id, key) => {
    const el = numbered(id);
    el?.focus();
    for (const type of ['keydown', 'keyup']) el?.dispatchEvent(new KeyboardEvent(type, {key, bubbles: true}));
  };

  // Scrolls the page, or the panel in its middle if the page is as high as the window. direction: -1 or 1.
  const scroll = direction => {
    const root = document.scrollingElement, longer = el => el.scrollHeight > el.clientHeight;
    let el = root && longer(root) ? null : document.elementFromPoint(innerWidth / 2, innerHeight / 2);
    while (el && !(longer(el) && /auto|scroll/.test(getComputedStyle(el).overflowY))) el = el.parentElement;
    const height = el?.clientHeight || innerHeight;
    (el || window).scrollBy({top: direction * height * 2 / 3, behavior: 'instant'});
  };

  return {observe, settled, numbered, locate, select, typeLastKey, scroll}[name](...given);
}
