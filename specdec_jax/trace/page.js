'use strict';
const tip = document.getElementById('tip');
const tokenAt = (node) =>
  node instanceof Element ? node.closest('.b > *') : null;
let shown = null;

function factsOf(token) {
  if (token.title) {
    token.dataset.facts = token.title;
    token.removeAttribute('title');
  }
  return (token.dataset.facts || '').split('\n');
}

function fill(lines) {
  tip.replaceChildren();
  for (const line of lines.slice(0, 2)) {
    const p = document.createElement('p');
    p.textContent = line;
    tip.append(p);
  }
  for (const line of lines.slice(2)) {
    const [name, value] = line.split(' = ');
    const row = document.createElement('div');
    const label = document.createElement('span');
    const meter = document.createElement('meter');
    const number = document.createElement('span');
    label.textContent = name;
    number.textContent = value;
    meter.value = Number.parseFloat(value) || 0;
    meter.setAttribute('aria-hidden', 'true');
    row.append(label, meter, number);
    tip.append(row);
  }
}

function show(token) {
  hide();
  fill(factsOf(token));
  tip.hidden = false;
  token.setAttribute('aria-describedby', 'tip');
  shown = token;
  place();
}

function place() {
  const at = shown && shown.getClientRects()[0];
  if (!at) return hide();
  const size = tip.getBoundingClientRect();
  const width = document.documentElement.clientWidth;
  const left = Math.max(8, Math.min(at.left, width - size.width - 8));
  const below = at.bottom + 8;
  const fits = below + size.height < window.innerHeight;
  tip.style.left = left + 'px';
  tip.style.top = (fits ? below : at.top - size.height - 8) + 'px';
}

function hide() {
  if (shown) shown.removeAttribute('aria-describedby');
  shown = null;
  tip.hidden = true;
}

function focus(token) {
  for (const other of token.closest('.its').querySelectorAll('[tabindex]')) {
    if (other.tabIndex === 0) other.tabIndex = -1;
  }
  token.tabIndex = 0;
  token.focus({ preventScroll: true });
  token.scrollIntoView({ block: 'nearest' });
  show(token);
}

const isVisible = (token) => token.getClientRects().length > 0;
const tokensOf = (item) =>
  [...item.querySelectorAll('.b > *')].filter(isVisible);

function step(token, key) {
  const item = token.closest('li');
  const list = item.parentElement;
  if (key === 'ArrowLeft' || key === 'ArrowRight') {
    const tokens = tokensOf(item);
    const next = tokens[tokens.indexOf(token) + (key === 'ArrowLeft' ? -1 : 1)];
    if (next) return next;
  }
  const items = {
    ArrowLeft: item.previousElementSibling,
    ArrowRight: item.nextElementSibling,
    ArrowUp: item.previousElementSibling,
    ArrowDown: item.nextElementSibling,
    Home: list.firstElementChild,
    End: list.lastElementChild,
  };
  if (!items[key]) return null;
  return tokensOf(items[key]).at(key === 'ArrowLeft' ? -1 : 0);
}

document.addEventListener('pointerover', (event) => {
  const token = tokenAt(event.target);
  if (token) show(token);
});
document.addEventListener('pointerout', (event) => {
  if (tokenAt(event.target)) hide();
});
document.addEventListener('click', (event) => {
  const token = tokenAt(event.target);
  if (token && String(window.getSelection()) === '') focus(token);
});
document.addEventListener('focusin', (event) => {
  const token = tokenAt(event.target);
  if (token) show(token);
});
document.addEventListener('focusout', hide);
document.addEventListener('scroll', () => shown && place(),
  { passive: true });
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') hide();
  const token = tokenAt(event.target);
  if (!token || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = ['ArrowLeft', 'ArrowRight', 'ArrowUp', 'ArrowDown', 'Home',
    'End'];
  if (!keys.includes(event.key)) return;
  event.preventDefault();
  const next = step(token, event.key);
  if (next) focus(next);
});
function open() {
  const target = document.getElementById(location.hash.slice(1));
  const row = target && target.closest('details');
  if (!row || row.open) return;
  row.open = true;
  target.scrollIntoView();
}
window.addEventListener('hashchange', open);
open();
