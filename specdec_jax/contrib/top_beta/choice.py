"""The relaxed rule of SpecDec, as a choice."""

import dataclasses
import functools

from specdec_jax.assembly.option_fields import option
from specdec_jax.assembly.rules import Judge, at_temperature_one, check_greedy
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.contrib.top_beta.rule import top_beta
from specdec_jax.launch.numbers import cost, positive_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopBeta:
  """`contrib.top_beta.rule`, which reads the target's distributions at
  temperature 1 and decodes greedily."""

  beta: int = option(
    3,
    "accept a drafted token only if it is among this number of the target's "
    'most likely tokens',
    type=positive_int,
  )
  tau: float = option(
    1.0,
    'and only if its log-probability is within this many nats of the most '
    "likely token's",
    type=cost,
  )

  def judge(self, sampling: TextSettings) -> Judge:
    check_greedy('top_beta', sampling)
    rule = functools.partial(top_beta, beta=self.beta, tau=self.tau)
    return Judge(
      'top_beta', at_temperature_one(sampling), rule, is_lossless=False
    )
