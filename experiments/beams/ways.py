"""Ways of searching with beams, and how close a search came to a tie."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import common
from experiments.beams import plain as reordering
from experiments.leviathan2023.pairs import Pair
from specdec_jax.assembly.drafters import (
  DrafterChoice,
  NoDrafter,
  PromptLookup,
)
from specdec_jax.base import Params, Prompt
from specdec_jax.contrib.beams import (
  beam_drafting,
  beam_search,
  speculative_beams,
)
from specdec_jax.contrib.beams.beam_search import BeamOutput
from specdec_jax.decoding import state as state_lib
from specdec_jax.sampling.logits import mask_padding

PLAIN, NONE = 'plain', 'one cache row, no draft'


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Way:
  """A compiled search.

  Attributes:
    name: in tables.
    gamma: levels of a draft, 0 for none.
    width: nodes of each, 0 for none.
    search: `(prompt) -> output`.
  """

  name: str
  gamma: int
  width: int
  search: Callable[[Prompt], BeamOutput]


def plain(pair: Pair, num_beams: int, alpha: float) -> Way:
  """Beam search that reorders K cache rows per example."""
  run = _jitted(reordering.generate, pair, num_beams, alpha)
  params = Params(pair.target.params)
  return Way(
    name=PLAIN, gamma=0, width=0, search=functools.partial(run, params)
  )


def speculative(
  pair: Pair,
  num_beams: int,
  alpha: float,
  choice: DrafterChoice,
  width: int | None = None,
) -> Way:
  """Speculative beam search with a choice of a drafter."""
  made = common.decoder(pair.chosen, choice, pair.params)
  drafter = beam_drafting.drafter(made, num_beams, width)
  run = _jitted(
    speculative_beams.generate,
    pair,
    num_beams,
    alpha,
    drafter=drafter,
    max_new_tokens=pair.kind.targets_length,
  )
  name = NONE
  if isinstance(choice, PromptLookup):
    name = 'copied'
  elif not isinstance(choice, NoDrafter):
    name = common.short(pair.draft_model.name)
  return Way(
    name=name,
    gamma=drafter.gamma,
    width=drafter.width if drafter.gamma else 0,
    search=functools.partial(run, made.params),
  )


def _jitted(
  generate: Callable[..., BeamOutput],
  pair: Pair,
  num_beams: int,
  alpha: float,
  **more: Any,
) -> Any:
  return jax.jit(
    functools.partial(
      generate,
      target=pair.model,
      num_beams=num_beams,
      alpha=alpha,
      max_len=pair.max_len,
      **_ids(pair),
      **more,
    )
  )


def _ids(pair: Pair) -> dict[str, Any]:
  vocabulary = pair.layout.vocabulary
  return {'eos_id': vocabulary.eos_ids, 'vocab_size': vocabulary.vocab_size}


def num_different(found: BeamOutput, expected: BeamOutput, row: int) -> int:
  """How many of a row's sequences are not those of another search."""
  same = [
    np.array_equal(found.tokens[row, k], expected.tokens[row, k])
    and bool(found.is_finished[row, k]) == bool(expected.is_finished[row, k])
    for k in range(expected.scores.shape[1])
  ]
  return len(same) - sum(same)


def smallest_gap(
  pair: Pair, prompt: Prompt, num_beams: int, alpha: float
) -> float:
  """The least difference that decided anything in plain beam search of one row:
  with logits that differ by more, another search may decide otherwise."""
  rules = beam_search.checked_rules(pair.model, num_beams, alpha, **_ids(pair))
  params = pair.target.params
  prompt = state_lib.checked(prompt, pair.max_len)
  state = reordering.init(
    Params(params),
    prompt,
    target=pair.model,
    num_beams=num_beams,
    max_len=pair.max_len,
  )
  look, step = _stepping(pair, rules)
  gaps = [np.inf]
  while bool(state.search.is_active.any()):
    logits, before = look(params, state), state.search
    state = step(params, state)
    gaps.append(_gap(before, logits, state.search, rules))
  return float(min(gaps))


@functools.cache
def _stepping(pair: Pair, rules: beam_search.Rules) -> tuple[Any, Any]:
  """Compiled: what a step of one row looks at, `[K, V]`, and the step."""

  def look(params, state):
    search = state.search
    last = beam_search.last_tokens(search.live, search.lengths)
    logits, _ = pair.model.extend(params, last.reshape(-1, 1), state.cache)
    return mask_padding(rules.vocab_size)(jax.nn.log_softmax(logits[:, 0]))

  step = functools.partial(reordering.step, target=pair.model, rules=rules)
  return jax.jit(look), jax.jit(step)


def _gap(
  before: beam_search.Search, logits: Any, after: Any, rules: Any
) -> float:
  """The least of the gaps between what a decision of one row takes and leaves:
  candidates, live sequences, the order of finished ones, and whether to end."""
  count = rules.num_beams
  scores = np.asarray(logits) + np.asarray(before.live_log_probs[0])[:, None]
  is_eos = np.isin(np.arange(scores.shape[1]), rules.eos_ids)
  gaps = []
  for values, number in (
    (scores, count * (1 + len(rules.eos_ids))),
    (scores[:, ~is_eos], count),
  ):
    best = np.sort(values, axis=None)[::-1]
    gaps.append(best[number - 1] - best[number])
  lengths = np.asarray(after.lengths)
  penalty = lambda at: float(
    beam_search.brevity_penalty(rules.alpha, jnp.asarray(at))
  )
  ended = scores[:, is_eos].reshape(-1) / penalty(lengths[0] - 1)
  finished = np.sort([*np.asarray(before.finished_scores[0]), *ended])[::-1]
  kept = finished[: count + 1]
  gaps += [*(kept[:-1] - kept[1:])[kept[:-1] > beam_search.NOTHING / 2]]
  bound = float(after.live_log_probs[0, -1]) / penalty(after.max_lengths[0])
  gaps.append(abs(float(after.finished_scores[0].min()) - bound))
  return float(min(gaps))


def choices(
  pair: Pair, gammas: Sequence[int], copied: int
) -> list[DrafterChoice]:
  """The drafters that are measured: none, the smaller model, and copies."""
  models = [dataclasses.replace(pair.draft, gamma=gamma) for gamma in gammas]
  return [NoDrafter(), *models, PromptLookup(gamma=copied)]
