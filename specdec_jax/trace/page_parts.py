"""The style sheet and the script of the page that `trace_html` writes."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --line: #dde1e7; --ink: #1c2430;
  --soft: #586273; --accent: #2458c5; --focus: #2458c5;
  --accepted: #11662f; --accepted-bg: #e2f4e6;
  --rejected: #b3201c; --rejected-bg: #fdeaea;
  --next: #1d4fb8; --next-bg: #e4edfd;
  --gone: #5d6572; --gone-bg: #eff1f4;
  --bar: #2e8b4f; --bar-next: #4a7fe0; --track: #e6e9ee;
  --warn: #7a4b00; --warn-bg: #fff3d6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2029; --line: #303948; --ink: #e4e9f0;
    --soft: #9ea9b9; --accent: #8ab4ff; --focus: #8ab4ff;
    --accepted: #7fdc9a; --accepted-bg: #17331f;
    --rejected: #ff928c; --rejected-bg: #3d1c1e;
    --next: #9dc1ff; --next-bg: #1a2d52;
    --gone: #939dac; --gone-bg: #252c37;
    --bar: #4fb573; --bar-next: #6d9df5; --track: #2b3340;
    --warn: #ffd483; --warn-bg: #3b2e10;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 6rem; max-width: 68rem;
  background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif;
}
h1 { margin: 0; font-size: 1.5rem; letter-spacing: -.01em; }
h2 { margin: 0; font-size: 1.05rem; display: inline; }
h3 { margin: 0 0 .5rem; font-size: .8rem; font-weight: 600;
  color: var(--soft); }
a { color: var(--accent); }
.sub { margin: .25rem 0 1rem; color: var(--soft); }
.sub b { color: var(--ink); font-weight: 600; overflow-wrap: anywhere; }
.facts { display: flex; flex-wrap: wrap; gap: .35rem 1.5rem; margin: 0; }
.facts div { display: flex; gap: .4rem; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; font-weight: 500; overflow-wrap: anywhere; }
.warn { margin: 1rem 0 0; padding: .5rem .8rem; border-radius: .4rem;
  color: var(--warn); background: var(--warn-bg); }
.card { margin-top: 1.25rem; padding: 1rem 1.2rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .6rem; }
.tiles { display: flex; flex-wrap: wrap; gap: 1rem 2.75rem; margin: 0; }
.tiles dt { color: var(--soft); font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.55rem; font-weight: 600;
  line-height: 1.25; font-variant-numeric: tabular-nums; }
.tiles dd small { font-size: .8rem; font-weight: 400; color: var(--soft); }
.chart, .wide { margin-top: 1.2rem; overflow-x: auto; }
.b { tab-size: 2; }
svg text { fill: var(--ink); font-size: 12px; text-anchor: middle; }
svg .minor { fill: var(--soft); font-size: 11px; }
svg .track { fill: var(--track); }
svg .bar { fill: var(--bar); }
svg .untested { fill: var(--soft); }
svg .bar-next { fill: var(--bar-next); }
table { border-collapse: collapse; width: 100%;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: .8rem;
  font-weight: 600; padding-bottom: .3rem; }
th, td { text-align: right; padding: .3rem .8rem .3rem 0;
  border-top: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
th { font-weight: 500; color: var(--soft); }
td svg { vertical-align: middle; }
.bar-top { position: sticky; top: 0; z-index: 2; display: flex;
  flex-wrap: wrap; gap: .5rem 1.5rem; align-items: center;
  margin-top: 1.25rem; padding: .6rem 0; background: var(--page);
  border-bottom: 1px solid var(--line); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem .5rem; margin: 0;
  padding: 0; list-style: none; flex: 1 1 20rem; }
.views { display: flex; flex-wrap: wrap; gap: .3rem 1rem; border: 0;
  padding: 0; margin: 0; }
.views label { display: inline-flex; gap: .35rem; align-items: center; }
.row > summary { cursor: pointer; }
.row > summary span { color: var(--soft); margin-left: .5rem; }
.strip { display: block; max-width: 100%; margin: .8rem 0 .2rem; }
.strip a:hover rect, .strip a:focus rect { fill: var(--ink); }
.hint { margin: 0 0 .6rem; color: var(--soft); font-size: .8rem; }
.prompt { margin: .8rem 0; }
.prompt summary { cursor: pointer; color: var(--soft); }
.prompt pre { margin: .4rem 0 0; padding: .6rem .8rem; max-height: 14rem;
  overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: inherit; background: var(--gone-bg); border-radius: .4rem; }
.its { list-style: none; margin: 0; padding: 0; }
.its li { display: grid; grid-template-columns: 3.2rem 2.6rem 1fr;
  align-items: baseline; padding: .12rem 0; border-radius: .3rem;
  scroll-margin-top: 6rem; content-visibility: auto;
  contain-intrinsic-size: auto 1.9rem; }
.its li:target { background: var(--gone-bg); }
.n, .c { font-size: .8rem; text-align: right; padding-right: .8rem;
  color: var(--soft); font-variant-numeric: tabular-nums; }
.n { text-decoration: none; }
.n:hover { text-decoration: underline; }
.b { min-width: 0; line-height: 1.75; }
.b > *, .legend .k { white-space: pre-wrap; overflow-wrap: anywhere;
  unicode-bidi: isolate; padding: .1em .12em; margin-right: 1px;
  border-radius: .25em; text-decoration: none;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.b > * { cursor: default; scroll-margin: 6rem 0 11rem; }
.b > :focus-visible, .strip a:focus-visible { outline: 2px solid
  var(--focus); outline-offset: 1px; }
.b > :hover { box-shadow: 0 0 0 1px currentColor; }
.accepted { color: var(--accepted); background: var(--accepted-bg); }
.rejected { color: var(--rejected); background: var(--rejected-bg); }
.b > .rejected, .legend .rejected { text-decoration: line-through; }
.correction, .bonus, .plain { color: var(--next);
  background: var(--next-bg); }
.correction { font-weight: 600; }
.b > .bonus, .legend .bonus { text-decoration: underline;
  text-underline-offset: .2em; }
.discarded, .truncated { color: var(--gone); background: var(--gone-bg); }
.b > .discarded, .legend .discarded { text-decoration: line-through; }
.b > .truncated, .legend .truncated { text-decoration: line-through dotted;
  font-style: italic; }
.w { font-style: normal; opacity: .6; }
.b br { display: none; }
body:has(#no-drafts:not(:checked)) .b > :is(.rejected, .discarded,
  .truncated) { display: none; }
body:has(#as-text:checked) .its { line-height: 2; }
body:has(#as-text:checked) .its :is(li, .b) { display: inline;
  content-visibility: visible; padding: 0; }
body:has(#as-text:checked) .its :is(.n, .c, .discarded, .truncated) {
  display: none; }
body:has(#as-text:checked) .b br { display: inline; }
#tip { position: fixed; z-index: 3; top: 0; left: 0; width: 20rem;
  max-width: 95vw; padding: .6rem .8rem; pointer-events: none;
  background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; box-shadow: 0 6px 24px rgb(0 0 0 / .22);
  font-size: .85rem; }
#tip[hidden] { display: none; }
#tip p { margin: 0 0 .3rem; white-space: pre-wrap; overflow-wrap: anywhere; }
#tip p:first-child { font-weight: 600; margin: 0; }
#tip div { display: grid; grid-template-columns: 5.4rem 1fr 4.4rem;
  gap: .5rem; align-items: center; font-variant-numeric: tabular-nums; }
#tip div > :last-child { text-align: right; }
#tip meter { display: block; width: 100%; height: .5rem; border: 0;
  border-radius: .25rem; background: var(--track); appearance: none; }
#tip meter::-webkit-meter-bar { height: .5rem; border: 0;
  border-radius: .25rem; background: var(--track); }
#tip meter::-webkit-meter-optimum-value { border-radius: .25rem;
  background: var(--bar-next); }
#tip meter::-moz-meter-bar { border-radius: .25rem;
  background: var(--bar-next); }
@media (max-width: 40rem) {
  .its li { grid-template-columns: 2.2rem 2.2rem 1fr; }
}
@media print {
  .bar-top { position: static; }
  .views, .hint { display: none; }
}
"""

# Titles show without the script; with it they become one tooltip that keyboard
# focus opens too, and the arrow keys walk over tokens and iterations.
SCRIPT = """
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
  return (token.dataset.facts || '').split('\\n');
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
"""
