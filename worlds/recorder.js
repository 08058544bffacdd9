// Chromium runs this in every document while a person shows how a task is done (recorder.py). The page does not
// hear of what the person does. It becomes a wish: a request for one of the agent's actions, which the agent's own
// executor then carries out. So the page sees what it would see from an agent, and a demonstration holds nothing
// that an agent cannot do.
//
//   a click       is held back. In a field, the first one only places the cursor
//   typed text    is shown by its field, but the page does not hear of it until the person goes on: by Enter,
//                 by Tab, by a click elsewhere, or by 1.5 s without a key. Then the agent types it again, and
//                 what the person types meanwhile into the next field is kept. If the window is closed before
//                 that, the text is lost. Rich editors hear of each key at once
//   tabs          of the window may be used freely: the agent goes to a tab before it acts there. Close only the
//                 newest: an agent closes none, so in the replay the tabs after a closed one have other numbers
//   a dropdown    is put back to what it was, and the agent chooses
//   keys          Enter, Page Up, Page Down, Alt+Left, Alt+Right, Alt+0 to Alt+7 for tabs. Others do nothing
//                 outside of fields, except for moving the focus and scrolling. Escape does
//                 nothing anywhere
(() => {
  const RECORDER = Symbol.for('recorder'), ELEMENTS = Symbol.for('elements');
  const IDLE = 1500;  // ms without a key after which a text counts as typed
  // state: 'hold' everything back; 'listen': the same, and make wishes; 'act': let the agent's own events pass.
  // finish(): makes a wish of the text that is being typed, in whichever frame.
  // early: letters that the person typed into a field before we listened again; insert() writes them there.
  let shared = {state: 'hold', wishes: [], nodes: [], wake: null, finish: () => {}, early: '', insert: () => {}};
  try {
    shared = window.top[RECORDER] ?? shared;  // a frame tells its page
  } catch { /* the page is another site's */ }
  Object.defineProperty(window, RECORDER, {value: shared});

  // ---- wishes

  const keep = node => shared.nodes.push(node) - 1;
  const hand = () => {
    if (!shared.wake || !shared.wishes.length) return;
    shared.state = 'hold';
    shared.wake(shared.wishes.shift());
    shared.wake = null;
  };
  const wish = (kind, more = {}) => {
    shared.wishes.push({kind, ...more});
    hand();
  };
  shared.next ??= () => new Promise(wake => {
    listen();
    shared.state = 'listen';
    shared.wake = wake;
    if (shared.early) shared.insert(shared.early);
    shared.early = '';
    hand();
  });
  // The agent acts between these two. Where it only types, the person's cursor may be in the next field already.
  let cursor = null;
  shared.act ??= () => {
    shared.state = 'act';
    cursor = document.activeElement;
    while (cursor?.contentDocument ?? cursor?.shadowRoot)
      cursor = (cursor.contentDocument ?? cursor.shadowRoot).activeElement;
  };
  shared.hold ??= onlyTyped => {
    if (onlyTyped && takesText(cursor)) cursor.focus();
    shared.state = 'hold';
  };
  // The id of the element that a node belongs to; -1 if the last observation numbered none.
  const idOf = node => {
    const numbered = window.top[ELEMENTS] ?? [];
    for (let el = node; el; el = el.parentElement ?? el.getRootNode().host) {
      const id = numbered.indexOf(el);
      if (id >= 0) return id;
      if (el.localName === 'label' && el.control && el.control !== node) return idOf(el.control);
    }
    return -1;
  };
  shared.idOf ??= number => {
    const node = shared.nodes[number];
    return node?.isConnected ? idOf(node) : -1;
  };

  // ---- fields and dropdowns

  const NO_TEXT = ['button', 'submit', 'reset', 'image', 'checkbox', 'radio', 'file'];  // types of <input>
  const takesText = el => {
    if (el?.isContentEditable) return true;
    const isField = el?.localName === 'textarea' || el?.localName === 'input' && !NO_TEXT.includes(el.type);
    return isField && !el.matches(':disabled, [readonly]');
  };
  const textOf = field => field.isContentEditable ? field.innerText : field.value;
  const before = new WeakMap();  // a field -> its text, a dropdown -> which options were chosen
  const remember = el => {
    if (el?.localName === 'select') before.set(el, [...el.options].map(option => option.selected));
    else if (takesText(el) && el !== typing) before.set(el, textOf(el));
  };

  let typing = null, idle = 0;  // the field with a text that is no wish yet
  let placed = null;  // the field that has had its first click
  const typed = (kind = 'type') => {
    clearTimeout(idle);
    const field = typing;
    typing = placed = null;
    if (!field) return false;
    const text = textOf(field);
    if (!field.isContentEditable) field.value = before.get(field) ?? '';
    wish(kind, {node: keep(field), text});
    return true;
  };
  const typesInto = field => {
    if (typing !== field) shared.finish();
    typing = field;
    shared.finish = typed;
    clearTimeout(idle);
    idle = setTimeout(typed, IDLE);
  };
  const chooses = select => {
    const was = before.get(select) ?? [], options = [...select.options];
    const changed = options.filter((option, i) => option.selected !== was[i]);
    const chosen = changed.find(option => option.selected) ?? changed[0];
    options.forEach((option, i) => option.selected = was[i]);
    if (chosen) wish('select', {node: keep(select), text: chosen.label.trim()});
  };

  // ---- what the person does

  const stop = event => event.stopImmediatePropagation();
  const refuse = event => {
    event.preventDefault();
    stop(event);
  };
  const target = event => event.composedPath()[0];
  const native = el => el?.closest?.('select') || takesText(el);  // what works only if the browser hears of it
  let over = null;    // the element that the mouse was on before: a menu may have opened there

  const handlers = {
    mouseover(event) {
      if (idOf(target(event)) >= 0) over = target(event);
    },
    mousedown(event) {
      const el = target(event);
      if (native(el) && event.button === 0) {
        remember(el.closest('select') ?? el);
        stop(event);
      } else refuse(event);
    },
    click(event) {
      const el = target(event);
      if (el.closest?.('select')) return stop(event);
      if (takesText(el) && typing === el) return stop(event);
      if (takesText(el) && placed !== el) {
        shared.finish();
        placed = el;
        return stop(event);
      }
      refuse(event);
      if (event.detail > 1) return;  // the second half of a double click
      shared.finish();
      wish('click', {node: keep(el), over: over ? keep(over) : null});
    },
    contextmenu(event) {
      refuse(event);
      shared.finish();
      wish('right click', {node: keep(target(event))});
    },
    focusin(event) {
      remember(target(event));
    },
    keydown(event) {
      const el = target(event), {key} = event;
      remember(el);
      if (event.altKey && /^(ArrowLeft|ArrowRight|[0-7])$/.test(key)) {
        refuse(event);
        if (key === 'ArrowLeft') return wish('back');
        if (key === 'ArrowRight') return wish('forward');
        return wish('tab', {text: key});
      }
      if (/^Page(Up|Down)$/.test(key)) {
        refuse(event);
        return wish(key === 'PageUp' ? 'up' : 'down');
      }
      if (key === 'Escape') return refuse(event);  // it would close a dialog, which no agent can do
      if (key === 'Tab') typed();
      const newline = el.localName === 'textarea' && !event.ctrlKey;
      if (key === 'Enter' && takesText(el) && !newline) {
        refuse(event);
        if (!typed('search')) wish('enter');
      } else if (/^(Enter| )$/.test(key) && !takesText(el) && el.localName !== 'select') {
        refuse(event);
        if (idOf(el) >= 0) wish('click', {node: keep(el), over: null});
        else if (key === 'Enter') wish('enter');
      } else stop(event);
    },
    beforeinput(event) {
      if (!target(event).isContentEditable) stop(event);
    },
    input(event) {
      const el = target(event);
      if (!el.isContentEditable) stop(event);
      if (takesText(el)) typesInto(el.isContentEditable ? el.closest('[contenteditable]') : el);
    },
    change(event) {
      stop(event);
      if (target(event).localName === 'select') chooses(target(event));
    },
    popstate() {
      wish('moved');  // by the window's own buttons
    },
  };
  for (const type of ['pointerdown', 'pointerup', 'mouseup', 'keyup', 'keypress', 'dblclick']) handlers[type] = stop;
  for (const type of ['auxclick', 'dragstart']) handlers[type] = refuse;

  // An agent presses single letters in rich editors only.
  const isEarly = event => event.type === 'keydown' && event.key.length === 1 && !event.ctrlKey && !event.altKey
    && !event.metaKey && takesText(target(event)) && !target(event).isContentEditable;
  const keepEarly = event => {
    refuse(event);
    shared.early += event.key;
    shared.insert = text => {
      remember(document.activeElement);
      document.execCommand('insertText', false, text);
    };
  };

  const hear = event => {
    const {type} = event;
    if (!event.isTrusted) return;
    if (shared.state !== 'listen' && isEarly(event)) return keepEarly(event);
    if (shared.state === 'act') return;
    if (shared.state === 'listen') handlers[type](event);
    else if (!/^(mouseover|focusin|popstate)$/.test(type)) refuse(event);
  };
  // A page that calls document.open() takes all listeners from its window, so `next` adds them again.
  const listen = () => {
    for (const type of Object.keys(handlers)) window.addEventListener(type, hear, true);
  };
  listen();
})();
