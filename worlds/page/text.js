// The page as text.
//
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
  const nameText = el => escape(cut(nameOf(el), editable(el) ? 2000 : 300));
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
  const leaveOut = () => {  // once
    if (leftOut) return;
    flush();
    lines.push('[the page behind this dialog is left out]');
    leftOut = true;
  };
  // Whether a menu or a dialog is open that hides this part of the page from those who cannot see it.
  const opensBeside = node => inside('[role=menu],[role=listbox],[role*=dialog]', bodyOf(document)).some(
    each => !contains(node, each) && shown(each, getComputedStyle(each)) && !each.closest('[aria-hidden=true]'));
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
    for (const el of inside(`${FIELDS},${DRAWN},${TICK_ROLES}`, root)) {
      const field = el.matches(FIELDS);
      if (!field && !drawsSwitch(el) && !el.matches(TICK_ROLES)) continue;
      const style = getComputedStyle(el);
      if (!shown(el, style) || shrunkAway(style)) continue;
      const text = nameOf(el) && textBeside(el);
      if (!text || nameOf(el) !== tidy(text.data) || parentOf(text).closest('td,a[href]')) continue;
      const written = innermost(el) && (disabled(el) ? native(el) : clickable(el));
      const shows = written && !el.closest('[inert],[aria-hidden=true]') && !covered(el);
      if (shows) beside.set(text, el);
    }
  };

  const visit = node => {
    const outside = [inert, clips, cell, pre, behind];
    try {
      look(node);
    } catch (error) {
      // Nested too deeply: what is outside goes on. Else a form whose fields hide its methods, or a getter that throws.
      if (!(error instanceof RangeError)) childrenOf(node).forEach(visit);
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
    if (node.getAttribute('aria-hidden') === 'true' && !pressedPicture(node)) {
      const isPage = node.querySelector(CONTROLS) && tidy(node.textContent).length > 30;
      const isSeen = isPage && shown(node, style) && visible(node) && inWindow(node) && !fadedOut(node);
      if (isSeen && opensBeside(node)) leaveOut();
      return;
    }
    if (shrunkAway(style)) return;
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
    const atCell = isCell(node, style);
    const inline = atCell || /^(inline|contents|ruby)/.test(style.display) && attributeOf(node, 'role') !== 'row';
    const inRow = inline || cell || node.localName === 'select';
    const block = wide || !usable && !inRow;
    const apart = setApart(node, style);
    if (block) flush();
    if (apart) tight = false;
    if (atCell) {
      const before = node.previousElementSibling;
      if (line.trim() || before && isCell(before, getComputedStyle(before))) put('|');
      for (let i = columnsSpanned(node); i > 0; i--) put('|');
      cell = tidy(node.textContent).length < 100 && !node.querySelector('table,[role=row]');
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
      for (const inner of el.querySelectorAll(CONTROLS)) {
        if (!inner.matches('select button')) visit(inner);  // such a button draws the select
      }
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
      const about = tidy(`${ariaOrTooltip(el)} ${el.src.slice(0, 200)}`);
      if (near) put(escape(`[a frame that cannot be read: ${about}]`));
    } else if (el.localName === 'img') {
      if (near) put(escape(tidy(el.alt) || ariaOrTooltip(el)));
    } else if (standsBehind(el)) {
      return;
    } else if (el.localName === 'select' || el.matches('button,input,textarea') && (inert || disabled(el))) {
      if (near && (el.matches(TICKS) || !fadedOut(el))) putDisabled(el);
    } else {
      const linesBefore = lines.length;
      const lineBefore = line;
      children();
      const sameLine = lines.length === linesBefore;
      const addedNothing = sameLine && line === lineBefore;
      const isDisabled = hasRole(el) && disabled(el) && !line.endsWith('(disabled)');
      if (sameLine && !addedNothing && isDisabled) put('(disabled)');
      const said = addedNothing ? pictured(el) : '';
      if (said && near && wordless(el) && boxOf(el) && !fadedOut(el)) put(escape(said));
    }
  };

  for (const [el, reason] of window[REFUSALS] ?? []) {
    let why = '';
    try {
      why = reason();
    } catch { /* it is the page's own */ }
    if (!why) continue;
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
