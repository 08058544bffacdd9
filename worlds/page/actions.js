// What actions ask of a page: where to press, what to choose, where the keys go, what to scroll.

const numbered = id => window[ELEMENTS]?.[id];
const missing = id => {
  if (!numbered(id)) return `there is no element ${id} on this page`;
  return numbered(id).isConnected ? '' : `element ${id} is no longer on the page`;
};

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

// Scripts hear of scrolling in the next frame, unless the window is hidden.
const nextFrame = () => new Promise(go => { requestAnimationFrame(() => setTimeout(go)); setTimeout(go, 501); });

// Waits, ms at most, for what the page has begun (see init.js). Returns whether to ask again, with its files.
const settled = (files, ms) => window[WORK]?.settled(files, ms);

// Where to aim the mouse, in window coordinates: the middle of the part of the element's box that `aimOf` chose,
// and the size of that part.
// leaves: whether a press there takes the focus from a field, whose scripts then check what was typed.
// We scroll only to what the mouse cannot hit, since some pop-ups close when their page scrolls.
// Returns {x, y, width, height, leaves}, or {error}: what the agent reads.
const locate = async id => {
  const el = numbered(id);
  if (missing(id)) return {error: missing(id)};
  const isHidden = {error: `element ${id} is hidden now`};
  const isCovered = {error: `something else lies on top of element ${id}`};
  let aim = toPress(el);
  const inFrame = aim.ownerDocument !== document;
  if (inFrame || !atHand(drawn(aim))) {
    reveal(drawn(aim));
    aim = toPress(el);  // el may be at hand now
    if (covered(aim)) {  // by a pop-up that is still on its way along with the page
      await nextFrame();
      forget();
      aim = toPress(el);
    }
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
  el.focus({preventScroll: true});  // as a click does: scripts check the field that was left
  if (missing(id)) return missing(id);  // such a script may draw the dropdown anew
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

let held = '';  // what the field that `focus` went to held then

// Moves the focus to what the agent types into. Returns that element, or what is wrong. Selects what an
// editable element holds.
const focus = (id, text) => {
  const usable = numbered(id);
  const el = usable && keyField(usable) || usable;
  const root = el?.getRootNode(), before = root?.activeElement;
  if (missing(id)) return missing(id);
  const refusal = why => `element ${id} does not take text: it is ${why}`;
  const takesText = el.isContentEditable || propertyOf(el, 'editContext') || el.matches('input,textarea');
  if (!takesText && !isSlider(el)) return refusal('no field');
  if (el.matches(':disabled,[readonly]')) return refusal('locked');
  if (el.matches('[type=file]')) return refusal('for files, which you cannot choose');
  if (el.matches('input[type=number]') && isNaN(text)) return `element ${id} takes a number, such as 12.5`;
  shifted = stuckAround(el);
  const thumb = isSlider(el) && el.tabIndex < 0 && el.querySelector('[tabindex]');  // the role may be its holder's
  const target = thumb || el;
  target.focus();  // its handler may move the focus on, but where nothing moves, something is in the way
  if (root.activeElement === before && before !== target) return refusal('hidden or behind a dialog');
  if (el.isContentEditable) el.ownerDocument.getSelection().selectAllChildren(el);
  held = propertyOf(el, 'value');
  return el;
};

// How the agent's text gets into an element: "slider", by the arrow keys; "code", pasted; "rich", by keys; "part" (of a
// date), by keys that replace its number; "field", all at once; "range", so as well, and then by keys.
const wayToType = id => {
  const el = numbered(id);
  if (isSlider(el)) return 'slider';
  if (el.isContentEditable && role(el) === 'spinbutton') return 'part';  // it has the attributes below as well
  // Editors of code draw their text, or do without what helps to write prose (CodeMirror 6).
  const withoutHelp = el.matches('[contenteditable][spellcheck=false][autocapitalize=off]');
  if (keyField(el) || propertyOf(el, 'editContext') || withoutHelp) return 'code';
  if (el.isContentEditable) return 'rich';
  return matches(el, 'input[type=range]') ? 'range' : 'field';
};
const atMinimum = id => {
  const el = numbered(id);
  return !!el && Number(el.value) <= Number(el.min || 0);
};

// Whether a text field has misread a text: it holds what it held before, or other letters and digits. A page may add
// some, leave some out, and write 1/2/2027 as 2027-01-02.
const hasMisread = (el, text) => {
  const isText = el?.localName === 'input' && el.selectionStart !== null;
  if (!isText || held === text) return false;
  if (held && el.value === held) return true;
  const withoutZeros = words => words.replace(/(?<!\p{N})0+(?=\p{N})/gu, '');
  const plain = words => withoutZeros(words.toLowerCase()).replace(/[^\p{L}\p{N}]/gu, '');
  const sorted = letters => [...letters].sort().join('');
  const wanted = plain(text), now = plain(el.value);
  const isPart = now.includes(wanted) || wanted.includes(now);
  return !isPart && sorted(now) !== sorted(wanted);
};

// browser.py calls this after `fill`, which sends no key events. Autocomplete widgets listen for those, so send
// the last key's. Browsers empty a date field without a word if the format is wrong, and move a slider to the
// nearest value that it has: the agent reads that as a refusal. Returns whether a text field has misread the
// text.
const typed = (id, text) => {
  const el = numbered(id), key = text.slice(-1);
  const formats = {date: '2024-12-31', month: '2024-12', week: '2024-W52', time: '23:59',
    'datetime-local': '2024-12-31T23:59'};
  if (text && el && !el.value && formats[el.type])
    window[REFUSALS]?.set(el, () => `it takes the format ${formats[el.type]}, and is empty now`);
  if (el?.type === 'range' && Number(el.value) !== Number(text)) {
    const steps = el.step ? ` in steps of ${el.step}` : '';
    window[REFUSALS]?.set(el, () => `it goes from ${el.min || 0} to ${el.max || 100}${steps}, and is ${el.value} now`);
  }
  if (el?.type === 'color' && !CSS.supports('color', text))
    window[REFUSALS]?.set(el, () => `it takes a color such as #ff8800, and is ${el.value} now`);
  const misread = hasMisread(el, text);
  const keys = key ? ['keydown', 'keyup'] : [];  // `fill` empties a field by a real key
  for (const type of keys) {
    el?.dispatchEvent(new KeyboardEvent(type, {key, bubbles: true, composed: true}));
  }
  return misread;
};

// What lies in the window's middle, down into shadow roots and frames (there, in the frame's middle).
const inMiddle = () => {
  let el = deepestAt(document, innerWidth / 2, innerHeight / 2);
  while (el?.contentDocument) {
    const inner = deepestAt(el.contentDocument, el.clientWidth / 2, el.clientHeight / 2);
    if (!inner) break;
    el = inner;
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
  return nextFrame();  // what scripts begin then is waited for
};

// What a drawn slider stands at: a number; null for any other element, and if it has gone.
const sliderAt = id => {
  const el = numbered(id);
  return el?.isConnected && isSlider(el) ? Number(attributeOf(el, 'aria-valuenow')) : null;
};

// Pastes a text into an editor of code. Returns whether the editor took it.
const paste = (id, text) => {
  const clipboardData = new DataTransfer();
  clipboardData.setData('text/plain', text);
  const event = new ClipboardEvent('paste', {clipboardData, bubbles: true, cancelable: true, composed: true});
  const el = numbered(id);
  return !(keyField(el) ?? el).dispatchEvent(event);
};

const functions = {observe, settled, locate, missed, select, focus, wayToType, atMinimum, sliderAt, paste, typed,
  scroll};
const call = ([name, ...given]) => {
  forget();  // the page has changed since the last call
  return functions[name](...given);
};
