"""A target, its drafters and the text that they are measured on."""

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import common
from experiments.leviathan2023 import paper
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DraftModel
from specdec_jax.assembly.drafters.choice import Target
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import Rule, SpeculativeSampling
from specdec_jax.base import Drafter, LanguageModel, Params, Prompt
from specdec_jax.checkpoints import pretrained
from specdec_jax.checkpoints.loading import LoadedModel
from specdec_jax.contrib.ngram import ngram_counts
from specdec_jax.contrib.ngram.drafter import NGramTable, ngram
from specdec_jax.infer import examples
from specdec_jax.infer.examples import Layout, Row
from specdec_jax.models import families
from specdec_jax.text import tasks
from specdec_jax.text.prompts import decoder_width

UNIGRAM, BIGRAM, TRAINED = 'unigram', 'bigram', 'trained'
DRAFTERS = (UNIGRAM, BIGRAM, TRAINED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """A task of ours, and the paper's that it stands beside.

  Attributes:
    target: the shipped model.
    drafter: likewise.
    corpus: its folder beneath what `python -m experiments.corpora` wrote.
    paper: the paper's task.
    inputs_length: most tokens read; of a text to continue, so many are given.
    targets_length: most tokens written.
    prefix: what is put before every input.
    is_text: whether the corpus is text to continue, under the key `text`.
  """

  target: str
  drafter: str
  corpus: str
  paper: str
  inputs_length: int
  targets_length: int
  prefix: str = ''
  is_text: bool = False


KINDS = {
  'ende': Kind(
    target='ende-mini',
    drafter='ende-nano',
    corpus='debian_ende',
    paper=paper.ENDE,
    inputs_length=64,
    targets_length=64,
  ),
  'synopsis': Kind(
    target='ende-mini',
    drafter='ende-nano',
    corpus='debian_synopsis',
    paper=paper.CNNDM,
    prefix='summarize: ',
    inputs_length=192,
    targets_length=32,
  ),
  'lm': Kind(
    target='lm-mini',
    drafter='lm-nano',
    corpus='debian_lm',
    paper=paper.LM1B,
    inputs_length=16,
    targets_length=64,
    is_text=True,
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dtypes:
  """What a pair computes in.

  Attributes:
    target: while it verifies.
    draft: the draft model.
    plain: what plain decoding may choose from.
  """

  target: str = 'float32'
  draft: str = 'float32'
  plain: Sequence[str] = ('float32',)

  def __str__(self) -> str:
    return f'target {self.target}, drafts {self.draft}'


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
  """What is measured.

  Attributes:
    name: of its kind.
    kind: see `KINDS`.
    chosen: the target by name.
    target: the same, loaded.
    draft: the trained drafter as a choice.
    draft_model: its model.
    plain: the target by the dtype that it may decode plainly in.
    layout: vocabulary, sizes of the target and buffers.
    rows: the test split.
    ngram_path: text that n-grams are counted in.
    ngram_examples: how many examples of it.
  """

  name: str
  kind: Kind
  chosen: Model
  target: LoadedModel
  draft: DraftModel
  draft_model: LoadedModel
  plain: Mapping[str, LoadedModel]
  layout: Layout
  rows: Sequence[Row]
  ngram_path: Path
  ngram_examples: int

  @property
  def model(self) -> LanguageModel:
    return families.language_model(self.target.config)

  @property
  def params(self) -> Params:
    """Of the target and of the trained drafter, as they are stored; the others
    have none."""
    return Params(self.target.params, self.draft_model.params)

  @functools.cached_property
  def joined(self) -> Params:
    """The same as the trained drafter takes them, of its draft vocabulary."""
    return decoder(self, 1, 0.0).params

  @property
  def max_len(self) -> int:
    kind = self.kind
    start = decoder_width(self.target.config, kind.inputs_length)
    return start + kind.targets_length

  def target_info(self, temperature: float) -> Target:
    """The target as a drafter sees it."""
    return common.target_info(self.target, temperature)

  @property
  def names(self) -> str:
    """Its models, for a table."""
    models = (self.target, self.draft_model)
    return ' with '.join(common.short(model.name) for model in models)


def shipped() -> list[str]:
  """The kinds whose models come with this package."""
  there = pretrained.names()
  return [
    name
    for name, kind in KINDS.items()
    if kind.target in there and kind.drafter in there
  ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """What `load_all` reads."""
  parser.add_argument(
    '--pair',
    action='append',
    metavar='KIND[:TARGET:DRAFTER:TASKFILE]',
    help=f'{", ".join(KINDS)}; without models those that are shipped, without '
    'a file the test split of --corpus. May be given several times (default: '
    f'what is shipped, {", ".join(shipped())})',
  )
  parser.add_argument(
    '--corpus',
    default='corpora/debian',
    metavar='DIR',
    help='what `python -m experiments.corpora debian` wrote',
  )


def load_all(
  args: argparse.Namespace, dtypes: Dtypes | None = None
) -> list[Pair]:
  """The pairs that were asked for; raises as `load` does."""
  ngram_examples = getattr(args, 'ngram_examples', 0)
  return [
    load(text, Path(args.corpus), ngram_examples, dtypes)
    for text in args.pair or shipped()
  ]


def load(
  text: str, corpus: Path, ngram_examples: int, dtypes: Dtypes | None = None
) -> Pair:
  """The pair of `--pair`.

  Args:
    text: `KIND`, or `KIND:TARGET:DRAFTER:TASKFILE` with parts left empty that
      are to be the shipped ones.
    corpus: what `python -m experiments.corpora debian` wrote.
    ngram_examples: how many examples n-grams are counted in.
    dtypes: float32 for all if None.

  Raises:
    ValueError: if there is no such kind, a model cannot be had, the two do not
      fit together, or there is no text.
  """
  name, *parts = text.split(':')
  # `random:t5_mini` has a colon of its own.
  given = list(_joined(parts))
  if name not in KINDS or len(given) > 3:
    raise ValueError(
      f'--pair {text}: expected KIND or KIND:TARGET:DRAFTER:TASKFILE, and KIND '
      f'one of {", ".join(KINDS)}'
    )
  kind = KINDS[name]
  given += [''] * (3 - len(given))
  path = Path(given[2] or corpus / kind.corpus / 'test.jsonl')
  task = tasks.find(
    str(path),
    inputs_field='text' if kind.is_text else 'inputs',
    prefix=kind.prefix,
  )
  dtypes = dtypes or Dtypes()
  target_name, draft_name = given[0] or kind.target, given[1] or kind.drafter
  chosen = Model(checkpoint=target_name, dtype=dtypes.target)
  own = Model(checkpoint=draft_name, dtype=dtypes.draft)
  draft = DraftModel(model=own, gamma=4)
  target = common.load(chosen)
  _check(target, draft, kind)
  layout = Layout(
    config=target.config,
    vocabulary=target.vocabulary,
    inputs_length=kind.inputs_length,
    targets_length=kind.targets_length,
  )
  rows = list(examples.encode(task, layout, 0, 1))
  if kind.is_text:
    # What is shorter has its end in the prompt.
    rows = [row for row in rows if row.num_cut]
  return Pair(
    name=name,
    kind=kind,
    chosen=chosen,
    target=target,
    draft=draft,
    draft_model=common.load(draft.model),
    plain={
      dtype: target
      if dtype == dtypes.target
      else common.load(dataclasses.replace(chosen, dtype=dtype))
      for dtype in dtypes.plain
    },
    layout=layout,
    rows=rows,
    ngram_path=path.with_name('train' + path.suffix),
    ngram_examples=ngram_examples,
  )


def _joined(parts: Sequence[str]) -> Iterator[str]:
  """`random` and the part after it, as one."""
  found = iter(parts)
  for part in found:
    yield f'{part}:{next(found, "")}' if part in ('random', 'hf') else part


def _check(target: LoadedModel, draft: DraftModel, kind: Kind) -> None:
  """Raises ValueError unless the models fit together and the kind."""
  if families.has_encoder(target.config) == kind.is_text:
    needed = 'a decoder-only model' if kind.is_text else 'an encoder-decoder'
    raise ValueError(f'{target.name}: {kind.corpus} needs {needed}')
  draft.make(common.target_info(target, 0.0), draft.length)


def drafter(
  pair: Pair, name: str, gamma: int, temperature: float, **options: Any
) -> Drafter:
  """A drafter of `DRAFTERS`; the trained one's drafts may end early by the
  `min_prob` of `drafters.DraftModel`."""
  target = pair.target_info(temperature)
  if name == TRAINED:
    choice = dataclasses.replace(pair.draft, gamma=gamma, **options)
    return choice.make(target, choice.length).drafter
  sampled = target.sampling.to_probs(target.vocab_size)
  return ngram(
    ngram_table(pair, 1 if name == UNIGRAM else 2),
    gamma=gamma,
    logits_to_probs=sampled if temperature else None,
  )


def decoder(
  pair: Pair,
  gamma: int,
  temperature: float,
  rule: Rule = SpeculativeSampling(),
) -> Decoder:
  """The trained drafter under a rule."""
  choice = dataclasses.replace(pair.draft, gamma=gamma)
  return common.decoder(
    pair.chosen, choice, pair.params, rule=rule, temperature=temperature
  )


@functools.cache
def ngram_table(pair: Pair, order: int) -> NGramTable:
  """Counts of what the training text has the target write."""
  return ngram_counts.estimate(
    _training_tokens(pair),
    vocab_size=pair.target.config.vocab_size,
    order=order,
  )


@functools.cache
def _training_tokens(pair: Pair) -> np.ndarray:
  path, vocabulary = pair.ngram_path, pair.layout.vocabulary
  if not path.is_file():
    raise ValueError(f'n-grams are counted in {path}, which is not there')
  task = tasks.find(
    str(path), inputs_field='text' if pair.kind.is_text else 'inputs'
  )
  stream: list[int] = []
  for i, example in enumerate(task.read()):
    if i == pair.ngram_examples:
      break
    text = example.inputs if pair.kind.is_text else example.targets
    stream += vocabulary.encode(text or '', add_special_tokens=False)
    stream += vocabulary.eos_ids[:1]
  return np.asarray(stream, np.int32)


def prompts(pair: Pair, count: int, batch_size: int) -> list[Prompt]:
  """Batches of `count` examples; the last one may have empty rows."""
  rows = common.spread(pair.rows, count)
  return [prompt for prompt, _ in common.batches(pair.layout, rows, batch_size)]


def named(pair: Pair) -> dict[str, str]:
  """The first cells of a row."""
  task = f'{pair.kind.corpus} (for {pair.kind.paper})'
  return {'task': task, 'models': pair.names}
