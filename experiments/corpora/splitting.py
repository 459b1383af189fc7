"""Which examples are for training, validation and test."""

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

SPLITS = ('train', 'validation', 'test')
# In hundredths, of validation and of test. The rest is for training.
_HELD_OUT = (2, 2)

_Example = TypeVar('_Example', bound=Mapping[str, str])


def split_of(group: str) -> str:
  """Returns the split of a group of examples: a source package, or a file.

  It depends on the group's name alone, so that a newer archive, another corpus
  or another machine puts it into the same split.
  """
  digest = hashlib.sha256(group.encode('utf-8')).digest()
  position = int.from_bytes(digest[:8], 'big') * 100 >> 64
  validation, test = _HELD_OUT
  if position < test:
    return 'test'
  return 'validation' if position < test + validation else 'train'


def divide(
  examples: Iterable[_Example], *, key: str
) -> tuple[dict[str, list[_Example]], dict[str, int]]:
  """Divides examples by split, without repetitions.

  An example that was seen before is left out, in a split's own order. So is a
  held-out example whose text under `key` is in the training split, or, for
  test, in validation, whatever the rest of it says.

  Args:
    examples: texts by field; `group` is a field.
    key: the field that must not be shared between splits.

  Returns:
    Examples by split, in the order of `examples`, and how many were left out
    as 'repeated' and as 'in_another_split'.
  """
  splits: dict[str, list[_Example]] = {split: [] for split in SPLITS}
  for example in examples:
    splits[split_of(example['group'])].append(example)
  removed = {'repeated': 0, 'in_another_split': 0}
  seen_elsewhere: set[str] = set()
  for split, all_of_it in splits.items():
    seen: set[Hashable] = set()
    kept = []
    for example in all_of_it:
      texts = tuple(v for name, v in example.items() if name != 'group')
      if example[key] in seen_elsewhere:
        removed['in_another_split'] += 1
      elif texts in seen:
        removed['repeated'] += 1
      else:
        seen.add(texts)
        kept.append(example)
    seen_elsewhere.update(example[key] for example in kept)
    splits[split] = kept
  return splits, removed
