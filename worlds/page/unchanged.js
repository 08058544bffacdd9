// Resolves when the page has not changed for a second, after three seconds at the latest. A page
// without scripts does not change.
new Promise(done => {
  if (!document.scripts.length) return done();
  let timer = setTimeout(done, 1000);
  const again = () => { clearTimeout(timer); timer = setTimeout(done, 1000); };
  const everything = {subtree: true, childList: true, characterData: true, attributes: true};
  new MutationObserver(again).observe(document, everything);
  setTimeout(done, 3000);
})
