// What kind of element it is, and its value or state.

const isCustom = el => /-/.test(el.localName);
const kindOf = el => {
  if (keyField(el)) return 'textarea';
  if (isSlider(el)) return 'input';
  const type = el.localName === 'input' ? el.type : '';
  if (/^(checkbox|radio)$/.test(type)) return type;
  if (type) return /^(submit|button|reset|image)$/.test(type) ? 'button' : 'input';
  // A custom element may have its role inside (ElementInternals), where no attribute shows it. Its name tells: an
  // item of a menu has `checked`, too.
  const namesTick = isCustom(el) && /check|radio|switch|toggle/.test(el.localName);
  const isTick = namesTick && !role(el) && typeof propertyOf(el, 'checked') === 'boolean';
  if (isTick) return el.localName.includes('radio') ? 'radio' : 'checkbox';
  const named = role(el).replace('link', 'a').replace('switch', 'checkbox').replace('textbox', 'input');
  if (/^(checkbox|radio|button|a|input)$/.test(named)) return named;
  return drawnSwitch(el) ? 'checkbox' : el.localName;
};

// The last words of an element's classes: of "nav-item nav-item--active is-open", item, active and open. A class
// that denies something, or says it about something else, is no state.
const stateWords = el => [...el.classList]
  .filter(name => !/^(has|no|not|non)[-_]|(^|[-_])(after|before|next|prev)[-_]|[:[]/.test(name))
  .filter(name => !rulesOf(el.ownerDocument).heldLooks.has(name))
  .map(name => name.split(/[-_]+/).pop().toLowerCase());
// A quick look first: most elements have none of these words, or parts of words.
const STATES = /unread|selected|checked|active|current|pressed|liked|starred|marked|rited|voted|saved/i;
const PRESSED = /^(pressed|liked|starred|bookmarked|favou?rited|upvoted|downvoted|marked|saved)$/;
const SELECTED = '[data-selected=true],[data-checked=true]';
// Whether it fills a chosen cell, as the button of a calendar's day does.
const IN_CHOSEN_CELL = ':is(td,[role=gridcell])[aria-selected=true] > :only-child,'
  + ':is([class$="--selected"],[class*="--selected "]):not([class*="not--"]) > button:only-child';
const fillsChosen = el => el.matches(IN_CHOSEN_CELL) && tidy(el.textContent) === tidy(parentOf(el).textContent);
// What they say about an element, or about the list item that it fills.
const stateOf = el => {
  const item = el.matches('li > :only-child') ? parentOf(el) : el;
  if (el.matches(SELECTED) || fillsChosen(el) || item.matches(SELECTED)) return 'selected';
  if (!STATES.test(el.classList) && !STATES.test(item.classList)) return '';
  const words = [...stateWords(el), ...stateWords(item)];
  const says = word => words.includes(word);
  if (says('unread')) return 'unread';
  if (says('selected') || says('checked')) return 'selected';
  if (kindOf(el) === 'button' && words.some(word => PRESSED.test(word))) return 'pressed';
  if (!says('active') && !says('current') || !parentOf(item)) return '';
  // "active" may also mean that a person or a plan is: then all rows of a list say so.
  const alike = [...elementsIn(parentOf(item))].filter(other => other.localName === item.localName);
  const all = alike.every(other => /active|current/.test(attributeOf(other, 'class')));
  return all && alike.length > 1 ? '' : 'selected';
};

// How a column is sorted by its head's classes: "_ascend" in Magento, "sorting_desc". Both together mean neither.
const sortedByClass = (head, el) => {
  if (head.localName !== 'th') return '';
  const words = [...stateWords(head), ...stateWords(el)];
  const up = words.some(word => /^asc(end|ending)?$/.test(word));
  const down = words.some(word => /^desc(end|ending)?$/.test(word));
  if (up === down) return '';
  return up ? 'ascending' : 'descending';
};

// The options of a dropdown that people see.
const optionsOf = el => [...el.options].filter(option =>
  !option.closest('optgroup[hidden]') && getComputedStyle(option).display !== 'none');
// An option as a dropdown offers it, with its group if another one is called the same.
const optionsCalled = remembered(el => Map.groupBy(el.options, option => tidy(option.label)));
const offered = (el, option) => {
  const name = tidy(option.label);
  const group = closest(option, 'optgroup');
  return group && optionsCalled(el).get(name).length > 1 ? `${tidy(group.label)}: ${name}` : name;
};
const listed = (el, option) => offered(el, option) + (matches(option, ':disabled') ? ' (disabled)' : '');

// What a control shows inside, if its name comes from elsewhere: the choice of a drawn dropdown, a number beside
// a label such as "Cart", the hour on a button that is called "Book". A small word alone may name an icon.
const chosenIn = el => {
  if (!el.hasAttribute('aria-label') && !el.hasAttribute('aria-labelledby')) return '';
  const text = attribute(el, 'aria-valuetext') || attribute(el, 'aria-valuenow') || seenText(el, FIELDS + ',svg');
  const opensList = /^(menu|listbox)$/.test(attribute(el, 'aria-haspopup'));
  const holdsValue = opensList || /^(combobox|spinbutton)$/.test(role(el));
  const says = /(^|\W)\d|\p{L}\s|\p{Lu}\p{L}{2}/u.test(text);
  const named = nameOf(el).toLowerCase().includes(text.toLowerCase());
  return named || !holdsValue && !says ? '' : cut(text, 300);
};

// What a field offers, at most sixty texts of it.
const choiceOf = texts => {
  const first = texts.slice(0, 60).join(' | ');
  const rest = texts.length - 60;
  return rest > 0 ? `${first} | ... ${rest} more` : first;
};

// What a drawn slider, or a bar that shows progress, stands at.
const amountOf = el => attribute(el, 'aria-valuetext') || attribute(el, 'aria-valuenow');

// Whether an element says that it is checked, pressed, ..., by ARIA or, if it is a custom element, from inside.
const holds = (el, state) => !/^(false|undefined)?$/.test(el.getAttribute(`aria-${state}`) ?? '')
  || isCustom(el) && isSelector(`:state(${state})`) && el.matches(`:state(${state})`);

// Whether a checkbox, a radio button or a switch is on.
const isOn = el => {
  // A switch that is drawn elsewhere: its script's own word counts.
  const drawnElsewhere = el.matches('[role=switch][aria-checked]') && !el.checkVisibility({opacityProperty: true});
  if (drawnElsewhere) return holds(el, 'checked');
  const checked = propertyOf(el, 'checked');
  if (typeof checked === 'boolean') return checked;

  const words = drawnSwitch(el) ? stateWords(drawnSwitch(el)) : [];
  return words.some(word => /^(on|active|checked|selected|enabled)$/.test(word))
    || ['checked', 'pressed', 'selected'].some(state => holds(el, state));
};

const valueOf = el => {
  const kind = kindOf(el);
  if (/^(checkbox|radio)$/.test(kind)) {
    if (propertyOf(el, 'indeterminate') || el.getAttribute('aria-checked') === 'mixed') return 'mixed';
    return isOn(el) ? 'on' : 'off';
  }
  if (isSlider(el)) return amountOf(el);
  if (kind === 'select') {
    const textOf = option => offered(el, option);
    const chosen = [...el.selectedOptions].map(textOf).join(' | ');
    return tidy(`${chosen} (${choiceOf(optionsOf(el).map(option => listed(el, option)))})`);
  }
  if (keyField(el)) return cut(tidy(el.innerText), 500);
  const drawsText = kind === 'input' && typeof propertyOf(el, 'value') !== 'string';  // a textbox for reading alone
  if (el.isContentEditable || drawsText) {
    const labeled = attribute(el, 'aria-label') || textOfIds(el, 'aria-labelledby');
    const text = tidy(el.innerText);
    if (!labeled || text === attribute(el, 'aria-placeholder')) return '';  // without a label, its text is its name
    return cut(text, 500);
  }
  if (kind !== 'input' && kind !== 'textarea') {
    const choice = chosenIn(el);
    const told = name => attribute(el, `aria-${name}`) === 'mixed' ? `partly ${name}` : name;
    const states = ['expanded', 'selected', 'checked', 'pressed', 'current'];
    const box = el.matches('[role=tab] > :only-child') ? parentOf(el) : el;  // a tab may hold no more than a link
    const ariaStates = states.filter(state => holds(el, state) || holds(box, state)).map(told);
    const chosen = ['selected', 'checked', 'pressed', 'current'].map(name => `[aria-${name}]`).join(',');
    const hasAria = el.matches(chosen) || box.matches(chosen);
    const byClass = stateOf(el);
    const classState = hasAria && byClass !== 'unread' ? '' : byClass;  // ARIA outranks classes
    const head = closest(el, 'th') ?? el;
    const sorted = attribute(head, 'aria-sort').replace('none', '') || sortedByClass(head, el);
    return [choice, ...ariaStates, classState, sorted].filter(word => word).join(', ');
  }
  if (el.type === 'password') return el.value ? '****' : '';
  const said = el.type === 'range' && attribute(el, 'aria-valuetext');
  if (said && !said.split(' ').includes(el.value)) return `${el.value} (${cut(said, 100)})`;
  const value = cut(tidy(el.value), 500), example = tidy(el.placeholder);
  const suggestions = [...el.list?.options ?? []].map(option => tidy(option.value));
  if (suggestions.length) return tidy(`${value} (${choiceOf(suggestions)})`);
  if (value || !example || nameOf(el).includes(example)) return value;
  return `(${cut(example, 100)})`;  // people see it in the field as long as that is empty
};

// How far a bar is: 37 of 100.
const barOf = el => {
  if (el.matches('progress:indeterminate')) return '';
  if (el.matches('progress,meter')) return `${Math.round(100 * el.value) / 100} of ${el.max}`;
  if (!/^(progressbar|meter)$/.test(role(el)) || !amountOf(el)) return '';
  return attribute(el, 'aria-valuetext') || `${amountOf(el)} of ${attribute(el, 'aria-valuemax') || 100}`;
};

// What an element without text says: its label, how far it is, or all its classes if it is a rating made of stars.
const pictured = el => {
  const classes = [el, ...el.querySelectorAll('[class]')].map(each => each.getAttribute('class'));
  const said = tidy(`${ariaOrTooltip(el)} ${barOf(el)}`);
  return said || (/\b(ratings?|stars)\b/.test(classes[0]) ? tidy(classes.join(' ')) : '');
};
