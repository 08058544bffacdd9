// Chromium runs this in every document before the document's own scripts. It records what the files beside it need
// and the DOM does not show. All of it hangs on the window under symbols (frames add to the page's first three):
//
//   'click handlers'  the elements that listen for clicks through addEventListener
//   'modals'          the dialogs that were opened as modal ones: no selector finds those in shadow roots
//   'refusals'        what the browser refused without a word: element -> a function that says why, or '' if the
//                     reason is gone
//   'work'            waits for what the page's scripts have begun and what may change the page: requests,
//                     scripts and styles, workers and sockets, short timers, animation frames, transitions
//
// Callbacks schedule callbacks, and an animation or a poll does so without end. We follow such a chain
// until its delays sum to one second (a request or a frame counts as a short delay), and wait no longer.
//
// A frame or a tab begins with an empty document. If a script uses its window before the next document comes, the
// next one gets that window, and this file does not run again. So nothing here may hold on to the document.
(() => {
  const later = window.setTimeout.bind(window), now = performance.now.bind(performance);
  const BUDGET = 1000;    // of a chain, in ms; events, scripts and timers of more than 500 ms begin a new one
  const begun = new Map();  // a piece of work -> the time at which waiting for it ends
  let budget = BUDGET;      // what is left to the chain of the callback that is running now

  const begin = (cost, patience = 3000) => {
    const work = {left: budget - cost};
    if (work.left >= 0) begun.set(work, now() + patience);
    return work;
  };
  // What runs now goes on with the chain of this work, and so do the callbacks of promises that it fulfills:
  // they run right afterwards, up to twenty in a row.
  const end = async work => {
    begun.delete(work);
    budget = work.left;
    for (let i = 0; i < 20; i++) await null;
    budget = BUDGET;
  };

  // ---- timers and animation frames

  const counted = (schedule, pending, costOf) => (callback, ...rest) => {
    const cost = costOf(rest[0]);
    if (typeof callback !== 'function' || cost > 500) return schedule(callback, ...rest);
    const work = begin(cost);
    const id = schedule((...given) => {
      pending.delete(id);
      end(work);
      callback.apply(window, given);
    }, ...rest);
    pending.set(id, work);
    return id;
  };
  const uncounted = (cancel, pending) => id => {
    begun.delete(pending.get(id));
    pending.delete(id);
    cancel(id);
  };
  const delay = ms => Math.max(4, +ms || 0);
  for (const [schedule, cancel, costOf] of [
    ['setTimeout', 'clearTimeout', delay],
    ['requestAnimationFrame', 'cancelAnimationFrame', () => 30],
    ['requestIdleCallback', 'cancelIdleCallback', options => options?.timeout ?? Infinity]]) {
    const pending = new Map();
    window[schedule] = counted(window[schedule].bind(window), pending, costOf);
    window[cancel] = uncounted(window[cancel].bind(window), pending);
  }
  window.clearInterval = window.clearTimeout;  // either ends both
  // An interval itself is not waited for, only what it begins as long as the budget lasts.
  const repeat = window.setInterval.bind(window);
  window.setInterval = (callback, ms, ...rest) => {
    const work = {left: budget};
    return repeat(typeof callback !== 'function' ? callback : (...given) => {
      work.left -= delay(ms);
      end(work);
      callback.apply(window, given);
    }, ms, ...rest);
  };

  // ---- requests

  const promised = (owner, name, cost, patience) => {
    const ask = owner[name];
    owner[name] = function (...given) {
      const work = begin(cost, patience), answer = ask.apply(this, given);
      answer.then(() => end(work), () => end(work));
      return answer;
    };
  };
  promised(window, 'fetch', 100);
  for (const read of ['arrayBuffer', 'blob', 'json', 'text']) promised(Response.prototype, read, 0);
  // An answer may come in pieces. Nobody knows which is the last: a stream of news never ends.
  promised(ReadableStreamDefaultReader.prototype, 'read', 20, 500);

  const {send} = XMLHttpRequest.prototype;
  XMLHttpRequest.prototype.send = function (...body) {
    const work = begin(100);
    this.addEventListener('readystatechange', () => {
      if (this.readyState === 4) budget = work.left;  // before the page's listeners, which all run at once
    }, true);
    this.addEventListener('loadend', () => end(work), {once: true});
    return send.apply(this, body);
  };

  // ---- workers and sockets: the next message from one that was sent something counts as its answer

  const answering = (type, name, waits = () => true) => {
    const ask = type.prototype[name], unanswered = new WeakMap();  // what each was sent, the oldest first
    const forgetOld = queue => {
      while (queue[0]?.until < now()) begun.delete(queue.shift());  // nothing came
    };
    const queueOf = asked => {
      if (!unanswered.has(asked)) {
        const queue = [];
        unanswered.set(asked, queue);
        asked.addEventListener('message', () => {
          forgetOld(queue);
          if (queue.length) end(queue.shift());
        }, {capture: true});
      }
      return unanswered.get(asked);
    };
    type.prototype[name] = function (...given) {
      if (waits(this)) {
        const work = begin(100, 500), queue = queueOf(this);
        work.until = now() + 500;
        forgetOld(queue);  // or what is never answered would pile up
        queue.push(work);
      }
      return ask.apply(this, given);
    };
  };
  const ports = new WeakSet();  // of shared workers; others, such as a scheduler's, are used without end
  const {get: portOf} = Object.getOwnPropertyDescriptor(SharedWorker.prototype, 'port');
  Object.defineProperty(SharedWorker.prototype, 'port', {configurable: true, get() {
    const port = portOf.call(this);
    ports.add(port);
    return port;
  }});
  answering(Worker, 'postMessage');
  answering(WebSocket, 'send');
  answering(MessagePort, 'postMessage', port => ports.has(port));

  // ---- scripts, modules, style sheets

  // browser.py asks Chromium for the page's files. Those without a MIME type are still on their way.
  const files = new Set();  // addresses of those that have come or are waited for
  new PerformanceObserver(list => {
    for (const {name} of list.getEntries()) {
      files.add(name);
      begun.delete(name);
    }
  }).observe({type: 'resource'});
  const expect = resources => {
    const news = resources.filter(({url, type, mimeType}) =>
      /^(Script|Stylesheet)$/.test(type) && !mimeType && !files.has(url));
    for (const {url} of news) {
      files.add(url);
      begun.set(url, now() + 3000);
    }
    return news.length > 0;
  };

  // ---- transitions and animations that move, show or hide something and have an end

  const restless = new WeakSet();  // what still moved after three seconds
  const {getAnimations, getElementsByTagName} = Document.prototype;  // an image can take such a name from a document
  const inShadow = ShadowRoot.prototype.getAnimations;
  let shadowRoots = [];  // as WeakRefs: the document does not tell of the animations in them
  const animations = () => {
    shadowRoots = shadowRoots.filter(kept => kept.deref());
    const all = getAnimations.call(document);
    for (const kept of shadowRoots) all.push(...inShadow.call(kept.deref()));
    return all;
  };
  const moving = () => animations().filter(({playState, transitionProperty, effect}) =>
    playState === 'running' && !/color|shadow/.test(transitionProperty) && !restless.has(effect.target)
    && effect.getComputedTiming().endTime < 3000);

  const {startViewTransition} = Document.prototype;  // Chromium has it since version 111
  if (startViewTransition) Document.prototype.startViewTransition = function (...given) {
    const work = begin(30), transition = startViewTransition.apply(this, given);
    const over = () => end(work);
    transition.finished.then(over, over);
    return transition;
  };

  // ---- waiting

  const frames = () => [...getElementsByTagName.call(document, 'iframe')];
  const busy = () => [...begun.values()].some(until => now() < until) || moving().length > 0
    || patient && frames().some(frame => frame.contentDocument && frame.contentWindow[Symbol.for('work')]?.busy());
  let tiredUntil = 0;  // after waiting in vain, nothing is waited for until this time
  let patient = true;  // whether frames are waited for as well: not after waiting in vain
  const done = async (ms = 3000) => {
    const until = now() + ms;
    while (now() > tiredUntil && busy()) {
      if (now() > until) {
        tiredUntil = now() + 1000;
        for (const {effect} of moving()) restless.add(effect.target);
        patient = false;
      } else await new Promise(wake => later(wake, 10));
    }
  };
  // resources: those of the page that Chromium knows, once somebody has asked it. Returns whether to ask.
  // Browsers submit a form one task after the click, so let one task pass before we look.
  const settled = async (resources, ms) => {
    const more = resources ? expect(resources) : document.scripts.length > 0;
    await new Promise(wake => later(wake));
    await done(ms);
    return more;
  };
  Object.defineProperty(window, Symbol.for('work'), {value: {done, settled, busy}});

  // ---- service workers

  // They are off. A page that registers one gets a registration that never has a worker.
  let container = null;
  try {
    container = navigator.serviceWorker;  // undefined on http, except on this machine
  } catch { /* a sandboxed frame may not ask */ }
  if (container) {
    const registration = Object.assign(new EventTarget(), {
      scope: `${location.origin}/`,
      active: null,
      installing: null,
      waiting: null,
      update: async () => registration,
      unregister: async () => true,
    });
    Object.defineProperty(container, 'register', {value: async () => registration, writable: false});
    Object.defineProperty(container, 'ready', {value: Promise.resolve(registration)});
  }

  // ---- click handlers

  const shared = (name, value) => {  // a frame adds to its page's, so that they are all in one place
    try {
      value = window.top[Symbol.for(name)] ?? value;
    } catch { /* the page is another site's */ }
    Object.defineProperty(window, Symbol.for(name), {value});
    return value;
  };
  const heard = shared('click handlers', new WeakSet()), add = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (type, ...rest) {
    if (/^(click|mousedown|mouseup|pointerdown|pointerup)$/.test(type) && this instanceof Element
        && this !== document.body && this !== document.documentElement) heard.add(this);
    return add.call(this, type, ...rest);
  };

  // ---- modal dialogs

  const modals = shared('modals', new Set()), {showModal} = HTMLDialogElement.prototype;
  HTMLDialogElement.prototype.showModal = function () {
    modals.add(this);
    return showModal.call(this);
  };

  // ---- refusals

  const refusals = shared('refusals', new Map());
  // checkValidity asks without a word to people. It counts only during a click or when a form is sent.
  let silent = false;
  for (const type of [HTMLFormElement, HTMLInputElement, HTMLSelectElement, HTMLTextAreaElement, ElementInternals]) {
    const {checkValidity} = type.prototype;
    type.prototype.checkValidity = function () {
      const before = silent;
      silent = !/^(submit|click)$/.test(window.event?.type);
      try {
        return checkValidity.call(this);
      } finally {
        silent = before;
      }
    };
  }
  const refused = ({target}) => {
    if (silent) return;
    const {patternMismatch, customError} = target.validity ?? {};
    const hint = patternMismatch && !customError ? target.title : '';
    const why = `${target.validationMessage ?? 'it is not valid'} ${hint}`;
    refusals.set(target, () => target.validity?.valid ? '' : why);
  };
  // In a window that got a second document, Chromium calls no listener of the capture phase (and recorder.js has
  // many) until one is added.
  const listen = () => {
    window.removeEventListener('invalid', refused, true);
    window.addEventListener('invalid', refused, true);
  };
  listen();
  window.addEventListener('DOMContentLoaded', listen);
  const {attachShadow} = Element.prototype;
  Element.prototype.attachShadow = function (...given) {
    const root = attachShadow.apply(this, given);
    shadowRoots.push(new WeakRef(root));
    add.call(root, 'invalid', refused, true);  // it does not leave the shadow root; declared ones stay unheard
    return root;
  };

  const open = window.open.bind(window);
  let windows = 0;  // that scripts have opened since the last click: hundreds take gigabytes
  window.open = (...given) => {
    windows++;
    if (windows <= 8) return open(...given);
    refusals.set(null, () => 'a ninth window');
    return null;
  };

  window.addEventListener('click', event => {
    windows = event.isTrusted ? 0 : windows;
    const link = event.target.closest?.('a[href]:not([download])');
    if (link?.protocol && !event.defaultPrevented && !/^(https?|blob|about|javascript):$/.test(link.protocol))
      refusals.set(link, () => `it opens no ${link.protocol} links`);
  });
})();
