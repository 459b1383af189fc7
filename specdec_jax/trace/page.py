"""Traces as one HTML page that needs nothing else, not even a network.

Tokens show p, q and u on hover and on focus. Whatever a token's text is, it is
escaped, and the page's policy allows no script but its own.
"""

import base64
import functools
import hashlib
import html
import json
import string

from specdec_jax.trace import recording, wording
from specdec_jax.trace.recording import Record, Summary
from specdec_jax.trace.storage import Trace

# Elements that say without style sheet or eyes what a verdict means.
_ELEMENTS = {
  **dict.fromkeys(('rejected', 'discarded', 'truncated'), 'del'),
  'correction': 'ins',
}
# With more rows than this, only the first one starts unfolded.
_MAX_OPEN_ROWS = 4
_LONG_PROMPT = 400
_INTERRUPTED = (
  '<p class="warn" role="note">The run did not reach its end: this is what was '
  'recorded before it stopped.</p>\n'
)
_HINT = (
  '<p class="hint">Hover over a token, or press Tab and then the arrow keys, '
  'for p, q and u.</p>\n'
)


def render(traced: Trace, *, title: str = 'Speculative decoding trace') -> str:
  """The page as a string; write it as UTF-8."""
  # The script makes one tooltip of all titles, that keyboard focus opens too,
  # and lets the arrow keys walk over tokens and iterations.
  style, script = wording.asset('page.css'), wording.asset('page.js')
  header, summary = traced.header, traced.summarize()
  return string.Template(wording.asset('page.html')).substitute(
    style=style,
    style_digest=_digest(style),
    script=script,
    script_digest=_digest(script),
    title=_escape(title),
    drafter=_escape(header['drafter']),
    target=_escape(header['target']),
    facts=_facts(header),
    warning=_INTERRUPTED * traced.is_interrupted,
    tiles=_tiles(summary),
    chart=_acceptance_chart(summary),
    table=_table(traced),
    legend=_legend(traced),
    rows=''.join(_row(traced, row) for row in traced.rows),
  )


def _facts(header: Record) -> str:
  named = ('type', 'version', 'target', 'drafter')
  text = lambda value: value if isinstance(value, str) else json.dumps(value)
  shown = {
    _escape(name.replace('_', ' ')): _escape(text(value))
    for name, value in header.items()
    if name not in named and value is not None
  }
  return _terms(shown)


def _tiles(summary: Summary) -> str:
  accepted, tested = sum(summary.num_accepted), sum(summary.num_tested)
  tiles = {
    'Tokens': f'{summary.num_tokens:,}',
    'Target runs': f'{summary.num_target_runs:,}',
    'Block efficiency': f'{_rate(summary.block_efficiency)} <small>tokens per '
    'target run</small>',
    'Alpha': f'{_rate(summary.alpha)} <small>{accepted:,} of {tested:,} tested '
    'drafts accepted</small>',
  }
  return _terms(tiles)


def _terms(named: dict[str, str]) -> str:
  return ''.join(
    f'<div><dt>{name}</dt><dd>{value}</dd></div>'
    for name, value in named.items()
  )


def _acceptance_chart(summary: Summary) -> str:
  rates = summary.alpha_by_position
  if not any(summary.num_tested):
    return ''
  step, height = (52 if len(rates) <= 12 else 34), 84
  bars = []
  for i, rate in enumerate(rates):
    x, middle = i * step + 4, i * step + step / 2
    tested = summary.num_tested[i]
    bars.append(
      f'<g><title>{summary.num_accepted[i]:,} of {tested:,} tested tokens '
      f'accepted at draft position {i + 1}</title>'
      f'{_bar(rate, x, 16, step - 8, height, radius=3)}'
      f'<text x="{middle}" y="11">{_percent(rate)}</text>'
      f'<text x="{middle}" y="115">{i + 1}</text>'
      f'<text class="minor" x="{middle}" y="130">{tested:,}</text></g>'
    )
  width = step * len(rates)
  return (
    '<div class="chart"><h3>Acceptance by draft position, given that the '
    'tokens before it passed (below: position, and how many were tested)</h3>'
    f'<svg role="img" width="{width}" height="134" viewBox="0 0 {width} 134" '
    f'aria-label="Acceptance by draft position: {_rate_list(rates)}">'
    f'{"".join(bars)}</svg></div>\n'
  )


def _bar(
  rate: float | None, x: int, y: int, width: int, height: int, radius: int = 0
) -> str:
  """A share of a track; a dash where nothing was tested."""
  if rate is None:
    middle = y + height / 2 - 1
    return (
      f'<rect class="untested" x="{x}" y="{middle:g}" width="{width}" '
      'height="2"/>'
    )
  filled = height * rate
  return ''.join(
    f'<rect class="{kind}" x="{x}" y="{y + height - size:.1f}" '
    f'width="{width}" height="{size:.1f}" rx="{radius}"/>'
    for kind, size in (('track', height), ('bar', filled))
  )


def _table(traced: Trace) -> str:
  """One line per row, where there are several."""
  if len(traced.rows) < 2:
    return ''
  lines = []
  for row in traced.rows:
    summary = traced.summarize(row)
    lines.append(
      f'<tr><td><a href="#{_row_id(row)}">{_row_name(row)}</a></td>'
      f'<td>{summary.num_tokens:,}</td><td>{summary.num_target_runs:,}</td>'
      f'<td>{_rate(summary.block_efficiency)}</td>'
      f'<td>{_rate(summary.alpha)}</td><td>{_sparkline(summary)}</td></tr>'
    )
  names = ['Row', 'Tokens', 'Target runs', 'Block efficiency', 'Alpha']
  names.append('Acceptance by position')
  columns = ''.join(f'<th scope="col">{name}</th>' for name in names)
  return (
    '<div class="wide" tabindex="0" role="region" aria-label="By row">\n'
    f'<table><caption>By row</caption><thead><tr>{columns}</tr></thead>'
    f'<tbody>{"".join(lines)}</tbody></table></div>\n'
  )


def _sparkline(summary: Summary) -> str:
  rates = summary.alpha_by_position
  bars = ''.join(_bar(rate, 8 * i, 0, 6, 20) for i, rate in enumerate(rates))
  return (
    f'<svg role="img" width="{8 * len(rates)}" height="20" '
    f'aria-label="{_rate_list(rates)}">{bars}</svg>'
  )


def _legend(traced: Trace) -> str:
  return ''.join(
    f'<li><span class="k {verdict}" title="{html.escape(meaning)}">{verdict}'
    '</span></li>'
    for verdict, meaning in wording.MEANINGS.items()
    if verdict in traced.verdicts
  )


def _row(traced: Trace, row: int) -> str:
  records = traced.iterations.get(row, [])
  is_open = len(traced.rows) <= _MAX_OPEN_ROWS or row == traced.rows[0]
  line = wording.summary_line(traced.summarize(row))
  items = [_iteration(row, each, each is records[0]) for each in records]
  return (
    f'<details class="card row" id="{_row_id(row)}"{" open" * is_open}>'
    f'<summary><h2>{_row_name(row)}</h2><span>{_escape(line)}</span>'
    '</summary>\n'
    f'{_prompt(traced.prompts.get(row))}{_strip(row, records)}'
    f'{_HINT * bool(records)}<ol class="its">\n{"".join(items)}</ol>\n'
    '</details>\n'
  )


def _prompt(record: Record | None) -> str:
  if record is None:
    return ''
  # Behind an encoder, the decoder begins with a start token alone.
  is_encoder = 'num_encoder_tokens' in record
  size = record['num_encoder_tokens' if is_encoder else 'num_tokens']
  is_open = len(record['text']) <= _LONG_PROMPT
  text = html.escape(wording.visible(record['text'], keep='\n\t'))
  return (
    f'<details class="prompt"{" open" * is_open}><summary>Prompt, '
    f'{wording.count(size, "token")}</summary><pre dir="auto">{text}</pre>'
    '</details>\n'
  )


def _strip(row: int, records: list[Record]) -> str:
  if len(records) < 2:
    return ''
  tallest = max(record['committed'] for record in records)
  height, unit = 48, 48 / max(tallest, 1)
  bars = []
  for x, record in enumerate(records):
    has_next = int(record['next'] is not None)
    accepted = (record['committed'] - has_next) * unit
    top = height - accepted - has_next * unit
    k, count = wording.ordinal(record['iteration']), record['committed']
    bars.append(
      f'<a href="#{_row_id(row)}-i{k}" tabindex="-1"><title>Iteration {k}: '
      f'{wording.count(count, "token")}</title>'
      f'<rect class="track" x="{8 * x}" y="0" width="7" height="{height}"/>'
      f'<rect class="bar" x="{8 * x}" y="{height - accepted:.1f}" width="7" '
      f'height="{accepted:.1f}"/><rect class="bar-next" x="{8 * x}" '
      f'y="{top:.1f}" width="7" height="{has_next * unit:.1f}"/></a>'
    )
  width = 8 * len(records)
  return (
    f'<svg class="strip" width="{width}" height="{height}" '
    f'viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" '
    'aria-label="Tokens of each iteration, accepted ones below the '
    f'target&#39;s own">{"".join(bars)}</svg>\n'
  )


def _iteration(row: int, record: Record, is_first: bool) -> str:
  k = wording.ordinal(record['iteration'])
  name = f'{_row_id(row)}-i{k}'
  spans = ''.join(
    _token(token, is_first and i == 0)
    for i, token in enumerate(recording.as_read(record))
  )
  return (
    f'<li id="{name}"><a class="n" href="#{name}" tabindex="-1" '
    f'aria-label="iteration {k}">{k}</a><span class="c" title="tokens '
    f'committed, from length {record["start"]}">+{record["committed"]}</span>'
    f'<span class="b">{spans}</span></li>\n'
  )


def _token(token: Record, has_tab_stop: bool) -> str:
  verdict = token['verdict']
  element = _ELEMENTS.get(verdict, 'span')
  facts = {'p': token['p']}
  if verdict in recording.DRAFT_VERDICTS:
    facts |= {'q': token['q'], 'acceptance': token['accept_prob']}
    if token['u'] is not None:
      facts['u'] = token['u']
  lines = [
    f'“{wording.visible(token["text"])}” · id {token["token"]}',
    f'{verdict}: {wording.MEANINGS[verdict]}',
    *(f'{name} = {_number(value, ".4g")}' for name, value in facts.items()),
  ]
  title = html.escape('\n'.join(lines))
  tab_stop = ' tabindex="0"' * has_tab_stop
  return (
    f'<{element} class="{verdict}"{tab_stop} title="{title}">'
    f'{_shown(token["text"])}</{element}>'
  )


def _shown(text: str) -> str:
  if not text:
    return f'<i class="w">{wording.EMPTY}</i>'
  shown = html.escape(wording.visible(text, keep='\n\t'))
  tab = f'<i class="w">{wording.TAB}</i>\t'
  newline = f'<i class="w">{wording.NEWLINE}</i><br>'
  return shown.replace('\t', tab).replace('\n', newline)


def _row_name(row: int) -> str:
  return f'Row {wording.ordinal(row)}'


def _row_id(row: int) -> str:
  """Of its element; links to iterations begin with it."""
  return f'r{wording.ordinal(row)}'


def _rate_list(rates: list[float | None]) -> str:
  return ', '.join(f'{i} {_percent(r)}' for i, r in enumerate(rates, start=1))


def _number(value: float | None, form: str) -> str:
  return '–' if value is None else format(value, form)


_rate = functools.partial(_number, form='.2f')
_percent = functools.partial(_number, form='.0%')


def _escape(text: str) -> str:
  return html.escape(wording.visible(text))


def _digest(source: str) -> str:
  digest = hashlib.sha256(f'\n{source}'.encode()).digest()
  return f"'sha256-{base64.b64encode(digest).decode()}'"
