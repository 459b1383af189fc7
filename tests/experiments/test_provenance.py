"""Which code a figure is of."""

from experiments import provenance

CODE = '''
"""A page."""

def pay(price, tax=0):
  """What it costs."""
  # Taxes come last.
  if price < 0:
    raise ValueError(f'{price} is below 0')
  return price + tax
'''


def test_prose_makes_no_figure_old_and_code_does():
  digest = lambda text: provenance.digest({'a.py': text})
  same = (
    CODE.replace('What it costs', 'The sum'),
    CODE.replace('  # Taxes come last.\n', ''),
    CODE.replace('"""A page."""', ''),
    CODE.replace('is below 0', 'is less than 0'),
    CODE.replace('(price, tax=0)', '(price,\n    tax=0)'),
  )
  other = (
    CODE.replace('price + tax', 'price - tax'),
    CODE.replace('tax=0', 'tax=1'),
    CODE.replace('price < 0', 'price <= 0'),
    CODE.replace('pay', 'charge'),
  )
  assert {digest(text) for text in same} == {digest(CODE)}
  assert len({digest(text) for text in (CODE, *other)}) == 1 + len(other)
  assert provenance.digest({'b.py': CODE}) != digest(CODE)


def test_changes_are_named_by_the_part_that_has_them():
  now = provenance.code()
  assert provenance.changed_since(now) == []
  assert provenance.changed_since(None) is None
  drafters = dict(part.split() for part in now.split(', '))['drafters']
  assert provenance.changed_since(now.replace(drafters, '0')) == ['drafters']
  more = provenance.code('contrib')
  assert provenance.changed_since(more) == []
  contrib = dict(part.split() for part in more.split(', '))['contrib']
  assert provenance.changed_since(more.replace(contrib, '0')) == ['contrib']


def test_files_that_moved_are_named_by_their_first_path():
  root = provenance._PACKAGE
  for now, before in provenance._EARLIER.items():
    assert (root / now).is_file()
    assert not (root / before).exists()
  names = provenance._sources(provenance._PARTS['decoding'])
  assert {'keys.py', 'logits.py', 'distributions.py'} <= names.keys()
