"""Prints what the tests marked `proof` measured, as tables.

`pytest -m proof` runs them and prints the tables after the summary; the exit
status is pytest's own, non-zero if a figure is not what it should be.
"""

import json

_PROPERTY = 'proof'


def record(record_property, table: str, **cells) -> None:
  """Adds a row to a table; call it before asserting anything about it."""
  record_property(_PROPERTY, json.dumps({'table': table, 'cells': cells}))


def pytest_terminal_summary(terminalreporter, config):
  if 'proof' not in (config.option.markexpr or ''):
    return
  tables: dict[str, list[dict[str, str]]] = {}
  for outcome in ('passed', 'failed'):
    for report in terminalreporter.getreports(outcome):
      for name, value in getattr(report, 'user_properties', ()):
        if name == _PROPERTY and report.when == 'call':
          row = json.loads(value)
          cells = {key: _show(cell) for key, cell in row['cells'].items()}
          tables.setdefault(row['table'], []).append(cells)
  for title in sorted(tables):
    terminalreporter.write_sep('=', title)
    for line in _lines(
      sorted(tables[title], key=lambda row: list(row.values()))
    ):
      terminalreporter.write_line(line)


def _show(cell) -> str:
  if isinstance(cell, float):
    return 'infinite' if cell == float('inf') else f'{cell:.4g}'
  return str(cell)


def _lines(rows: list[dict[str, str]]) -> list[str]:
  """A table in plain text, its columns aligned."""
  names = list(rows[0])
  columns = [[name] + [row.get(name, '') for row in rows] for name in names]
  widths = [max(map(len, column)) for column in columns]
  return [
    '  '.join(
      cell.ljust(width) for cell, width in zip(line, widths, strict=True)
    ).rstrip()
    for line in zip(*columns, strict=True)
  ]
