// What an element is called: by its label, its text, a text beside it or, where people read nothing, by the
// program's own words.

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
const setApart = (el, style) => !/^(inline|contents)$/.test(style.display)
  || /[1-9]/.test(style.margin + style.padding)
  || el.localName === 'sup' && continuesNumber(el);
// $12<sup>99</sup> is not $1299.
const continuesNumber = el => /\d\s*$/.test(el.previousSibling?.textContent) && /^\s*\d/.test(el.textContent);

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
    const space = setApart(node, style) || node.localName === 'br' ? ' ' : '';
    text += space;
    if (node.localName === 'img' && alt) text += ` ${node.alt} `;
    for (const child of childrenOf(node)) add(child);
    text += space;
  };
  for (const child of childrenOf(el)) add(child);
  return tidy(text);
};
const labelText = remembered(el => seenText(el, 'input,select,textarea,button,svg', true));
const TOOLTIPS = ['title', 'data-tooltip', 'data-bs-title', 'data-original-title'];  // scripts show the others
const tooltipOf = el => TOOLTIPS.map(name => attribute(el, name)).find(text => text) ?? '';
const LABELED = ['aria-label', ...TOOLTIPS].map(name => `[${name}]`).join(',');
const ariaOrTooltip = el => attribute(el, 'aria-label') || tooltipOf(el);

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
const TICK_ROLES = '[role=checkbox],[role=radio],[role=switch]';
const fieldsOf = remembered(row => {
  const candidates = inside(`${FIELDS},${DRAWN}`, row);
  return candidates.filter(field => field.matches(FIELDS) || drawsSwitch(field));
});
// What may have the same text beside it as el.
const rivalsOf = (el, row) => canBeTicked(el) ? [...fieldsOf(row), ...inside(TICK_ROLES, row)] : fieldsOf(row);
const blockOf = node => {
  let block = parentOf(node);
  while (block && getComputedStyle(block).display === 'inline') block = parentOf(block);
  return block;
};
// Whether several paragraphs stand between a field and what may be its name: then it is the title of them all.
const isFarFrom = (el, text, row) => {
  if (canBeTicked(el) || !precedes(text, el) || closest(parentOf(text), 'label')) return false;
  const between = new Set();
  const texts = textsIn(document, row, NodeFilter.SHOW_TEXT);
  texts.currentNode = text;
  for (let node = texts.nextNode(); node && precedes(node, el); node = texts.nextNode()) {
    if (tidy(node.data) && boxed(parentOf(node)).checkVisibility()) between.add(blockOf(node));
  }
  between.delete(blockOf(text));
  return between.size > 1;
};
// Whether it is the name of el: it is no paragraph, table or sum ("8 + 8 =").
const isNameIn = (row, text, el) => {
  const called = tidy(text.data);
  const longest = canBeTicked(el) ? 100 : 40;
  const hasWord = /\p{L}{2}/u.test(called);
  if (called.length > longest || !hasWord) return false;

  const block = closest(parentOf(text), BLOCKS);
  return block === row || !contains(row, block);
};
// The row is the nearest element around el that holds any text. el is its only field.
const textBeside = remembered(el => {
  if (el.closest('th') || ticksAll(el)) return null;
  for (let row = parentOf(el); row && !matches(row, BLOCKS); row = parentOf(row)) {
    const others = rivalsOf(el, row).some(field => !contains(el, field) && !contains(field, el));
    if (others) return null;
    const text = firstText(row, el);
    if (text) return isNameIn(row, text, el) && !isFarFrom(el, text, row) ? text : null;
  }
  return null;
});
// A <label> that the page has not tied to its field.
const looseLabel = el => {
  const text = !canBeTicked(el) && textBeside(el);
  return text && closest(parentOf(text), 'label') ? tidy(text.data) : '';
};
// Of "Date: <input>", right before a field.
const textBefore = el => {
  const before = !canBeTicked(el) && el.previousSibling;
  const said = before && nodeType(before) === TEXT ? tidy(before.data) : '';
  return /\p{L}:$/u.test(said) && said.length < 40 ? said.slice(0, -1) : '';
};
// What the labels of a <select> say that a script hides before the dropdown that it draws, as select2 does.
const labelsOfHidden = el => {
  const holdsOther = at => matches(at.previousElementSibling ?? at, 'select[aria-hidden=true]');
  // Where several can be chosen, the field for searching lies inside the combobox.
  for (let at = closest(el, '[role=combobox]'), i = 0; at && i < 4; at = parentOf(at), i++) {
    if (holdsOther(at)) return labelsText(at.previousElementSibling) ?? '';
  }
  return '';
};
// In a table's row with several fields: what the head of the table says, which may have several rows.
const columnOf = el => {
  const cell = el.closest('td');
  const column = cell ? columnAt(cell) : -1;
  if (column < 0) return '';
  const grid = gridOf(cell.closest('table'));
  const body = grid.findIndex((row, i) => i > 0 && row.some(each => each.localName === 'td'));
  const heads = grid.slice(0, Math.max(1, body)).map(row => row[column]);
  const words = heads.filter(head => head && head !== cell).map(head => seenText(head, FIELDS + ',button,svg'));
  return [...new Set(words)].join(' ');
};

// ---- The words of the program, where people read nothing

// Of "btn-remove-item-a1b2c3", remove: not what kind of thing it is, and nothing that is made up, another one
// each time. A short number may be all that tells two cells apart.
const KINDS = new RegExp('^(action|bi|box|btn|button|cell|checkbox|col|component|container|control|css|ctrl|div|'
  + 'el|elem|element|fa[srlb]?|glyphicon|icons?|id|image|img|inner|item|js|link|mdi|outer|radio|row|span|'
  + 'svg|tabler|ui|wrap|wrapper)$');
const programWords = s => {
  if (s && !/\p{L}|\d{3}/u.test(s)) return s;  // "(-2,1)", a point of a plot
  const isWord = word => /\p{L}{2}/u.test(word) && !/\d{3}|\d\p{L}+\d|\p{L}\d+\p{L}/u.test(word);
  const isNumber = word => /^\d\d?$/.test(word);
  const apart = s.replace(/\S*(css|svelte|\bsc)-\S*/g, ' ').replace(/([a-z])([A-Z])/g, '$1 $2').toLowerCase();
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
    || programWords(tidy(`${attribute(el, 'class')} ${iconName(el)}`))  // its own class may say no more than its size
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
// What its icon is called in its set, and not how it is drawn: trash, of <i class="fa fa-lg fa-trash">.
const OF_ICON_SET = /^(anticon|bi|bx|codicon|fa|feather|glyphicon|icon|lucide|mdi|octicon|pi|ri|tabler|ti)-(?=[a-z])/;
const LOOK_OF_ICON = new RegExp('^(beat|brands|dark|duotone|fw|inactive|inverse|lg|light|md|pulse|regular|sharp|sm|'
  + 'solid|spin|tabler|thin|xl|xs|(stack|flip|rotate|pull)(-.*)?)$');
const iconName = el => inside('i,span,svg', el)
  .flatMap(part => [...part.classList])
  .filter(name => OF_ICON_SET.test(name))
  .map(name => name.replace(OF_ICON_SET, ''))
  .find(name => !LOOK_OF_ICON.test(name) && !KINDS.test(name)) ?? '';
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
  const text = tidy([seenText(el, FIELDS + ',svg'), ...icons.map(ariaOrTooltip)].join(' '));
  const title = attribute(el, 'title');
  if (title && text.length < 3) return title.includes(text) ? title : `${text} ${title}`;

  const number = text && !/\p{L}/u.test(text);
  if (!number || !el.querySelector('svg,img')) return text;
  return tidy(`${text} ${picture(el) || programWords(attribute(el, 'data-action'))}`);  // 12 beside a heart
};
// What its labels say that nobody sees as a text: the colors of swatches, the numbers of stars.
const hiddenLabel = el => labelsOf(el)
  .map(label => ariaOrTooltip(label) || ownText(label) || tidy(label.textContent)).find(text => text);
const labelsText = el => labelsOf(el).map(labelText).find(text => text);
// Of the only field in the shadow root of a custom element: what the labels of that element say.
const labelsOfHost = el => {
  const root = rootOf(el);
  if (nodeType(root) !== FRAGMENT || fieldsOf(root).length > 1) return '';
  const {host} = root;
  const isField = propertyOf(propertyOf(host, 'constructor'), 'formAssociated');
  return isField ? attribute(host, 'aria-label') || labelsText(host) : '';
};
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

// What the frame is called whose whole page is an editor.
const frameName = el => {
  const frame = el === bodyOf(el.ownerDocument) && el.ownerDocument.defaultView.frameElement;
  return frame ? ariaOrTooltip(frame) : '';
};

const textOrLabel = el => {
  const text = ownText(el);
  if (isSlider(el) && text === valueOf(el)) return '';  // it is drawn with what it stands at
  return text.length > 1 ? text : labelsText(el) || text;  // a drawn checkbox may hold no more than its tick
};

// What it is called for those who hear the page. Vuetify calls every dropdown by what a press does to it: then it is
// its label.
const spokenName = (el, field) => {
  const said = attribute(el, 'aria-label');
  return field && /^(open|close)$/i.test(said) ? labelsText(el) || said : said;
};
const nameOf = remembered(el => {
  if (keyField(el)) return attribute(keyField(el), 'aria-label');
  const field = el.matches('input,select,textarea');
  const button = el.matches('input[type=submit],input[type=button],input[type=reset]');
  return spokenName(el, field)
    || textOfIds(el, 'aria-labelledby')
    || (field ? labelsText(el) || labelsOfHost(el) || looseLabel(el) : '')
    || (button ? tidy(el.value) || el.type : '')
    || (field ? '' : textOrLabel(el))
    || tidy(el.placeholder)
    || tooltipOf(el)
    || textOfIds(el, 'aria-describedby')
    || picture(el)
    || (editable(el) ? tidy(hint(el)) || frameName(el) : '')
    || (field || drawnSwitch(el) || el.matches(TICK_ROLES) ? tidy(textBeside(el)?.data) || columnOf(el) : '')
    || (field ? hiddenLabel(el) || textBefore(el) : '')
    || (field || role(el) === 'combobox' ? labelsOfHidden(el) : '')
    || tidy(el.name)
    || tidy(`${programName(el)} ${field ? '' : swatchColor(el)}`);
});
// Whether a label says only what its control is called. If the control is written, its name says that already.
const onlyNamesControl = el => {
  const {control} = el;
  if (!control || !native(control) || !shown(control, getComputedStyle(control))) return false;
  if (standsBehind(control)) return false;
  if (control.closest('[aria-hidden=true]') || covered(control)) return false;
  const text = labelText(el);
  return text.length <= 300 && (!text || nameOf(control) === text);
};
