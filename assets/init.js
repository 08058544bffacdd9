// Chromium runs this in every document before the document's own scripts. It records two things that
// page.js needs and that the DOM does not show. Both hang on the window under symbols:
//
//   'click handlers'  the elements that listen for clicks through addEventListener
//   'work'            waits for what the page's scripts have begun and what may change the page:
//                     requests, short timers and animation frames
//
// Each piece of work has an end after which nobody waits for it any more. Work that starts other work is
// followed three levels deep, so an animation that never ends is not waited for.
(() => {
  const later = window.setTimeout.bind(window), now = performance.now.bind(performance);
  const begun = new Map();  // a piece of work -> the time at which waiting for it ends
  let depth = 0;            // of the callback that is running now: 0 for a script of the page
  const begin = ms => {
    const work = {};
    if (depth < 3) begun.set(work, now() + ms);
    return work;
  };

  // ---- timers and animation frames

  const counted = (schedule, pending) => (callback, ...rest) => {
    if (typeof callback !== 'function' || rest[0] > 500) return schedule(callback, ...rest);
    const work = begin(1000), within = depth + 1;
    const id = schedule((...given) => {
      const before = depth;
      pending.delete(id);
      depth = within;
      try {
        callback.apply(window, given);
      } finally {
        depth = before;
        begun.delete(work);
      }
    }, ...rest);
    pending.set(id, work);
    return id;
  };
  const uncounted = (cancel, pending) => id => {
    begun.delete(pending.get(id));
    pending.delete(id);
    cancel(id);
  };
  const timers = new Map(), frames = new Map();
  window.setTimeout = counted(later, timers);
  window.clearTimeout = uncounted(window.clearTimeout.bind(window), timers);
  window.requestAnimationFrame = counted(window.requestAnimationFrame.bind(window), frames);
  window.cancelAnimationFrame = uncounted(window.cancelAnimationFrame.bind(window), frames);

  // ---- requests

  const {fetch} = window, {send} = XMLHttpRequest.prototype;
  window.fetch = (...request) => {
    const work = begin(3000), answer = fetch(...request);
    const end = () => later(() => begun.delete(work), 50);  // the page reads the body after the headers
    answer.then(end, end);
    return answer;
  };
  XMLHttpRequest.prototype.send = function (...body) {
    const work = begin(3000);
    this.addEventListener('loadend', () => later(() => begun.delete(work)));
    return send.apply(this, body);
  };

  // ---- waiting

  const busy = () => [...begun.values()].some(end => now() < end);
  let tired = 0;  // after waiting 3 s in vain, do not wait again for 1 s
  const done = async () => {
    const end = now() + 3000;
    while (busy() && now() > tired) {
      if (now() > end) tired = now() + 1000;
      else await new Promise(wake => later(wake, 10));
    }
  };
  const task = () => new Promise(wake => later(wake));  // resolves one task later
  Object.defineProperty(window, Symbol.for('work'), {value: {done, task}});

  // ---- click handlers

  const heard = new WeakSet(), add = EventTarget.prototype.addEventListener;
  Object.defineProperty(window, Symbol.for('click handlers'), {value: heard});
  EventTarget.prototype.addEventListener = function (type, ...rest) {
    if (/^(click|mousedown|mouseup|pointerdown|pointerup)$/.test(type) && this instanceof Element
        && this !== document.body && this !== document.documentElement) heard.add(this);
    return add.call(this, type, ...rest);
  };
})();
